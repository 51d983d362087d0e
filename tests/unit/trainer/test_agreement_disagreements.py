"""Whatever ranks must agree on and one of them does not: all ranks end, within one vote, with a sentence that names it.

Ranks are threads that do what a run does (tandem_trainer.elastic_run): they compare their terms, take steps, vote on
their samples, and compare what they hold.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from tandem.wire.status import CORRUPTIONS
from tandem_trainer.agreement import SampleDigest, SamplesDiffer, Terms, agree, refuse_samples
from tandem_trainer.checkpoint.replicas import Replicas
from tandem_trainer.checkpoint.restoring import ReplicasDiffer
from tandem_trainer.checkpoint.train_state import TrainState
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.process_group import Group
from tests.support.threads import Control, on_ranks

RANKS, BATCH, WIDTH = 3, 4, 3
VOTE_STEPS = 4
STRANGE = 1
"""The rank that differs."""
TERMS = Terms(
    seed=1,
    samples=240,
    global_batch_size=24,
    epochs=3,
    max_steps=30,
    order="Weighted 0",
    mixture=(3, 4),
    strategy=("ddp",),
    dtypes=("float32",),
    settings={"optimizer": {"name": "adamw", "learningRate": 0.1}, "emaDecay": 0.9},
)


class Rank:
    """What one rank trains with."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.ModuleDict({"first": nn.Linear(WIDTH, WIDTH), "frozen": nn.Linear(WIDTH, WIDTH)})
        self.net["frozen"].requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.net["first"].parameters(), lr=0.05, amsgrad=True)
        self.average = AveragedModel(self.net)  # type: ignore[no-untyped-call]
        self.kept = TrainState(self.net, self.optimizer, self.average)
        self.epoch, self.length, self.content, self.updates = 0, BATCH, 7, 1
        self.scale = 1.0
        self.order: Callable[[Tensor], Tensor] = torch.Tensor.clone

    def step(self, step: int) -> Tensor:
        """The sample ids of the step that it takes."""
        self.optimizer.zero_grad()
        rows = torch.sin(torch.arange(float(WIDTH)) * (step + 1))
        self.net["frozen"](self.net["first"](rows)).square().sum().backward()
        for one in self.net["first"].parameters():
            if one.grad is not None:
                one.grad *= self.scale
        self.optimizer.step()
        for _ in range(self.updates):
            self.average.update_parameters(self.net)
        first = self.epoch * 240 + step * BATCH
        return self.order(torch.arange(first, first + self.length))

    @property
    def weight(self) -> nn.Parameter:
        found = self.net["first"].weight
        assert isinstance(found, nn.Parameter)
        return found

    @property
    def moments(self) -> dict[str, Any]:
        return dict(self.optimizer.state[self.weight])

    def set(self, **options: Any) -> None:
        self.optimizer.param_groups[0].update(options)

    def flip(self, tensor: Tensor) -> None:
        """A wrong bit in the memory."""
        tensor.detach().view(torch.int32).reshape(-1)[1] ^= 1 << 22

    def add_parameter(self) -> None:
        if "more" not in self.net:
            self.net["more"] = nn.Linear(1, 1)

    def lose_moments(self) -> None:
        self.optimizer.state.pop(self.weight, None)

    def round_moments(self) -> None:
        state = self.optimizer.state[self.weight]
        state["exp_avg"] = state["exp_avg"].double()


IN_TERMS: dict[str, Any] = {
    "tandem": "0.0.1",
    "torch": "2.11.0",
    "code": "sha256:1",
    "seed": 2,
    "strategy": ("fsdp",),
    "dtypes": ("bfloat16",),
    "samples": 239,
    "global_batch_size": 23,
    "drop_last": True,
    "epochs": 4,
    "max_steps": 31,
    "order": "Weighted 1",
    "mixture": (4, 3),
}
IN_SETTINGS: dict[str, Any] = {
    "another value": {"emaDecay": 0.99},
    "a value within": {"optimizer": {"name": "adamw", "learningRate": 0.2}},
    "one more": {"microBatchSize": 4},
}


@dataclass(frozen=True)
class Planted:
    """What one rank does otherwise from a step on, and what the sentence says."""

    do: Callable[[Rank], object]
    says: str
    at_vote: bool = False
    """Whether it comes right before a vote, because a step would change other things, too, or cannot be taken."""


SAMPLES, WEIGHTS, MOMENTS = "took other samples in step", "held other weights than", "held other moments than"
WHILE_TRAINING = {
    "other samples": Planted(lambda rank: setattr(rank, "order", lambda ids: ids + 1), SAMPLES),
    "another order": Planted(lambda rank: setattr(rank, "order", lambda ids: ids.flip(0)), SAMPLES),
    "a sample twice": Planted(lambda rank: setattr(rank, "order", lambda ids: ids - ids % 2), SAMPLES),
    "a sample fewer": Planted(lambda rank: setattr(rank, "length", BATCH - 1), SAMPLES),
    "a sample more": Planted(lambda rank: setattr(rank, "length", BATCH + 1), SAMPLES),
    "an epoch ahead": Planted(lambda rank: setattr(rank, "epoch", 1), SAMPLES),
    "other content": Planted(lambda rank: setattr(rank, "content", 8), SAMPLES),
    "a learning rate": Planted(lambda rank: rank.set(lr=0.1), WEIGHTS),
    "weight decay": Planted(lambda rank: rank.set(weight_decay=0.5), WEIGHTS),
    "betas": Planted(lambda rank: rank.set(betas=(0.5, 0.6)), "held other"),
    "epsilon": Planted(lambda rank: rank.set(eps=0.1), WEIGHTS),
    "maximized": Planted(lambda rank: rank.set(maximize=True), WEIGHTS),
    "clipping": Planted(lambda rank: setattr(rank, "scale", 0.5), "held other"),
    "gradients": Planted(lambda rank: setattr(rank, "scale", -1.0), WEIGHTS),
    "a weight": Planted(lambda rank: rank.flip(rank.weight), WEIGHTS),
    "a bias": Planted(lambda rank: rank.flip(rank.net["first"].bias), WEIGHTS),  # type: ignore[arg-type]
    "a frozen weight": Planted(
        lambda rank: rank.flip(rank.net["frozen"].weight), "held other frozen weights than", at_vote=True
    ),  # type: ignore[arg-type]
    "a frozen bias": Planted(
        lambda rank: rank.flip(rank.net["frozen"].bias), "held other frozen weights than", at_vote=True
    ),  # type: ignore[arg-type]
    "a moment": Planted(lambda rank: rank.flip(rank.moments["exp_avg"]), MOMENTS, at_vote=True),
    "a second moment": Planted(lambda rank: rank.moments["exp_avg_sq"].mul_(1.001), MOMENTS, at_vote=True),
    "a largest moment": Planted(lambda rank: rank.moments["max_exp_avg_sq"].mul_(1.001), MOMENTS, at_vote=True),
    "a count of steps": Planted(lambda rank: rank.moments["step"].add_(1), MOMENTS, at_vote=True),
    "lost moments": Planted(Rank.lose_moments, "held other tensors than", at_vote=True),
    "the type of a moment": Planted(Rank.round_moments, "held other tensors than", at_vote=True),
    "an average": Planted(lambda rank: rank.flip(rank.average.module["first"].weight), "held other averages than"),  # type: ignore[index, union-attr, arg-type]
    "updates of an average": Planted(lambda rank: setattr(rank, "updates", 0), "held other averages than"),
    "a parameter more": Planted(Rank.add_parameter, "held other tensors than"),
    "what learns": Planted(lambda rank: rank.weight.requires_grad_(False), "held other tensors than"),
    "the type of weights": Planted(lambda rank: rank.net["frozen"].double(), "held other tensors than", at_vote=True),
}


def trained(
    group: Any, rank: Rank, terms: Terms, steps: int, votes: int, planted: Planted | None = None, since: int = 0
) -> None:
    """Do what a run does, and save at every vote. From step `since` on one rank does otherwise."""
    group._control = Control(group)
    taken = SampleDigest()
    agree(group, terms)
    replicas = Replicas(group, rank.kept.replicas, str)
    losses, first = [0.5] * votes, 1
    for step in range(1, steps + 1):
        ids = rank.step(step)
        if planted is not None and group.rank == STRANGE and step == (steps if planted.at_vote else since):
            planted.do(rank)
        taken.add(step, ids, rank.content)
        if step % votes:
            continue
        vote = group.vote(torch.tensor(losses), False, False, False, taken.digest, 0.1)
        if not vote.same_samples:
            refuse_samples(group, taken, first, step)
        taken.clear()
        replicas.compare(step)
        first = step + 1


@pytest.mark.parametrize(
    ("name", "terms"),
    [(name, replace(TERMS, **{name: value})) for name, value in IN_TERMS.items()]
    + [(next(iter(one)), replace(TERMS, settings={**TERMS.settings, **one})) for one in IN_SETTINGS.values()],
    ids=[*IN_TERMS, *IN_SETTINGS],
)
def test_terms_that_one_rank_has_otherwise_are_refused_at_the_start(name: str, terms: Terms) -> None:
    def begins(group: Group) -> None:
        agree(group, terms if group.rank == STRANGE else TERMS)

    found = on_ranks(RANKS, begins)
    assert [type(one) for one in found] == [ConfigurationError] * RANKS
    assert f"{name} is " in str(found[0])
    assert f" on rank {STRANGE}" in str(found[0])


@pytest.mark.parametrize("since", [1, VOTE_STEPS + 2], ids=["from the start", "from a step on"])
@pytest.mark.parametrize("name", [*WHILE_TRAINING])
def test_what_one_rank_does_otherwise_is_named_within_one_vote(name: str, since: int) -> None:
    planted = WHILE_TRAINING[name]
    last = -(-since // VOTE_STEPS) * VOTE_STEPS
    ranks = [Rank() for _ in range(RANKS)]
    found = on_ranks(RANKS, lambda group: trained(group, ranks[group.rank], TERMS, last, VOTE_STEPS, planted, since))
    assert {type(one) for one in found} <= {SamplesDiffer, ReplicasDiffer}, found
    why = str(found[0])
    assert planted.says in why
    assert f"rank {STRANGE} " in why
    assert f"{last}" in why
    assert {(one.corruption in CORRUPTIONS, *one.ranks) for one in found} == {(True, STRANGE)}


def test_ranks_that_agree_are_never_stopped() -> None:
    ranks = [Rank() for _ in range(RANKS)]
    found = on_ranks(RANKS, lambda group: trained(group, ranks[group.rank], TERMS, 200, VOTE_STEPS))
    assert found == [None] * RANKS


@pytest.mark.full("trainer")
def test_ranks_that_agree_are_not_stopped_in_a_hundred_thousand_steps() -> None:
    ranks = [Rank() for _ in range(2)]
    assert on_ranks(2, lambda group: trained(group, ranks[group.rank], TERMS, 100_000, 100)) == [None] * 2
