"""One small process per job that alone decides who is in the training group."""
