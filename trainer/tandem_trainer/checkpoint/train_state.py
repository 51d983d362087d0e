"""The train state of a run: model and optimizers, an average of the weights, and other objects with a state.

Taking a checkpoint back has two halves. `check` compares it with what is there, name by name and shape by shape, and
changes nothing; `load` changes everything, and what fails in it ends this process. So nothing goes on half loaded.

`weights.safetensors` is what evaluators read and what is exported. Where that is not what training goes on with (it is
rounded, or an average over steps), training has files of its own.
"""

import json
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel

from tandem.architectures import plain
from tandem.errors import enumerated
from tandem.rundir.checkpoint import WEIGHTS, Broken
from tandem_trainer.checkpoint.file_names import (
    AVERAGE,
    AVERAGED,
    EXTRA,
    FULL_WEIGHTS,
    OPTIMIZER,
    OPTIMIZERS,
    OTHER_STATES,
    OTHERS,
    REQUIRES_GRAD,
)
from tandem_trainer.checkpoint.format import header, ordered
from tandem_trainer.checkpoint.round_trip import RoundTrip, problems, small_modules
from tandem_trainer.checkpoint.sharding import Stages, here, is_sharded
from tandem_trainer.checkpoint.state import (
    BY_ROW,
    CPU,
    DoesNotFit,
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

SMALL_BYTES = 2**20
"""Tensors of a rank's own up to this size always go into a checkpoint as rank 0 has them."""
ROUNDED_BYTES = 2
"""Of a number that is not rounded, because nothing would be saved."""

Tensors = Mapping[str, Tensor]


def _ignore(tensor: Tensor) -> None:
    """The default for `let_go`: keep the memory."""


@dataclass(frozen=True)
class Contents:
    """Everything that a run resumes. The tensors of a running job alias the live ones."""

    weights: Tensors
    """The model's state_dict."""
    optimizer: Tensors
    """The optimizer's tensors as `<parameter>/<key>`."""
    others: Tensors = field(default_factory=dict)
    """Tensors of everything else."""
    average: Tensors | None = None
    """Weights averaged over steps, which are evaluated in the place of the others; None where there are none."""
    unrounded: frozenset[str] = frozenset()
    """Names of weights that are never rounded: buffers, such as tables of positions or of counts."""
    own: frozenset[str] = frozenset()
    """Names of weights that are neither parameters nor buffers, such as the counts of a metric: each rank may have
    others, of other shapes."""
    loop: dict[str, Any] = field(default_factory=dict)
    """Everything else, as JSON."""
    let_go: Callable[[Tensor], None] = _ignore
    """To be called with a tensor that was read, when neither it nor what stands before it in its file is needed."""

    @property
    def evaluated(self) -> Tensors:
        """The weights for evaluators and for export."""
        return self.weights if self.average is None else self.average

    def check(self) -> None:
        """
        Raises:
            TypeError: a tensor has a type that a checkpoint cannot hold.
        """
        for tensors in self.files(rounds=False).values():
            header({name: tensor for name, tensor in tensors.items() if not is_lazy(tensor)})

    def of_first(self, group: Group) -> "Contents":
        """The same with what rank 0 has of all that ranks have of their own: kept objects, and what modules keep beside
        parameters and buffers. Ranks write parts of one checkpoint, which would otherwise have something of each.
        Tensors of more than SMALL_BYTES are taken for equal on all ranks while shapes are. Collective.
        """
        if group.world_size == 1:
            return self
        mine: dict[str, dict[str, Tensor]] = {
            "others": dict(self.others),
            "weights": {name: one for name, one in self.weights.items() if name in self.own},
            "average": {name: one for name, one in (self.average or {}).items() if name in self.own},
        }
        layout = {
            file: {name: [list(one.shape), str(one.dtype).removeprefix("torch.")] for name, one in tensors.items()}
            for file, tensors in mine.items()
        }
        digest = xxhash.xxh3_128_hexdigest(json.dumps(layout).encode())
        told = group.gather({"digest": digest} | ({"layout": layout} if group.rank == 0 else {}))
        are_alike = all(one["digest"] == told[0]["digest"] for one in told)
        found: dict[str, dict[str, Tensor]] = {file: {} for file in mine}
        copied = []
        for file, tensors in told[0]["layout"].items():
            for name, (shape, dtype) in tensors.items():
                one = mine[file].get(name)
                if are_alike and one is not None and one.nbytes > SMALL_BYTES:
                    found[file][name] = one
                    continue
                if group.rank != 0 or one is None:
                    one = torch.empty(shape, dtype=getattr(torch, dtype), device=CPU)
                found[file][name] = one
                copied.append(one)
        group.copy_from_first(copied)
        shared = {name: one for name, one in self.weights.items() if name not in self.own}
        average = self.average
        if average is not None:
            average = {name: one for name, one in average.items() if name not in self.own} | found["average"]
        return replace(self, others=found["others"], weights=shared | found["weights"], average=average)

    def let_go_all(self, tensors: Tensors) -> None:
        """None of these, which were read, is needed any more."""
        for tensor in tensors.values():
            self.let_go(tensor)

    def files(self, rounds: bool) -> dict[str, Tensors]:
        """For each file its tensors.

        Args:
            rounds: the weights for evaluators are rounded to bfloat16; here still as they are.
        """
        files = {WEIGHTS: self.evaluated, OPTIMIZER: self.optimizer}
        if self.others:
            files[OTHERS] = self.others
        if rounds or self.average is not None:
            files[FULL_WEIGHTS] = self.weights
        if rounds and self.average is not None:
            files[AVERAGE] = self.average
        return files

    def rounded(self) -> dict[str, Tensor]:
        """Shapes and types of the weights for evaluators, learned ones rounded to bfloat16; without their values."""
        return {
            name: torch.empty(
                tensor.shape, device="meta", dtype=tensor.dtype if self._stays(name, tensor) else torch.bfloat16
            )
            for name, tensor in self.evaluated.items()
        }

    def _stays(self, name: str, tensor: Tensor) -> bool:
        return name in self.unrounded or not tensor.is_floating_point() or tensor.element_size() <= ROUNDED_BYTES


UPDATES = "average"
"""Among the others: how many updates an AveragedModel has had. Without it the next one would begin the average anew."""
HYPERPARAMETERS = "hyperparameters"
"""Of an optimizer's groups: what they hold beside parameters; a schedule changes them."""
ADDED = "added"
"""Key of an optimizer: how many of its groups were added while it trained, if any."""
RESERVED = (UPDATES, HYPERPARAMETERS, OPTIMIZERS, EXTRA)


@runtime_checkable
class Stateful(Protocol):
    """A schedule, a scaler, a tokenizer: anything that can tell its state and take it back."""

    def state_dict(self) -> Mapping[str, Any]:
        """The state: numbers, text, tensors, arrays, and lists, tuples and dicts of these."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take a state back."""


class TrainState:
    """Takes the state of a run apart for a checkpoint, and puts it back.

    Args:
        model: what is trained; wrappers around it are looked through.
        optimizer: over parameters of the model; several by name.
        average: averaged weights, a module of the same shape; evaluated in the place of the model. An AveragedModel
            keeps its count of updates, too.
        others: by name; objects with a state, or dictionaries of numbers and tensors, which are changed in place.
        hyperparameters: keep learning rates and the like, too. Not wanted where each step sets them.
        stages: of a model that is cut into stages; `contents` is a collective then.

    Raises:
        ConfigurationError: no rank has all of an optimizer's state.
        ValueError: an optimizer has parameters that are not the model's, or a name is taken.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None,
        average: nn.Module | None = None,
        others: Mapping[str, Stateful | MutableMapping[str, Any]] | None = None,
        hyperparameters: bool = False,
        stages: Stages | None = None,
    ) -> None:
        self._model, self._stages = unwrapped(model), stages
        several = optimizer if isinstance(optimizer, Mapping) else {} if optimizer is None else {"": optimizer}
        self._optimizers = [NamedOptimizer(self._model, one, name) for name, one in several.items()]
        self._updates = average.n_averaged if isinstance(average, AveragedModel) else None
        self._average = None if average is None else unwrapped(_averaged(average))
        self._others = dict(others or {})
        self._hyperparameters = hyperparameters
        self._round_trips: dict[str, RoundTrip] = {}
        if taken := sorted(self._others.keys() & set(RESERVED)):
            raise ValueError(f"the name {taken[0]!r} is taken; give what you keep another one")
        self.mark_start()

    def mark_start(self) -> None:
        """Note `requires_grad` and the groups of optimizers, as the script begins with them. A checkpoint has what is
        changed later, because a script that is resumed does not change it again."""
        self._learns = [(plain(name), one, one.requires_grad) for name, one in self._model.named_parameters()]
        for one in self._optimizers:
            one.mark_start()

    def copy_objects(self) -> None:
        """Copy what is small and takes its state back in a way of its own, as the script has made it, for
        `lost_in_round_trip`."""
        run = [*self._model.parameters(), *self._model.buffers()]
        if self._average is not None:
            run += [*self._average.parameters(), *self._average.buffers()]
        for one in self._optimizers:
            run += one.state().tensors.values()
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
                f"optimizer {one.name}".strip(): RoundTrip(one.name, one.optimizer)
                for one in self._optimizers
                if one.has_custom_load
            }

    def lost_in_round_trip(self, group: Group) -> dict[str, str]:
        """By name what an object loses or changes when it loads the state that it gives now, as a sentence. Each object
        is tried until its state is another one on rank 0 than when it was copied, and then never again. Collective."""
        for one in self._optimizers:
            if one.has_added_groups:
                # A restart adds them first.
                self._round_trips.pop(f"optimizer {one.name}".strip(), None)
        found = problems(self._round_trips)
        over = [name for name, one in self._round_trips.items() if one.is_over]
        for name in group.tell({"over": over})["over"]:
            self._round_trips.pop(name, None)
        return found

    def contents(self, loop: Mapping[str, Any]) -> Contents:
        """The state as it is now; tensors alias the live ones.

        Args:
            loop: small state of the loop itself, as JSON; goes with the rest.

        Raises:
            TypeError: something has a state that a checkpoint cannot hold.
        """
        trees: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}

        def tree(name: str, state: object) -> Any:
            found, inside = split(name, state)
            tensors.update(inside)
            return found

        for name, other in self._others.items():
            trees[name] = tree(name, other if isinstance(other, MutableMapping) else other.state_dict())
        if self._updates is not None:
            trees[UPDATES] = tree(UPDATES, self._updates)
        moments: dict[str, Tensor] = {}
        records = {}
        for one in self._optimizers:
            state = one.state()
            moments |= state.tensors if self._stages is None else self._of_all_stages(state)
            rest, inside = split(f"{OPTIMIZERS}:{one.name}", state.rest)
            if split_over_ranks := sorted(name for name, tensor in inside.items() if is_sharded(tensor)):
                raise TypeError(
                    f"{type(one.optimizer).__name__} keeps {enumerated(split_over_ranks)}, which is split over the "
                    "ranks, elsewhere than by parameter and name, and could not be split again; take ddp"
                )
            tensors.update(inside)
            records[one.name] = {"groups": state.groups, "rest": rest} | ({ADDED: state.added} if state.added else {})
            if self._hyperparameters:
                where = f"{HYPERPARAMETERS}:{one.name}"
                records[one.name][HYPERPARAMETERS] = tree(where, state.hyperparameters)
        extra = extra_state(self._model)
        changed = {name: one.requires_grad for name, one, learned in self._learns if one.requires_grad != learned}
        found = self._weights(self._model)
        return Contents(
            weights=found,
            optimizer=moments,
            others=tensors,
            average=None if self._average is None else self._weights(self._average),
            unrounded=buffers(self._model) | frozenset(filter(is_extra, found)),
            own=self._own(found),
            loop={
                **loop,
                **({OTHER_STATES: trees} if trees else {}),
                **({OPTIMIZERS: records} if records else {}),
                **({EXTRA: tree(EXTRA, extra)} if extra else {}),
                **({AVERAGED: True} if self._average is not None else {}),
                **({REQUIRES_GRAD: changed} if changed else {}),
            },
        )

    def saved(self, group: Group, loop: Mapping[str, Any]) -> Contents:
        """The state for a checkpoint. Where each rank has something of its own, it is that of rank 0, and with buffers
        all ranks go on with that. Collective.

        Args:
            loop: as for `contents`.

        Raises:
            TypeError: something has a state that a checkpoint cannot hold.
        """
        group.copy_from_first(self.local())
        return self.contents(loop).of_first(group)

    def replicated(self) -> dict[str, Tensor]:
        """The tensors that are the same on every rank while all is well: weights, buffers, moments, averages."""
        found = {f"weights of {name}": tensor for name, tensor in self._weights(self._model).items()}
        for one in self._optimizers:
            moments: Tensors = one.state().tensors
            if self._stages is not None:
                moments = self._stages.moments_here(moments)
            found |= {f"moments of {name}": tensor for name, tensor in moments.items()}
        if self._average is not None:
            found |= {f"average of {name}": tensor for name, tensor in self._weights(self._average).items()}
        # Placeholders have no values.
        return found if self._stages is None else {name: one for name, one in found.items() if not here(one).is_meta}

    def learned(self) -> dict[str, Tensor]:
        """The weights that learn."""
        named = self._model.named_parameters()
        return {plain(name): one for name, one in named if one.requires_grad and not is_lazy(one)}

    def replicas(self) -> dict[str, dict[str, Tensor]]:
        """The tensors of which ranks that hold the same part hold the same values, while gradients are averaged: by
        kind and name. A rank's buffers are its own."""
        known = {plain(name): one for name, one in self._model.named_parameters() if not is_lazy(one)}
        if self._stages is not None:
            known = {name: one for name, one in known.items() if name in self._stages.owners}
        moments: dict[str, Tensor] = {}
        for one in self._optimizers:
            mine = one.state().tensors
            moments |= mine if self._stages is None else self._stages.moments_here(mine)
        found = {
            "weights": self._placed({name: one for name, one in known.items() if one.requires_grad}),
            "moments": moments,
            "frozen weights": self._placed({name: one for name, one in known.items() if not one.requires_grad}),
        }
        if self._average is not None:
            averaged = {plain(name): one for name, one in self._average.named_parameters()}
            found["averages"] = self._placed({name: one for name, one in averaged.items() if name in known})
        # Placeholders have no values.
        return {
            kind: {name: one for name, one in some.items() if not here(one).is_meta} for kind, some in found.items()
        }

    def mesh_sizes(self) -> dict[str, int]:
        """Ranks in each named dimension of the meshes over which weights are split."""
        found: dict[str, int] = {}
        for one in self._model.parameters():
            mesh = getattr(one, "device_mesh", None)
            if mesh is not None and mesh.mesh_dim_names is not None:
                found |= dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
        return found

    def _own(self, found: Tensors) -> frozenset[str]:
        """Names of weights that are neither parameters nor buffers."""
        named = frozenset(plain(name) for name, _ in self._model.named_parameters(remove_duplicate=False))
        rest = found.keys() - named - buffers(self._model)
        return frozenset(name for name in rest if not is_sharded(found[name]))

    def local(self) -> list[Tensor]:
        """The tensors that ranks change each for itself, such as the running statistics of batch norm."""
        if self._stages is not None:
            return []  # each tensor of a checkpoint is given by one rank
        names = buffers(self._model)
        kept = [self._model] if self._average is None else [self._model, self._average]
        # An average has copies of them, of the moment when this rank last updated it.
        return [tensor for one in kept for name, tensor in weights(one).items() if name in names] if names else []

    def check(self, contents: Contents) -> None:
        """See whether a state belongs to what is kept; nothing is changed.

        Raises:
            DoesNotFit: it belongs to something else.
            Broken: it does not fit together in itself.
        """
        check_weights(self._model, contents.weights, self._extra(contents))
        for one, state in self._optimizer_states(contents):
            one.check(state)
        if self._average is not None:
            averaged = contents.weights if contents.average is None else contents.average
            check_weights(self._average, averaged, extra_state(self._average))
        if not isinstance(contents.loop.get(OTHER_STATES, {}), dict):
            raise Broken(f"{OTHER_STATES} is no object")

    def load(self, contents: Contents) -> None:
        """Put a state back. To be called after `check`; what fails here leaves nothing that can be used.

        Raises:
            DoesNotFit: something that is kept does not take its state.
        """
        extra = self._extra(contents)
        load_weights(self._model, contents.weights, extra, is_borrowed=True)
        changed = contents.loop.get(REQUIRES_GRAD, {})
        for name, one in self._model.named_parameters():
            if plain(name) in changed:
                one.requires_grad_(changed[plain(name)])
        # Of weights that are averaged the average may be what is in the file.
        if self._average is not None:
            averaged = contents.weights if contents.average is None else contents.average
            # What modules keep beside tensors is not averaged.
            load_weights(self._average, averaged, extra_state(self._average), is_borrowed=True)
            contents.let_go_all(contents.average or {})
        contents.let_go_all(contents.weights)
        self._load_moments(contents)
        trees = contents.loop.get(OTHER_STATES, {})
        for name, other in self._others.items():
            # A schedule or a scaler that has come since, or had nothing to keep, begins afresh.
            if name in trees and (isinstance(other, MutableMapping) or trees[name] != {"dict": {}}):
                _load(name, other, self._joined(trees[name], contents))
        if self._updates is not None:
            count = self._joined(trees[UPDATES], contents) if UPDATES in trees else torch.ones(())
            self._updates.copy_(count)
        contents.let_go_all(contents.others)

    def load_optimizer(self, contents: Contents) -> None:
        """Put back the state of the optimizer alone, of another run.

        Raises:
            DoesNotFit: it is of other parameters.
        """
        for one, state in self._optimizer_states(contents):
            one.check(state)
        self._load_moments(contents)

    def other(self, name: str, contents: Contents) -> Any:
        """What a checkpoint has under a name among the others; None if nothing."""
        trees = contents.loop.get(OTHER_STATES, {})
        return self._joined(trees[name], contents) if name in trees else None

    def _load_moments(self, contents: Contents) -> None:
        states = self._optimizer_states(contents)
        for one, state in states:
            one.add_groups(state)
        parameters = {name: parameter for one in self._optimizers for name, parameter in one.parameters().items()}
        moments = {}
        for path, tensor in ordered(contents.optimizer).items():
            parameter = parameters.get(plain(path.rpartition("/")[0]))
            if self._stages is None or parameter is None or not parameter.is_meta:
                moments[path] = moment(tensor, parameter, path.endswith(BY_ROW))
            contents.let_go(tensor)
        for one, state in states:
            one.load(replace(state, tensors={path: moments[path] for path in state.tensors if path in moments}))

    def _optimizer_states(self, contents: Contents) -> list[tuple[NamedOptimizer, OptimizerState]]:
        """For each optimizer what the checkpoint has of it.

        Raises:
            DoesNotFit: the checkpoint is of other optimizers.
        """
        records = contents.loop.get(OPTIMIZERS)
        if records is None:
            return [(one, self._unnamed(contents)) for one in self._optimizers[:1]]
        if records.keys() != {one.name for one in self._optimizers}:
            theirs, ours = _told(records), _told(one.name for one in self._optimizers)
            raise DoesNotFit(f"the checkpoint has the state of {theirs}, and the script keeps {ours}")
        found = []
        for one in self._optimizers:
            record = records[one.name]
            hyperparameters = None
            if self._hyperparameters and HYPERPARAMETERS in record:
                hyperparameters = self._joined(record[HYPERPARAMETERS], contents)
            mine = {path: tensor for path, tensor in contents.optimizer.items() if one.owns(path)}
            rest = self._joined(record["rest"], contents)
            added = record.get(ADDED, 0)
            found.append((one, OptimizerState(mine, rest, record["groups"], hyperparameters, added)))
        return found

    def _unnamed(self, contents: Contents) -> OptimizerState:
        """As checkpoints had it that did not say which parameters an optimizer has."""
        tree = contents.loop.get(OTHER_STATES, {}).get(HYPERPARAMETERS)
        kept = self._joined(tree, contents) if tree is not None and self._hyperparameters else None
        return OptimizerState(dict(contents.optimizer), hyperparameters=kept)

    def _extra(self, contents: Contents) -> dict[str, Any]:
        return dict(self._joined(contents.loop[EXTRA], contents)) if EXTRA in contents.loop else {}

    def _joined(self, tree: Any, contents: Contents) -> Any:
        first = next(self._model.parameters(), None)
        device = CPU if first is None else first.device
        return join(tree, contents.others, device if self._stages is None else self._stages.device)

    def _weights(self, model: nn.Module) -> dict[str, Tensor]:
        return self._placed(weights(model))

    def _placed(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors if self._stages is None else self._stages.placed(tensors)

    def _of_all_stages(self, state: OptimizerState) -> dict[str, Tensor]:
        """
        Raises:
            TypeError: an optimizer keeps more than tensors by parameter.
        """
        assert self._stages is not None
        if any(told["more"] for told in self._stages.gather({"more": bool(state.rest)})):
            raise TypeError(
                "the optimizer keeps more than one tensor by name for each parameter, which strategy: pipeline cannot "
                "collect from its stages; take ddp or fsdp"
            )
        return self._stages.moments(state.tensors)


def _averaged(average: nn.Module) -> nn.Module:
    return average.module if isinstance(average, AveragedModel) else average


def _told(names: Iterable[str]) -> str:
    known = sorted(names)
    return "the optimizers " + ", ".join(known) if any(known) else "one optimizer" if known else "no optimizer"


def _load(name: str, other: Stateful | MutableMapping[str, Any], state: Any) -> None:
    try:
        if isinstance(other, MutableMapping):
            put_back(other, state)
        else:
            other.load_state_dict(state)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise DoesNotFit(f"the state of {name!r} does not fit it: {error!r}") from error
