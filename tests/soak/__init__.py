"""Random faults against one job, everything checked after each. See docs/development/benchmarks.md."""
