"""What goes into a checkpoint, and into which of its files.

`weights.safetensors` is what evaluators read and what is exported. Where that is not what training goes on with (it is
rounded, or an average over steps), training has files of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from tandem.rundir.checkpoint import WEIGHTS
from tandem_trainer.checkpoint.format import header
from tandem_trainer.checkpoint.names import AVERAGE, FULL_WEIGHTS, OPTIMIZER, OTHERS

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
            name: torch.empty_like(
                tensor, device="meta", dtype=tensor.dtype if self._stays(name, tensor) else torch.bfloat16
            )
            for name, tensor in self.evaluated.items()
        }

    def _stays(self, name: str, tensor: Tensor) -> bool:
        return name in self.unrounded or not tensor.is_floating_point() or tensor.element_size() <= ROUNDED_BYTES
