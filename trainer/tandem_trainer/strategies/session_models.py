"""The models of a script with a session: each whole on every rank, or split over the ranks.

A script distributes them one by one, by `ddp` or by `fsdp`. With tensor parallelism neighbouring ranks work on the same
samples, so all ranks form one mesh, which the script may also use to split a model itself (`Session.mesh`).
"""

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tandem_trainer.checkpoint.sharding import copies_of, here, is_sharded, placed_like
from tandem_trainer.checkpoint.state import LOCAL_SGD
from tandem_trainer.data.keyed import mixed, seed_everything
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.meter import Busy
from tandem_trainer.models.dropout import Draws, key_dropout
from tandem_trainer.process_group import Group
from tandem_trainer.strategies.strategy import Plan, blocks_of, clip_parts
from tandem_trainer.strategies.tensor import check

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.hooks import RemovableHandle

    from tandem_trainer.strategies.replicated import Comparison

log = logging.getLogger(__name__)

_OPTIONS = {*inspect.signature(DistributedDataParallel).parameters} - {"module", "device_ids", "output_device"}
_SHARDING_OPTIONS = {"mesh", "reshard_after_forward", "mp_policy", "offload_policy"}
"""Of fully_shard. The others are for single modules, and this is for a whole model."""

SessionStrategy = Literal["ddp", "fsdp"]
"""How a session distributes a model: `ddp` keeps it whole on each rank, `fsdp` splits each tensor."""


class Models:
    """All models of a session."""

    def __init__(self, group: Group, seed: int, busy: Busy, tensor_parallel: int = 1, per_worker: int = 0) -> None:
        """
        Args:
            busy: times the forward passes of all of them.
            tensor_parallel: how many neighbouring ranks work on the same samples; one rank alone splits nothing.
            per_worker: ranks of each worker; 0: there is one worker.

        Raises:
            ConfigurationError: the ranks of a worker cannot be divided like that.
        """
        per_worker = min(per_worker or group.world_size, group.world_size)
        if tensor_parallel < 1 or (group.world_size > 1 and per_worker % tensor_parallel):
            raise ConfigurationError(
                f"Session(tensor_parallel={tensor_parallel}) does not divide the {per_worker} processes of a worker"
            )
        self._group, self._seed, self._busy = group, seed, busy
        self._degree = tensor_parallel if group.world_size > 1 else 1
        self.dp_rank, self.dp_size = group.rank // self._degree, group.world_size // self._degree
        """Data-parallel rank and world size: ranks with one number work on the same samples."""
        self._draws: list[Draws] = []
        self._averaging: list[DistributedDataParallel] = []
        self._called: set[int] = set()
        """Places in the list before of those whose forward pass has run."""
        self._recording: list[DistributedDataParallel] = []
        self._made: DeviceMesh | None = None
        self._whole: list[tuple[str, nn.Parameter]] = []
        """Weights of models that a plan for tensor parallelism splits which it leaves whole."""
        self._comparison: Comparison | None = None
        """Of their gradients, while it is due."""
        self._before_steps: RemovableHandle | None = None

    @property
    def mesh(self) -> "DeviceMesh":
        """All ranks: [shard, tensor]. Collective when it is asked for first.

        Raises:
            ConfigurationError: there is one rank.
        """
        if self._group.world_size == 1:
            raise ConfigurationError("session.mesh: one process alone has no mesh; split nothing if world_size is 1")
        if self._made is None:
            self._made = self._group.mesh({"shard": self.dp_size, "tensor": self._degree})
        return self._made

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
        """As `Session.distribute`, with its errors."""
        if strategy not in ("ddp", "fsdp"):
            raise ValueError(f"distribute(…, strategy={strategy!r}): a session has ddp and fsdp; others need a task")
        known, by = (_OPTIONS, "DistributedDataParallel") if strategy == "ddp" else (_SHARDING_OPTIONS, "fully_shard")
        for name in options:
            if name not in known:
                raise TypeError(f"distribute(…, {name}=…): {by} has no such option to choose")
        learns = any(one.requires_grad for one in model.parameters())
        is_split = any(map(is_sharded, model.parameters()))
        if is_split:
            self._check_split(model)
            if options or comm_hook is not None or tensor_plan is not None:
                raise TypeError("distribute: the model is split already, so there is nothing to choose")
        elif strategy == "ddp" and (tensor_plan is not None or (self._degree > 1 and learns)):
            raise ConfigurationError('tensor parallelism in a session needs distribute(…, strategy="fsdp")')
        # By its name: the import of torch's hooks takes time.
        if type(comm_state).__name__ == "PostLocalSGDState":
            raise ConfigurationError(f"distribute(…, comm_state=PostLocalSGDState(…)): {LOCAL_SGD}")
        if strategy == "fsdp" and comm_hook is not None:
            raise TypeError("distribute(…, comm_hook=…): gradients that fully_shard reduces take no hook")
        if tensor_plan is not None:
            check(tensor_plan, model, self._degree)
        if sample_dropout:
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
                self._follow(model)
        else:
            model.to(self._group.device)
            if self._group.world_size > 1 and learns:
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
        place = len(self._averaging)
        self._averaging.append(averaging)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def called(module: nn.Module, given: Any) -> None:
            self._called.add(place)
            first_call.remove()

        first_call = averaging.register_forward_pre_hook(called)
        if options.get("static_graph"):
            self._recording.append(averaging)
        return averaging

    def _check_split(self, model: nn.Module) -> None:
        """
        Raises:
            ConfigurationError: gradients of something that learns would not be averaged over the ranks.
        """
        for name, one in model.named_parameters():
            if not one.requires_grad or self.dp_size == 1:
                continue
            mesh = getattr(one, "device_mesh", None)
            ranks = [] if mesh is None else mesh.mesh.flatten().tolist()
            if len({rank // self._degree for rank in ranks}) < self.dp_size:
                raise ConfigurationError(
                    f"distribute: the model is split over ranks, but {name} not over those with other samples, so each "
                    'of them would learn its own; call fully_shard(model, mesh=session.mesh["shard"])'
                )

    def _split(self, model: nn.Module, tensor_plan: Plan | None, options: Mapping[str, Any]) -> None:
        # Their imports take half a second, for those alone that need it.
        from torch.distributed.fsdp import CPUOffloadPolicy

        from tandem_trainer.strategies.fsdp import shard_blocks, split_matrices

        if any(one.is_meta for one in model.parameters()):
            raise ConfigurationError(
                "distribute: the model is on the meta device; make it on the CPU, with its weights"
            )
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
            # Otherwise parameters stay where they are.
            model.to(self._group.device)

    def _follow(self, model: nn.Module) -> None:
        """Have the gradients be compared of what a plan leaves whole."""
        from tandem_trainer.strategies.replicated import Comparison, is_whole

        # Now: while a block computes it has other parameters, with the same names and without gradients.
        self._whole += [(name, one) for name, one in model.named_parameters() if is_whole(one)]
        if self._comparison is None:
            self._comparison = Comparison(self.mesh["tensor"].get_group(), self._group.device)
            # A script may have several optimizers, and wrap them.
            self._before_steps = register_optimizer_step_pre_hook(self._note)

    def share(self, model: nn.Module) -> None:
        """As `Session.share`."""
        if self._group.world_size == 1:
            return
        for tensor in (*model.parameters(), *model.buffers()):
            # Not through the ranks' own group, which would go by the CPU; one at a time, for the model may be too large
            # for the device.
            whole = tensor.data.to(self._group.device).contiguous()
            dist.broadcast(whole, 0)
            tensor.data.copy_(whole)

    def mistake(self) -> str:
        """How the script keeps gradients from being averaged, as a sentence; empty if it is not known to."""
        names = [type(one.module).__name__ for place, one in enumerate(self._averaging) if place not in self._called]
        if not names:
            return ""
        return (
            f"the script has never called what session.distribute returned for its {names[0]}, so nothing averages the "
            "gradients. Write model = session.distribute(network) and call model(…), not network(…)"
        )

    def clip(self, parameters: Sequence[Tensor], most: float) -> Tensor:
        """As `Session.clip_grad_norm_`."""
        learned = [one for one in parameters if one.grad is not None]
        if not any(is_sharded(one) for one in learned):
            return nn.utils.clip_grad_norm_(learned, most)
        for one in learned:
            assert one.grad is not None
            one.grad = placed_like(one, one.grad)
        gradients = [here(one.grad) for one in learned if one.grad is not None]
        copies = [copies_of(one, self._group.world_size) for one in learned]
        return clip_parts(gradients, copies, most, self._group.device)

    def time(self, forward: nn.Module) -> None:
        """The forward passes of a module are this rank's own work."""
        forward.register_forward_pre_hook(lambda module, given: self._busy.__enter__())
        forward.register_forward_hook(lambda module, given, out: self._busy.__exit__(None, None, None))

    def draw(self, step: int, mine: Tensor, part: int = 0) -> None:
        """Random numbers from here on follow from the step and its part, and dropout's from the samples."""
        parts = (part,) if part else ()
        seed_everything(mixed(self._seed, step, self.dp_rank, *parts), self._group.device)
        for draws in self._draws:
            draws.set(self._seed, step, mine.to(self._group.device))

    def told(self, part: Tensor) -> Tensor:
        """This rank's part of the global mean: ranks that work on the same samples share what they say of them."""
        return part.detach() / self._degree

    @contextlib.contextmanager
    def synchronised(self, last: bool) -> Iterator[None]:
        """Gradients are averaged over ranks in the backward passes of the last part of a batch, and in no other. Those
        of a model that is split are after each part: whole ones would cost the memory that was saved."""
        with contextlib.ExitStack() as waiting:
            for averaging in self._averaging:
                # One with a static graph records it in its first step, and cannot go without its collectives there
                # (torch 2.15). What is averaged again with the next part stays the same average.
                if not last and averaging not in self._recording:
                    waiting.enter_context(averaging.no_sync())
            yield

    def end_step(self) -> None:
        """A step is complete. Collective.

        Raises:
            ConfigurationError: the plan of a model for tensor parallelism is not complete.
        """
        self._recording = []
        if self._comparison is None:
            return
        self._comparison.compare(self._whole)
        if not self._comparison.is_due:
            self.close()

    def close(self) -> None:
        """No step will follow."""
        if self._before_steps is not None:
            self._before_steps.remove()
        self._comparison = self._before_steps = None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before a step of an optimizer, for afterwards scripts clear gradients."""
        if self._comparison is not None:
            learns = {id(one) for group in optimizer.param_groups for one in group["params"]}
            self._comparison.note(one for _, one in self._whole if id(one) in learns)
