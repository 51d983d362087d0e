"""CPU processes that evaluate every checkpoint while training goes on."""
