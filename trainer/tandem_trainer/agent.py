"""The agent of one replica: torchrun with Tandem's rendezvous and warm starts.

    python -P -m tandem_trainer.agent [--warm] [--preload=MODULE,…] TORCHRUN-OPTIONS… -- -m MODULE ARGUMENTS…
                                                                                      -- SCRIPT.py ARGUMENTS…
                                                                                      -- python -c CODE ARGUMENTS…
                                                                                      -- PROGRAM ARGUMENTS…

With `--warm`, ranks that are Python are forked from a process that has imported torch already (tandem_trainer.warm),
and, with `--preload`, what the job names.

Exit codes: torchrun's, and those of the rendezvous; PREEMPTED on SIGTERM and INTERRUPTED on SIGINT.
"""

import atexit
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

from tandem.code import Code, CodeError, Over
from tandem.exitcode import ExitCode, depart
from tandem.launch import CODE, RUN_DIR, UID, module_command, wait_for_job, with_run_dir
from tandem.protocol import SCRIPT
from tandem.requirements import code_of
from tandem.rundir.layout import RunDir
from tandem_trainer.agent_log import log, log_to_stderr
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.malloc import begin_adapted
from tandem_trainer.open_files import close_files
from tandem_trainer.pulse import Pulse, die_with_parent
from tandem_trainer.stacks import answer_with_stacks
from tandem_trainer.warm import forkserver, stub

SHARED = ("torch.distributed.run",)
"""What the agent needs, too."""
FOR_RANKS = (
    "tandem_trainer.train",
    "tandem_trainer.image_classification",
    # The first optimizer and the first DistributedDataParallel import it.
    "torch._dynamo",
)
"""As much again; the fork server imports it while the agent joins."""
PRELOAD = "--preload="
RANKS = "--nproc-per-node="
UNFIT = 100
"""A process that has tried to import the job's modules ends with this, plus the number of the one that was unfit."""
SAFE_PATH = "-P"
"""Python's option by which a program does not look for modules in its own folder."""
BLAS_THREADS = "OPENBLAS_NUM_THREADS"
"""Variable with the number of threads that numpy and scipy start when they are imported."""
BY_NVML = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Variable by which torch asks NVML whether there is a GPU, and not CUDA's driver, which does not survive a fork."""


_places: list[str] = []
"""In the fork server and its ranks, where the job's code is."""


def main() -> None:
    """Be the agent, or, in a process forked later, a rank."""
    options, words = _split(sys.argv[1:])
    command = with_run_dir(words)
    warm = "--warm" in options
    given = [name for option in options if option.startswith(PRELOAD) for name in option[len(PRELOAD) :].split(",")]
    options = [option for option in options if option != "--warm" and not option.startswith(PRELOAD)]
    if any(option.startswith(RANKS) and option != f"{RANKS}1" for option in options):
        options.append("--logs-specs=tandem")
    is_python = _is_python(command)
    ours = under_this_python(command)
    if warm and ours and preload(SHARED):
        reads, writes = os.pipe()
        request = forkserver.fork_server(
            lambda: preload(FOR_RANKS) and _work_as_told(reads, writes) and preload_given(given)
        )
        if request is not None:
            run_and_end(request.arguments)
        os.close(reads)
        command = [sys.executable, "-I", "-S", stub.__file__, *ours]
        is_python = False
        # While the code is on its way and its packages are installed, the server imports what ranks need.
        _tell(writes, _code())
    else:
        _code()
    # Not before the fork: torchrun makes threads.
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.run import main as torchrun

    try:
        torchrun([*options, *([] if is_python else ["--no-python"]), *command])
    except SignalException as asked:
        # torchrun has ended its ranks. Who was asked to leave has not failed, and needs no stack trace to say so.
        _end(ExitCode.INTERRUPTED if asked.sigval == signal.SIGINT else ExitCode.PREEMPTED)
    except SystemExit as leaving:
        _end(leaving.code)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        _end(ExitCode.FAILED)
    _end(ExitCode.DONE)


def _code() -> Code | None:
    """Work in the job's code from now on; None if it has none. Ends the agent, and the job, if it cannot be used."""
    if not os.environ.get(CODE):
        return None
    log_to_stderr()
    run_dir = RunDir(os.environ[RUN_DIR])

    def say(event: str, **fields: object) -> None:
        log.info("event=%s %s", event, " ".join(f"{name}={value}" for name, value in fields.items()))

    try:
        job = wait_for_job(run_dir, log.info, os.environ.get(UID, ""))
        if job is None or job.spec.trainer.code is None:
            # It has failed, which the rendezvous says, or is complete with what it was before it had code.
            return None
        code = code_of(run_dir, job.spec.trainer.code, say)
    except Over:
        log.info("event=over reason=%r", (run_dir.failed() or {}).get("message", "the job has ended"))
        depart(ExitCode.FAILED if run_dir.failed() else ExitCode.DONE)
    except CodeError as error:
        log.error("%s", error)
        run_dir.mark_failed(ConfigurationError.reason, str(error), ExitCode.CONFIGURATION)
        depart(ExitCode.CONFIGURATION)
    except OSError as error:
        # A full disk, a mount that is stale: another try, perhaps on another node, may find it sound.
        log.error("the job's code cannot be prepared: %s", error)
        depart(ExitCode.FAILED)
    code.enter()
    return code


def _tell(writes: int, code: Code | None) -> None:
    """Tell the fork server where the job's code is."""
    # A server that has ended needs no word: ranks then start the ordinary way.
    with suppress(BrokenPipeError), os.fdopen(writes, "w") as pipe:
        json.dump(None if code is None else asdict(code), pipe, default=str)


def _work_as_told(reads: int, writes: int) -> bool:
    """In the fork server, work in the job's code, which scripts find as PYTHONPATH has others find it; always True."""
    os.close(writes)
    with os.fdopen(reads) as pipe:
        told = json.load(pipe)
    if told is not None:
        code = Code(Path(told["folder"]), *(tuple(map(Path, told[name])) for name in ("packages", "programs")))
        code.enter()
        _places.extend(code.places)
    return True


def _is_python(command: Sequence[str]) -> bool:
    return command[0] == "-m" or command[0].endswith(".py")


def under_this_python(command: list[str]) -> list[str]:
    """What of a command stands after the interpreter, if that is this one; empty if it is another program."""
    if _is_python(command):
        return command
    if shutil.which(command[0]) != sys.executable:
        return []
    # Ranks do not hold their output back anyway.
    rest = [*itertools.dropwhile(lambda word: word == "-u", command[1:])]
    program = rest[1:] if rest[:1] == [SAFE_PATH] else rest
    return rest if program and (_is_python(program) or (program[0] == "-c" and len(program) > 1)) else []


def _end(code: int | str | None) -> NoReturn:
    """End the agent. Another signal, which would change how it ends, is not heard any more."""
    from tandem_trainer.heartbeat import ENDING

    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    depart(code)


def preload(modules: Sequence[str]) -> bool:
    """Import modules; whether ranks can be forked afterwards."""
    # numpy's BLAS would start its threads with the import.
    was_given = BLAS_THREADS in os.environ
    os.environ.setdefault(BLAS_THREADS, "1")
    # Looking for garbage again and again while modules come in takes a third of the time, and finds next to none.
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    # What is here now stays: looking through it later would copy the pages that are shared.
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)
    if not was_given:
        del os.environ[BLAS_THREADS]
    return forkserver.available()


def preload_given(modules: list[str]) -> bool:
    """Import the modules that the job names; always True, in the process that is to serve.

    What an import has started cannot be taken back. So each try is made by a child, which serves in the place of this
    process if ranks can be forked from it; otherwise another one tries without the module that it named.
    """
    while modules:
        pid = os.fork()
        if pid == 0:
            die_with_parent()
            os.environ[BY_NVML] = "1"
            # They may be the user's own.
            own_path = list(sys.path)
            sys.path[:0] = [str(Path.cwd()), *_places]
            for number, module in enumerate(modules):
                if complaint := _unfit(module):
                    print(f"preload: {module} {complaint}; ranks import it themselves", file=sys.stderr, flush=True)
                    os._exit(UNFIT + number)
            sys.path[:] = own_path
            return True
        _, status = os.waitpid(pid, 0)
        number = (os.WEXITSTATUS(status) if os.WIFEXITED(status) else 0) - UNFIT
        if number not in range(len(modules)):
            # It served, or died of an import; the ranks start the ordinary way.
            os._exit(1)
        modules = [*modules[:number], *modules[number + 1 :]]
    return True


def _unfit(module: str) -> str:
    """Import a module; why ranks cannot be forked with it, empty if they can."""
    try:
        return "" if preload([module]) else "starts a thread or a GPU's driver when it is imported"
    except (Exception, SystemExit) as error:
        return f"cannot be imported ({type(error).__name__}: {error})"


def run_and_end(arguments: list[str]) -> NoReturn:
    """Run a module or a script. What it may rely on at its end is done: its threads are waited for, its exit functions
    are called, and its files are closed.
    """
    code: int | str | None = 0
    try:
        run(arguments)
    except SystemExit as leaving:
        code = leaving.code
        if code:
            sys.last_value = leaving
    except BaseException as error:
        # As Python does, so that exit functions know.
        sys.last_value = error
        Pulse.tell_failure(error, _of_the_script(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        code = ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    depart(code, lambda: _farewell(code))


def _farewell(code: int | str | None) -> None:
    close_files()
    if Pulse.ours is not None:
        Pulse.ours.last_word_of_script(1 if isinstance(code, str) else (code or 0) & 0xFF)


def run(arguments: list[str]) -> None:
    """Run a module, a script or code as Python itself would."""
    import numpy as np
    import torch

    # What was forked has the state of one process: numbers drawn without a seed would be the same in all ranks, always.
    random.seed()
    np.random.seed()
    torch.default_generator.seed()
    if threads := os.environ.get("OMP_NUM_THREADS", ""):
        torch.set_num_threads(int(threads))
    sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    sys.excepthook = _show
    sys.orig_argv = [sys.executable, "-u", *arguments]
    if arguments == module_command("tandem_trainer")[1:]:
        # A file of the job's code takes no name of what Tandem imports.
        sys.path.extend(_places)
    else:
        sys.path[:0] = [*_folder_of(arguments), *_places]
        _accompany()
    arguments = arguments[arguments[0] == SAFE_PATH :]
    # It stays until the process is gone: threads and exit functions may pickle what is defined in it.
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
    """Where Python looks first for the modules of a program; nothing with `-P`."""
    match arguments[0]:
        case "-P":
            return []
        case "-c":
            return [""]
        case "-m":
            return [str(Path.cwd())]
        case script:
            return [str(Path(script).resolve().parent)]


def _run_file(script: ModuleType, given: str) -> None:
    """Run a script: `__file__` is its whole path, `sys.argv[0]` what was given; runpy has one name for both."""
    # Not pathlib, which tidies the path more than Python does.
    path = os.path.join(os.getcwd(), given.removeprefix("./"))  # noqa: PTH109, PTH118
    script.__file__ = path
    script.__cached__ = None  # type: ignore[attr-defined]
    script.__loader__ = SourceFileLoader("__main__", path)
    try:
        with io.open_code(path) as file:
            content = file.read()
    except OSError as error:
        # As Python says it.
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        Pulse.tell_failure(error.with_traceback(None))
        raise SystemExit(2) from None
    code = compile(content, path, "exec", dont_inherit=True)
    exec(code, vars(script))  # noqa: S102 - it is what was asked for


def _accompany() -> None:
    """Let the agent see a script that knows nothing of it: its processor use, that it is stopped, where it hangs. And
    spare it the page faults that a fork brings."""
    begin_adapted()
    if (pulse := Pulse.open_for_rank(phase=SCRIPT)) is not None:
        answer_with_stacks(pulse.stacks)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments[:-1]:
        raise SystemExit("usage: python -P -m tandem_trainer.agent [--warm] TORCHRUN-OPTIONS… -- COMMAND…")
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _show(kind: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
    """Show an error as the script alone would have, without the frames that led to it."""
    traceback.print_exception(kind, error, _of_the_script(frames))


def _of_the_script(frames: TracebackType | None) -> TracebackType | None:
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    first = frames
    while first is not None and first.tb_frame.f_code.co_filename in ours:
        first = first.tb_next
    return first or frames


if __name__ == "__main__":
    main()
