"""Checks the user's own commands: whether the script, module or program exists and can be started.

The arguments are read as the agent reads them (tandem.processes.launch.agent_command): a script, a module, or a
program. Nothing is imported and nothing is run. The arguments after the script are not checked.
"""

import ast
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

from tandem.errors import UnmetRequirement
from tandem.job.manifest.reading import split_as_yaml
from tandem.job.resource import DistributedTrainingJob
from tandem_coordinator.prerequisites.adapter import refused_options
from tandem_coordinator.prerequisites.site import Site, fault_of_file, is_folder, unexpanded

MAX_SCRIPT_BYTES = 2**21
"""Maximum size of a script that is compiled to find mistakes, in bytes."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
SPAWN_MODULE, SPAWN_FUNCTIONS = "torch.multiprocessing", ("spawn", "start_processes")
JOIN_FUNCTION = "init_process_group"
SHELLS = ("bash", "dash", "ksh", "sh", "zsh")
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_FLAG = re.compile(r"-[bBdEiIOPqsSuvx]+")
"""Python's options without an argument."""

Argument = tuple[str, int]
"""One of the arguments of command and args, with its position among them."""


def program(job: DistributedTrainingJob, site: Site) -> Iterator[UnmetRequirement]:
    """Check the commands of a job: the one that trains, and the one that evaluates."""
    trainer, evaluators = job.spec.trainer, job.spec.evaluation
    if trainer.command is not None:
        yield from _command("trainer", trainer.command, trainer.args, site)
        yield from _in_script(trainer.command, trainer.args, site)
    if evaluators.command is not None and evaluators.processes:
        yield from _command("evaluators", evaluators.command, evaluators.args, site)


def _command(part: str, command: Sequence[str], args: Sequence[str], site: Site) -> Iterator[UnmetRequirement]:
    argv = list(zip([*command, *args], range(len(command) + len(args)), strict=True))
    for message, position, suggestion in _start(argv, site):
        text = argv[position][0]
        if (
            any(letter.isspace() for letter in text)
            and not Path(text).exists()
            and (split_command := split_as_yaml(text))
        ):
            # A line as one word: a shell would have taken it apart.
            suggestion = f"[{split_command}]" if len(argv) == 1 else split_command
        field = ("command", position) if position < len(command) else ("args", position - len(command))
        yield UnmetRequirement(("spec", part, *field), message, suggestion=suggestion)


def _in_script(command: Sequence[str], args: Sequence[str], site: Site) -> Iterator[UnmetRequirement]:
    """Warn about what the training script contains and Tandem or an adapter of its library does not support."""
    scripts = [position for position, argument in enumerate(command) if argument.endswith(".py")]
    path = site.resolve(command[scripts[0]]) if site.is_here and scripts else None
    script = _parsed(path) if path is not None else None
    if script is None:
        return
    position, text, field = scripts[0], command[scripts[0]], ("spec", "trainer")
    if _has_bare_spawn(*script):
        # They would wait for each other for ever.
        message = (
            f"{text} starts its ranks itself (multiprocessing), and they inherit {AGENT_STORE}=True, with which none "
            "of them opens the store that they meet at: they wait for ever. Have Tandem start them "
            f'(workers.processesPerReplica), or put os.environ["{AGENT_STORE}"] = "False" before their start'
        )
        yield UnmetRequirement((*field, "command", position), message, fails=False)
    arguments = [*command[position + 1 :], *args]
    for option in refused_options(script.tree, arguments):
        place = position if option.argument is None else position + 1 + option.argument
        location = f"{text}, line {option.line}: " if option.argument is None else ""
        message = f"{location}{option.text} is refused when training starts: {option.note}"
        argument_field = ("command", place) if place < len(command) else ("args", place - len(command))
        yield UnmetRequirement((*field, *argument_field), message, fails=False)


class _Script(NamedTuple):
    source: bytes
    tree: ast.Module


def _parsed(script: Path) -> _Script | None:
    """Parse a script; None if that is impossible."""
    try:
        source = script.read_bytes() if script.stat().st_size <= MAX_SCRIPT_BYTES else b""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Script(source, ast.parse(source))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _has_bare_spawn(source: bytes, tree: ast.Module) -> bool:
    """Whether a script starts the ranks of a process group as processes, without setting the store's variable."""
    if AGENT_STORE.encode() in source or JOIN_FUNCTION.encode() not in source:
        return False
    nodes = list(ast.walk(tree))
    modules, functions = {SPAWN_MODULE}, set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.asname for alias in node.names if alias.asname and alias.name == SPAWN_MODULE}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules |= {
                alias.asname or alias.name for alias in node.names if f"{node.module}.{alias.name}" == SPAWN_MODULE
            }
            functions |= {
                alias.asname or alias.name
                for alias in node.names
                if node.module == SPAWN_MODULE and alias.name in SPAWN_FUNCTIONS
            }
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    spawns = {f"{module}.{function}" for module in modules for function in SPAWN_FUNCTIONS} | functions
    return any(ast.unparse(call.func) in spawns for call in calls) or _starts_ranks(nodes, calls)


def _starts_ranks(nodes: Sequence[ast.AST], calls: Sequence[ast.Call]) -> bool:
    """Whether a `Process` of multiprocessing gets a function of the script that joins a process group. Other processes,
    such as one that writes a log, are no ranks."""
    ranks = {
        node.name
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        and any(
            isinstance(part, ast.Call) and ast.unparse(part.func).endswith(JOIN_FUNCTION) for part in ast.walk(node)
        )
    }
    targets = {
        ast.unparse(keyword.value)
        for call in calls
        if ast.unparse(call.func).rpartition(".")[2] == "Process"
        for keyword in call.keywords
        if keyword.arg == "target"
    }
    return not ranks.isdisjoint(targets)


Findings = Iterator[tuple[str, int, str]]
"""Message, position of the argument, and suggestion."""


def _start(argv: Sequence[Argument], site: Site) -> Findings:
    (first, position), remaining_args = argv[0], argv[1:]
    if first in ("python", "python3"):
        yield from _python(remaining_args, position, site, is_this_python=True)
    elif first == "-m":
        yield from _module(remaining_args, position, site)
    elif first.endswith(".py"):
        yield from _script(argv[0], site, is_this_python=True)
    else:
        yield from _program(argv[0], site)
        name = Path(first).name
        if _PYTHON.fullmatch(name):
            yield from _python(remaining_args, position, site, is_this_python=False)
        elif name in SHELLS and remaining_args and not remaining_args[0][0].startswith("-"):
            yield from _shell_script(remaining_args[0], site)


def _python(argv: Sequence[Argument], position: int, site: Site, is_this_python: bool) -> Findings:
    """Check what Python is asked to run, after its options.

    Args:
        is_this_python: whether it is the Python that this is.
    """
    remaining = list(argv)
    while remaining and remaining[0][0].startswith("-"):
        option, position = remaining.pop(0)
        if option == "-m":
            if is_this_python or not remaining:
                yield from _module(remaining, position, site)
            return
        if option in ("-X", "-W") and remaining:
            remaining.pop(0)
        elif not _FLAG.fullmatch(option):
            return
    if remaining:
        yield from _script(remaining[0], site, is_this_python)


def _script(argument: Argument, site: Site, is_this_python: bool) -> Findings:
    text, position = argument
    path = site.resolve(text)
    if path is None:
        return
    if is_folder(path) and not text.endswith(".py"):
        if not (path / "__main__.py").is_file():
            yield f"{text} is a folder without a __main__.py; name a script in it", position, ""
        return
    fault, suggestion = fault_of_file(path, text)
    if fault:
        yield fault, position, suggestion
    elif is_this_python and site.is_here and text.endswith(".py") and (mistake := _mistake_in(path)):
        yield f"{text}, {mistake}", position, ""


def _mistake_in(script: Path) -> str:
    """The reason why Python does not compile a script; empty if it does."""
    try:
        if not script.is_file() or script.stat().st_size > MAX_SCRIPT_BYTES:
            return ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}" if error.lineno else str(error.msg)
    except ValueError as error:
        return str(error)
    except (OSError, RecursionError, MemoryError, OverflowError):
        return ""
    return ""


def _module(argv: Sequence[Argument], position: int, site: Site) -> Findings:
    if not argv:
        yield "-m needs the name of a module after it", position, ""
        return
    name, position = argv[0]
    if not site.is_here or site.variables is None or site.installs:
        return
    if fault := fault_of_module(name, module_folders(site)):
        ending = ".py"
        is_file = name.endswith(ending) and Path(name).is_file()
        yield fault, position, name.removesuffix(ending) if is_file else ""


def module_folders(site: Site) -> list[str]:
    """The folders in which Python looks for modules when it is started with `-m`."""
    python_path = (site.variables or {}).get("PYTHONPATH", "").split(os.pathsep)
    return [str(site.folder), *filter(None, python_path), *sys.path]


def fault_of_module(name: str, folders: Sequence[str], is_run: bool = True) -> str:
    """The reason why Python finds no module of a name; empty if it does, or if only an import could tell.

    Args:
        is_run: True if Python runs the module (`-m`), False if it imports it.
    """
    parts, search_path = name.split("."), list(folders)
    if not all(part.isidentifier() for part in parts):
        return f"{name} is not a module name; -m takes a name such as package.module; give a path without -m"
    for number in range(1, len(parts) + 1):
        full_name = ".".join(parts[:number])
        spec, is_known = _find_module(full_name, search_path, is_top=number == 1)
        if not is_known:
            return ""
        if spec is None:
            return f"Python finds no module {full_name} in {Path.cwd()}, in PYTHONPATH or among the installed packages"
        if spec.submodule_search_locations is None:
            if number < len(parts):
                return f"{full_name} is a module and not a package, so there is no {name} in it"
            return ""
        search_path = list(spec.submodule_search_locations)
        if _creates_modules(spec):
            return ""
    if not is_run:
        return ""
    spec, is_known = _find_module(f"{name}.__main__", search_path, is_top=False)
    if is_known and spec is None:
        return f"{name} is a package without a __main__.py, which -m would run"
    return ""


def _find_module(name: str, folders: Sequence[str], is_top: bool) -> tuple[ModuleSpec | None, bool]:
    """The spec of a module, and whether that could be determined."""
    try:
        for finder in [PathFinder, *(sys.meta_path if is_top else [])]:
            find = getattr(finder, "find_spec", None)
            spec = find(name, folders if finder is PathFinder else None) if find else None
            if spec is not None:
                return spec, True
    except Exception:
        return None, False
    return None, True


def _creates_modules(package: ModuleSpec) -> bool:
    """Whether a package may have modules without a file, because its code creates them at import."""
    try:
        text = Path(package.origin or "").read_text(errors="replace") if package.origin else ""
    except OSError:
        return True
    return "__path__" in text or "sys.modules" in text


def _shell_script(argument: Argument, site: Site) -> Findings:
    text, position = argument
    path = site.resolve(text)
    if path is None or ("/" not in text and site.is_here and _on_path(text, site)):
        return
    fault, suggestion = fault_of_file(path, text)
    if fault:
        yield fault, position, suggestion


def _program(argument: Argument, site: Site) -> Findings:
    text, position = argument
    if not text:
        yield "the name of the program is empty", position, ""
        return
    if "/" not in text:
        if site.is_here and not site.installs and _on_path(text, site) is None:
            is_here = Path(text).exists()
            hint = f"; the file {text} here is started as ./{text}" if is_here else unexpanded(text)
            yield f"there is no program {text} in the folders of PATH{hint}", position, f"./{text}" if is_here else ""
        return
    path = site.resolve(text)
    if path is None:
        return
    fault, suggestion = fault_of_file(path, text)
    if fault and not ("Permission denied" in fault and os.access(path, os.X_OK)):
        yield fault, position, suggestion
    elif not os.access(path, os.X_OK):
        yield f"{text} is not executable: chmod +x {text}, or name what runs it, such as bash, before it", position, ""
    elif site.is_here and (fault := _fault_of_image(path, text, site)):
        yield fault, position, ""


def _on_path(name: str, site: Site) -> str | None:
    return shutil.which(name, path=(site.variables or {}).get("PATH", os.defpath))


def _fault_of_image(path: Path, text: str, site: Site) -> str:
    """The reason why the kernel cannot start a file; empty if none is found."""
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError:
        return ""
    if not head.startswith(b"#!"):
        is_text = head.isascii() and b"\0" not in head
        if is_text and not _has_binfmt_formats():
            return f"{text} is a text file without #! and an interpreter in its first line; put one before it"
        return ""
    line = head[2:].split(b"\n", 1)[0].decode(errors="replace")
    interpreter = line.split()
    if not interpreter:
        return f"{text} names nothing after #! in its first line"
    if line.endswith("\r"):
        name = interpreter[0]
        return f"{text} has Windows line endings, which are part of the name {name} in its first line; use dos2unix"
    if not Path(interpreter[0]).exists():
        return f"the first line of {text} names the interpreter {interpreter[0]}, which does not exist"
    by_env = (
        Path(interpreter[0]).name == "env"
        and len(interpreter) > 1
        and "=" not in interpreter[1]
        and not interpreter[1].startswith("-")
    )
    if by_env and _on_path(interpreter[1], site) is None:
        return f"the first line of {text} names the interpreter {interpreter[1]}, which is in no folder of PATH"
    return ""


def _has_binfmt_formats() -> bool:
    """Whether the kernel recognises other formats of programs than those that are checked here (binfmt_misc)."""
    folder = Path("/proc/sys/fs/binfmt_misc")
    try:
        return any(entry.name not in ("register", "status") for entry in folder.iterdir())
    except OSError:
        return False
