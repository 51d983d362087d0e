"""Allocates and frees the same blocks step after step, and prints how many new pages the system had to give.

Arguments: who sets what becomes of freed memory (`trainer` and `evaluator`: its start, `setting`: the call alone,
`large` and `small`: that and then fsdp with a model of this size, `adapted`: a script's rank, `nobody`), and the sizes
of the blocks in MiB.
"""

import ctypes
import resource
import sys

STEPS = 5

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
NO_HUGE_PAGES = 41
# One huge page would count once for 512.
libc.prctl(NO_HUGE_PAGES, 1, 0, 0, 0)


def step(sizes: list[int]) -> None:
    blocks = [libc.malloc(size << 20) for size in sizes]
    for block, size in zip(blocks, sizes, strict=True):
        ctypes.memset(block, 1, size << 20)
    for block in blocks:
        libc.free(block)


def train(*_: object) -> int:
    sizes = [int(size) for size in sys.argv[2:]]
    step(sizes)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(STEPS):
        step(sizes)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return 0


if sys.argv[1] == "trainer":
    import tandem_trainer.__main__ as trainer

    trainer._run = train
    trainer.main()
elif sys.argv[1] == "evaluator":
    import tandem_evaluator.__main__ as evaluator

    evaluator._whereabouts = lambda index: sys.exit(train())
    evaluator.main(["--index", "0"])
else:
    if sys.argv[1] in ("setting", "large", "small"):
        from tandem_trainer.malloc import keep_freed_memory

        assert keep_freed_memory()
    if sys.argv[1] == "adapted":
        from tandem_trainer.malloc import use_adapted_thresholds

        print(use_adapted_thresholds(), file=sys.stderr)
    if sys.argv[1] in ("large", "small"):
        import torch
        import torch.distributed as dist

        from tandem.job.tasks import Loop
        from tandem_trainer.process_group import Group
        from tandem_trainer.strategies.fsdp import Fsdp

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        features = 4096 if sys.argv[1] == "large" else 16
        strategy = Fsdp(Loop(strategy="fsdp"), Group(0, 1, 0, torch.device("cpu")), 1, 1)
        model = torch.nn.Linear(features, features, bias=False)
        # It stays, as a model does: freed, it would leave room for the blocks. Its task is not looked at.
        strategy.shard(model, None, None)  # type: ignore[arg-type]
    train()
