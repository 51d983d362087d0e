"""`tandem run FILE`: runs a whole job on this machine until it is complete.

FILE is a manifest, or a script, for which one is made (tandem_cli.launch_line).
"""

import errno
import importlib.util
import os
import secrets
import shlex
import socket
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console, RenderableType

from tandem.code import store
from tandem.distribution import install
from tandem.errors import Unmet, UserError
from tandem.exitcode import OF_COMMANDS, ExitCode
from tandem.formatting import number, several
from tandem.job import Checkpoint, Coordinator, DistributedTrainingJob, RunPolicy
from tandem.launch import TOKEN, weakness
from tandem.manifest.reading import job_of, read_source, refuse
from tandem.manifest.source import Source, parse
from tandem.pod_template import is_gpu
from tandem.rundir.layout import RunDir
from tandem.status import Event
from tandem.supervision import is_given_up
from tandem_cli import launch_line
from tandem_cli.launch_line import is_launch_line
from tandem_cli.local.child import last_lines
from tandem_cli.local.display import display_for
from tandem_cli.local.known import remember
from tandem_cli.local.local_run import HOST, Crew, LocalRun, Requests
from tandem_cli.local.placement import Placement, place, refuse_unpinnable, share_gpus, usable_cores, visible_gpus
from tandem_cli.local.prepare import HeldFolder, claim
from tandem_cli.output import OverridesOption, echo
from tandem_cli.packing import CodeOption, Pack, packed_if_given, with_code
from tandem_cli.slurm.jobs import forget_refusal
from tandem_cli.terminal import summary
from tandem_cli.terminal.canvas import PrintableConsole
from tandem_cli.terminal.screen import event_line
from tandem_coordinator.prerequisites import here, unmet

TAIL = 15
"""Lines of a log that are shown when a run has failed."""


def run(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The job's manifest; - reads standard input. Or a script: train.py.")
    ],
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGS…]", help="Arguments of the script.", show_default=False)
    ] = None,
    overrides: OverridesOption = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", metavar="DIR", help="The run directory.", show_default="runs/NAME")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Move an earlier run to DIR/previous and start over.")] = False,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port for status and Prometheus.", show_default="a free one")
    ] = 0,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port", min=1, max=65535, help="Port for Prometheus without the token, only on this machine."
        ),
    ] = None,
    pin: Annotated[bool, typer.Option("--pin", help="Give trainers and evaluators separate cores (Linux).")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Go on in the background once it is clear that the job can run.")
    ] = False,
    code: CodeOption = None,
) -> None:
    """Train and evaluate a job on this machine.

    Starts a coordinator, the workers and the evaluators as processes, and shows their progress. Ctrl-C saves and stops
    the run; the same command resumes it. Of a script a manifest is made and printed, as `tandem init` writes it.
    """
    command = Command(file, tuple(overrides or ()), run_dir, port, metrics_port, pin, code, tuple(args or ()))
    if (token := os.environ.get(TOKEN)) and (weak := weakness(token)):
        raise UserError(weak)
    requests = Requests()
    with requests.caught(), packed_if_given(code) as pack:
        source = command.source()
        job = job_of(source, with_code(command.overrides, pack))
        output = _Output(highlight=False, soft_wrap=False)
        raise typer.Exit(_Run(command, source, job, requests, output, pack, detach).until_its_end(fresh))


class _Output(PrintableConsole):
    """Where nobody reads any more, nothing more is shown: the run goes on, and its exit code says how it went."""

    def on_broken_pipe(self) -> None:
        """Be quiet from now on, as rich would, but do not exit."""
        with suppress(SystemExit):
            super().on_broken_pipe()


@dataclass(frozen=True)
class Command:
    """What the user typed, to be shown when it can be typed again."""

    file: str
    overrides: tuple[str, ...]
    run_dir: Path | None
    port: int
    metrics_port: int | None
    pin: bool
    code: Path | None = None
    args: tuple[str, ...] = ()

    def source(self) -> Source:
        """The manifest: the file, or, of a script, the one that is made for it, which is printed.

        Raises:
            UserError: there is none, or arguments are given to a manifest.
        """
        words = [self.file, *self.args]
        if not is_launch_line(self.file):
            if self.args:
                raise UserError(
                    f"{shlex.join(self.args)}: arguments are for a script, and {self.file} is a manifest; change a "
                    "field with --set PATH=VALUE"
                )
            return read_source(self.file)
        line = launch_line.read(words)
        text = line.manifest(words)
        echo(f"{text}# To keep it: tandem init {shlex.join(words)}")
        return parse(text.encode(), f"manifest of {self.file}")

    def again(self, *more: str, without: Collection[str] = ()) -> str:
        """The command line.

        Args:
            more: what is added to it.
            without: fields that are not set any more.
        """
        words = ["tandem", "run", self.file]
        for override in self.overrides:
            if override.partition("=")[0].strip().removeprefix("spec.") not in without:
                words += ["--set", override]
        words += ["--run-dir", str(self.run_dir)] if self.run_dir else []
        words += ["--port", str(self.port)] if self.port else []
        words += ["--metrics-port", str(self.metrics_port)] if self.metrics_port else []
        words += ["--pin"] if self.pin else []
        words += ["--code", str(self.code)] if self.code else []
        words += [*more, *(["--", *self.args] if self.args else [])]
        return shlex.join(words)


class _Run:
    def __init__(
        self,
        command: Command,
        source: Source,
        job: DistributedTrainingJob,
        requests: Requests,
        console: Console,
        pack: Pack | None = None,
        detaches: bool = False,
    ) -> None:
        self._command, self._source, self._job, self._pack = command, source, job, pack
        self._detaches = detaches
        self._requests, self._console = requests, console
        self._path = command.run_dir or Path("runs") / job.metadata.name
        self._notes: list[str] = []

    def until_its_end(self, fresh: bool) -> ExitCode:
        """Everything that can be wrong is found before anything is written; then the run."""
        need_torch()
        cores = usable_cores()
        placement = self._place(cores)
        need_free(self._command.port)
        need_free(self._command.metrics_port or 0, "--metrics-port")
        gpus, note = share_gpus(visible_gpus(dict(os.environ)), self._job)
        self._notes += [note] if note else []
        self._notes += self._refuse_what_cannot_run(len(cores), gpus, fresh)
        if unused := not_used_here(self._job):
            self._notes.append(f"not used on one machine: {', '.join(unused)}")
        mine = claim(self._path, self._job, fresh, self._command.again("--fresh"))
        self._notes += mine.notes
        if self._pack is not None:
            self._notes.append(f"code: {self._pack}")
            store(mine.run_dir, self._pack.digest, self._pack.file)
        remember(self._path)
        forget_refusal(self._path)
        try:
            return self._with_claim(mine, placement, len(cores), gpus)
        finally:
            mine.release()

    def _refuse_what_cannot_run(self, cores: int, gpus: Sequence[str] | None, fresh: bool) -> list[str]:
        """Have what this machine lacks told, before anything is written; returns what is only unwise."""
        run_dir = RunDir(self._path)
        is_fresh = fresh or self._job.spec.checkpoint.on_existing == "Fresh"
        if not is_fresh and run_dir.done() is not None:
            return []
        lacks = _without_code(self._job, run_dir) if self._pack is None else self._pack.left_out(self._job)
        refuse(lacks, self._source, self._command.overrides)
        code = None if self._pack is None else self._pack.folder
        found = unmet(self._job, here(self._job, run_dir, cores, gpus, is_fresh, code=code))
        refuse(found, self._source, self._command.overrides)
        return [one.message for one in found]

    def _with_claim(self, mine: HeldFolder, placement: Placement, cores: int, gpus: Sequence[str] | None) -> ExitCode:
        before = summary.result(mine.run_dir)
        done = mine.run_dir.done() is not None
        evaluates = self._job.spec.evaluation.processes > 0
        if done and not (evaluates and before.left):
            self._print(summary.complete(self._job.metadata.name, before, str(self._path), None, evaluates))
            self._say(f"nothing is left to do; {ways_on(self._command, self._job, mine.run_dir.read_job())}")
            return ExitCode.DONE
        if before.step is not None and not done:
            self._notes.append(f"going on from step {number(before.step)}")
        for note in self._notes:
            self._say(note)
        self._say(f"live page: tandem open {shlex.quote(str(self._path))}")
        if self._detaches:
            detach(mine.run_dir, str(self._path))
            # The one before was made for a terminal, and would write its colours into the log.
            self._console = _Output(highlight=False, soft_wrap=False)
        mark = secrets.token_hex(8)
        mine.sign(mark)
        scratch = Path(tempfile.mkdtemp(prefix=f"tandem-{mark[:8]}-"))
        token = os.environ.get(TOKEN) or secrets.token_urlsafe(32)
        crew = Crew(self._job, mine.run_dir, token, mark, scratch, placement, cores, gpus, self._command.metrics_port)
        if placement.others:
            psutil.Process().cpu_affinity(list(placement.others))
        started = time.monotonic()
        session = LocalRun(
            crew, mine, display_for(self._console), self._requests, self._command.port, not done, str(self._path)
        )
        session.run()
        return self._end(session, crew, time.monotonic() - started, before.step)

    def _again(self) -> str:
        """The command that goes on with this run."""
        resumes = self._job.spec.checkpoint.on_existing == "Resume"
        return self._command.again(*(() if resumes else ("--set", "checkpoint.onExisting=Resume")))

    def _end(self, session: LocalRun, crew: Crew, seconds: float, before: int | None) -> ExitCode:
        name, run_dir, found = self._job.metadata.name, crew.run_dir, summary.result(crew.run_dir)
        evaluates = self._job.spec.evaluation.processes > 0
        failed = run_dir.failed()
        if failed is not None:
            return self._failed(session, crew, failed, found)
        own_command = self._job.spec.trainer.command is not None
        complete = run_dir.done() is not None or (own_command and not self._requests.count)
        if self._requests.count and not (complete and not (evaluates and found.left)):
            self._print(summary.interrupted(name, found, str(self._path), self._again(), evaluates, own_command))
            return ExitCode.INTERRUPTED
        self._print(summary.complete(name, found, str(self._path), seconds, evaluates, before))
        lost = [child.name for child in session.children.values() if child.role == "evaluator" and is_given_up(child)]
        if lost and found.left:
            self._complain(
                summary.failed(
                    f"evaluation of {name}",
                    f"{', '.join(lost)} did not come up",
                    str(self._path / "log" / f"{lost[0]}.txt"),
                    last_lines(crew.log(lost[0]), TAIL),
                    self._again(),
                )
            )
            return ExitCode.FAILED
        return ExitCode.DONE

    def _failed(self, session: LocalRun, crew: Crew, failed: dict[str, object], found: summary.RunResult) -> ExitCode:
        code = _exit_code(failed.get("exitCode"))
        mistake = code == ExitCode.USAGE
        replica = failed.get("replica")
        named = str(replica) if replica in session.children else "worker-0"
        child = session.failure.child if session.failure else "" if mistake else named
        traceback = failed.get("traceback")
        told = (
            str(traceback).splitlines()
            if traceback
            else last_lines(crew.log(child), TAIL, of_ranks=True)
            if child
            else []
        )
        self._complain(
            summary.failed(
                self._job.metadata.name,
                str(failed.get("message") or failed.get("reason") or "for an unknown reason"),
                str(self._path / "log" / f"{child}.txt") if child else "",
                told,
                "" if mistake or code == ExitCode.DIVERGED else self._again(),
                found.troubles,
                summary.lost_words(found, self._job.spec.trainer.command is not None),
            )
        )
        return code

    def _place(self, cores: Sequence[int]) -> Placement:
        spec = self._job.spec
        if self._command.pin:
            refuse_unpinnable()
        workers = spec.workers
        placement = place(cores, workers.replicas, workers.processes, spec.evaluation.processes, self._command.pin)
        if self._command.pin:
            parts = [f"worker-{index} {_listed(own)}" for index, own in enumerate(placement.workers)]
            parts += [f"evaluators {_listed(placement.others)}"] if placement.others else []
            self._notes.append(f"pinned: {', '.join(parts)}")
        return placement

    def _print(self, what: RenderableType) -> None:
        self._console.print(what, soft_wrap=True)

    def _complain(self, what: RenderableType) -> None:
        """To standard error: the output of a run that goes to a file says there how it failed, and a person sees it."""
        PrintableConsole(stderr=True, highlight=False).print(what, soft_wrap=True)

    def _say(self, text: str) -> None:
        if self._console.is_terminal:
            self._console.print(text, style="dim", markup=False, soft_wrap=True)
        else:
            print(event_line(Event(at=time.time(), kind="info", text=text)), file=self._console.file, flush=True)


def detach(run_dir: RunDir, shown: str) -> None:
    """Go on in the background: the process that the terminal waits for ends here, with 0. What would be shown from now
    on is in log/run.txt.

    Args:
        shown: the run directory as the user would type it.
    """
    run_dir.log.mkdir(exist_ok=True)
    output = os.open(run_dir.log / "run.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # The lock of the run directory is shared by both, and outlives the parent.
    if child := os.fork():
        place = shlex.quote(shown)
        echo(f"process {child} goes on in the background: tandem status {place} --watch; tandem stop {place}")
        sys.stdout.flush()
        os._exit(ExitCode.DONE)
    os.setsid()
    for descriptor, target in ((0, nowhere), (1, output), (2, output)):
        os.dup2(target, descriptor)


def ways_on(command: Command, job: DistributedTrainingJob, made: DistributedTrainingJob) -> str:
    """What to type where the run is complete.

    Args:
        made: the job that has trained it.
    """
    anew = f"to begin anew: {command.again('--fresh')}"
    if job.spec.trainer.task is None:
        return f"give the script other args to continue in the same folder, or, {anew}"
    asked, config = job.spec.trainer.settings_of_loop, made.spec.trainer.settings_of_loop
    place = "trainer.config." if job.spec.trainer.is_built_in else "trainer.loop."
    field, length = ("epochs", config.epochs) if config.max_steps is None else ("maxSteps", config.max_steps)
    further = command.again("--set", f"{place}{field}={2 * length}", without={f"{place}{field}", f"{place}maxSteps"})
    less = ""
    if (asked.epochs, asked.max_steps) != (config.epochs, config.max_steps):
        what = several(length, "epoch") if field == "epochs" else several(length, "step")
        less = f"{what} {'is' if length == 1 else 'are'} trained, and this job asks for no more; "
    return f"{less}to go on: {further}; {anew}"


def _without_code(job: DistributedTrainingJob, run_dir: RunDir) -> list[Unmet]:
    """A manifest may name code, and the run directory has to have it then."""
    code = job.spec.trainer.code
    if code is None or run_dir.pack(code).exists():
        return []
    message = f"{run_dir.path} has no code of this digest; give the folder with --code DIR, and leave out this field"
    return [Unmet(("spec", "trainer", "code"), message)]


def need_torch() -> None:
    """See whether this machine can train.

    Raises:
        UserError: the trainer is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError(f"tandem run trains on this machine and needs PyTorch here: {install('local')}")


def not_used_here(job: DistributedTrainingJob) -> list[str]:
    """Fields that were set and mean nothing outside a cluster."""
    spec = job.spec
    resources = [
        name for part in spec.workers.resources.values() for name in part if not is_gpu(name, spec.workers.gpu_resource)
    ]
    set_here = {
        "trainer.image": spec.trainer.image is not None,
        "workers.resources": bool(resources),
        "workers.template": bool(spec.workers.template),
        "coordinator": spec.coordinator != Coordinator(),
        "evaluators.image": spec.evaluation.image is not None,
        "evaluators.resources": bool(spec.evaluation.resources),
        "evaluators.template": bool(spec.evaluation.template),
        "checkpoint.storage": spec.checkpoint.storage != Checkpoint().storage,
        "runPolicy": spec.run_policy != RunPolicy(),
    }
    return [f"spec.{name}" for name, is_set in set_here.items() if is_set]


def need_free(port: int, option: str = "--port") -> None:
    """See whether the coordinator will get its port.

    Args:
        option: by which it was asked for.

    Raises:
        UserError: it will not.
    """
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            raise UserError(f"port {port} {why}. Give another {option}, or leave it out.") from error


def _exit_code(value: object) -> ExitCode:
    """A job that cannot work as it is written is the user's mistake, whoever found it."""
    try:
        code = ExitCode(value) if isinstance(value, int) else ExitCode.FAILED
    except ValueError:
        code = ExitCode.FAILED
    if code == ExitCode.CONFIGURATION:
        return ExitCode.USAGE
    return code if code in OF_COMMANDS else ExitCode.FAILED


def _listed(cores: Sequence[int]) -> str:
    return ("core " if len(cores) == 1 else "cores ") + ",".join(str(core) for core in cores)
