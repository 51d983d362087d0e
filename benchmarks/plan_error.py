"""Error of the memory that `tandem plan` predicts: `python -m benchmarks.plan_error`.

Each shape is trained for three steps by the loop's own `Stepper`, in fresh processes, over gloo if there are two ranks.
The measurement is the peak of the memory that torch's allocator has handed out and not received back. The allocator
counts that itself, in all threads, if a flag asks for it (`COUNTING`); torch's profiler, which runs from before the
model is built, records the count at each allocation. This meter shares no code with the prediction: it includes memory
that kernels allocate inside of an operation, and knows none of the traced shapes. docs/decisions/0037-plan.md has the
rejected meters, and why.

Under `hogwild` the peaks of all ranks are summed, plus the shared memory that the kernel reports as written.

Each shape is measured twice; the higher peak counts, because a device must have room for it.

Ends with 1 if the prediction for a shape is wrong by more than a tenth.
"""

import argparse
import ctypes
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.goals import Outcome, Verdict, exit_code
from tandem.job.footprint import FootprintRequest
from tandem.job.manifest.reading import read_job
from tandem.job.resource import DistributedTrainingJob
from tandem.job.strategies import micro_batches, pipeline_ranks
from tandem.job.trainer import Trainer
from tandem_cli.planning import pipeline
from tandem_cli.planning.memory import PlannedStrategy, batch_of, format_bytes, memory, worker_memory

MAX_ERROR = 0.10
"""Goal for the error of the worst shape."""
STEPS = 3
"""Steps: the first creates the optimizer's state, the second DDP's final buckets."""
RUNS = 2
"""Runs of each shape."""
COUNTING = "FLAGS_caffe2_report_cpu_memory_usage"
"""Flag of torch's core library: if true, the CPU allocator counts allocations in all threads, and not only in those
with a profiler."""
MINIGPT, DIGITS, STAGES = "examples/minigpt.yaml", "examples/digits.yaml", "examples/minigpt-pipeline.yaml"
FINE_TUNE = "examples/fine-tune.yaml"
LOCK_FREE = ("trainer.loop.strategy=hogwild", "workers.replicas=1")
QWEN = Path("runs/plan-error/qwen2-0.5b")
"""A model with the shape of Qwen2-0.5B and random weights, and documents for it; written when needed, 2 GB."""
QWEN_SHAPE = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
FOUR, SPLIT = ("workers.processesPerReplica=4",), "trainer.loop.fsdp={}"
HALF = "trainer.loop.precision=bfloat16"
SYNTHETIC = "trainer.parameters.data={name: synthetic, imageSize: 32, samples: 512}"


@dataclass(frozen=True)
class Shape:
    """Job to plan and measure."""

    name: str
    ranks: int
    manifest: str
    overrides: tuple[str, ...]
    strategy: PlannedStrategy = PlannedStrategy.SINGLE
    tensor: int = 1
    """Ranks that split each matrix."""

    @property
    def job(self) -> DistributedTrainingJob:
        """The job."""
        return read_job(Path(self.manifest), self.overrides)


def minigpt(width: int, layers: int, length: int, batch: int, *more: str) -> tuple[str, ...]:
    """Overrides of the example's shape."""
    return (
        f"trainer.parameters.width={width}",
        f"trainer.parameters.layers={layers}",
        f"trainer.parameters.length={length}",
        f"trainer.loop.globalBatchSize={batch}",
        *more,
    )


def qwen(length: int, batch: int, *more: str) -> tuple[str, ...]:
    """Overrides of the example that fine-tunes."""
    return (
        f"trainer.parameters.pretrained={QWEN}",
        f"trainer.parameters.data.path={QWEN}/documents.jsonl",
        f"trainer.parameters.length={length}",
        f"trainer.loop.globalBatchSize={batch}",
        *more,
    )


def scheduled(schedule: str, chunks: int) -> str:
    """An override of a pipeline of two stages."""
    return f"trainer.loop.pipeline={{stages: 2, schedule: {schedule}, chunks: {chunks}}}"


def image(model: str, batch: int, *more: str) -> tuple[str, ...]:
    """Overrides of an image job on synthetic images of 32×32."""
    return (f"trainer.parameters.model={model}", f"trainer.loop.globalBatchSize={batch}", SYNTHETIC, *more)


SHAPES = (
    Shape("minigpt 96×2, 64 tokens, batch 32", 1, MINIGPT, ()),
    Shape("minigpt 256×4, 128 tokens, batch 16", 1, MINIGPT, minigpt(256, 4, 128, 16)),
    Shape("minigpt 512×6, 128 tokens, batch 2", 1, MINIGPT, minigpt(512, 6, 128, 2)),
    Shape(
        "minigpt 256×4, bfloat16, dropout", 1, MINIGPT,
        minigpt(256, 4, 128, 16, HALF, "trainer.parameters.dropout=0.1"),
    ),
    Shape(
        "minigpt 256×4, micro-batches of 4", 1, MINIGPT,
        minigpt(256, 4, 128, 16, "trainer.loop.microBatchSize=4", "trainer.loop.emaDecay=0.99"),
    ),
    Shape("minigpt 256×4, batch 16", 2, MINIGPT, minigpt(256, 4, 128, 16), PlannedStrategy.DDP),
    Shape("minigpt 512×6, batch 4", 2, MINIGPT, minigpt(512, 6, 128, 4), PlannedStrategy.DDP),
    Shape("cnn, batch 128", 1, DIGITS, image("cnn", 128)),
    Shape("cnn, batch 128", 2, DIGITS, image("cnn", 128), PlannedStrategy.DDP),
    Shape("resnet-18, batch 64", 1, DIGITS, image("resnet-18", 64)),
    Shape("resnet-18, batch 64, checkpointing", 1, DIGITS,
          image("resnet-18", 64, "trainer.loop.activationCheckpointing=true", "trainer.loop.optimizer.name=sgd")),
    Shape("resnet-18, batch 32", 2, DIGITS, image("resnet-18", 32), PlannedStrategy.DDP),
    Shape("minigpt 256×4, batch 16", 2, MINIGPT, minigpt(256, 4, 128, 16), PlannedStrategy.FSDP),
    Shape("minigpt 512×6, batch 4", 2, MINIGPT, minigpt(512, 6, 128, 4), PlannedStrategy.FSDP),
    Shape("minigpt 512×12, batch 4", 2, MINIGPT, minigpt(512, 12, 128, 4), PlannedStrategy.FSDP),
    Shape("minigpt 512×6, batch 4", 4, MINIGPT, minigpt(512, 6, 128, 4), PlannedStrategy.FSDP),
    Shape("minigpt 512×6, batch 8, micro-batches of 2", 2, MINIGPT,
          minigpt(512, 6, 128, 8, "trainer.loop.microBatchSize=2"), PlannedStrategy.FSDP),
    Shape("minigpt 512×6, batch 4, bfloat16", 2, MINIGPT,
          minigpt(512, 6, 128, 4, HALF), PlannedStrategy.FSDP),
    Shape("minigpt 512×6, batch 8, bfloat16, of 2", 2, MINIGPT,
          minigpt(512, 6, 128, 8, HALF, "trainer.loop.microBatchSize=2"), PlannedStrategy.FSDP),
    Shape("resnet-18, batch 32", 2, DIGITS, image("resnet-18", 32, "trainer.loop.strategy=fsdp"),
          PlannedStrategy.FSDP),
    Shape("minigpt 256×4, batch 16, matrices in 2", 2, MINIGPT, minigpt(256, 4, 128, 16), PlannedStrategy.TENSOR, 2),
    Shape("minigpt 512×6, batch 4, matrices in 2", 4, MINIGPT, minigpt(512, 6, 128, 4), PlannedStrategy.TENSOR, 2),
    Shape("minigpt 256×4, batch 16, 1F1B", 2, STAGES, minigpt(256, 4, 128, 16), PlannedStrategy.PIPELINE),
    Shape("minigpt 512×6, batch 8, GPipe", 2, STAGES, minigpt(512, 6, 128, 8, scheduled("gpipe", 4)),
          PlannedStrategy.PIPELINE),
    Shape("minigpt 256×8, batch 16, interleaved", 2, STAGES,
          minigpt(256, 8, 128, 16, scheduled("interleaved1f1b", 8)), PlannedStrategy.PIPELINE),
    Shape("minigpt 256×8, batch 16, zero bubble", 2, STAGES,
          minigpt(256, 8, 128, 16, scheduled("zeroBubble", 8)), PlannedStrategy.PIPELINE),
    Shape("minigpt 256×8, batch 32, two 1F1B", 4, STAGES, minigpt(256, 8, 128, 32), PlannedStrategy.PIPELINE),
    Shape("minigpt 256×8, batch 32, two 1F1B, split", 4, STAGES, minigpt(256, 8, 128, 32, *FOUR, SPLIT),
          PlannedStrategy.PIPELINE),
    Shape("minigpt 512×6, batch 8, two interleaved, split", 4, STAGES,
          minigpt(512, 6, 128, 8, *FOUR, SPLIT, scheduled("interleaved1f1b", 4)), PlannedStrategy.PIPELINE),
    Shape("minigpt 512×6, batch 8, 1F1B, bfloat16", 2, STAGES, minigpt(512, 6, 128, 8, HALF), PlannedStrategy.PIPELINE),
    Shape("minigpt 512×6, batch 8, two 1F1B, split, bfloat16", 4, STAGES,
          minigpt(512, 6, 128, 8, *FOUR, SPLIT, HALF), PlannedStrategy.PIPELINE),
    Shape("minigpt 512×6, batch 8, 1F1B, matrices in 2", 4, STAGES,
          minigpt(512, 6, 128, 8, *FOUR, "trainer.loop.tensorParallel=2"), PlannedStrategy.PIPELINE, 2),
    Shape("minigpt 512×6, batch 16, all three", 8, STAGES,
          minigpt(512, 6, 128, 16, "workers.processesPerReplica=8", SPLIT, "trainer.loop.tensorParallel=2"),
          PlannedStrategy.PIPELINE, 2),
    Shape("Qwen2-0.5B, 512 tokens, batch 2", 1, FINE_TUNE, qwen(512, 2)),
    Shape("Qwen2-0.5B, 512 tokens, batch 2, all logits", 1, FINE_TUNE,
          qwen(512, 2, "trainer.parameters.lossChunk=0")),
    Shape("Qwen2-0.5B, 512 tokens, batch 2", 2, FINE_TUNE, qwen(512, 2), PlannedStrategy.FSDP),
    Shape("minigpt 256×4, batch 16", 2, MINIGPT, minigpt(256, 4, 128, 16, *LOCK_FREE), PlannedStrategy.HOGWILD),
    Shape("minigpt 512×6, batch 4, an average", 2, MINIGPT,
          minigpt(512, 6, 128, 4, *LOCK_FREE, "trainer.loop.emaDecay=0.99"), PlannedStrategy.HOGWILD),
    Shape("minigpt 256×4, batch 16, micro-batches of 2", 4, MINIGPT,
          minigpt(256, 4, 128, 16, *LOCK_FREE, "trainer.loop.microBatchSize=2"), PlannedStrategy.HOGWILD),
    Shape("cnn, batch 128", 2, DIGITS,
          image("cnn", 128, "trainer.loop.strategy=hogwild", "workers.replicas=1"), PlannedStrategy.HOGWILD),
)  # fmt: skip


def write_qwen() -> None:
    """Write the folder QWEN, unless it exists."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from examples import small_qwen2

    if not (QWEN / "model.safetensors").exists():
        QWEN.mkdir(parents=True, exist_ok=True)
        small_qwen2.main(QWEN)
        Qwen2ForCausalLM(Qwen2Config(**QWEN_SHAPE)).save_pretrained(QWEN)


def predicted(shape: Shape) -> int:
    """Bytes that the plan predicts."""
    from tandem_trainer.footprint import answer_question

    job = shape.job
    if shape.strategy is PlannedStrategy.PIPELINE:
        return _predicted_pipeline(shape, job.spec.trainer)
    copies = shape.ranks // shape.tensor
    batch = batch_of(job.spec.trainer.settings_of_loop, copies)
    question = FootprintRequest(
        trainer=job.spec.trainer, micro_batches=(batch.micro_batch,), tensor_parallel=shape.tensor
    )
    answer = answer_question(question, lambda text: None)
    assert answer.footprint is not None, answer.mistakes
    assert answer.footprint.passes, answer.footprint.untraced
    if shape.strategy is PlannedStrategy.HOGWILD:
        return worker_memory(shape.ranks, answer.footprint, answer.footprint.passes[0], batch.passes).total
    precision = job.spec.trainer.settings_of_loop.precision
    traced = answer.footprint.passes[0]
    return memory(shape.strategy, copies, answer.footprint, traced, batch.passes, precision=precision).total


def _predicted_pipeline(shape: Shape, trainer: Trainer) -> int:
    from tandem_trainer.footprint import answer_question

    loop = trainer.settings_of_loop
    assert loop.pipeline is not None
    copies = shape.ranks // pipeline_ranks(loop)
    chunks, samples = micro_batches(loop, copies)
    questions = (
        FootprintRequest(trainer=trainer, micro_batches=(samples,), by_stage=True, tensor_parallel=shape.tensor),
        FootprintRequest(trainer=trainer, micro_batches=(batch_of(loop, shape.ranks).micro_batch,)),
    )
    staged, unstaged = (answer_question(question, lambda text: None).footprint for question in questions)
    assert staged is not None
    assert unstaged is not None
    assert staged.stages, staged.untraced
    footprint = unstaged.model_copy(update={"stages": staged.stages})
    is_half = loop.precision == "bfloat16"
    sharding = pipeline.Sharding(copies, loop.fsdp, is_half) if loop.fsdp is not None else None
    return pipeline.memory(footprint, loop.pipeline, chunks, samples, sharding).total


def measured(shape: Shape) -> int:
    """Measure the peak of a rank that trains, in fresh processes, in bytes; under `hogwild` of all of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.plan_error", "--rank-of", str(SHAPES.index(shape))],
            stdout=subprocess.PIPE,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(shape.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "KINETO_LOG_LEVEL": "9",
            },
        )
        for rank in range(shape.ranks)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    for rank in ranks:
        if rank.returncode:
            raise SystemExit(f"{shape.name}: a rank ended with {rank.returncode}")
    peaks = [int(json.loads(output)) for output in outputs]
    return sum(peaks) if shape.strategy is PlannedStrategy.HOGWILD else max(peaks)


def train(shape: Shape) -> int:
    """Train like the loop; returns this rank's peak of tensors, in bytes, and on rank 0 with the shared memory."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from tandem_trainer.data.order import Passes
    from tandem_trainer.models.dropout import key_dropout
    from tandem_trainer.process_group import Group
    from tandem_trainer.strategies import strategy_of
    from tandem_trainer.strategies.strategy import prepare
    from tandem_trainer.task import task_of
    from tandem_trainer.train import Stepper, averaged, examples_of, order_of, samples_of, supply_of

    job = shape.job
    loop = job.spec.trainer.settings_of_loop
    if shape.strategy in (PlannedStrategy.FSDP, PlannedStrategy.TENSOR):
        loop = loop.model_copy(update={"strategy": "fsdp", "tensor_parallel": shape.tensor})
    ctypes.c_bool.in_dll(ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so")), COUNTING).value = True
    group = Group.join()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        task = task_of(job.spec.trainer)
        dataset, start, end = samples_of(task)
        passes = Passes(order_of(loop, start, end), loop.epochs, STEPS)
        torch.manual_seed(0)
        model = task.model()
        draws = key_dropout(model)
        model = prepare(model, loop, group)
        average = averaged(model, loop.ema_decay)
        strategy = strategy_of(loop, group, per_worker=shape.ranks)
        examples = partial(examples_of, task, dataset, start, end)
        strategy.shard(model, task, examples)
        if average is not None:
            strategy.shard(average.module, task, examples)
        optimizer = task.optimizer(model, loop.optimizer)
        forward = strategy.wrap(model)
        scaler = torch.amp.GradScaler(group.device.type, enabled=False)
        stepper = Stepper(task, loop, strategy, forward, draws, optimizer, scaler)
        supply = supply_of(task, dataset, passes.order, loop, strategy, range(STEPS))
        rates = [float(parameters["lr"]) for parameters in optimizer.param_groups]
        for step in range(STEPS):
            stepper.take(step, supply.read(step), rates)
            if average is not None and (group.rank == 0 or not strategy.is_shared):
                average.update_parameters(model)
    return peak(profiler) + (shared() if strategy.is_shared and group.rank == 0 else 0)


def shared() -> int:
    """Bytes of anonymous shared memory that this process has written to, as the kernel counts them."""
    mapped = Path("/proc/self/smaps").read_text().split("VmFlags:")
    sizes = (re.search(r"^Rss: +(\d+) kB", mapping, re.MULTILINE) for mapping in mapped if "/memfd:" in mapping)
    return sum(1024 * int(size[1]) for size in sizes if size)


def peak(profiler: object) -> int:
    """Largest number of bytes allocated at a time, as the allocator counted them at the allocations of a profiler."""
    events = list(profiler.profiler.kineto_results.experimental_event_tree())  # type: ignore[attr-defined]
    highest = 0
    while events:
        event = events.pop()
        events += event.children
        if event.name == "[memory]":
            highest = max(highest, event.extra_fields.total_allocated)
    if not highest:
        raise SystemExit("the profiler has recorded no memory")
    return highest


def main() -> None:
    """Measure all shapes, and judge."""
    parser = argparse.ArgumentParser(description="Predicted memory beside the measured peak.")
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="shapes whose names contain this")
    options = parser.parse_args()
    if options.rank_of is not None:
        print(json.dumps(train(SHAPES[options.rank_of])))
        return
    errors, spread = {}, 0.0
    print("| shape | strategy | ranks | predicted | measured | error |\n|---|---|---|---|---|---|", flush=True)
    for shape in SHAPES:
        if options.only not in f"{shape.name} {shape.strategy}":
            continue
        if shape.manifest == FINE_TUNE:
            write_qwen()
        peaks = [measured(shape) for _ in range(RUNS)]
        prediction, measurement = predicted(shape), max(peaks)
        error = errors[shape] = prediction / measurement - 1
        cells = (
            shape.name,
            shape.strategy.value,
            shape.ranks,
            format_bytes(prediction),
            format_bytes(measurement),
            f"{100 * error:+.1f} %",
        )
        spread = max(spread, measurement / min(peaks) - 1)
        print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)
    worst = max(errors, key=lambda shape: abs(errors[shape]))
    outcome = Outcome.MET if abs(errors[worst]) <= MAX_ERROR else Outcome.MISSED
    reason = f"{100 * errors[worst]:+.1f} % for {worst.name} on {worst.ranks}, of {len(errors)} shapes"
    verdict = Verdict(outcome, f"the worst error is at most {100 * MAX_ERROR:.0f} %", reason)
    print(f"two peaks of a shape were at most {100 * spread:.1f} % apart")
    print(verdict)
    sys.exit(exit_code([verdict]))


if __name__ == "__main__":
    main()
