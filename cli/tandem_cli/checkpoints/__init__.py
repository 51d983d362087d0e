"""The implementation of `tandem checkpoints`: list, verify, compare, export and delete the checkpoints of a run.

    inventory     a run directory -> what is there, as frozen values; writes nothing, holds no lease
    choice        the checkpoint that a word of the user's means
    chunks        a file of a checkpoint, read piece by piece, nothing used before its checksum was compared
    verification  every byte of a checkpoint against its checksums
    comparison    what differs between the files of two checkpoints (needs numpy)
    exporting     what an exported copy is called, where it goes, and what its config.json says
    copying       writing it (torch does, in a process of its own)
    pruning       what may be deleted, and deleting it while the run goes on
    columns       rows that fit a terminal's width
    listing       all checkpoints as a table
    description   one checkpoint in words; what verifying found, and what would be deleted
    contrast      two checkpoints side by side

Deciding functions take values and return values; `inventory`, `chunks`, `copying` and `pruning` touch the disk.
"""
