"""The agent of one replica: torchrun with Tandem's rendezvous and warm starts.

    python -P -m tandem_trainer.agent [--warm] [--preload=MODULE,…] TORCHRUN-OPTIONS… -- -m MODULE ARGUMENTS…
                                                                                      -- SCRIPT.py ARGUMENTS…
                                                                                      -- python -c CODE ARGUMENTS…
                                                                                      -- PROGRAM ARGUMENTS…

With `--warm`, ranks that are Python are forked from a process that has imported torch already
(tandem_trainer.agent.warm), and, with `--preload`, what the job names.

Exit codes: torchrun's, and those of the rendezvous; PREEMPTED on SIGTERM and INTERRUPTED on SIGINT.
"""

import builtins
import gc
import importlib
import io
import itertools
import json
import os
import random
import runpy
import shutil
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.machinery import BuiltinImporter, SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType
from typing import NoReturn

from tandem.processes.exitcode import ExitCode, exit_process
from tandem.processes.launch import CODE, RUN_DIR, UID, module_command, wait_for_job, with_run_dir
from tandem.processes.requirements import prepare_code
from tandem.processes.sync_process import SyncProcess, is_needed
from tandem.rundir.code import Code, CodeError, JobEnded
from tandem.rundir.layout import RunDir
from tandem.wire.protocol import SCRIPT
from tandem_trainer.agent.log import log, log_to_stderr
from tandem_trainer.agent.warm import forkserver, stub
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.malloc import use_adapted_thresholds
from tandem_trainer.open_files import close_files, freeze
from tandem_trainer.pulse import Pulse, die_with_parent
from tandem_trainer.stacks import answer_with_stacks

AGENT_MODULES = ("torch.distributed.run",)
"""Modules that the agent and its ranks need."""
RANK_MODULES = (
    "tandem_trainer.train",
    "tandem_trainer.image_classification",
    # The first optimizer and the first DistributedDataParallel import it.
    "torch._dynamo",
)
"""Modules that only ranks need; the fork server imports them while the agent joins."""
PRELOAD = "--preload="
RANKS = "--nproc-per-node="
UNFIT_MODULE = 100
"""First exit code of a process that has tried to import the job's modules; the index of an unfit module is added to
it."""
SAFE_PATH = "-P"
"""Python's option by which a program does not look for modules in its own folder."""
BLAS_THREADS = "OPENBLAS_NUM_THREADS"
"""Variable with the number of threads that numpy and scipy start when they are imported."""
NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Variable that makes torch ask NVML whether there is a GPU, instead of CUDA's driver, which does not survive a
fork."""


_exchange: SyncProcess | None = None
"""The exchange with the bucket, where this pod shares its run directory with no other."""
_code_folders: list[str] = []
"""Folders of the job's code, in the fork server and its ranks."""


def main() -> None:
    """Run the agent, or, in a process that was forked from it, a rank."""
    options, command_line = _split(sys.argv[1:])
    command = with_run_dir(command_line)
    warm = "--warm" in options
    job_modules = [
        name for option in options if option.startswith(PRELOAD) for name in option[len(PRELOAD) :].split(",")
    ]
    options = [option for option in options if option != "--warm" and not option.startswith(PRELOAD)]
    if any(option.startswith(RANKS) and option != f"{RANKS}1" for option in options):
        options.append("--logs-specs=tandem")
    is_python = _is_python(command)
    forkable = under_this_python(command)
    has_own_directory = is_needed()
    if has_own_directory:
        SyncProcess.prepare()
    # Warm ranks are forked from a server that this process forks first: a fork after torchrun has started its threads
    # would copy locks that nobody releases.
    if warm and forkable and preload(AGENT_MODULES):
        read_end, write_end = os.pipe()
        request = forkserver.fork_server(
            lambda: preload(RANK_MODULES) and _receive_code(read_end, write_end) and preload_job_modules(job_modules)
        )
        if request is not None:
            run_and_exit(request.arguments)
        os.close(read_end)
        if has_own_directory:
            _start_exchange()
        command = [sys.executable, "-I", "-S", stub.__file__, *forkable]
        is_python = False
        # Prepare the code only now: while it is downloaded and its packages are installed, the server imports what
        # ranks need.
        _send_code(write_end, _enter_code())
    else:
        if has_own_directory:
            _start_exchange()
        _enter_code()
    # Not before the fork: torchrun makes threads.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import main as torchrun

    try:
        torchrun([*options, *([] if is_python else ["--no-python"]), *command])
    except SignalException as signal_error:
        # torchrun has ended its ranks. An agent that was asked to leave has not failed: no stack trace.
        _exit(ExitCode.INTERRUPTED if signal_error.sigval == signal.SIGINT else ExitCode.PREEMPTED)
    except SystemExit as exit_request:
        _exit(exit_request.code)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        _exit(ExitCode.FAILED)
    _exit(ExitCode.DONE)


def _start_exchange() -> None:
    """Start the process that exchanges this pod's run directory with the bucket, and wait for the job's record, which
    it gets from there. Not before the fork: it is watched by a thread."""
    global _exchange
    _exchange = SyncProcess()
    log_to_stderr()
    try:
        wait_for_job(RunDir(os.environ[RUN_DIR]), log.info, os.environ.get(UID, ""))
    except (OSError, ValueError) as error:
        log.error("the job cannot be read: %s", error)
        _exit(ExitCode.FAILED)


def _enter_code() -> Code | None:
    """Change into the folder of the job's code and return it; None if the job has none. Ends the agent, and the job, if
    the code cannot be used."""
    if not os.environ.get(CODE):
        return None
    log_to_stderr()
    run_dir = RunDir(os.environ[RUN_DIR])

    def report(event: str, **fields: object) -> None:
        log.info("event=%s %s", event, " ".join(f"{name}={value}" for name, value in fields.items()))

    try:
        job = wait_for_job(run_dir, log.info, os.environ.get(UID, ""))
        if job is None or job.spec.trainer.code is None:
            # The job has failed, which the rendezvous reports, or it is complete.
            return None
        code = prepare_code(run_dir, job.spec.trainer.code, report)
    except JobEnded:
        log.info("event=over reason=%r", (run_dir.failed() or {}).get("message", "the job has ended"))
        exit_process(ExitCode.FAILED if run_dir.failed() else ExitCode.DONE)
    except CodeError as error:
        log.error("%s", error)
        run_dir.mark_failed(ConfigurationError.reason, str(error), ExitCode.CONFIGURATION)
        exit_process(ExitCode.CONFIGURATION)
    except OSError as error:
        # A full disk, a stale mount: another attempt, perhaps on another node, may succeed.
        log.error("the job's code cannot be prepared: %s", error)
        exit_process(ExitCode.FAILED)
    code.enter()
    return code


def _send_code(write_end: int, code: Code | None) -> None:
    """Send the location of the job's code to the fork server."""
    # If the server has ended, ranks start the ordinary way.
    with suppress(BrokenPipeError), os.fdopen(write_end, "w") as pipe:
        json.dump(None if code is None else asdict(code), pipe, default=str)


def _receive_code(read_end: int, write_end: int) -> bool:
    """Change into the folder of the job's code, in the fork server. Scripts find it as they find code in PYTHONPATH.
    Always True."""
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        location = json.load(pipe)
    if location is not None:
        code = Code(Path(location["folder"]), *(tuple(map(Path, location[name])) for name in ("packages", "programs")))
        code.enter()
        _code_folders.extend(code.places)
    return True


def _is_python(command: Sequence[str]) -> bool:
    return command[0] == "-m" or command[0].endswith(".py")


def under_this_python(command: list[str]) -> list[str]:
    """Return the arguments of a command after the interpreter, if that is this one; empty if it is another program."""
    if _is_python(command):
        return command
    if shutil.which(command[0]) != sys.executable:
        return []
    # Ranks do not hold their output back anyway.
    arguments = [*itertools.dropwhile(lambda option: option == "-u", command[1:])]
    program = arguments[1:] if arguments[:1] == [SAFE_PATH] else arguments
    return arguments if program and (_is_python(program) or (program[0] == "-c" and len(program) > 1)) else []


def _exit(code: int | str | None) -> NoReturn:
    """Exit the agent. Signals are ignored from here on, so that none changes the exit code."""
    from tandem_trainer.agent.heartbeat import END_SIGNALS

    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    if _exchange is not None:
        _exchange.close()
    exit_process(code)


def preload(modules: Sequence[str]) -> bool:
    """Import modules; return whether ranks can be forked afterwards."""
    # numpy's BLAS would start its threads with the import.
    was_set = BLAS_THREADS in os.environ
    os.environ.setdefault(BLAS_THREADS, "1")
    # Garbage collections while modules are imported take a third of the time, and find next to nothing.
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    freeze()
    gc.enable()
    if not was_set:
        del os.environ[BLAS_THREADS]
    return forkserver.available()


def preload_job_modules(modules: list[str]) -> bool:
    """Import the modules that the job names (`--preload`); always True, in the process that serves.

    An import cannot be undone. So a child process imports the modules, and serves in place of this process if ranks can
    be forked from it; otherwise another child tries without the module that the first one named.
    """
    while modules:
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            os.environ[NVML_CHECK] = "1"
            # The modules may be the user's own.
            own_path = list(sys.path)
            sys.path[:0] = [str(Path.cwd()), *_code_folders]
            for number, module in enumerate(modules):
                if problem := _import_problem(module):
                    print(f"preload: {module} {problem}; ranks import it themselves", file=sys.stderr, flush=True)
                    os._exit(UNFIT_MODULE + number)
            sys.path[:] = own_path
            return True
        _, status = os.waitpid(pid, 0)
        number = (os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0) - UNFIT_MODULE
        if number not in range(len(modules)):
            # The child has served, or an import killed it; ranks then start the ordinary way.
            os._exit(1)
        modules = [*modules[:number], *modules[number + 1 :]]
    return True


def _import_problem(module: str) -> str:
    """Import a module; return why ranks cannot be forked with it, empty if they can."""
    try:
        return "" if preload([module]) else "starts a thread or a GPU's driver when it is imported"
    except (Exception, SystemExit) as error:
        return f"cannot be imported ({type(error).__name__}: {error})"


def run_and_exit(arguments: list[str]) -> NoReturn:
    """Run a module or a script, and exit as Python does: threads are joined, exit functions run, files are closed."""
    code: int | str | None = 0
    try:
        run(arguments)
    except SystemExit as exit_request:
        code = exit_request.code
        if code:
            sys.last_value = exit_request
    except BaseException as error:
        # As Python does, for exit functions that look at it.
        sys.last_value = error
        Pulse.record_failure(error, _script_frames(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        code = ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    exit_process(code, lambda: _close_script(code))


def _close_script(code: int | str | None) -> None:
    close_files()
    if Pulse.current is not None:
        Pulse.current.last_word_of_script(1 if isinstance(code, str) else (code or 0) & 0xFF)


def run(arguments: list[str]) -> None:
    """Run a module, a script or code as Python itself would."""
    import numpy as np
    import torch

    # A forked process inherits the generators' state: numbers drawn without a seed would be the same in all ranks.
    random.seed()
    np.random.seed()
    torch.default_generator.seed()
    if threads := os.environ.get("OMP_NUM_THREADS", ""):
        torch.set_num_threads(int(threads))
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.excepthook = _print_error
    sys.orig_argv = [sys.executable, "-u", *arguments]
    if arguments == module_command("tandem_trainer")[1:]:
        # Last, so that no file of the job's code hides a module that Tandem imports.
        sys.path.extend(_code_folders)
    else:
        sys.path[:0] = [*_folder_of(arguments), *_code_folders]
        _open_pulse()
    arguments = arguments[arguments[0] == SAFE_PATH :]
    # `__main__` stays until the process is gone: threads and exit functions may pickle what it defines.
    script = sys.modules["__main__"] = ModuleType("__main__")
    script.__builtins__ = builtins  # type: ignore[attr-defined]
    script.__annotations__ = {}
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        # What `python -m` calls. run_module would take the module away when its last line has run.
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        script.__loader__ = BuiltinImporter
        exec(compile(arguments[1], "<string>", "exec", dont_inherit=True), vars(script))  # noqa: S102 - as above
    else:
        sys.argv = list(arguments)
        _run_file(script, arguments[0])


def _folder_of(arguments: list[str]) -> list[str]:
    """Return the folder in which Python looks first for the modules of a program; empty with `-P`."""
    match arguments[0]:
        case "-P":
            return []
        case "-c":
            return [""]
        case "-m":
            return [str(Path.cwd())]
        case script:
            return [str(Path(script).resolve().parent)]


def _run_file(script: ModuleType, name: str) -> None:
    """Run a script. `__file__` is its absolute path, `sys.argv[0]` the path as the user wrote it; runpy has one name
    for both."""
    # Not pathlib, which tidies the path more than Python does.
    path = os.path.join(os.getcwd(), name.removeprefix("./"))  # noqa: PTH109, PTH118
    script.__file__ = path
    script.__cached__ = None  # type: ignore[attr-defined]
    script.__loader__ = SourceFileLoader("__main__", path)
    try:
        with io.open_code(path) as file:
            content = file.read()
    except OSError as error:
        # Python's own message.
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        Pulse.record_failure(error.with_traceback(None))
        raise SystemExit(2) from None
    code = compile(content, path, "exec", dont_inherit=True)
    exec(code, vars(script))  # noqa: S102 - the command names it


def _open_pulse() -> None:
    """Open the pulse of a script that does not know Tandem: the agent sees its processor use, whether it is stopped,
    and where it hangs. Also spare it the page faults that a fork brings (tandem_trainer.malloc)."""
    use_adapted_thresholds()
    if (pulse := Pulse.open_for_rank(phase=SCRIPT)) is not None:
        answer_with_stacks(pulse.stacks)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments[:-1]:
        raise SystemExit("usage: python -P -m tandem_trainer.agent [--warm] TORCHRUN-OPTIONS… -- COMMAND…")
    separator = arguments.index("--")
    return arguments[:separator], arguments[separator + 1 :]


def _print_error(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """Print an error as the script alone would have, without the frames of this module."""
    traceback.print_exception(kind, error, _script_frames(frames))


def _script_frames(frames: TracebackType | None) -> TracebackType | None:
    own_files = (__file__, str(Path(__file__).with_name("__main__.py")), runpy.__file__, "<frozen runpy>")
    first = frames
    while first is not None and first.tb_frame.f_code.co_filename in own_files:
        first = first.tb_next
    return first or frames
