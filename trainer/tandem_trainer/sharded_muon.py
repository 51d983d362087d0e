"""Muon for matrices of which each rank holds a part (`strategy: fsdp`, `tensorParallel`).

Momentum and weight decay are by element: each rank takes them for its own part. What makes an update orthogonal takes
the whole matrix. So where ranks hold rows, the matrices are dealt out to them: each rank receives the rows of one
matrix from the others, makes it orthogonal, and sends each its rows back. Each rank computes 1/n of all, holds one
whole matrix at a time, and receives 2/n of the bytes of all; they travel in bfloat16, in which the update is computed
anyway, so that the steps are those of `torch.optim.Muon` on whole matrices.

A matrix that is split otherwise, by columns or on two dimensions of a mesh, as those that `tensorParallel` splits, is
put together on all ranks, and each computes all of its update.

Rejected: that for every matrix. n ranks would compute the same n times, and receive n/2 times as much. And the
functions within `torch.optim.Muon`, which are private: its steps with a rate of 1 and no momentum are all it takes.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tandem_trainer.checkpoint.sharding import (
    Rows,
    here,
    is_sharded,
    like,
    placed_like,
    rows_of,
    split_like,
    split_rows,
    whole,
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
        """Take a step. Returns what the closure does."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                self._step(group)
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        dealt: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for matrix in group["params"]:
            if matrix.grad is None:
                continue
            if is_sharded(matrix) and (dimension := split_rows(matrix)) is not None:
                ranks = dist.get_process_group_ranks(matrix.device_mesh.get_group(dimension))
                dealt.setdefault(tuple(ranks), []).append(matrix)
            else:
                full = whole(self._update(matrix, group["momentum"]))
                found = orthogonal(full)
                self._move(matrix, here(split_like(matrix, found)) if is_sharded(matrix) else found, group)
        for ranks_of_it, matrices in dealt.items():
            # Those that are dealt out together are of about one size, so that none waits long for another.
            ordered = sorted(matrices, key=lambda matrix: -matrix.numel())
            for first in range(0, len(ordered), len(ranks_of_it)):
                self._deal(ordered[first : first + len(ranks_of_it)], group)

    def _deal(self, matrices: Sequence[nn.Parameter], group: dict[str, Any]) -> None:
        """Move some matrices, at most one for each rank that holds rows of them."""
        rows = []
        for matrix in matrices:
            found = rows_of(self._update(matrix, group["momentum"]))
            assert found is not None
            rows.append(found)
        for matrix, moved in zip(matrices, orthogonal_rows(rows, [one.shape for one in matrices]), strict=True):
            self._move(matrix, moved.view(here(matrix).shape), group)

    def _update(self, matrix: nn.Parameter, momentum: float) -> Tensor:
        """The update before orthogonalization, in bfloat16, sharded like the matrix."""
        assert matrix.grad is not None
        state, gradient = self.state[matrix], placed_like(matrix, matrix.grad)
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        mine, mean = here(gradient), here(state["momentum_buffer"])
        mean.lerp_(mine, 1 - momentum)
        return like(matrix, mine.lerp(mean, momentum).to(torch.bfloat16))

    def _move(self, matrix: nn.Parameter, direction: Tensor, group: dict[str, Any]) -> None:
        """Take the step of this rank's part of a matrix."""
        mine, rate = here(matrix), group["lr"]
        mine.mul_(1 - rate * group["weight_decay"])
        # Of the size that AdamW's steps have: section 2.2 of the report named above.
        mine.add_(direction.to(mine.device), alpha=-rate * (0.2 * math.sqrt(max(matrix.shape))))


def orthogonal(update: Tensor) -> Tensor:
    """The nearest matrix with orthogonal rows or columns, about, as `torch.optim.Muon` computes it.

    Args:
        update: [rows, columns], bfloat16.
    """
    is_tall = update.shape[0] > update.shape[1]
    given = update.T if is_tall else update
    scratch = nn.Parameter(torch.zeros_like(given))
    scratch.grad = given
    # A matrix that is not tall keeps its rate with this rule, so the step from zero is the negative of what is sought.
    one = torch.optim.Muon([scratch], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, adjust_lr_fn="original")
    one.step()  # type: ignore[no-untyped-call]
    found = -scratch.detach()
    return found.T if is_tall else found


def orthogonal_rows(updates: Sequence[Rows], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """What `orthogonal` makes of matrices whose rows ranks hold: this rank's rows of each, flat. Collective.

    Args:
        updates: for each rank of their group at most one, in bfloat16.
        shapes: those of the whole matrices.
    """
    group = updates[0].group
    ranks, place = dist.get_world_size(group), dist.get_rank(group)
    given = torch.cat([one.local for one in updates])
    away = [one.local.numel() for one in updates] + [0] * (ranks - len(updates))
    begins = updates[place].begins if place < len(updates) else [0] * (ranks + 1)
    home = [end - begin for begin, end in itertools.pairwise(begins)]
    mine = _exchanged(given, away, home, group)
    if place < len(updates):
        mine = orthogonal(mine.view(shapes[place])).reshape(-1)
    return list(torch.split(_exchanged(mine, home, away, group), away[: len(updates)]))


def _exchanged(given: Tensor, away: Sequence[int], home: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send each rank of a group as many elements as `away` says, in order, and receive `home`. Collective."""
    received, width = torch.empty(sum(home), dtype=given.dtype, device=given.device), given.element_size()
    dist.all_to_all_single(
        received.view(torch.uint8),
        given.view(torch.uint8),
        [count * width for count in home],
        [count * width for count in away],
        group=group,
    )
    return received
