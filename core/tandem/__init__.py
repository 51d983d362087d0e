"""What every part of Tandem shares; imports neither torch nor kopf nor kubernetes."""
