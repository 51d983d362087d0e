"""A whole operator beside the played cluster, both driven step by step: news may be lost, late or told twice, and the
operator may die between any two writes."""

import asyncio
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tandem_operator import kinds, names
from tandem_operator.controller import Controller
from tandem_operator.informer import Cache
from tandem_operator.objects import Peers
from tandem_operator.operator_metrics import OperatorMetrics
from tests.support import manifests
from tests.support.worlds.operator_cluster import NAMESPACE, Cluster, Died, merged
from tests.support.worlds.operator_job import IMAGES, TASK

NAME = "j"
KEY = (NAMESPACE, NAME)
JOB = manifests.manifest(
    NAME, namespace=NAMESPACE, trainer=TASK, workers={"replicas": 2, "minReplicas": 1, "maxReplicas": 4}, runPolicy={}
)
LOOP = asyncio.Runner()
EVENTUALLY = 60
"""Rounds of everybody doing everything they can, after which nothing may be left to do."""


class World:
    """A cluster and an operator, which may be replaced by another at any time."""

    peers: Peers | None = None
    """What an operator is told of who reaches pods of jobs, from its next start on."""

    def __init__(self, cluster: Cluster | None = None, job: dict[str, Any] = JOB, **policy: str) -> None:
        self.cluster = Cluster() if cluster is None else cluster
        self.cluster.put(kinds.JOB, merged(job, {"spec": {"runPolicy": policy}}))
        self.tokens: set[str] = set()
        self.start()

    def start(self) -> None:
        """A new operator, which knows nothing."""
        self.cache = Cache()
        api: Any = self.cluster
        self.controller = Controller(api, api, self.cache, IMAGES, OperatorMetrics(), b"key", peers=self.peers)
        self.relist()

    def relist(self) -> None:
        """What the operator does at its start and every minute."""
        for kind in (kinds.JOB, *kinds.WATCHED):
            LOOP.run(self._list(kind))
        self.cluster.news.clear()

    async def _list(self, kind: kinds.Kind) -> None:
        async for page in self.cluster.pages(kind, "", "" if kind is kinds.JOB else names.JOB):
            for body in page.items:
                self.cache.see(kind, body)
            listed = {body["metadata"]["uid"] for body in page.items}
            list(self.cache.compare(kind, "", listed, page.version))

    def look(self, dies_in: int | None = None, last_counts: bool = True) -> None:
        """The operator looks at the job, and perhaps dies with one of its writes."""
        self.cluster.dies_in, self.cluster.last_counts = dies_in, last_counts
        try:
            LOOP.run(self.controller.look(KEY))
        except Died:
            self.start()
        self.cluster.dies_in = None
        secret = self.cluster.objects.get((kinds.SECRET, NAMESPACE, names.token(NAME)))
        if secret is not None:
            self.tokens.add(secret["data"]["token"])

    def tell(self, which: list[int]) -> None:
        """The watches tell some of the news, in any order, some twice; the rest is lost."""
        news, self.cluster.news = self.cluster.news, []
        for index in which:
            if not news:
                return
            kind, what, body = news[index % len(news)]
            metadata = body["metadata"]
            if what == "DELETED":
                self.cache.lose(kind, metadata["namespace"], metadata["name"], metadata["uid"])
            elif kind is kinds.JOB or names.JOB in metadata.get("labels", {}):
                self.cache.see(kind, body)

    def hurt(self, what: str, index: int) -> None:
        """Something happens to one of the job's objects."""
        mine = [place for place in self.cluster.objects if place[0] not in (kinds.JOB, kinds.CLAIM)]
        pods = [(kinds.POD, NAMESPACE, pod["metadata"]["name"]) for pod in self.cluster.pods()]
        if what == "delete" and mine:
            self.cluster.end(mine[index % len(mine)])
        elif what == "fail" and pods:
            place = pods[index % len(pods)]
            if self.cluster.objects[place].get("status", {}).get("phase") == "Running":
                self.cluster.pod(place, "Failed", code=137)

    def settle(self) -> None:
        """Nothing is lost any more, until nobody does anything any more."""
        for _ in range(EVENTUALLY):
            before = self.cluster.version, len(self.cluster.written)
            self.relist()
            self.look()
            if not self.cluster.tick() and before == (self.cluster.version, len(self.cluster.written)):
                return
        raise AssertionError("it never comes to rest")


@dataclass(frozen=True)
class Step:
    """One thing that happens."""

    what: str
    index: int = 0
    which: tuple[int, ...] = ()
    flag: bool = True


STEPS = st.one_of(
    st.builds(Step, st.just("look")),
    st.builds(Step, st.just("look")),
    st.builds(Step, st.just("die"), st.integers(1, 10), flag=st.booleans()),
    st.builds(Step, st.just("tick")),
    st.builds(Step, st.just("tick")),
    st.builds(Step, st.just("tell"), which=st.lists(st.integers(0, 30), max_size=30).map(tuple)),
    st.builds(Step, st.just("tell"), which=st.just(tuple(range(31)))),
    st.builds(Step, st.just("list")),
    st.builds(Step, st.just("restart")),
    st.builds(Step, st.sampled_from(["delete", "fail"]), st.integers(0, 30)),
    st.builds(Step, st.just("scale"), st.integers(1, 4)),
    st.builds(Step, st.just("suspend"), flag=st.booleans()),
)


def happen(world: World, step: Step) -> None:
    match step.what:
        case "look":
            world.look()
        case "die":
            world.look(step.index, step.flag)
        case "tick":
            world.cluster.tick()
        case "tell":
            world.tell(list(step.which))
        case "list":
            world.relist()
        case "restart":
            world.start()
        case "scale":
            world.cluster.edit(kinds.JOB, NAME, {"workers": {"replicas": step.index}})
        case "suspend":
            world.cluster.edit(kinds.JOB, NAME, {"runPolicy": {"suspend": step.flag}})
        case _:
            world.hurt(step.what, step.index)


def live(world: World, role: str) -> list[int]:
    pods = [pod["metadata"] for pod in world.cluster.pods(role) if pod["status"]["phase"] == "Running"]
    assert not [pod["name"] for pod in pods if "deletionTimestamp" in pod]
    return sorted(int(pod["labels"].get(names.INDEX, 0)) for pod in pods)
