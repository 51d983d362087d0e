"""Commands to the running cluster."""

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.support.cluster.machine.places import KUBECONFIG


class Kubectl:
    """kubectl as the cluster's administrator."""

    def __init__(self, binaries: Path) -> None:
        self._command = [str(binaries / "kubectl"), f"--kubeconfig={KUBECONFIG}"]

    def __call__(self, *arguments: str, stdin: str = "") -> str:
        """What a command prints.

        Raises:
            OSError: it failed; the message says why.
        """
        result = self._run(*arguments, stdin=stdin)
        if result.returncode != 0:
            raise OSError(f"kubectl {' '.join(arguments)}: {result.stderr.strip()}")
        return result.stdout

    def succeeds(self, *arguments: str) -> bool:
        return self._run(*arguments).returncode == 0

    def apply(self, manifest: dict[str, Any]) -> None:
        self("apply", "-f", "-", stdin=json.dumps(manifest))

    def _run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run([*self._command, *arguments], input=stdin, capture_output=True, text=True)
