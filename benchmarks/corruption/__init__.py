"""Wrong numbers that are planted, and whether each is named: mutants, __main__."""
