"""A pretrained model is fine-tuned by `tandem run` on conversations, evaluated beside the base model, resumed without
its weights' files, exported as a folder that transformers opens, and pushed to a hub."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.support.hub import environment, local_hub
from tests.support.language import pretrained
from tests.support.local_run import LocalRun, evaluations
from tests.support.manifests import manifest
from tests.support.processes import tandem

pytestmark = [pytest.mark.timeout(600), pytest.mark.full("trainer", "evaluator", "cli")]


def test_it_is_tuned_on_conversations_resumed_from_checkpoints_alone_and_exported(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, data = pretrained(tmp_path / "model"), tmp_path / "conversations.jsonl"
    asked = [("user", "What follows {}?"), ("assistant", "It is {}.")]
    data.write_text(
        "".join(
            json.dumps({"messages": [{"role": role, "content": text.format(n)} for role, text in asked]}) + "\n"
            for n in range(200)
        )
    )
    parameters = {"pretrained": str(model), "length": 64, "data": {"path": str(data)}}
    loop = {"globalBatchSize": 8, "maxSteps": 10, "epochs": 20, "optimizer": {"name": "adamw", "learningRate": 0.01}}
    job = manifest(
        "tuned",
        trainer={"task": "causal-lm", "parameters": parameters, "loop": loop},
        workers={"replicas": 2},
        evaluators={
            "policy": "Every",
            "generate": {"prompts": ["What follows 7?", "What follows 8?"], "chat": True, "maxTokens": 2},
        },
        checkpoint={"everySteps": 10},
    )
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(job))
    with LocalRun(tmp_path, manifest=path) as run:
        assert run.ends(200) == 0, run.output

    of_base = run.path / "evaluations/base/g000000.json"
    base, written_at = json.loads(of_base.read_text()), of_base.stat().st_mtime_ns
    assert not (run.path / "checkpoints/base").exists()

    # Who goes on from a checkpoint, and who evaluates it, needs none of these.
    (model / "model.safetensors").unlink()
    with LocalRun(tmp_path, "--set", "trainer.loop.maxSteps=20", manifest=path) as run:
        assert run.ends(200) == 0, run.output
    scores = {one["step"]: one["metrics"] for one in evaluations(run.path)}
    assert scores[20]["perplexity"] < scores[10]["perplexity"] < 300
    assert scores[20]["accuracy"] > scores[10]["accuracy"]
    assert base["metrics"]["perplexity"] > 2 * scores[10]["perplexity"]
    assert of_base.stat().st_mtime_ns == written_at, "it is evaluated once"
    last = next(one for one in evaluations(run.path) if one["step"] == 20)
    assert [one["prompt"] for one in last["completions"]] == ["What follows 7?", "What follows 8?"]
    assert all(one["text"].startswith("It") for one in last["completions"])
    assert not any(one["text"].startswith("It") for one in base["completions"])
    told = tandem("status", str(run.path)).stdout
    assert re.search(r"base model +loss \d\.\d+ → \d\.\d+ \(−\d+\.\d %\), accuracy", told), told

    folder = tmp_path / "exported"
    for words in (), ("--force",):
        answer = tandem(
            "checkpoints", "export", str(run.path), "final", "--to", str(folder), "--format", "folder", *words
        )
        assert answer.returncode == 0, answer.stderr
    opened, words_of = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert opened.get_output_embeddings().weight is opened.get_input_embeddings().weight
    asks = words_of.apply_chat_template(
        [{"role": "user", "content": "What follows 7?"}], add_generation_prompt=True, return_tensors="pt"
    )
    asks = asks if isinstance(asks, torch.Tensor) else asks["input_ids"]
    written_on = opened.generate(asks, max_new_tokens=2, do_sample=False, pad_token_id=0)
    assert words_of.decode(written_on[0, asks.shape[1] :]).startswith("It")

    with local_hub() as hub:
        where = ("me/tuned", "--private", "--revision", "tuned")
        answer = tandem("checkpoints", "push", str(run.path), "final", *where, variables=environment(hub))
        assert answer.returncode == 0, answer.stderr
        assert f"pushed  {hub.url}/me/tuned/commit/" in answer.stdout
        made = hub.repositories["me/tuned"]
        assert made.branches["tuned"] == {path.name: path.read_bytes() for path in folder.iterdir()}
        assert made.messages[0].startswith("tuned: step 20, accuracy 0.")
