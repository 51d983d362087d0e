"""Mutations of the rules by which no wrong result goes unreported, and whether a test catches each of them.

    python -m tests.support.mutations [NAME…]

Each mutation takes a rule away or weakens it, in a copy of the repository, and the tests that are named with it run
there. A mutation that they do not catch is a rule that nobody would miss. The mutations are in mutated_rules.txt, below
the file that each changes: a name and the tests that catch it, the lines that are taken away, and those in their place.
A test keeps their places current.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.support import ROOT

PACKAGES = ("cli", "coordinator", "core", "evaluator", "launcher", "operator", "trainer")
"""Folders with the product's packages."""
SECONDS = 400.0
"""Time limit of the tests of one mutation, in seconds: several times what the slowest take, and more than the limit of
a single test."""
INTERRUPT_SECONDS = 10.0
"""Time for which tests that were interrupted may end their own processes, in seconds."""


class Mutation(NamedTuple):
    """A rule that is changed."""

    name: str
    file: str
    before: str
    """Text that stands once in the file."""
    after: str
    tests: str
    """Tests that have to fail, as words for pytest."""


def _read(text: str) -> tuple[Mutation, ...]:
    """Mutations of a file such as mutated_rules.txt."""
    rules: list[tuple[str, str, str, list[str], list[str]]] = []
    file = ""
    for line in filter(None, text.splitlines()):
        name, _, tests = line.partition(": ")
        if line.startswith("- "):
            rules[-1][3].append(line[2:])
        elif line.startswith("+ "):
            rules[-1][4].append(line[2:])
        elif tests:
            words = (f"tests/{word}" if word.endswith(".py") else word for word in tests.split())
            rules.append((name, file, " ".join(words), [], []))
        elif not line.startswith("#"):
            file = line
    return tuple(Mutation(*rule, "\n".join(old), "\n".join(new), tests) for *rule, tests, old, new in rules)


MUTATIONS = _read((ROOT / "tests/support/mutated_rules.txt").read_text())


def copy_repository(folder: Path) -> None:
    """Copy what git knows of, as it is in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (source := ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, folder / name)


def run_tests(tests: str, folder: Path) -> list[str]:
    """Run tests in a copy; returns those that fail.

    Args:
        tests: words for pytest.

    Raises:
        RuntimeError: they cannot run.
        TimeoutError: they take too long; their processes are ended.
    """
    path = os.pathsep.join(str(folder / name) for name in PACKAGES)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(tests)]
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    # In a session of its own: tests start processes that would stay when they hang.
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            end_group(process)
            raise TimeoutError(f"{tests} takes more than {SECONDS:.0f} s") from None
        except KeyboardInterrupt:
            end_group(process)
            raise
    if process.returncode not in (0, 1):
        raise RuntimeError(output[-1000:] + errors[-1000:])
    return [line.split(" - ")[0].split("::")[-1] for line in output.splitlines() if line.startswith("FAILED ")]


def selections(mutations: Iterable[Mutation]) -> list[str]:
    """Return the tests of mutations, as words for pytest: each file once."""
    names: dict[str, list[str]] = {}
    for mutation in mutations:
        files, _, name = mutation.tests.partition(" -k ")
        for file in files.split():
            names.setdefault(file, []).append(name)
    # A mutation without a name takes the whole file.
    return [
        file if "" in chosen else f"{file} -k '{' or '.join(dict.fromkeys(chosen))}'" for file, chosen in names.items()
    ]


def end_group(leader: subprocess.Popen[str]) -> None:
    """End a process that leads a group, and all others of the group."""
    os.killpg(leader.pid, signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        leader.communicate(timeout=INTERRUPT_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)


def main() -> int:
    """Play the mutations that are named, or all; returns the number of those that no test has caught. One whose tests
    take too long is not caught: it says nothing."""
    names = sys.argv[1:] or [mutation.name for mutation in MUTATIONS]
    chosen = [mutation for mutation in MUTATIONS if mutation.name in names]
    if unknown := set(names) - {mutation.name for mutation in chosen}:
        sys.exit(f"no mutation has the name {', '.join(sorted(unknown))}")
    missed = timed_out = 0
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "copy"
        copy_repository(folder)
        # Tests that fail anyway would catch everything.
        for tests in selections(chosen):
            if failed := run_tests(tests, folder):
                print(f"{failed[0]} fails without a mutation")
                return 1
        for mutation in chosen:
            file, began = folder / mutation.file, time.monotonic()
            original = file.read_text()
            assert original.count(mutation.before) == 1, mutation
            file.write_text(original.replace(mutation.before, mutation.after))
            try:
                failed = run_tests(mutation.tests, folder)
            except TimeoutError:
                timed_out += 1
                result = "TIMED OUT"
            else:
                missed += not failed
                result = f"caught by {failed[0]}" if failed else "NOT CAUGHT"
            file.write_text(original)
            print(f"{mutation.name:56} {time.monotonic() - began:4.0f} s  {result}", flush=True)
    print(f"{len(chosen) - missed - timed_out} of {len(chosen)} mutations are caught, {timed_out} timed out")
    return missed + timed_out


if __name__ == "__main__":
    sys.exit(main())
