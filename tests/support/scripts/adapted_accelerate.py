"""A loop of its own with accelerate, with the adapter, for tests that kill it."""

import argparse

import torch
from accelerate import Accelerator
from slow_steps import fail_once, pause
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from tandem_trainer.adapters.accelerate import elastic


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--break-at", type=int)
    parser.add_argument("--lora", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)
    rows = TensorDataset(torch.randn(42, 5), torch.randn(42, 1))
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    if options.lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"]))
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.7)
    loader = DataLoader(rows, batch_size=4 // options.accumulate, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    with elastic(accelerator, loader, model, optimizer, schedule=schedule, epochs=options.epochs) as run:
        for inputs, targets in run:
            with accelerator.accumulate(model):
                accelerator.backward(mse_loss(model(inputs), targets))
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                pause(options.pause)
                if run.session.step + 1 == options.break_at:
                    break
    assert not any("tandem" in name for name in model.state_dict()), "a script may save the model as it is"
    fail_once()
    print(f"after the loop: step={run.session.step} rate={schedule.get_last_lr()[0]:.6f}", flush=True)


if __name__ == "__main__":
    main()
