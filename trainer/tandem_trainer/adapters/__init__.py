"""Tandem in the loops of other libraries: Hugging Face Trainer and TRL, accelerate, Lightning. Each has its module and
its extra; nothing else imports them (docs/decisions/0035-adapters.md)."""
