"""slurmctld and three slurmd on this machine: the nodes n0 and n1 of the partitions `main` and `urgent`, which takes
nodes from jobs of the first; n2 of the partition `cpu`; and all three of the partition `all`, which takes n2 last.

Everything is on the loopback address. The daemons stay in the foreground, as children that are ended by their number;
what they have started carries SLURM_CONF, the path of this cluster's configuration.

Debian's programs are called `slurmctld-wlm` and so on, which nobody may start them by: SLURM's libraries know by the
name in `argv[0]` which daemon they are part of. A slurmctld of another name has no connection to slurmdbd, and crashes
when it first uses it. So they are started by links.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tandem_launcher.slurm import scheduler
from tests.support.ports import reserved_port
from tests.support.slurm.accounting import Accounting
from tests.support.slurm.packages import LIBRARIES, NoSlurm, unpacked
from tests.support.waiting import until

NODES = ("n0", "n1", "n2")
PROGRAMS = {
    "usr/sbin": ("slurmctld", "slurmd", "slurmstepd", "slurmdbd"),
    "usr/bin": ("srun", "sbatch", "squeue", "scancel", "scontrol", "sinfo", "sacct", "sacctmgr"),
}
CONFIGURATION = """\
ClusterName=tandem
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
SlurmUser=root
SlurmdUser=root
PluginDir={plugins}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2,batch_sched_delay=1
SlurmdTimeout=6
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=main Nodes=n0,n1 Default=YES State=UP PriorityTier=1
PartitionName=urgent Nodes=n0,n1 State=UP PriorityTier=10
PartitionName=cpu Nodes=n2 State=UP
PartitionName=all Nodes=n0,n1,n2 State=UP PriorityTier=1
"""
ENDING_SECONDS = 12.0
"""The controller tries to reach a node once a second, eleven times."""
NO_ACCOUNTS = "AccountingStorageType=accounting_storage/none\n"


class Slurm:
    """One cluster, until it is closed.

    Args:
        has_accounts: whether it has a slurmdbd, and takes jobs for accounts alone that its user is in.
    """

    def __init__(self, folder: Path, has_accounts: bool = False) -> None:
        self.folder = folder
        self._root = unpacked()
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        self.accounting = Accounting(folder, self.bin, self._root) if has_accounts else None
        self._configure()
        self._programs()

    @property
    def configuration(self) -> Path:
        return self.folder / "slurm.conf"

    def variables(self) -> dict[str, str]:
        """What a user's shell has on this cluster's login node."""
        return {"PATH": f"{self.bin}:{os.environ['PATH']}"}

    def __enter__(self) -> "Slurm":
        try:
            if self.accounting is not None:
                self.accounting.__enter__()
                self.accounting.change("add", "cluster", "tandem")
            self.start("slurmctld")
            for node in NODES:
                self.start(node)
            until(self._is_idle, "idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _answers(self) -> bool:
        try:
            return bool(self.ask("scontrol", "ping"))
        except scheduler.SlurmError:
            return False

    def _is_idle(self) -> bool:
        try:
            lines = self.ask("sinfo", "--noheader", "--Node", "--format=%N %T").splitlines()
        except scheduler.SlurmError:
            return False
        return {line.strip() for line in lines} == {f"{node} idle" for node in NODES}

    def __exit__(self, *_: object) -> None:
        with suppress(scheduler.SlurmError):
            self.ask("scancel", "--user=root", "--full", "--signal=KILL")
        for name in list(self._daemons):
            self.kill(name)
        if self.accounting is not None:
            self.accounting.__exit__()

    def clear(self) -> None:
        """End all jobs, and have all nodes there."""
        until(self._answers, "the controller")
        self.ask("scancel", "--user=root", "--full", "--signal=KILL")
        self.ask("scancel", "--user=root")
        for name in NODES:
            if name not in self._daemons:
                self.start(name)
        until(self._is_idle, "idle nodes")

    def start(self, name: str) -> None:
        """Start the controller, or the daemon of a node."""
        words = ["slurmctld", "-D"]
        if name != "slurmctld":
            words = ["slurmd", "-D", "-N", name, "-d", str(self.bin / "slurmstepd")]
        with (self.folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                [str(self.bin / words[0]), *words[1:]], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def kill(self, name: str) -> None:
        """End the controller, or a node with all that runs on it, as a loss of power does: none of it sees the end of
        another. (An srun has a child that cancels the step, wherever that runs, when srun is killed.)"""
        daemon = self._daemons.pop(name)
        daemon.kill()
        daemon.wait()
        stopped: set[psutil.Process] = set()
        while new := set(self._of(name)) - stopped:
            for process in new:
                with suppress(psutil.Error):
                    process.suspend()
            stopped |= new
        # Linux lets stopped processes go on whose parents end.
        for process in sorted(stopped, key=_depth, reverse=True):
            with suppress(psutil.Error):
                process.kill()
        for left in (self.folder / f"spool-{name}").glob("job*"):
            shutil.rmtree(left, ignore_errors=True)

    def has_given_up_ending(self) -> None:
        """Wait until the controller does not try any longer to end what ran on a node that was lost. If the node came
        back earlier, this would end the next life of the job there, which has the same number (seen with 22.05)."""
        time.sleep(ENDING_SECONDS)

    def stop_controller(self) -> None:
        """End the controller, which writes down its queue first."""
        daemon = self._daemons.pop("slurmctld")
        daemon.terminate()
        daemon.wait()

    def forget(self) -> None:
        """Have the controller lose its queue, as one does that starts anew after its disk was lost."""
        self.stop_controller()
        shutil.rmtree(self.folder / "state")
        (self.folder / "state").mkdir()
        self.start("slurmctld")
        until(self._is_idle, "idle nodes")

    def _of(self, node: str) -> Iterator[psutil.Process]:
        """What a node runs: the steps' own daemons too, which have no variables, but children that do."""
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                variables = process.environ()
                mine = variables.get("SLURM_CONF") == str(self.configuration)
                if mine and variables.get("SLURMD_NODENAME") == node:
                    parent = process.parent()
                    if parent is not None and parent.name().startswith("slurmstepd"):
                        yield parent
                    yield process

    def ask(self, *words: str) -> str:
        """What a command of SLURM prints."""
        return scheduler.run(str(self.bin / words[0]), *words[1:])

    def update(self, job: str, **fields: str) -> None:
        self.ask("scontrol", "update", f"JobId={job}", *(f"{name}={value}" for name, value in fields.items()))

    def start_requeued(self, job: str, **fields: str) -> None:
        """Let a job that was requeued start in two seconds, instead of in two minutes. One that starts in the second in
        which its last life was ended is taken for that life: slurmd does not launch it, and slurmctld fails it with
        "Job credential revoked" (seen with 22.05, each time)."""
        self.update(job, StartTime="now+2", **fields)

    @contextmanager
    def closed(self, partition: str) -> Iterator[None]:
        """Have a partition take no jobs from this machine, which is both login node and compute node."""
        self.ask("scontrol", "update", f"PartitionName={partition}", "AllocNodes=elsewhere")
        try:
            yield
        finally:
            self.ask("scontrol", "update", f"PartitionName={partition}", "AllocNodes=ALL")

    def _configure(self) -> None:
        (self.folder / "state").mkdir()
        text = CONFIGURATION.format(
            host=os.uname().nodename,
            port=reserved_port(),
            plugins=self._root / LIBRARIES / "slurm-wlm",
            folder=self.folder,
        )
        text += NO_ACCOUNTS if self.accounting is None else self.accounting.lines
        for node in NODES:
            (self.folder / f"spool-{node}").mkdir()
            text += (
                f"NodeName={node} NodeHostname={os.uname().nodename} NodeAddr=127.0.0.1 Port={reserved_port()} CPUs=4"
                f" Weight={NODES.index(node) + 1}\n"
            )
        self.configuration.write_text(text)

    def _programs(self) -> None:
        libraries = self._root / LIBRARIES
        links = self.folder / "programs"
        links.mkdir()
        for folder, names in PROGRAMS.items():
            for name in names:
                program = self._root / folder / name
                program = program if program.exists() else program.with_name(f"{name}-wlm")
                (links / name).symlink_to(program)
                file = self.bin / name
                file.write_text(
                    "#!/bin/sh\n"
                    f"export LD_LIBRARY_PATH='{libraries}:{libraries}/slurm-wlm' SLURM_CONF='{self.configuration}'\n"
                    f"exec '{links / name}' \"$@\"\n"
                )
                file.chmod(0o755)


def _depth(process: psutil.Process) -> int:
    """How many ancestors a process has."""
    with suppress(psutil.Error):
        return len(process.parents())
    return 0


def started(folder: Path, has_accounts: bool = False) -> Iterator[Slurm]:
    """A cluster in a folder, for a fixture. Where there is no SLURM, its tests are skipped."""
    try:
        cluster = Slurm(folder / "cluster", has_accounts)
    except NoSlurm as error:
        pytest.skip(str(error))
    with cluster:
        yield cluster
