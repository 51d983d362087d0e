"""Go programs that tests need beside the cluster, each compiled from a module of its own that pins its version.

The modules are not among those of `tests.support.cluster.machine`: when one of these changes, all of them are compiled
again.
"""

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.cluster.machine import ClusterError
from tests.support.cluster.machine.binaries import kept_program

DOWNLOAD_SECONDS = 300.0


@dataclass(frozen=True)
class Pinned:
    """One Go package path of a module of ours."""

    module: Path
    """The folder with go.mod and go.sum."""
    path: str

    @property
    def version(self) -> str:
        """As pinned, without its `v`."""
        pins = (self.module / "go.mod").read_text()
        found = re.search(rf"^\s*(?:require )?{re.escape(self.path)} v(\S+)", pins, re.MULTILINE)
        assert found, f"{self.module.name} pins no {self.path}"
        return found[1]

    def program(self, name: str, package: str, flags: str = "-s -w", tags: str = "") -> Path:
        """Where it is; compiled now if that has not happened yet.

        Args:
            package: the command's, below the path.
            flags: for the linker.
            tags: for the build, separated by commas.

        Raises:
            ClusterError: there is no Go, or it does not compile.
        """
        if shutil.which("go") is None:
            raise ClusterError(f"{name} is compiled from its sources, and there is no Go in PATH; install one of them")
        return kept_program(self.module, name, flags, f"{self.path}/{package}", tags)

    def sources(self) -> Path:
        """The folder with its sources, brought here again if Go's cache was emptied since it was compiled.

        Raises:
            ClusterError: they cannot be had.
        """
        command = ["go", "mod", "download", "-json", self.path]
        told = subprocess.run(command, cwd=self.module, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
        if told.returncode != 0:
            raise ClusterError(f"{' '.join(command)}: {told.stdout}{told.stderr}")
        return Path(json.loads(told.stdout)["Dir"])
