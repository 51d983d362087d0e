"""Reads a job that a program gives as a path, a text, a dict or a model into the source of a manifest.

All four become YAML and take the way of a file, so each mistake has the sentence that `tandem validate` has for it. A
dict and a model have no lines to name; the sentences name fields.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike, fspath
from typing import Any

from tandem.errors import ManifestError, UserError
from tandem.job.manifest.reading import read_source
from tandem.job.manifest.source import Source, parse
from tandem.job.resource import API_VERSION, KIND, DistributedTrainingJob, Spec
from tandem.model import Label
from tandem_cli.launch_line import is_launch_line


class Job(Spec):
    """A job as its name and the fields of its spec.

        Job(name="digits", trainer=Trainer(command=["python", "train.py"]), workers=Workers(replicas=2))

    The classes of the fields, such as `Trainer` and `Workers`, are in tandem.job.resource.
    """

    name: Label
    """Name of the job: lower-case letters, digits and dashes."""


JobInput = str | PathLike[str] | Mapping[str, Any] | DistributedTrainingJob | Job
"""A manifest: its path, its text (YAML or JSON), a dict, or a model of it."""
Overrides = Mapping[str, Any] | Sequence[str]
"""Fields to change: `{"workers.replicas": 4}`, or `["workers.replicas=4"]`."""
TEXT, DATA = "<text>", "<job>"
"""File names in the messages about a text, and about a dict or a model."""


def read_input(job: JobInput) -> Source:
    """Read a job without validating it.

    Raises:
        UserError: there is no such file, or it is not one YAML document.
    """
    if isinstance(job, Job):
        spec = job.model_dump(mode="json", exclude_unset=True)
        return _of_data({"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": spec.pop("name")}, "spec": spec})
    if isinstance(job, DistributedTrainingJob):
        # Only the fields that the user set: the cluster sets defaults, and other managers keep their fields.
        return _of_data(job.model_dump(mode="json", exclude_unset=True, exclude={"status"}))
    if isinstance(job, Mapping):
        return _of_data(dict(job))
    if not isinstance(job, str | PathLike):
        raise UserError(f"a job is a path, a text, a dict or a Job, and not {type(job).__name__}")
    text = fspath(job)
    if isinstance(job, str) and ("\n" in text or text.lstrip().startswith("{")):
        return parse(text.encode(), TEXT)
    if is_launch_line(text):
        raise UserError(f"{text} is a script; submit takes a manifest, which this command writes: tandem init {text}")
    return read_source(text)


@contextmanager
def without_lines() -> Iterator[None]:
    """Drop the positions in errors about a dict or a model: the user has not seen those lines.

    Raises:
        ManifestError: with the mistakes of the block.
    """
    try:
        yield
    except ManifestError as error:
        raise ManifestError(
            [
                replace(problem, line=0, column=0, excerpt="") if problem.file == DATA else problem
                for problem in error.problems
            ]
        ) from None


def settings_of(overrides: Overrides) -> tuple[str, ...]:
    """Return overrides as the option `--set` takes them.

    Raises:
        UserError: they are a text, or a value has no JSON form.
    """
    if isinstance(overrides, str):
        raise UserError(f'overrides are a dict or a list of texts: overrides=["{overrides}"]')
    if not isinstance(overrides, Mapping):
        return tuple(overrides)
    return tuple(
        f"{path}={value if isinstance(value, str) else as_json(value, path)}" for path, value in overrides.items()
    )


def _of_data(data: dict[str, Any]) -> Source:
    # JSON is YAML in which text stays text: the word `on`, or a digest such as 1e3.
    return parse(as_json(data, DATA, indent=1).encode(), DATA)


def as_json(value: Any, name: str, indent: int | None = None) -> str:
    """Return a value as JSON.

    Args:
        name: name of the value in the message about one without a JSON form.

    Raises:
        UserError: it has none.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} has a value that no manifest can have: {error}") from None
