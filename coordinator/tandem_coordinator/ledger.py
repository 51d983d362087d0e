"""What the coordinator must remember over its own death: `coordinator.json` in the run directory.

It is written before a generation is handed out, so that a number is never given twice. It also says who writes it: a
coordinator whose node was cut off while another took over finds the other's name there and ends.
"""

import secrets
import time
from dataclasses import dataclass, field

from pydantic import Field, ValidationError

from tandem.durable import read_json_or_none, replace_json
from tandem.messages import Membership
from tandem.model import Model
from tandem.rundir import RunDir
from tandem.snapshot import GenerationView

HISTORY = 20
"""So many generations survive a restart of the coordinator with their reasons."""


class TakenOver(Exception):  # noqa: N818 - it is a state of the job
    """Another coordinator has claimed the run directory since."""


class Page(Model):
    """The content of `coordinator.json`."""

    owner: str
    """The coordinator that wrote it."""
    generation: int
    """The highest number given out."""
    membership: Membership | None = None
    """The generation with that number."""
    failures: int = 0
    """How much of the restart budget is used."""
    replicas: int
    """What the job said when `target` was set: a job that says something else now counts more."""
    target: int
    """Replicas wished for."""
    started_at: float | None = None
    """When the first generation opened, seconds since the epoch."""
    history: list[GenerationView] = Field(default=[])
    """The last generations, oldest first."""


@dataclass(frozen=True)
class Remembered:
    """What a predecessor left behind."""

    generation: int = 0
    membership: Membership | None = None
    failures: int = 0
    target: int | None = None
    started_at: float | None = None
    history: list[GenerationView] = field(default_factory=list)


class Ledger:
    """Reads and writes `coordinator.json`. Every method may block for as long as the disk does."""

    def __init__(self, rundir: RunDir) -> None:
        self._rundir = rundir
        self.owner = f"{time.time():.3f}-{secrets.token_hex(4)}"

    def claim(self, replicas: int) -> Remembered:
        """Read what is remembered, and become the one that writes.

        Args:
            replicas: what the job says now.

        Raises:
            OSError: the run directory cannot be written.
        """
        page = self._read()
        newest = self._rundir.newest_generation()
        if page is None:
            remembered = Remembered(generation=newest)
        else:
            # A generation that has a record but no page was handed out by a coordinator whose disk lost the page.
            current = page.generation >= newest
            remembered = Remembered(
                generation=max(page.generation, newest),
                membership=page.membership if current else None,
                failures=page.failures,
                target=page.target if page.replicas == replicas else None,
                started_at=page.started_at,
                history=page.history,
            )
        self._write(
            Page(
                owner=self.owner,
                generation=remembered.generation,
                membership=remembered.membership,
                failures=remembered.failures,
                replicas=replicas,
                target=remembered.target or replicas,
                started_at=remembered.started_at,
                history=remembered.history,
            )
        )
        return remembered

    def record(self, page: Page) -> None:
        """Make a page durable.

        Raises:
            TakenOver: another coordinator writes now.
            OSError: the run directory cannot be written.
        """
        current = self._read()
        if current is not None and current.owner != self.owner:
            raise TakenOver(f"coordinator {current.owner} has taken over this job")
        self._write(page)

    def _read(self) -> Page | None:
        data = read_json_or_none(self._rundir.coordinator_file)
        try:
            return None if data is None else Page.read(data)
        except ValidationError:
            return None

    def _write(self, page: Page) -> None:
        replace_json(self._rundir.coordinator_file, page.dump_brief())
