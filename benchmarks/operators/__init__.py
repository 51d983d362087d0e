"""Cost and speed of the operator, on a real API server: `python -m benchmarks.operators`.

The folder is not called `operator`: scripts beside it would find it instead of the standard library's module.
"""
