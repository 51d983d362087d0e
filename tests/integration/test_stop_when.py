"""A run whose training ends because its evaluators have seen a score (`runPolicy.stopWhen`)."""

from pathlib import Path

import pytest

from tandem.rundir.records import TrainingEnd
from tests.support.local_run import LocalRun

pytestmark = pytest.mark.timeout(300)
ENDLESS = ["--set", "trainer.loop.epochs=1000000", "--set", "checkpoint.everySeconds=0.5"]


def test_all_ranks_leave_after_the_same_step_and_the_last_checkpoint_is_evaluated(tmp_path: Path) -> None:
    with LocalRun(tmp_path, *ENDLESS, "--set", "runPolicy.stopWhen.reaches=0.8") as run:
        assert run.ends() == 0, run.output
    done = run.run_dir.done()
    step = run.final_step()
    assert done is not None
    assert str(done["stoppedEarly"]).startswith(f"stopped early after step {step:,} of ")
    assert ": accuracy is " in done["stoppedEarly"]
    assert "digits stopped early after step" in run.output
    assert "not used on one machine" not in run.output
    assert [line["step"] for line in run.logged(TrainingEnd.model_fields["kind"].default)] == [step]
    assert (run.run_dir.evaluations / done["final"]["name"]).is_dir()
