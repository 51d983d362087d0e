"""Compiles the modules in a folder that are not compiled yet: `bytecode.py FOLDER [PREFIX]`.

PREFIX is the folder's parent path that exists only while the image is built. Pods cannot write bytecode, and compiling
torch at each start would cost seconds. Not every builder preserves the times of files, so the bytecode does not depend
on them. (`python -m compileall` would compile all such bytecode again, and put it into every layer once more.)
"""

import compileall
import importlib.util
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from py_compile import PycInvalidationMode


def is_compiled(path: Path) -> bool:
    """Whether a module has bytecode."""
    return Path(importlib.util.cache_from_source(str(path))).exists()


def main(folder: str, prefix: str | None = None) -> None:
    """Compile all modules. Some packages contain files for other versions of Python, which do not compile; they are
    ignored."""
    modules = [str(path) for path in Path(folder).rglob("*.py") if not is_compiled(path)]
    compile_module = partial(
        compileall.compile_file,
        quiet=2,
        stripdir=prefix,
        # With a stripped prefix the path would be relative, and a stack trace could not show source lines.
        prependdir="/" if prefix else None,
        invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
    )
    with ProcessPoolExecutor() as processes:
        compiled = sum(processes.map(compile_module, modules, chunksize=20))
    print(f"compiled {compiled} of {len(modules)} modules")


if __name__ == "__main__":
    main(*sys.argv[1:])
