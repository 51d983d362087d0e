"""The coordinator: one small process per job that alone decides the membership of the training group."""
