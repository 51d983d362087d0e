"""The formulas of `tandem plan`: which strategies fit a device, and the time of a step. Pure."""
