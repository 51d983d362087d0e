"""How far training is, from what the ranks say."""

from dataclasses import replace

import pytest

from tandem.wire.protocol import RankReport
from tandem.wire.status import CheckpointRef, Progress
from tandem_coordinator import membership, snapshots
from tandem_coordinator.group_state import Rules, Synced, Tick
from tandem_coordinator.progress import Reports
from tandem_coordinator.run_watcher import Ending, Observed
from tandem_coordinator.snapshots import Instant
from tests.support import manifests
from tests.support.worlds.membership_job import RULES, message


def report(rank: int, step: int, **more: object) -> RankReport:
    return RankReport(rank=rank, step=step, total_steps=1000).model_copy(update=more)


def test_the_first_rank_that_reports_leads() -> None:
    reports = Reports()
    reports.begin(3)
    reports.record("worker-1", 3, [report(3, 10, loss=3.0), report(2, 10, loss=2.0)], 1.0)
    assert (reports.step, reports.loss) == (10, 2.0)
    reports.record("worker-0", 3, [report(0, 11, loss=1.0), report(1, 11)], 1.0)
    assert (reports.step, reports.loss) == (11, 1.0)
    reports.record("worker-1", 3, [report(2, 99), report(3, 99)], 2.0)
    assert reports.step == 11
    reports.forget("worker-0")
    reports.record("worker-1", 3, [report(2, 12), report(3, 12)], 3.0)
    assert reports.step == 12
    assert reports.loss == 1.0, "the last known one stays"


@pytest.fixture
def reports() -> Reports:
    reports = Reports()
    reports.begin(1)
    return reports


def test_the_pace_gives_the_time_that_remains(reports: Reports) -> None:
    assert reports.progress() is None
    for second in range(11):
        reports.record("worker-0", 1, [report(0, 100 + 10 * second)], float(second))
    progress = reports.progress()
    assert (progress.step, progress.percent, progress.remaining_seconds) == (200, 20.0, 80.0)


def test_progress_does_not_fall_behind_the_checkpoint_that_a_new_group_goes_on_from() -> None:
    def told() -> int:
        progress = reports.progress(CheckpointRef(name="step-000000680", step=680, generation=1))
        return progress.step

    reports = Reports()
    reports.begin(1)
    reports.record("worker-0", 1, [report(0, 510)], 1.0)
    assert told() == 680, "the save is known before the next heartbeat"
    reports.begin(2)
    assert told() == 680
    reports.record("worker-0", 2, [report(0, 0, phase="starting")], 3.0)
    assert told() == 680
    reports.record("worker-0", 2, [report(0, 641)], 4.0)
    assert told() == 641, "where the newest checkpoint could not be resumed from"


def test_a_generation_begins_without_what_the_last_one_said(reports: Reports) -> None:
    reports.record("worker-0", 1, [report(0, 100, saves=True)], 1.0)
    assert (reports.stepping, reports.silent, reports.saves) == (True, False, True)
    reports.begin(2)
    reports.record("worker-0", 1, [report(0, 101)], 2.0)
    assert (reports.stepping, reports.silent, reports.saves) == (False, True, False)
    assert reports.step == 100, "a view of the job does not flicker"
    reports.record("worker-0", 2, [report(0, 0, phase="starting")], 3.0)
    assert (reports.stepping, reports.silent) == (False, False)
    assert reports.step == 100


def test_a_group_saves_when_asked_only_if_all_of_its_ranks_do(reports: Reports) -> None:
    assert not reports.saves
    reports.record("worker-0", 1, [report(0, 5, saves=True)], 1.0)
    reports.record("worker-1", 1, [report(1, 5, saves=False)], 1.0)
    assert not reports.saves
    reports.forget("worker-1")
    assert reports.saves
    reports.record("worker-0", 1, [], 2.0)
    assert not reports.saves
    assert reports.silent


def test_use_is_summed_over_the_ranks_that_tell_it(reports: Reports) -> None:
    assert reports.utilization(None) is None
    reports.record("worker-0", 1, [report(0, 5, cpu=0.5, gpu=0.5, gpu_memory_bytes=10), report(1, 5)], 1.0)
    reports.record("worker-1", 1, [report(2, 5, cpu=1.0, gpu=1.0, gpu_memory_bytes=20)], 1.0)
    use = reports.utilization(0.25)
    assert (use.trainer_cpu, use.evaluator_cpu, use.gpu, use.gpu_memory_bytes) == (1.5, 0.25, 0.75, 30)
    assert reports.trainer_cpu() == {"0": 0.5, "2": 1.0}
    assert reports.gpu_memory() == {"0": 10, "2": 20}


def test_own_work_is_told_by_rank(reports: Reports) -> None:
    reports.record("worker-1", 1, [report(1, 5, busy_seconds=0.02), report(2, 5)], 1.0)
    reports.record("worker-0", 1, [report(0, 5, busy_seconds=0.0123456789)], 1.0)
    assert reports.trainer_busy() == {"0": 0.012346, "1": 0.02}


def test_a_script_says_nothing_of_its_steps_but_what_it_uses(reports: Reports) -> None:
    reports.record("worker-0", 1, [report(0, 0, phase="script", cpu=0.5)], 1.0)
    assert reports.silent
    assert not reports.stepping
    assert reports.step is None
    assert reports.trainer_cpu() == {"0": 0.5}
    reports.record("worker-1", 1, [report(1, 0, phase="stopped")], 1.0)
    assert not reports.stepping, "that it is stopped says nothing of its steps"
    reports.record("worker-1", 1, [report(1, 7)], 2.0)
    assert (reports.silent, reports.stepping) == (False, True), "it has begun to beat by itself"


def test_who_pauses_for_what_is_said(reports: Reports) -> None:
    reports.record("worker-0", 1, [report(0, 5), report(1, 5)], 1.0)
    assert reports.pause is None
    reports.record("worker-1", 1, [report(2, 5), report(3, 5, phase="validation", pauses=True)], 1.0)
    assert reports.pause == "training pauses: rank 3 (worker-1) is at validation"
    reports.record("worker-0", 1, [report(0, 9, pauses=True, finishing=True), report(1, 9)], 2.0)
    assert not reports.saving
    reports.record("worker-1", 1, [report(2, 9, phase="saving"), report(3, 9)], 2.0)
    assert reports.saving
    assert reports.pause == "all steps are taken, and the code after the loop runs"


def test_training_that_pauses_is_not_training_that_stalls(reports: Reports) -> None:
    reports.record("worker-0", 1, [report(0, 5)], 1.0)
    reports.record("worker-0", 1, [report(0, 5)], 400.0)
    assert reports.stepped_at == 1.0
    reports.record("worker-1", 1, [report(1, 5, phase="validation", pauses=True)], 500.0)
    assert reports.stepped_at == 500.0


def test_of_a_script_the_first_rank_that_logs_leads(reports: Reports) -> None:
    silent = report(0, 0, phase="script", script=True)
    reports.record("worker-0", 1, [silent, report(1, 7, loss=0.5, script=True)], 1.0)
    assert (reports.step, reports.loss, reports.stepping, reports.scripted) == (7, 0.5, True, True)
    reports.record("worker-1", 1, [report(2, 8, loss=0.4, script=True)], 2.0)
    assert reports.step == 7
    reports.record("worker-0", 1, [report(0, 9, script=True), report(1, 7, script=True)], 3.0)
    assert reports.step == 9
    reports.forget("worker-0")
    reports.record("worker-1", 1, [report(2, 10, script=True)], 4.0)
    assert reports.step == 10
    assert not reports.saves


def test_a_loss_that_is_not_finite_is_not_the_last_one_that_was(reports: Reports) -> None:
    reports.record("worker-0", 1, [report(0, 7, loss=0.5, script=True)], 1.0)
    assert reports.not_finite is None
    reports.record("worker-0", 1, [report(0, 8, loss_is_finite=False, script=True)], 2.0)
    assert reports.loss is None
    assert reports.not_finite.step == 8
    reports.begin(2)
    assert reports.not_finite is None, "of the new generation nothing is known"


def test_a_run_that_took_fewer_steps_than_announced_is_not_told_as_complete() -> None:
    early = "stopped early after step 40 of 100: the loss has not fallen"
    final = CheckpointRef(name="step-000000040", step=40, generation=1)
    observed = Observed(ending=Ending(False, "StoppedEarly", early, 1.0, final, total_steps=100))
    of, clock = manifests.job("digits"), Instant(1.0, 1.0)
    state = membership.initial_state(Rules.from_spec(of.spec), 1, 0.0)
    status = snapshots.status(of, state, clock, Reports(), observed, None, [])
    assert (status.phase, status.message) == ("Succeeded", early)
    assert status.progress == Progress(step=40, total_steps=100, percent=40.0, remaining_seconds=0.0)
    told = snapshots.snapshot(of, status, state, clock, Reports(), observed, [], [])
    assert told.reason == "StoppedEarly"
    complete = replace(observed, ending=Ending(False, "Done", "training is complete", 1.0, final))
    status = snapshots.status(of, state, clock, Reports(), complete, None, [])
    assert (status.message, status.progress.percent if status.progress else None) == (None, 100.0)
    assert snapshots.snapshot(of, status, state, clock, Reports(), complete, [], []).reason is None


def test_a_script_that_runs_does_not_start_again_in_words_when_a_session_begins_in_it() -> None:
    of, reports = manifests.job(trainer={"command": ["train.py"]}), Reports()
    state = membership.initial_state(replace(RULES, completes_on_exit=True), 1, 0.0)
    state, _ = membership.step(state, Synced(message("worker-0", "joining")), 0.0)
    state, _ = membership.step(state, Tick(), 0.0)
    state, _ = membership.step(state, Synced(message("worker-0", "running", generation=state.number)), 1.0)
    reports.begin(state.number)

    def phase() -> str:
        return snapshots.status(of, state, Instant(1.0, 1.0), reports, Observed(), None, []).phase

    seen = []
    for said in ("script", "starting", "train"):
        reports.record("worker-0", state.number, [report(0, 0, phase=said)], 1.0)
        seen.append(phase())
    assert seen == ["Running", "Running", "Running"]
    reports.begin(state.number)
    for said in ("script", "starting", "train"):
        reports.record("worker-0", state.number, [report(0, 0, phase=said)], 2.0)
        seen.append(phase())
    assert seen[3:] == ["Starting", "Starting", "Running"], "it is known now that it will say when it makes steps"
