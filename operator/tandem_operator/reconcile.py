"""Reconciles one job: a pure function of the job, its objects, and its coordinator's answer.

The objects of a job NAME (tandem_operator.names shortens long names):

    Secret NAME-token                   the token (tandem_operator.tokens), created and never read; owned by the job
    ConfigMap NAME-job                  the resolved job, which the coordinator writes into the run directory; owned
    PersistentVolumeClaim
      NAME-checkpoints                  unless the job names a claim or its pods share no directory; owned only if
                                        storage.retain is false
    Service NAME-coordinator            the coordinator's address; owned
    NetworkPolicy NAME-network          who may reach the pods, if the operator is configured to restrict that; owned
    Workload NAME-queue-SLOT            the quota of a queued job's workers (tandem_operator.workloads); owned
    Pod NAME-coordinator-0-RANDOM       the coordinator; owned, and replaced by tandem_operator.replicas
    Pod NAME-worker-INDEX-RANDOM        the workers, one for each replica; the same
    Pod NAME-evaluator-INDEX-RANDOM     the evaluators; the same

All carry the label tandem.dev/job, by which they are found. Pods also carry their role and their index as labels, and
annotations count the failures before them. Every object but pods carries a hash of the manifest that it was written
from: it is written again only when that hash differs, and not because Kubernetes filled in a default.

Who writes what: the operator alone writes these objects and `status`; the user writes `spec`; the state of training is
in the run directory, which only the coordinator, trainers and evaluators see. The operator remembers nothing in memory
that it could not find again: the phase of a job is in `status.phase` and its conditions, and the failures of a replica
are counted in its pods.

    Pending ─► Starting ─► Running ◄─► Restarting        reported by the coordinator
       ▲                      │
       └── Suspended ◄────────┤                          runPolicy.suspend
                              ├─► Draining ─► Succeeded  training is complete; evaluators finish
                              └─► Failed                 reported by the coordinator, or decided here

Workers are created together with the coordinator, as soon as its Service has an address: their images are pulled and
torch is imported while it starts. Agents wait until it has recorded this very job (tandem.processes.launch), whatever
an earlier one has left on the volume. Where the coordinator does not come up (the volume belongs to another training or
does not mount, its image is missing, a quota refuses it), the workers would hold GPUs for nothing: they are deleted
until it has answered.

`reconcile` runs after every change and every few seconds, and only compares. Whichever event is lost, doubled or late,
and wherever an operator died between two writes, the next call finds what is missing.

Rejected: a chain of handlers, each of which does the next step after an event (dask-kubernetes: an event lost, or
two at once, and the chain hangs); finalizers (a job could not be deleted while the operator is away; owner references
do it); state in the operator's memory or in a ConfigMap of its own (it would have to be kept true over restarts, which
the objects are by themselves); server-side apply without the hash (a write for every object each time).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.formatting import parse_rfc3339
from tandem.job.resource import DistributedTrainingJob
from tandem.model import MAX_TIMESTAMP
from tandem.processes import launch
from tandem.wire.status import Snapshot, Status
from tandem_operator import kinds, names, objects, pod_starts, pods, replicas
from tandem_operator.gang_deadlock import backoff_ends
from tandem_operator.job_memory import delete_key, replica_key, retry_time, role_retry_time, terminate_key, write_key
from tandem_operator.job_queue import job_queue, new_workloads, workload_changes, workload_plan
from tandem_operator.kinds import Kind
from tandem_operator.lifecycle import Lifecycle, deadline, drain_deadline, is_initialized, lifecycle_of, script_restarts
from tandem_operator.objects import Manifest, Template, Volumes
from tandem_operator.observed import BROKEN_WAITING, NO_CONFIGURATION, KubeObject, Pod, PodGroup, Service, VolumeClaim
from tandem_operator.plan import ReconcileInputs, ReconcilePlan
from tandem_operator.pod_groups import group_of
from tandem_operator.pods import Images
from tandem_operator.reasons import (
    PLACING_SECONDS,
    all_pods,
    backoff_for_rival,
    fallback_events,
    name_taken,
    pod_problems,
    replacements,
)
from tandem_operator.replicas import ReplicaPolicy, RolePlan
from tandem_operator.reporting import JobProblem, events_between, status
from tandem_operator.retry import incarnation
from tandem_operator.stand_ins import have_evaluated, stand_ins
from tandem_operator.workloads import JobQueue, Need, queue_problem, queue_view

POLL_INTERVAL_SECONDS = 1.0, 5.0
"""Interval between two polls of a coordinator: with few jobs, and with many."""
POLLS_PER_SECOND = 50.0
"""Polls a second over all jobs, until the longest interval is reached. One reconcile takes a millisecond or two."""
STATUS_INTERVAL_SECONDS = 10.0, 20.0
"""Interval between two writes of a status in which only step, loss and the like have changed: with few such jobs, and
with many."""
STATUS_WRITES_PER_SECOND = 50.0
"""Writes of such statuses a second over all jobs, until the longest interval is reached."""
NO_COORDINATOR_SECONDS = 30.0
"""Interval between two reconciles of a job whose coordinator has no pod that could answer: watches report pods."""
TRANSITION_SECONDS = 1.0
"""Interval between two reconciles of a job that is about to change its phase, with few jobs."""
SILENCE_POLL_SECONDS = 0.2
"""Interval between two polls of a coordinator that has answered, is ready, and has just stopped answering."""
COORDINATOR_START_SECONDS = 300.0
"""Maximum time until the coordinator's own container starts, image pull, volume mount and init containers included.
After it the workers are deleted, so that they do not hold GPUs."""
WORKER_GRACE_SECONDS = 30.0
"""Grace period of workers after the job ends."""
DEFAULT_VOLUMES = Volumes()
"""Claims of the cluster's default storage class, which many nodes can mount at once."""


def reconcile(inputs: ReconcileInputs, images: Images, volumes: Volumes = DEFAULT_VOLUMES) -> ReconcilePlan:
    """Compute what to do about a job.

    Args:
        volumes: what claims ask for where the job does not specify it.
    """
    job, now = inputs.job, inputs.now
    workers, evaluators = inputs.pods(names.WORKER), inputs.pods(names.EVALUATOR)

    # Step 1: the objects that pods read or mount. New pods must wait while one of them cannot be written.
    required = _required_objects(inputs)
    colocated = objects.is_on_one_node(job, volumes)
    endpoint, own_images, images = _endpoint(inputs), images, _pinned_images(images, workers)

    # Step 2: the workers. This plan comes before the lifecycle, which has to know the replicas that cannot start.
    queue = job_queue(inputs, workers)
    group = None if queue is not None else group_of(job, workers, _group_entropy(inputs))
    worker_policy = ReplicaPolicy(
        indices=range(job.spec.workers.replicas) if queue is None else queue.admitted,
        # While the Service is missing there is no better address, so no worker is replaced because of its own.
        is_current=lambda pod: pod.endpoint == (endpoint or pod.endpoint) and pod.group == group and not pod.abandoned,
        proven=_progressed_workers(inputs.snapshot),
        completes=job.spec.trainer.command is not None and not script_restarts(inputs.snapshot),
        # Kueue counts a pod until it has ended, and deletes the surplus of a group.
        overlaps=group is None,
        not_before=_not_before(inputs, names.WORKER, required),
    )
    worker_plan = replicas.plan(workers, worker_policy, now)

    # Step 3: the stage of the job, which decides which pods it needs at all.
    lifecycle = lifecycle_of(job, inputs.snapshot, inputs.nobody_trains, workers, worker_plan, evaluators, inputs.now)
    has_ended, trains = lifecycle.stage == "end", lifecycle.stage == "train"
    coordinator_plan = _coordinator_plan(inputs, images, colocated, lifecycle, workers, required)
    evaluator_plan = _evaluator_plan(inputs, own_images, colocated, lifecycle, evaluators, required)

    # Step 4: pods to delete. Those whose deletion was refused a moment ago are filtered out when the plan is made.
    delete: list[KubeObject] = [
        candidate
        for candidate in (
            *_obsolete_workers(inputs, lifecycle, workers, worker_plan),
            *evaluator_plan.delete,
            *coordinator_plan.delete,
            *_obsolete_objects(inputs),
        )
        if not candidate.deleting
    ]

    # Step 5: pods to create. Workers without a coordinator, or in the way of an older job, only hold GPUs: then those
    # that exist are deleted and no new ones are created.
    create_pods = _new_coordinators(inputs, images, colocated, coordinator_plan)
    with_token = list(
        replacements(
            names.COORDINATOR,
            inputs.pods(names.COORDINATOR),
            coordinator_plan.create,
            inputs.unresponsive_coordinator,
        )
    )
    backoff = backoff_for_rival(inputs, lifecycle, workers)
    holds_back = backoff is not None or (trains and _coordinator_fails(inputs))
    need: Need = "none" if not trains else "later" if holds_back else "now"
    queue_plan = workload_plan(inputs, queue, workers, need)
    delete += queue_plan.delete
    if holds_back:
        scheduled = {candidate.uid for candidate in delete}
        delete += [pod for pod in workers if pod.live and pod.uid not in scheduled]
    elif trains and endpoint:
        create_pods += _new_workers(inputs, images, endpoint, queue or group, worker_plan)
        with_token += replacements(names.WORKER, workers, worker_plan.create)
    # A quota that has room for some pods has it for the coordinator, without which nothing starts, and then for
    # workers. So evaluators come last.
    create_pods += _new_evaluators(inputs, own_images, colocated, evaluator_plan)
    if _is_refused(inputs, names.COORDINATOR):
        # While the coordinator is refused, any other pod would take the room that it waits for.
        create_pods = [pod for pod in create_pods if pod["metadata"]["labels"][names.ROLE] == names.COORDINATOR]

    # Step 6: terminate pods whose own container has ended, and failed starts. They stay for their logs.
    terminate = tuple(
        pod
        for pod in all_pods(inputs)
        if (pod.lingers or (not has_ended and pod_starts.is_failed(pod, inputs.starts.get(pod.uid), now)))
        and not pod.deleting
        and retry_time(inputs.attempts, terminate_key(pod.name), now) is None
    )

    # Step 7: the status, from everything that keeps the job from running, the most important problem first.
    plans = {names.WORKER: worker_plan, names.EVALUATOR: evaluator_plan, names.COORDINATOR: coordinator_plan}
    done = (*required.resolved, *(write_key(kinds.WORKLOAD, name) for name in queue_plan.unchanged))
    resolved = _resolved_attempts(inputs, lifecycle, done, plans)
    refused = [
        attempt.trouble
        for key, attempt in inputs.attempts.items()
        if attempt.trouble is not None and key not in resolved
    ]
    waits = queue_problem(queue) if queue is not None and trains else None
    problems = [
        *([backoff] if backoff is not None else []),
        *([] if has_ended else required.conflicts),
        *refused,
        *([] if has_ended else pod_problems(inputs)),
        *([waits] if waits is not None else []),
    ]
    new_status = status(job, inputs.generation, inputs.snapshot, lifecycle, workers, problems, now)
    new_status = new_status.model_copy(update={"queue": queue_view(job, queue, trains, now, inputs.queue_usage)})
    events = (
        *replacements(names.EVALUATOR, evaluators, evaluator_plan.create),
        *fallback_events(evaluators, evaluator_plan.create, job.spec.evaluation),
        *with_token,
        *events_between(job.status or Status(), new_status, inputs.snapshot),
    )

    # Step 8: after the end, the job itself expires; until then a timer covers whatever no watch reports.
    expiry = _expiry(job, new_status)
    return ReconcilePlan(
        # Replacements read the Secret, too, and somebody may have deleted it since the first pods were created.
        needs_token=not has_ended and (required.needs_token or bool(with_token)),
        create=() if has_ended else tuple(objects.completed(manifest, job, volumes) for manifest in required.create),
        update=() if has_ended else required.update,
        create_pods=tuple(create_pods),
        create_workloads=new_workloads(inputs, queue, queue_plan),
        write_workloads=workload_changes(inputs, queue_plan),
        delete=tuple(
            candidate for candidate in delete if retry_time(inputs.attempts, delete_key(candidate.name), now) is None
        ),
        terminate=terminate,
        waits_in=(job.spec.run_policy.queue_name or "") if queue is not None and trains and queue.waiting else "",
        target=_target(inputs, lifecycle, workers, worker_plan),
        status=new_status,
        events=events,
        expired=expiry is not None and now >= expiry,
        resolved=resolved,
        requeue_after=_requeue_after(inputs, lifecycle, new_status, plans.values(), expiry),
    )


def _progressed_workers(snapshot: Snapshot | None) -> set[str]:
    """Names of workers whose group has made steps, as the coordinator reports: they can start, so another cause ends
    them. A coordinator of the previous version reports only that they were in a group."""
    views = [] if snapshot is None else snapshot.generations
    return {name for view in views if view.progressed is not False for name in view.members}


def _group_entropy(inputs: ReconcileInputs) -> str:
    """Entropy for the name of a new group of queued workers: that of a worker that may exist already, else a fresh
    one."""
    unanswered = (entropy for key, entropy in inputs.unanswered.items() if key.startswith(names.WORKER))
    return next(unanswered, inputs.entropy)


def _pinned_images(images: Images, workers: Sequence[Pod]) -> Images:
    """The images of new pods, with the trainer image of the workers that run: all ranks of a group have one version,
    also after the operator got another one. An image that no worker has started yet can be replaced."""
    running = [pod for pod in workers if pod.live and pod.image and pod.started is not None and pod.finished is None]
    return replace(images, trainer=running[0].image) if running else images


def _endpoint(inputs: ReconcileInputs) -> str:
    """The coordinator's host:port, empty until its Service has an address."""
    service = inputs.children.get(kinds.SERVICE, names.coordinator(inputs.job.metadata.name))
    if not isinstance(service, Service) or service.owner != inputs.uid or not service.address:
        return ""
    return launch.endpoint(service.address, pods.PORT)


def _is_initialized(inputs: ReconcileInputs) -> bool:
    return inputs.snapshot is not None or is_initialized(inputs.job.status)


def _needs_token(inputs: ReconcileInputs) -> bool:
    """Whether the Secret was not created yet, or a pod cannot start because somebody has deleted it."""
    # The operator may not read Secrets. The ConfigMap is written next, so its existence proves the Secret.
    job_file = inputs.children.get(kinds.CONFIG_MAP, names.job_file(inputs.job.metadata.name))
    if job_file is None or job_file.owner != inputs.uid:
        return True
    name = names.token(inputs.job.metadata.name)
    waiting = (pod for pod in all_pods(inputs) if pod.waiting == NO_CONFIGURATION and not pod.deleting)
    return any(f'"{name}"' in pod.message for pod in waiting)


def _coordinator_fails(inputs: ReconcileInputs) -> bool:
    """Whether the coordinator has never answered, and its pod's state says that it will not soon."""
    if _is_initialized(inputs):
        return False
    starting = [pod for pod in inputs.pods(names.COORDINATOR) if pod.live and not pod.ready]
    return _is_refused(inputs, names.COORDINATOR) or any(
        pod.restarts > 0
        or pod.waiting in BROKEN_WAITING
        or (pod.started is None and inputs.now - pod.created >= COORDINATOR_START_SECONDS)
        for pod in starting
    )


def _is_refused(inputs: ReconcileInputs, role: str) -> bool:
    """Whether the API server refused the first pod of a role at the last attempt."""
    attempt = inputs.attempts.get(replica_key(role, 0))
    return attempt is not None and attempt.trouble is not None


@dataclass(frozen=True)
class _RequiredObjects:
    """The objects that a job needs besides its pods, compared with those that exist."""

    create: tuple[Manifest, ...] = ()
    update: tuple[Manifest, ...] = ()
    needs_token: bool = False
    """The Secret has to be created."""
    conflicts: tuple[JobProblem, ...] = ()
    """Names that objects of somebody else have."""
    resolved: tuple[str, ...] = ()
    """Keys of attempts whose object is as it should be."""
    is_blocked: bool = False
    """An object that pods read or mount cannot be written now: new pods would wait for it, or start with the old
    job."""


def _required_objects(inputs: ReconcileInputs) -> _RequiredObjects:
    """Compare the job's objects with what they should be."""
    create: list[Manifest] = []
    update: list[Manifest] = []
    conflicts: list[JobProblem] = []
    resolved: list[str] = []
    secret_key = write_key(kinds.SECRET, names.token(inputs.job.metadata.name))
    needs_token = _needs_token(inputs)
    if needs_token and retry_time(inputs.attempts, secret_key, inputs.now) is not None:
        # The existence of the other objects proves that of the Secret, so none may be created before it.
        return _RequiredObjects(is_blocked=True)
    is_blocked = False
    for manifest in _desired_objects(inputs):
        kind, name = _kind_and_name(manifest)
        key, existing = write_key(kind, name), inputs.children.get(kind, name)
        waits = retry_time(inputs.attempts, key, inputs.now) is not None
        if existing is not None and not is_owned(existing, manifest):
            # Somebody else's object is never touched; the user has to rename one of the two.
            conflicts.append(name_taken(existing, manifest["metadata"]["namespace"], inputs.job.metadata.name))
            waits = True
        elif existing is not None and (existing.deleting or existing.applied == objects.applied(manifest)):
            resolved.append(key)
            waits = False
        elif existing is None and not waits:
            create.append(manifest)
        elif existing is not None and not waits:
            # The UID keeps the API server from creating an object that is gone, or changing one that has taken its
            # name.
            patch = {**manifest, "metadata": {**manifest["metadata"], "uid": existing.uid}}
            if kind is kinds.CLAIM and not existing.applied:
                # Somebody else has created it: it is labelled as the job's, and its spec stays as it is.
                patch.pop("spec")
            elif kind is kinds.CLAIM and inputs.job.spec.checkpoint.storage.size is None:
                # It has the size that was the operator's default then, and a claim's size cannot follow a new default.
                patch["spec"] = {field: value for field, value in manifest["spec"].items() if field != "resources"}
            update.append(patch)
        # Workers wait for the Service's address; no other pod needs it. A claim is usable as it is, even where a change
        # of it is refused.
        usable = existing is not None and is_owned(existing, manifest) and kind is kinds.CLAIM
        is_blocked |= waits and kind is not kinds.SERVICE and not usable
    resolved += [] if needs_token else [secret_key]
    return _RequiredObjects(
        tuple(create), tuple(update), needs_token, tuple(conflicts), tuple(resolved), is_blocked=is_blocked
    )


def _not_before(inputs: ReconcileInputs, role: str, required: _RequiredObjects) -> Callable[[int], float | None]:
    """Earliest time at which a replica's pod is created, by its index, seconds since the epoch; None: at any time."""

    role_time = role_retry_time(inputs.attempts, role, inputs.now)

    def earliest(index: int) -> float | None:
        due = retry_time(inputs.attempts, replica_key(role, index), inputs.now) or role_time
        return max(due or 0.0, inputs.now + NO_COORDINATOR_SECONDS) if required.is_blocked else due

    return earliest


def _resolved_attempts(
    inputs: ReconcileInputs, lifecycle: Lifecycle, done: Iterable[str], plans: Mapping[str, RolePlan]
) -> frozenset[str]:
    """Keys of attempts that succeeded or are obsolete."""
    if not inputs.attempts:
        return frozenset()
    running = {replica_key(role, index) for role, plan in plans.items() for index in plan.running}
    relevant = {key(pod.name) for pod in all_pods(inputs) for key in (delete_key, terminate_key)}
    removable = (*_obsolete_objects(inputs), *inputs.children.workloads(inputs.uid))
    relevant |= {delete_key(obsolete.name) for obsolete in removable}
    if lifecycle.stage != "end":
        counts = {
            names.WORKER: inputs.job.spec.workers.replicas if lifecycle.stage == "train" else 0,
            names.EVALUATOR: inputs.job.spec.evaluation.replicas,
            names.COORDINATOR: 1,
        }
        relevant |= {replica_key(role, index) for role, count in counts.items() for index in range(count)}
        relevant |= {write_key(*_kind_and_name(manifest)) for manifest in _desired_objects(inputs)}
        relevant |= {write_key(kinds.WORKLOAD, name) for name in names.workloads(inputs.job.metadata.name)}
        relevant.add(write_key(kinds.SECRET, names.token(inputs.job.metadata.name)))
    return frozenset({key for key in inputs.attempts if key not in relevant} | running.union(done))


def _new_coordinators(inputs: ReconcileInputs, images: Images, colocated: bool, plan: RolePlan) -> list[Manifest]:
    return [
        objects.coordinator(
            inputs.job,
            inputs.uid,
            _coordinator_template(inputs, images, colocated),
            new,
            inputs.entropy_of(names.COORDINATOR, new.index),
        )
        for new in plan.create
    ]


def _new_workers(
    inputs: ReconcileInputs, images: Images, endpoint: str, queued: JobQueue | PodGroup | None, plan: RolePlan
) -> list[Manifest]:
    template, manifests = _worker_template(inputs, images, endpoint), []
    for new in plan.create:
        place = queued.placement(new.index) if isinstance(queued, JobQueue) else queued
        # Without its flavor, the pod could run where the queue has no quota.
        if place is not None or queued is None:
            entropy = inputs.entropy_of(names.WORKER, new.index)
            manifests.append(objects.worker(inputs.job, inputs.uid, template, endpoint, place, new, entropy))
    return manifests


def _new_evaluators(inputs: ReconcileInputs, images: Images, colocated: bool, plan: RolePlan) -> list[Manifest]:
    return [
        objects.evaluator(
            inputs.job,
            inputs.uid,
            _evaluator_template(inputs, images, colocated, new.index),
            new,
            inputs.entropy_of(names.EVALUATOR, new.index),
        )
        for new in plan.create
    ]


def _coordinator_template(inputs: ReconcileInputs, images: Images, colocated: bool) -> Template:
    key = names.COORDINATOR, images, inputs.token_digest, colocated
    return inputs.memo.once(
        inputs.job.spec,
        key,
        lambda: objects.coordinator_template(inputs.job, images, inputs.token_digest, colocated),
    )


def _evaluator_template(inputs: ReconcileInputs, images: Images, colocated: bool, index: int) -> Template:
    job, uid = inputs.job, inputs.uid
    on_cpus = index >= job.spec.evaluation.replicas
    key = names.EVALUATOR, incarnation(job, uid), images, colocated, on_cpus
    return inputs.memo.once(job.spec, key, lambda: objects.evaluator_template(job, uid, images, colocated, on_cpus))


def _worker_template(inputs: ReconcileInputs, images: Images, endpoint: str) -> Template:
    job, uid = inputs.job, inputs.uid
    key = names.WORKER, incarnation(job, uid), images, endpoint
    return inputs.memo.once(job.spec, key, lambda: objects.worker_template(job, uid, images, endpoint))


def _coordinator_plan(
    inputs: ReconcileInputs,
    images: Images,
    colocated: bool,
    lifecycle: Lifecycle,
    workers: Sequence[Pod],
    required: _RequiredObjects,
) -> RolePlan:
    """Plan the coordinator's pod. At the end, workers learn from the coordinator that the job is over, so it is deleted
    last."""
    digest = _coordinator_template(inputs, images, colocated).digest
    is_needed = lifecycle.stage in ("train", "drain") or any(not (pod.ended or pod.silent) for pod in workers)
    policy = ReplicaPolicy(
        indices=range(1 if is_needed else 0),
        # Only a ready coordinator that does not answer is replaced: one that is not ready is restarted by its kubelet.
        is_current=lambda pod: (
            pod.template == digest and not (pod.ready and pod.uid == inputs.unresponsive_coordinator)
        ),
        not_before=_not_before(inputs, names.COORDINATOR, required),
    )
    return replicas.plan(inputs.pods(names.COORDINATOR), policy, inputs.now)


def _evaluator_plan(
    inputs: ReconcileInputs,
    images: Images,
    colocated: bool,
    lifecycle: Lifecycle,
    evaluators: Sequence[Pod],
    required: _RequiredObjects,
) -> RolePlan:
    """Plan the pods of evaluators."""
    job = inputs.job
    if lifecycle.stage in ("train", "drain"):
        needed, delay = stand_ins(evaluators, job.spec, inputs.now)
        count = job.spec.evaluation.replicas
        digest = _evaluator_template(inputs, images, colocated, 0).digest
        on_cpus = _evaluator_template(inputs, images, colocated, count).digest if needed else ""
        policy = ReplicaPolicy(
            indices=[*range(count), *needed],
            is_current=lambda pod: pod.template == (digest if pod.index < count else on_cpus),
            # Before the drain, an evaluator that ended well took an earlier training's end for the end of this one.
            completes=lifecycle.stage == "drain",
            not_before=_not_before(inputs, names.EVALUATOR, required),
        )
        plan = replicas.plan(evaluators, policy, inputs.now)
        delays = [seconds for seconds in (plan.requeue_after, delay) if seconds is not None]
        return replace(plan, requeue_after=min(delays, default=None))
    if lifecycle.stage == "suspend":
        return RolePlan(delete=tuple(evaluators))
    # Evaluators learn from the run directory that training is over. They get time to finish the remaining checkpoints.
    until = inputs.now if lifecycle.immediate else drain_deadline(job, inputs.snapshot, _ended_at(inputs) or inputs.now)
    remaining = tuple(pod for pod in evaluators if not pod.ended)
    if until <= inputs.now:
        return RolePlan(delete=remaining)
    # A pod that still waits for a GPU when its stand-in has finished has nothing left to do.
    is_evaluated = have_evaluated(evaluators, job.spec.evaluation)
    idle = tuple(pod for pod in remaining if is_evaluated and pod.placed is None)
    return RolePlan(delete=idle, requeue_after=until - inputs.now if remaining else None)


def _ended_at(inputs: ReconcileInputs) -> float | None:
    return parse_rfc3339((inputs.job.status or Status()).completion_time)


def _desired_objects(inputs: ReconcileInputs) -> Sequence[Manifest]:
    """Manifests of all objects but the token and the pods, which exist until the job has ended."""
    key = "objects", incarnation(inputs.job, inputs.uid), inputs.peers
    return inputs.memo.once(inputs.job.spec, key, lambda: tuple(_manifests(inputs)))


def _manifests(inputs: ReconcileInputs) -> Iterator[Manifest]:
    job, uid = inputs.job, inputs.uid
    yield objects.job_file(job, uid)
    storage = job.spec.checkpoint.storage
    if storage.shared and storage.claim_name is None:
        yield objects.claim(job, uid)
    yield objects.service(job, uid)
    if inputs.peers is not None:
        yield objects.network_policy(job, uid, inputs.peers)


def _obsolete_objects(inputs: ReconcileInputs) -> list[KubeObject]:
    """The job's NetworkPolicy, if the operator no longer creates such objects. It is deleted after the job's end,
    too."""
    policy = inputs.children.get(kinds.NETWORK_POLICY, names.network_policy(inputs.job.metadata.name))
    is_obsolete = inputs.peers is None and policy is not None and policy.owner == inputs.uid
    return [policy] if policy is not None and is_obsolete else []


def is_owned(existing: KubeObject, manifest: Manifest) -> bool:
    """Whether an existing object with the name of a manifest is this job's. A claim without an owner is the job's if an
    earlier job of the same name has left it, or if its annotation lets the job adopt it."""
    if isinstance(existing, VolumeClaim) and not existing.owner and not (existing.applied or existing.adoptable):
        return False
    return existing.owner in _owners(manifest)


def _owners(manifest: Manifest) -> set[str]:
    return {str(reference["uid"]) for reference in manifest["metadata"].get("ownerReferences", [])} or {""}


def _kind_and_name(manifest: Manifest) -> tuple[Kind, str]:
    kind = next(kind for kind in kinds.WATCHED if kind.name == manifest["kind"])
    return kind, manifest["metadata"]["name"]


def _obsolete_workers(
    inputs: ReconcileInputs, lifecycle: Lifecycle, workers: Sequence[Pod], worker_plan: RolePlan
) -> Sequence[Pod]:
    """Workers that the job no longer needs."""
    if lifecycle.stage == "train":
        return worker_plan.delete
    if lifecycle.stage == "drain":
        # They end by themselves, with the exit code that completes the job.
        return ()
    if lifecycle.stage == "suspend":
        # Ended ones as well, so that the names and the failure counts of the next incarnation's pods start afresh.
        return workers
    ended = _ended_at(inputs)
    due = lifecycle.immediate or (ended is not None and inputs.now - ended > WORKER_GRACE_SECONDS)
    return [pod for pod in workers if not pod.ended] if due else ()


def _target(inputs: ReconcileInputs, lifecycle: Lifecycle, workers: Sequence[Pod], worker_plan: RolePlan) -> int | None:
    """Replica target to send to the coordinator, None for none.

    A smaller target is sent once the surplus pods have gone: each of them has its group save and continue without it.
    If it were sent earlier, the coordinator would choose by itself which workers leave.
    """
    desired = len(worker_plan.indices)
    if lifecycle.stage != "train" or inputs.snapshot is None or inputs.snapshot.status.workers is None:
        return None
    reported = inputs.snapshot.status.workers
    is_surplus = (pod.index not in worker_plan.indices and not pod.ended and not pod.silent for pod in workers)
    if reported.desired == desired or any(is_surplus):
        return None
    # A coordinator that does not have the new bounds yet is about to be replaced by one that has.
    fits = (reported.min or 1) <= desired <= (reported.max or desired)
    return desired if fits else None


def _expiry(job: DistributedTrainingJob, new_status: Status) -> float | None:
    """Time at which the finished job is deleted, seconds since the epoch; None for never."""
    ttl, ended = job.spec.run_policy.ttl_seconds_after_finished, parse_rfc3339(new_status.completion_time)
    if ttl is None or ended is None or new_status.phase not in ("Succeeded", "Failed"):
        return None
    # A whole number may be too large for a time.
    return ended + min(ttl, MAX_TIMESTAMP)


def poll_interval(jobs: int) -> float:
    """Seconds between two polls of each of `jobs` training jobs. The more often a coordinator is polled, the sooner its
    loss with its node is noticed."""
    shortest, longest = POLL_INTERVAL_SECONDS
    return min(longest, max(shortest, jobs / POLLS_PER_SECOND))


def status_interval(jobs: int) -> float:
    """Seconds between two writes of fields that change all the time, for each of `jobs` jobs."""
    shortest, longest = STATUS_INTERVAL_SECONDS
    return min(longest, max(shortest, jobs / STATUS_WRITES_PER_SECOND))


def _unsettled_interval(inputs: ReconcileInputs) -> float:
    """Seconds between two reconciles of a job that does not train, or whose coordinator does not answer. Watches report
    changes of its pods."""
    pollable = [pod for pod in inputs.pods(names.COORDINATOR) if pod.live and pod.address]
    if not pollable:
        return NO_COORDINATOR_SECONDS
    if inputs.in_doubt and pollable[-1].ready:
        return SILENCE_POLL_SECONDS
    return max(TRANSITION_SECONDS, poll_interval(inputs.answering) / 2)


def _requeue_after(
    inputs: ReconcileInputs,
    lifecycle: Lifecycle,
    new_status: Status,
    plans: Iterable[RolePlan],
    expiry: float | None,
) -> float | None:
    """Delay until the next reconcile in seconds: the earliest of all timers, None if none runs."""
    now = inputs.now
    due = [expiry - now] if expiry is not None else []
    due += [plan.requeue_after for plan in plans if plan.requeue_after is not None]
    due += [attempt.due - now for attempt in inputs.attempts.values() if attempt.trouble is not None]
    if lifecycle.stage == "train":
        ready = sum(pod.live and pod.ready for pod in inputs.pods(names.WORKER))
        is_complete = new_status.workers is not None and new_status.workers.ready >= ready
        is_steady = new_status.phase == "Running" and is_complete and inputs.snapshot is not None
        due.append(poll_interval(inputs.answering) if is_steady else _unsettled_interval(inputs))
        # A pod that has no node becomes a problem after a while, and no event announces that.
        due += [delay for pod in all_pods(inputs) if (delay := pod.created + PLACING_SECONDS - now) > 0]
        backoff = backoff_ends(new_status)
        due += [backoff - now] if backoff is not None else []
        limit = deadline(inputs.job)
        due += [limit - now] if limit is not None else []
    elif lifecycle.stage == "drain" or any(not pod.ended for pod in inputs.pods(names.WORKER)):
        due.append(TRANSITION_SECONDS)
    if lifecycle.stage != "train" and inputs.children.workloads(inputs.uid):
        # Kueue's API may be away when the job ends, and no event says that it is back.
        due.append(NO_COORDINATOR_SECONDS)
    return max(0.05, min(due)) if due else None
