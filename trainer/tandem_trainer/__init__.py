"""The elastic trainer: rendezvous handler, loop, models, data, checkpoints.

train                 the training loop of a task, from top to bottom
elastic_run           one generation: restore, the work after each step, saves, leaving
task                  the interface of a task
image_classification  the built-in task with images
causal_lm             the built-in task with text
language              fine-tuning of pretrained language models
task_check            checks a task before anything starts
session               `Session`: your own training loop
session_data          its data
session_loop          its steps
session_regroup       its steps in another group
session_settings      its checkpoint settings
step_log              `tandem.log` of a script without a session
adapters              the loops of other libraries
strategies            ddp, fsdp, pipeline and others
data                  data sets, and the order of samples
batch                 the samples of one step
models                the built-in models
checkpoint            writes, verifies and restores checkpoints
save_interval         the interval between saves
continuation          a start from the state that ranks hold
initial_weights       a start from other weights
export                weights as one file
optimizers            optimizers that a job can name
adamw8bit             AdamW with moments of 8 bits
sharded_muon          Muon for split matrices
casts                 copies of parameters in a lower precision
micro_batch           micro-batches that do not fit into memory
agent                 the process that starts and watches ranks
pulse                 the channel between a rank and its agent
rank_context          a rank's place in the job, and the request to save and leave
process_group         the ranks of a group, and their collectives
group_model           a session's model in one group after another
regroup               a rank goes on in the next group
connections           TCP connections of a group
agreement             settings and data that ranks must share
gradient_check        gradients of the same samples, compared
corruption            wrong numbers that comparisons find
loss_spikes           losses that lead to a rewind
score_watch           `runPolicy.stopWhen`
sample_audit          whether each sample was taken once
failure               the error of a rank, as its agent reports it
ending                the exit code of a rank
trouble               problems that did not end a rank
stacks                stacks of a rank that hangs
inspection            what ranks are doing now
debugger              a debugger that attaches to a rank
meter                 time, throughput, losses
step_trace            a trace of a few steps
footprint             memory and operations of a step
stage_footprint       the same for the stages of a pipeline
gpu                   a GPU as NVML sees it
machine               what the bits of a step may depend on
malloc                malloc settings
open_files            files that a script left open
time_slices           precedence of gloo's threads
uncompiled            functions that torch.compile leaves as they are
"""
