"""`spec.trainer`: a task with its parameters and its loop, or a command (tandem.job.resource)."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from tandem.job.tasks import (
    BUILT_IN,
    CAUSAL_LM,
    PRETRAINED,
    ImageConfig,
    ImageParameters,
    Loop,
    Parameters,
    RewindOn,
    TaskName,
)
from tandem.job.variables import EnvVar, Word
from tandem.model import Image, Model, Rule

CodeDigest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$", max_length=71)]

SPLIT = "tensorParallel needs a task that defines how matrices are split; image-classification does not"
OWN_TASK = f"has({{0}}.task) && {{0}}.task != '{BUILT_IN}'"
"""CEL expression: whether a trainer has a task other than `image-classification`."""


class Trainer(Model):
    """The training program: a `task`, built-in or your own, or any `command` that torchrun can start."""

    image: Image | None = None
    """Container image of the workers. Default: the chart's trainer image. `tandem run` does not use it."""
    task: TaskName | None = None
    """`image-classification`, `causal-lm`, or a task of your own as `package.module:Class`, which is imported from the
    folder where the processes are started, from PYTHONPATH, or from an installed package."""
    loop: Loop | None = None
    """The training loop of a task; every field has a default."""
    parameters: Parameters | None = None
    """Parameters of the task: `model` and `data` for `image-classification`; for `causal-lm` those in
    docs/language-models.md; for a task of your own those that the type of its configuration defines."""
    config: Annotated[ImageConfig | None, Field(json_schema_extra={"deprecated": True})] = None
    """Deprecated: the fields of `loop` and `parameters` of `image-classification` in one group. The next version no
    longer reads it; `tandem validate --fix FILE` rewrites a manifest. A job that exists keeps the form that it was
    made with: `trainer` cannot be changed, so rewrite its manifest with the next job."""
    command: Annotated[list[Word], Field(min_length=1, max_length=64)] | None = None
    """Your own script and how to start it, for instance `[python, train.py]`; torchrun sets rank and world size. If the
    first word ends in `.py`, it runs with the same Python."""
    args: Annotated[list[Word], Field(max_length=512)] = []
    """Arguments that follow `command`. No shell reads them; `$TANDEM_RUN_DIR` in them is the run directory."""
    env: Annotated[list[EnvVar], Field(max_length=256)] = []
    """Environment variables of the training processes."""
    code: CodeDigest | None = None
    """Digest of the packed folder in which training processes and evaluators work. `tandem run --code DIR` and
    `tandem submit --code DIR` fill it in."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda t: (t.task is None) != (t.command is None),
            "has(self.task) != has(self.command)",
            "give exactly one of task (a built-in one, or your own class) and command (your own script)",
            "task",
        ),
        Rule(
            lambda t: t.task is not None or t.config is None,
            "has(self.task) || !has(self.config)",
            "config belongs to image-classification; your own command takes args and env",
            "config",
        ),
        Rule(
            lambda t: t.config is None or (t.loop is None and t.parameters is None),
            "!has(self.config) || (!has(self.loop) && !has(self.parameters))",
            "config is the deprecated form of loop and parameters; give only these",
            "config",
        ),
        Rule(
            lambda t: t.own_task is None or t.config is None,
            f"!has(self.config) || !({OWN_TASK.format('self')})",
            "config belongs to image-classification; all tasks take loop and parameters",
            "config",
        ),
        Rule(
            lambda t: t.task is not None or t.loop is None,
            "!has(self.loop) || has(self.task)",
            "loop belongs to a task; your own command takes args and env",
            "loop",
        ),
        Rule(
            lambda t: t.task is not None or t.parameters is None,
            "!has(self.parameters) || has(self.task)",
            "parameters belong to a task; your own command takes args and env",
            "parameters",
        ),
        Rule(
            lambda t: t.config is None or t.config.tensor_parallel == 1,
            "!has(self.config) || !has(self.config.tensorParallel) || self.config.tensorParallel == 1",
            SPLIT,
            "config",
        ),
        Rule(
            lambda t: not t.is_built_in or t.loop is None or t.loop.tensor_parallel == 1,
            f"!has(self.task) || self.task != '{BUILT_IN}' || !has(self.loop) || !has(self.loop.tensorParallel)"
            " || self.loop.tensorParallel == 1",
            SPLIT,
            "loop",
        ),
        Rule(
            lambda t: t.command is not None or not t.args,
            "has(self.command) || !has(self.args) || size(self.args) == 0",
            "args belong to a command; a task takes parameters",
            "args",
        ),
    )

    @property
    def images(self) -> ImageParameters:
        """The parameters of `image-classification` with their defaults filled in.

        Raises:
            pydantic.ValidationError: they are wrong, which `parse_job` and the operator find before.
        """
        return ImageParameters.parse(self.task_parameters)

    @property
    def task_parameters(self) -> dict[str, Any]:
        """The parameters of the task, also those in `config`."""
        if self.config is None:
            return self.parameters or {}
        return self.config.model_dump(mode="json", exclude_none=True, include=set(ImageParameters.model_fields))

    @property
    def is_built_in(self) -> bool:
        """Whether the task is `image-classification`."""
        return self.task == BUILT_IN

    @property
    def own_task(self) -> str | None:
        """The task, if it is another one than `image-classification`: module and class of the user's own, or
        `causal-lm`; otherwise None."""
        return None if self.is_built_in else self.task

    @property
    def is_fine_tuning(self) -> bool:
        """Whether `causal-lm` starts from a pretrained model."""
        return self.task == CAUSAL_LM and PRETRAINED in (self.parameters or {})

    @property
    def settings_of_loop(self) -> Loop:
        """The training loop's settings of any task, with the defaults filled in."""
        return self.config or self.loop or Loop()

    @property
    def rewind_on(self) -> RewindOn:
        """`rewindOn` of the loop with its default, which depends on the task, filled in."""
        return self.settings_of_loop.rewind_on or ("Spikes" if self.is_built_in else "NotFinite")
