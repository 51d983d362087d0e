"""What an evaluator process does next."""

from dataclasses import replace

import pytest

from tandem.rundir.evaluations import BASE
from tandem.rundir.layout import checkpoint_name
from tandem.wire.status import CheckpointRef
from tandem_evaluator.choice import (
    Evaluate,
    EvaluationState,
    Finished,
    Merge,
    Policy,
    Skip,
    View,
    Wait,
    choose,
    is_still_needed,
)


def ref(step: int) -> CheckpointRef:
    return CheckpointRef(name=checkpoint_name(step), step=step, generation=1)


def stands(
    step: int, finished: str = "", claimed: str = "", merged: bool = False, skipped: bool = False
) -> EvaluationState:
    """Shards are given as digits: "01" is shard 0 and shard 1."""
    return EvaluationState(ref(step), frozenset(map(int, finished)), frozenset(map(int, claimed)), merged, skipped)


def running(*standings: EvaluationState) -> View:
    return View(standings)


def done(*standings: EvaluationState, final: int | None = None) -> View:
    return View(standings, ended=True, final=None if final is None else ref(final))


def work(step: int, *shards: int) -> Evaluate:
    return Evaluate(ref(step), shards)


LATEST = [
    ("nothing there yet", running(), Wait()),
    ("the only one", running(stands(10)), work(10, 0, 1)),
    ("only the newest is begun, and the older ones are recorded", running(stands(30), stands(20), stands(10)),
     Skip((ref(20), ref(10)))),
    ("once recorded, the newest is begun", running(stands(30), stands(20, skipped=True)), work(30, 0, 1)),
    ("a shard that another works on is left to it", running(stands(10, claimed="0")), work(10, 1)),
    ("a shard that is finished is not done again", running(stands(10, finished="1")), work(10, 0)),
    ("nothing free", running(stands(10, finished="1", claimed="0")), Wait()),
    ("what was begun is finished before something newer is begun", running(stands(20), stands(10, finished="0")),
     work(10, 1)),
    ("what was begun and is in hands does not hold back the newest", running(stands(20), stands(10, claimed="01")),
     work(20, 0, 1)),
    ("of two that were begun the newer comes first", running(stands(20, claimed="0"), stands(10, claimed="0")),
     work(20, 1)),
    ("all shards there", running(stands(20), stands(10, finished="01")), Merge(ref(10))),
    ("all shards there, although it was skipped", running(stands(10, finished="01", skipped=True)), Merge(ref(10))),
    ("the newest is merged", running(stands(10, merged=True)), Wait()),
    ("there is no going back behind what is merged", running(stands(20, merged=True), stands(10)), Skip((ref(10),))),
    ("nor after that is recorded", running(stands(20, merged=True), stands(10, skipped=True)), Wait()),
    ("a claim that ran out without result leaves nothing begun", running(stands(20), stands(10)), Skip((ref(10),))),
    ("skipped in the middle of somebody's work", running(stands(20, merged=True), stands(10, "0", skipped=True)),
     Wait()),
    ("DONE and nothing left", done(stands(10, merged=True), final=10), Finished()),
    ("DONE without a single checkpoint", done(), Finished()),
    ("DONE: the final one", done(stands(20), stands(10, skipped=True), final=20), work(20, 0, 1)),
    ("DONE: the final one although it was skipped", done(stands(20, skipped=True), final=20), work(20, 0, 1)),
    ("DONE: the final one although a newer one is there", done(stands(30, skipped=True), stands(20), final=20),
     work(20, 0, 1)),
    ("DONE: the final one before what was begun", done(stands(20), stands(10, finished="0"), final=20),
     work(20, 0, 1)),
    ("DONE: then what was begun", done(stands(20, merged=True), stands(10, finished="0"), final=20), work(10, 1)),
    ("DONE: what nobody began is recorded", done(stands(20), stands(10), final=20), Skip((ref(10),))),
    ("DONE: another still works on the final one", done(stands(20, finished="0", claimed="1"), final=20), Wait()),
    ("DONE: another died with the final one", done(stands(20, finished="0"), final=20), work(20, 1)),
    ("DONE: another still works on an older one", done(stands(20, merged=True), stands(10, "0", "1"), final=20),
     Wait()),
    ("DONE names one that is gone or broken", done(stands(10, skipped=True), final=20), work(10, 0, 1)),
    ("FAILED: the newest", done(stands(20, skipped=True), stands(10, merged=True)), work(20, 0, 1)),
    ("FAILED and nothing left", done(stands(20, merged=True), stands(10, skipped=True)), Finished()),
]  # fmt: skip

EVERY = [
    ("nothing there yet", running(), Wait()),
    ("oldest first", running(stands(30), stands(20), stands(10)), work(10, 0, 1)),
    ("oldest free one", running(stands(30), stands(20), stands(10, claimed="01")), work(20, 0, 1)),
    ("what an earlier run skipped", running(stands(20), stands(10, skipped=True)), work(10, 0, 1)),
    ("all shards there", running(stands(20), stands(10, finished="01")), Merge(ref(10))),
    ("all merged", running(stands(20, merged=True), stands(10, merged=True)), Wait()),
    ("DONE: the backlog first", done(stands(20), stands(10), final=20), work(10, 0, 1)),
    ("DONE: another still works", done(stands(20, merged=True), stands(10, claimed="01"), final=20), Wait()),
    ("DONE and nothing left", done(stands(20, merged=True), stands(10, merged=True), final=20), Finished()),
    ("FAILED: all of them too", done(stands(20), stands(10, merged=True)), work(20, 0, 1)),
]


@pytest.mark.parametrize(("view", "action"), [case[1:] for case in LATEST], ids=[case[0] for case in LATEST])
def test_latest(view: View, action: object) -> None:
    assert choose(view, "Latest", 2) == action


@pytest.mark.parametrize(("view", "action"), [case[1:] for case in EVERY], ids=[case[0] for case in EVERY])
def test_every(view: View, action: object) -> None:
    assert choose(view, "Every", 2) == action


@pytest.mark.parametrize("policy", ["Latest", "Every"])
def test_nobody_leaves_while_a_checkpoint_may_yet_turn_out_sound(policy: Policy) -> None:
    view = View((stands(10, merged=True),), ended=True, final=ref(20), unsure=True)
    assert choose(view, policy, 2) == Wait()


@pytest.mark.parametrize(
    ("why", "standing", "view", "policy", "worth"),
    [
        ("still to do", stands(10), running(stands(10)), "Latest", True),
        ("finished meanwhile", stands(10, "0"), running(stands(10)), "Every", False),
        ("merged meanwhile", stands(10, merged=True), running(stands(10)), "Every", False),
        ("skipped meanwhile", stands(10, skipped=True), running(stands(20)), "Latest", False),
        ("skipped by an earlier run", stands(10, skipped=True), running(stands(20)), "Every", True),
        ("skipped but final", stands(10, skipped=True), done(stands(10, skipped=True), final=10), "Latest", True),
    ],
)
def test_a_won_claim_is_worth_its_work_only_if_the_work_is_still_to_do(
    why: str, standing: EvaluationState, view: View, policy: Policy, worth: bool
) -> None:
    assert is_still_needed(standing, 0, view, policy) is worth, why


BASES = [
    ("before any checkpoint", "", "", running(), Evaluate(BASE, (0, 1))),
    ("before a checkpoint that is there", "1", "", running(stands(10)), Evaluate(BASE, (0,))),
    ("checkpoints go on while others work on it", "", "01", running(stands(10)), work(10, 0, 1)),
    ("all of its shards are there", "01", "", running(stands(10)), Merge(BASE)),
    ("before the final one, which ends the job", "", "", done(stands(20), final=20), Evaluate(BASE, (0, 1))),
    ("nobody leaves before it", "0", "1", done(stands(20, merged=True), final=20), Wait()),
]


@pytest.mark.parametrize("policy", ["Latest", "Every"])
@pytest.mark.parametrize(
    ("finished", "claimed", "view", "action"), [case[1:] for case in BASES], ids=[case[0] for case in BASES]
)
def test_the_base_model_comes_first_and_is_never_passed_over(
    policy: Policy, finished: str, claimed: str, view: View, action: object
) -> None:
    base = EvaluationState(BASE, frozenset(map(int, finished)), frozenset(map(int, claimed)))
    assert choose(replace(view, base=base), policy, 2) == action


def test_once_the_base_model_is_evaluated_all_is_as_without_one() -> None:
    for _, view, action in LATEST:
        assert choose(replace(view, base=EvaluationState(BASE, merged=True)), "Latest", 2) == action
