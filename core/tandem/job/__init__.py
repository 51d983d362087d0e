"""The DistributedTrainingJob: what a user writes, and what it says of tasks, strategies and pods.

resource             the custom resource: its fields, defaults, rules and documentation
trainer              `spec.trainer`: a task, or a command
storage              `checkpoint.storage`: a volume, a bucket, or both
stop_when            `runPolicy.stopWhen`
sweep                a sweep: one job with several settings
adapter_options      which options of other libraries are supported
manifest             YAML with jobs: reading, `--set`, errors with their position
tasks                the built-in tasks, the loop, and their settings
causal_lm            the parameters of the task `causal-lm`
language_evaluation  `evaluators.generate` and `evaluators.harness`
architectures        names and shapes of the built-in models' tensors
datasets             downloaded data sets, and the IDX format
strategies           constraints of a parallel strategy on workers and micro-batches
footprint            memory and operations of a step: the request of `tandem plan`, and its answer
pod_template         resource quantities, and templates that are merged over the operator's pods
variables            environment variables of the job's processes
tracking             MLflow: its fields, and the address of its server
labels               names and labels of the job's objects on a cluster
secrecy              secrets in manifests: detection and removal
"""
