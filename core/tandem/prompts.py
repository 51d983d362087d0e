"""What a language model is asked to write under each checkpoint (`evaluators.generate`).

Prompts and what is written are bounded, because all of it is kept with the evaluations of the run, and shown.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from tandem.evaluation import MOST_COMPLETIONS, MOST_PROMPT
from tandem.model import FilePath, Model, Rule


class Generate(Model):
    """Prompts for a language model. Evaluators have each checkpoint, and the model that fine-tuning begins with,
    complete them."""

    prompts: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MOST_PROMPT)]],
            Field(min_length=1, max_length=MOST_COMPLETIONS),
        ]
        | None
    ) = None
    """The prompts."""
    prompts_file: FilePath | None = None
    """A file with the prompts instead: one a line, or of JSON lines (`.jsonl`) the column `prompt`. The first 64 are
    used."""
    max_tokens: Annotated[int, Field(ge=1, le=1024)] = 64
    """Maximum number of tokens to write for a prompt."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """0 takes the most likely token each time; 1 draws as the model predicts."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Seed of what is drawn: the same weights write the same again."""
    chat: bool = False
    """Whether a prompt is what a user says, and is put into the chat template of the model's tokenizer."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            lambda g: (g.prompts is None) != (g.prompts_file is None),
            "has(self.prompts) != has(self.promptsFile)",
            "give either prompts or promptsFile",
            "prompts",
        ),
    )
