"""Leases: one holder at a time, given back, taken over when their time is up."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.rundir import lease
from tandem.rundir.durable import TEMPORARY, read_json, replace_json
from tandem.rundir.lease import acquire, default_holder, is_held

PATIENCE_SECONDS = 60.0
LONG = 1000.0
LEASES = 40


def expired(path: Path, holder: str = "dead") -> None:
    replace_json(path, {"holder": holder, "until": time.time() - 1})


def test_a_lease_has_one_holder(tmp_path: Path) -> None:
    held = acquire(tmp_path / "leases/a", "one")
    assert held is not None
    assert acquire(tmp_path / "leases/a", "two") is None
    assert is_held(tmp_path / "leases/a")


def test_a_lease_that_was_given_back_is_free(tmp_path: Path) -> None:
    with acquire(tmp_path / "a", "one") or pytest.fail("it was free"):
        assert is_held(tmp_path / "a")
    assert not is_held(tmp_path / "a")
    assert acquire(tmp_path / "a", "two") is not None


def test_a_lease_is_given_back_when_the_work_fails(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), acquire(tmp_path / "a", "one") or pytest.fail("it was free"):
        _ = 1 / 0
    assert not (tmp_path / "a").exists()


def test_a_lease_whose_time_is_over_is_taken_over(tmp_path: Path) -> None:
    expired(tmp_path / "a")
    assert not is_held(tmp_path / "a")
    assert acquire(tmp_path / "a", "two") is not None
    assert read_json(tmp_path / "a")["holder"] == "two"


def test_a_lease_lasts_as_long_as_it_is_renewed(tmp_path: Path) -> None:
    held = acquire(tmp_path / "a", "one", seconds=LONG)
    assert held is not None
    before = read_json(tmp_path / "a")["until"]
    assert held.renew()
    assert read_json(tmp_path / "a")["until"] > before
    assert before - time.time() == pytest.approx(LONG, abs=PATIENCE_SECONDS)


def test_who_slept_past_the_time_neither_steals_back_nor_gives_away(tmp_path: Path) -> None:
    sleeper = acquire(tmp_path / "a", "sleeper", seconds=-1.0)
    assert acquire(tmp_path / "a", "next") is not None
    assert not sleeper.renew()
    sleeper.release()
    assert read_json(tmp_path / "a")["holder"] == "next"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"7", b'{"holder": 3}', b'{"until": "soon"}', b'{"holder": "x", "until": 1e300}']
)
def test_a_damaged_lease_binds_nobody(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    assert not is_held(tmp_path / "a")
    held = acquire(tmp_path / "a", "one")
    assert held is not None
    (tmp_path / "a").write_bytes(content)
    if b"x" not in content:
        assert held.renew()
        (tmp_path / "a").write_bytes(content)
        held.release()
        assert not (tmp_path / "a").exists()


def test_giving_back_twice_does_no_harm(tmp_path: Path) -> None:
    held = acquire(tmp_path / "a", "one")
    held.release()
    held.release()


def test_no_two_processes_have_the_same_name() -> None:
    code = "from tandem.rundir.lease import default_holder; print(default_holder())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() != default_holder()
    assert default_holder() == default_holder()
    # A restarted container has the host name and the process number of the one before.
    assert len(default_holder().rsplit("-", 1)[1]) == 8


def test_a_slow_taker_does_not_take_the_lease_of_a_faster_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both saw it expired; while the slow one was between looking and moving, the fast one took it."""
    path = tmp_path / "a"
    expired(path)
    looked = []

    def slow_look(looked_at: Path) -> bool:
        found = is_held(looked_at)
        if not looked:
            looked.append(looked_at)
            monkeypatch.setattr(lease, "is_held", is_held)
            assert acquire(path, "fast") is not None
        return found

    monkeypatch.setattr(lease, "is_held", slow_look)
    assert acquire(path, "slow") is None
    assert looked
    assert read_json(path)["holder"] == "fast"
    assert is_held(path)
    assert not [name for name in tmp_path.iterdir() if name.name.startswith(TEMPORARY)]


INTERLEAVED = """
import json, sys
from pathlib import Path
from tandem.rundir.lease import acquire

path, played = Path(sys.argv[1]) / "a", 0
STEPS = ("open", "os.link", "os.rename", "os.remove")
turns, step, waits, holders = [], 0, True, []

def takes(who):
    if acquire(path, who, seconds=1000):
        holders.append(who)

def before_a_step(event, arguments):
    global step, waits
    if waits or event not in STEPS:
        return
    step += 1
    waits = True
    while turns and turns[0][0] == step:
        takes(turns.pop(0)[1])
    waits = False

sys.addaudithook(before_a_step)
for fast in range(1, 100):
    for third in range(fast, 100):
        path.write_text(json.dumps({"holder": "dead", "until": 1.0}))
        turns[:], holders[:] = [(fast, "fast"), (third, "third")], []
        step, waits = 0, False
        takes("slow")
        waits = True
        played += 1
        found, names = json.loads(path.read_text())["holder"], [one.name for one in path.parent.iterdir()]
        if holders != [found] or names != ["a"]:
            print(f"before step {fast} fast, before step {third} third: {holders} have it, {found} in {names}")
        if turns:
            break
    if len(turns) == 2:
        break
print("played", played)
"""


def test_whenever_two_others_take_their_turn_while_one_takes_over_a_dead_lease_one_gets_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", INTERLEAVED, tmp_path]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS).stdout
    *violations, played = said.splitlines()
    assert violations == []
    assert int(played.removeprefix("played ")) > 30


def test_a_taker_that_dies_in_the_middle_keeps_the_lease_from_others_for_a_while_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired(tmp_path / "a")
    code = """
import os, sys
from pathlib import Path
from tandem.rundir import lease
lease.replace_json = lambda *_, **__: os._exit(9)
lease.acquire(Path(sys.argv[1]))
"""
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "a"], timeout=PATIENCE_SECONDS).returncode == 9
    assert acquire(tmp_path / "a", "next") is None
    later = time.time() + 2 * lease.LEASE_LENGTH_SECONDS
    monkeypatch.setattr(lease, "server_time", lambda folder: later)
    assert [acquire(tmp_path / "a", "next") is not None for _ in range(2)] == [False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


RACER = """
import sys, time
from pathlib import Path
from tandem.rundir.lease import acquire
folder, me = Path(sys.argv[1]), sys.argv[2]
print("ready", flush=True)
while not (folder / "go").exists(): pass
print(*[n for n in range(int(sys.argv[3])) if acquire(folder / f"lease-{n}", me, seconds=1000)])
"""


@pytest.mark.parametrize("left_by", ["nobody", "a dead holder"])
def test_of_racing_processes_one_gets_each_lease(tmp_path: Path, left_by: str) -> None:
    if left_by == "a dead holder":
        for n in range(LEASES):
            expired(tmp_path / f"lease-{n}")
    command = [sys.executable, "-c", RACER, tmp_path]
    racers = [
        subprocess.Popen([*command, f"racer-{n}", str(LEASES)], stdout=subprocess.PIPE, text=True) for n in range(3)
    ]
    for racer in racers:
        racer.stdout.readline()
    (tmp_path / "go").touch()
    won = [racer.communicate(timeout=PATIENCE_SECONDS)[0].split() for racer in racers]
    assert sorted(int(n) for names in won for n in names) == list(range(LEASES)), "each was given to one racer"
    for racer, names in enumerate(won):
        for n in names:
            assert read_json(tmp_path / f"lease-{n}")["holder"] == f"racer-{racer}"
            assert acquire(tmp_path / f"lease-{n}", "later") is None, "it runs"


def test_the_lease_of_a_killed_process_is_free_after_its_time(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from tandem.rundir.lease import acquire
assert acquire(Path(sys.argv[1]), "killed", seconds=1.5)
print("held", flush=True)
time.sleep(1000)
"""
    holder = subprocess.Popen([sys.executable, "-c", code, tmp_path / "a"], stdout=subprocess.PIPE, text=True)
    holder.stdout.readline()
    until = read_json(tmp_path / "a")["until"]
    holder.kill()
    holder.communicate(timeout=PATIENCE_SECONDS)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while (taken := acquire(tmp_path / "a", "next")) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # The kernel stamps files with a clock that goes on in ticks.
    assert time.time() >= until - 0.1
    assert taken.holder == "next"


class Node:
    """A node whose clock goes wrong by some seconds; the file server's does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wrong_by: float) -> None:
        self._monkeypatch, self._wrong_by = monkeypatch, wrong_by

    def __enter__(self) -> None:
        self._context = self._monkeypatch.context()
        clocks = self._context.__enter__()
        clocks.setattr(lease.time, "time", lambda real=time.time: real() + self._wrong_by)
        clocks.setattr(lease.time, "monotonic", lambda real=time.monotonic: real() + 1000 * self._wrong_by)
        clocks.setattr(lease, "_offsets", {})

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(None, None, None)


@pytest.mark.parametrize("wrong_by", [-3600.0, -20.0, 20.0, 3600.0])
def test_nodes_whose_clocks_differ_agree_on_who_holds_a_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong_by: float
) -> None:
    wrong = Node(monkeypatch, wrong_by)
    with wrong:
        held = acquire(tmp_path / "a", "one")
        assert held is not None
        dead = acquire(tmp_path / "dead", "one", seconds=-1.0)
        assert dead is not None
    assert is_held(tmp_path / "a")
    assert acquire(tmp_path / "a", "two") is None
    assert not is_held(tmp_path / "dead")
    with wrong:
        assert held.renew()
    assert is_held(tmp_path / "a")
    assert acquire(tmp_path / "b", "two") is not None
    with wrong:
        assert is_held(tmp_path / "b")
        assert acquire(tmp_path / "b", "one") is None


def test_to_ask_the_server_for_its_time_leaves_nothing_and_is_not_done_each_time(tmp_path: Path) -> None:
    made: list[str] = []
    sys.addaudithook(
        lambda event, arguments: (
            made.append(str(arguments[0])) if event == "open" and str(tmp_path) in str(arguments[0]) else None
        )
    )
    for _ in range(10):
        assert abs(lease.server_time(tmp_path) - time.time()) < PATIENCE_SECONDS
    assert len(made) <= 1
    assert list(tmp_path.iterdir()) == []


def test_where_nothing_can_be_written_a_lease_is_judged_by_the_own_clock(tmp_path: Path) -> None:
    assert abs(lease.server_time(tmp_path / "not there") - time.time()) < PATIENCE_SECONDS
