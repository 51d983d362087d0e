"""What a person sees of a run, at 80 and 120 columns, with and without colours, and as plain lines."""

import io
import math
import re
import time

import pytest
from rich.console import Console

from tandem.formatting import count_noun, elapsed, number, percent_done
from tandem.wire.status import (
    CheckpointRef,
    Compared,
    EvaluatorView,
    Event,
    GenerationView,
    Members,
    Progress,
    Score,
    Snapshot,
    Status,
    Troubles,
    Utilization,
    phase_word,
)
from tandem_launcher.terminal.display import Written
from tandem_launcher.terminal.screen import (
    MAX_POINTS,
    Scene,
    Trail,
    event_line,
    merged,
    phase,
    screen,
    sparkline,
    state_line,
)

NOON = 1_700_000_000.0
EVENTS = (
    Event(at=NOON - 60, kind="info", text="generation 1 started with 2 workers"),
    Event(at=NOON - 30, kind="warning", text="worker-1 failed; generation 2 goes on from step 350"),
    Event(at=NOON - 20, kind="error", text="step-000000400 set aside: weights.safetensors does not match its checksum"),
)
FULL_DISK = Troubles(
    saves_failed=5,
    saves_failed_in_a_row=5,
    save_message="[Errno 28] No space left on device; and nothing is there that could be let go",
)
STATUS = Status(
    phase="Running",
    workers=Members(desired=2, ready=2),
    evaluators=Members(desired=2, ready=2),
    world_size=2,
    generation=3,
    restarts=2,
    progress=Progress(step=520, total_steps=900, epoch=23.1, percent=57.8, remaining_seconds=65),
    loss=0.02134,
    throughput=2310.2,
    utilization=Utilization(trainer_cpu=1.71, evaluator_cpu=0.31),
    latest_checkpoint=CheckpointRef(name="step-000000500", step=500, generation=3),
    latest_evaluation=Score(name="step-000000450", step=450, metric="accuracy", value=0.9833),
    best_checkpoint=Score(name="step-000000400", step=400, metric="accuracy", value=0.9861),
    evaluation_lag_steps=50,
)
EVALUATORS = [
    EvaluatorView(name="evaluator-0-0", state="step-000000500", silent_seconds=0.1),
    EvaluatorView(name="evaluator-0-1", state="idle", silent_seconds=0.1),
]
TRAIL = Trail(points=tuple((step, 2.3 * math.exp(-step / 80)) for step in range(0, 520, 10)))


SCREEN_80 = """\
  digits  training                                                    1 min 23 s
  ━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╸                                57 %
  step 520 of 900 · epoch 23.1 · about 1 min 5 s left

  loss        0.0213  ██▇▇▇▆▆▆▆▅▅▅▄▄▄▃▃▃▃▂▂▂▁▁
  throughput  2,310 samples/s
  workers     2/2 · world size 2 · generation 3 · 2 restarts
  checkpoint  step 500
  evaluated   step 450 · accuracy 98.33 % · 50 steps behind
  best        step 400 · accuracy 98.61 %

  trainers    ━━━━━━━━━━━━━━━━━━━━━━━━━━━━       1.7 of 2 cores
  evaluators  ━━━━━                              0.3 of 2 cores · 1 of 2 busy

  22:12:20   generation 1 started with 2 workers
  22:12:50 ! worker-1 failed; generation 2 goes on from step 350
  22:13:00 ✗ step-000000400 set aside: weights.safetensors does not match its c…

  live page: tandem open runs/digits                     Ctrl-C saves and leaves"""


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()


def scene(status: Status = STATUS, events: tuple[Event, ...] = EVENTS, **changes: object) -> Scene:
    snapshot = Snapshot(job="digits", time=NOON, status=status, evaluators=EVALUATORS, events=list(EVENTS))
    known: dict[str, object] = {
        "job": "digits",
        "run_dir": "runs/digits",
        "endpoint": "http://127.0.0.1:43121",
        "elapsed": 83.0,
        "cores": 2,
        "snapshot": snapshot,
        "trail": TRAIL,
        "events": events,
    }
    return Scene(**(known | changes))  # type: ignore[arg-type]


def drawn(shown: Scene, width: int = 80, colours: bool = False) -> list[str]:
    file = io.StringIO()
    system = "truecolor" if colours else None
    console = Console(width=width, height=40, file=file, force_terminal=True, color_system=system, no_color=not colours)  # type: ignore[arg-type]
    # As on a terminal, where a line that is too wide is not cut but breaks.
    console.print(screen(shown), crop=False)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_run_at_80_columns() -> None:
    assert "\n".join(drawn(scene())) == SCREEN_80


SCREEN_50 = """\
  digits  training                      1 min 23 s
  ━━━━━━━━━━━━━━━━━━━━━━━━                    57 %
  step 520 of 900 · epoch 23.1 · 1 min 5 s left

  loss    0.0213  ██▇▇▇▆▆▆▆▅▅▅▄▄▄▃▃▃▃▂▂▂▁▁
  rate    2,310 samples/s
  workers 2/2 · world 2 · gen 3 · 2 restarts
  saved   step 500
  scored  step 450 · acc 98.33 % · 50 behind
  best    step 400 · acc 98.61 %

  train   ━━━━━━━━╸   1.7 of 2 cores
  evals   ━╸          0.3 of 2 cores · 1 of 2 busy

  22:12:20   generation 1 started with 2 workers
  22:12:50 ! worker-1 failed; generation 2 goes o…
  22:13:00 ✗ step-000000400 set aside: weights.sa…

  tandem open runs/digits  Ctrl-C saves and leaves"""


def test_at_50_columns_words_are_shorter_and_no_value_is_cut() -> None:
    assert "\n".join(drawn(scene(), width=50)) == SCREEN_50


def test_of_a_long_path_the_end_is_shown() -> None:
    foot = drawn(scene(run_dir="somebody/has/projects/on/handwriting/runs/digits"), width=50)[-1]
    assert foot == "  …handwriting/runs/digits Ctrl-C saves and leaves"


def test_a_path_with_a_space_is_quoted_where_it_is_to_be_typed() -> None:
    assert drawn(scene(run_dir="a b"))[-1].startswith("  live page: tandem open 'a b'  ")


def test_a_script_that_says_nothing_of_its_steps_runs_and_its_last_line_is_shown() -> None:
    opened = GenerationView(generation=1, world_size=2, members=[], opened_at=NOON - 70, reason="Started")
    status = Status(phase="Running", workers=Members(desired=2, ready=2), world_size=2, generation=1)
    snapshot = Snapshot(job="mine", time=NOON, status=status, generations=[opened])
    shown = scene(snapshot=snapshot, own_command=True, evaluates=False, events=(), output="epoch 3 loss 0.21")
    lines = drawn(shown)
    assert lines[0].startswith("  digits  running ")
    assert lines[1] == "  since 22:12:10 · epoch 3 loss 0.21"
    assert not [line for line in lines if "none yet" in line]
    assert state_line(shown, NOON).startswith("time=22:13:20 phase=Running workers=2/2 worldSize=2 generation=1")
    assert state_line(shown, NOON).endswith(' output="epoch 3 loss 0.21"')


def test_a_script_that_is_through_does_not_start_while_its_last_checkpoints_are_evaluated() -> None:
    snapshot = Snapshot(job="mine", time=NOON, status=Status(phase="Draining"))
    waiting = "training is complete; 1 evaluator finishing"
    shown = scene(snapshot=snapshot, own_command=True, draining=True, waiting=waiting)
    assert state_line(shown, NOON) == f'time=22:13:20 phase=Draining restarts=0 waiting="{waiting}"'


def test_who_leaves_is_not_restarting_and_has_no_time_left() -> None:
    restarting = STATUS.model_copy(update={"phase": "Restarting"})
    shown = scene(restarting, leaving=True, notice="saving, at step 520; Ctrl-C again leaves at once")
    lines = drawn(shown)
    assert lines[0].startswith("  digits  leaving ")
    assert "left" not in lines[2]
    assert " phase=Leaving " in state_line(shown, NOON)


def test_a_run_at_120_columns_has_longer_bars_and_whole_events() -> None:
    lines = drawn(scene(), width=120)
    assert len(lines) == len(SCREEN_80.splitlines())
    assert lines[1].count("━") > 55
    assert any(line.endswith("does not match its checksum") for line in lines)
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize("troubles", [None, FULL_DISK], ids=["well", "full-disk"])
@pytest.mark.parametrize("width", [40, 50, 80, 120, 300])
def test_no_line_is_wider_than_the_terminal_or_than_is_readable(width: int, troubles: Troubles | None) -> None:
    lines = drawn(scene(STATUS.model_copy(update={"troubles": troubles})), width)
    assert max(map(len, lines)) <= min(width, 120)
    assert len(lines) <= 20


@pytest.mark.parametrize("width", [50, 80])
def test_of_failed_saves_the_cause_is_read_on_a_narrow_terminal_too(width: int) -> None:
    lines = drawn(scene(STATUS.model_copy(update={"troubles": FULL_DISK})), width)
    (row,) = [line for line in lines if "✗ the disk is full: the last 5 s" in line]
    assert row.endswith("…")


def test_the_fullest_screen_has_20_lines() -> None:
    busy = STATUS.utilization.model_copy(update={"gpu": 0.94, "gpu_memory_bytes": 3 * 2**30})
    lines = drawn(scene(STATUS.model_copy(update={"utilization": busy}), events=EVENTS * 3))
    assert len(lines) == 20
    assert any(re.search(r"GPU +━+╸? +94 % · 3\.2 GB$", line) for line in lines)


def test_colours_change_no_word() -> None:
    plain = drawn(scene())
    coloured = [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in drawn(scene(), colours=True)]
    without_bars = [re.sub("[━╸╺ ]+", " ", line).strip() for line in coloured]
    assert without_bars == [re.sub("[━╸╺ ]+", " ", line).strip() for line in plain]


def test_without_colours_there_is_no_escape_sequence_that_sets_one() -> None:
    assert not [line for line in drawn(scene()) if re.search(r"\x1b\[(3|4|9)\d", line)]


def test_the_first_seconds_say_what_is_waited_for() -> None:
    lines = drawn(scene(snapshot=None, endpoint="", events=(), waiting="starting: 2 workers importing torch"))
    assert lines == [
        "  digits  starting" + " " * 52 + "1 min 23 s",
        "  starting: 2 workers importing torch",
        "",
        "  runs/digits" + " " * 44 + "Ctrl-C saves and leaves",
    ]


def test_the_notice_takes_the_place_of_the_hint() -> None:
    lines = drawn(scene(notice="saving; Ctrl-C again leaves at once"))
    assert lines[-1] == "  saving; Ctrl-C again leaves at once"


def test_a_job_without_evaluators_shows_none() -> None:
    text = "\n".join(drawn(scene(evaluates=False)))
    assert "evaluat" not in text
    assert drawn(scene(evaluates=False, draining=True))[0].startswith("  digits  ending ")
    assert "best" not in text


def test_what_is_not_known_yet_is_not_shown_as_0() -> None:
    early = Status(phase="Running", progress=Progress(step=1), workers=Members(desired=2, ready=2))
    text = "\n".join(drawn(scene(early)))
    assert "loss" not in text
    assert "throughput" not in text
    assert "0.0 of" not in text
    assert "%" not in text


BASE = [Compared(metric="accuracy", base=0.125, value=0.9861), Compared(metric="loss", base=2.0)]


@pytest.mark.parametrize(
    ("width", "evaluated", "best"),
    [
        pytest.param(80, "98.33 % · base model 12.50 % · 50 steps behind", "98.61 % · base model 12.50 %", id="wide"),
        pytest.param(60, "98.33 % (base 12.50 %) · 50 behind", "98.61 % · base model 12.50 %", id="narrow"),
        pytest.param(48, "98.33 % · 50 behind", "98.61 % (base 12.50 %)", id="narrower"),
    ],
)
def test_scores_stand_beside_those_of_the_base_model(width: int, evaluated: str, best: str) -> None:
    lines = drawn(scene(STATUS.model_copy(update={"against_base": BASE})), width)
    assert [line for line in lines if line.rstrip().endswith(evaluated)], lines
    assert [line for line in lines if line.rstrip().endswith(best)], lines
    assert "base" not in "".join(drawn(scene(), width))


def test_the_base_model_is_shown_before_there_is_a_checkpoint_to_compare() -> None:
    early = {"against_base": [Compared(metric="perplexity", base=1265.0)], "best_checkpoint": None}
    text = "\n".join(drawn(scene(STATUS.model_copy(update=early))))
    assert "none yet · base model perplexity 1,265" in text


def test_the_base_model_is_in_the_line_of_the_state() -> None:
    line = state_line(scene(STATUS.model_copy(update={"against_base": BASE})), NOON)
    assert " bestValue=0.9861 baseValue=0.125 " in line


@pytest.mark.parametrize("text", ["\x1b[2J\x1b[31mgone", "two\nlines", "bell\a", "\x9b31m"])
def test_what_a_process_writes_cannot_touch_the_terminal(text: str) -> None:
    event = Event(at=NOON, kind="info", text=text)
    assert all(letter.isprintable() for letter in event_line(event))
    assert all(letter.isprintable() for line in drawn(scene(events=(event,))) for letter in line)


def test_the_state_as_one_line() -> None:
    assert state_line(scene(), NOON) == (
        "time=22:13:20 phase=Running step=520 totalSteps=900 epoch=23.1 loss=0.02134 samplesPerSecond=2310 "
        "remainingSeconds=65 workers=2/2 worldSize=2 generation=3 restarts=2 checkpoint=500 evaluated=450 lagSteps=50 "
        "accuracy=0.9833 best=400 bestValue=0.9861 trainerCpu=1.71 evaluatorCpu=0.31"
    )


@pytest.mark.parametrize(("metric", "name"), [("loss", "evaluatedLoss"), ("macroF1", "macroF1")])
def test_the_score_of_an_evaluation_has_a_name_of_its_own_in_the_line(metric: str, name: str) -> None:
    score = Score(name="step-000000450", step=450, metric=metric, value=0.25)
    line = state_line(scene(STATUS.model_copy(update={"latest_evaluation": score})), NOON)
    assert f" {name}=0.25 " in line
    assert " loss=0.02134 " in line, "the training's"


def test_lines_quote_what_has_spaces() -> None:
    waiting = scene(snapshot=None, waiting="starting: 2 workers importing torch")
    assert state_line(waiting, NOON) == 'time=22:13:20 phase=Starting waiting="starting: 2 workers importing torch"'
    assert event_line(EVENTS[0]) == 'time=22:12:20 event=info text="generation 1 started with 2 workers"'


def test_events_of_all_sources_come_in_order() -> None:
    mine = Event(at=NOON - 25, kind="warning", text="evaluator-0-0 ended")
    assert merged(EVENTS, [mine]) == (EVENTS[0], EVENTS[1], mine, EVENTS[2])


class TestTheLossCurve:
    def test_forgets_the_steps_that_a_restart_takes_back(self) -> None:
        back = STATUS.model_copy(update={"progress": Progress(step=351), "loss": 0.1})
        trail = TRAIL.follow(Snapshot(job="digits", time=NOON, status=back))
        assert trail.points[-1] == (351, 0.1)
        assert [step for step, _ in trail.points] == [*range(0, 351, 10), 351]

    def test_stays_small_however_long_the_run(self) -> None:
        trail = Trail()
        for step in range(3 * MAX_POINTS):
            status = STATUS.model_copy(update={"progress": Progress(step=step), "loss": 1.0})
            trail = trail.follow(Snapshot(job="digits", time=NOON, status=status))
        assert len(trail.points) <= MAX_POINTS
        steps = [step for step, _ in trail.points]
        assert steps == sorted(steps)
        assert steps[-1] == 3 * MAX_POINTS - 1

    def test_shows_powers_of_ten_as_equal_falls(self) -> None:
        assert sparkline([1000.0, 100.0, 10.0, 1.0], 4) == "█▆▃▁"

    def test_of_too_little_is_nothing(self) -> None:
        assert sparkline([1.0], 10) == ""
        assert sparkline([math.nan, math.inf, 1.0], 10) == ""

    def test_that_does_not_move_is_flat(self) -> None:
        assert sparkline([2.0] * 50, 8) == "▁" * 8

    def test_fits_its_width_whatever_the_number_of_points(self) -> None:
        assert all(len(sparkline([1.0 + i for i in range(n)], 24)) == min(n, 24) for n in range(2, 100))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (72, "1 min 12 s"),
        (11_100, "3 h 5 min"),
        (187_200, "2 d 4 h"),
        (-3, "0 s"),
    ],
)  # fmt: skip
def test_durations(seconds: float, words: str) -> None:
    assert elapsed(seconds) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.02134, "0.0213"),
        (2.3026, "2.303"),
        (98.06, "98.1"),
        (123.46, "123"),
        (2310.2, "2,310"),
        (3.14e-6, "3.14e-06"),
        (0.00012346, "0.0001235"),
        (0.0012345, "0.001234"),
        (0.001, "0.001"),
        (0.0, "0.0000"),
        (math.nan, "nan"),
    ],
)
def test_numbers(value: float, words: str) -> None:
    assert number(value) == words


def test_counts() -> None:
    assert [count_noun(n, "restart") for n in (0, 1, 2)] == ["no restarts", "1 restart", "2 restarts"]


def test_no_more_is_done_than_all() -> None:
    assert [percent_done(step, 207) for step in (0, 206, 207, 2_300)] == ["0 %", "99 %", "100 %", "100 %"]


def written(*scenes: Scene, last: Scene) -> list[str]:
    """The lines of a run, without the times in front of them."""
    console = Console(file=io.StringIO())
    display = Written(console)
    for scene in scenes:
        display.show(scene)
    display.end(last)
    assert isinstance(console.file, io.StringIO)
    return [line.partition(" ")[2] for line in console.file.getvalue().splitlines()]


def test_a_countdown_is_one_line_and_the_last_line_is_how_it_stands_in_the_end() -> None:
    waits = [Scene(job="digits", run_dir="runs/digits", waiting=f"starts again in {left} s") for left in (16, 15, 9)]
    status = Status(phase="Succeeded", progress=Progress(step=900, total_steps=900, percent=100.0))
    ended = Scene(job="digits", run_dir="runs/digits", snapshot=Snapshot(job="digits", time=NOON, status=status))
    assert written(*waits, last=ended) == [
        'phase=Starting waiting="starts again in 16 s"',
        "phase=Succeeded step=900 totalSteps=900 restarts=0",
    ]


def test_a_run_that_took_fewer_steps_than_announced_is_shown_so() -> None:
    early = "stopped early after step 40 of 100: the loss has not fallen"
    status = Status(phase="Succeeded", message=early, progress=Progress(step=40, total_steps=100, percent=40.0))
    snapshot = Snapshot(job="digits", time=NOON, status=status)
    assert phase(Scene(job="digits", run_dir="runs/digits", snapshot=snapshot), status) == ("stopped early", "green")
    assert phase_word("Succeeded", early) == "Stopped early"
    assert phase_word("Succeeded", "training is complete") == "Succeeded"
    assert phase_word("Failed", early) == "Failed"


def test_what_failed_before_its_first_step_ends_with_that() -> None:
    status = Status(phase="Failed", generation=2, restarts=1)
    ended = Scene(job="mine", run_dir="runs/mine", snapshot=Snapshot(job="mine", time=NOON, status=status))
    assert written(last=ended) == ["phase=Failed generation=2 restarts=1"]
