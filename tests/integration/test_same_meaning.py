"""A script means the same, whether torchrun starts it or Tandem forks it: the same file runs under both, and they are
compared."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import atexit, csv, ctypes, gzip, io, json, os, pickle, random, shelve, sys, tempfile, threading, time, zipfile
import numpy as np
import torch

rank, out = os.environ["RANK"], os.environ["OUT"]
values: int = 3

class Mine:
    pass

def say(what, fact):
    with open(f"{out}/{what}-{rank}.json", "w") as file:
        json.dump(fact, file)

def pickled(what):
    kept = pickle.loads(pickle.dumps(Mine()))
    say(what, [type(kept).__module__, type(kept).__qualname__])

def late():
    time.sleep(0.3)
    pickled("thread")

main = sys.modules["__main__"]
say("facts", {
    "file": globals().get("__file__"), "main": getattr(main, "__file__", None), "same": main.__dict__ is globals(),
    "name": __name__,
    "package": __package__, "spec": getattr(__spec__, "name", None), "argv": sys.argv, "path": sys.path[0],
    "orig_argv": sys.orig_argv[1:], "folder": os.getcwd(), "builtins": type(__builtins__).__name__,
    "globals": sorted(name for name in globals() if name.startswith("__")), "annotations": str(__annotations__),
    "cached": globals().get("__cached__") is None,
    "ranks": [os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "WORLD_SIZE")],
})
say("drawn", [torch.rand(1).item(), float(np.random.rand()), random.random(), torch.initial_seed()])

writer = csv.writer(open(f"{out}/rows-{rank}.csv", "w", newline=""))
for number in range(50):
    writer.writerow([number, number**2])
zipped = io.TextIOWrapper(gzip.GzipFile(f"{out}/lines-{rank}.gz", "wb", mtime=0))
print("zipped", file=zipped)
archive = zipfile.ZipFile(f"{out}/archive-{rank}.zip", "w")
archive.writestr("entry", "content")
shelf = shelve.open(f"{out}/shelf-{rank}", writeback=True)
shelf["key"] = []
shelf["key"].append(7)
temporary = tempfile.NamedTemporaryFile(dir=out, prefix="temporary-")
c = ctypes.CDLL(None)
c.fopen.restype = ctypes.c_void_p
stream = ctypes.c_void_p(c.fopen(f"{out}/c-{rank}.txt".encode(), b"w"))
c.fputs(b"from C", stream)

atexit.register(pickled, "exit")
threading.Thread(target=late).start()
"""
COMMANDS = {
    "a-script": ["nested/../script.py", "--lr", "1"],
    "a-module": ["-m", "package.tool", "--lr", "1"],
    "code": [sys.executable, "-c", SCRIPT, "--lr", "1"],
}


def run(folder: Path, out: str, start: list[str], command: list[str]) -> dict[str, Any]:
    """Run it with two ranks; returns what it said by name, and what it wrote by name."""
    (folder / out).mkdir()
    # Not pytest's own variables: a pytest process has changed some that Python reads.
    environment = os.environ | {"OUT": str(folder / out), "OMP_NUM_THREADS": "1"}
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=0", "--monitor-interval=0.05"]
    words = [sys.executable, "-P", "-m", start[0], *start[1:2], *options, *start[2:], *command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = {path.name: path.read_bytes() for path in (folder / out).iterdir()}
    return {name: json.loads(body) if name.endswith(".json") else body for name, body in found.items()}


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=pytest.mark.full("trainer") if one != "a-script" else ()) for one in COMMANDS]
)
def test_a_script_means_the_same_under_torchrun_and_warm(tmp_path: Path, kind: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "nested").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "tool.py").write_text(SCRIPT)
    # torchrun itself adds -u to a script and to a module.
    unbuffered = ["--no-python", *COMMANDS[kind][:1], "-u", *COMMANDS[kind][1:]] if kind == "code" else COMMANDS[kind]
    plain = run(tmp_path, "plain", ["torch.distributed.run"], unbuffered)
    warm = run(tmp_path, "warm", ["tandem_trainer.agent", "--warm", "--"], COMMANDS[kind])

    for found in (plain, warm):
        # Numbers that nobody has seeded are others in each rank. (numpy and Python seed themselves as torch does.)
        drawn = [found.pop(f"drawn-{rank}.json") for rank in range(2)]
        assert all(one != other for one, other in zip(*drawn, strict=True)), drawn
        archives = [found.pop(f"archive-{rank}.zip") for rank in range(2)]
        # They hold the time of writing.
        assert all(re.search(rb"entrycontent.*PK\x05\x06", body, re.DOTALL) for body in archives)
    assert {*plain} == {*warm}
    assert warm == plain
    assert warm["rows-1.csv"].count(b"\n") == 50
    assert warm["c-0.txt"] == b"from C"
    assert not [name for name in warm if name.startswith("temporary-")]
    assert warm["exit-0.json"] == warm["thread-0.json"] == ["__main__", "Mine"]


@pytest.mark.full("trainer")
def test_numbers_that_nobody_seeded_are_others_after_a_restart(tmp_path: Path) -> None:
    draws = """
import os, sys, torch
from pathlib import Path
drawn = Path(f"drawn-{os.environ['RANK']}.txt")
with drawn.open("a") as file:
    file.write(f"{torch.rand(1).item()}\\n")
if drawn.read_text().count("\\n") < 3:
    sys.exit(1)
"""
    (tmp_path / "draws.py").write_text(draws)
    options = ["--standalone", "--nproc-per-node=1", "--max-restarts=2", "--monitor-interval=0.05", "--"]
    command = [sys.executable, "-P", "-m", "tandem_trainer.agent", "--warm", *options, "draws.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert len({*(tmp_path / "drawn-0.txt").read_text().split()}) == 3
