"""The models of a script with a session: each replicated on every rank, or sharded over the ranks.

A script distributes them one by one, by `ddp` or by `fsdp`. With tensor parallelism neighbouring ranks work on the same
samples, so all ranks form one mesh, which the script may also use to split a model itself (`Session.mesh`).
"""

import contextlib
import gc
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tandem_trainer.agreement import deviating_ranks
from tandem_trainer.checkpoint.sharding import copies_of, is_sharded, placed_like, to_local
from tandem_trainer.checkpoint.state import LOCAL_SGD
from tandem_trainer.data.keyed import mixed, seed_everything
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.group_model import OPTIONS, GroupModel, sequence_number
from tandem_trainer.meter import Stopwatch
from tandem_trainer.models.dropout import Draws, key_dropout
from tandem_trainer.process_group import Group, PeerFault
from tandem_trainer.strategies.strategy import Plan, blocks_of, clip_parts
from tandem_trainer.strategies.tensor import check
from tandem_trainer.uncompiled import uncompiled

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

    from tandem_trainer.session_regroup import SessionRegroup
    from tandem_trainer.strategies.replicated import GradientComparison

log = logging.getLogger(__name__)

_OPTIONS = {*inspect.signature(DistributedDataParallel).parameters} - {"module", "device_ids", "output_device"}
_SHARDING_OPTIONS = {"mesh", "reshard_after_forward", "mp_policy", "offload_policy"}
"""Options of fully_shard that apply to a whole model; the others are for single modules."""

SessionStrategy = Literal["ddp", "fsdp"]
"""Strategy of a model in a session: `ddp` replicates it on each rank, `fsdp` shards each tensor."""


class Models:
    """All models of a session."""

    def __init__(
        self,
        group: Group,
        seed: int,
        busy: Stopwatch,
        tensor_parallel: int = 1,
        per_worker: int = 0,
        survival: "SessionRegroup | None" = None,
    ) -> None:
        """
        Args:
            survival: takes the session to another group; None: it restarts.
            busy: measures the forward passes of all of them.
            tensor_parallel: number of neighbouring ranks that work on the same samples; a single rank splits nothing.
            per_worker: number of ranks of each worker; 0 if there is one worker.

        Raises:
            ConfigurationError: the ranks of a worker cannot be divided in this way.
        """
        per_worker = min(per_worker or group.world_size, group.world_size)
        if tensor_parallel < 1 or (group.world_size > 1 and per_worker % tensor_parallel):
            raise ConfigurationError(
                f"Session(tensor_parallel={tensor_parallel}) does not divide the {per_worker} processes of a worker"
            )
        self._group, self._seed, self._busy, self._survival = group, seed, busy, survival
        self._degree = tensor_parallel if group.world_size > 1 else 1
        self.dp_rank, self.dp_size = group.rank // self._degree, group.world_size // self._degree
        """Data-parallel rank and world size; ranks with equal `dp_rank` work on the same samples."""
        self._draws: list[Draws] = []
        self._averaging: list[DistributedDataParallel | GroupModel] = []
        self._called_indices: set[int] = set()
        """Indices into `_averaging` of the models whose forward pass has run."""
        self._recording: list[DistributedDataParallel] = []
        self._mesh: DeviceMesh | None = None
        self._replicated: list[tuple[str, nn.Parameter]] = []
        """Weights that the tensor-parallel plans of the models leave in full on each rank."""
        self._comparison: GradientComparison | None = None
        """Comparison of their gradients, while it is due."""
        self._before_steps: RemovableHandle | None = None

    @property
    def mesh(self) -> "DeviceMesh":
        """Mesh of all ranks: [shard, tensor]. The first access is a collective.

        Raises:
            ConfigurationError: there is only one rank.
        """
        if self._group.world_size == 1:
            raise ConfigurationError("session.mesh: one process alone has no mesh; split nothing if world_size is 1")
        if self._mesh is None:
            self._mesh = self._group.mesh({"shard": self.dp_size, "tensor": self._degree})
        return self._mesh

    def move(self, group: Group) -> None:
        """Go on in another group. The gradients of models are averaged in it from `bind` on."""
        self._group, self.dp_rank, self.dp_size = group, group.rank, group.world_size

    def bind(self, survives: bool) -> None:
        """Average the gradients of models in the current group. Collective, where the session may go on in another one.

        Args:
            survives: whether ranks go on from the state that they hold.

        Raises:
            ConfigurationError, PeerFault: the ranks have distributed different models.
        """
        models = [averaging for averaging in self._averaging if isinstance(averaging, GroupModel)]
        layout = xxhash.xxh3_64_hexdigest(json.dumps([model.layout() for model in models]).encode())
        if deviating_ranks([view["layout"] for view in self._group.gather({"layout": layout})]):
            problem = "the ranks average the gradients of different parameters"
            raise PeerFault(problem) if survives else ConfigurationError(problem)
        for model in models:
            model.bind(self._group)

    def release(self) -> None:
        """Leave the current group. Each DistributedDataParallel goes, and its hooks on the gradients with it."""
        for averaging in self._averaging:
            if isinstance(averaging, GroupModel):
                averaging.release()
        gc.collect()

    def distribute(
        self,
        model: nn.Module,
        sample_dropout: bool,
        strategy: SessionStrategy,
        tensor_plan: Plan | None,
        comm_hook: Callable[[Any, Any], Any] | None,
        comm_state: Any,
        options: Mapping[str, Any],
    ) -> nn.Module:
        """Distribute a model as `Session.distribute` does, with its errors."""
        if strategy not in ("ddp", "fsdp"):
            raise ValueError(
                f"distribute(…, strategy={strategy!r}): a session supports ddp and fsdp; other strategies need a task"
            )
        allowed, function = (
            (_OPTIONS, "DistributedDataParallel") if strategy == "ddp" else (_SHARDING_OPTIONS, "fully_shard")
        )
        for name in options:
            if name not in allowed:
                raise TypeError(f"distribute(…, {name}=…): {function} has no such option to choose")
        if strategy == "fsdp" and self._survival is not None:
            self._survival.refuse('distribute(…, strategy="fsdp")')
        learns = any(parameter.requires_grad for parameter in model.parameters())
        is_split = any(map(is_sharded, model.parameters()))
        if is_split:
            if self._survival is not None:
                self._survival.refuse("the script splits its model")
            # The script has sharded the model itself: only check that gradients will be averaged.
            self._check_split(model)
            if options or comm_hook is not None or tensor_plan is not None:
                raise TypeError("distribute: the model is split already, so there is nothing to choose")
        elif strategy == "ddp" and (tensor_plan is not None or (self._degree > 1 and learns)):
            raise ConfigurationError('tensor parallelism in a session needs distribute(…, strategy="fsdp")')
        # By its name: the import of torch's hooks takes time.
        if type(comm_state).__name__ == "PostLocalSGDState":
            raise ConfigurationError(f"distribute(…, comm_state=PostLocalSGDState(…)): {LOCAL_SGD}")
        if strategy == "fsdp" and comm_hook is not None:
            raise TypeError("distribute(…, comm_hook=…): fully_shard does not support communication hooks")
        if tensor_plan is not None:
            check(tensor_plan, model, self._degree)
        if sample_dropout:
            # Layers are numbered through all models of the session, so that no two draw the same numbers.
            self._draws.append(key_dropout(model, first=sum(draws.layers for draws in self._draws)))
        forward = model
        if is_split:
            # The script has sharded it. Move the remaining tensors to the device.
            for tensor in (*model.parameters(), *model.buffers()):
                if not is_sharded(tensor):
                    tensor.data = tensor.data.to(self._group.device)
        elif strategy == "fsdp" and self._group.world_size > 1:
            self._split(model, tensor_plan, options)
            if self._degree > 1 and tensor_plan is not None:
                self._register_comparison(model)
        else:
            model.to(self._group.device)
            if learns and (survival := self._survival) is not None:
                refused = "comm_hook" if comm_hook is not None else next(iter(options.keys() - OPTIONS), "")
                if refused:
                    survival.refuse(f"distribute(…, {refused}=…)")
                # Not what this rank alone knows: the two ways call different collectives.
                if not survival.agreed_reason(self._group):
                    self._share_first(model, survival)
                    survival.models.append(GroupModel(model, options, survival.passes))
                    forward = self._follow(survival.models[-1])
            if self._group.world_size > 1 and learns and forward is model:
                forward = self._averaged(model, comm_hook, comm_state, options)
        self.time(forward)
        return forward

    def _averaged(
        self, model: nn.Module, comm_hook: Callable[[Any, Any], Any] | None, comm_state: Any, options: Mapping[str, Any]
    ) -> nn.Module:
        devices = [self._group.device] if self._group.device.type == "cuda" else None
        defaults: dict[str, Any] = {"gradient_as_bucket_view": True}
        averaging = DistributedDataParallel(model, device_ids=devices, **(defaults | dict(options)))
        if comm_hook is not None:
            averaging.register_comm_hook(comm_state, comm_hook)
        if options.get("static_graph"):
            self._recording.append(averaging)
        return self._follow(averaging)

    def _share_first(self, model: nn.Module, survival: "SessionRegroup") -> None:
        """Copy the weights of rank 0 to all ranks, as DistributedDataParallel does when it is made."""
        before = sequence_number()
        self.share(model)
        survival.collectives += sequence_number() - before

    def _follow(self, averaging: DistributedDataParallel | GroupModel) -> nn.Module:
        """Record whether the script calls a model."""
        place = len(self._averaging)
        self._averaging.append(averaging)

        @uncompiled
        def called(module: nn.Module, args: Any) -> None:
            self._called_indices.add(place)
            first_call.remove()

        first_call = averaging.register_forward_pre_hook(called)
        return averaging

    def _check_split(self, model: nn.Module) -> None:
        """Check a model that the script has split.

        Raises:
            ConfigurationError: gradients of a weight that learns would not be averaged over the ranks.
        """
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or self.dp_size == 1:
                continue
            mesh = getattr(parameter, "device_mesh", None)
            ranks = [] if mesh is None else mesh.mesh.flatten().tolist()
            if len({rank // self._degree for rank in ranks}) < self.dp_size:
                raise ConfigurationError(
                    f"distribute: the model is split over ranks, but {name} not over those with other samples, so each "
                    'of them would learn its own; call fully_shard(model, mesh=session.mesh["shard"])'
                )

    def _split(self, model: nn.Module, tensor_plan: Plan | None, options: Mapping[str, Any]) -> None:
        # Imported here because it takes half a second, which other scripts should not pay.
        from torch.distributed.fsdp import CPUOffloadPolicy

        from tandem_trainer.strategies.fsdp import shard_blocks, split_matrices

        if any(parameter.is_meta for parameter in model.parameters()):
            raise ConfigurationError(
                "distribute: the model is on the meta device; create it on the CPU, with its weights"
            )
        # Rank 0's weights first: afterwards no rank has a full tensor to copy.
        self.share(model)
        if self._degree > 1 and tensor_plan is not None:
            split_matrices(model, tensor_plan, self.mesh["tensor"])
        settings = {"mesh": self.mesh["shard"], **options}
        if settings["mesh"].size() == 1:
            if options:
                log.warning("setting=%s ignored: all ranks work on the same samples", ",".join(options))
            model.to(self._group.device)
            return
        if "offload_policy" in settings and self._group.device.type == "cpu":
            log.warning("setting=offload_policy ignored: there is no GPU")
            del settings["offload_policy"]
        shard_blocks(model, blocks_of(model), settings)
        if not isinstance(settings.get("offload_policy"), CPUOffloadPolicy):
            # With offloading parameters stay on the CPU.
            model.to(self._group.device)

    def _register_comparison(self, model: nn.Module) -> None:
        """Register the comparison of the gradients of weights that a plan leaves in full."""
        from tandem_trainer.strategies.replicated import GradientComparison, is_replicated

        # Collect the parameters now: while a block computes it has others, with the same names and without gradients.
        self._replicated += [
            (name, parameter) for name, parameter in model.named_parameters() if is_replicated(parameter)
        ]
        if self._comparison is None:
            self._comparison = GradientComparison(self.mesh["tensor"].get_group(), self._group.device)
            # A script may have several optimizers, and wrap them.
            self._before_steps = register_optimizer_step_pre_hook(self._record_gradients)

    def share(self, model: nn.Module) -> None:
        """Copy the tensors of a model from rank 0 to all ranks, as `Session.share` does."""
        if self._group.world_size == 1:
            return
        for tensor in (*model.parameters(), *model.buffers()):
            # Not through Tandem's own group, which communicates on the CPU; one tensor at a time, because the model may
            # be too large for the device.
            buffer = tensor.data.to(self._group.device).contiguous()
            dist.broadcast(buffer, 0)
            tensor.data.copy_(buffer)

    def mistake(self) -> str:
        """Return how the script keeps gradients from being averaged, as a sentence; empty if no mistake is known."""
        names = [
            type(averaging.module).__name__
            for place, averaging in enumerate(self._averaging)
            if place not in self._called_indices
        ]
        if not names:
            return ""
        return (
            f"the script has never called what session.distribute returned for its {names[0]}, so nothing averages the "
            "gradients. Write model = session.distribute(network) and call model(…), not network(…)"
        )

    def clip(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip gradients as `Session.clip_grad_norm_` does."""
        with_gradients = [parameter for parameter in parameters if parameter.grad is not None]
        if not any(is_sharded(parameter) for parameter in with_gradients):
            return nn.utils.clip_grad_norm_(with_gradients, max_norm)
        for parameter in with_gradients:
            # Gradients that are still partial sums are reduced first: the norm of a part is not a part of the norm.
            assert parameter.grad is not None
            parameter.grad = placed_like(parameter, parameter.grad)
        gradients = [to_local(parameter.grad) for parameter in with_gradients if parameter.grad is not None]
        copies = [copies_of(parameter, self._group.world_size) for parameter in with_gradients]
        return clip_parts(gradients, copies, max_norm, self._group.device)

    def time(self, forward: nn.Module) -> None:
        """Count the forward passes of a module as this rank's own work."""
        forward.register_forward_pre_hook(lambda module, args: self._busy.__enter__())
        forward.register_forward_hook(lambda module, args, out: self._busy.__exit__(None, None, None))

    def draw(self, step: int, sample_ids: Tensor, part: int = 0) -> None:
        """Seed random numbers by the step and its part, and dropout by the samples."""
        parts = (part,) if part else ()
        seed_everything(mixed(self._seed, step, self.dp_rank, *parts), self._group.device)
        for draws in self._draws:
            draws.set(self._seed, step, sample_ids.to(self._group.device))

    def examine(self, loss: Tensor) -> Tensor:
        """Return a loss of the script's, whose backward pass is examined where that is due."""
        if self._survival is not None:
            self._survival.examine(loss)
        return loss

    def told(self, part: Tensor) -> Tensor:
        """Return this rank's part of the global mean; ranks that work on the same samples divide it among
        themselves."""
        return part.detach() / self._degree

    @contextlib.contextmanager
    def synchronised(self, last: bool) -> Iterator[None]:
        """Average gradients over the ranks only in the backward passes of the last part of a batch. Gradients of a
        sharded model are averaged after each part: full ones would cost the memory that sharding saves."""
        with contextlib.ExitStack() as waiting:
            for averaging in self._averaging:
                # DistributedDataParallel records a static graph with its collectives in the first step (torch 2.15), so
                # they must run then. Gradients that are averaged again with the next part keep the same average.
                if not last and averaging not in self._recording:
                    waiting.enter_context(averaging.no_sync())
            yield

    def end_step(self) -> None:
        """Finish a step. Collective.

        Raises:
            ConfigurationError: the plan of a model for tensor parallelism is incomplete.
        """
        self._recording = []
        if self._comparison is None:
            return
        self._comparison.compare(self._replicated)
        if not self._comparison.is_due:
            self.close()

    def close(self) -> None:
        """Remove the hooks; no further step follows."""
        if self._before_steps is not None:
            self._before_steps.remove()
        self._comparison = self._before_steps = None

    @uncompiled
    def _record_gradients(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Record gradients before an optimizer's step, because scripts clear them afterwards."""
        if self._comparison is not None:
            learns = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            self._comparison.record(parameter for _, parameter in self._replicated if id(parameter) in learns)
