"""The run directory: the state that survives every process of a job. Trainer and evaluators share only this.

layout           all files and folders, and who writes them: `RunDir`
durable          atomic, durable file writes, and a probe of the disk for the operations that they need
checkpoint       the manifest of a checkpoint: its files, checksums and position of training
lineage          which checkpoints count, and the rewinds after a useless loss
lease            expiring leases: who reads or evaluates which checkpoint
evaluations      the files of evaluations, the scores in them, and the rank of a checkpoint
catalog          readers of evaluation results and of the lineage, for every view
retention        which checkpoints may be deleted
ownership        whether a job resumes a run directory, replaces its content, or is refused
initial_weights  the files that `initialWeights` names
watched          checkpoints that a script writes in its own format
completeness     whether the format of such a checkpoint shows that it is complete
file_copy        copies of files that another process may write to
micro_batch      micro-batches that did not fit into memory
log              JSON-lines logs with one writer each
records          the typed records of these logs
provenance       the hash chain of what a run used and produced
ledger           the newest ledger that the coordinator recorded
archive          a run directory as a tar stream
training_log     facts that several readers take from training logs
timeline         the run as `tandem.wire.trace` reads it
bucket           a run in a bucket: names, writers, order
store            an object store's operations and guarantees
upload           the process that brings a run into its bucket
download         gets a run from its bucket
fetch            reads one object in a process of its own
sync             the exchange of a pod's run directory through the bucket
sync_service     its process
sync_client      requests to that process
sync_state       what was equal after an exchange
bundles          copies of many small files in a few objects
bucket_usage     counts of requests
code             the packed code of a job, and the processes that work in it
wrong_samples    pictures of misclassified samples
tensor_header    the header of a safetensors file
against_base     scores beside those of the base model
"""
