"""The user's own commands: whether the script, module or program exists and can be started.

The words are read as the agent reads them (tandem.launch.agent_command): a script, a module, or a program. Nothing is
imported and nothing is run. What follows the script is its own business.
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

from tandem.errors import Unmet
from tandem.job import DistributedTrainingJob
from tandem.manifest.reading import separated
from tandem_coordinator.prerequisites.site import Site, fault_of_file, is_folder, unexpanded

MAX_BYTES = 2**21
"""Longer scripts are not compiled to find mistakes in them."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
SPAWNS = "torch.multiprocessing"
SHELLS = ("bash", "dash", "ksh", "sh", "zsh")
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_ALONE = re.compile(r"-[bBdEiIOPqsSuvx]+")
"""Options of Python without an argument."""

Word = tuple[str, int]
"""One of the words of command and args, with its place among them."""


def program(job: DistributedTrainingJob, site: Site) -> Iterator[Unmet]:
    """What is wrong with the commands of a job: the one that trains, and the one that evaluates."""
    trainer, evaluators = job.spec.trainer, job.spec.evaluation
    if trainer.command is not None:
        yield from _command("trainer", trainer.command, trainer.args, site)
        yield from _spawning(trainer.command, trainer.args, site)
    if evaluators.command is not None and evaluators.processes:
        yield from _command("evaluators", evaluators.command, evaluators.args, site)


def _command(part: str, command: Sequence[str], args: Sequence[str], site: Site) -> Iterator[Unmet]:
    words = list(zip([*command, *args], range(len(command) + len(args)), strict=True))
    for message, place, suggestion in _start(words, site):
        text = words[place][0]
        if any(letter.isspace() for letter in text) and not Path(text).exists() and (several := separated(text)):
            # A line as one word: a shell would have taken it apart.
            suggestion = f"[{several}]" if len(words) == 1 else several
        inner = ("command", place) if place < len(command) else ("args", place - len(command))
        yield Unmet(("spec", part, *inner), message, suggestion=suggestion)


def _spawning(command: Sequence[str], args: Sequence[str], site: Site) -> Iterator[Unmet]:
    """A script that starts the ranks of a process group itself, and would wait for them for ever."""
    scripts = [(place, word) for place, word in enumerate([*command, *args]) if word.endswith(".py")]
    if not site.is_here or not scripts:
        return
    place, text = scripts[0]
    path = site.look(text)
    if place < len(command) and path is not None and _spawns(path):
        message = (
            f"{text} starts its ranks by torch.multiprocessing.spawn, and they inherit {AGENT_STORE}=True, with which "
            "none of them opens the store that they meet at: they wait for ever. Have Tandem start them "
            f'(workers.processesPerReplica), or put os.environ["{AGENT_STORE}"] = "False" before the spawn'
        )
        yield Unmet(("spec", "trainer", "command", place), message, fails=False)


def _spawns(script: Path) -> bool:
    """Whether a script calls torch.multiprocessing.spawn and makes a process group, without a word of the store."""
    try:
        source = script.read_bytes() if script.stat().st_size <= MAX_BYTES else b""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if AGENT_STORE.encode() in source or b"init_process_group" not in source:
        return False
    nodes = list(ast.walk(tree))
    modules, functions = {SPAWNS}, set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {one.asname for one in node.names if one.asname and one.name == SPAWNS}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules |= {one.asname or one.name for one in node.names if f"{node.module}.{one.name}" == SPAWNS}
            functions |= {one.asname or one.name for one in node.names if node.module == SPAWNS and one.name == "spawn"}
    calls = {ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)}
    return not calls.isdisjoint({f"{module}.spawn" for module in modules} | functions)


Found = Iterator[tuple[str, int, str]]
"""Message, place of the word, what was probably meant."""


def _start(words: Sequence[Word], site: Site) -> Found:
    (first, place), rest = words[0], words[1:]
    if first in ("python", "python3"):
        yield from _python(rest, place, site, is_ours=True)
    elif first == "-m":
        yield from _module(rest, place, site)
    elif first.endswith(".py"):
        yield from _script(words[0], site, is_ours=True)
    else:
        yield from _program(words[0], site)
        name = Path(first).name
        if _PYTHON.fullmatch(name):
            yield from _python(rest, place, site, is_ours=False)
        elif name in SHELLS and rest and not rest[0][0].startswith("-"):
            yield from _shell_script(rest[0], site)


def _python(words: Sequence[Word], place: int, site: Site, is_ours: bool) -> Found:
    """What Python is asked to run, after the options that are known here.

    Args:
        is_ours: whether it is the Python that this is.
    """
    left = list(words)
    while left and left[0][0].startswith("-"):
        option, place = left.pop(0)
        if option == "-m":
            if is_ours or not left:
                yield from _module(left, place, site)
            return
        if option in ("-X", "-W") and left:
            left.pop(0)
        elif not _ALONE.fullmatch(option):
            return
    if left:
        yield from _script(left[0], site, is_ours)


def _script(word: Word, site: Site, is_ours: bool) -> Found:
    text, place = word
    path = site.look(text)
    if path is None:
        return
    if is_folder(path) and not text.endswith(".py"):
        if not (path / "__main__.py").is_file():
            yield f"{text} is a folder without a __main__.py; name a script in it", place, ""
        return
    fault, near = fault_of_file(path, text)
    if fault:
        yield fault, place, near
    elif is_ours and site.is_here and text.endswith(".py") and (mistake := _mistake_in(path)):
        yield f"{text}, {mistake}", place, ""


def _mistake_in(script: Path) -> str:
    """Why Python does not compile a script; empty if it does."""
    try:
        if not script.is_file() or script.stat().st_size > MAX_BYTES:
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


def _module(words: Sequence[Word], place: int, site: Site) -> Found:
    if not words:
        yield "-m needs the name of a module after it", place, ""
        return
    name, place = words[0]
    if not site.is_here or site.variables is None or site.installs:
        return
    if fault := fault_of_module(name, module_folders(site)):
        ending = ".py"
        is_file = name.endswith(ending) and Path(name).is_file()
        yield fault, place, name.removesuffix(ending) if is_file else ""


def module_folders(site: Site) -> list[str]:
    """Where Python looks for modules when it is started with `-m`."""
    given = (site.variables or {}).get("PYTHONPATH", "").split(os.pathsep)
    return [str(site.folder), *filter(None, given), *sys.path]


def fault_of_module(name: str, folders: Sequence[str], is_run: bool = True) -> str:
    """Why Python finds no module of a name; empty if it does, or if only an import could tell.

    Args:
        is_run: True if Python runs the module (`-m`), False if it imports it.
    """
    parts, where = name.split("."), list(folders)
    if not all(part.isidentifier() for part in parts):
        return f"{name} is not a module name; -m takes a name such as package.module; give a path without -m"
    for number in range(1, len(parts) + 1):
        full = ".".join(parts[:number])
        spec, is_known = _found(full, where, is_top=number == 1)
        if not is_known:
            return ""
        if spec is None:
            return f"Python finds no module {full} in {Path.cwd()}, in PYTHONPATH or among the installed packages"
        if spec.submodule_search_locations is None:
            if number < len(parts):
                return f"{full} is a module and not a package, so there is no {name} in it"
            return ""
        where = list(spec.submodule_search_locations)
        if _makes_modules(spec):
            return ""
    if not is_run:
        return ""
    spec, is_known = _found(f"{name}.__main__", where, is_top=False)
    if is_known and spec is None:
        return f"{name} is a package without a __main__.py, which -m would run"
    return ""


def _found(name: str, where: Sequence[str], is_top: bool) -> tuple[ModuleSpec | None, bool]:
    """Where a module is, and whether that could be found out."""
    try:
        for finder in [PathFinder, *(sys.meta_path if is_top else [])]:
            find = getattr(finder, "find_spec", None)
            spec = find(name, where if finder is PathFinder else None) if find else None
            if spec is not None:
                return spec, True
    except Exception:
        return None, False
    return None, True


def _makes_modules(package: ModuleSpec) -> bool:
    """Whether a package may have modules that no file shows, because it says so when it is imported."""
    try:
        text = Path(package.origin or "").read_text(errors="replace") if package.origin else ""
    except OSError:
        return True
    return "__path__" in text or "sys.modules" in text


def _shell_script(word: Word, site: Site) -> Found:
    text, place = word
    path = site.look(text)
    if path is None or ("/" not in text and site.is_here and _on_path(text, site)):
        return
    fault, near = fault_of_file(path, text)
    if fault:
        yield fault, place, near


def _program(word: Word, site: Site) -> Found:
    text, place = word
    if not text:
        yield "the name of the program is empty", place, ""
        return
    if "/" not in text:
        if site.is_here and not site.installs and _on_path(text, site) is None:
            here = Path(text).exists()
            hint = f"; the file {text} here is started as ./{text}" if here else unexpanded(text)
            yield f"there is no program {text} in the folders of PATH{hint}", place, f"./{text}" if here else ""
        return
    path = site.look(text)
    if path is None:
        return
    fault, near = fault_of_file(path, text)
    if fault and not ("Permission denied" in fault and os.access(path, os.X_OK)):
        yield fault, place, near
    elif not os.access(path, os.X_OK):
        yield f"{text} is not executable: chmod +x {text}, or name what runs it, such as bash, before it", place, ""
    elif site.is_here and (fault := _fault_of_image(path, text, site)):
        yield fault, place, ""


def _on_path(name: str, site: Site) -> str | None:
    return shutil.which(name, path=(site.variables or {}).get("PATH", os.defpath))


def _fault_of_image(path: Path, text: str, site: Site) -> str:
    """Why the kernel cannot start a file; empty if nothing shows that."""
    try:
        with path.open("rb") as file:
            begin = file.read(4096)
    except OSError:
        return ""
    if not begin.startswith(b"#!"):
        is_text = begin.isascii() and b"\0" not in begin
        if is_text and not _has_foreign_formats():
            return f"{text} is a text file without #! and an interpreter in its first line; put one before it"
        return ""
    line = begin[2:].split(b"\n", 1)[0].decode(errors="replace")
    words = line.split()
    if not words:
        return f"{text} names nothing after #! in its first line"
    if line.endswith("\r"):
        return f"{text} has Windows line endings, which are part of the name {words[0]} in its first line; use dos2unix"
    if not Path(words[0]).exists():
        return f"the first line of {text} names the interpreter {words[0]}, which does not exist"
    by_env = Path(words[0]).name == "env" and len(words) > 1 and "=" not in words[1] and not words[1].startswith("-")
    if by_env and _on_path(words[1], site) is None:
        return f"the first line of {text} names the interpreter {words[1]}, which is in no folder of PATH"
    return ""


def _has_foreign_formats() -> bool:
    """Whether the kernel knows programs by other signs than those that are checked here (binfmt_misc)."""
    folder = Path("/proc/sys/fs/binfmt_misc")
    try:
        return any(entry.name not in ("register", "status") for entry in folder.iterdir())
    except OSError:
        return False
