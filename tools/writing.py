"""Writes generated files, or says which are stale."""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path


def main(program: str, files: Mapping[str, Callable[[], str]]) -> int:
    """Write the files below the repository's root; with --check only compare them.

    Args:
        program: how it is called.
        files: path below the root, and what makes the content.

    Returns:
        0: the files are (now) as they should be; 1: `--check` found stale ones.
    """
    parser = argparse.ArgumentParser(prog=program, description="Write the generated files.")
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a file is stale")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository's root (default: this folder)")
    options = parser.parse_args()
    stale = []
    for name, content in files.items():
        path, text = options.root / name, content()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name} is stale; run: make generate" if options.check else f"wrote {name}")
    return 1 if options.check and stale else 0
