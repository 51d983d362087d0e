"""Two operators of one namespace, by mistake: one acts, the other one waits, and takes over when that goes."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem_operator import leader, names
from tests.support.cluster.attacks import idle
from tests.support.cluster.background import answers
from tests.support.cluster.images import Images
from tests.support.cluster.operated import Job, Operator, install, kubeconfig
from tests.support.cluster.pods import Namespace

MADE = "event=made job={}/{} kind=Pod"


@pytest.fixture
def both(namespace: Namespace, images: Images, tmp_path: Path) -> Iterator[tuple[Operator, Operator]]:
    """Two of them, of which the first was there first."""
    install(namespace)
    access = kubeconfig(namespace, tmp_path)
    first, second = (Operator(namespace, images, access, tmp_path / f"{name}.log") for name in ("first", "second"))
    with first, second:
        first.start()
        second.launch()
        second.becomes(lambda: "event=listed" in second.log(), "it has listed everything", 60.0)
        yield first, second


def ready(operator: Operator) -> str:
    """What its readiness probe is told."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{operator.port}/readyz", timeout=10) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()


def holder(namespace: Namespace) -> str:
    found = json.loads(namespace("get", "lease", leader.NAME, "-o", "json"))
    return str(found["spec"]["holderIdentity"])


def leads(operator: Operator, namespace: Namespace) -> bool:
    return f'tandem_operator_leads{{namespace="{namespace.name}"}} 1.0' in operator.metrics()


@pytest.mark.timeout(300)
def test_one_of_two_operators_acts_and_the_other_one_takes_over(
    both: tuple[Operator, Operator], namespace: Namespace
) -> None:
    first, second = both
    assert holder(namespace) == first.identity
    assert (leads(first, namespace), leads(second, namespace)) == (True, False)
    assert ready(second) == f"{first.identity} holds the Lease {namespace.name}/{leader.NAME}; this operator waits"
    assert answers(f"http://127.0.0.1:{second.port}/healthz"), "it is well, and waits"

    job = Job(namespace, "digits")
    made = MADE.format(namespace.name, job.name)
    job.apply(idle(job.name))
    (worker,) = job.becomes(lambda: job.pods(names.WORKER), "its worker")
    job.becomes(lambda: job.pods(names.COORDINATOR), "its coordinator")
    assert (first.log().count(made), second.log().count(made)) == (2, 0)

    # As an upgrade ends it: it lets go.
    assert first.stop() == 0
    second.becomes(lambda: ready(second) == "ok", "the other one acts", 30.0)
    assert holder(namespace) == second.identity
    assert leads(second, namespace)
    namespace("delete", "pod", worker["metadata"]["name"], "--wait=false")
    job.becomes(lambda: second.log().count(made) == 1, "another worker, made by the other one")

    # As a lost node ends it: its Lease runs out.
    first.launch()
    first.becomes(lambda: "this operator waits" in ready_or_not(first), "it waits in its turn", 60.0)
    (worker,) = job.becomes(lambda: job.pods(names.WORKER), "its worker")
    second.kill()
    first.becomes(lambda: ready(first) == "ok", "it acts again", 60.0)
    namespace("delete", "pod", worker["metadata"]["name"], "--wait=false")
    job.becomes(lambda: first.log().count(made) == 3, "another worker, made by the first one")
    assert "event=look-broken" not in first.log() + second.log()
    namespace("delete", "dtj", job.name, "--wait=false")


def ready_or_not(operator: Operator) -> str:
    """The same while it may not listen yet."""
    try:
        return ready(operator)
    except OSError:
        return ""
