"""What a strategy of parallelism asks of the workers of a job, and how a pipeline cuts a batch (docs/strategies.md)."""

from math import lcm

from tandem.model import Rule
from tandem.pod_template import gpus_in_cel, processes_in_cel
from tandem.tasks import Loop, Pipeline, StrategyName, TaskLoop

ONE_WORKER = (
    "(!has(self.workers) || ((!has(self.workers.replicas) || self.workers.replicas == 1)"
    " && (!has(self.workers.maxReplicas) || self.workers.maxReplicas == 1)))"
)
"""In CEL, whether there is never more than one worker."""


def _chosen(*strategies: StrategyName) -> str:
    """In CEL, whether a job chooses one of these strategies."""
    parts = (f"self.trainer.{part}" for part in ("config", "loop"))
    found = (f"has({part}) && has({part}.strategy) && {part}.strategy in {list(strategies)}" for part in parts)
    return f"({' || '.join(found)})"


def pipeline_ranks(loop: Loop | None) -> int:
    """Ranks of one pipeline, which hold the model once; 1 under any other strategy."""
    if loop is None or loop.strategy != "pipeline":
        return 1
    return (loop.pipeline or Pipeline()).stages * (loop.tensor_parallel if isinstance(loop, TaskLoop) else 1)


def workers_apart(loop: Loop | None, processes: int) -> int:
    """A group has a multiple of so many workers: those of one pipeline, or of several where they share workers.

    Args:
        processes: of each worker.
    """
    return lcm(pipeline_ranks(loop), processes) // processes


_LOOPS = (("loop", ", times tensorParallel"), ("config", ""))
"""The parts of a trainer that choose a strategy, and what a pipeline's ranks are beside its stages."""
_NO_PIPELINE = "!has(self.trainer.{0}) || !has(self.trainer.{0}.strategy) || self.trainer.{0}.strategy != 'pipeline'"
_REPLICAS = "(has(self.workers) && has(self.workers.replicas) ? self.workers.replicas : 1)"
_PROCESSES = f"(has(self.workers) ? {processes_in_cel('self.workers')} : 1)"


def _pipeline_ranks_in_cel(name: str) -> str:
    stages = f"self.trainer.{name}.pipeline"
    ranks = f"(has({stages}) && has({stages}.stages) ? {stages}.stages : 2)"
    if name == "config":
        return ranks
    degree = f"self.trainer.{name}.tensorParallel"
    return f"({ranks} * (has({degree}) ? {degree} : 1))"


CHUNKS_PER_RANK = 4
"""Micro-batches for each rank of a pipeline. With at least this many, ranks wait little
(https://arxiv.org/abs/1811.06965, section 2.3)."""


def micro_batches(loop: Loop, copies: int) -> tuple[int, int]:
    """Micro-batches that pass through a pipeline in each step, and samples of the largest.

    Args:
        copies: pipelines that share the global batch.
    """
    options = loop.pipeline or Pipeline()
    share = -(-loop.global_batch_size // copies)
    count = options.chunks or CHUNKS_PER_RANK * options.stages
    if loop.micro_batch_size is not None:
        count *= -(-share // (count * loop.micro_batch_size))
    return count, -(-share // count)


RULES: tuple[Rule, ...] = (
    Rule(
        lambda s: s.trainer.settings_of_loop.strategy != "hogwild" or s.workers.most == 1,
        f"!{_chosen('hogwild')} || {ONE_WORKER}",
        "strategy: hogwild is for the processes of one worker, which share its memory: set workers.replicas to 1 "
        "and processesPerReplica to their number, or take strategy: ddp",
        "workers.replicas",
    ),
    Rule(
        lambda s: s.trainer.settings_of_loop.strategy != "hogwild" or s.workers.gpus == 0,
        f"!{_chosen('hogwild')} || !has(self.workers) || !has(self.workers.resources)"
        f" || {gpus_in_cel('self.workers')} == 0",
        "strategy: hogwild trains on processors; ask for no GPU, or take strategy: ddp",
        "workers.resources",
    ),
    Rule(
        lambda s: (
            s.trainer.settings_of_loop.strategy not in ("dp", "model")
            or (s.workers.most == 1 and s.workers.processes == 1)
        ),
        f"!{_chosen('dp', 'model')} || ({ONE_WORKER}"
        f" && (has(self.workers) ? {processes_in_cel('self.workers')} : 1) == 1)",
        "strategy: dp and strategy: model are for one process, which uses all GPUs of its worker: set "
        "workers.replicas and processesPerReplica to 1, or take strategy: ddp",
        "workers.processesPerReplica",
    ),
    *(
        Rule(
            lambda s, name=name: (  # type: ignore[misc]
                s.workers.replicas * s.workers.processes % pipeline_ranks(getattr(s.trainer, name)) == 0
            ),
            f"{_NO_PIPELINE.format(name)} || {_REPLICAS} * {_PROCESSES} % {_pipeline_ranks_in_cel(name)} == 0",
            "workers.replicas times the processes of a worker (workers.processesPerReplica, or its GPUs) must be a "
            f"multiple of the stages of a pipeline{words}, so that no worker is left over",
            f"trainer.{name}.strategy",
        )
        for name, words in _LOOPS
    ),
    *(
        Rule(
            lambda s, name=name: (  # type: ignore[misc]
                (loop := getattr(s.trainer, name)) is None
                or loop.fsdp is None
                or loop.fsdp.shard_within != "Worker"
                or s.workers.processes % pipeline_ranks(loop) == 0
            ),
            f"{_NO_PIPELINE.format(name)} || !has(self.trainer.{name}.fsdp)"
            f" || !has(self.trainer.{name}.fsdp.shardWithin) || self.trainer.{name}.fsdp.shardWithin != 'Worker'"
            f" || {_PROCESSES} % {_pipeline_ranks_in_cel(name)} == 0",
            "with shardWithin: Worker each pipeline stays within a worker: its stages"
            f"{words} must divide the processes of a worker (workers.processesPerReplica, or its GPUs)",
            f"trainer.{name}.fsdp",
        )
        for name, words in _LOOPS
    ),
)
"""Rules of a job's spec."""
