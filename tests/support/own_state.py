"""Optimizers and modules that have a way of their own to give and take their state, as libraries ship them, and a save
without a writer process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tandem_trainer.checkpoint import writer
from tandem_trainer.checkpoint.saving import Outcome, Saver

Groups = list[dict[str, Any]]


class Forwarding(torch.optim.Optimizer):
    """An optimizer around another one, whose state_dict it gives; its own `state` is empty."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, inner.defaults)
        self.inner, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


class Lookahead(Forwarding):
    """Pulls the weights back to slow ones every second step, and keeps these by the numbers of the parameters."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner)
        self.slow: dict[int, Tensor] = {}
        self.taken = 0

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.taken += 1
        if self.taken % 2 == 0:
            parameters = [one for group in self.param_groups for one in group["params"]]
            with torch.no_grad():
                for number, one in enumerate(parameters):
                    slow = self.slow.setdefault(number, one.detach().clone())
                    one.copy_(slow.lerp_(one, 0.5))
        return found

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "slow": self.slow, "taken": self.taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.slow, self.taken = dict(state_dict["slow"]), state_dict["taken"]


class Nested(Lookahead):
    """Its state_dict is not of torch's form."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "slow": self.slow, "taken": self.taken}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict["inner"], "slow": state_dict["slow"], "taken": state_dict["taken"]})


def adam(groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.Adam(groups, lr=0.01)


WRAPPED: dict[str, Callable[[Groups], torch.optim.Optimizer]] = {
    "forwarding": lambda groups: Forwarding(adam(groups)),
    "lookahead": lambda groups: Lookahead(adam(groups)),
    "nested": lambda groups: Nested(adam(groups)),
}


class Seen(nn.Module):
    """A metric: a sum, and all values so far. It keeps the very tensors that it loads, as torchmetrics does."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.values = torch.zeros(()), torch.zeros(0)

    def update(self, value: float) -> None:
        self.total += value
        self.values = torch.cat([self.values, torch.tensor([value])])

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}total"], destination[f"{prefix}values"] = self.total, self.values

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.total, self.values = state_dict[f"{prefix}total"], state_dict[f"{prefix}values"]


class Recorded(nn.Module):
    """Its extra state is a tensor that grows, and that it keeps, as the layers of low precision have it."""

    def __init__(self) -> None:
        super().__init__()
        self.history = torch.zeros(0, dtype=torch.float64)

    def update(self, value: float) -> None:
        self.history = torch.cat([self.history, torch.tensor([value], dtype=torch.float64)])

    def get_extra_state(self) -> Tensor:
        return self.history

    def set_extra_state(self, state: Tensor) -> None:
        self.history = state


class SaverHere(Saver):
    """A saver whose writer is a function of this process."""

    def _start_writer(self) -> Any:
        self._process: Any = "here"
        return self._process

    def _stop_writer(self) -> None:
        self._process = None

    def _written(self, request: dict[str, Any]) -> Outcome:
        with memoryview(self._staging._memory) as content:  # type: ignore[union-attr]
            return writer._answer(self._rundir, self._rundir.read_job(), request, content)
