"""A real slurmdbd and its MariaDB, for a cluster whose jobs are charged to accounts.

MariaDB listens on a socket in its folder alone, and asks nobody for a password. Where both sides have no folder but
their own, its name is relative: the path of a socket has at most 107 letters.
"""

import shutil
import subprocess
from pathlib import Path

from tandem_launcher.slurm import scheduler
from tests.support.ports import reserved_port
from tests.support.slurm.packages import LIBRARIES
from tests.support.waiting import until

SQL = ("mysql_system_tables.sql", "mysql_system_tables_data.sql")
"""slurmdbd stores procedures, for which there have to be tables."""
CONFIGURATION = """\
AuthType=auth/none
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm
PidFile={folder}/slurmdbd.pid
LogFile={folder}/slurmdbd.log
PluginDir={plugins}
"""
FOR_CONTROLLER = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStorageEnforce=associations,limits,qos
"""


class Accounting:
    """The accounts of one cluster, until it is closed.

    Args:
        folder: the cluster's, with slurm.conf, beside which slurmdbd looks for its own configuration.
        programs: the folder with SLURM's commands.
        root: what was unpacked.
    """

    def __init__(self, folder: Path, programs: Path, root: Path) -> None:
        self._folder, self._programs, self._root = folder, programs, root
        self._tables = folder / "tables"
        self._port = reserved_port()
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def lines(self) -> str:
        """What slurm.conf says of it."""
        return FOR_CONTROLLER.format(port=self._port)

    def __enter__(self) -> "Accounting":
        self._make_tables()
        words = [*self._maria(), "--skip-grant-tables", "--skip-networking", "--socket=socket"]
        self._start("mariadbd", words, {})
        until((self._tables / "socket").exists, "MariaDB", otherwise=lambda: self._said("mariadbd"))
        file = self._folder / "slurmdbd.conf"
        plugins = self._root / LIBRARIES / "slurm-wlm"
        file.write_text(CONFIGURATION.format(folder=self._folder, port=self._port, plugins=plugins))
        file.chmod(0o600)
        self._start("slurmdbd", [str(self._programs / "slurmdbd"), "-D"], {"MYSQL_UNIX_PORT": "tables/socket"})
        until(self._answers, "slurmdbd", otherwise=lambda: self._said("slurmdbd"))
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()
        self._daemons.clear()
        shutil.rmtree(self._tables, ignore_errors=True)

    def change(self, *words: str) -> None:
        """sacctmgr. The controller knows of it once this returns."""
        scheduler.run(str(self._programs / "sacctmgr"), "--immediate", *words)

    def _answers(self) -> bool:
        try:
            scheduler.run(str(self._programs / "sacctmgr"), "show", "cluster")
        except scheduler.SlurmError:
            return False
        return True

    def _make_tables(self) -> None:
        self._tables.mkdir()
        sql = "\n".join((self._root / "usr/share/mysql" / name).read_text() for name in SQL)
        subprocess.run(
            [*self._maria(), "--bootstrap"],
            input=f"CREATE DATABASE mysql;\nUSE mysql;\n{sql}\n",
            env=self._variables(),
            capture_output=True,
            check=True,
            text=True,
        )

    def _maria(self) -> list[str]:
        return [
            *(str(self._root / "usr/sbin/mariadbd"), "--no-defaults", "--user=root", f"--datadir={self._tables}"),
            f"--lc-messages-dir={self._root / 'usr/share/mysql'}",
            *("--innodb-buffer-pool-size=16M", "--innodb-log-file-size=4M", "--innodb-flush-log-at-trx-commit=0"),
        ]

    def _variables(self) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(self._root / LIBRARIES)}

    def _start(self, name: str, words: list[str], variables: dict[str, str]) -> None:
        with (self._folder / f"{name}.out").open("ab") as output:
            self._daemons.append(
                subprocess.Popen(
                    words,
                    cwd=self._folder,
                    env=self._variables() | variables,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                )
            )

    def _said(self, name: str) -> str:
        return (self._folder / f"{name}.out").read_text()[-2000:]
