"""A rank that trains in float16 on the CPU, which is slow and else refused, and begins with a scale that overflows."""

import torch

from tandem_trainer import train
from tandem_trainer.__main__ import main

SCALE = 2.0**30

if __name__ == "__main__":
    train.refuse_slow = lambda loop, device: None
    device, _, *others = torch.amp.GradScaler.__init__.__defaults__
    torch.amp.GradScaler.__init__.__defaults__ = (device, SCALE, *others)
    main()
