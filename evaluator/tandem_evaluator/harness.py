"""Runs tasks of lm-evaluation-harness on a model in memory, a shard of the samples at a time (`evaluators.harness`).

Model and tasks are loaded once for the life of the process: the library takes seconds to import, and writing a folder
for each checkpoint would be wasted. A shard reports the sum over its samples, so the result does not depend on the
number of evaluators; a metric that is not a mean over samples cannot be split, and needs one evaluator process.
"""

import logging
import re
from contextlib import AbstractContextManager, redirect_stderr
from importlib.util import find_spec
from io import StringIO
from typing import Any

from torch import nn

from tandem.evaluation import Mean
from tandem.formatting import one_line
from tandem.job.language_evaluation import Harness
from tandem.processes.distribution import install_command
from tandem_trainer.failure import ConfigurationError, UnusableInput

FIELD = "spec.evaluators.harness"
EXTRA = "lm-eval"
SEED = 1234
"""The library's own default, for the examples before a question."""
GPU_BATCH = 16
"""Requests that a GPU computes at once."""
MAX_NAME_LENGTH, MAX_ERROR_LENGTH = 63, 300
"""Maximum length of a metric's name, and of a library's error that a message quotes, in characters."""


class HarnessTasks:
    """The lm-evaluation-harness tasks of a job.

    Raises:
        UnusableInput: there is no such task, or its data cannot be loaded.
        ConfigurationError: the library is not installed.
    """

    def __init__(self, settings: Harness, model: nn.Module, tokenizer: Any) -> None:
        """
        Args:
            model: a transformers model in evaluation mode; its weights may change between calls.
            tokenizer: the model's.
        """
        if find_spec("lm_eval") is None:
            raise ConfigurationError(
                f"{FIELD}: needs the package lm_eval, which is not installed ({install_command(EXTRA)})"
            )
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        self._settings = settings
        try:
            manager = TaskManager(include_path=settings.include, include_defaults=settings.include is None)
            with _quiet():
                self._tasks: dict[str, Any] = manager.load(list(settings.tasks))["tasks"]
        except Exception as error:
            # Tasks load their data from a disk or a hub with code of their own, so any error may occur.
            reason = one_line(f"{type(error).__name__}: {error}")[:MAX_ERROR_LENGTH]
            raise UnusableInput(f"{FIELD}.tasks: {', '.join(settings.tasks)} cannot be loaded: {reason}") from error
        for task in self._tasks.values():
            if settings.fewshot is not None or task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=settings.fewshot or 0)
            task.set_fewshot_seed(seed=SEED)
        device = next(model.parameters()).device
        # One at a time on a CPU: the padding of a batch would only cost time there.
        batch = 1 if device.type == "cpu" else GPU_BATCH
        self._model = HFLM(
            pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch, device=str(device)
        )

    def run(self, shard: int, shards: int) -> dict[str, Mean]:
        """Evaluate the samples `shard`, `shard + shards`, … of each task; returns their contribution to each metric.

        Raises:
            ConfigurationError: a metric cannot be split into shards.
        """
        import lm_eval

        chosen = {name: self._samples(task)[shard::shards] for name, task in self._tasks.items()}
        tasks = {name: self._tasks[name] for name, samples in chosen.items() if samples}
        if not tasks:
            return {}
        with _quiet():
            results: Any = lm_eval.evaluate(
                self._model,
                {"tasks": tasks, "groups": {}, "group_map": {}},
                samples={name: chosen[name] for name in tasks},
                bootstrap_iters=0,
                log_samples=True,
                apply_chat_template=self._settings.chat,
            )
        metrics: dict[str, Mean] = {}
        for name, task in tasks.items():
            is_mean = {metric for metric, how in task.aggregation().items() if getattr(how, "__name__", "") == "mean"}
            for key, value in results["results"][name].items():
                metric, comma, kind = key.partition(",")
                if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                    continue
                if metric not in is_mean and shards > 1:
                    raise ConfigurationError(
                        f"{FIELD}.tasks: {metric} of {name} is no mean over samples, so shards of it do not add up; "
                        "use one evaluator process"
                    )
                # The samples' own values have a confidence interval, the value of the library alone has none.
                metrics[metric_of(name, metric, kind)] = (
                    Mean.from_samples(sample[metric] for sample in results["samples"][name] if sample["filter"] == kind)
                    if metric in is_mean
                    else Mean(value * len(chosen[name]), len(chosen[name]))
                )
        return metrics

    def _samples(self, task: Any) -> range:
        count = len(task.eval_docs)
        return range(count if self._settings.max_samples is None else min(count, self._settings.max_samples))


def _quiet() -> AbstractContextManager[Any]:
    """Suppress progress bars, which the library draws in any case; its log stays."""
    return redirect_stderr(StringIO())


def metric_of(task: str, metric: str, kind: str) -> str:
    """The name of a metric of a task.

    Args:
        kind: the filter applied to answers; `none` for none.
    """
    parts = [task, metric, *([] if kind in ("", "none") else [kind])]
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", "_".join(parts))[:MAX_NAME_LENGTH]
    return name if name[:1].isalpha() else f"t{name}"[:MAX_NAME_LENGTH]
