"""The constraints of a parallel strategy on the workers of a job, and the micro-batches of a pipeline
(docs/strategies.md)."""

from math import lcm

from tandem.job.pod_template import gpus_in_cel, processes_in_cel
from tandem.job.tasks import Loop, Pipeline, StrategyName
from tandem.model import Rule

ONE_WORKER = (
    "(!has(self.workers) || ((!has(self.workers.replicas) || self.workers.replicas == 1)"
    " && (!has(self.workers.maxReplicas) || self.workers.maxReplicas == 1)))"
)
"""CEL expression: whether there is never more than one worker."""


def _has_strategy(*strategies: StrategyName) -> str:
    """CEL expression: whether a job uses one of these strategies."""
    parts = (f"self.trainer.{part}" for part in _LOOPS)
    conditions = (f"has({part}) && has({part}.strategy) && {part}.strategy in {list(strategies)}" for part in parts)
    return f"({' || '.join(conditions)})"


def pipeline_ranks(loop: Loop | None) -> int:
    """Number of ranks of one pipeline, which hold one copy of the model; 1 under any other strategy."""
    if loop is None or loop.strategy != "pipeline":
        return 1
    return (loop.pipeline or Pipeline()).stages * loop.tensor_parallel


def worker_multiple_of(loop: Loop | None, processes: int) -> int:
    """Number of workers of which a group has a multiple: those of one pipeline, or of several that share workers.

    Args:
        processes: ranks of each worker.
    """
    return lcm(pipeline_ranks(loop), processes) // processes


_LOOPS = ("loop", "config")
"""The parts of a trainer that have a strategy: `config` of manifests of the version before."""
_NO_PIPELINE = "!has(self.trainer.{0}) || !has(self.trainer.{0}.strategy) || self.trainer.{0}.strategy != 'pipeline'"
_REPLICAS = "(has(self.workers) && has(self.workers.replicas) ? self.workers.replicas : 1)"
_PROCESSES = f"(has(self.workers) ? {processes_in_cel('self.workers')} : 1)"


def _pipeline_ranks_in_cel(name: str) -> str:
    stages = f"self.trainer.{name}.pipeline"
    ranks = f"(has({stages}) && has({stages}.stages) ? {stages}.stages : 2)"
    degree = f"self.trainer.{name}.tensorParallel"
    return f"({ranks} * (has({degree}) ? {degree} : 1))"


CHUNKS_PER_RANK = 4
"""Micro-batches per rank of a pipeline. With at least this many, the bubble is small (https://arxiv.org/abs/1811.06965,
section 2.3)."""


def micro_batches(loop: Loop, copies: int) -> tuple[int, int]:
    """Number of micro-batches that pass through a pipeline in each step, and samples of the largest one.

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
        f"!{_has_strategy('hogwild')} || {ONE_WORKER}",
        "strategy: hogwild is for the processes of one worker, which share its memory: set workers.replicas to 1 "
        "and processesPerReplica to their number, or take strategy: ddp",
        "workers.replicas",
    ),
    Rule(
        lambda s: s.trainer.settings_of_loop.strategy != "hogwild" or s.workers.gpus == 0,
        f"!{_has_strategy('hogwild')} || !has(self.workers) || !has(self.workers.resources)"
        f" || {gpus_in_cel('self.workers')} == 0",
        "strategy: hogwild trains on processors; ask for no GPU, or take strategy: ddp",
        "workers.resources",
    ),
    Rule(
        lambda s: (
            s.trainer.settings_of_loop.strategy not in ("dp", "model")
            or (s.workers.most == 1 and s.workers.processes == 1)
        ),
        f"!{_has_strategy('dp', 'model')} || ({ONE_WORKER}"
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
            "multiple of the stages of a pipeline, times tensorParallel, so that no worker is left over",
            f"trainer.{name}.strategy",
        )
        for name in _LOOPS
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
            ", times tensorParallel, must divide the processes of a worker (workers.processesPerReplica, or its GPUs)",
            f"trainer.{name}.fsdp",
        )
        for name in _LOOPS
    ),
)
"""Rules of a job's spec."""
