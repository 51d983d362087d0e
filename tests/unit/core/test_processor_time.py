"""Processor time of a process with all that it starts, beside what each of these says of itself."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.processes import processor_time
from tandem.processes.processor_time import ProcessorTime

WORK = """
import os, resource, subprocess, sys, time
seconds, deeper, out = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
started = [subprocess.Popen([sys.executable, "-S", *sys.argv[:1], str(seconds), str(deeper - 1), out])
           for _ in range(2 if deeper else 0)]
while time.process_time() < seconds: pass
for one in started: one.wait()
used = resource.getrusage(resource.RUSAGE_SELF)
with open(f"{out}/{os.getpid()}", "w") as file: file.write(str(used.ru_utime + used.ru_stime))
os._exit(0)
"""


def own() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def test_programs_that_come_and_go_with_children_and_grandchildren_add_up_to_their_own_seconds(tmp_path: Path) -> None:
    """An evaluator's programs, a script's processes: none is forgotten when it ends, and none is counted twice."""
    (tmp_path / "said").mkdir()
    program = tmp_path / "work.py"
    program.write_text(WORK)
    processor = ProcessorTime()
    began, before = own(), processor.seconds()
    seen = before
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-S", program, "0.05", "2", tmp_path / "said"])
        while process.poll() is None:
            now = processor.seconds()
            assert now >= seen
            seen = now
    processor.seconds()
    said = [float(file.read_text()) for file in (tmp_path / "said").iterdir()]
    assert len(said) == 2 * (1 + 2 + 4)
    used = own() - began
    assert processor.seconds() - before == pytest.approx(sum(said) + used, rel=0.01, abs=0.003 * len(said))


def test_what_a_living_process_has_used_counts_already() -> None:
    processor = ProcessorTime()
    before = processor.seconds()
    waits = "import sys, time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        assert processor.seconds() - before >= 0.29


def test_processes_that_were_left_alone_take_nothing_of_what_others_use_later() -> None:
    """What they have used is not known any more, and stays counted as far as it was seen."""
    processor = ProcessorTime()
    leaves = "import os, time\nif os.fork() == 0:\n    while time.process_time() < 0.2: pass\n    time.sleep(0.2)\n"
    process = subprocess.Popen([sys.executable, "-S", "-c", leaves + "else:\n    time.sleep(0.3)"])
    while process.poll() is None:
        seen = processor.seconds()
    assert processor.seconds() >= seen
    processor.seconds()
    before, began = processor.seconds(), own()
    while own() - began < 0.2:
        pass
    assert processor.seconds() - before == pytest.approx(0.2, abs=0.05)


@pytest.mark.parametrize("missed", [(7.0, 7.0), (7.0, 8.0), (8.0, 7.0)])
def test_what_two_readings_in_a_row_have_missed_counts_once(
    missed: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has met a process that was just being waited for."""
    processor = ProcessorTime()
    readings = iter([10.0, *missed, 10.0, 10.5, 14.0])
    monkeypatch.setattr(processor_time, "_used", lambda: next(readings))
    assert [processor.seconds() for _ in range(6)] == [10.0, 10.0, 10.0, 10.0, 10.5, 14.0]
