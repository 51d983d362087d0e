"""What is drawn stays drawn: a run that an older version began goes on with the same order and the same dropout."""

import torch

from tandem_trainer.data.keyed import Permutation
from tandem_trainer.models.dropout import Draws, SampleDropout


def test_a_permutation_is_the_same_in_every_version() -> None:
    assert Permutation(1000, seed=7).values(0, 8).tolist() == [732, 788, 998, 314, 214, 62, 222, 777]
    assert Permutation(10**12, seed=7).values(10**11, 10**11 + 2).tolist() == [630554733483, 136504657314]
    assert Permutation(2**62, seed=2**62).values(2**61, 2**61 + 1).tolist() == [3613626303069391782]


def test_what_dropout_keeps_is_the_same_in_every_version() -> None:
    draws = Draws()
    draws.set(seed=3, step=5, ids=torch.tensor([0, 1, 2**31, 2**33 + 5, 2**62]))
    assert draws.keys.tolist() == [-1552463763, -217849470, -1002863149, 915699346, -1900963236]
    kept = SampleDropout(0.5, 2, draws)(torch.ones(5, 24)) > 0
    assert ["".join("x" if unit else "." for unit in sample) for sample in kept.tolist()] == [
        "xx..x...xxx.x.xxx.x.xx.x",
        "...x...x.xx.x..xx......x",
        "xxx..x.x.x.x..x.x..x..xx",
        "x.x.x..x.......xxx...xxx",
        "x..x..xx..xxxxx.xxx.x..x",
    ]
