"""Points at which a rank of a test kills itself (`RANK:POINT:STEP`), and the data that it trains on."""

import os
import signal
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Faults:
    """Kills this rank at points, each once, after so many steps or more; a fault that is played leaves a file."""

    def __init__(self, folder: str, faults: list[str]) -> None:
        self.folder, self.faults, self.step = Path(folder), faults, 0

    def at(self, point: str) -> None:
        for fault in self.faults:
            rank, where, step = fault.split(":")
            if rank == os.environ["RANK"] and where == point and self.step >= int(step):
                try:
                    (self.folder / fault.replace(":", "-")).touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner: Any, name: str) -> None:
        """Play faults before and after a method."""
        original = getattr(owner, name)

        def method(*arguments: Any, **options: Any) -> Any:
            self.at(name)
            result = original(*arguments, **options)
            self.at(f"{name}-done")
            return result

        setattr(owner, name, method)


class Lines(Dataset[dict[str, Tensor]]):
    """400 lines of eight points, each with its slope."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.faults.at("read")
        slope = (index % 17) / 17
        return {"points": torch.arange(8.0) * slope + (index % 13) / 130, "slope": torch.tensor(slope)}
