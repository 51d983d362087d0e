"""`make e2e`: the tests on a real cluster, the one in KUBECONFIG, or else one started here and removed again."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from tests.support import ROOT
from tests.support.cluster import helm, kueue, prometheus_operator
from tests.support.cluster.images import provide
from tests.support.cluster.machine import ClusterError, cluster
from tests.support.cluster.machine.places import KUBECONFIG, LOGS
from tests.support.cluster.machine.processes import mark

KEPT_LOGS = ROOT / "runs" / "e2e"
TIDY_SECONDS = 60.0
"""How long interrupted tests may take to remove what they made."""


def main(arguments: Sequence[str]) -> int:
    """Run the tests, with pytest's own arguments: all of them, unless some are named.

    Returns:
        pytest's exit code, or 1 if there is no cluster.
    """
    # Asked to end, by whomever: the cluster goes first.
    for asked in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(asked, signal.default_int_handler)
    try:
        if given := os.environ.get("KUBECONFIG"):
            return _on_theirs(given, arguments)
        with cluster.held():
            return _on_our_own(arguments)
    except (ClusterError, OSError) as error:
        print(f"make e2e: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make e2e: interrupted", file=sys.stderr)
        return 130


def _on_theirs(kubeconfig: str, arguments: Sequence[str]) -> int:
    if shutil.which("kubectl") is None:
        raise ClusterError("kubectl is not in PATH, and the cluster in KUBECONFIG cannot be reached without")
    print(f"testing on the cluster in KUBECONFIG={kubeconfig}", flush=True)
    return _pytest(arguments, {})


def _on_our_own(arguments: Sequence[str]) -> int:
    binaries = cluster.programs()
    if not arguments:
        # What all tests together need beside it. Made within a test, the first time would count towards its limit; so
        # too the images below.
        for compiled in (helm.program, kueue.program, prometheus_operator.programs):
            compiled()
    code = 1
    try:
        started = time.monotonic()
        cluster.up(binaries)
        print(f"the cluster is up after {time.monotonic() - started:.0f} s", flush=True)
        if not arguments:
            provide()
        path = os.pathsep.join([str(binaries), os.environ["PATH"]])
        code = _pytest(arguments, {"KUBECONFIG": str(KUBECONFIG), "PATH": path, **mark("tests")})
    finally:
        _take_down(keep_logs=code != 0)
    return code


def _pytest(arguments: Sequence[str], environment: dict[str, str]) -> int:
    named = any((ROOT / argument.partition("::")[0]).exists() for argument in arguments)
    command = [sys.executable, "-m", "pytest", *arguments, *([] if named else ["tests/cluster"])]
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
