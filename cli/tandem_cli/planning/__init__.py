"""Which strategy fits a device, and what a step takes: the formulas of `tandem plan`. Pure."""
