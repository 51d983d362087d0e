"""The train state of a run: model and optimizers, an average of the weights, and other objects with a state.

A checkpoint is loaded in two phases. `check` compares it with the live objects, name by name and shape by shape, and
changes nothing; `load` changes everything, and an error in it ends this process. So no run continues half loaded.

Evaluators and exports read `weights.safetensors`. Where these weights are not those that training resumes from (they
are rounded, or an average over steps), training has files of its own.
"""

import json
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from tandem.errors import join_names
from tandem.job.architectures import unwrapped_name
from tandem.rundir.checkpoint import COUNTER, COUNTERS, WEIGHTS, Broken
from tandem_trainer.checkpoint.file_names import (
    AVERAGE,
    AVERAGED,
    EXTRA,
    FULL_WEIGHTS,
    OBJECT_STATES,
    OBJECT_TENSORS,
    OPTIMIZER,
    OPTIMIZERS,
    REQUIRES_GRAD,
)
from tandem_trainer.checkpoint.format import header, ordered
from tandem_trainer.checkpoint.round_trip import RoundTrip, problems, small_modules
from tandem_trainer.checkpoint.sharding import StagePlacement, is_sharded, to_local
from tandem_trainer.checkpoint.state import (
    BY_ROW,
    CPU,
    CheckpointMismatch,
    NamedOptimizer,
    OptimizerState,
    buffers,
    check_weights,
    extra_state,
    is_extra,
    join,
    load_weights,
    moment,
    put_back,
    split,
    unwrapped,
    weights,
)
from tandem_trainer.process_group import Group

log = logging.getLogger(__name__)

SMALL_BYTES = 2**20
"""Size up to which a rank's own tensors are always saved as rank 0 has them, in bytes."""
ROUNDED_BYTES = 2
"""Element size, in bytes, up to which weights are not rounded, because rounding would save nothing."""

Tensors = Mapping[str, Tensor]


def _ignore(tensor: Tensor) -> None:
    """Keep the memory; the default of `release`."""


@dataclass(frozen=True)
class Contents:
    """Everything that a run resumes from. The tensors of a running job alias the live ones."""

    weights: Tensors
    """The model's state_dict."""
    optimizer: Tensors
    """The optimizer's tensors as `<parameter>/<key>`."""
    others: Tensors = field(default_factory=dict)
    """Tensors of all other objects."""
    average: Tensors | None = None
    """Weights averaged over steps, which are evaluated instead of `weights`; None if there is no average."""
    unrounded: frozenset[str] = frozenset()
    """Names of weights that are never rounded: buffers, such as tables of positions or of counts."""
    own: frozenset[str] = frozenset()
    """Names of weights that are neither parameters nor buffers, such as the counts of a metric; they may differ between
    ranks, in shape, too."""
    loop: dict[str, Any] = field(default_factory=dict)
    """The remaining state, as JSON."""
    release: Callable[[Tensor], None] = _ignore
    """Callback to release a tensor that was read, together with everything that precedes it in its file."""

    @property
    def evaluated(self) -> Tensors:
        """The weights for evaluators and for export."""
        return self.weights if self.average is None else self.average

    def check(self) -> None:
        """Check that a checkpoint can hold all tensors.

        Raises:
            TypeError: a tensor has a dtype that a checkpoint cannot hold.
        """
        for tensors in self.files(rounds=False).values():
            header({name: tensor for name, tensor in tensors.items() if not is_lazy(tensor)})

    def of_first(self, group: Group) -> "Contents":
        """Return these contents with rank 0's values of everything that ranks hold individually: registered objects,
        and weights other than parameters and buffers. Collective.

        Ranks write parts of one checkpoint, which would otherwise mix the values of several ranks. Tensors of more than
        SMALL_BYTES are assumed to be equal on all ranks as long as their shapes are.
        """
        if group.world_size == 1:
            return self
        local: dict[str, dict[str, Tensor]] = {
            "others": dict(self.others),
            "weights": {name: tensor for name, tensor in self.weights.items() if name in self.own},
            "average": {name: tensor for name, tensor in (self.average or {}).items() if name in self.own},
        }
        layout = {
            file: {
                name: [list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for name, tensor in tensors.items()
            }
            for file, tensors in local.items()
        }
        digest = xxhash.xxh3_128_hexdigest(json.dumps(layout).encode())
        views = group.gather({"digest": digest} | ({"layout": layout} if group.rank == 0 else {}))
        # Large tensors are only skipped where every rank has the same names, shapes and dtypes.
        are_alike = all(view["digest"] == views[0]["digest"] for view in views)
        values: dict[str, dict[str, Tensor]] = {file: {} for file in local}
        copied = []
        for file, tensors in views[0]["layout"].items():
            for name, (shape, dtype) in tensors.items():
                tensor = local[file].get(name)
                if are_alike and tensor is not None and tensor.nbytes > SMALL_BYTES:
                    values[file][name] = tensor
                    continue
                if group.rank != 0 or tensor is None:
                    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=CPU)
                values[file][name] = tensor
                copied.append(tensor)
        group.copy_from_first(copied)
        shared = {name: tensor for name, tensor in self.weights.items() if name not in self.own}
        average = self.average
        if average is not None:
            average = {name: tensor for name, tensor in average.items() if name not in self.own} | values["average"]
        return replace(self, others=values["others"], weights=shared | values["weights"], average=average)

    def release_all(self, tensors: Tensors) -> None:
        """Release tensors that were read."""
        for tensor in tensors.values():
            self.release(tensor)

    def files(self, rounds: bool) -> dict[str, Tensors]:
        """Return the tensors of each file.

        Args:
            rounds: whether the weights for evaluators are rounded to bfloat16; they are returned unrounded.
        """
        files = {WEIGHTS: self.evaluated, OPTIMIZER: self.optimizer}
        if self.others:
            files[OBJECT_TENSORS] = self.others
        if rounds or self.average is not None:
            files[FULL_WEIGHTS] = self.weights
        if rounds and self.average is not None:
            files[AVERAGE] = self.average
        return files

    def rounded(self) -> dict[str, Tensor]:
        """Return the weights for evaluators with the dtypes that are written, learned ones as bfloat16, on the meta
        device."""
        return {
            name: torch.empty(
                tensor.shape, device="meta", dtype=tensor.dtype if self._stays(name, tensor) else torch.bfloat16
            )
            for name, tensor in self.evaluated.items()
        }

    def _stays(self, name: str, tensor: Tensor) -> bool:
        return name in self.unrounded or not tensor.is_floating_point() or tensor.element_size() <= ROUNDED_BYTES


UPDATES = "average"
"""Name among the objects' states: the count of updates of an AveragedModel. Without it the next update would start the
average anew."""
HYPERPARAMETERS = "hyperparameters"
"""Key of an optimizer: the entries of its groups other than parameters; a schedule changes them."""
ADDED = "added"
"""Key of an optimizer: number of its groups that were added during training, if any."""
RESERVED = (UPDATES, HYPERPARAMETERS, OPTIMIZERS, EXTRA)


@runtime_checkable
class Stateful(Protocol):
    """An object that can save and restore its state: a schedule, a scaler, a tokenizer."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: numbers, text, tensors, arrays, and lists, tuples and dicts of these."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore a state."""


class TrainState:
    """Collects the state of a run for a checkpoint, and restores it.

    Args:
        model: the model that is trained; wrappers around it are removed.
        optimizer: an optimizer over parameters of the model; several by name.
        average: averaged weights, a module of the same shape, which is evaluated instead of the model. The count of
            updates of an AveragedModel is saved, too.
        others: other objects with a state, or dictionaries of numbers and tensors, which are changed in place, by name.
        hyperparameters: whether to save learning rates and the like, too; unnecessary where each step sets them.
        stages: placement of the tensors of a pipeline's stages; `contents` is a collective then.

    Raises:
        ConfigurationError: no rank has all of an optimizer's state.
        ValueError: an optimizer has parameters that are not the model's, or a name is reserved.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None,
        average: nn.Module | None = None,
        others: Mapping[str, Stateful | MutableMapping[str, Any]] | None = None,
        hyperparameters: bool = False,
        stages: StagePlacement | None = None,
    ) -> None:
        self._model, self._stages = unwrapped(model), stages
        several = optimizer if isinstance(optimizer, Mapping) else {} if optimizer is None else {"": optimizer}
        self._optimizers = [
            NamedOptimizer(self._model, torch_optimizer, name) for name, torch_optimizer in several.items()
        ]
        self._updates = average.n_averaged if isinstance(average, AveragedModel) else None
        self._average = None if average is None else unwrapped(_averaged(average))
        self._others = dict(others or {})
        self._hyperparameters = hyperparameters
        self._round_trips: dict[str, RoundTrip] = {}
        if reserved := sorted(self._others.keys() & set(RESERVED)):
            raise ValueError(f"the name {reserved[0]!r} is reserved; choose another name for your object")
        self.mark_start()

    def mark_start(self) -> None:
        """Record `requires_grad` and the groups of optimizers as they are at the script's start.

        A checkpoint holds later changes of them, because a resumed script does not make these changes again.
        """
        self._learns = [
            (unwrapped_name(name), weight, weight.requires_grad) for name, weight in self._model.named_parameters()
        ]
        for optimizer in self._optimizers:
            optimizer.mark_start()

    def copy_objects(self) -> None:
        """Copy small objects with a custom loader, as the script has made them, for `lost_in_round_trip`."""
        run = [*self._model.parameters(), *self._model.buffers()]
        if self._average is not None:
            run += [*self._average.parameters(), *self._average.buffers()]
        for optimizer in self._optimizers:
            run += optimizer.state().tensors.values()
        self._round_trips = {
            name: RoundTrip(name, other, run)
            for name, other in self._others.items()
            if not isinstance(other, MutableMapping)
        }
        if self._stages is None:
            self._round_trips |= {
                f"module {path}": RoundTrip(path, module) for path, module in small_modules(self._model).items()
            }
            self._round_trips |= {
                f"optimizer {optimizer.name}".strip(): RoundTrip(optimizer.name, optimizer.optimizer)
                for optimizer in self._optimizers
                if optimizer.has_custom_load
            }

    def lost_in_round_trip(self, group: Group) -> dict[str, str]:
        """Return, by name, what an object loses or changes when it loads its own current state, as a sentence.
        Collective.

        Each object is tested until rank 0 finds its state different from the copy's, and then never again.
        """
        for optimizer in self._optimizers:
            if optimizer.has_added_groups:
                # A restart adds the groups before it loads; the copy lacks them.
                self._round_trips.pop(f"optimizer {optimizer.name}".strip(), None)
        # Named once: what has no copy is removed below.
        for name in [name for name, trip in self._round_trips.items() if trip.is_too_large and group.rank == 0]:
            log.warning(
                "kept=%s is too large to be tested at the first save; interrupt a run and continue it to see whether "
                "it comes back",
                name,
            )
        losses = problems(self._round_trips)
        finished = [name for name, trip in self._round_trips.items() if trip.is_finished]
        for name in group.tell({"over": finished})["over"]:
            self._round_trips.pop(name, None)
        return losses

    def contents(self, loop: Mapping[str, Any]) -> Contents:
        """Return the current state; tensors alias the live ones.

        Args:
            loop: small state of the loop itself, as JSON; it is saved with the rest.

        Raises:
            TypeError: an object has a state that a checkpoint cannot hold.
        """
        trees: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}

        def tree(name: str, state: object) -> Any:
            json_tree, inside = split(name, state)
            tensors.update(inside)
            return json_tree

        for name, other in self._others.items():
            trees[name] = tree(name, other if isinstance(other, MutableMapping) else other.state_dict())
        if self._updates is not None:
            trees[UPDATES] = tree(UPDATES, self._updates)
        moments: dict[str, Tensor] = {}
        records = {}
        for optimizer in self._optimizers:
            state = optimizer.state()
            moments |= state.tensors if self._stages is None else self._gather_moments(state)
            other_entries, inside = split(f"{OPTIMIZERS}:{optimizer.name}", state.other_entries)
            if split_over_ranks := sorted(name for name, tensor in inside.items() if is_sharded(tensor)):
                raise TypeError(
                    f"{type(optimizer.optimizer).__name__} keeps {join_names(split_over_ranks)}, which is split over "
                    "the ranks, elsewhere than by parameter and name, and could not be split again; use ddp"
                )
            tensors.update(inside)
            records[optimizer.name] = {"groups": state.groups, "rest": other_entries} | (
                {ADDED: state.added} if state.added else {}
            )
            if self._hyperparameters:
                prefix = f"{HYPERPARAMETERS}:{optimizer.name}"
                records[optimizer.name][HYPERPARAMETERS] = tree(prefix, state.hyperparameters)
        extra = extra_state(self._model)
        changed = {
            name: parameter.requires_grad
            for name, parameter, at_start in self._learns
            if parameter.requires_grad != at_start
        }
        model_weights = self._weights(self._model)
        counters = self._counters(moments)
        return Contents(
            weights=model_weights,
            optimizer=moments,
            others=tensors,
            average=None if self._average is None else self._weights(self._average),
            unrounded=buffers(self._model) | frozenset(filter(is_extra, model_weights)),
            own=self._custom_names(model_weights),
            loop={
                **loop,
                **({OBJECT_STATES: trees} if trees else {}),
                **({OPTIMIZERS: records} if records else {}),
                **({EXTRA: tree(EXTRA, extra)} if extra else {}),
                **({AVERAGED: True} if self._average is not None else {}),
                **({REQUIRES_GRAD: changed} if changed else {}),
                **({COUNTERS: counters} if counters else {}),
            },
        )

    def counters(self, names: Collection[str]) -> dict[str, float]:
        """Return the counters of updates with these names; of those that other stages have, none."""
        missing = dict.fromkeys(names, 0.0) if self._stages is None else {}
        return missing | {
            name: float(to_local(tensor).item())
            for optimizer in self._optimizers
            for name, tensor in optimizer.state().tensors.items()
            if name in names and _is_counter(name, tensor)
        }

    def _counters(self, moments: Tensors) -> dict[str, float]:
        """Return the first counter of each optimizer that has one on this rank. To read all would stall a GPU.

        Optimizers with a loader of their own are excluded, because they may change what they load.
        """
        firsts = (
            next((name for name, tensor in moments.items() if optimizer.owns(name) and _is_counter(name, tensor)), None)
            for optimizer in self._optimizers
            if not optimizer.has_custom_load
        )
        counters = {name: float(to_local(moments[name]).item()) for name in firsts if name is not None}
        return {name: count for name, count in counters.items() if math.isfinite(count)}

    def saved(self, group: Group, loop: Mapping[str, Any]) -> Contents:
        """Return the state for a checkpoint. Collective.

        Values that ranks hold individually are those of rank 0; buffers are copied to all ranks, which continue with
        them.

        Args:
            loop: as for `contents`.

        Raises:
            TypeError: an object has a state that a checkpoint cannot hold.
        """
        group.copy_from_first(self.local())
        return self.contents(loop).of_first(group)

    def replicated(self) -> dict[str, Tensor]:
        """Return the tensors that must be equal on every rank: weights, buffers, moments, averages."""
        tensors = {f"weights of {name}": tensor for name, tensor in self._weights(self._model).items()}
        for optimizer in self._optimizers:
            moments: Tensors = optimizer.state().tensors
            if self._stages is not None:
                moments = self._stages.local_moments(moments)
            tensors |= {f"moments of {name}": tensor for name, tensor in moments.items()}
        if self._average is not None:
            tensors |= {f"average of {name}": tensor for name, tensor in self._weights(self._average).items()}
        # Placeholders on the meta device have no values.
        return (
            tensors
            if self._stages is None
            else {name: tensor for name, tensor in tensors.items() if not to_local(tensor).is_meta}
        )

    def learned(self) -> dict[str, Tensor]:
        """Return the weights that require gradients."""
        parameters = self._model.named_parameters()
        return {
            unwrapped_name(name): parameter
            for name, parameter in parameters
            if parameter.requires_grad and not is_lazy(parameter)
        }

    def replicas(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors that are equal on all ranks that hold the same part, while gradients are averaged, by kind
        and name.

        Buffers are excluded: each rank has its own.
        """
        parameters = {
            unwrapped_name(name): parameter
            for name, parameter in self._model.named_parameters()
            if not is_lazy(parameter)
        }
        if self._stages is not None:
            parameters = {name: parameter for name, parameter in parameters.items() if name in self._stages.owners}
        moments: dict[str, Tensor] = {}
        for optimizer in self._optimizers:
            local_moments = optimizer.state().tensors
            moments |= local_moments if self._stages is None else self._stages.local_moments(local_moments)
        replicas = {
            "weights": self._placed(
                {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
            ),
            "moments": moments,
            "frozen weights": self._placed(
                {name: parameter for name, parameter in parameters.items() if not parameter.requires_grad}
            ),
        }
        if self._average is not None:
            averaged = {unwrapped_name(name): parameter for name, parameter in self._average.named_parameters()}
            replicas["averages"] = self._placed(
                {name: parameter for name, parameter in averaged.items() if name in parameters}
            )
        # Placeholders on the meta device have no values.
        return {
            kind: {name: tensor for name, tensor in tensors.items() if not to_local(tensor).is_meta}
            for kind, tensors in replicas.items()
        }

    def mesh_sizes(self) -> dict[str, int]:
        """Return the number of ranks in each named dimension of the meshes over which weights are sharded."""
        sizes: dict[str, int] = {}
        for parameter in self._model.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and mesh.mesh_dim_names is not None:
                sizes |= dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        return sizes

    def _custom_names(self, model_weights: Tensors) -> frozenset[str]:
        """Return the names of weights that are neither parameters nor buffers."""
        parameters = frozenset(unwrapped_name(name) for name, _ in self._model.named_parameters(remove_duplicate=False))
        custom = model_weights.keys() - parameters - buffers(self._model)
        return frozenset(name for name in custom if not is_sharded(model_weights[name]))

    def local(self) -> list[Tensor]:
        """Return the tensors that each rank changes on its own, such as the running statistics of batch norm."""
        if self._stages is not None:
            return []  # each tensor of a checkpoint is given by one rank
        names = buffers(self._model)
        models = [self._model] if self._average is None else [self._model, self._average]
        # An average holds copies of them, from this rank's last update of the average.
        return [tensor for model in models for name, tensor in weights(model).items() if name in names] if names else []

    def check(self, contents: Contents) -> None:
        """Check that contents match the live objects, without changing them.

        Raises:
            CheckpointMismatch: the contents belong to other objects.
            Broken: the contents are inconsistent.
        """
        check_weights(self._model, contents.weights, self._extra(contents))
        for optimizer, state in self._optimizer_states(contents):
            optimizer.check(state)
        if self._average is not None:
            averaged = contents.weights if contents.average is None else contents.average
            check_weights(self._average, averaged, extra_state(self._average))
        if not isinstance(contents.loop.get(OBJECT_STATES, {}), dict):
            raise Broken(f"{OBJECT_STATES} is no object")

    def load(self, contents: Contents) -> None:
        """Load contents. Call `check` first; an error here leaves the objects unusable.

        Raises:
            CheckpointMismatch: an object does not accept its state.
        """
        extra = self._extra(contents)
        load_weights(self._model, contents.weights, extra, is_borrowed=True)
        changed = contents.loop.get(REQUIRES_GRAD, {})
        for name, parameter in self._model.named_parameters():
            if unwrapped_name(name) in changed:
                parameter.requires_grad_(changed[unwrapped_name(name)])
        # A checkpoint without an average starts it from the weights.
        if self._average is not None:
            averaged = contents.weights if contents.average is None else contents.average
            # The extra state of modules is not averaged.
            load_weights(self._average, averaged, extra_state(self._average), is_borrowed=True)
            contents.release_all(contents.average or {})
        contents.release_all(contents.weights)
        self._load_moments(contents)
        trees = contents.loop.get(OBJECT_STATES, {})
        for name, other in self._others.items():
            # A schedule or scaler that is new since the checkpoint, or had no state, starts afresh.
            if name in trees and (isinstance(other, MutableMapping) or trees[name] != {"dict": {}}):
                _load(name, other, self._joined(trees[name], contents))
        if self._updates is not None:
            count = self._joined(trees[UPDATES], contents) if UPDATES in trees else torch.ones(())
            self._updates.copy_(count)
        contents.release_all(contents.others)

    def load_optimizer(self, contents: Contents) -> None:
        """Load the state of the optimizer alone, from another run's contents.

        Raises:
            CheckpointMismatch: the state is of other parameters.
        """
        for optimizer, state in self._optimizer_states(contents):
            optimizer.check(state)
        self._load_moments(contents)

    def other(self, name: str, contents: Contents) -> Any:
        """Return the state that a checkpoint has for another object; None if it has none."""
        trees = contents.loop.get(OBJECT_STATES, {})
        return self._joined(trees[name], contents) if name in trees else None

    def _load_moments(self, contents: Contents) -> None:
        states = self._optimizer_states(contents)
        for optimizer, state in states:
            optimizer.add_groups(state)
        parameters = {
            name: parameter for optimizer in self._optimizers for name, parameter in optimizer.parameters().items()
        }
        moments = {}
        for path, tensor in ordered(contents.optimizer).items():
            parameter = parameters.get(unwrapped_name(path.rpartition("/")[0]))
            if self._stages is None or parameter is None or not parameter.is_meta:
                moments[path] = moment(tensor, parameter, path.endswith(BY_ROW))
            contents.release(tensor)
        for optimizer, state in states:
            optimizer.load(replace(state, tensors={path: moments[path] for path in state.tensors if path in moments}))

    def _optimizer_states(self, contents: Contents) -> list[tuple[NamedOptimizer, OptimizerState]]:
        """Return each optimizer with its state in the checkpoint.

        Raises:
            CheckpointMismatch: the checkpoint is of other optimizers.
        """
        records = contents.loop.get(OPTIMIZERS)
        if records is None:
            return [(optimizer, self._legacy_state(contents)) for optimizer in self._optimizers[:1]]
        if records.keys() != {optimizer.name for optimizer in self._optimizers}:
            saved, registered = _describe(records), _describe(optimizer.name for optimizer in self._optimizers)
            raise CheckpointMismatch(f"the checkpoint has the state of {saved}, but the script registers {registered}")
        states = []
        for optimizer in self._optimizers:
            record = records[optimizer.name]
            hyperparameters = None
            if self._hyperparameters and HYPERPARAMETERS in record:
                hyperparameters = self._joined(record[HYPERPARAMETERS], contents)
            tensors = {path: tensor for path, tensor in contents.optimizer.items() if optimizer.owns(path)}
            other_entries = self._joined(record["rest"], contents)
            added = record.get(ADDED, 0)
            states.append((optimizer, OptimizerState(tensors, other_entries, record["groups"], hyperparameters, added)))
        return states

    def _legacy_state(self, contents: Contents) -> OptimizerState:
        """Return the optimizer's state of old checkpoints, which do not record the parameters of groups."""
        tree = contents.loop.get(OBJECT_STATES, {}).get(HYPERPARAMETERS)
        hyperparameters = self._joined(tree, contents) if tree is not None and self._hyperparameters else None
        return OptimizerState(dict(contents.optimizer), hyperparameters=hyperparameters)

    def _extra(self, contents: Contents) -> dict[str, Any]:
        return dict(self._joined(contents.loop[EXTRA], contents)) if EXTRA in contents.loop else {}

    def _joined(self, tree: Any, contents: Contents) -> Any:
        first = next(self._model.parameters(), None)
        device = CPU if first is None else first.device
        return join(tree, contents.others, device if self._stages is None else self._stages.device)

    def _weights(self, model: nn.Module) -> dict[str, Tensor]:
        return self._placed(weights(model))

    def _placed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors if self._stages is None else self._stages.wrap_all(tensors)

    def _gather_moments(self, state: OptimizerState) -> dict[str, Tensor]:
        """Return the tensors of an optimizer on all stages. Collective.

        Raises:
            TypeError: an optimizer keeps more than tensors by parameter.
        """
        assert self._stages is not None
        if any(view["more"] for view in self._stages.gather({"more": bool(state.other_entries)})):
            raise TypeError(
                "the optimizer keeps more than one tensor by name for each parameter, which strategy: pipeline cannot "
                "collect from its stages; use ddp or fsdp"
            )
        return self._stages.gather_moments(state.tensors)


def _is_counter(name: str, tensor: Tensor) -> bool:
    """Return whether a tensor of an optimizer counts updates, and is on this rank."""
    local = to_local(tensor)
    return name.endswith(COUNTER) and local.numel() == 1 and not local.is_meta


def _averaged(average: nn.Module) -> nn.Module:
    return average.module if isinstance(average, AveragedModel) else average


def _describe(names: Iterable[str]) -> str:
    ordered_names = sorted(names)
    if any(ordered_names):
        return "the optimizers " + ", ".join(ordered_names)
    return "one optimizer" if ordered_names else "no optimizer"


def _load(name: str, other: Stateful | MutableMapping[str, Any], state: Any) -> None:
    try:
        if isinstance(other, MutableMapping):
            put_back(other, state)
        else:
            other.load_state_dict(state)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointMismatch(f"the state of {name!r} does not fit it: {error!r}") from error
