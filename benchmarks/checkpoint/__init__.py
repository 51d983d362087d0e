"""What a checkpoint costs training, Tandem beside what else there is. See docs/checkpoint-cost.md."""
