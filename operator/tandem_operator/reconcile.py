"""What to do about one job: a pure function of the job, its objects, and what its coordinator says.

The objects of a job NAME (tandem_operator.names shortens long names):

    Secret NAME-token                   made once with a random token; owned by the job
    ConfigMap NAME-job                  the resolved job, which the coordinator writes into the run directory; owned
    PersistentVolumeClaim
      NAME-checkpoints                  unless the job names a claim; owned only if storage.retain is false
    Service, Deployment
      NAME-coordinator                  one coordinator; owned
    Pod NAME-worker-INDEX-RANDOM        the group's places; owned, and replaced by tandem_operator.fleet
    Job NAME-evaluator                  Indexed, one index for each evaluator replica; owned

All carry the label tandem.dev/job, by which they are found. Pods also say their role, workers their index; a worker's
annotations count the failures before it. Every object but pods carries a hash of what was wanted of it when it was
written: it is written again only when that differs, and not because Kubernetes filled in a default.

Who writes what: the operator alone writes these objects and `status`; the user writes `spec`; training's truth is the
run directory, which only the coordinator, trainers and evaluators see. The operator remembers nothing in memory that it
could not find again: where a job stands is in `status.phase` and its conditions, how often a place failed in the pods.

    Pending ─► Starting ─► Running ◄─► Restarting        said by the coordinator
       ▲                      │
       └── Suspended ◄────────┤                          runPolicy.suspend
                              ├─► Draining ─► Succeeded  training is complete; evaluators finish
                              └─► Failed                 said by the coordinator, or decided here

Workers are made once the coordinator has answered for the first time (condition Initialized), because it writes the job
into the run directory, and once its Service has an address. From then on they do not need it to start or to go on.

It is called again and again, after every change and every few seconds, and only compares. Whatever event is lost,
doubled or late, and wherever an operator died between two writes, the next call finds what is missing.

Rejected: a chain of handlers, each of which does the next step after an event (dask-kubernetes: an event lost, or
two at once, and the chain hangs); finalizers (a job could not be deleted while the operator is away; owner references
do it); state in the operator's memory or in a ConfigMap of its own (it would have to be kept true over restarts, which
the objects are by themselves); server-side apply without the hash (a write for every object each time).
"""

from collections.abc import Iterator, Sequence

from tandem.job import DistributedTrainingJob
from tandem.status import Status
from tandem.times import seconds
from tandem_operator import fleet, kinds, names, objects, pods
from tandem_operator.course import Course, condition, course, deadline
from tandem_operator.fleet import Fleet
from tandem_operator.kinds import Kind
from tandem_operator.objects import Manifest
from tandem_operator.observed import Children, Pod, Service, Thing, Workload
from tandem_operator.plan import Plan, Removal, Situation
from tandem_operator.pods import Images
from tandem_operator.reporting import Trouble, notices, status
from tandem_operator.rivalry import way_ends
from tandem_operator.troubles import PLACING_SECONDS, all_pods, giving_way, name_taken, replacements, waiting

STEADY_SECONDS = 5.0
"""Between two looks at a job that trains."""
LAZY_SECONDS = 30.0
"""Between two looks at a job whose coordinator has no pod that could answer: news of pods comes by itself."""
HASTY_SECONDS = 1.0
"""Between two looks at a job that is about to become something else."""
ENDING_SECONDS = 30.0
"""What workers get to end by themselves when it is over."""


def reconcile(at: Situation, images: Images, refused: Sequence[Trouble] = ()) -> Plan:
    """What to do about the job.

    Args:
        refused: what the API server answered to the last plan, to be told in the status.
    """
    job, children = at.job, at.children
    workers = children.pods(names.WORKER)
    found = children.get(kinds.BATCH, names.evaluator(job.metadata.name))
    evaluators = found if isinstance(found, Workload) and found.owner == at.uid else None
    endpoint = _endpoint(at)
    places = fleet.plan(
        workers,
        job.spec.workers.replicas,
        endpoint,
        at.now,
        proven={name for view in (at.heard.generations if at.heard else []) for name in view.members},
        ends_by_itself=job.spec.trainer.command is not None,
    )
    ahead = course(job, at.heard, workers, places.stuck, evaluators, at.now)
    wanted = list(_wanted(at, images, ahead, workers, evaluators))
    create, update, taken = _compared(at, wanted)
    remove = [*_outdated(wanted, children), *_left_over(at, ahead, workers, places)]
    way = giving_way(at, ahead, workers)
    if way is not None:
        kept = {removal.uid for removal in remove}
        remove += [Removal(kinds.POD, pod.name, pod.uid) for pod in workers if pod.live and pod.uid not in kept]
    elif ahead.mood == "train" and _is_initialized(at) and endpoint:
        made = [
            objects.worker(job, at.uid, images, endpoint, new.index, new.failures, at.entropy) for new in places.make
        ]
        create += made
    troubles = [*([way] if way is not None else []), *taken, *refused, *waiting(at)]
    new = status(job, at.generation, at.heard, ahead, workers, troubles, at.now)
    told = [*replacements(at, places, ahead), *notices(job.status or Status(), new, at.heard)]
    expires = _expires(job, new)
    return Plan(
        needs_token=not at.has_token and ahead.mood != "end",
        create=tuple(create),
        update=tuple(update),
        remove=tuple(remove),
        target=_target(at, ahead, workers),
        status=new,
        notices=tuple(told),
        expired=expires is not None and at.now >= expires,
        again_in=_again(at, ahead, new, places, expires),
    )


def _endpoint(at: Situation) -> str:
    service = at.children.get(kinds.SERVICE, names.coordinator(at.job.metadata.name))
    if not isinstance(service, Service) or service.owner != at.uid or not service.address:
        return ""
    host = f"[{service.address}]" if ":" in service.address else service.address
    return f"{host}:{pods.PORT}"


def _is_initialized(at: Situation) -> bool:
    before = condition(at.job.status, "Initialized")
    return at.heard is not None or (before is not None and before.status == "True")


def _wanted(
    at: Situation, images: Images, ahead: Course, workers: Sequence[Pod], evaluators: Workload | None
) -> Iterator[Manifest]:
    """Everything but the token and the workers that should be there."""
    job, uid = at.job, at.uid
    if ahead.mood == "end":
        if evaluators is not None and not evaluators.complete and ahead.at_once:
            yield objects.evaluators(job, uid, images, suspend=True)
        if any(not pod.ended for pod in workers):
            # They learn from the coordinator that it is over.
            yield objects.deployment(job, uid, images)
        return
    yield objects.job_file(job, uid)
    if job.spec.checkpoint.storage.claim_name is None:
        yield objects.claim(job, uid)
    yield objects.service(job, uid)
    suspended = ahead.mood == "suspend"
    if not suspended or any(not pod.ended for pod in workers):
        yield objects.deployment(job, uid, images)
    if job.spec.evaluation.processes and (evaluators is not None or not suspended):
        yield objects.evaluators(job, uid, images, suspend=suspended)


def _compared(at: Situation, wanted: Sequence[Manifest]) -> tuple[list[Manifest], list[Manifest], list[Trouble]]:
    """What to create, what to update, and which names somebody else has taken."""
    create: list[Manifest] = []
    update: list[Manifest] = []
    taken: list[Trouble] = []
    for manifest in wanted:
        kind, name = _key(manifest)
        there = at.children.get(kind, name)
        if there is None:
            create.append(manifest)
        elif not is_ours(there, manifest):
            taken.append(name_taken(kind, name))
        elif there.applied != objects.applied(manifest) and not there.deleting and not _is_outdated(there, manifest):
            # The UID keeps the API server from making what is gone, or changing what has taken its name.
            update.append({**manifest, "metadata": {**manifest["metadata"], "uid": there.uid}})
    return create, update, taken


def is_ours(thing: Thing, manifest: Manifest) -> bool:
    """Whether an object that has the name of the one we want is this job's."""
    return thing.owner in _owners(manifest)


def _owners(manifest: Manifest) -> set[str]:
    return {str(one["uid"]) for one in manifest["metadata"].get("ownerReferences", [])} or {""}


def _key(manifest: Manifest) -> tuple[Kind, str]:
    kind = next(one for one in kinds.WATCHED if one.name == manifest["kind"])
    return kind, manifest["metadata"]["name"]


def _outdated(wanted: Sequence[Manifest], children: Children) -> Iterator[Removal]:
    """The evaluators' Job cannot be changed in what its pods are: it is removed, and made anew once it has gone."""
    for manifest in wanted:
        kind, name = _key(manifest)
        there = children.get(kind, name)
        if there is not None and not there.deleting and is_ours(there, manifest) and _is_outdated(there, manifest):
            yield Removal(kind, name, there.uid)


def _is_outdated(there: Thing, manifest: Manifest) -> bool:
    return isinstance(there, Workload) and bool(there.template) and there.template != objects.template(manifest)


def _left_over(at: Situation, ahead: Course, workers: Sequence[Pod], places: Fleet) -> Iterator[Removal]:
    """What should not be there any more."""
    running = [pod for pod in workers if not pod.ended]
    evaluators = at.children.get(kinds.BATCH, names.evaluator(at.job.metadata.name))
    turned_off = at.job.spec.evaluation.processes == 0 and evaluators is not None and evaluators.owner == at.uid
    if turned_off and evaluators is not None and not evaluators.deleting:
        yield Removal(kinds.BATCH, evaluators.name, evaluators.uid)
    if ahead.mood in ("train", "drain"):
        removed = places.remove if ahead.mood == "train" else ()
    elif ahead.mood == "suspend" or ahead.at_once:
        removed = tuple(running)
    else:
        ended = seconds((at.job.status or Status()).completion_time)
        removed = tuple(running) if ended is not None and at.now - ended > ENDING_SECONDS else ()
    if ahead.mood == "suspend":
        # So that the names of the next incarnation's pods, and its failures, begin anew.
        removed = tuple(workers)
    yield from (Removal(kinds.POD, pod.name, pod.uid) for pod in removed if not pod.deleting)
    if ahead.mood in ("end", "suspend") and all(pod.silent for pod in running):
        deployment = at.children.get(kinds.DEPLOYMENT, names.coordinator(at.job.metadata.name))
        if deployment is not None and deployment.owner == at.uid and not deployment.deleting:
            yield Removal(kinds.DEPLOYMENT, deployment.name, deployment.uid)


def _target(at: Situation, ahead: Course, workers: Sequence[Pod]) -> int | None:
    """A smaller number is told once the pods that go have gone: each of them has its group save and go on without it.
    Told before, the coordinator would choose by itself who has to go."""
    wish = at.job.spec.workers.replicas
    if ahead.mood != "train" or at.heard is None or at.heard.status.workers is None:
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


def _again(at: Situation, ahead: Course, new: Status, places: Fleet, expires: float | None) -> float | None:
    due = [expires - at.now] if expires is not None else []
    if ahead.mood == "train":
        running = sum(pod.live and pod.ready for pod in at.children.pods(names.WORKER))
        settled = new.phase == "Running" and new.workers is not None and new.workers.ready >= running
        answers = any(pod.live and pod.address for pod in at.children.pods(names.COORDINATOR))
        due.append(LAZY_SECONDS if not answers else STEADY_SECONDS if settled else HASTY_SECONDS)
        due += [left for pod in all_pods(at.children) if (left := pod.created + PLACING_SECONDS - at.now) > 0]
        until = way_ends(new)
        due += [until - at.now] if until is not None else []
        due += [places.again_in] if places.again_in is not None else []
        limit = deadline(at.job)
        due += [limit - at.now] if limit is not None else []
    elif ahead.mood == "drain" or any(not pod.ended for pod in at.children.pods(names.WORKER)):
        due.append(HASTY_SECONDS)
    return max(0.05, min(due)) if due else None
