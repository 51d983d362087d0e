"""Fine-tuning a language model beside TRL's SFTTrainer and a plain loop: `python -m benchmarks.fine_tuning`."""
