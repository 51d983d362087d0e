"""`make e2e`: the tests on a real cluster, the one in KUBECONFIG, or else one started here and removed again.

    python -m tests.cluster [--full] [PYTEST'S ARGUMENTS]    all tests of the tier, or those that are named
    python -m tests.cluster [--full] --prepare               only compile and build what all of them need

All together they run in two workers, by file; a file that is marked `alone` waits for the other worker and keeps it
waiting (tests/cluster/conftest.py).
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.cluster import helm, images, kueue, prometheus_operator
from tests.support.cluster.machine import ClusterError, cluster
from tests.support.cluster.machine.places import CACHE, KUBECONFIG, LOGS
from tests.support.cluster.machine.processes import mark
from tests.support.tiers import WORKERS

KEPT_LOGS = ROOT / "runs" / "e2e"
TIDY_SECONDS = 60.0
"""How long interrupted tests may take to remove what they made."""
TIERS = {False: "e2e", True: "e2e-full"}
TOUCHED = "--touched-since"


def main(arguments: Sequence[str]) -> int:
    """Run the tests, with pytest's own arguments: all of them, unless some are named.

    Returns:
        pytest's exit code, or 1 if there is no cluster.
    """
    full, arguments = "--full" in arguments, [one for one in arguments if one != "--full"]
    # Asked to end, by whomever: the cluster goes first.
    for asked in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(asked, signal.default_int_handler)
    try:
        if arguments == ["--prepare"]:
            if "KUBECONFIG" not in os.environ:
                _prepare(full)
            return 0
        if (full or TOUCHED in arguments) and (nothing := _collects_nothing(arguments, full)):
            return nothing
        if given := os.environ.get("KUBECONFIG"):
            return _on_theirs(given, arguments, full)
        with cluster.held():
            return _on_our_own(arguments, full)
    except (ClusterError, OSError) as error:
        print(f"make e2e: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make e2e: interrupted", file=sys.stderr)
        return 130


def _prepare(full: bool) -> Path:
    """Compile and build what the tests of a tier need beside the cluster: within a test, it would count as its time.

    Returns:
        The folder with the cluster's programs.
    """
    # One at a time: what the other has made is then found.
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "prepare.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for another run that compiles and builds", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        binaries = cluster.programs()
        for compiled in (helm.program, *((kueue.programs, prometheus_operator.programs) if full else ())):
            compiled()
        built = images.build_all()
        if full:
            images.build_libraries(built)
    return binaries


def _collects_nothing(arguments: Sequence[str], full: bool) -> int:
    """pytest's exit code for that, so that no cluster is started for nothing; 0 if there is something to run."""
    command = [*_command(arguments, full), "--collect-only", "-q"]
    code = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL).returncode
    return code if code == pytest.ExitCode.NO_TESTS_COLLECTED else 0


def _on_theirs(kubeconfig: str, arguments: Sequence[str], full: bool) -> int:
    if shutil.which("kubectl") is None:
        raise ClusterError("kubectl is not in PATH, and the cluster in KUBECONFIG cannot be reached without")
    print(f"testing on the cluster in KUBECONFIG={kubeconfig}", flush=True)
    return _pytest(arguments, full, {})


def _on_our_own(arguments: Sequence[str], full: bool) -> int:
    binaries = _prepare(full) if _means_all(arguments) else cluster.programs()
    code = 1
    try:
        started = time.monotonic()
        cluster.up(binaries)
        print(f"the cluster is up after {time.monotonic() - started:.0f} s", flush=True)
        if _means_all(arguments):
            images.provide()
            arguments = [*arguments, *WORKERS, f"--tier={TIERS[full]}"]
        path = os.pathsep.join([str(binaries), os.environ["PATH"]])
        code = _pytest(arguments, full, {"KUBECONFIG": str(KUBECONFIG), "PATH": path, **mark("tests")})
    finally:
        _take_down(keep_logs=code != 0)
    return code


def _means_all(arguments: Sequence[str]) -> bool:
    """Whether all tests of the tier are meant, or all of them that a change touches."""
    return not arguments or TOUCHED in arguments


def _command(arguments: Sequence[str], full: bool) -> list[str]:
    # A commit that is not known is an empty argument, and no path.
    named = any(argument and (ROOT / argument.partition("::")[0]).exists() for argument in arguments)
    # Who names a test wants it, whatever its tier.
    which = ["-m", "full"] if full else ["-m", "full or not full"] if named else []
    return [sys.executable, "-m", "pytest", *which, *arguments, *([] if named else ["tests/cluster"])]


def _pytest(arguments: Sequence[str], full: bool, environment: dict[str, str]) -> int:
    command = _command(arguments, full)
    # In a process group of its own: a Ctrl-C reaches it once, through us, and it still tidies up after its tests.
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, process_group=0)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(TIDY_SECONDS)
        raise
    finally:
        process.kill()
    return code if code >= 0 else 128 - code


def _take_down(keep_logs: bool) -> None:
    # An impatient second Ctrl-C must not leave half a cluster behind.
    for asked in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(asked, signal.SIG_IGN)
    print("taking the cluster down", flush=True)
    try:
        if keep_logs and LOGS.is_dir():
            shutil.rmtree(KEPT_LOGS, ignore_errors=True)
            shutil.copytree(LOGS, KEPT_LOGS)
            print(f"its logs are in {KEPT_LOGS.relative_to(ROOT)}", flush=True)
    finally:
        cluster.down()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
