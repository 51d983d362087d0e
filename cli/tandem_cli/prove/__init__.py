"""`tandem prove`: verifies the provenance of a run, and takes some of its steps again.

files    the files of a run beside its chain
window   which steps can be taken again, and from which checkpoint
replay   takes them again in a run directory of its own, and compares
"""
