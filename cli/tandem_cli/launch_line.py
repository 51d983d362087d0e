"""Converts the command line that starts a script without Tandem into a manifest.

`python train.py …`, `torchrun …` and `accelerate launch …` name the script and the number of processes. These, the
arguments and the environment variables are all that the manifest of a script needs. Other options are refused if the
training would differ without them, and listed in a note if Tandem does the same by itself.
"""

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from tandem.errors import UserError
from tandem.formatting import one_line
from tandem.job.manifest.reading import in_yaml, similar_file, split_as_yaml
from tandem.job.resource import API_VERSION, KIND
from tandem_launcher.local.placement import visible_gpus

MAX_NAME_LENGTH = 40
"""Maximum length of a job name derived from a script; names of pods are longer."""
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")
_MODULES = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun"}
_RENDEZVOUS = (
    *("--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--master-addr", "--master-port"),
    *(
        "--node-rank",
        "--local-addr",
        "--monitor-interval",
        "--start-method",
        "--role",
        "--log-dir",
        "-r",
        "--redirects",
    ),
    *("-t", "--tee", "--local-ranks-filter"),
)
"""Options of torchrun, with a value, that the coordinator and the run directory replace."""
_ACCELERATE_RENDEZVOUS = ("--machine_rank", "--main_process_ip", "--main_process_port", "--rdzv_backend")
"""Options of accelerate that they replace."""


@dataclass(frozen=True)
class LaunchLine:
    """Parsed launch line."""

    command: Sequence[str]
    """The script and its interpreter."""
    args: Sequence[str] = ()
    """Arguments of the script."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables."""
    processes: int = 1
    """Ranks of each worker."""
    workers: tuple[int, int] = (1, 1)
    """Minimum and maximum number of workers."""
    restarts: int | None = None
    """Number of tolerated failures; None: Tandem's default."""
    not_used: Sequence[str] = ()
    """Options that Tandem does not need."""

    @property
    def name(self) -> str:
        """Derive the job's name from the script."""
        script = self.command[-1]
        stem = "" if "-c" in self.command else script.rpartition(".")[2] if "-m" in self.command else Path(script).stem
        return to_job_name(stem)

    def manifest(self, typed: Sequence[str], name: str = "") -> str:
        """Build the manifest, as YAML.

        Args:
            typed: the original line, for a comment.
            name: the job's name; empty: derived from the script.
        """
        min_workers, max_workers = self.workers
        lines = [
            f"# From: {one_line(shlex.join(typed))}",
            *(f"apiVersion: {API_VERSION}", f"kind: {KIND}", "metadata:", f"  name: {in_yaml(name or self.name)}"),
            *("spec:", "  trainer:", f"    command: [{_yaml_list(self.command)}]"),
        ]
        lines += [f"    args: [{_yaml_list(self.args)}]"] if self.args else []
        lines += ["    env:"] if self.variables else []
        for variable, value in self.variables.items():
            lines += [f"      - name: {in_yaml(variable)}", f"        value: {in_yaml(value)}"]
        if max_workers > 1 or self.processes > 1:
            lines += ["  workers:", f"    replicas: {max_workers}"]
            lines += [f"    minReplicas: {min_workers}"] if min_workers > 1 or min_workers < max_workers else []
            lines += [f"    processesPerReplica: {self.processes}"] if self.processes > 1 else []
        if self.restarts is not None:
            lines += ["  elasticity:", f"    maxRestarts: {self.restarts}"]
        return "\n".join(lines) + "\n"


def to_job_name(stem: str) -> str:
    """Derive a job's name from the name of a script or a function."""
    return re.sub(r"[^a-z0-9]+", "-", stem.lower())[:MAX_NAME_LENGTH].strip("-") or "script"


def is_launch_line(word: str) -> bool:
    """Whether a launch line starts with this word, which could also name a manifest."""
    return word.endswith(".py") or word in ("torchrun", "accelerate") or bool(_PYTHON.fullmatch(word))


def read(argv: Sequence[str]) -> LaunchLine:
    """Parse a launch line, which may be a single argument in quotes.

    Raises:
        UserError: it starts no script, the script does not exist, or an option has no equivalent in a manifest.
    """
    is_quoted_line = len(argv) == 1 and any(letter.isspace() for letter in argv[0]) and not Path(argv[0]).is_file()
    remaining = _split(argv[0]) if is_quoted_line else list(argv)
    variables = {}
    while remaining and _VARIABLE.match(remaining[0]):
        name, _, value = remaining.pop(0).partition("=")
        variables[name] = value
    if not remaining:
        raise UserError("name a script, for instance train.py, or the line that starts it")
    line = _parse_launcher(remaining)
    _need_script(line.command)
    return LaunchLine(**{**vars(line), "variables": {**line.variables, **variables}})


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{text}: {error}") from error


def _parse_launcher(argv: Sequence[str]) -> LaunchLine:
    program, args = argv[0], argv[1:]
    if program == "torchrun":
        return _parse_torchrun(args)
    if program == "accelerate":
        if args[:1] != ["launch"]:
            raise UserError("accelerate starts a script with: accelerate launch train.py")
        return _parse_accelerate(args[1:])
    if program.endswith(".py"):
        return LaunchLine(("python", program), args)
    if _PYTHON.fullmatch(Path(program).name):
        return _parse_python(program, args)
    raise UserError(
        f"{program} is not a known launcher: give train.py, or a line that starts with python, torchrun or "
        "accelerate launch"
    )


def _parse_python(python: str, argv: Sequence[str]) -> LaunchLine:
    options, remaining = [python], list(argv)
    while remaining and remaining[0].startswith("-"):
        options.append(remaining.pop(0))
        if options[-1] in ("-m", "-c"):
            break
        options += [remaining.pop(0)] if options[-1] in ("-X", "-W") and remaining else []
    if not remaining:
        raise UserError(f"{shlex.join([python, *argv])} names no script")
    script, *args = remaining
    if options[-1] == "-m" and script in _MODULES:
        return _parse_launcher([_MODULES[script], *args])
    if options[-1] == "-m" and script.startswith("accelerate.commands.launch"):
        return _parse_accelerate(args)
    return LaunchLine((*options, script), args)


class _LauncherParser(argparse.ArgumentParser):
    """Parses the options of a launcher, which stand before the script."""

    def error(self, message: str) -> NoReturn:
        """
        Raises:
            UserError: always.
        """
        raise UserError(f"{self.prog}: {message}; omit it, and set its meaning in the script or manifest")


def _launcher_parser(launcher: str, ignored: Sequence[str], flags: Sequence[str]) -> _LauncherParser:
    parser = _LauncherParser(prog=launcher, add_help=False, allow_abbrev=False)
    for name in ignored:
        parser.add_argument(*_spellings(name), dest=name)
    for name in flags:
        parser.add_argument(*_spellings(name), dest=name, action="store_true")
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument(*_spellings("--no-python"), dest="no_python", action="store_true")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser


def _spellings(name: str) -> list[str]:
    """Return the spellings of an option with dashes and with underscores; both launchers accept either."""
    body = name.lstrip("-")
    begin = name[: len(name) - len(body)]
    return list(dict.fromkeys([name, begin + body.replace("_", "-"), begin + body.replace("-", "_")]))


def _parse_torchrun(argv: Sequence[str]) -> LaunchLine:
    parser = _launcher_parser("torchrun", _RENDEZVOUS, ("--standalone", "--run-path", "--use-env"))
    parser.add_argument(*_spellings("--nproc-per-node"), dest="processes", default="1")
    parser.add_argument("--nnodes", default="1:1")
    parser.add_argument(*_spellings("--max-restarts"), dest="restarts", type=int)
    parsed = parser.parse_args(argv)
    min_workers, _, max_workers = parsed.nnodes.partition(":")
    workers = (_count("--nnodes", min_workers), _count("--nnodes", max_workers or min_workers))
    processes = _local_processes(parsed.processes)
    not_used = _unused_options(parsed, (*_RENDEZVOUS, "--standalone"))
    return LaunchLine(
        _command_of(parsed), parsed.args, {}, processes, workers, restarts=parsed.restarts, not_used=not_used
    )


def _parse_accelerate(argv: Sequence[str]) -> LaunchLine:
    parser = _launcher_parser("accelerate launch", _ACCELERATE_RENDEZVOUS, ("--multi_gpu", "--same_network"))
    parser.add_argument(*_spellings("--num_processes"), dest="processes")
    parser.add_argument(*_spellings("--num_machines"), dest="machines", default="1")
    parser.add_argument(*_spellings("--mixed_precision"), dest="precision")
    parser.add_argument(*_spellings("--num_cpu_threads_per_process"), dest="threads")
    parser.add_argument("--cpu", action="store_true")
    parsed = parser.parse_args(argv)
    if (parsed.processes is None or parsed.precision is None) and (
        configured := _accelerate_configuration()
    ) is not None:
        raise UserError(
            f"accelerate would read {configured}, which Tandem does not. Add --num_processes and --mixed_precision to "
            "the line, and pass its other settings in the script, as arguments of Accelerator"
        )
    machines = _count("--num_machines", parsed.machines)
    # The default of accelerate without a configuration: one process per GPU.
    gpus = 0 if parsed.cpu else len(visible_gpus(dict(os.environ)))
    total = max(1, gpus) * machines if parsed.processes is None else _count("--num_processes", parsed.processes)
    if total % machines:
        raise UserError(f"--num_processes is {total}, which is no multiple of the {machines} of --num_machines")
    variables = {"ACCELERATE_MIXED_PRECISION": parsed.precision} if parsed.precision else {}
    variables |= {"ACCELERATE_USE_CPU": "true"} if parsed.cpu else {}
    variables |= {"OMP_NUM_THREADS": parsed.threads} if parsed.threads else {}
    not_used = _unused_options(parsed, (*_ACCELERATE_RENDEZVOUS, "--multi_gpu"))
    return LaunchLine(
        _command_of(parsed), parsed.args, variables, total // machines, (machines, machines), not_used=not_used
    )


def _accelerate_configuration() -> Path | None:
    """Return the file that `accelerate config` has written; None if there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("HF_HOME") or cache / "huggingface") / "accelerate"
    return next((path for name in ("yaml", "json") if (path := folder / f"default_config.{name}").is_file()), None)


def _command_of(parsed: argparse.Namespace) -> tuple[str, ...]:
    if parsed.no_python:
        return (parsed.script,)
    return ("python", "-m", parsed.script) if parsed.module else ("python", parsed.script)


def _unused_options(parsed: argparse.Namespace, names: Sequence[str]) -> list[str]:
    return [name for name in names if getattr(parsed, name)]


def _count(option: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise UserError(f"{option} needs a number of at least 1, not {text or 'nothing'}")
    return int(text)


def _local_processes(text: str) -> int:
    gpus = len(visible_gpus(dict(os.environ)))
    if text == "gpu" and not gpus:
        raise UserError("--nproc-per-node=gpu: there is no GPU here; give a number")
    if text in ("gpu", "auto", "cpu"):
        return gpus if gpus and text != "cpu" else os.cpu_count() or 1
    return _count("--nproc-per-node", text)


def _need_script(command: Sequence[str]) -> None:
    script = command[-1]
    if script.endswith(".py") and "-c" not in command and not Path(script).is_file():
        suggestion = similar_file(Path(script))
        raise UserError(f"{script} does not exist" + (f"; did you mean {suggestion}?" if suggestion else ""))


def _yaml_list(argv: Sequence[str]) -> str:
    return split_as_yaml(shlex.join(argv))
