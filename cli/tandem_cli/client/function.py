"""A function as a job: the ranks import it by module and name from the folder of the code, and call it with arguments
that are JSON. Nothing is pickled.

A function of a notebook's cell is in no file. Its source becomes the module `CELL` in a copy of the folder, so it may
use only what it imports or defines itself.
"""

import builtins
import inspect
import json
import os
import symtable
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from types import FunctionType
from typing import Any

from tandem.errors import UserError
from tandem.formatting import one_line
from tandem.job.resource import API_VERSION, KIND
from tandem.script import STEP_LOG
from tandem_cli.client.job_input import as_json
from tandem_cli.launch_line import to_job_name
from tandem_cli.packing import copy_packed

CELL = "tandem_cell"
"""Module with the source of a function that is in no file."""
PROGRAM = (
    "from importlib import import_module; from json import loads; from sys import argv; "
    "import_module({module!r}).{name}(*loads(argv[1]), **loads(argv[2]))"
)
"""Program of the ranks, for `python -c`."""


@contextmanager
def function_job(
    function: Callable[..., object],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    workers: int,
    name: str,
    code: Path,
) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yield the manifest of a job that calls a function, and the folder of its code, which may be temporary.

    Args:
        name: name of the job; empty: derived from the function.

    Raises:
        UserError: the ranks could not find or call the function.
    """
    if STEP_LOG in os.environ:
        raise UserError('train was called in a job, which imports this file; put it under if __name__ == "__main__":')
    function = _checked(function)
    arguments = [_argument(value, function) for value in (list(args), dict(kwargs))]
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise UserError(f"{function.__name__} cannot be called so: {error}") from None
    with TemporaryDirectory(prefix="tandem-train-") as scratch:
        folder, module = code, CELL
        file = Path(getattr(inspect.unwrap(function), "__code__", function.__code__).co_filename)
        # With a debugger, a notebook's kernel writes its cells to files.
        is_interactive = function.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
        if file.is_file() and not (is_interactive and not file.resolve().is_relative_to(code.resolve())):
            module = _module(function, file, code)
        else:
            folder, source = Path(scratch), _source(function)
            copy_packed(code, folder)
            (folder / f"{CELL}.py").write_text(source, encoding="utf-8")
        program = PROGRAM.format(module=module, name=function.__name__)
        manifest = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name or to_job_name(function.__name__)},
            "spec": {
                "trainer": {"command": ["python", "-c", program], "args": arguments},
                "workers": {"replicas": workers},
            },
        }
        yield manifest, folder


def _checked(function: Callable[..., object]) -> FunctionType:
    name = getattr(function, "__qualname__", "")
    if not isinstance(function, FunctionType) or not name.isidentifier():
        raise UserError(
            "train takes a function that a file or a cell defines with def at its top level, and not "
            f"{one_line(name or repr(function))}: the job finds it by its name"
        )
    if any(check(function) for check in (inspect.iscoroutinefunction, inspect.isgeneratorfunction)):
        raise UserError(f"{name} is a coroutine or a generator, which a call does not run")
    return function


def _argument(value: Any, function: FunctionType) -> str:
    text = as_json(value, f"the call of {function.__name__}")
    if (received := json.loads(text)) != value:
        raise UserError(f"arguments are sent as JSON, and {value!r} would be received as {received!r}")
    # In the arguments of a command $TANDEM_RUN_DIR is replaced.
    return text.replace("$", r"\u0024")


def _module(function: FunctionType, file: Path, code: Path) -> str:
    """Return the name by which the ranks import the module of a function."""
    module = function.__module__
    if module == "__main__":
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = file.stem if spec is None else spec.name
    path = code.joinpath(*module.split("."))
    # The file may define it, and hide it afterwards behind another object of its name.
    is_named = getattr(sys.modules.get(function.__module__), function.__name__, None) is function
    candidates = (path.parent / f"{path.name}.py", path / "__init__.py")
    if not is_named or not any(candidate.exists() and candidate.samefile(file) for candidate in candidates):
        raise UserError(
            f"the job would import {function.__name__} from {module} in the folder {code}, and it is in {file}; "
            "give the folder to import from: code=…"
        )
    return module


def _source(function: FunctionType) -> str:
    """Return the source of a function that is in no file.

    Raises:
        UserError: it is unknown, or it uses names that the function does not define.
    """
    name = function.__name__
    try:
        source = dedent(inspect.getsource(function))
        names = sorted(_global_names(symtable.symtable(source, CELL, "exec")) - {name})
    except (OSError, SyntaxError):
        raise UserError(f"the source of {name} is unknown; define it in a file, or in a cell of a notebook") from None
    if names := [free for free in names if not _is_builtin(free)]:
        raise UserError(
            f"{name} uses {', '.join(names)}, and a job gets only the source of a function of a cell: import or define "
            f"that in {name}, or move it to a file of the folder that code=… names"
        )
    return source


def _global_names(table: symtable.SymbolTable) -> set[str]:
    # An assignment to a name that the function declares global need not define it: `count += 1`.
    names = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_declared_global() or (symbol.is_global() and symbol.is_referenced())
    }
    return names.union(*map(_global_names, table.get_children()))


def _is_builtin(name: str) -> bool:
    # IPython adds `display` and `get_ipython`, which a job does not have.
    value = getattr(builtins, name, None)
    return hasattr(builtins, name) and not (getattr(value, "__module__", None) or "").startswith("IPython")
