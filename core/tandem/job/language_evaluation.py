"""Evaluation of a language model besides its loss: `evaluators.generate` and `evaluators.harness`.

Prompts and completions are bounded, because all of them are kept with the evaluations of the run, and shown.
"""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from tandem.evaluation import MAX_COMPLETIONS, MAX_PROMPT
from tandem.job.tasks import CAUSAL_LM
from tandem.model import FilePath, Model, Rule


class Generate(Model):
    """Prompts for a language model. Evaluators have each checkpoint, and the model that fine-tuning starts from,
    complete them."""

    prompts: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]],
            Field(min_length=1, max_length=MAX_COMPLETIONS),
        ]
        | None
    ) = None
    """The prompts."""
    prompts_file: FilePath | None = None
    """A file with the prompts instead: one a line, or the column `prompt` of JSON lines (`.jsonl`). The first 64 are
    used."""
    max_tokens: Annotated[int, Field(ge=1, le=1024)] = 64
    """Maximum number of tokens to write for a prompt."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Sampling temperature. 0 takes the most likely token each time; 1 samples as the model predicts."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Sampling seed: the same weights write the same again."""
    chat: bool = False
    """Whether a prompt is a user's message, and is put into the chat template of the model's tokenizer."""
    batch: Annotated[int, Field(ge=1, le=MAX_COMPLETIONS)] = 1
    """`pretrained` only: prompts that are completed at once, which a GPU does in about the time of one. They are padded
    to one length, so a text may then depend on the prompts beside it."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda g: (g.prompts is None) != (g.prompts_file is None),
            "has(self.prompts) != has(self.promptsFile)",
            "give either prompts or promptsFile",
            "prompts",
        ),
    )


class Harness(Model):
    """Tasks of lm-evaluation-harness, which evaluators run under each checkpoint and under the model that fine-tuning
    starts from. Each metric of a task becomes a metric of the checkpoint, called TASK_METRIC."""

    tasks: Annotated[
        list[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]],
        Field(min_length=1, max_length=16),
    ]
    """Names of tasks, or of groups of them."""
    include: FilePath | None = None
    """A folder with your own tasks, as YAML files. With it, no others are available."""
    fewshot: Annotated[int, Field(ge=0, le=64)] | None = None
    """Number of solved examples before each question. Default: that of the task."""
    max_samples: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of samples of each task, the first ones."""
    chat: bool = False
    """Whether questions are put into the chat template of the model's tokenizer."""


def _causal_lm_only(field: str, message: str) -> Rule:
    """A rule: the field of the evaluators is for `causal-lm` without a command."""

    def holds(spec: Any) -> bool:
        evaluators = spec.evaluators
        is_set = evaluators is not None and getattr(evaluators, field) is not None
        return not is_set or (spec.trainer.task == CAUSAL_LM and evaluators.command is None)

    return Rule(
        holds,
        f"!has(self.evaluators) || !has(self.evaluators.{field}) || (has(self.trainer.task)"
        f" && self.trainer.task == '{CAUSAL_LM}' && !has(self.evaluators.command))",
        message,
        f"evaluators.{field}",
    )


RULES = (
    _causal_lm_only("generate", "generate belongs to causal-lm; a command of yours reports Completions itself"),
    _causal_lm_only("harness", "harness belongs to causal-lm with pretrained; a command of yours runs lm_eval itself"),
)
"""Rules of the job's spec."""
