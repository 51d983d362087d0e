"""Recovery from faults, Tandem beside plain torchrun, in network namespaces of one machine.

See docs/development/benchmarks.md.
"""
