"""The kopf operator that turns DistributedTrainingJob resources into pods."""
