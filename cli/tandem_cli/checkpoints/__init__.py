"""The implementation of `tandem checkpoints`: list, verify, compare, export and delete the checkpoints of a run.

    inventory       a run directory -> its checkpoints as frozen values; writes nothing, holds no lease
    selector        resolves what the user wrote to a checkpoint
    listing         all checkpoints as a table or JSON
    description     checkpoints as text; results of verification; the plan of pruning
    verification    every byte of a checkpoint against its checksums, chunk by chunk
    manifest_diff   the differences between two checkpoints, from their manifests
    tensor_diff     the differences between their tensors (needs numpy)
    hub             a checkpoint in a repository of a hub
    weights_export  an exported copy: its name, its destination, its config.json (torch writes it, in another process)
    pruning         what may be deleted, and its deletion during the run

Deciding functions take values and return values; `inventory`, `verification`, `weights_export` and `pruning` use the
disk.
"""
