"""A save that is disturbed at any of its steps leaves the newest whole checkpoint to start from, and nothing else.

Every fault is followed by a fresh start, which must take exactly the right checkpoint with every bit as it was saved,
and by a save of the new generation with its retention; see tests.support.faults.scene for what is looked at. Damage to
a checkpoint that lies on the disk is in tests/unit/trainer/test_checkpoint_damage.py.
"""

import errno
import os
import random
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem_trainer.checkpoint.restoring import restore
from tandem_trainer.process_group import Group
from tests.support.disks import fill, small_disk
from tests.support.faults.points import CHANGING, CREATE, GROWING, READ, RENAME, SYNC, WRITE
from tests.support.faults.power import CASES
from tests.support.faults.scene import PATIENCE, Findings, Save, Scene, Server, small_chunks

Faults = dict[str, int]
"""How many of each kind were played."""


class Matrix:
    """Plays one fault after the other and keeps count of what went wrong."""

    def __init__(self, scene: Scene, server: Server, tally: Faults) -> None:
        self.scene, self.server, self._tally = scene, server, tally
        self.played = 0
        self.wrong: list[str] = []

    def steps(self, writers: Callable[[], Sequence[Mapping[str, Any]]]) -> list[list[list[str]]]:
        """What undisturbed writers do: kind and place of each step of each of them. They must succeed."""
        self.scene.reset()
        reports = self.server.play(writers())
        findings = self.scene.judge(said(reports), committed=True)
        assert not findings.wrong, findings.wrong
        return [report["points"] for report in reports]

    def play(
        self,
        what: str,
        writers: Callable[[], Sequence[Mapping[str, Any]]],
        committed: bool | None,
        died: int | None = None,
        turns: Sequence[int] | None = None,
    ) -> None:
        """Play one fault and judge it.

        Args:
            committed: whether the new checkpoint must be there afterwards; None: if the writer says so.
            died: which writer must have been killed; all others must have ended by themselves.
        """
        self.scene.reset()
        reports = self.server.play(writers(), turns)
        findings = self.scene.judge(said(reports), committed)
        for number, report in enumerate(reports):
            expected = -9 if number == died else 0
            findings.expect(report["code"] == expected, f"writer {number} ended with {report['code']}")
            findings.expect(number == died or report["answers"], f"writer {number} did not answer")
        self.count(what, findings)

    def count(self, what: str, findings: Findings) -> None:
        """Note one fault."""
        self.played += 1
        kind = what.split(" at ")[0]
        self._tally[kind] = self._tally.get(kind, 0) + 1
        self.wrong += [f"{what}: {wrong}" for wrong in findings.wrong]

    def expect_all_right(self, at_least: int) -> None:
        """Raise AssertionError if anything was wrong, or if there were suspiciously few faults."""
        assert not self.wrong, f"{len(self.wrong)} wrong in {self.played} faults:\n" + "\n".join(self.wrong[:20])
        assert self.played >= at_least


def said(reports: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [answer for report in reports for answer in report["answers"]]


def replayed(
    matrix: Matrix, writers: Callable[[], Sequence[Mapping[str, Any]]], turns: Sequence[int]
) -> list[dict[str, Any]]:
    """Let writers take their turns on the history as it was."""
    matrix.scene.reset()
    return matrix.server.play(writers(), turns)


NEW_ASIDE = ".tmp-step-000000050-g000002-000003"
YEARS = 10 * 365.25 * 86400
ALL = pytest.mark.full("core", "trainer")
"""Three parts take every step that one takes, and more; the rest, and pairs of steps, are for the full tier."""
PARTS = pytest.mark.parametrize("parts", [pytest.param(1, marks=ALL), 3])


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


@pytest.fixture(scope="module")
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        small_chunks(monkeypatch)
        yield


@pytest.fixture(scope="module")
def scene(server: Server, small: None) -> Iterator[Scene]:
    # In memory where there is such a place: what a kill leaves does not depend on the disk, and fsync takes its time.
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder:
        yield Scene(server, Path(folder))


@pytest.fixture(scope="module")
def tally() -> Iterator[Faults]:
    """Faults played, and what was wrong after how many of them, for those who want to see it (`pytest -s`)."""
    counts: Faults = {}
    yield counts
    print("\nfaults: " + ", ".join(f"{count} {name}" for name, count in counts.items()) + f"; {sum(counts.values())}")


@pytest.fixture
def matrix(scene: Scene, server: Server, tally: Faults) -> Matrix:
    return Matrix(scene, server, tally)


def of_kind(steps: Sequence[Sequence[str]], kinds: set[str]) -> list[int]:
    """Numbers of the steps of such kinds, counted from 1."""
    return [number for number, (kind, _) in enumerate(steps, start=1) if kind in kinds]


def naming(steps: Sequence[Sequence[str]]) -> int:
    """Which step gives the new checkpoint its name."""
    (number,) = [n for n, (kind, place) in enumerate(steps, start=1) if kind == RENAME and place.endswith(NEW_ASIDE)]
    return number


def synced_after(steps: Sequence[Sequence[str]], step: int) -> int:
    """The first sync after a step."""
    return next(number for number in of_kind(steps, {SYNC}) if number > step)


@PARTS
def test_a_machine_that_dies_at_any_step_of_a_save_costs_this_save_at_most(matrix: Matrix, parts: int) -> None:
    def writers(**fault: Any) -> list[dict[str, Any]]:
        return [matrix.scene.writer(matrix.scene.parts(parts=parts), fault or None)]

    (steps,) = matrix.steps(writers)
    assert {kind for kind, _ in steps} >= CHANGING - {"link", "truncate", "touch"}, "the machinery sees every kind"
    named = naming(steps)
    for point in of_kind(steps, CHANGING):
        committed = point > named
        matrix.play(f"kill at {point} of {parts}", lambda n=point: writers(kind="kill", point=n), committed, died=0)
    for point in of_kind(steps, {WRITE}):
        committed = point > named
        matrix.play(f"torn at {point} of {parts}", lambda n=point: writers(kind="torn", point=n), committed, died=0)
    matrix.expect_all_right(at_least=50 if parts == 1 else 80)


@ALL
def test_one_of_three_writers_that_dies_at_any_step_costs_this_save_at_most(matrix: Matrix) -> None:
    def writers(victim: int | None = None, point: int = 0) -> list[dict[str, Any]]:
        return [
            matrix.scene.writer([part], {"kind": "kill", "point": point} if number == victim else None)
            for number, part in enumerate(matrix.scene.parts(parts=3))
        ]

    all_steps = matrix.steps(writers)
    for victim, steps in enumerate(all_steps):
        # A part counts from the moment at which its note has its name.
        decisive = naming(steps) if victim == 2 else of_kind(steps, {RENAME})[0]
        for point in of_kind(steps, CHANGING):
            matrix.play(
                f"kill one at {point} of writer {victim}",
                lambda v=victim, n=point: writers(v, n),
                committed=point > decisive,
                died=victim,
            )
    matrix.expect_all_right(at_least=60)


@PARTS
@pytest.mark.parametrize("case", [pytest.param(one, marks=ALL) if one == "names" else one for one in CASES])
def test_a_power_cut_takes_nothing_that_was_committed(matrix: Matrix, case: str, parts: int) -> None:
    def writers(**fault: Any) -> list[dict[str, Any]]:
        return [matrix.scene.writer(matrix.scene.parts(parts=parts), fault or None)]

    (steps,) = matrix.steps(writers)
    durable = naming(steps) if case == "names" else synced_after(steps, naming(steps))
    for point in of_kind(steps, CHANGING):
        matrix.play(
            f"power cut, {case} at {point} of {parts}",
            lambda n=point: writers(kind=case, point=n),
            committed=point > durable,
            died=0,
        )
    matrix.expect_all_right(at_least=40 if parts == 1 else 60)


@PARTS
def test_bytes_that_the_disk_lost_before_the_commit_are_missed(matrix: Matrix, parts: int) -> None:
    def writers(**fault: Any) -> list[dict[str, Any]]:
        return [matrix.scene.writer(matrix.scene.parts(parts=parts), fault or None)]

    (steps,) = matrix.steps(writers)
    noted = next(n for n, (kind, place) in enumerate(steps, start=1) if kind == RENAME and "part-0000" in place)
    looked = next(number for number in of_kind(steps, {CREATE}) if number > noted)
    for point in range(noted, looked + 1):
        matrix.play(f"lost bytes at {point} of {parts}", lambda n=point: writers(kind="lost", point=n), committed=False)
    matrix.expect_all_right(at_least=3)


@pytest.mark.full("core", "trainer")
@PARTS
def test_a_step_that_fails_once_costs_this_save_at_most(matrix: Matrix, parts: int) -> None:
    def writers(point: int = 0) -> list[dict[str, Any]]:
        fault = {"kind": "error", "point": point, "number": errno.EIO} if point else None
        return [matrix.scene.writer(matrix.scene.parts(parts=parts), fault)]

    (steps,) = matrix.steps(writers)
    for point in range(1, len(steps) + 1):
        matrix.play(f"EIO once at {point} of {parts}", lambda n=point: writers(n), committed=None)
    matrix.expect_all_right(at_least=60)


@PARTS
@pytest.mark.parametrize(
    ("number", "refused"),
    [
        pytest.param(errno.ENOSPC, GROWING, id="ENOSPC"),
        pytest.param(errno.EROFS, CHANGING - {SYNC}, id="EROFS", marks=pytest.mark.full("core", "trainer")),
        pytest.param(errno.EIO, CHANGING, id="EIO", marks=pytest.mark.full("core", "trainer")),
    ],
)
def test_a_disk_that_fails_at_any_step_and_recovers_later_costs_this_save_at_most(
    matrix: Matrix, parts: int, number: int, refused: set[str]
) -> None:
    name = errno.errorcode[number]

    def writers(point: int = 0) -> list[dict[str, Any]]:
        fault = {"kind": "failing", "point": point, "number": number, "refused": sorted(refused)} if point else None
        return [matrix.scene.writer(matrix.scene.parts(parts=parts), fault)]

    (steps,) = matrix.steps(writers)
    for point in of_kind(steps, refused):
        matrix.play(f"{name} at {point} of {parts}", lambda n=point: writers(n), committed=None)
    matrix.expect_all_right(at_least=15)


def test_a_file_that_may_not_grow_fails_the_save_with_what_the_kernel_says(matrix: Matrix) -> None:
    """The kernel's own refusal, with the short write that goes before it."""
    largest = max(len(content) for content in matrix.scene.trees[Scene.NEW].values())
    for limit in range(0, largest, largest // 12):
        matrix.scene.reset()
        reports = matrix.server.play([matrix.scene.writer(matrix.scene.parts(), limit=max(limit, 1))])
        findings = matrix.scene.judge(said(reports), committed=False)
        findings.expect("File too large" in reports[0]["answers"][0].get("failed", ""), f"{reports[0]['answers']}")
        matrix.count(f"EFBIG at {limit}", findings)
    matrix.expect_all_right(at_least=12)


@pytest.fixture(scope="module")
def disk(scene: Scene) -> Iterator[Path]:
    """A real file system of 4 MiB and 500 files that can be filled and made read-only."""
    with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder), "size=4m,nr_inodes=500") as mounted:
        yield mounted


@PARTS
def test_a_full_disk_costs_this_save_and_harms_no_other(matrix: Matrix, disk: Path, parts: int) -> None:
    refused = 0
    for free in range(0, 15):
        matrix.scene.reset(disk)
        ballast = fill(disk, free)
        reports = matrix.server.play([matrix.scene.writer(matrix.scene.parts(parts=parts))])
        refused += any("No space left" in answer.get("failed", "") for answer in said(reports))
        findings = Findings()
        newest = matrix.scene.present(findings).get(Scene.NEW.step) == Scene.NEW
        matrix.scene.expect_restored(findings, Scene.NEW if newest else Scene.NEWEST, passed_over=[])
        ballast.unlink()
        findings.wrong += matrix.scene.judge(said(reports)).wrong
        matrix.count(f"full disk at {free} pages", findings)
    matrix.expect_all_right(at_least=15)
    assert refused >= 5, "the disk was not full at all"


def test_a_disk_that_takes_no_more_files_costs_this_save_and_harms_no_other(matrix: Matrix, disk: Path) -> None:
    refused = 0
    for free in range(0, 10):
        matrix.scene.reset(disk)
        ballast = disk / "ballast"
        ballast.mkdir()
        for number in range(os.statvfs(disk).f_favail - free):
            (ballast / str(number)).touch()
        reports = matrix.server.play([matrix.scene.writer(matrix.scene.parts(parts=3))])
        refused += any("No space left" in answer.get("failed", "") for answer in said(reports))
        for path in ballast.iterdir():
            path.unlink()
        ballast.rmdir()
        matrix.count(f"no more files at {free}", matrix.scene.judge(said(reports)))
    matrix.expect_all_right(at_least=10)
    assert refused >= 3, "there was room for all files"


def test_a_disk_that_becomes_read_only_costs_this_save_and_harms_no_other(matrix: Matrix, disk: Path) -> None:
    def writers(point: int = 0) -> list[dict[str, Any]]:
        fault = {"kind": "read-only", "point": point} if point else None
        return [matrix.scene.writer(matrix.scene.parts(), fault, mount=str(disk))]

    (steps,) = matrix.steps(writers)
    for point in of_kind(steps, CHANGING):
        matrix.scene.reset(disk)
        (report,) = matrix.server.play(writers(point))
        if not report["remounted"]:
            continue  # the kernel refuses while a file is open for writing, and the writer was through before it agreed
        findings = Findings()
        newest = matrix.scene.present(findings).get(Scene.NEW.step) == Scene.NEW
        matrix.scene.expect_restored(findings, Scene.NEW if newest else Scene.NEWEST, passed_over=[])
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True, timeout=10)
        findings.wrong += matrix.scene.judge(report["answers"]).wrong
        matrix.count(f"read-only at {point}", findings)
    matrix.expect_all_right(at_least=30)


@PARTS
def test_no_clock_decides_anything(matrix: Matrix, parts: int) -> None:
    for clock in (-YEARS, -86400.0, 0.0, 86400.0, YEARS):
        for written in (0.0, 1e9, 4e9):
            matrix.scene.reset()
            for path in matrix.scene.rundir.path.rglob("*"):
                os.utime(path, (written, written))
            reports = matrix.server.play([matrix.scene.writer(matrix.scene.parts(parts=parts), clock=clock)])
            matrix.count(f"clocks at {clock:.0f} s, files of {written:.0f}", matrix.scene.judge(said(reports), True))
    matrix.expect_all_right(at_least=15)


def test_a_writer_whose_clock_is_ahead_does_not_clear_away_the_save_that_others_have_begun(matrix: Matrix) -> None:
    following = Save(60, 2)
    for clock in (0.0, 7200.0, YEARS):
        matrix.scene.reset()
        *others, first = matrix.scene.parts(following, parts=3, number=4)
        reports = matrix.server.play(
            [
                matrix.scene.writer(others),
                matrix.scene.writer(matrix.scene.parts(parts=1, number=3), clock=clock),
                matrix.scene.writer([first], clock=clock),
            ]
        )
        findings = Findings()
        findings.expect("committed" in reports[2]["answers"][0], f"{reports[2]['answers']}")
        findings.expect(matrix.scene.present(findings).get(60) == following, "the save is gone")
        matrix.scene.expect_restored(findings, following, passed_over=[])
        matrix.count(f"clock ahead in a save at {clock:.0f} s", findings)
    matrix.expect_all_right(at_least=3)


@ALL
def test_three_writers_may_take_turns_as_they_like(matrix: Matrix) -> None:
    patient = PATIENCE | {"PARTS_SECONDS": 15.0, "ORPHAN_SECONDS": 15.0}
    for seed in range(20):
        chance = random.Random(seed)
        turns = [chance.randrange(3) for _ in range(300)]
        matrix.play(
            f"turns of three at seed {seed}",
            lambda: [matrix.scene.writer([part], knobs=patient) for part in matrix.scene.parts(parts=3)],
            committed=True,
            turns=turns,
        )
    all_steps = matrix.steps(lambda: [matrix.scene.writer([part]) for part in matrix.scene.parts(parts=3)])
    for seed in range(30):
        chance = random.Random(seed)
        turns, victim = [chance.randrange(3) for _ in range(300)], chance.randrange(3)
        fault = {"kind": "kill", "point": chance.randint(1, len(all_steps[victim]))}
        # The last one waits for the parts of the others. It must not give up before it is killed, however busy it is.
        knobs = patient if victim == 2 else PATIENCE
        matrix.play(
            f"turns of three, one killed at seed {seed}",
            lambda v=victim, f=fault, k=knobs: [
                matrix.scene.writer([part], f if number == v else None, k)
                for number, part in enumerate(matrix.scene.parts(parts=3))
            ],
            committed=None,
            died=victim,
            turns=turns,
        )
    matrix.expect_all_right(at_least=50)


def schedules(first: int, second: int, at_random: int) -> Iterator[list[int]]:
    """Turns of two: each interrupted once, at every step, by all of the other; and some at random."""
    for number, steps in ((0, first), (1, second)):
        for point in range(steps + 1):
            yield [number] * point + [1 - number] * 1000
    for seed in range(at_random):
        chance = random.Random(seed)
        turns: list[int] = []
        while len(turns) < first + second:
            turns += [chance.randrange(2)] * chance.randint(1, 12)
        yield turns


def interrupted(
    matrix: Matrix, writers: Callable[[], Sequence[Mapping[str, Any]]]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """How two writers take turns, and what they report: either undisturbed first, then by all of the schedules."""
    first, _ = (len(report["points"]) for report in replayed(matrix, writers, [0] * 1000))
    _, second = (len(report["points"]) for report in replayed(matrix, writers, [1] * 1000))
    for turns in schedules(first, second, at_random=20):
        yield f"{turns[:3]}…", replayed(matrix, writers, turns)


@ALL
def test_two_writers_of_one_generation_do_not_mix_what_they_write(matrix: Matrix) -> None:
    """It should not happen: a generation's record is written once. If it does, one of both is there, whole."""
    twins = Save(50, 2), Save(50, 2, twin=1)

    def writers() -> list[dict[str, Any]]:
        return [matrix.scene.writer(matrix.scene.parts(twin, number=3 + twin.twin)) for twin in twins]

    for turns, reports in interrupted(matrix, writers):
        findings = Findings()
        winner = matrix.scene.present(findings).get(50)
        claims = [twin for twin, report in zip(twins, reports, strict=True) if "committed" in report["answers"][0]]
        findings.expect(claims == [winner], f"{claims} say that they are committed, and {winner} is there")
        matrix.scene.expect_continued(findings, winner)
        matrix.count(f"two writers of one generation at {turns}", findings)
    matrix.expect_all_right(at_least=100)


class Succession(Scene):
    """Generation 1 saved 10 and 20 and is about to save 30; generation 2 resumes from 20 and saves 30, too."""

    GENERATIONS = ((1, None),)
    SAVED = (Save(10, 1), Save(20, 1))
    TO_COME = (Save(30, 1), Save(30, 2))
    KEEP_LAST = 1
    NEWEST, NEW = Save(20, 1), Save(30, 2)

    def old_writer(self) -> dict[str, Any]:
        """That of generation 1, which is late."""
        return self.writer(self.parts(Save(30, 1), number=3, parent=None))

    def new_writer(self, *, saves: bool) -> dict[str, Any]:
        """That of generation 2, which begins, and perhaps saves."""
        return self.writer(self.parts(self.NEW, number=1) if saves else [], record=self.begin(2, Save(20, 1)).dump())


@pytest.fixture
def succession(server: Server, small: None, tmp_path: Path) -> Succession:
    return Succession(server, tmp_path)


@ALL
def test_a_writer_that_was_superseded_harms_nothing_whenever_it_wakes_up(
    succession: Succession, server: Server, tally: Faults
) -> None:
    matrix = Matrix(succession, server, tally)
    for turns, reports in interrupted(matrix, lambda: [succession.old_writer(), succession.new_writer(saves=True)]):
        findings = Findings()
        there = succession.present(findings)
        findings.expect("committed" in reports[1]["answers"][0], f"the new one: {reports[1]['answers']}")
        findings.expect(there.get(30) == Save(30, 2), f"30 is {there.get(30)}")
        # A writer that was interrupted between its look at the records and its deletion cannot know of the new one.
        looked_before = "committed" in reports[0]["answers"][0]
        findings.expect(20 in there or looked_before, "what the running generation resumed from is gone")
        succession.expect_continued(findings, Save(30, 2))
        matrix.count(f"a superseded writer at {turns}", findings)
    matrix.expect_all_right(at_least=100)


def test_a_writer_commits_nothing_once_a_newer_generation_has_begun(
    succession: Succession, server: Server, tally: Faults
) -> None:
    matrix = Matrix(succession, server, tally)

    def writers() -> list[dict[str, Any]]:
        return [succession.old_writer(), succession.new_writer(saves=False)]

    steps, _ = (report["points"] for report in replayed(matrix, writers, [0] * 1000))
    named = next(n for n, (kind, place) in enumerate(steps, start=1) if kind == RENAME and place.endswith("-000003"))
    looked = max(n for n in of_kind(steps, {READ}) if n < named and steps[n - 1][1].endswith("generations"))
    for point in range(looked):
        reports = replayed(matrix, writers, [0] * point + [1] * 1000)
        findings = Findings()
        findings.expect("superseded" in reports[0]["answers"][0], f"the old one: {reports[0]['answers']}")
        findings.expect(30 not in succession.present(findings), "it committed")
        succession.expect_continued(findings, Save(20, 1))
        matrix.count(f"superseded at {point}", findings)
    matrix.expect_all_right(at_least=15)


def test_what_a_starting_generation_has_read_is_kept_until_its_record_says_so(
    succession: Succession, server: Server
) -> None:
    """Else a group that was cut off could save and delete it, and after a crash of the new one nothing would count."""
    succession.reset()
    group = Group(0, 1, 0, torch.device("cpu"))
    restored = restore(succession.rundir, group, lambda loaded: None)
    assert restored.loaded.manifest.step == 20
    (report,) = server.play([succession.old_writer()])
    assert "committed" in report["answers"][0]
    assert succession.rundir.record_generation(succession.begin(2, Save(20, 1)))
    restored.release()
    assert list(succession.rundir.leases.iterdir()) == []
    findings = Findings()
    succession.expect_continued(findings, Save(20, 1))
    assert findings.wrong == []
