"""A session that goes on in another group: the loop is the script's, and so is the step that the group was lost in.

**What the loop sees.** Nothing is raised into it. When the group is lost in the backward pass of step s, the pass
completes with gradients that are not those of the global batch, and the step is *lost*. The script's code of the step
runs to its end, and takes no effect on what the session holds: steps of the optimizers and updates of the average are
left out. When the script asks for the next batch, the session puts the rest back, joins the next group, and yields step
s again, with the samples as they are dealt there. Control returns to the script where it always does: at the `for`.

    the loop does                     in a lost step
    forward, backward                 completes; no exception, so no `with` or `finally` of the script sees one
    optimizer.step()                  left out; a step of an optimizer that was not registered raises (GroupLost)
    average.update_parameters(…)      left out
    schedule.step(), seen["n"] += 1   happens, and is put back: registered states are copied when a step begins
    lr of a parameter group           put back, with all other hyperparameters
    buffers (batch norm)              put back
    gradients                         dropped
    random numbers                    seeded by step and rank in each step, so they need nothing
    session.stop(reason)              forgotten: the step that is taken again may ask for it
    break, return, an error           this rank ends, and all restart from a checkpoint if none goes on
    variables of the script's own     have seen the step twice, unless session.keep registers them

**A step is a transaction** (tandem_trainer.regroup) as long as one holds: the state changes only in steps of the
registered optimizers, once all collectives of the step are over. The session does not believe that; it looks. In each
step it checks that every optimizer took its step, that no gradients were averaged after one had, and that the script
has called no collectives and made no groups of its own. At the second step it checks that no gradients were left over
when the backward pass began (accumulation over several batches). After a lost step it checks that the weights are what
they were when it began. A loop for which one of these fails *restarts* from then on, as all do without this module,
and says why. So does one that has asked for its rank or the number of ranks before the loop: these change now; and one
with a model that learns and was not distributed, as in a script that distributes only where there are several ranks.
Which collectives a rank calls never follows from a reason that it alone knows.

**Joining.** A new rank runs the script from its beginning, where others are in the middle of their loops, so the two
would call different collectives. Therefore it runs alone up to `session.batches` (standby), and joins there: that is
where ranks that live join, too. Ranks of the first generation join where the session is created; the first message of
each group says which way its ranks come, and mixed groups restart: all their ranks from the beginning of the script.

Rejected: an exception with a `try` of the user's (a loop that nobody writes right, and a warm restart needs none),
a copy of weights and moments before each step (twice the memory), the regroup inside of the hook (the forward pass of
the samples that are dealt anew is the script's), greenlets (user code on another stack).
"""

import copy
import copyreg
import functools
import logging
import os
import types
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from tandem.processes.launch import FAILED_STANDBY, RUN_DIR, STANDBY
from tandem.rundir.layout import RunDir
from tandem_trainer.checkpoint.state import put_back
from tandem_trainer.checkpoint.train_state import Stateful
from tandem_trainer.group_model import GroupModel, PassState, sequence_number
from tandem_trainer.process_group import Group, GroupLost, PeerFault, rank_device
from tandem_trainer.pulse import Pulse
from tandem_trainer.rank_context import SIGNAL_PATIENCE_SECONDS, StopRequest
from tandem_trainer.regroup import Regroup, StepBuffers, can_regroup
from tandem_trainer.uncompiled import uncompiled

log = logging.getLogger(__name__)

MAX_COPIED_BYTES = 2**22
"""Size of registered states up to which they are copied in each step, in bytes: a millisecond."""

State = Stateful | MutableMapping[str, Any]


class SessionRegroup:
    """Takes a session from one group to the next, or says why it restarts instead.

    Args:
        rundir: the run directory.
        pulse: channel to the agent.
        stop: request to save and leave.
        device: device of this rank.
    """

    def __init__(self, rundir: RunDir, pulse: Pulse, stop: StopRequest, device: torch.device) -> None:
        self._rundir, self._stop, self._device = rundir, stop, device
        self._trainer = rundir.read_job().spec.trainer
        self._regroup = Regroup(pulse, stop.is_signalled)
        self.is_standby = bool(os.environ.get(STANDBY))
        """Whether this rank has no place in a group yet."""
        self.passes = PassState()
        """State of the passes of the current step."""
        self.reason = ""
        """Reason why the session restarts when its group changes; empty if it goes on."""
        self.collectives = 0
        """Collectives of the current group that Tandem has called."""
        self.models: list[GroupModel] = []
        """Models whose gradients are averaged in one group after another; as many on every rank."""
        self._guard: StepGuard | None = None
        self._survives = self._in_step = False
        if os.environ.get(FAILED_STANDBY):
            self.refuse("the script failed when it ran alone up to its loop")

    @classmethod
    def create(
        cls, rundir: RunDir, pulse: Pulse | None, stop: StopRequest, device: torch.device | None
    ) -> "SessionRegroup | None":
        """Create one for a session; None if the job restarts its ranks, or they cannot regroup here."""
        if pulse is None or not os.environ.get(RUN_DIR):
            return None
        # The agent does not know of a device that the script has chosen.
        devices = [rank_device()] if device is None else [rank_device(), device]
        job = rundir.read_job()
        return cls(rundir, pulse, stop, devices[-1]) if all(can_regroup(job, place) for place in devices) else None

    @property
    def is_lost(self) -> bool:
        """Whether the step that the script is in was lost with its group."""
        return self._in_step and self.passes.is_lost

    def refuse(self, reason: str) -> None:
        """Restart when the group changes, from now on. The first reason stays.

        Raises:
            PeerFault: this rank has no place in a group yet, and needs one to go on.
        """
        if self.reason:
            return
        self.reason, self.passes.is_tolerant = reason, False
        if self.is_standby:
            raise PeerFault(f"this rank cannot prepare itself for a group: {reason}")
        if self._survives:
            self._survives, self._stop.patience = False, 0.0
            self._regroup.withdraw()
            self._report()

    def _report(self) -> None:
        # The first rank reports for all. A warning, because scripts show no other messages by default.
        if os.environ.get("RANK") == "0":
            log.warning("this session restarts when its group changes: %s", self.reason)

    # Groups

    def join_first(self) -> Group:
        """Join the group of a rank that has just started: its own alone, if it has no place in another one.

        Raises:
            PeerFault: other ranks of the group are in their loops.
        """
        if self.is_standby:
            return Group(0, 1, 0, self._device)
        group = Group.join(watched=True, device=self._device)
        self._compare_starts(group, "script")
        return group

    def join_next(self) -> Group:
        """Wait for a place in the next group, and join it in the loop.

        Raises:
            PeerFault: other ranks of the group run the script from its beginning, or this one has prepared itself for
                another.
            Superseded: this process was asked to end meanwhile.
        """
        group = self._regroup.join_next()
        self.is_standby, self.collectives = False, 0
        if not self._survives and self._rundir.read_job().spec.trainer != self._trainer:
            raise PeerFault("the command has changed since this rank prepared itself")
        self._compare_starts(group, "loop")
        return group

    def _compare_starts(self, group: Group, start: str) -> None:
        starts = {str(view["start"]) for view in group.gather({"start": start})}
        if starts != {start}:
            self._regroup.end_mixed(group)
            raise PeerFault("some ranks run the script from its beginning, and others are in its loop")

    def agreed_reason(self, group: Group) -> str:
        """Return why the session restarts when its group changes, equal on all ranks: it does if one of them has a
        reason. Empty if it goes on. Collective."""
        reasons = [str(view["reason"]) for view in group.gather({"reason": self.reason})]
        problem = next(filter(None, reasons), "")
        if problem:
            self.refuse(problem)
        return problem

    def agree(self, group: Group) -> bool:
        """Return whether all ranks of a group can go on in another one. Collective."""
        if self._guard is None:
            self.refuse("session.keep was not called")
        elif sequence_number() != self.collectives or _group_count() > (group.world_size > 1):
            self.refuse("the script has collectives or process groups of its own")
        elif not self._guard.is_averaged_by(self.models):
            self.refuse("the script has not distributed each model that learns")
        # A rank that survives reports its reason when it refuses.
        is_reported = self._survives
        problem = self.agreed_reason(group)
        if problem and not is_reported:
            self._report()
        if self._guard is not None:
            self._guard.watch_buffers(self.models, with_registered=not problem)
        return not problem

    def survive(self, group: Group) -> None:
        """Declare that this rank can go on in another group, as the ranks have agreed."""
        assert self._guard is not None
        self._regroup.survive(group)
        self._survives = self.passes.is_tolerant = True
        self._stop.patience = SIGNAL_PATIENCE_SECONDS
        self._guard.begin_generation()

    def follows(self, error: Exception) -> bool:
        """Whether a regroup follows an error that was raised between two steps of the script."""
        return self._regroup.follows(error)

    # Steps

    def watch(
        self,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        average: nn.Module | None,
        states: Mapping[str, State],
    ) -> None:
        """Watch what the script registers: leave out updates in lost steps, and put back the rest."""
        if self._guard is not None:
            self.refuse("session.keep was called twice")
            return
        guard = self._guard = StepGuard(model, [*optimizers], states, self.passes)
        if average is not None and not isinstance(average, AveragedModel):
            self.refuse("the average is no AveragedModel of torch's")
        elif problem := guard.problem():
            self.refuse(problem)
        elif average is not None:
            guard.leave_out_updates(average)

    def begin_step(self, group: Group) -> None:
        """Copy what the next step of the script may change. Collective.

        Raises:
            GroupLost: the group is over.
        """
        assert self._guard is not None
        if not self._survives:
            # A rank may refuse in the middle of a generation, so all of one call the same collectives.
            if self.models:
                self._guard.synchronise(group)
            return
        self._regroup.check()
        self._guard.begin(group)
        self._in_step = True

    def end_step(self) -> None:
        """Check what the script has done in its step.

        Raises:
            GroupLost: the step was lost, and `leave` puts back what it has changed.
        """
        if not self._in_step:
            return
        assert self._guard is not None
        if self.is_lost:
            raise GroupLost from self.passes.error
        self._in_step = False
        if self._survives and (problem := self._guard.violation()):
            self.refuse(problem)

    def examine(self, loss: Tensor) -> None:
        """Examine the gradients when the backward pass of a loss begins, where that is due."""
        if self._survives and self._guard is not None and self._guard.is_second and loss.requires_grad:
            self._guard.is_second = False
            loss.register_hook(lambda _: self._examine_gradients())  # type: ignore[no-untyped-call]

    def _examine_gradients(self) -> None:
        assert self._guard is not None
        if self._guard.has_gradients():
            self.refuse("gradients of one step are still there in the next one")

    def leave(self) -> bool:
        """Put back what a lost step has changed; returns whether there was one.

        Raises:
            PeerFault: not all can be put back.
        """
        if not self._in_step:
            return False
        assert self._guard is not None
        self._in_step, is_lost = False, self.passes.is_lost
        if is_lost and (self.reason or (problem := self._guard.put_back())):
            raise PeerFault(f"the group was lost in a step that cannot be taken again: {self.reason or problem}")
        if not is_lost:
            # The step had not begun.
            self._guard.put_back()
        return is_lost

    def close(self) -> None:
        """Restart when the group changes: no step follows."""
        self._survives, self._stop.patience, self.passes.is_tolerant = False, 0.0, False
        self._regroup.withdraw()
        if self._guard is not None:
            self._guard.close()


class StepGuard:
    """Guards the state that a session holds against a step that is not taken.

    Args:
        model: all models.
        optimizers: all optimizers.
        states: other objects with a state.
        passes: state of the passes of the current step.
    """

    def __init__(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], states: Mapping[str, State], passes: PassState
    ) -> None:
        self._model, self._parameters = model, [*model.parameters()]
        self._optimizers, self._states, self._passes = optimizers, states, passes
        self._averages: list[Tensor] = []
        self._updated: set[int] = set()
        self._copies: dict[str, Any] = {}
        self._hyperparameters: list[list[dict[str, Any]]] = []
        self._versions = (0, 0)
        self._digest: int | None = None
        self._first_collective = self._groups = 0
        self._buffers = StepBuffers(model)
        self._steps = 0
        self.is_second = False
        """Whether the current step is the second of its generation, whose gradients have not been examined."""
        for optimizer in optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                self._leave_out_steps(optimizer)
        self._hook = register_optimizer_step_pre_hook(self._before_update)

    def problem(self) -> str:
        """Return what of the registered state cannot be put back, as a clause; empty if nothing."""
        if not self._optimizers or not all(
            isinstance(optimizer, torch.optim.Optimizer) for optimizer in self._optimizers
        ):
            return "session.keep has no optimizer of torch's"
        sizes = {name: _size(_state_of(state)) for name, state in self._states.items()}
        large = [name for name, size in sizes.items() if size > MAX_COPIED_BYTES]
        return f"{large[0]!r} is too large to be copied in each step" if large else ""

    def is_averaged_by(self, models: Iterable[GroupModel]) -> bool:
        """Whether the gradients of all parameters that learn are averaged in the groups of some models."""
        averaged = {id(parameter) for model in models for parameter in model.parameters()}
        return all(id(parameter) in averaged for parameter in self._parameters if parameter.requires_grad)

    def watch_buffers(self, models: Iterable[GroupModel], with_registered: bool) -> None:
        """Synchronise the buffers of some models from now on.

        Args:
            with_registered: also those of the registered model.
        """
        self._buffers = StepBuffers(nn.ModuleList([*models, *([self._model] if with_registered else [])]))

    def leave_out_updates(self, average: AveragedModel) -> None:
        """Leave out updates of an average in lost steps."""
        self._averages = [*average.parameters()]
        average.__class__ = _guarded(type(average), self._passes)

    def _leave_out_steps(self, optimizer: torch.optim.Optimizer) -> None:
        step = optimizer.step

        @functools.wraps(step)
        def guarded(_: torch.optim.Optimizer, *arguments: Any, **options: Any) -> Any:
            if not self._passes.is_lost:
                return step(*arguments, **options)
            if self._digest is None:
                # From here on nothing may change the weights.
                self._digest = self._weights_digest()
            # Schedules warn if no step was taken before theirs.
            vars(optimizer)["_opt_called"] = True
            return None

        # A method, because schedules look for the function of one.
        optimizer.step = types.MethodType(guarded, optimizer)  # type: ignore[method-assign]

    @uncompiled
    def _before_update(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record that an optimizer takes its step.

        Raises:
            GroupLost: it has come here in a lost step.
        """
        if self._passes.is_lost and self._passes.is_tolerant:
            raise GroupLost
        self._passes.has_updated = True
        self._updated.add(id(optimizer))

    def close(self) -> None:
        """Remove the hooks."""
        self._hook.remove()

    def begin_generation(self) -> None:
        """Begin to count the steps of a generation."""
        self._steps, self._groups = 0, _group_count()

    def synchronise(self, group: Group) -> None:
        """Copy the buffers of rank 0 to all ranks before a step that cannot be put back. Collective, also with ranks
        that call `begin`."""
        self._buffers.hold(group, copies=False)

    def begin(self, group: Group) -> None:
        """Begin a step. Collective."""
        self._passes.begin()
        self._steps += 1
        self.is_second = self._steps == 2
        self._updated.clear()
        self._digest = None
        self._copies = {name: _copy(_state_of(state)) for name, state in self._states.items()}
        self._hyperparameters = [
            [{key: _copy(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]
        self._versions = self._weight_versions()
        self._first_collective = sequence_number()
        self._buffers.hold(group)

    def violation(self) -> str:
        """Return why steps like the one that was just taken cannot be taken again, as a clause; empty if they can."""
        self._buffers.drop()
        passes = self._passes
        if any(id(optimizer) not in self._updated for optimizer in self._optimizers):
            return "not every optimizer takes a step with each batch"
        if passes.averages_after_update:
            return "gradients are averaged after an optimizer has taken its step"
        if dist.is_initialized():
            if not passes.operations:
                return "no gradients were averaged in a step"
            if sequence_number() - self._first_collective != passes.operations:
                return "the loop has collectives of its own"
        if _group_count() != self._groups:
            return "the script makes process groups of its own"
        return ""

    def put_back(self) -> str:
        """Put back what a step has changed. Returns what cannot be put back, as a clause; empty if all was."""
        if self._updated:
            return "an optimizer had taken its step before all gradients were averaged"
        if self._versions != self._weight_versions() or self._digest not in (None, self._weights_digest()):
            return "the loop changes weights, or their average, other than by steps of its optimizers"
        self._buffers.put_back()
        for name, state in self._states.items():
            if isinstance(state, MutableMapping):
                put_back(state, self._copies[name])
            else:
                state.load_state_dict(self._copies[name])
        for optimizer, groups in zip(self._optimizers, self._hyperparameters, strict=True):
            if len(optimizer.param_groups) != len(groups):
                return "the loop has added parameters to an optimizer"
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                put_back(group, {**values, "params": group["params"]})
            optimizer.zero_grad(set_to_none=True)
        for parameter in self._parameters:
            parameter.grad = None
        # Nothing of it is left for passes in the next group.
        self._passes.begin()
        return ""

    def has_gradients(self) -> bool:
        """Whether a parameter of an optimizer has a gradient that is not zero."""
        parameters = (
            parameter
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        return any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in parameters)

    def _weight_versions(self) -> tuple[int, int]:
        """Return what changes if weights or their average are written to, or get other memory."""
        tensors = (*self._parameters, *self._averages)
        return sum(tensor._version for tensor in tensors), sum(tensor.data_ptr() for tensor in tensors)

    def _weights_digest(self) -> int:
        digest = xxhash.xxh3_64()
        for parameter in self._parameters:
            digest.update(parameter.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.intdigest()


def _guarded(kind: type[AveragedModel], passes: PassState) -> type[AveragedModel]:
    """Return a class of averages whose updates are left out in lost steps. Copies and pickles are of the class itself:
    they are not registered."""

    class Guarded(kind):  # type: ignore[misc,valid-type]
        def update_parameters(self, model: nn.Module) -> None:
            if not passes.is_lost:
                super().update_parameters(model)

        def __reduce_ex__(self, protocol: Any) -> Any:
            create, arguments, *state = super().__reduce_ex__(protocol)
            # pickle takes `__newobj__` only for an object's own class.
            create = object.__new__ if create is copyreg.__newobj__ else create  # type: ignore[attr-defined]
            return create, tuple(kind if item is Guarded else item for item in arguments), *state

    Guarded.__name__, Guarded.__qualname__, Guarded.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return Guarded


def _state_of(state: State) -> Any:
    return state if isinstance(state, MutableMapping) else state.state_dict()


def _group_count() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def _size(value: Any) -> int:
    """Return the size of the tensors and arrays in a state, in bytes."""
    if isinstance(value, Tensor | np.ndarray):
        return value.nbytes
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0


def _copy(value: Any) -> Any:
    """Copy a state; faster than `copy.deepcopy` for what most states are made of."""
    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: _copy(entry) for key, entry in value.items()}
    if type(value) is list:
        return [_copy(entry) for entry in value]
    if type(value) is tuple:
        return tuple(_copy(entry) for entry in value)
    return copy.deepcopy(value)
