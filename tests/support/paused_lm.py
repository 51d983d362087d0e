"""A language model that learns so many parts of batches and then waits, so that a test may kill it in peace.

However slow the machine is, such a run is neither at its end nor further than its test expects when it is killed.
"""

import os
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tandem_trainer.causal_lm import CausalLM

PARTS, UNTIL = "PAUSED_LM_PARTS", "PAUSED_LM_UNTIL"
"""Variables: after how many parts it waits, and for which file."""


class PausedLM(CausalLM):
    """`causal-lm`, with a pause."""

    parts = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """As that of `causal-lm`."""
        self.parts += 1
        while self.parts > int(os.environ[PARTS]) and not Path(os.environ[UNTIL]).exists():
            time.sleep(0.01)
        return super().loss(model, batch)
