"""Muon for matrices that are split over ranks (`strategy: fsdp`, `tensorParallel`).

Momentum and weight decay are element-wise: each rank computes them for its own part. Orthogonalization needs the whole
matrix. So where ranks hold rows, each rank gets one matrix at a time: it receives the rows from the others, makes the
matrix orthogonal, and sends each rank its rows back. Each rank computes 1/n of all, holds one whole matrix at a time,
and receives 2/n of the bytes of all; they travel in bfloat16, in which the update is computed anyway, so that the steps
are those of `torch.optim.Muon` on whole matrices.

A matrix that is split otherwise, by columns or on two dimensions of a mesh, as with `tensorParallel`, is gathered on
all ranks, and each computes all of its update.

Rejected: gathering every matrix. n ranks would compute the same n times, and receive n/2 times as much. And the private
functions of `torch.optim.Muon`: its steps with a rate of 1 and no momentum are enough.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tandem_trainer.checkpoint.sharding import (
    RowShards,
    full_tensor,
    is_sharded,
    like,
    placed_like,
    rows_of,
    split_like,
    split_rows,
    to_local,
)


class ShardedMuon(torch.optim.Optimizer):
    """`torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, for matrices that are split over ranks or not.

    Its steps are collective: every rank that holds a part takes them, with gradients for the same matrices.

    Args:
        matrices: parameters with two dimensions.
        lr: learning rate; that of AdamW serves (https://arxiv.org/abs/2502.16982, section 2.2).
        momentum: of Nesterov's kind.
        weight_decay: decoupled, as AdamW's.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.1
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. Returns the result of the closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                self._step(group)
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        by_ranks: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for matrix in group["params"]:
            if matrix.grad is None:
                continue
            if is_sharded(matrix) and (dimension := split_rows(matrix)) is not None:
                ranks = dist.get_process_group_ranks(matrix.device_mesh.get_group(dimension))
                by_ranks.setdefault(tuple(ranks), []).append(matrix)
            else:
                full = full_tensor(self._update(matrix, group["momentum"]))
                direction = orthogonal(full)
                self._apply(matrix, to_local(split_like(matrix, direction)) if is_sharded(matrix) else direction, group)
        for holders, matrices in by_ranks.items():
            # Matrices of one round have about the same size, so that no rank waits long for another.
            ordered = sorted(matrices, key=lambda matrix: -matrix.numel())
            for first in range(0, len(ordered), len(holders)):
                self._step_dealt(ordered[first : first + len(holders)], group)

    def _step_dealt(self, matrices: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        """Take the step of some matrices, at most one for each rank that holds rows of them."""
        rows = []
        for matrix in matrices:
            matrix_rows = rows_of(self._update(matrix, group["momentum"]))
            assert matrix_rows is not None
            rows.append(matrix_rows)
        for matrix, direction in zip(
            matrices, orthogonal_rows(rows, [matrix.shape for matrix in matrices]), strict=True
        ):
            self._apply(matrix, direction.view(to_local(matrix).shape), group)

    def _update(self, matrix: nn.Parameter, momentum: float) -> Tensor:
        """Compute the update before orthogonalization, in bfloat16, sharded like the matrix."""
        assert matrix.grad is not None
        state, gradient = self.state[matrix], placed_like(matrix, matrix.grad)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        local, mean = to_local(gradient), to_local(state["momentum_buffer"])
        mean.lerp_(local, 1 - momentum)
        return like(matrix, local.lerp(mean, momentum).to(torch.bfloat16))

    def _apply(self, matrix: nn.Parameter, direction: Tensor, group: dict[str, Any]) -> None:
        """Apply a direction to this rank's part of a matrix."""
        local, rate = to_local(matrix), group["lr"]
        local.mul_(1 - rate * group["weight_decay"])
        # As large as AdamW's steps: section 2.2 of the report named above.
        local.add_(direction.to(local.device), alpha=-rate * (0.2 * math.sqrt(max(matrix.shape))))


def orthogonal(update: Tensor) -> Tensor:
    """Compute the nearest matrix with orthogonal rows or columns, approximately, as `torch.optim.Muon` does.

    Args:
        update: [rows, columns], bfloat16.
    """
    is_tall = update.shape[0] > update.shape[1]
    wide = update.T if is_tall else update
    scratch = nn.Parameter(torch.zeros_like(wide))
    scratch.grad = wide
    # With this rule the rate of a matrix that is not tall is not scaled, so the step from zero is the negative of the
    # direction.
    muon = torch.optim.Muon([scratch], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="original")
    muon.step()  # type: ignore[no-untyped-call]
    direction = -scratch.detach()
    return direction.T if is_tall else direction


def orthogonal_rows(updates: Sequence[RowShards], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Orthogonalize matrices whose rows are spread over ranks: returns this rank's rows of each, flat. Collective.

    Args:
        updates: at most one for each rank of their group, in bfloat16.
        shapes: shapes of the whole matrices.
    """
    group = updates[0].group
    ranks, index = dist.get_world_size(group), dist.get_rank(group)
    own_rows = torch.cat([update.local for update in updates])
    send_counts = [update.local.numel() for update in updates] + [0] * (ranks - len(updates))
    starts = updates[index].begins if index < len(updates) else [0] * (ranks + 1)
    receive_counts = [end - start for start, end in itertools.pairwise(starts)]
    received = _exchange(own_rows, send_counts, receive_counts, group)
    if index < len(updates):
        received = orthogonal(received.view(shapes[index])).reshape(-1)
    return list(torch.split(_exchange(received, receive_counts, send_counts, group), send_counts[: len(updates)]))


def _exchange(
    sent: Tensor, send_counts: Sequence[int], receive_counts: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send each rank of a group `send_counts` elements, in order, and receive `receive_counts`. Collective."""
    received, width = torch.empty(sum(receive_counts), dtype=sent.dtype, device=sent.device), sent.element_size()
    dist.all_to_all_single(
        received.view(torch.uint8),
        sent.view(torch.uint8),
        [count * width for count in receive_counts],
        [count * width for count in send_counts],
        group=group,
    )
    return received
