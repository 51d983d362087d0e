"""Reconciles one job: a pure function of the job, its objects, and its coordinator's answer.

The objects of a job NAME (tandem_operator.names shortens long names):

    Secret NAME-token                   the token (tandem_operator.tokens), made and never read; owned by the job
    ConfigMap NAME-job                  the resolved job, which the coordinator writes into the run directory; owned
    PersistentVolumeClaim
      NAME-checkpoints                  unless the job names a claim; owned only if storage.retain is false
    Service NAME-coordinator            the coordinator's address; owned
    NetworkPolicy NAME-network          who reaches the pods, where the operator is told that; owned
    Pod NAME-coordinator-0-RANDOM       the coordinator; owned, and replaced by tandem_operator.replicas
    Pod NAME-worker-INDEX-RANDOM        the group's places; the same
    Pod NAME-evaluator-INDEX-RANDOM     the evaluators; the same

All carry the label tandem.dev/job, by which they are found. Pods also say their role and their index, and their
annotations count the failures before them. Every object but pods carries a hash of what was wanted of it when it was
written: it is written again only when that differs, and not because Kubernetes filled in a default.

Who writes what: the operator alone writes these objects and `status`; the user writes `spec`; training's truth is the
run directory, which only the coordinator, trainers and evaluators see. The operator remembers nothing in memory that it
could not find again: where a job stands is in `status.phase` and its conditions, how often a place failed in the pods.

    Pending ─► Starting ─► Running ◄─► Restarting        said by the coordinator
       ▲                      │
       └── Suspended ◄────────┤                          runPolicy.suspend
                              ├─► Draining ─► Succeeded  training is complete; evaluators finish
                              └─► Failed                 said by the coordinator, or decided here

Workers are made together with the coordinator, as soon as its Service has an address: their images are pulled and
torch is imported while it starts. Agents wait until it has recorded this very job (tandem.launch), whatever an earlier
one has left on the volume. Where the coordinator does not come up (the volume belongs to another training or does not
mount, its image is not there, a quota refuses it), they would hold GPUs for nothing: they are given back until it has
answered.

It is called again and again, after every change and every few seconds, and only compares. Whatever event is lost,
doubled or late, and wherever an operator died between two writes, the next call finds what is missing.

Rejected: a chain of handlers, each of which does the next step after an event (dask-kubernetes: an event lost, or
two at once, and the chain hangs); finalizers (a job could not be deleted while the operator is away; owner references
do it); state in the operator's memory or in a ConfigMap of its own (it would have to be kept true over restarts, which
the objects are by themselves); server-side apply without the hash (a write for every object each time).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tandem import launch
from tandem.formatting import seconds
from tandem.job import DistributedTrainingJob
from tandem.status import Snapshot, Status
from tandem_operator import kinds, names, objects, pod_starts, pods, replicas
from tandem_operator.gang_deadlock import way_ends
from tandem_operator.job_memory import ending, later, place, removing, role_waits, writing
from tandem_operator.kinds import Kind
from tandem_operator.kueue import group_of
from tandem_operator.lifecycle import Lifecycle, begins_again, deadline, drained, is_initialized, lifecycle_of
from tandem_operator.objects import Manifest, Template, Volumes
from tandem_operator.observed import BROKEN_WAITING, NO_CONFIGURATION, Pod, Service, Thing, VolumeClaim
from tandem_operator.plan import Plan, Situation
from tandem_operator.pods import Images
from tandem_operator.reasons import PLACING_SECONDS, all_pods, giving_way, name_taken, replacements, waiting
from tandem_operator.replicas import RolePlan
from tandem_operator.reporting import Want, notices, status
from tandem_operator.retry import incarnation

STEADY_SECONDS = 1.0, 5.0
"""Between two looks at a job whose coordinator is asked: where there are few, and where there are many."""
LOOKS_PER_SECOND = 50.0
"""At all of these, as long as they are few enough. A look costs a millisecond or two."""
LIVELY_SECONDS = 10.0, 20.0
"""Between two writes of a status of which only step, loss and the like have changed: where there are few such jobs, and
where there are many."""
WRITES_PER_SECOND = 50.0
"""Of these, over all jobs, as long as they are few enough."""
LAZY_SECONDS = 30.0
"""Between two looks at a job whose coordinator has no pod that could answer: news of pods comes by itself."""
HASTY_SECONDS = 1.0
"""Between two looks at a job that is about to become something else, where there are few."""
DOUBT_SECONDS = 0.2
"""Between two looks at a job whose coordinator has answered, is ready, and has just fallen silent."""
COORDINATOR_SECONDS = 300.0
"""How long a coordinator's pod may take to begin, its image pulled and its volume mounted, before workers give their
GPUs back."""
ENDING_SECONDS = 30.0
"""What workers get to end by themselves when it is over."""
ANY_VOLUMES = Volumes()
"""Of the cluster's default class, for many nodes at once."""


def reconcile(at: Situation, images: Images, volumes: Volumes = ANY_VOLUMES) -> Plan:
    """What to do about the job.

    Args:
        volumes: what claims ask for where the job leaves it open.
    """
    job = at.job
    needed = _needed(at)
    follows = objects.is_on_one_node(job, volumes)
    workers, evaluators = at.pods(names.WORKER), at.pods(names.EVALUATOR)
    endpoint, images = _endpoint(at), _running(images, workers)
    group = group_of(job, workers, _group_entropy(at))
    worker_plan = replicas.plan(
        workers,
        job.spec.workers.replicas,
        at.now,
        # While the Service is missing, nobody knows a better address.
        useful=lambda pod: pod.endpoint == (endpoint or pod.endpoint) and pod.group == group and not pod.abandoned,
        proven=_proven(at.heard),
        ends_by_itself=job.spec.trainer.command is not None and not begins_again(at.heard),
        beside=group is None,
        held=_held(at, names.WORKER, needed),
    )
    lifecycle = lifecycle_of(job, at.heard, at.nobody_trains, workers, worker_plan.stuck, evaluators, at.now)
    over = lifecycle.stage == "end"
    coordinator_plan = _coordinator_plan(at, images, follows, lifecycle, workers, needed)
    evaluator_plan = _evaluator_plan(at, images, follows, lifecycle, evaluators, needed)
    make = [
        objects.coordinator(
            job, at.uid, _coordinating(at, images, follows), new, at.entropy_of(names.COORDINATOR, new.index)
        )
        for new in coordinator_plan.make
    ]
    leaving = (
        *_leaving(at, lifecycle, workers, worker_plan),
        *evaluator_plan.remove,
        *coordinator_plan.remove,
        *_unwanted(at),
    )
    remove: list[Thing] = [one for one in leaving if not one.deleting]
    yielding = giving_way(at, lifecycle, workers)
    needing = list(replacements(names.COORDINATOR, at.pods(names.COORDINATOR), coordinator_plan.make, at.fallen))
    news = list(replacements(names.EVALUATOR, evaluators, evaluator_plan.make))
    if yielding is not None or (lifecycle.stage == "train" and _coordinator_fails(at)):
        known = {one.uid for one in remove}
        remove += [pod for pod in workers if pod.live and pod.uid not in known]
    elif lifecycle.stage == "train" and endpoint:
        make += [
            objects.worker(
                job,
                at.uid,
                _working(at, images, endpoint),
                endpoint,
                group,
                new,
                at.entropy_of(names.WORKER, new.index),
            )
            for new in worker_plan.make
        ]
        needing += replacements(names.WORKER, workers, worker_plan.make)
    # A quota that has room for some has it for the coordinator, without which nothing begins, and then for workers.
    make += [
        objects.evaluator(job, at.uid, _evaluating(at, images, follows), new, at.entropy_of(names.EVALUATOR, new.index))
        for new in evaluator_plan.make
    ]
    if _is_refused(at, names.COORDINATOR):
        make = [pod for pod in make if pod["metadata"]["labels"][names.ROLE] == names.COORDINATOR]
    plans = {names.WORKER: worker_plan, names.EVALUATOR: evaluator_plan, names.COORDINATOR: coordinator_plan}
    settled = _settled(at, lifecycle, needed, plans)
    refused = [one.trouble for what, one in at.attempts.items() if one.trouble is not None and what not in settled]
    troubles = [
        *([yielding] if yielding is not None else []),
        *([] if over else needed.taken),
        *refused,
        *([] if over else waiting(at)),
    ]
    new = status(job, at.generation, at.heard, lifecycle, workers, troubles, at.now)
    # Those that replace others read the Secret, which somebody may have deleted since.
    news += needing
    news += notices(job.status or Status(), new, at.heard)
    expires = _expires(job, new)
    return Plan(
        needs_token=not over and (needed.token or bool(needing)),
        create=() if over else tuple(objects.completed(one, job, volumes) for one in needed.create),
        update=() if over else needed.update,
        make=tuple(make),
        remove=tuple(one for one in remove if later(at.attempts, removing(one.name), at.now) is None),
        end=tuple(
            pod
            for pod in all_pods(at)
            if (pod.lingers or (not over and pod_starts.is_failed(pod, at.starts.get(pod.uid), at.now)))
            and not pod.deleting
            and later(at.attempts, ending(pod.name), at.now) is None
        ),
        target=_target(at, lifecycle, workers),
        status=new,
        notices=tuple(news),
        expired=expires is not None and at.now >= expires,
        settled=settled,
        again_in=_again(at, lifecycle, new, plans.values(), expires),
    )


def _proven(heard: Snapshot | None) -> set[str]:
    """Workers whose group has made steps, as far as the coordinator says: what ends them is not that they cannot start.
    A coordinator of the previous version says only that they were in a group."""
    views = [] if heard is None else heard.generations
    return {name for view in views if view.progressed is not False for name in view.members}


def _group_entropy(at: Situation) -> str:
    """Makes the name of a new group of queued workers unique, unless one of them may be there already."""
    workers = (entropy for what, entropy in at.unanswered.items() if what.startswith(names.WORKER))
    return next(workers, at.entropy)


def _running(images: Images, workers: Sequence[Pod]) -> Images:
    """What pods run, with the trainer of those that train: the ranks of a group are of one version, also after the
    operator was told of another one. What nobody of the job has run yet can be replaced."""
    there = [pod for pod in workers if pod.live and pod.image and pod.started is not None and pod.finished is None]
    return replace(images, trainer=there[0].image) if there else images


def _endpoint(at: Situation) -> str:
    service = at.children.get(kinds.SERVICE, names.coordinator(at.job.metadata.name))
    if not isinstance(service, Service) or service.owner != at.uid or not service.address:
        return ""
    return launch.endpoint(service.address, pods.PORT)


def _is_initialized(at: Situation) -> bool:
    return at.heard is not None or is_initialized(at.job.status)


def _lacks_token(at: Situation) -> bool:
    """Whether the Secret was not made yet, or a pod cannot start because somebody has deleted it."""
    # What is made next after it.
    made = at.children.get(kinds.CONFIG_MAP, names.job_file(at.job.metadata.name))
    if made is None or made.owner != at.uid:
        return True
    name = names.token(at.job.metadata.name)
    waiting = (pod for pod in all_pods(at) if pod.waiting == NO_CONFIGURATION and not pod.deleting)
    return any(f'"{name}"' in pod.words for pod in waiting)


def _coordinator_fails(at: Situation) -> bool:
    """Whether the coordinator has never answered, and what is known of its pod says that it will not soon."""
    if _is_initialized(at):
        return False
    there = [pod for pod in at.pods(names.COORDINATOR) if pod.live and not pod.ready]
    return _is_refused(at, names.COORDINATOR) or any(
        pod.restarts > 0
        or pod.waiting in BROKEN_WAITING
        or (not pod.has_begun and at.now - pod.created >= COORDINATOR_SECONDS)
        for pod in there
    )


def _is_refused(at: Situation, role: str) -> bool:
    """Whether the first pod of a role could not be created when that was tried last."""
    attempt = at.attempts.get(place(role, 0))
    return attempt is not None and attempt.trouble is not None


@dataclass(frozen=True)
class _Needed:
    """The objects that a job needs beside its pods."""

    create: tuple[Manifest, ...] = ()
    update: tuple[Manifest, ...] = ()
    token: bool = False
    """The Secret is to be made."""
    taken: tuple[Want, ...] = ()
    """Names that somebody else has taken."""
    settled: tuple[str, ...] = ()
    """Which are as they should be."""
    lacking: bool = False
    """What pods read or mount cannot be had now: new ones would wait for it, or begin with what the job was before."""


def _needed(at: Situation) -> _Needed:
    """How the objects are, beside what they should be."""
    create: list[Manifest] = []
    update: list[Manifest] = []
    taken: list[Want] = []
    settled: list[str] = []
    secret = writing(kinds.SECRET, names.token(at.job.metadata.name))
    lacks_token = _lacks_token(at)
    token_waits = lacks_token and later(at.attempts, secret, at.now) is not None
    if token_waits:
        # That it is there is seen from what is made after it.
        return _Needed(lacking=True)
    lacking = False
    for manifest in _wanted(at):
        kind, name = _key(manifest)
        what, there = writing(kind, name), at.children.get(kind, name)
        waits = later(at.attempts, what, at.now) is not None
        if there is not None and not is_ours(there, manifest):
            taken.append(name_taken(kind, name, there.owner))
            waits = True
        elif there is not None and (there.deleting or there.applied == objects.applied(manifest)):
            settled.append(what)
            waits = False
        elif there is None and not waits:
            create.append(manifest)
        elif there is not None and not waits:
            # The UID keeps the API server from making what is gone, or changing what has taken its name.
            named = {**manifest, "metadata": {**manifest["metadata"], "uid": there.uid}}
            if kind is kinds.CLAIM and not there.applied:
                # Somebody else has made it: it is marked as the job's, and stays as it is.
                named.pop("spec")
            elif kind is kinds.CLAIM and at.job.spec.checkpoint.storage.size is None:
                # It was made with the size that the operator was told then, which may be another one now.
                named["spec"] = {field: value for field, value in manifest["spec"].items() if field != "resources"}
            update.append(named)
        # Workers wait for the Service's address; nobody else needs it. A claim does as it is, where it must not change.
        usable = there is not None and is_ours(there, manifest) and kind is kinds.CLAIM
        lacking |= waits and kind is not kinds.SERVICE and not usable
    settled += [] if lacks_token else [secret]
    return _Needed(tuple(create), tuple(update), lacks_token, tuple(taken), tuple(settled), lacking)


def _held(at: Situation, role: str, needed: _Needed) -> Callable[[int], float | None]:
    """Until when a place gets no other pod."""

    all_wait = role_waits(at.attempts, role, at.now)

    def until(index: int) -> float | None:
        due = later(at.attempts, place(role, index), at.now) or all_wait
        return max(due or 0.0, at.now + LAZY_SECONDS) if needed.lacking else due

    return until


def _settled(at: Situation, lifecycle: Lifecycle, needed: _Needed, plans: Mapping[str, RolePlan]) -> frozenset[str]:
    """What need not be remembered as tried any more: it is as it should be, or nobody wants it now."""
    if not at.attempts:
        return frozenset()
    at_work = {place(role, index) for role, one in plans.items() for index in one.settled}
    wanted = {what(pod.name) for pod in all_pods(at) for what in (removing, ending)}
    wanted |= {removing(one.name) for one in _unwanted(at)}
    if lifecycle.stage != "end":
        counts = {
            names.WORKER: at.job.spec.workers.replicas if lifecycle.stage == "train" else 0,
            names.EVALUATOR: at.job.spec.evaluation.replicas,
            names.COORDINATOR: 1,
        }
        wanted |= {place(role, index) for role, count in counts.items() for index in range(count)}
        wanted |= {writing(*_key(manifest)) for manifest in _wanted(at)}
        wanted.add(writing(kinds.SECRET, names.token(at.job.metadata.name)))
    return frozenset({what for what in at.attempts if what not in wanted} | at_work.union(needed.settled))


def _coordinating(at: Situation, images: Images, follows: bool) -> Template:
    key = names.COORDINATOR, images, at.token_digest, follows
    return at.memo.once(
        at.job.spec, key, lambda: objects.coordinator_template(at.job, images, at.token_digest, follows)
    )


def _evaluating(at: Situation, images: Images, follows: bool) -> Template:
    key = names.EVALUATOR, incarnation(at.job, at.uid), images, follows
    return at.memo.once(at.job.spec, key, lambda: objects.evaluator_template(at.job, at.uid, images, follows))


def _working(at: Situation, images: Images, endpoint: str) -> Template:
    key = names.WORKER, incarnation(at.job, at.uid), images, endpoint
    return at.memo.once(at.job.spec, key, lambda: objects.worker_template(at.job, at.uid, images, endpoint))


def _coordinator_plan(
    at: Situation, images: Images, follows: bool, lifecycle: Lifecycle, workers: Sequence[Pod], objects_needed: _Needed
) -> RolePlan:
    """What to do with the coordinator. At the end workers hear from it that it is over, so it is the last to go."""
    asked = _coordinating(at, images, follows).digest
    needed = lifecycle.stage in ("train", "drain") or any(not (pod.ended or pod.silent) for pod in workers)
    return replicas.plan(
        at.pods(names.COORDINATOR),
        1 if needed else 0,
        at.now,
        # Where it is not ready, its kubelet knows what is the matter, and starts it again.
        useful=lambda pod: pod.template == asked and not (pod.ready and pod.uid == at.fallen),
        held=_held(at, names.COORDINATOR, objects_needed),
    )


def _evaluator_plan(
    at: Situation,
    images: Images,
    follows: bool,
    lifecycle: Lifecycle,
    evaluators: Sequence[Pod],
    objects_needed: _Needed,
) -> RolePlan:
    """What to do with the evaluators."""
    if lifecycle.stage in ("train", "drain"):
        asked = _evaluating(at, images, follows).digest
        return replicas.plan(
            evaluators,
            at.job.spec.evaluation.replicas if at.job.spec.evaluation.processes else 0,
            at.now,
            useful=lambda pod: pod.template == asked,
            # Before, what they took for the end was that of an earlier training.
            ends_by_itself=lifecycle.stage == "drain",
            held=_held(at, names.EVALUATOR, objects_needed),
        )
    if lifecycle.stage == "suspend":
        return RolePlan(remove=tuple(evaluators))
    # They learn from the run directory that it is over, and finish what is left.
    until = at.now if lifecycle.at_once else drained(at.job, at.heard, _ended_at(at) or at.now)
    left = tuple(pod for pod in evaluators if not pod.ended)
    return RolePlan(remove=left) if until <= at.now else RolePlan(again_in=until - at.now if left else None)


def _ended_at(at: Situation) -> float | None:
    return seconds((at.job.status or Status()).completion_time)


def _wanted(at: Situation) -> Sequence[Manifest]:
    """Everything that should be there but the token and the pods, until the job has ended."""
    key = "objects", incarnation(at.job, at.uid), at.peers
    return at.memo.once(at.job.spec, key, lambda: tuple(_objects(at)))


def _objects(at: Situation) -> Iterator[Manifest]:
    job, uid = at.job, at.uid
    yield objects.job_file(job, uid)
    if job.spec.checkpoint.storage.claim_name is None:
        yield objects.claim(job, uid)
    yield objects.service(job, uid)
    if at.peers is not None:
        yield objects.network_policy(job, uid, at.peers)


def _unwanted(at: Situation) -> list[Thing]:
    """What is the job's and should not be there, also after its end: a NetworkPolicy where none are made."""
    there = at.children.get(kinds.NETWORK_POLICY, names.network_policy(at.job.metadata.name))
    return [there] if at.peers is None and there is not None and there.owner == at.uid else []


def is_ours(thing: Thing, manifest: Manifest) -> bool:
    """Whether an object that has the name of the one we want is this job's. A claim that nobody owns is, if an earlier
    job of that name has left it, or if it says that it may be taken."""
    if isinstance(thing, VolumeClaim) and not thing.owner and not (thing.applied or thing.adoptable):
        return False
    return thing.owner in _owners(manifest)


def _owners(manifest: Manifest) -> set[str]:
    return {str(one["uid"]) for one in manifest["metadata"].get("ownerReferences", [])} or {""}


def _key(manifest: Manifest) -> tuple[Kind, str]:
    kind = next(one for one in kinds.WATCHED if one.name == manifest["kind"])
    return kind, manifest["metadata"]["name"]


def _leaving(at: Situation, lifecycle: Lifecycle, workers: Sequence[Pod], worker_plan: RolePlan) -> Sequence[Pod]:
    """Workers that should not be there any more."""
    if lifecycle.stage == "train":
        return worker_plan.remove
    if lifecycle.stage == "drain":
        return ()
    if lifecycle.stage == "suspend":
        # All, so that the names of the next incarnation's pods, and its failures, begin anew.
        return workers
    ended = _ended_at(at)
    due = lifecycle.at_once or (ended is not None and at.now - ended > ENDING_SECONDS)
    return [pod for pod in workers if not pod.ended] if due else ()


def _target(at: Situation, lifecycle: Lifecycle, workers: Sequence[Pod]) -> int | None:
    """A smaller number is told once the pods that go have gone: each of them has its group save and go on without it.
    Told before, the coordinator would choose by itself who has to go."""
    wish = at.job.spec.workers.replicas
    if lifecycle.stage != "train" or at.heard is None or at.heard.status.workers is None:
        return None
    known = at.heard.status.workers
    if known.desired == wish or any(pod.index >= wish and not pod.ended and not pod.silent for pod in workers):
        return None
    # A coordinator that does not know the new bounds yet is about to be replaced by one that does.
    fits = (known.min or 1) <= wish <= (known.max or wish)
    return wish if fits else None


def _expires(job: DistributedTrainingJob, new: Status) -> float | None:
    ttl, ended = job.spec.run_policy.ttl_seconds_after_finished, seconds(new.completion_time)
    if ttl is None or ended is None or new.phase not in ("Succeeded", "Failed"):
        return None
    return ended + ttl


def steady(jobs: int) -> float:
    """Seconds between two looks at each of `jobs` jobs that train. The sooner a coordinator is asked, the sooner it is
    known that it went with its node."""
    least, most = STEADY_SECONDS
    return min(most, max(least, jobs / LOOKS_PER_SECOND))


def lively(jobs: int) -> float:
    """Seconds between two writes of what changes all the time, for each of `jobs` jobs."""
    least, most = LIVELY_SECONDS
    return min(most, max(least, jobs / WRITES_PER_SECOND))


def _pause(at: Situation) -> float:
    """Seconds between two looks at a job that does not train, or is not heard. News of its pods comes by itself."""
    there = [pod for pod in at.pods(names.COORDINATOR) if pod.live and pod.address]
    if not there:
        return LAZY_SECONDS
    return DOUBT_SECONDS if at.in_doubt and there[-1].ready else max(HASTY_SECONDS, steady(at.answering) / 2)


def _again(
    at: Situation, lifecycle: Lifecycle, new: Status, plans: Iterable[RolePlan], expires: float | None
) -> float | None:
    due = [expires - at.now] if expires is not None else []
    due += [one.again_in for one in plans if one.again_in is not None]
    due += [one.due - at.now for one in at.attempts.values() if one.trouble is not None]
    if lifecycle.stage == "train":
        running = sum(pod.live and pod.ready for pod in at.pods(names.WORKER))
        whole = new.workers is not None and new.workers.ready >= running
        settled = new.phase == "Running" and whole and at.heard is not None
        due.append(steady(at.answering) if settled else _pause(at))
        due += [left for pod in all_pods(at) if (left := pod.created + PLACING_SECONDS - at.now) > 0]
        until = way_ends(new)
        due += [until - at.now] if until is not None else []
        limit = deadline(at.job)
        due += [limit - at.now] if limit is not None else []
    elif lifecycle.stage == "drain" or any(not pod.ended for pod in at.pods(names.WORKER)):
        due.append(HASTY_SECONDS)
    return max(0.05, min(due)) if due else None
