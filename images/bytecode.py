"""Compiles the modules in a folder that are not compiled yet: `bytecode.py FOLDER [PREFIX]`.

PREFIX is what stands before the folder only while the image is built. Pods cannot write bytecode, and compiling torch
at each start would cost seconds. The times of files do not survive every builder, so the bytecode does not depend on
them. (`python -m compileall` would compile all such bytecode anew, and put it into every layer again.)
"""

import compileall
import importlib.util
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from py_compile import PycInvalidationMode


def is_compiled(path: Path) -> bool:
    """Whether there is bytecode of a module."""
    return Path(importlib.util.cache_from_source(str(path))).exists()


def main(folder: str, prefix: str | None = None) -> None:
    """Compile them. What some packages ship for other versions of Python does not compile, and that is fine."""
    modules = [str(path) for path in Path(folder).rglob("*.py") if not is_compiled(path)]
    one = partial(
        compileall.compile_file,
        quiet=2,
        stripdir=prefix,
        # Without its prefix a path would be relative, and a stack trace could not show the lines of the source.
        prependdir="/" if prefix else None,
        invalidation_mode=PycInvalidationMode.UNCHECKED_HASH,
    )
    with ProcessPoolExecutor() as processes:
        compiled = sum(processes.map(one, modules, chunksize=20))
    print(f"compiled {compiled} of {len(modules)} modules")


if __name__ == "__main__":
    main(*sys.argv[1:])
