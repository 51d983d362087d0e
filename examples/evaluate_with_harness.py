"""Score a checkpoint of the Hugging Face Trainer with lm-evaluation-harness, on a task of your own.

The task: which of four passages follows a passage of text that nobody trained on. Evaluator processes start this
program once for each shard of each checkpoint, as `evaluators.command` with `watch: "checkpoint-*"` says. It needs the
package `lm_eval`, and in the checkpoint's folder a tokenizer (Trainer's `processing_class`).
"""

import json
import os
import random
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import lm_eval

LENGTH = 64


def questions() -> list[dict[str, object]]:
    """Passages, each with four that might follow it; always the same ones."""
    draws = random.Random(0)  # noqa: S311 - the same questions each time
    items = []
    for name in sorted(topics)[::10]:
        text = topics[name]
        for start in range(0, len(text) - 2 * LENGTH, 8 * LENGTH):
            right = text[start + LENGTH : start + 2 * LENGTH]
            distractors = [topics[other][:LENGTH] for other in draws.sample(sorted(topics), 3)]
            place = draws.randrange(4)
            choices = [*distractors[:place], right, *distractors[place:]]
            items.append({"passage": text[start : start + LENGTH], "choices": choices, "answer": place})
    return items


def main() -> None:
    shard, shards = int(os.environ["TANDEM_SHARD"]), int(os.environ["TANDEM_SHARDS"])
    shard_questions = questions()[shard::shards]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "questions.jsonl"
        data.write_text("".join(json.dumps(question) + "\n" for question in shard_questions))
        task = {
            "task": "what_follows",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{passage}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "answer",
            "target_delimiter": "",
        }
        results = lm_eval.simple_evaluate(
            model="hf",
            model_args={"pretrained": os.environ["TANDEM_CHECKPOINT"], "dtype": "float32"},
            tasks=[task],
            device="cpu",
            bootstrap_iters=0,
        )
    accuracy = results["results"]["what_follows"]["acc,none"]
    report = {"accuracy": {"mean": [accuracy * len(shard_questions), len(shard_questions)]}}
    Path(os.environ["TANDEM_REPORT"]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
