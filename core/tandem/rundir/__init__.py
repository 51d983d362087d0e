"""The run directory: the state that survives every process of a job. Trainer and evaluators share only this.

layout       which files there are, and who writes them: `RunDir`
durable      files that survive a power cut and are never seen half-written
checkpoint   the manifest of a checkpoint: what belongs to it, and how to know that it is whole
lineage      which checkpoints count
rewind       what was decided when the loss became useless
lease        who reads or evaluates what, until when
evaluations  the files of evaluations, and how far they say that one is
ranking      which of several evaluated checkpoints is the best
retention    which checkpoints may be deleted
ownership    whose a run directory is when a job comes to it
difference   in what two jobs differ, so far as one must not go on with what the other has saved
probe        whether a disk can do what is asked of it
"""
