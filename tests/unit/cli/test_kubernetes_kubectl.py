"""kubectl as a child process: what it refuses is told in its words with what to do, and nothing is endless."""

import os
import select
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem_cli.kubernetes import kubectl as kubectl_module
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl, NotFound, error_from
from tests.support.fake_kubectl import FakeKubectl
from tests.support.waiting import until

LOG_LINE = (
    'E1121 22:30:58.959537   31419 memcache.go:265] "Unhandled Error" '
    'err="couldn\'t get current server API group list: dial tcp 127.0.0.1:1: connect: connection refused"\n'
)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeKubectl:
    found = FakeKubectl(tmp_path)
    monkeypatch.setenv("PATH", found.path)
    return found


@pytest.mark.parametrize(
    ("said", "own_words", "advice"),
    [
        (
            "Error in configuration: context was not found for specified context: x",
            "context was not found",
            "kubectl config get-contexts",
        ),
        (
            LOG_LINE * 5 + "The connection to the server localhost:8080 was refused - did you specify the right host?",
            "The connection to the server localhost:8080 was refused",
            "set KUBECONFIG",
        ),
        (
            LOG_LINE * 5 + "The connection to the server 10.1.2.3:6443 was refused - did you specify the right host?",
            "10.1.2.3:6443 was refused",
            "The cluster does not answer",
        ),
        (
            "Unable to connect to the server: dial tcp: lookup k8s.example on 10.0.0.1:53: no such host",
            "no such host",
            "The cluster does not answer",
        ),
        (
            'error: the server doesn\'t have a resource type "distributedtrainingjobs"',
            "doesn't have a resource type",
            "install the chart",
        ),
        (
            'error: resource mapping not found for name: "digits" namespace: "" from "STDIN": no matches for kind '
            '"DistributedTrainingJob" in version "tandem.dev/v1alpha1"\nensure CRDs are installed first',
            "ensure CRDs are installed first",
            "install the chart",
        ),
        (
            'Error from server (Forbidden): pods is forbidden: User "nobody" cannot list resource "pods"',
            'User "nobody" cannot list resource "pods"',
            "You do not have permission",
        ),
        ("error: You must be logged in to the server (Unauthorized)", "must be logged in", "Log in as you do"),
        ('Error from server (NotFound): namespaces "nonsuch" not found', 'namespaces "nonsuch" not found', "create"),
        (
            'error: Apply failed with 1 conflict: conflict with "kubectl" with subresource "scale": '
            ".spec.workers.replicas\nPlease review the fields above",
            ".spec.workers.replicas",
            "--force",
        ),
    ],
)
def test_what_kubectl_refuses_is_told_in_its_words_with_what_to_do(said: str, own_words: str, advice: str) -> None:
    told = str(error_from(said))
    assert told.startswith("kubectl: ")
    assert own_words in told
    assert advice in told.partition("\n")[2]
    assert "memcache.go" not in told


def test_what_is_not_known_is_passed_on_as_it_is() -> None:
    assert str(error_from("error: something new\n")) == "kubectl: something new"
    assert "without an error message" in str(error_from(""))


def test_what_the_api_server_says_of_a_field_stays_whole() -> None:
    said = (
        'The DistributedTrainingJob "digits" is invalid: \n'
        '* spec.trainer.task: Unsupported value: "xmage": supported values: "image-classification"\n'
        "* <nil>: Invalid value: null: some validation rules were not checked because the object was invalid\n"
    )
    told = str(error_from(said))
    assert '* spec.trainer.task: Unsupported value: "xmage"' in told
    assert "<nil>" not in told


def test_a_complaint_cannot_steer_the_terminal_and_is_not_endless() -> None:
    told = str(error_from("error: \x1b]0;owned\x07" + "x" * 100_000))
    assert "\x1b" not in told
    assert "\x07" not in told
    assert len(told) < 5_000


def test_an_object_that_is_not_there_is_told_apart() -> None:
    assert isinstance(error_from('Error from server (NotFound): pods "a" not found'), NotFound)
    assert not isinstance(error_from("error: You must be logged in to the server (Unauthorized)"), NotFound)


def test_a_machine_without_kubectl_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"kubectl was not found.*Install it"):
        Kubectl().run("get", "pods")


def test_namespace_and_context_are_handed_on(fake: FakeKubectl) -> None:
    fake.answers("get", says="fine")
    assert Kubectl("team", "prod").run("get", "pods").text == "fine"
    assert fake.asked[0].words[:2] == ["--context=prod", "--namespace=team"]


def test_without_them_kubectls_own_choice_counts(fake: FakeKubectl) -> None:
    fake.answers("get", says="fine")
    Kubectl().run("get", "pods")
    assert not any(word.startswith(("--context", "--namespace")) for word in fake.asked[0].words)


def test_a_context_that_is_not_there_is_told_with_the_nearest(fake: FakeKubectl) -> None:
    fake.answers("get", complains="Error in configuration: context was not found for specified context: prud")
    fake.answers("get-contexts", says="prod\nstaging\n")
    with pytest.raises(ClusterError, match="there is no context prud; did you mean prod"):
        Kubectl(context="prud").run("get", "pods")


def test_warnings_come_with_the_answer(fake: FakeKubectl) -> None:
    fake.answers("apply", says="{}", complains="Warning: this field is old\n", code=0)
    assert Kubectl().run("apply").warnings == ("this field is old",)


def test_what_is_given_arrives_whole(fake: FakeKubectl) -> None:
    fake.answers("apply", says="fine")
    much = "ü" * 300_000
    Kubectl().run("apply", "-f", "-", stdin=much)
    assert fake.asked[0].given == much


@pytest.fixture
def speaks_first(fake: FakeKubectl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for an answer waits until kubectl has started and spoken, however long a busy machine takes."""

    def after_it_spoke(*arguments: Any) -> Any:
        until(lambda: fake.answered, "kubectl's words")
        return select.select(*arguments)

    monkeypatch.setattr(kubectl_module, "select", SimpleNamespace(select=after_it_spoke))


@pytest.mark.usefixtures("speaks_first")
def test_one_that_does_not_answer_is_ended_and_what_it_said_is_told(fake: FakeKubectl) -> None:
    fake.answers("get", complains="To sign in, open https://login.example", stays=True)
    with pytest.raises(ClusterError, match=r"did not answer within 0\.2 s; its last output: To sign in"):
        Kubectl().run("get", "pods", seconds=0.2)
    assert not exists(fake.asked[0].pid)


def test_an_answer_without_end_is_not_read_to_its_end(fake: FakeKubectl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubectl_module, "MAX_ANSWER_BYTES", 1_000)
    fake.answers("get", says="x" * 200_000, stays=True)
    with pytest.raises(ClusterError, match="larger than"):
        Kubectl().run("get", "pods")
    assert not exists(fake.asked[0].pid)


def test_an_answer_that_is_no_json_is_no_stack_trace(fake: FakeKubectl) -> None:
    fake.answers("get", says="<html>")
    with pytest.raises(ClusterError, match="did not answer with JSON"):
        Kubectl().json("get", "pods")


@pytest.mark.usefixtures("speaks_first")
def test_no_kubectl_is_left_behind_by_one_who_stops_listening(
    fake: FakeKubectl, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> bytes:
        raise KeyboardInterrupt

    fake.answers("get", says="fine", stays=True)
    monkeypatch.setattr(kubectl_module, "os", SimpleNamespace(read=interrupted, SEEK_END=os.SEEK_END))
    with pytest.raises(KeyboardInterrupt):
        Kubectl().run("get", "pods")
    assert not exists(fake.asked[0].pid)


def exists(pid: int) -> bool:
    """Whether there is such a process, a zombie too."""
    return Path(f"/proc/{pid}").exists()
