"""Mutations of the rules by which no wrong result goes unreported, and whether a test catches each of them.

    python -m tests.support.mutations [NAME…]

Each mutation takes a rule away or weakens it, in a copy of the repository, and the tests that are named with it run
there. A mutation that they do not catch is a rule that nobody would miss. A test of this module keeps the places
current.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.support import ROOT

PACKAGES = ("cli", "coordinator", "core", "evaluator", "operator", "trainer")
"""Folders with the product's packages."""
TRAINER, COORDINATOR = "trainer/tandem_trainer/", "coordinator/tandem_coordinator/"
UNIT = "tests/unit/trainer/"
DISAGREEMENTS, OWN_STATE = f"{UNIT}test_agreement_disagreements.py", f"{UNIT}test_checkpoint_own_state.py"
ROUND_TRIP, FEEDING = f"{UNIT}test_checkpoint_round_trip.py", f"{UNIT}test_feeding.py"
DEPARTURES = "tests/unit/coordinator/test_membership_departures.py"
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


MUTATIONS = (
    # Agreement of ranks
    Mutation(
        "terms-are-not-compared",
        f"{TRAINER}agreement.py",
        "if any(rank_terms.get(name) != by_rank[0].get(name) for rank_terms in by_rank)",
        "if False",
        f"{DISAGREEMENTS} -k terms",
    ),
    Mutation(
        "terms-of-rank-0-alone",
        f"{TRAINER}agreement.py",
        "names = dict.fromkeys(name for rank_terms in by_rank for name in rank_terms)",
        "names = dict.fromkeys(by_rank[0])",
        f"{DISAGREEMENTS} {UNIT}test_agreement.py",
    ),
    Mutation(
        "samples-are-not-compared",
        f"{TRAINER}process_group.py",
        "digits = [samples_digest >> shift & 0xFFFF",
        "digits = [0 * samples_digest >> shift & 0xFFFF",
        f"{DISAGREEMENTS} -k samples",
    ),
    Mutation(
        "samples-without-their-step",
        f"{TRAINER}agreement.py",
        'self._hash.update(f"{step} {content}".encode())',
        'self._hash.update(f"{content}".encode())',
        f"{DISAGREEMENTS} {UNIT}test_agreement.py",
    ),
    Mutation(
        "moments-are-not-compared",
        f"{TRAINER}checkpoint/replicas.py",
        "        for kind, tensors in self._tensors().items():\n",
        '        for kind, tensors in self._tensors().items():\n            if kind == "moments": continue\n',
        f"{DISAGREEMENTS} -k moment",
    ),
    Mutation(
        "any-difference-is-rounding",
        f"{TRAINER}checkpoint/replicas.py",
        "ROUNDING = 1e-4",
        "ROUNDING = 1e4",
        DISAGREEMENTS,
    ),
    Mutation(
        "steps-that-all-took-other-samples-are-an-order-of-the-scripts-own",
        f"{TRAINER}sample_audit.py",
        "position.first is None and deviating",
        "deviating",
        f"{UNIT}test_sample_audit.py",
    ),
    # State of the user's objects
    Mutation(
        "own-state-of-optimizers-is-dropped",
        f"{TRAINER}checkpoint/state.py",
        "return bool(hooks) or method is not torch.optim.Optimizer.load_state_dict",
        "return False",
        OWN_STATE,
    ),
    Mutation(
        "modules-get-memory-that-is-given-back",
        f"{TRAINER}checkpoint/state.py",
        'return tensor.clone() if device.type == "cpu" else tensor.to(device)',
        "return tensor",
        OWN_STATE,
    ),
    Mutation(
        "added-groups-are-forgotten",
        f"{TRAINER}checkpoint/state.py",
        "if not state.added or state.groups is None",
        "if True or state.groups is None",
        OWN_STATE,
    ),
    Mutation(
        "unfrozen-parameters-are-frozen-again",
        f"{TRAINER}checkpoint/train_state.py",
        "            if unwrapped_name(name) in changed:\n",
        "            if False:\n",
        OWN_STATE,
    ),
    Mutation(
        "an-empty-dictionary-keeps-its-first-content",
        f"{TRAINER}checkpoint/train_state.py",
        "if name in trees and (isinstance(other, MutableMapping) or trees[name]",
        "if name in trees and (trees[name]",
        OWN_STATE,
    ),
    Mutation(
        "lost-state-is-not-found",
        f"{TRAINER}checkpoint/round_trip.py",
        "lost = sorted(differences(saved, copied.state_dict()))",
        "lost: list[str] = []",
        ROUND_TRIP,
    ),
    Mutation(
        "too-large-is-not-named",
        f"{TRAINER}checkpoint/round_trip.py",
        "self._copy, self.is_too_large = None, True",
        "self._copy = None",
        ROUND_TRIP,
    ),
    # Batches
    Mutation(
        "lists-of-samples-are-fields",
        f"{TRAINER}data/feeding.py",
        "    if layout.of_samples and isinstance(data, list | tuple):\n",
        "    if False:\n",
        FEEDING,
    ),
    Mutation(
        "as-many-fields-as-samples-are-samples",
        f"{TRAINER}data/feeding.py",
        "yield path, len(smaller) < len(data)",
        "yield path, True",
        FEEDING,
    ),
    Mutation(
        "as-many-rows-as-samples-are-samples",
        f"{TRAINER}data/feeding.py",
        "yield path, sizes[0] == (count, count - 1)",
        "yield path, len(data) == count",
        FEEDING,
    ),
    Mutation(
        "lists-of-another-length-are-cut-inside",
        f"{TRAINER}data/feeding.py",
        "if not is_cut and (is_list_of_samples or not _are_fields(part, count)):",
        "if False:",
        FEEDING,
    ),
    # Ends
    Mutation(
        "exit-code-0-is-a-completion",
        f"{TRAINER}agent/local_ranks.py",
        "return self._codes.get(local_rank) == ExitCode.DONE and view.beat() is not None and not view.is_complete",
        "return False",
        f"{UNIT}test_local_ranks.py",
    ),
    Mutation(
        "who-has-finished-waits-for-a-coordinator-that-is-gone",
        f"{TRAINER}agent/finished.py",
        "        return self._code\n",
        "        return None\n",
        f"{UNIT}test_heartbeat.py -k leaves_its_word",
    ),
    Mutation(
        "who-has-finished-leaves-without-a-record",
        f"{TRAINER}agent/finished.py",
        "                self._rundir.record_finished(self._member)\n",
        "                pass\n",
        f"{UNIT}test_heartbeat.py -k leaves_its_word",
    ),
    Mutation(
        "the-last-message-is-not-sent-again",
        f"{TRAINER}agent/heartbeat.py",
        "        except RequestCancelled:\n            return None\n",
        "        except RequestCancelled:\n            return 0.0\n",
        f"{UNIT}test_heartbeat.py -k sent_again",
    ),
    Mutation(
        "ranks-that-get-the-signal-of-their-agent-have-failed",
        f"{TRAINER}agent/heartbeat.py",
        "if self._ranks is not None and self._end_signal is None:",
        "if self._ranks is not None:",
        f"{UNIT}test_heartbeat.py -k signal_of",
    ),
    Mutation(
        "a-record-of-another-generation-counts",
        f"{COORDINATOR}membership.py",
        "in state.members and member.generation == state.number",
        "in state.members",
        DEPARTURES,
    ),
    Mutation(
        "records-of-who-has-finished-are-not-read",
        f"{COORDINATOR}coordinator.py",
        "        for member in observed.finished:\n",
        "        for member in ():\n",
        "tests/integration/test_end.py -k cannot_reach",
    ),
    # Mistakes
    Mutation(
        "the-same-error-on-all-ranks-is-nobodys",
        f"{COORDINATOR}failures.py",
        "        and len(distinct) == 1\n",
        "        and False\n",
        "tests/unit/coordinator/test_failures_repeated.py",
    ),
    Mutation(
        "the-place-of-an-error-is-in-a-library",
        f"{TRAINER}failure.py",
        "for frame in reversed(stack) if not _is_installed(frame.filename)",
        "for frame in reversed(stack)",
        f"{UNIT}test_failure.py",
    ),
    Mutation(
        "an-error-is-shown-twice",
        "cli/tandem_cli/local/child.py",
        "newest_lines = lines[starts[-1] :] if starts else []",
        "newest_lines = lines",
        "tests/unit/cli/test_local_tail.py",
    ),
    # Adapters
    Mutation(
        "no-option-is-refused",
        f"{TRAINER}adapters/options.py",
        'option.treatment == "refused" and option.concerns(value)',
        "False",
        f"{UNIT}test_adapters_options.py",
    ),
    Mutation(
        "unknown-options-are-silent",
        f"{TRAINER}adapters/options.py",
        "        if option is None:\n            _warn(",
        "        if option is None:\n            str(",
        f"{UNIT}test_adapters_options.py",
    ),
)


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
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()]
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
    chosen = [mutation for mutation in MUTATIONS if not sys.argv[1:] or mutation.name in sys.argv[1:]]
    missed = timed_out = 0
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "copy"
        copy_repository(folder)
        # Tests that fail anyway would catch everything.
        files = dict.fromkeys(word for mutation in chosen for word in mutation.tests.split() if word.endswith(".py"))
        if failed := run_tests(" ".join(files), folder):
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
