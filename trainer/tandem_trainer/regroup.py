"""A regroup: a rank leaves a group that has lost a member, and goes on in the next one, in the same process.

    regroup = Regroup(pulse, stop)
    regroup.survive(group)            # from here on
    ...
    except Exception as error:        # a step did not come to its end
        if not regroup.follows(error):
            raise
        group = regroup.join_next()

**A step is a transaction.** A rank takes a step if it has all gradients of the global batch, and otherwise not at all:
the optimizer runs when the last all-reduce has returned, and has no collectives. Two ranks that have taken step s
therefore hold the same state, and none is two steps ahead of another, because the gradients of s + 1 need all ranks. So
an error in a collective leaves a rank with the state after a whole step, of which the next group goes on
(tandem_trainer.continuation). docs/decisions/0052 lists what a rank may be doing meanwhile.

**How a rank leaves.** The coordinator decides that a generation is over. Its word reaches the watchdog thread of the
rank by the agent and the pulse, and that thread shuts the connections of the group down
(tandem_trainer.connections), so that the training thread gets an error out of any collective. A rank that gets such an
error by itself, because its peer is gone, says so, and its agent reports it. It then waits for its place in the next
generation, for as long as that takes. An agent that ends takes its ranks with it.

Only gloo, for the time being: under NCCL the training thread runs ahead of the GPU, so an optimizer step may be queued
behind an all-reduce that is ended, and would take gradients that are not whole.
"""

import logging
import os
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tandem.job.resource import DistributedTrainingJob
from tandem.processes.launch import GENERATION
from tandem_trainer.checkpoint.writer import Superseded
from tandem_trainer.connections import Connections
from tandem_trainer.failure import is_of_peers
from tandem_trainer.process_group import Group, GroupLost
from tandem_trainer.pulse import MIXED, PARKED, PREPARED, RESTARTS, SURVIVES, Pulse, RankPlace

log = logging.getLogger(__name__)

WAIT_SECONDS = 1.0
"""Interval at which a rank that waits for its next place looks whether it was asked to end, in seconds."""
RETRY_SECONDS = 0.05
"""Pause before a rank tries again to join a generation that is not closed, in seconds."""


def can_regroup(job: DistributedTrainingJob, device: torch.device) -> bool:
    """Whether the ranks of a job can go on in another group, on a device of this machine."""
    return job.spec.regroups and device.type == "cpu" and sys.platform == "linux"


class Regroup:
    """Takes this rank from one generation to the next.

    Args:
        pulse: channel to the agent.
        is_stopping: returns whether this process is to end.
    """

    def __init__(self, pulse: Pulse, is_stopping: Callable[[], bool]) -> None:
        self._pulse, self._is_stopping = pulse, is_stopping
        self._group: Group | None = None
        self._joining: Connections | None = None
        self._survives = False
        pulse.on_regroup = self._interrupt

    @classmethod
    def create_for(
        cls, job: DistributedTrainingJob, device: torch.device, pulse: Pulse | None, is_stopping: Callable[[], bool]
    ) -> "Regroup | None":
        """Create one for a task; None if the job restarts its ranks, or they cannot regroup."""
        return None if pulse is None or not can_regroup(job, device) else cls(pulse, is_stopping)

    def survive(self, group: Group) -> None:
        """Declare that this rank holds a state with which it can go on in another group."""
        group.allow_interrupts()
        self._group, self._survives = group, True
        self._pulse.set_regroup_state(SURVIVES)

    def withdraw(self) -> None:
        """Declare that this rank cannot go on in another group any more."""
        self._survives = False
        self._pulse.set_regroup_state(RESTARTS)

    def end_mixed(self, group: Group) -> None:
        """Declare that all ranks of a group have to end, because they come from different places of the script.
        Collective."""
        self._survives = False
        self._pulse.set_regroup_state(MIXED)
        try:
            # A rank whose peer has ended before might not learn it.
            group.barrier()
        except Exception as error:
            if not (isinstance(error, GroupLost) or is_of_peers(error)):
                raise
            log.info("a rank of a mixed group has ended: %r", error)

    def check(self) -> None:
        """Look, between two steps, whether the group is over.

        Raises:
            GroupLost: it is.
        """
        if self._survives and self._pulse.order == "regroup":
            raise GroupLost

    def follows(self, error: Exception) -> bool:
        """Whether a regroup follows an error: the group is over, and this rank can go on without it."""
        return self._survives and (isinstance(error, GroupLost) or is_of_peers(error))

    def join_next(self) -> Group:
        """Leave the group, if this rank is in one, wait for a place in the next generation, and join it. Where that one
        ends before it is complete, the one after it, and so on.

        Raises:
            Superseded: this process was asked to end meanwhile.
        """
        if self._group is not None:
            self._group.abandon()
        self._group = None
        while True:
            place = self._wait_for_place()
            _set_environment(place)
            if not self._survives:
                # It has no state yet that could outlive the group which it joins.
                self._pulse.set_regroup_state(RESTARTS)
            self._pulse.enter(place)
            self._joining = Connections()
            try:
                self._group = Group.rejoin(self._joining)
                self._group.allow_interrupts()
            except Exception as error:
                if not is_of_peers(error):
                    raise
                time.sleep(RETRY_SECONDS)
            else:
                return self._group
            finally:
                self._joining = None

    def _wait_for_place(self) -> RankPlace:
        """Wait for a place in a newer generation than the current one."""
        self._pulse.set_regroup_state(PARKED if self._survives else PREPARED)
        while True:
            self._pulse.order_changed.clear()
            if (place := self._pulse.next_place()) is not None:
                return place
            if self._is_stopping():
                raise Superseded("asked to end while it waited for the next generation")
            self._pulse.order_changed.wait(WAIT_SECONDS)

    def _interrupt(self) -> None:
        """End the collectives of the group, or of the one that is being joined. Called by the watchdog."""
        if (joining := self._joining) is not None:
            joining.shut_down()
        elif (group := self._group) is not None:
            group.interrupt()


class StepBuffers:
    """The buffers of a model before a step, to put back if the step is not taken: a forward pass changes them, such as
    the running statistics of batch norm.

    Rejected: a copy of the whole state. Weights and moments change only where gradients are whole.
    """

    def __init__(self, model: nn.Module) -> None:
        self._places = [(module, name) for module in model.modules() for name in module._buffers]
        self._copies: list[Tensor | None] = []

    def hold(self, group: Group, copies: bool = True) -> None:
        """Copy the buffers of rank 0 to all ranks, as DistributedDataParallel does, and keep a copy. Collective.

        Args:
            copies: whether to keep a copy; ranks may differ in it.
        """
        current = [module._buffers[name] for module, name in self._places]
        group.copy_from_first([buffer for buffer in current if buffer is not None])
        self._copies = [None if buffer is None else buffer.clone() for buffer in current] if copies else []

    def drop(self) -> None:
        """Forget the copy: the step is taken."""
        self._copies = []

    def put_back(self) -> None:
        """Restore the last copy, if there is one."""
        for (module, name), copy in zip(self._places, self._copies, strict=False):
            buffer = module._buffers[name]
            if buffer is not None and copy is not None:
                buffer.copy_(copy)
        self.drop()


def _set_environment(place: RankPlace) -> None:
    """Set torchrun's variables for a place."""
    os.environ.update(
        {
            "RANK": str(place.rank),
            "WORLD_SIZE": str(place.world_size),
            "MASTER_ADDR": place.address,
            "MASTER_PORT": str(place.port),
            GENERATION: str(place.generation),
        }
    )
