"""An operator to be measured: everything that the simulation needs to know, so that the same code measures all of
them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tandem_operator.kinds import Kind
from tests.support.cluster.pods import Namespace

Object = dict[str, Any]
NOBODY = "tandem-bench-nobody"
"""Scheduler that the pods ask for: it does not exist, so that no node takes them."""


class Running(Protocol):
    """Running operator that is ready."""

    @property
    def pid(self) -> int:
        """Id of its process."""

    @property
    def has_ended(self) -> bool:
        """Whether it has ended."""

    def log(self) -> str:
        """Its log so far."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An operator and its kind of job."""

    title: str
    """Name in tables."""
    kind: Kind
    """Kind of its jobs."""
    running: Callable[[Namespace, Path, int], AbstractContextManager[Running]]
    """Runs the operator in a namespace, with a folder for its log and the port of the API server's proxy."""
    manifest: Callable[[int], Object]
    """Manifest of one of the jobs."""
    pods: int
    """Pods of each job."""
    job: str
    """Label of pods with the name of their job."""
    role: str
    """Label of pods with their role."""
    ending: frozenset[str]
    """Roles of pods that end with the training."""
    container: Callable[[str], str]
    """Name of the container of a role's pods."""
    phase: Callable[[Object], str]
    """Phase of a status, in one word."""
    right: Callable[[Object], bool]
    """Whether a status is correct once all pods of a job run."""
    step: Callable[[Object], int | None]
    """Step of a status; None if it has none."""
    belongings: tuple[Kind, ...]
    """Kinds of objects that are created for jobs and must be deleted with them, all with the label of the job."""
    failed_look: str
    """Text in each log line of a reconciliation that failed."""
