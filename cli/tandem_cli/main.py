"""The `tandem` command. Each subcommand is a function of its own name in a module of its own name, in
`commands/`, or, where it has subcommands itself, a typer application of that name.

A module is imported when its command is called, and at no other time: `tandem validate` in an editor's save hook must
not wait for numpy. So the help of the others is the sentence below, not their docstring. Rejected: a lazy subclass
of typer's group, which breaks whenever typer changes what is under it.
"""

import importlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

from tandem.distribution import install
from tandem.errors import UserError

try:
    import typer
    import typer.main
except ModuleNotFoundError as error:
    raise SystemExit(f"tandem: there is no {error.name}; install it with: {install('cli')}") from error

GROUPS = {
    "On this machine": {
        "init": "Write the manifest of a script, from the line that starts it.",
        "run": "Train and evaluate a job, or a script, on this machine.",
        "validate": "Check manifests; report what is wrong, and where.",
        "plan": "Say which strategy fits on which devices: memory, time and costs.",
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
        "debug": "Print where the ranks of a run or job are in their code now, or attach a debugger.",
        "shell": "Open a shell beside a process of a run, or in a pod of a job.",
        "stop": "Have a run or a job save and stop.",
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
        "compare": "Compare runs: their jobs, scores and times.",
        "checkpoints": "List, verify, compare, export, publish and delete the checkpoints of a run.",
        "verify": "Check in the logs of a run that each sample was taken once in each epoch.",
        "export": "Export the numbers of a run as CSV, or for TensorBoard.",
        "ui": "Open the MLflow server that tracks a run.",
        "track": "Send to MLflow what it lacks of a run.",
    },
}
"""Every command with its one-line help, in the groups of `tandem --help`. To add one: a line here, and
`commands/NAME.py` with a function or a typer.Typer called NAME."""
COMMANDS = {name: summary for group in GROUPS.values() for name, summary in group.items()}
HELP = ["-h", "--help"]
WORDS_FOLLOW = {"init"}
"""Commands whose options stand before their arguments: what follows the first argument may have options of its own."""

EXTRAS = {
    "mlflow": "mlflow",
    "numpy": "report",
    "resvg_py": "report",
    "safetensors": "trainer",
    "sklearn": "trainer",
    "tensorboard": "tensorboard",
    "torch": "trainer",
    "torchvision": "trainer",
}
"""Which extra of the distribution brings a module that a command may lack."""


READER_GONE = 128 + signal.SIGPIPE
"""How a command ends whose output nobody reads any more, as in `tandem checkpoints verify RUN | head -1`: quietly, with
the 141 that a shell shows for its own tools, which SIGPIPE kills. Not with 0: a `verify` that was cut short has not
found all to be sound. Not with 1, which says that it has found damage. Rejected: to let SIGPIPE kill us, too. It also
comes when the other end of a connection is closed, or the input of a child, and would leave what is half done."""


def main() -> None:
    """The entry point of the command line."""
    try:
        _call()
    except SystemExit as end:
        if type(end.__context__).__name__ == "NoSuchOption" and (typed := _as_script(sys.argv[1:])):
            typer.echo(f"Arguments of a script follow --: {typed}", err=True)
        # rich and typer make an exit with 1 of a broken pipe, which is known by what they were handling then.
        if not isinstance(end.__context__, BrokenPipeError):
            raise
        # What is still buffered would be written at the end of the interpreter, and fail again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(nowhere, descriptor)
        sys.exit(READER_GONE)


def _call() -> None:
    try:
        command(_words())(prog_name="tandem")
    except UserError as error:
        from tandem_cli.output import tell  # rich takes a tenth of a second, and most calls go well

        tell(error)
        sys.exit(2)


def _as_script(words: Sequence[str]) -> str:
    """A call of `tandem run SCRIPT` with -- after the script; empty if it is none, or has it."""
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    if words[:1] != ["run"] or script is None or "--" in words:
        return ""
    return shlex.join(["tandem", *words[: script + 1], "--", *words[script + 1 :]])


def _words() -> Sequence[str]:
    """The command line; while a shell completes it, what is typed so far."""
    typed = os.environ.get("_TYPER_COMPLETE_ARGS")
    return sys.argv[1:] if typed is None else typed.split()[1:]


def command(words: Sequence[str]) -> Any:
    """The same as a command of click, in whose help a flag stands without a type: it takes no value."""
    found: Any = typer.main.get_command(application(words))
    left = [found]
    while left:
        one = left.pop()
        left += getattr(one, "commands", {}).values()
        for parameter in (*one.params, one.get_help_option(typer.Context(one, help_option_names=HELP))):
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
    return found


def application(words: Sequence[str]) -> typer.Typer:
    """The typer application with the one command loaded that `words`, the command line, names."""
    wanted = next((word for word in words if not word.startswith("-")), None)
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
            command = _load(name) if name == wanted else _placeholder
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name, short_help=summary, rich_help_panel=group)
                continue
            settings = {"allow_interspersed_args": False} if name in WORDS_FOLLOW else None
            app.command(name, short_help=summary, rich_help_panel=group, context_settings=settings)(command)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        from tandem.distribution import version

        typer.echo(f"tandem {version()}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_print_version)
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
    """Imports inside it belong to a command, which may lack a module of an extra.

    Raises:
        UserError: it does; says which extra brings it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        lacking = (error.name or "").partition(".")[0]
        if extra := EXTRAS.get(lacking):
            message = f"tandem {name} needs {lacking}; install it with: {install(extra)}"
            raise UserError(message) from error
        raise
