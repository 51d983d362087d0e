"""The evaluators: processes that evaluate every checkpoint during training, on CPUs or spare GPUs.

loop           survey, choose, claim, evaluate, publish
survey         which checkpoints exist, and how far each is evaluated
choice         what to do next
claim          the claim on one shard
evaluation     the evaluation of one shard
scoring        the interface of the ways to evaluate
program        `evaluators.command`
task_program   tasks of the user's own
harness        lm-evaluation-harness
result         results of a shard, and merged ones
publication    the files that are written
gallery        pictures of misclassified samples
watch          checkpoints in a script's own format
base_model     the base model of a fine-tuning, as a checkpoint
preparation    the process's GPUs, the job's code, and its way to score
device         the device that a built-in model stays on
crew           several evaluator processes in one pod
once           evaluates again without recording
evaluator_log  logs
"""
