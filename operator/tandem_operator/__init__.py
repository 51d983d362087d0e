"""The kopf operator that turns DistributedTrainingJob resources into pods.

handlers          what kopf calls
controller        the shell: reads, calls `reconcile`, carries out the plan
reconcile         which objects of a job to create and delete
plan              inputs and result of `reconcile`
lifecycle         whether a job trains, drains, is suspended, or ends
replicas          which pods of a role to create and delete
stand_ins         evaluators on CPUs while others wait for GPUs
pods              containers and security settings of each role
pod_starts        why a pod does not start
pod_ends          what the end of a pod leads to
objects           the manifests that are sent
observed          the facts of objects that decisions depend on
reporting         the status of a job, its conditions, and Events
reasons           problems of a job, and replaced pods (words: tandem.wire.reasons)
retry             retries of a failed job
coordinators      status from coordinators, targets to them
liveness          coordinators that do not answer
tokens            the token of each job
job_objects       parsing of a job's object
job_memory        per-job memory between reconciles
job_queue         the Workloads of a job, compared with what it needs
workloads         Kueue Workloads
pod_groups        Kueue pod groups
queueing          ResourceFlavors, PriorityClasses, and the use of queues, as the cluster tells
queue_usage       who has the quota that a job waits for
gang_deadlock     jobs that block each other
claimants         jobs that are starved, or have backed off
workqueue         which jobs to reconcile, and when
informer          the cache of objects
bounded           bounds on API objects
api               requests to the API server
kinds             kinds of objects, and their API paths
names             names and labels of a job's objects
leader            leader election
rbac              the operator's permissions
operator_metrics  its metrics and probes (names: tandem.wire.metrics)
options           its command line
"""
