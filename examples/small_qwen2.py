"""Writes a small Qwen2 with random weights, its tokenizer and documents to train it on, for fine-tune.yaml and
fine-tune-pipeline.yaml: jobs that fine-tune, without a download. The documents are the English that ships inside
Python.

    python examples/small_qwen2.py runs/small-qwen2
"""

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 1024
END = "<|endoftext|>"


def trained_tokenizer(vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Byte pairs of the documents."""
    fast = Tokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[END],
        show_progress=False,
    )
    fast.train_from_iterator([topics[name] for name in sorted(topics)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=END, pad_token=END)


def main(folder: Path) -> None:
    """Write everything into a folder."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    trained_tokenizer().save_pretrained(folder)
    documents = [json.dumps({"text": topics[name]}) for name in sorted(topics)]
    (folder / "documents.jsonl").write_text("\n".join(documents) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
