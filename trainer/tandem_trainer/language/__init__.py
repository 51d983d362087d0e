"""Fine-tuning of pretrained language models: `causal-lm` with `pretrained` (docs/language-models.md)."""
