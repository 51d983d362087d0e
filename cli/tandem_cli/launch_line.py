"""The line that starts a script without Tandem, and the manifest that starts it with Tandem.

`python train.py …`, `torchrun …` and `accelerate launch …` say which script runs and with how many processes. That, the
arguments and the variables are all that a manifest of a script needs. An option that means something else is refused
where the training would be another one without it, and named in a note where Tandem does the same by itself.
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
from tandem.job import API_VERSION, KIND
from tandem.manifest.reading import in_yaml, separated, similar_file
from tandem_cli.local.placement import visible_gpus

MAX_NAME_LENGTH = 40
"""Characters of a job's name that is taken from a script's. Names of pods are longer by a part."""
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
"""Options of torchrun with a value that the coordinator and the run directory take the place of."""
_OF_ACCELERATE = ("--machine_rank", "--main_process_ip", "--main_process_port", "--rdzv_backend")
"""The same of accelerate."""


@dataclass(frozen=True)
class LaunchLine:
    """Parsed launch line."""

    command: Sequence[str]
    """The script and what runs it."""
    args: Sequence[str] = ()
    """Its arguments."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables."""
    processes: int = 1
    """Ranks of each worker."""
    workers: tuple[int, int] = (1, 1)
    """The fewest and the most."""
    restarts: int | None = None
    """Failures to tolerate. None: Tandem's default."""
    not_used: Sequence[str] = ()
    """Options that Tandem does not need."""

    @property
    def name(self) -> str:
        """A name for the job: that of the script."""
        script = self.command[-1]
        stem = "" if "-c" in self.command else script.rpartition(".")[2] if "-m" in self.command else Path(script).stem
        return re.sub(r"[^a-z0-9]+", "-", stem.lower())[:MAX_NAME_LENGTH].strip("-") or "script"

    def manifest(self, typed: Sequence[str], name: str = "") -> str:
        """The manifest, YAML.

        Args:
            typed: the line, for a comment.
            name: of the job. Empty: that of the script.
        """
        fewest, most = self.workers
        lines = [
            f"# From: {one_line(shlex.join(typed))}",
            *(f"apiVersion: {API_VERSION}", f"kind: {KIND}", "metadata:", f"  name: {in_yaml(name or self.name)}"),
            *("spec:", "  trainer:", f"    command: [{_listed(self.command)}]"),
        ]
        lines += [f"    args: [{_listed(self.args)}]"] if self.args else []
        lines += ["    env:"] if self.variables else []
        for variable, value in self.variables.items():
            lines += [f"      - name: {variable}", f"        value: {in_yaml(value)}"]
        if most > 1 or self.processes > 1:
            lines += ["  workers:", f"    replicas: {most}"]
            lines += [f"    minReplicas: {fewest}"] if fewest > 1 or fewest < most else []
            lines += [f"    processesPerReplica: {self.processes}"] if self.processes > 1 else []
        if self.restarts is not None:
            lines += ["  elasticity:", f"    maxRestarts: {self.restarts}"]
        return "\n".join(lines) + "\n"


def is_launch_line(word: str) -> bool:
    """Whether a line begins with this word, where it could also be the name of a manifest."""
    return word.endswith(".py") or word in ("torchrun", "accelerate") or bool(_PYTHON.fullmatch(word))


def read(words: Sequence[str]) -> LaunchLine:
    """Parse a launch line. Its words may come as one, in quotes.

    Raises:
        UserError: it starts no script, its script is not there, or an option means something that a manifest cannot
            say.
    """
    left = _split(words[0]) if len(words) == 1 and any(letter.isspace() for letter in words[0]) else list(words)
    variables = {}
    while left and _VARIABLE.match(left[0]):
        name, _, value = left.pop(0).partition("=")
        variables[name] = value
    if not left:
        raise UserError("name a script, for instance train.py, or the line that starts it")
    line = _of_launcher(left)
    _need_script(line.command)
    return LaunchLine(**{**vars(line), "variables": {**line.variables, **variables}})


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{text}: {error}") from error


def _of_launcher(words: Sequence[str]) -> LaunchLine:
    first, rest = words[0], words[1:]
    if first == "torchrun":
        return _of_torchrun(rest)
    if first == "accelerate":
        if rest[:1] != ["launch"]:
            raise UserError("of accelerate, the line that starts a script is: accelerate launch train.py")
        return _of_accelerate(rest[1:])
    if first.endswith(".py"):
        return LaunchLine(("python", first), rest)
    if _PYTHON.fullmatch(Path(first).name):
        return _of_python(first, rest)
    raise UserError(
        f"{first} starts no script that is known here: give train.py, or a line that begins with python, torchrun or "
        "accelerate launch"
    )


def _of_python(python: str, words: Sequence[str]) -> LaunchLine:
    options, left = [python], list(words)
    while left and left[0].startswith("-"):
        options.append(left.pop(0))
        if options[-1] in ("-m", "-c"):
            break
        options += [left.pop(0)] if options[-1] in ("-X", "-W") and left else []
    if not left:
        raise UserError(f"{shlex.join([python, *words])} names no script")
    script, *args = left
    if options[-1] == "-m" and script in _MODULES:
        return _of_launcher([_MODULES[script], *args])
    if options[-1] == "-m" and script.startswith("accelerate.commands.launch"):
        return _of_accelerate(args)
    return LaunchLine((*options, script), args)


class _Options(argparse.ArgumentParser):
    """Options before a script, as its launcher reads them."""

    def error(self, message: str) -> NoReturn:
        """
        Raises:
            UserError: always.
        """
        raise UserError(f"{self.prog}: {message}; leave it out, and set in the script or manifest what it stands for")


def _options(launcher: str, ignored: Sequence[str], flags: Sequence[str]) -> _Options:
    found = _Options(prog=launcher, add_help=False, allow_abbrev=False)
    for name in ignored:
        found.add_argument(*_spellings(name), dest=name)
    for name in flags:
        found.add_argument(*_spellings(name), dest=name, action="store_true")
    found.add_argument("-m", "--module", action="store_true")
    found.add_argument(*_spellings("--no-python"), dest="no_python", action="store_true")
    found.add_argument("script")
    found.add_argument("args", nargs=argparse.REMAINDER)
    return found


def _spellings(name: str) -> list[str]:
    """An option with dashes and with underscores: both launchers take either."""
    body = name.lstrip("-")
    begin = name[: len(name) - len(body)]
    return list(dict.fromkeys([name, begin + body.replace("_", "-"), begin + body.replace("-", "_")]))


def _of_torchrun(words: Sequence[str]) -> LaunchLine:
    parser = _options("torchrun", _RENDEZVOUS, ("--standalone", "--run-path", "--use-env"))
    parser.add_argument(*_spellings("--nproc-per-node"), dest="processes", default="1")
    parser.add_argument("--nnodes", default="1:1")
    parser.add_argument(*_spellings("--max-restarts"), dest="restarts", type=int)
    given = parser.parse_args(words)
    fewest, _, most = given.nnodes.partition(":")
    workers = (_count("--nnodes", fewest), _count("--nnodes", most or fewest))
    processes = _local_processes(given.processes)
    not_used = _used(given, (*_RENDEZVOUS, "--standalone"))
    return LaunchLine(_started(given), given.args, {}, processes, workers, restarts=given.restarts, not_used=not_used)


def _of_accelerate(words: Sequence[str]) -> LaunchLine:
    parser = _options("accelerate launch", _OF_ACCELERATE, ("--multi_gpu", "--same_network"))
    parser.add_argument(*_spellings("--num_processes"), dest="processes")
    parser.add_argument(*_spellings("--num_machines"), dest="machines", default="1")
    parser.add_argument(*_spellings("--mixed_precision"), dest="precision")
    parser.add_argument(*_spellings("--num_cpu_threads_per_process"), dest="threads")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args(words)
    if (given.processes is None or given.precision is None) and (configured := _accelerate_configuration()) is not None:
        raise UserError(
            f"accelerate would read {configured}, which Tandem does not. Give --num_processes and --mixed_precision in "
            "the line, and what else it says in the script, as arguments of Accelerator"
        )
    machines = _count("--num_machines", given.machines)
    # As accelerate does without a configuration: one for each GPU.
    gpus = 0 if given.cpu else len(visible_gpus(dict(os.environ)))
    total = max(1, gpus) * machines if given.processes is None else _count("--num_processes", given.processes)
    if total % machines:
        raise UserError(f"--num_processes is {total}, which is no multiple of the {machines} of --num_machines")
    variables = {"ACCELERATE_MIXED_PRECISION": given.precision} if given.precision else {}
    variables |= {"ACCELERATE_USE_CPU": "true"} if given.cpu else {}
    variables |= {"OMP_NUM_THREADS": given.threads} if given.threads else {}
    not_used = _used(given, (*_OF_ACCELERATE, "--multi_gpu"))
    return LaunchLine(
        _started(given), given.args, variables, total // machines, (machines, machines), not_used=not_used
    )


def _accelerate_configuration() -> Path | None:
    """The file that `accelerate config` has written; None if there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("HF_HOME") or cache / "huggingface") / "accelerate"
    return next((path for name in ("yaml", "json") if (path := folder / f"default_config.{name}").is_file()), None)


def _started(given: argparse.Namespace) -> tuple[str, ...]:
    if given.no_python:
        return (given.script,)
    return ("python", "-m", given.script) if given.module else ("python", given.script)


def _used(given: argparse.Namespace, names: Sequence[str]) -> list[str]:
    return [name for name in names if getattr(given, name)]


def _count(option: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise UserError(f"{option} needs a number from 1 on, not {text or 'nothing'}")
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
        near = similar_file(Path(script))
        raise UserError(f"{script} does not exist" + (f"; did you mean {near}?" if near else ""))


def _listed(words: Sequence[str]) -> str:
    return separated(shlex.join(words))
