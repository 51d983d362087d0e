"""Elastic runs in the loops of other libraries: Hugging Face Trainer and TRL, accelerate, Lightning. Each library has a
module and an extra here; nothing else imports the library (docs/decisions/0035-adapters.md)."""
