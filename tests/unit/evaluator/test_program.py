"""A program of the user's own as the evaluator: what it is given, what it reports, and what becomes of its failures."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import psutil
import pytest

from tandem import evaluation
from tandem.confidence import mean_interval, share_interval
from tandem.evaluation import Confusion, GeometricMean, Histogram, Max, Mean, Min, Sum
from tandem.job.resource import Evaluators
from tandem.processes import limits
from tandem.wire.status import CheckpointRef
from tandem_evaluator import program
from tandem_evaluator.program import ProgramScoring
from tandem_evaluator.result import ProgramShard, macro_f1_interval, merge_program
from tandem_evaluator.scoring import ProgramFailed, Work
from tests.support import SCRIPTS
from tests.support.waiting import until

REFERENCE = CheckpointRef(name="step-000000100", step=100, generation=1)
STAYS = """
    import os, sys
    from tandem.evaluation import Mean, checkpoints
    for checkpoint in checkpoints():
        checkpoint.report(accuracy=Mean(checkpoint.step + checkpoint.shard, 1000), process=os.getpid())
"""
RUNS_ONCE = """
    import json, os
    from pathlib import Path
    shard, step = (int(os.environ[f"TANDEM_{name}"]) for name in ("SHARD", "CHECKPOINT_STEP"))
    answer = {"accuracy": {"mean": [shard, 10]}, "step": step}
    Path(os.environ["TANDEM_REPORT"]).write_text(json.dumps(answer))
"""


class Scorings:
    """Makes scorings of scripts, and ends their programs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[ProgramScoring] = []

    def __call__(self, script: str, **fields: Any) -> ProgramScoring:
        path = self._folder / f"script-{len(self._made)}.py"
        path.write_text(dedent(script))
        evaluators = Evaluators(command=["python", str(path)], metric="accuracy", **fields)
        self._made.append(ProgramScoring(evaluators))
        return self._made[-1]

    def close(self) -> None:
        for one in self._made:
            one.close()


@pytest.fixture
def scoring(tmp_path: Path) -> Iterator[Scorings]:
    made = Scorings(tmp_path)
    yield made
    made.close()


def work(shard: int = 0, shards: int = 2) -> Work:
    return Work(REFERENCE, shard, shards, "evaluator-0-0", time.time())


def scored(subject: ProgramScoring, shard: int = 0, going_on: Callable[[], bool] = lambda: True) -> ProgramShard:
    found = subject.score(Path("folder"), work(shard), going_on)
    assert found is not None
    return found


def test_a_program_that_stays_gets_one_shard_after_the_other(scoring: Scorings) -> None:
    subject = scoring(STAYS)
    first, second = scored(subject), scored(subject, 1)
    assert (first.metrics["accuracy"].value, first.metrics["accuracy"].count) == (100, 1000)
    assert second.metrics["accuracy"].value == 101
    assert (second.shard, second.shards, second.step, second.evaluator) == (1, 2, 100, "evaluator-0-0")
    assert first.metrics["process"].value == second.metrics["process"].value, "it is the same process"


def test_the_digest_of_weights_that_a_program_names_is_that_of_its_shard(scoring: Scorings) -> None:
    subject = scoring("""
        from tandem.evaluation import checkpoints
        for checkpoint in checkpoints():
            checkpoint.scored = "5a" if checkpoint.shard == 0 else ""
            checkpoint.report(accuracy=1)
    """)
    assert [scored(subject, shard).weights for shard in (0, 1)] == ["5a", ""]
    assert "weights" not in scored(subject, 1).to_json()


def test_a_program_that_ends_is_run_for_each_shard(scoring: Scorings) -> None:
    subject = scoring(RUNS_ONCE)
    assert [scored(subject, shard).metrics["accuracy"].value for shard in (0, 1)] == [0, 1]
    assert scored(subject).metrics["step"].value == 100


@pytest.mark.parametrize("by_hand", [False, True], ids=["by-default", "by-the-user"])
def test_a_program_keeps_a_little_of_what_it_frees(
    scoring: Scorings, by_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_hand:
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(2**20))
    subject = scoring(f"""
        import subprocess, sys
        from tandem.evaluation import Sum, checkpoints
        command = [sys.executable, {str(SCRIPTS / "page_faults.py")!r}, "nobody", *["1"] * 60]
        for checkpoint in checkpoints():
            checkpoint.report(pages=Sum(int(subprocess.check_output(command))))
    """)
    pages = scored(subject).metrics["pages"].value
    assert pages > 50_000 if by_hand else pages < 200, "of 76,800 in five steps of 60 MiB"


def test_what_it_reports_is_put_together_as_it_says(scoring: Scorings) -> None:
    subject = scoring("""
        from tandem.evaluation import Confusion, GeometricMean, Max, Mean, Min, Sum, checkpoints
        for checkpoint in checkpoints():
            rows = [[3, 1], [0, 2]] if checkpoint.shard else [[1, 0], [1, 0]]
            n = checkpoint.shard + 1
            checkpoint.report(
                loss=Mean(0.5 * n, n), words=Sum(n), longest=Max(n), shortest=Min(n), plain=n, classes=Confusion(rows),
                perplexity=GeometricMean(n * n * 0.3, n),
            )
    """)
    shards = [scored(subject, shard) for shard in (1, 0)]
    for order in permutations(shards):
        merged = subject.merge(list(order))
        assert merged.scores == {
            "accuracy": 0.75,
            "macroF1": pytest.approx((0.8 + 2 / 3) / 2),
            "loss": 0.5,
            "words": 3,
            "longest": 2,
            "shortest": 1,
            "plain": 1.5,
            "perplexity": pytest.approx(math.exp(1.5 / 3), rel=1e-15),
        }
        assert merged.confusion == [[4, 1], [1, 2]]
        assert merged.note == ""


def test_a_mean_is_that_of_one_pass_however_the_data_is_split() -> None:
    values = [0.1 * number for number in range(1000)]
    for shards in (1, 2, 3, 7):
        parts = [values[shard::shards] for shard in range(shards)]
        results = [part_of(shard, shards, loss=Mean(sum(part), len(part))) for shard, part in enumerate(parts)]
        merged = merge_program(results, "loss").scores["loss"]
        assert merged == pytest.approx(sum(values) / 1000, rel=1e-15)


def test_a_mean_that_is_reported_with_its_sums_has_an_interval_however_the_data_is_split(scoring: Scorings) -> None:
    subject = scoring("""
        from tandem.evaluation import Confusion, GeometricMean, Mean, checkpoints
        values = [number % 11 / 8 for number in range(300)]
        for checkpoint in checkpoints():
            mine = values[checkpoint.shard :: checkpoint.shards]
            checkpoint.report(
                loss=Mean.from_samples(mine),
                perplexity=GeometricMean.from_samples(mine),
                hits=Mean.from_samples(value > 1 for value in mine),
                bare=Mean(sum(mine), len(mine)),
                infinite=Mean.from_samples([float("inf"), *mine]),
                classes=Confusion([[len(mine) // 2, 3], [0, 1]]),
            )
    """)
    values = [number % 11 / 8 for number in range(300)]
    merged = subject.merge([scored(subject, shard) for shard in (1, 0)])
    loss = mean_interval(Mean.from_samples(values))
    assert loss is not None
    assert merged.intervals == {
        "accuracy": list(share_interval(152, 158) or ()),
        "macroF1": list(macro_f1_interval(np.array([[150, 6], [0, 2]])) or ()),
        "loss": list(loss),
        "perplexity": [math.exp(end) for end in loss],
        "hits": list(share_interval(54, 300) or ()),
    }
    assert subject.read_merged(json.loads(json.dumps(merged.to_json()))) == merged


@pytest.mark.parametrize("moments", [[1, 2], "many", [1, 2, 3, 4, 5, 6, 7, None]])
def test_sums_that_are_none_are_refused_by_name(scoring: Scorings, moments: object) -> None:
    subject = scoring(f"""
        import json, os
        report = {{"f1": {{"mean": [1, 2], "moments": {moments!r}}}}}
        open(os.environ["TANDEM_REPORT"], "w").write(json.dumps(report))
    """)
    with pytest.raises(ProgramFailed, match=r"report is wrong: metrics\.f1\.moments"):
        scored(subject)


def part_of(shard: int, shards: int, **metrics: Mean | GeometricMean | Sum | Max | Min | Histogram) -> ProgramShard:
    parts, histograms = {}, {}
    for name, metric in metrics.items():
        if isinstance(metric, Histogram):
            histograms |= {name: metric.wire()["histogram"]}
            continue
        ((reducer, content),) = metric.wire().items()
        value, count = content if isinstance(content, list) else (content, 1)
        parts[name] = {"reducer": reducer, "value": None if value is None else float(value), "count": float(count)}
    facts = {"checkpoint": "step-000000100", "step": 100, "generation": 1, "shard": shard, "shards": shards}
    facts |= {"metrics": parts, "histograms": histograms, "seconds": 1.0, "evaluator": "e", "at": 1.0}
    return ProgramShard.read(facts)


def test_a_geometric_mean_too_large_for_a_number_is_none() -> None:
    scores = merge_program([part_of(0, 1, a=GeometricMean(1420.0, 2), b=GeometricMean(1418.0, 2))], "b").scores
    assert scores["a"] is None
    assert scores["b"] == math.exp(709)
    assert merge_program([part_of(0, 1, a=GeometricMean(0, 0))], "a").scores == {"a": None}


def test_what_is_not_finite_is_none_and_said() -> None:
    merged = merge_program([part_of(0, 1, loss=Mean(float("nan"), 3), accuracy=Mean(1, 2))], "accuracy")
    assert merged.scores == {"loss": None, "accuracy": 0.5}
    assert "not finite" in merged.note


def test_no_samples_at_all_are_no_mean() -> None:
    assert merge_program([part_of(0, 1, loss=Mean(0.0, 0))], "loss").scores == {"loss": None}


def test_a_metric_that_is_asked_for_and_not_reported_is_said() -> None:
    merged = merge_program([part_of(0, 1, loss=Mean(1.0, 2))], "bleu")
    assert "the program reports no bleu" in merged.note


def test_shards_that_disagree_on_a_reducer_have_no_score() -> None:
    merged = merge_program([part_of(0, 2, loss=Mean(1.0, 2)), part_of(1, 2, loss=Sum(1.0))], "loss")
    assert merged.scores == {"loss": None}
    assert "loss of two shards: a Mean and a Sum do not add up" in merged.note


def test_histograms_of_shards_add_up_bin_by_bin(scoring: Scorings) -> None:
    subject = scoring("""
        from tandem.evaluation import Histogram, checkpoints
        for checkpoint in checkpoints():
            checkpoint.report(accuracy=1, errors=Histogram([checkpoint.shard, 3, 0], [0, 0.1, 0.5, 2]))
    """)
    for order in permutations([scored(subject, shard) for shard in (0, 1)]):
        merged = subject.merge(list(order))
        stored = json.loads(json.dumps(merged.to_json()))
        assert stored["histograms"] == {"errors": {"counts": [1, 6, 0], "edges": [0, 0.1, 0.5, 2]}}
        assert merged.scores == {"accuracy": 1}
        assert subject.read_merged(stored) == merged


def test_a_program_that_ends_writes_a_histogram_as_json(scoring: Scorings) -> None:
    subject = scoring("""
        import os, pathlib
        histogram = '{"histogram": {"counts": [1, 2], "edges": [-1, 0, 1]}}'
        pathlib.Path(os.environ["TANDEM_REPORT"]).write_text('{"loss": 1, "errors": %s}' % histogram)
    """)
    assert scored(subject).values()["errors"] == Histogram([1, 2], [-1, 0, 1])


def test_a_histogram_decides_nothing_and_that_is_said() -> None:
    merged = merge_program([part_of(0, 1, loss=Mean(1.0, 2), errors=Histogram([1], [0, 1]))], "errors")
    assert merged.note.startswith("evaluators.metric names errors, a histogram, which has no score")
    assert merged.scores == {"loss": 0.5}


def test_histograms_of_different_edges_are_left_out_and_that_is_said() -> None:
    bins = [Histogram([1, 2], [0, 1, 2]), Histogram([1], [0, 2])]
    merged = merge_program([part_of(n, 2, loss=Mean(1.0, 2), errors=bins[n]) for n in (0, 1)], "loss")
    assert merged.histograms is None
    assert merged.note == (
        "errors of two shards: histograms of different edges do not add up (3 from 0 to 2 and 2 from 0 to 2); "
        "use fixed edges"
    )


def test_a_metric_that_is_a_histogram_in_one_shard_alone_has_no_score() -> None:
    bins = Histogram([1], [0, 1])
    parts = [part_of(0, 2, loss=Mean(1.0, 2)), part_of(1, 2, loss=bins, words=Sum(1))]
    merged = merge_program(parts, "loss")
    assert merged.scores == {"loss": None, "words": 1}
    assert "a Mean and a Histogram do not add up" in merged.note


@pytest.mark.parametrize(
    ("counts", "edges", "words"),
    [
        ([], [0], "1 to 256 bins, not 0"),
        ([1] * 257, range(258), "1 to 256 bins, not 257"),
        ([1, 2], [0, 1], "2 bins has 3 edges, not 2"),
        ([1, 2], [0, 2, 1], "each is larger than the one before"),
        ([1, 2], [0, 1, float("inf")], "are finite"),
        ([0.25, 0.75], [0, 1, 2], "0.25 in a histogram is no count"),
        ([-1, 2], [0, 1, 2], "-1 in a histogram is no count"),
        ([10**30, 2], [0, 1, 2], "is no count"),
    ],
)
def test_what_is_no_histogram_is_named_where_it_is_made(counts: Any, edges: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Histogram(counts, edges)


def test_sums_that_no_float_holds_have_no_score() -> None:
    for values in ([1e308, 1e308], [float("inf"), float("-inf")]):
        merged = merge_program([part_of(n, 2, loss=Mean(1.0, 2), words=Sum(values[n])) for n in (0, 1)], "loss")
        assert merged.scores == {"loss": 0.5, "words": None}


def reporting(content: str) -> str:
    """A program that writes such a report."""
    return f"import os, pathlib; pathlib.Path(os.environ['TANDEM_REPORT']).write_text({content!r})"


LIBRARY = "from tandem.evaluation import checkpoints\nfor one in checkpoints(): "
NULL_TOLD = "import os, time; os.write(int(os.environ['TANDEM_CHANNEL'].split(',')[1]), b'{\"metrics\": null}\\n')"
HISTOGRAM = '{"h": {"histogram": {"counts": [1], "edges": [0, 1]}}}'
FAILURES = {
    "crash": ("raise KeyError('text')", "exit code 1: KeyError: 'text'"),
    "a-number-of-ours": ("raise SystemExit(78)", "exit code 78"),
    "signal": ("import os; os.kill(os.getpid(), 9)", "killed by SIGKILL"),
    "silence": ("pass", "ended without a report"),
    "null": (reporting("null"), "ended without a report"),
    "null-in-the-channel": (f"{NULL_TOLD}; time.sleep(600)", "something else than reports"),
    "larger-than-a-float": (reporting('{"accuracy": 1' + "0" * 400 + "}"), "too large for a float"),
    "larger-than-a-count": (reporting('{"c": {"confusion": [[9' + "0" * 30 + "]]}}"), "report is wrong: confusion"),
    "no-json": (reporting("{"), "report is not JSON"),
    "text": (reporting('{"accuracy": "good"}'), "accuracy is 'good', which is no number"),
    "list": (reporting("[1]"), "it has to be an object"),
    "name": (reporting('{"a b": 1}'), "report is wrong: metrics"),
    "not-square": (reporting('{"c": {"confusion": [[1, 2]]}}'), "as many columns as rows"),
    "histogram": (reporting('{"a": 1, "h": {"histogram": [1, 2]}}'), "report is wrong: histograms"),
    "histogram-alone": (reporting(HISTOGRAM), "at least one metric beside its histograms, which have no score"),
    "none": (f"{LIBRARY}one.report(accuracy=None)", "TypeError: accuracy is None, which is no number"),
    "unreported": (f"{LIBRARY}pass", "step 100 was not reported"),
    "stays-and-ends": (f"{LIBRARY}break", "ended without a report"),
}


def test_a_program_that_the_kernel_kills_for_lack_of_memory_says_so(
    scoring: Scorings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "vmstat"
    counter.write_text("oom_kill 1\n")
    monkeypatch.setattr(limits, "VMSTAT", counter)
    # Each try counts one more, as each kill does.
    script = f"""
import os, pathlib
counter = pathlib.Path({str(counter)!r})
counter.write_text(f"oom_kill {{int(counter.read_text().split()[1]) + 1}}")
os.kill(os.getpid(), 9)
"""
    with pytest.raises(ProgramFailed, match=r"the program was killed by the kernel \(SIGKILL\): the memory"):
        scored(scoring(script))


@pytest.mark.parametrize(("script", "why"), FAILURES.values(), ids=FAILURES)
def test_a_program_that_fails_is_tried_twice_and_then_said_in_one_line(
    scoring: Scorings, tmp_path: Path, script: str, why: str
) -> None:
    tries = tmp_path / "tries"
    subject = scoring(f"open({str(tries)!r}, 'a').write('x')\n{script}")
    with pytest.raises(ProgramFailed, match=why) as caught:
        scored(subject)
    assert "\n" not in str(caught.value)
    assert tries.read_text() == "xx"


def test_a_program_that_failed_once_may_do_well_afresh(scoring: Scorings, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    subject = scoring(f"""
        import os, sys
        from tandem.evaluation import checkpoints
        for checkpoint in checkpoints():
            if not os.path.exists({str(mark)!r}):
                open({str(mark)!r}, "w")
                sys.exit(3)
            checkpoint.report(accuracy=1)
    """)
    assert scored(subject).metrics["accuracy"].value == 1


def test_a_program_that_fails_on_one_checkpoint_scores_the_next(scoring: Scorings) -> None:
    subject = scoring("""
        from tandem.evaluation import checkpoints
        for checkpoint in checkpoints():
            assert checkpoint.shard != 1
            checkpoint.report(accuracy=1)
    """)
    assert scored(subject).metrics["accuracy"].value == 1
    with pytest.raises(ProgramFailed, match="AssertionError"):
        scored(subject, 1)
    assert scored(subject).metrics["accuracy"].value == 1


def test_a_program_that_takes_too_long_is_killed_with_all_that_it_has_started(
    scoring: Scorings, tmp_path: Path
) -> None:
    child = tmp_path / "child"
    subject = scoring(
        f"""
        import subprocess, sys, time
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open({str(child)!r}, "w").write(str(process.pid))
        time.sleep(600)
        """,
        timeout_seconds=1.0,
    )
    with pytest.raises(ProgramFailed, match=r"taken longer than 1.0 s \(timeoutSeconds\)"):
        scored(subject)
    until(lambda: not psutil.pid_exists(int(child.read_text())) or is_dead(int(child.read_text())), "its child is gone")


def is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_an_evaluator_that_has_to_leave_ends_its_program_in_the_middle(scoring: Scorings, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    subject = scoring(f"""
        import time
        from tandem.evaluation import checkpoints
        for checkpoint in checkpoints():
            open({str(begun)!r}, "w")
            time.sleep(600)
    """)
    assert subject.score(Path("folder"), work(), lambda: not begun.exists()) is None
    assert subject._program is None


def test_a_program_that_stays_ends_by_itself_when_the_work_is_over(scoring: Scorings, tmp_path: Path) -> None:
    end = tmp_path / "end"
    subject = scoring(f"{dedent(STAYS)}\nopen({str(end)!r}, 'w').write('in order')")
    scored(subject)
    subject.close()
    assert end.read_text() == "in order"


def test_a_program_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    subject = ProgramScoring(Evaluators(command=[str(tmp_path / "nothing")]))
    with pytest.raises(ProgramFailed, match="cannot be started: No such file"):
        subject.score(Path("folder"), work(), lambda: True)


def test_a_report_without_end_is_not_kept(scoring: Scorings) -> None:
    subject = scoring("""
        import os
        _, reports = os.environ["TANDEM_CHANNEL"].split(",")
        while True:
            os.write(int(reports), b"x" * 65536)
    """)
    with pytest.raises(ProgramFailed, match="more than"):
        scored(subject)


def test_what_a_program_prints_is_passed_on(scoring: Scorings, capfd: pytest.CaptureFixture[str]) -> None:
    scored(scoring("print('loading')\n" + dedent(STAYS)))
    until(lambda: "loading" in capfd.readouterr().out, "its line")


# The program's side, by hand


def test_outside_an_evaluator_it_says_how_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(evaluation.CHECKPOINT, raising=False)
    with pytest.raises(RuntimeError, match=r"set TANDEM_CHECKPOINT to the folder"):
        next(evaluation.checkpoints())


def test_by_hand_it_gets_one_checkpoint_and_prints_its_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv(evaluation.CHECKPOINT, str(tmp_path / "step-000000050"))
    for checkpoint in evaluation.checkpoints():
        assert (checkpoint.step, checkpoint.shard, checkpoint.shards) == (50, 0, 1)
        assert checkpoint.weights == tmp_path / "step-000000050/weights.safetensors"
        checkpoint.report(accuracy=Mean(9, 10))
    assert json.loads(capsys.readouterr().out) == {"step": 50, "metrics": {"accuracy": {"mean": [9, 10]}}}


@pytest.mark.parametrize("value", [None, "0.9", True, [1], Mean("x", 1), Confusion([["x"]])])  # type: ignore[arg-type]
def test_what_is_no_number_is_refused_where_it_is_reported(value: Any, tmp_path: Path) -> None:
    subject = evaluation.Checkpoint(tmp_path, tmp_path, 1, 0, 1)
    with pytest.raises(TypeError, match="accuracy is"):
        subject.report(accuracy=value)


def test_a_report_has_metrics_and_there_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    subject = evaluation.Checkpoint(tmp_path, tmp_path, 1, 0, 1)
    with pytest.raises(ValueError, match="1 to 64"):
        subject.report()
    subject.report(accuracy=1)
    with pytest.raises(ValueError, match="reported already"):
        subject.report(accuracy=1)


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        ("tandem.evaluation", {"torch", "numpy", "pydantic"}),
        ("tandem_evaluator.loop, tandem_evaluator.program", {"torch", "sklearn", "scipy"}),
    ],
)
def test_neither_side_loads_what_only_a_built_in_task_needs(modules: str, heavy: set[str]) -> None:
    code = f"import sys, {modules}; sys.exit(bool({heavy!r} & set(sys.modules)))"
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == 0


@pytest.mark.parametrize("is_task", [True, False])
def test_the_program_of_a_task_does_not_import_from_the_jobs_code_what_tandem_needs(
    scoring: Scorings, tmp_path: Path, is_task: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `random.py` of the user's. A program of their own finds its modules there."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/tmp/tandem-code-0123", str(tmp_path)]))
    if is_task:
        monkeypatch.setattr(program, "TASK_PROGRAM", [sys.executable, str(tmp_path / "script-0.py")])
    subject = scoring("""
    import os, sys
    from tandem.evaluation import checkpoints
    for checkpoint in checkpoints():
        checkpoint.report(
            accuracy=1.0, code=int("/tmp/tandem-code-0123" in sys.path), rest=int(os.environ["PYTHONPATH"] in sys.path)
        )
    """)
    assert scored(subject).metrics["code"].value == (not is_task)
    assert scored(subject).metrics["rest"].value == is_task
