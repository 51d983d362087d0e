"""The `tandem` command. Each subcommand is a function of its own name in a module of its own name, in
`commands/`, or, where it has subcommands itself, a typer application of that name.

A module is imported only when its command is called: `tandem validate` in an editor's save hook must not wait for
numpy. So `tandem --help` shows the sentences below, not the docstrings. Rejected: a lazy subclass of typer's group,
which breaks whenever typer changes its internals.
"""

import importlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from tandem.errors import UserError
from tandem.processes.distribution import install_command

try:
    import typer
    import typer.main
except ModuleNotFoundError as error:
    raise SystemExit(f"tandem: there is no {error.name}; install it with: {install_command('cli')}") from error

GROUPS = {
    "On this machine": {
        "init": "Write the manifest of a script, from the line that starts it.",
        "run": "Train and evaluate a job, or a script, on this machine.",
        "validate": "Check manifests; report what is wrong, and where.",
        "plan": "Estimate which strategy fits on which devices: memory, time and costs.",
        "sweep": "Train a job with different settings, and stop the worse trials by their scores.",
        "bench": "Train a job with several strategies and numbers of workers, and compare speed and memory.",
        "ls": "List the runs on this machine.",
        "mv": "Move or rename a run on this machine.",
        "rm": "Delete runs on this machine.",
    },
    "A run or a job, here or on a cluster": {
        "status": "Show the status of a run or a job, or of all.",
        "logs": "Print the logs of all processes of a run or pods of a job, in order of time.",
        "events": "Show what happened to a run, or to a job and its pods.",
        "open": "Open the live page of a run or a job.",
        "debug": "Print the current stacks of the ranks of a run or job, or attach a debugger.",
        "shell": "Open a shell with the environment of a run's process, or in a pod of a job.",
        "stop": "Save and stop a run or a job.",
    },
    "On a cluster": {
        "submit": "Submit jobs to a cluster, or change existing ones.",
        "scale": "Change the number of workers of a job on SLURM or Kubernetes while it runs.",
        "copy": "Copy the results of a job on Kubernetes to this machine.",
        "retry": "Retry a failed job from its newest checkpoint.",
        "render": "Print the sbatch script of a job.",
    },
    "Results": {
        "copy": "Copy the results of a job on Kubernetes to this machine.",
        "report": "Write an HTML report about a run.",
        "trace": "Show where the time of a failure or a start went.",
        "compare": "Compare runs: their jobs, scores and times.",
        "checkpoints": "List, verify, compare, export, publish and delete the checkpoints of a run.",
        "evaluate": "Evaluate checkpoints of a run once more, also with another program.",
        "verify": "Check in the logs of a run that each sample was taken once in each epoch.",
        "prove": "Verify the record of a run, and take some of its steps again, bit for bit.",
        "export": "Export the numbers of a run as CSV, or for TensorBoard.",
        "ui": "Open the MLflow server that tracks a run.",
        "track": "Send the missing data of a run to MLflow.",
    },
}
"""Every command with its one-line help, in the groups of `tandem --help`. To add one: a line here, and
`commands/NAME.py` with a function or a typer.Typer called NAME."""
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
HELP = ["-h", "--help"]
OPTIONS_FIRST = {"init"}
"""Commands whose options must precede their arguments, because the arguments may contain options."""

EXTRAS = {
    "mlflow": "mlflow",
    "numpy": "report",
    "optuna": "sweep",
    "resvg_py": "report",
    "safetensors": "trainer",
    "sklearn": "trainer",
    "tensorboard": "tensorboard",
    "torch": "trainer",
    "torchvision": "trainer",
}
"""Extra of the distribution that installs a module."""


BROKEN_PIPE = 128 + signal.SIGPIPE
"""Exit code of a command whose output is no longer read, as in `tandem checkpoints verify RUN | head -1`: 141 without a
message, as a shell shows for tools that SIGPIPE kills. Not 0: an interrupted `verify` has not verified everything. Not
1, which means damage. Rejected: to let SIGPIPE kill the process. The signal also arrives when the other end of a
connection or the input of a child is closed, and would leave work half done."""


def main() -> None:
    """The entry point of the command line."""
    try:
        _call()
    except SystemExit as end:
        if type(end.__context__).__name__ == "NoSuchOption" and (typed := _with_separator(sys.argv[1:])):
            typer.echo(f"Arguments of a script follow --: {typed}", err=True)
        # rich and typer turn a broken pipe into exit code 1; the context of the exception tells it apart.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        # The interpreter flushes its buffers at exit, which would fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        sys.exit(BROKEN_PIPE)


def _call() -> None:
    try:
        command(_typed_argv())(prog_name="tandem")
    except UserError as error:
        from tandem_cli.output import print_error  # rich takes a tenth of a second, and most calls go well

        print_error(error)
        sys.exit(2)


def _with_separator(argv: Sequence[str]) -> str:
    """Return a `tandem run SCRIPT` call with `--` after the script; empty for other calls."""
    script = next((index for index, word in enumerate(argv) if word.endswith(".py")), None)
    if argv[:1] != ["run"] or script is None or "--" in argv:
        return ""
    return shlex.join(["tandem", *argv[: script + 1], "--", *argv[script + 1 :]])


def _typed_argv() -> Sequence[str]:
    """Return the arguments; during shell completion, those typed so far."""
    typed = os.environ.get("_TYPER_COMPLETE_ARGS")
    return sys.argv[1:] if typed is None else typed.split()[1:]


def command(argv: Sequence[str]) -> Any:
    """Build the click command, without types of flags in its help: a flag takes no value."""
    root: Any = typer.main.get_command(application(argv))
    pending = [root]
    while pending:
        current = pending.pop()
        pending += getattr(current, "commands", {}).values()
        for parameter in (*current.params, current.get_help_option(typer.Context(current, help_option_names=HELP))):
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
    return root


def application(argv: Sequence[str]) -> typer.Typer:
    """Build the typer application; only the command that the arguments name is loaded."""
    called = next((word for word in argv if not word.startswith("-")), None)
    app = typer.Typer(
        help="Train PyTorch models and, in tandem, evaluate their checkpoints on CPUs that would otherwise idle.",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": HELP},
    )
    app.callback()(_options)
    for group, commands in GROUPS.items():
        for name, summary in commands.items():
            command = _load(name) if name == called else _placeholder
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name, short_help=summary, rich_help_panel=group)
                continue
            settings = {"allow_interspersed_args": False} if name in OPTIONS_FIRST else None
            app.command(name, short_help=summary, rich_help_panel=group, context_settings=settings)(command)
    return app


def _print_version(is_set: bool) -> None:
    if is_set:
        from tandem.processes.distribution import version

        typer.echo(f"tandem {version()}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options of `tandem` itself."""


def _placeholder() -> None:
    raise AssertionError("a command that was not loaded is never called")


def _load(name: str) -> Callable[..., Any] | typer.Typer:
    with needing(name):
        command: Callable[..., Any] | typer.Typer = getattr(
            importlib.import_module(f"tandem_cli.commands.{name}"), name
        )
    return command


@contextmanager
def needing(name: str) -> Iterator[None]:
    """Explain a failed import of a command, which may need a module of an extra.

    Raises:
        UserError: the module is missing; the message names the extra that installs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if extra := EXTRAS.get(missing):
            message = f"tandem {name} needs {missing}; install it with: {install_command(extra)}"
            raise UserError(message) from error
        raise


if __name__ == "__main__":
    main()
