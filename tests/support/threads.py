"""Ranks as threads of one process: for what ranks agree on, where processes would add nothing but time."""

import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tandem_trainer.process_group import Group


class PeerGone(RuntimeError):  # noqa: N818 - it says what happened
    """A rank ended before it said what the others wait for."""


class _Meeting:
    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.rounds: dict[int, dict[int, str]] = {}
        self.gone: set[int] = set()
        self.objects: list[Any] = [None] * size

    def hold(self, number: int, rank: int, value: str) -> list[str]:
        with self.changed:
            said = self.rounds.setdefault(number, {})
            said[rank] = value
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(said) == self.size or self.gone - said.keys(), timeout=30)
            if len(said) < self.size:
                raise PeerGone(f"ranks {sorted(self.gone - said.keys())} are gone")
            return [said[one] for one in range(self.size)]

    def leave(self, rank: int) -> None:
        with self.changed:
            self.gone.add(rank)
            self.changed.notify_all()


class ThreadGroup(Group):
    """One of the threads; what ranks say to each other goes through a list."""

    def __init__(self, rank: int, meeting: _Meeting) -> None:
        self.rank, self.world_size, self.local_rank, self.device = rank, meeting.size, rank, torch.device("cpu")
        self._meeting, self._round = meeting, 0

    def gather(self, value: dict[str, Any]) -> list[dict[str, Any]]:
        self._round += 1
        return [json.loads(one) for one in self._meeting.hold(self._round, self.rank, json.dumps(value))]

    def copy_from(self, rank: int, tensors: Sequence[Tensor]) -> None:
        for mine, first in zip(tensors, self.exchange(list(tensors))[rank], strict=True):
            mine.copy_(first)
        self.gather({})

    def hand_over(self, rank: int, tensors: Sequence[Tensor], keeps: bool) -> None:
        self.copy_from(rank, [tensor.clone() for tensor in tensors] if keeps else tensors)

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, the very objects, in rank order."""
        self._meeting.objects[self.rank] = value
        self.gather({})
        found = list(self._meeting.objects)
        self.gather({})
        return found

    def barrier(self) -> None:
        self.gather({})


class Control:
    """The collective of a vote, between ranks that are threads."""

    def __init__(self, group: ThreadGroup) -> None:
        self._group = group

    def allreduce(self, ballots: list[Tensor]) -> "Control":
        (ballot,) = ballots
        ballot.copy_(torch.stack(self._group.exchange(ballot.clone())).sum(0))
        return self

    def wait(self) -> None:
        """It is done."""


def on_ranks(size: int, do: Callable[[Group], Any]) -> list[Any]:
    """What a function returned, or raised, on each rank of a group, in rank order."""
    meeting = _Meeting(size)
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = do(ThreadGroup(rank, meeting))
        except Exception as error:
            found[rank] = error
        finally:
            meeting.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found
