"""A slurmdbd on a MariaDB of its own, for a cluster that enforces accounts and their limits.

Both come from Debian's packages, unpacked; both listen on the loopback address alone.
"""

import os
import subprocess
from pathlib import Path

from tandem_cli.slurm import scheduler
from tests.support.ports import reserved_port
from tests.support.slurm.packages import LIBRARIES
from tests.support.waiting import until

ENFORCED = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStorageEnforce=associations,limits
"""
CONFIGURATION = """\
AuthType=auth/none
DbdHost={host}
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
PluginDir={plugins}
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={database}
StorageUser=root
StorageLoc=slurm
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
"""


class Accounting:
    """Database and daemon, from their start until they are closed.

    Args:
        folder: that of the cluster, with its slurm.conf.
        root: where the packages are unpacked.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder, self._root = folder, root
        self._data = folder / "mariadb"
        self.port, self._database = reserved_port(), reserved_port()
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def enforced(self) -> str:
        """Lines of slurm.conf."""
        return ENFORCED.format(port=self.port)

    def start(self, slurmdbd: Path) -> None:
        """Make an empty database, and start both."""
        libraries = self._root / LIBRARIES
        variables = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
        words = ["--no-defaults", f"--basedir={self._root}/usr", f"--datadir={self._data}", "--user=root"]
        made = [str(self._root / "usr/bin/mariadb-install-db"), *words]
        done = subprocess.run(
            [*made, "--auth-root-authentication-method=normal", "--skip-test-db"],
            env=variables,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        server = [str(self._root / "usr/sbin/mariadbd"), *words, "--bind-address=127.0.0.1"]
        server += [f"--port={self._database}", f"--socket={self._data}/socket", f"--pid-file={self._data}/pid"]
        server += ["--innodb-buffer-pool-size=64M"]
        with (self._folder / "mariadb.out").open("ab") as output:
            self._daemons.append(
                subprocess.Popen(server, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables)
            )
        until((self._data / "pid").exists, "the database", otherwise=self._story)
        text = CONFIGURATION.format(
            host=os.uname().nodename,
            port=self.port,
            plugins=libraries / "slurm-wlm",
            database=self._database,
            folder=self._folder,
        )
        (self._folder / "slurmdbd.conf").write_text(text)
        (self._folder / "slurmdbd.conf").chmod(0o600)
        with (self._folder / "slurmdbd.out").open("ab") as output:
            self._daemons.append(
                subprocess.Popen([str(slurmdbd), "-D"], stdin=subprocess.DEVNULL, stdout=output, stderr=output)
            )
        until(lambda: self._answers(slurmdbd.with_name("sacctmgr")), "slurmdbd", otherwise=self._story)

    def _answers(self, sacctmgr: Path) -> bool:
        try:
            scheduler.ask(str(sacctmgr), "--noheader", "show", "cluster")
        except scheduler.SlurmError:
            return False
        return True

    def _story(self) -> str:
        return "\n".join(file.read_text(errors="replace") for file in sorted(self._folder.glob("*.out")))

    def close(self) -> None:
        """End both."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
            daemon.wait()
