"""Whose operator is measured: what the simulation has to know of one, so that all are measured by the same code."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tandem_operator.kinds import Kind
from tests.support.cluster.pods import Namespace

Object = dict[str, Any]
NOBODY = "tandem-bench-nobody"
"""The scheduler that the pods ask for: there is none, so that no node takes them."""


class Running(Protocol):
    """An operator's process, ready."""

    @property
    def pid(self) -> int:
        """Of its process."""

    @property
    def has_ended(self) -> bool:
        """Whether it is not there any more."""

    def log(self) -> str:
        """What it has said."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An operator and its kind of job."""

    title: str
    """For tables."""
    kind: Kind
    """Of its jobs."""
    running: Callable[[Namespace, Path, int], AbstractContextManager[Running]]
    """The operator, ready, for a while: in a namespace, with a folder for its log and the port of the API server's
    proxy."""
    manifest: Callable[[int], Object]
    """One of the jobs."""
    pods: int
    """Of each job."""
    job: str
    """The label with which its pods tell their job."""
    role: str
    """The label with which its pods tell what they are for."""
    ending: frozenset[str]
    """Roles of pods that end with the training."""
    container: Callable[[str], str]
    """What the container of a role's pods is called."""
    phase: Callable[[Object], str]
    """In one word, of a status."""
    right: Callable[[Object], bool]
    """Whether a status says what is true once all pods of a job run."""
    step: Callable[[Object], int | None]
    """The step that a status tells, None if it tells none."""
    belongings: tuple[Kind, ...]
    """What is made for jobs, and has to be gone after them. All of it has the label of the job."""
    failed_look: str
    """Is in each line of the log that tells of a look at a job that did not succeed."""
