"""`tandem run FILE`: runs a whole job on this machine until it is complete.

FILE is a manifest, or a script, for which a manifest is generated (tandem_cli.launch_line).
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

from tandem.errors import UnmetRequirement, UserError
from tandem.formatting import count_noun, number
from tandem.job.manifest.reading import parse_job, raise_for_unmet, read_source
from tandem.job.manifest.source import Source, parse
from tandem.job.pod_template import is_gpu
from tandem.job.resource import BUCKET_FIELDS, CoordinatorSpec, DistributedTrainingJob, RunPolicy, Storage
from tandem.model import whole_number
from tandem.processes.distribution import install_command
from tandem.processes.exitcode import COMMAND_EXIT_CODES, ExitCode
from tandem.processes.launch import TOKEN, token_weakness
from tandem.processes.limits import raise_open_files
from tandem.processes.supervision import is_given_up
from tandem.rundir.code import store_pack
from tandem.rundir.layout import RunDir
from tandem.rundir.provenance import KEY, read_private_key
from tandem.wire.status import Event
from tandem_cli import launch_line
from tandem_cli.bucket import describe_missing
from tandem_cli.job_words import deprecations
from tandem_cli.launch_line import is_launch_line
from tandem_cli.local.known import remember
from tandem_cli.output import OverridesOption, echo
from tandem_cli.packing import CodeOption, Pack, packed_if_given, with_code
from tandem_coordinator.prerequisites import local_site, unmet
from tandem_launcher.local.child import last_lines
from tandem_launcher.local.local_run import HOST, LocalRun, ProcessFactory, Requests
from tandem_launcher.local.placement import (
    Placement,
    place,
    refuse_unpinnable,
    share_evaluator_gpus,
    share_gpus,
    usable_cores,
    visible_gpus,
)
from tandem_launcher.local.prepare import HeldFolder, claim
from tandem_launcher.slurm.jobs import forget_refusal
from tandem_launcher.terminal import summary
from tandem_launcher.terminal.canvas import PrintableConsole
from tandem_launcher.terminal.display import display_for
from tandem_launcher.terminal.screen import event_line

TAIL = 15
"""Number of lines of a log that are shown when a run has failed."""


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
        bool, typer.Option("--detach", "-d", help="Continue in the background once the job has passed all checks.")
    ] = False,
    code: CodeOption = None,
) -> None:
    """Train and evaluate a job on this machine.

    Starts a coordinator, the workers and the evaluators as processes, and shows their progress. Ctrl-C saves and stops
    the run; the same command resumes it. For a script, it generates and prints a manifest, as `tandem init` writes it.
    """
    command = Command(file, tuple(overrides or ()), run_dir, port, metrics_port, pin, code, tuple(args or ()))
    if (token := os.environ.get(TOKEN)) and (weak := token_weakness(token)):
        raise UserError(weak)
    if signing_key := os.environ.get(KEY):
        read_private_key(Path(signing_key))
    requests = Requests()
    with requests.caught(), packed_if_given(code) as pack:
        source = command.source()
        job = parse_job(source, with_code(command.overrides, pack))
        output = _Output(highlight=False, soft_wrap=False)
        raise typer.Exit(_Run(command, source, job, requests, output, pack, detach).run(fresh))


class _Output(PrintableConsole):
    """A console that goes silent when its reader is gone: the run continues, and its exit code tells the result."""

    def on_broken_pipe(self) -> None:
        """Print nothing from now on, as rich does, but do not exit."""
        with suppress(SystemExit):
            super().on_broken_pipe()


@dataclass(frozen=True)
class Command:
    """The command line of the user, from which messages build further ones."""

    file: str
    overrides: tuple[str, ...]
    run_dir: Path | None
    port: int
    metrics_port: int | None
    pin: bool
    code: Path | None = None
    args: tuple[str, ...] = ()

    def source(self) -> Source:
        """Read the manifest; for a script, generate and print one.

        Raises:
            UserError: the file does not exist, or arguments follow a manifest.
        """
        argv = [self.file, *self.args]
        if not is_launch_line(self.file):
            if self.args:
                raise UserError(
                    f"{shlex.join(self.args)}: arguments are for a script, and {self.file} is a manifest; change a "
                    "field with --set PATH=VALUE"
                )
            return read_source(self.file)
        line = launch_line.read(argv)
        text = line.manifest(argv)
        echo(f"{text}# To keep it: tandem init {shlex.join(argv)}")
        return parse(text.encode(), f"manifest of {self.file}")

    def command_line(self, *more: str, without: Collection[str] = ()) -> str:
        """Build the command line.

        Args:
            more: additional options.
            without: fields whose overrides are dropped.
        """
        argv = ["tandem", "run", self.file]
        for override in self.overrides:
            if override.partition("=")[0].strip().removeprefix("spec.") not in without:
                argv += ["--set", override]
        argv += ["--run-dir", str(self.run_dir)] if self.run_dir else []
        argv += ["--port", str(self.port)] if self.port else []
        argv += ["--metrics-port", str(self.metrics_port)] if self.metrics_port else []
        argv += ["--pin"] if self.pin else []
        argv += ["--code", str(self.code)] if self.code else []
        argv += [*more, *(["--", *self.args] if self.args else [])]
        return shlex.join(argv)


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

    def run(self, fresh: bool) -> ExitCode:
        """Check everything before anything is written, then run the job."""
        check_torch()
        raise_open_files()
        cores = usable_cores()
        placement = self._place(cores)
        check_port(self._command.port)
        check_port(self._command.metrics_port or 0, "--metrics-port")
        visible = visible_gpus(dict(os.environ))
        gpus, note = share_gpus(visible, self._job)
        evaluator_gpus, evaluator_note = share_evaluator_gpus(visible, gpus, self._job)
        self._notes += [line for line in (note, evaluator_note) if line]
        self._notes += self._validate_machine(len(cores), gpus, fresh)
        if ignored := unused_fields(self._job):
            self._notes.append(f"not used on one machine: {', '.join(ignored)}")
        claimed = claim(self._path, self._job, fresh, self._command.command_line("--fresh"))
        self._notes += claimed.notes
        if self._pack is not None:
            self._notes.append(f"code: {self._pack}")
            store_pack(claimed.run_dir, self._pack.digest, self._pack.file)
        remember(self._path)
        forget_refusal(self._path)
        try:
            return self._run_claimed(claimed, placement, len(cores), gpus, evaluator_gpus)
        finally:
            claimed.release()

    def _validate_machine(self, cores: int, gpus: Sequence[str] | None, fresh: bool) -> list[str]:
        """Check the prerequisites on this machine, before anything is written; return warnings."""
        run_dir = RunDir(self._path)
        is_fresh = fresh or self._job.spec.checkpoint.on_existing == "Fresh"
        if not is_fresh and run_dir.done() is not None:
            return []
        missing = _without_code(self._job, run_dir) if self._pack is None else self._pack.missing_scripts(self._job)
        raise_for_unmet(missing, self._source, self._command.overrides)
        code = None if self._pack is None else self._pack.folder
        problems = unmet(self._job, local_site(self._job, run_dir, cores, gpus, is_fresh, code=code))
        raise_for_unmet(problems, self._source, self._command.overrides)
        return [*deprecations(self._job), *(problem.message for problem in problems)]

    def _run_claimed(
        self,
        claimed: HeldFolder,
        placement: Placement,
        cores: int,
        gpus: Sequence[str] | None,
        evaluator_gpus: Sequence[str],
    ) -> ExitCode:
        before = summary.result(claimed.run_dir)
        done = claimed.run_dir.done() is not None
        evaluates = self._job.spec.evaluation.processes > 0
        if done and not (evaluates and before.left):
            self._print(summary.complete(self._job.metadata.name, before, str(self._path), None, evaluates))
            self._note(
                f"nothing left to do; {describe_next_steps(self._command, self._job, claimed.run_dir.read_job())}"
            )
            return ExitCode.DONE
        if before.step is not None and not done:
            self._notes.append(f"resuming from step {number(before.step)}")
        for note in self._notes:
            self._note(note)
        self._note(f"live page: tandem open {shlex.quote(str(self._path))}")
        if self._detaches:
            detach(claimed.run_dir, str(self._path))
            # The console so far was created for a terminal, and would write colours into the log.
            self._console = _Output(highlight=False, soft_wrap=False)
        mark = secrets.token_hex(8)
        claimed.sign(mark)
        scratch = Path(tempfile.mkdtemp(prefix=f"tandem-{mark[:8]}-"))
        token = os.environ.get(TOKEN) or secrets.token_urlsafe(32)
        factory = ProcessFactory(
            self._job,
            claimed.run_dir,
            token,
            mark,
            scratch,
            placement,
            cores,
            gpus,
            self._command.metrics_port,
            evaluator_gpus,
        )
        if placement.shared:
            psutil.Process().cpu_affinity(list(placement.shared))
        started = time.monotonic()
        session = LocalRun(
            factory, claimed, display_for(self._console), self._requests, self._command.port, not done, str(self._path)
        )
        # The coordinator's upload takes the right to write the bucket over.
        claimed.writer = None
        session.run()
        return self._end(session, factory, time.monotonic() - started, before.step)

    def _resume_command(self) -> str:
        """Return the command that resumes this run."""
        resumes = self._job.spec.checkpoint.on_existing == "Resume"
        return self._command.command_line(*(() if resumes else ("--set", "checkpoint.onExisting=Resume")))

    def _end(self, session: LocalRun, factory: ProcessFactory, seconds: float, before: int | None) -> ExitCode:
        name, run_dir, outcome = self._job.metadata.name, factory.run_dir, summary.result(factory.run_dir)
        evaluates = self._job.spec.evaluation.processes > 0
        if missing := describe_missing(self._job.spec.checkpoint.storage, run_dir):
            self._note(missing)
        failed = run_dir.failed()
        if failed is not None:
            return self._failed(session, factory, failed, outcome)
        own_command = self._job.spec.trainer.command is not None
        complete = run_dir.done() is not None or (own_command and not self._requests.count)
        if self._requests.count and not (complete and not (evaluates and outcome.left)):
            self._print(
                summary.interrupted(name, outcome, str(self._path), self._resume_command(), evaluates, own_command)
            )
            return ExitCode.INTERRUPTED
        self._print(summary.complete(name, outcome, str(self._path), seconds, evaluates, before))
        lost = [child.name for child in session.children.values() if child.role == "evaluator" and is_given_up(child)]
        if lost and outcome.left:
            self._print_error(
                summary.failed(
                    f"evaluation of {name}",
                    f"{', '.join(lost)} did not start",
                    str(self._path / "log" / f"{lost[0]}.txt"),
                    last_lines(factory.log(lost[0]), TAIL),
                    self._resume_command(),
                )
            )
            return ExitCode.FAILED
        return ExitCode.DONE

    def _failed(
        self, session: LocalRun, factory: ProcessFactory, failed: dict[str, object], outcome: summary.RunResult
    ) -> ExitCode:
        code = _exit_code(failed.get("exitCode"))
        is_user_error = code == ExitCode.USAGE
        replica = failed.get("replica")
        reported = str(replica) if replica in session.children else "worker-0"
        child = session.failure.child if session.failure else "" if is_user_error else reported
        traceback = failed.get("traceback")
        lines = (
            str(traceback).splitlines()
            if traceback
            else last_lines(factory.log(child), TAIL, of_ranks=True, rank=whole_number(failed.get("rank")))
            if child
            else []
        )
        self._print_error(
            summary.failed(
                self._job.metadata.name,
                str(failed.get("message") or failed.get("reason") or "for an unknown reason"),
                str(self._path / "log" / f"{child}.txt") if child else "",
                lines,
                "" if is_user_error or code == ExitCode.DIVERGED else self._resume_command(),
                outcome.troubles,
                summary.lost_words(outcome, self._job.spec.trainer.command is not None),
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
            parts = [f"worker-{index} {_format_cores(own)}" for index, own in enumerate(placement.workers)]
            parts += [f"evaluators {_format_cores(placement.shared)}"] if placement.shared else []
            self._notes.append(f"pinned: {', '.join(parts)}")
        return placement

    def _print(self, renderable: RenderableType) -> None:
        self._console.print(renderable, soft_wrap=True)

    def _print_error(self, renderable: RenderableType) -> None:
        """Print to standard error, which a user still sees if the output goes to a file."""
        PrintableConsole(stderr=True, highlight=False).print(renderable, soft_wrap=True)

    def _note(self, text: str) -> None:
        if self._console.is_terminal:
            self._console.print(text, style="dim", markup=False, soft_wrap=True)
        else:
            print(event_line(Event(at=time.time(), kind="info", text=text)), file=self._console.file, flush=True)


def detach(run_dir: RunDir, display_path: str) -> None:
    """Continue in the background: the foreground process exits with 0, and further output goes to log/run.txt.

    Args:
        display_path: the run directory as the user would type it.
    """
    run_dir.log.mkdir(exist_ok=True)
    output = os.open(run_dir.log / "run.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    # Both processes share the lock of the run directory, which outlives the parent.
    if child := os.fork():
        place = shlex.quote(display_path)
        echo(f"process {child} continues in the background: tandem status {place} --watch; tandem stop {place}")
        sys.stdout.flush()
        os._exit(ExitCode.DONE)
    os.setsid()
    for descriptor, target in ((0, nowhere), (1, output), (2, output)):
        os.dup2(target, descriptor)


def describe_next_steps(command: Command, job: DistributedTrainingJob, completed: DistributedTrainingJob) -> str:
    """Describe the commands to train further or start over, when the run is complete.

    Args:
        completed: the job that trained the run.
    """
    start_over = f"to start over: {command.command_line('--fresh')}"
    if job.spec.trainer.task is None:
        return f"give the script other arguments to continue in the same folder, or, {start_over}"
    requested, config = job.spec.trainer.settings_of_loop, completed.spec.trainer.settings_of_loop
    place = "trainer.loop."
    field, length = ("epochs", config.epochs) if config.max_steps is None else ("maxSteps", config.max_steps)
    further = command.command_line(
        "--set", f"{place}{field}={2 * length}", without={f"{place}{field}", f"{place}maxSteps"}
    )
    explanation = ""
    if (requested.epochs, requested.max_steps) != (config.epochs, config.max_steps):
        amount = count_noun(length, "epoch") if field == "epochs" else count_noun(length, "step")
        explanation = f"{amount} {'is' if length == 1 else 'are'} trained, and this job requests no more; "
    return f"{explanation}to train further: {further}; {start_over}"


def _without_code(job: DistributedTrainingJob, run_dir: RunDir) -> list[UnmetRequirement]:
    """Check that the run directory has the code that the manifest names."""
    code = job.spec.trainer.code
    if code is None or run_dir.pack(code).exists():
        return []
    message = f"{run_dir.path} has no code of this digest; give the folder with --code DIR, and omit this field"
    return [UnmetRequirement(("spec", "trainer", "code"), message)]


def check_torch() -> None:
    """Check that PyTorch is installed.

    Raises:
        UserError: it is not.
    """
    if importlib.util.find_spec("torch") is None:
        raise UserError(f"tandem run trains on this machine and needs PyTorch: {install_command('local')}")


def unused_fields(job: DistributedTrainingJob) -> list[str]:
    """Return the fields that are set and have no effect outside a cluster."""
    spec, storage = job.spec, job.spec.checkpoint.storage
    resources = [
        name for part in spec.workers.resources.values() for name in part if not is_gpu(name, spec.workers.gpu_resource)
    ]
    set_here = {
        "trainer.image": spec.trainer.image is not None,
        "workers.resources": bool(resources),
        "workers.template": bool(spec.workers.template),
        "coordinator": spec.coordinator != CoordinatorSpec(),
        "evaluators.image": spec.evaluation.image is not None,
        "evaluators.resources": bool(spec.evaluation.resources) and not spec.evaluator_gpus,
        "evaluators.priorityClassName": spec.evaluation.priority_class_name is not None,
        "evaluators.template": bool(spec.evaluation.template),
        "checkpoint.storage": storage.model_copy(update={**dict.fromkeys(BUCKET_FIELDS), "shared": True}) != Storage(),
        "checkpoint.storage.credentialsSecret": storage.credentials_secret is not None,
        "checkpoint.storage.shared": not storage.shared,
        "runPolicy": spec.run_policy.model_copy(update={"stop_when": None}) != RunPolicy(),
    }
    return [f"spec.{name}" for name, is_set in set_here.items() if is_set]


def check_port(port: int, option: str = "--port") -> None:
    """Check that a port is free.

    Args:
        option: option that set the port.

    Raises:
        UserError: it is in use.
    """
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
            raise UserError(f"port {port} {reason}. Choose another {option}, or omit it.") from error


def _exit_code(value: object) -> ExitCode:
    """Map the exit code of a failure to that of the command: a wrong configuration is a usage error."""
    try:
        code = ExitCode(value) if isinstance(value, int) else ExitCode.FAILED
    except ValueError:
        code = ExitCode.FAILED
    if code == ExitCode.CONFIGURATION:
        return ExitCode.USAGE
    return code if code in COMMAND_EXIT_CODES else ExitCode.FAILED


def _format_cores(cores: Sequence[int]) -> str:
    return ("core " if len(cores) == 1 else "cores ") + ",".join(str(core) for core in cores)
