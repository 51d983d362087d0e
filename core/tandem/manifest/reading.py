"""From a manifest to a job, or to the list of everything that is wrong with it.

`tandem validate` and `tandem run` read a file here. All mistakes are found in one go, each with its line, what was
written, what may stand there, and the name that was probably meant. What the API server would take, this takes, and the
other way round: an empty field (`config:`) counts as left out, and names are camelCase only.

Pydantic does the checking, `tandem.manifest.source` knows the places, `tandem.manifest.wording` finds the words.
"""

import copy
import itertools
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path as FilePath
from typing import Any

from pydantic import ValidationError

from tandem.errors import ManifestError, Problem, UserError
from tandem.job import API_VERSION, KIND, DistributedTrainingJob
from tandem.manifest.fields import Node, Path, nearest, tree
from tandem.manifest.overrides import apply_overrides
from tandem.manifest.source import MOST_BYTES, Source, parse
from tandem.manifest.wording import placed, problems
from tandem.unmet import Unmet

__all__ = ["STDIN", "apply_overrides", "job_of", "read_job", "read_source"]

STDIN = "-"
"""The file name that means standard input."""
MOST_NAMES = 1_000
"""Of a folder that are compared with a misspelt one."""


def read_job(file: FilePath | str, overrides: Sequence[str] = ()) -> DistributedTrainingJob:
    """The job of a manifest file (`-`: standard input), with `path=value` overrides applied.

    Raises:
        UserError: the file cannot be read, or the manifest has mistakes (a ManifestError then, with all of them).
    """
    return job_of(read_source(file), overrides)


def read_source(file: FilePath | str) -> Source:
    """The one YAML document of a file, not yet checked.

    Raises:
        UserError: the file cannot be read, or is not one YAML document.
    """
    return parse(_content(file), "<stdin>" if str(file) == STDIN else str(file))


def job_of(source: Source, overrides: Sequence[str] = ()) -> DistributedTrainingJob:
    """The job of a document that was read already.

    Raises:
        ManifestError: with every mistake, in the order of the lines.
    """
    if not isinstance(source.data, dict):
        place = source.values[()]
        what = "a list" if isinstance(source.data, list) else "a single value"
        message = f"a manifest is a group of fields that begins with apiVersion: {API_VERSION}, not {what}"
        raise ManifestError([source.problem(place, (), message, given="")])
    if foreign := _foreign(source):
        raise ManifestError([foreign])
    data = apply_overrides(source.data, overrides)
    _drop_nulls(data, tree(DistributedTrainingJob))
    try:
        return DistributedTrainingJob.parse(data)
    except ValidationError as error:
        details = error.errors(include_url=False)
    # A model with unknown fields never comes to its rules. Without those fields it does.
    unknown = [detail["loc"] for detail in details if detail["type"] == "extra_forbidden"]
    rest = copy.deepcopy(data)
    for place_of in unknown:
        _remove(rest, place_of)
    try:
        DistributedTrainingJob.parse(rest)
    except ValidationError as error:
        seen = {(detail["type"], detail["loc"]) for detail in details}
        details += [d for d in error.errors(include_url=False) if (d["type"], d["loc"]) not in seen]
    raise ManifestError(problems(details, source, data, overrides))


def refuse(found: Iterable[Unmet], source: Source, overrides: Sequence[str] = ()) -> None:
    """End where a job cannot run.

    Raises:
        ManifestError: with everything that keeps it from running, each at its place in the document.
    """
    if wrong := [placed(source, overrides, one.field, one.message, one.suggestion) for one in found if one.fails]:
        raise ManifestError(sorted(wrong))


def _content(file: FilePath | str) -> bytes:
    if str(file) == STDIN:
        return sys.stdin.buffer.read(MOST_BYTES + 1)
    path = FilePath(file)
    try:
        if path.is_dir():
            raise UserError(f"{file} is a folder; name a manifest file in it")
        with path.open("rb") as opened:
            return opened.read(MOST_BYTES + 1)
    except FileNotFoundError:
        near = similar_file(path)
        raise UserError(f"{file} does not exist" + (f"; did you mean {near}?" if near else "")) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def similar_file(path: FilePath) -> str:
    """The file beside a missing one that was probably meant, as a path; empty if none comes near."""
    try:
        names = [entry.name for entry in itertools.islice(path.parent.iterdir(), MOST_NAMES)]
    except OSError:
        return ""
    name = nearest(path.name, names)
    return str(path.with_name(name)) if name else ""


def _foreign(source: Source) -> Problem | None:
    """What shows that this is no manifest of ours at all: further messages would only bury that."""
    kind = source.data.get("kind")
    if not isinstance(kind, str) or kind == KIND or nearest(kind, [KIND]):
        return None
    message = f"this is a {kind}, not a {KIND} of {API_VERSION}"
    return source.problem(source.values[("kind",)], ("kind",), message, allowed=KIND)


def _drop_nulls(value: Any, node: Node | None) -> None:
    """Take out the fields that are null, as the API server does; what a template holds is not touched."""
    if node is None:
        return
    if isinstance(value, dict):
        for name in list(value):
            child = node.child(name)
            if value[name] is None and child is not None:
                del value[name]
            else:
                _drop_nulls(value[name], child)
    elif isinstance(value, list):
        for item in value:
            _drop_nulls(item, node.items)


def _remove(data: Any, path: Path) -> None:
    for part in path[:-1]:
        data = data[part]
    del data[path[-1]]
