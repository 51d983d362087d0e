"""The checkpoints of a run, for people who keep a cluster: what is behind `tandem checkpoints`.

    entry         one checkpoint and a whole run's, as frozen values
    inventory     a run directory -> `entry.Inventory`; writes nothing, holds no lease
    choice        the checkpoint that a word of the user's means
    chunks        a file of a checkpoint, read piece by piece, nothing used before its checksum was compared
    verification  every byte of a checkpoint against its checksums
    tensors       the tensors of a safetensors file as numbers (needs numpy)
    comparison    what differs between the files of two checkpoints (needs numpy)
    difference    the same as values
    naming        names of exported files, made from a pattern
    exporting     where an exported copy goes, and what its config.json says
    copying       writing it (torch does, in a process of its own)
    pruning       what may be deleted, and deleting it while the run goes on
    columns       rows that fit a terminal's width
    listing       all checkpoints as a table
    story         one checkpoint in words
    contrast      two checkpoints side by side
    telling       what verifying found, and what would be deleted

Deciding functions take values and return values; `inventory`, `chunks`, `copying` and `pruning` touch the disk.
"""
