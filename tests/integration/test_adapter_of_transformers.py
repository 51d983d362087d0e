"""Options of Hugging Face's Trainer and of those of TRL under the adapter: a run that was killed ends as an undisturbed
one, or it is refused."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import EarlyStoppingCallback, PretrainedConfig, Trainer, TrainerCallback, TrainingArguments

from tandem.rundir.layout import RunDir
from tandem_trainer.adapters.transformers import elastic
from tandem_trainer.failure import ConfigurationError
from tests.support.interrupted import assert_same_when_killed, drawn, kill_when_saved, script

pytestmark = pytest.mark.filterwarnings("ignore")
ALL = pytest.mark.full("core", "trainer")
NEVER = 1000
EVALUATED = {"eval_strategy": "steps", "eval_steps": 3, "metric_for_best_model": "eval_loss"}


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Six steps of twelve in an epoch, the last one of four."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        chance = torch.Generator().manual_seed(index)
        return {"rows": torch.randn(8, generator=chance), "labels": torch.randint(3, (), generator=chance)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = PretrainedConfig()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, rows: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(rows)
        # What smooths labels takes them out.
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


def masked(samples: list[dict[str, Tensor]]) -> Any:
    """A batch of which a part is left out at random, as collators of masked language models do it."""
    batch = torch.utils.data.default_collate(samples)
    return {**batch, "rows": batch["rows"] * (torch.rand_like(batch["rows"]) > 0.3)}


class KillAt(TrainerCallback):
    def __init__(self, folder: Path, step: int) -> None:
        self._folder, self._step = folder, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step == self._step:
            kill_when_saved(self._folder, self._step)


def train(
    folder: Path,
    *,
    kill_at: int = NEVER,
    callbacks: tuple[Callable[[], TrainerCallback], ...] = (),
    resume: Any = None,
    data_collator: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """Train, up to a kill; where it ended."""
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 12,
        "learning_rate": 0.05,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    model = Net()
    trainer = elastic(
        Trainer(
            model=model,
            args=TrainingArguments(**(settings | options)),
            train_dataset=Rows(),
            eval_dataset=Rows(),
            data_collator=data_collator,
            callbacks=[*(make() for make in callbacks), KillAt(folder, kill_at)],
        ),
        checkpoint={"everySteps": kill_at},
    )
    with script():
        trainer.train(resume)
    return {
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
        "rate": trainer.optimizer.param_groups[0]["lr"],
        "weights": torch.cat([one.detach().flatten() for one in model.parameters()]),
    }


CASES: dict[str, dict[str, Any]] = {
    "EarlyStoppingCallback": EVALUATED | {"callbacks": (lambda: EarlyStoppingCallback(2, 0.5),)},
    "lr_scheduler_type": {"lr_scheduler_type": "cosine", "warmup_steps": 4},
    "lr_scheduler_type on plateau": EVALUATED | {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_steps": 1},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2, "num_train_epochs": 6},
    "max_steps": {"max_steps": 13},
    "num_train_epochs in parts": {"num_train_epochs": 2.5},
    "dataloader_drop_last": {"dataloader_drop_last": True},
    "optim": {"optim": "adafactor", "weight_decay": 0.1},
    "optim with momentum": {"optim": "sgd", "optim_args": "momentum=0.9", "max_grad_norm": 0.1},
    "label_smoothing_factor": {"label_smoothing_factor": 0.1, "adam_beta2": 0.9},
    "bf16": {"bf16": True},
    "data_seed": {"data_seed": 5, "seed": 4},
    "dataloader_num_workers": {"dataloader_num_workers": 1},
    "eval_on_start": EVALUATED | {"eval_on_start": True},
    "data_collator": {"data_collator": masked},
    "include_num_input_tokens_seen": {"include_num_input_tokens_seen": True, "logging_steps": 1},
}
ALONE = ("dataloader_num_workers",)
"""Processes that read ahead take long to start."""
ALWAYS = ("EarlyStoppingCallback", "lr_scheduler_type on plateau")


@pytest.mark.parametrize("kill_at", [pytest.param(2, marks=ALL), pytest.param(6, marks=ALL), 8])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ALWAYS else ALL) for name in CASES])
def test_killed_and_resumed_it_ends_with_the_weights_of_the_undisturbed_run(
    tmp_path: Path, name: str, kill_at: int
) -> None:
    done = assert_same_when_killed(train, tmp_path, kill_at, **CASES[name])
    is_early = "EarlyStoppingCallback: no better eval_loss in 2 evaluations" in done.get("stoppedEarly", "")
    assert is_early == (name == "EarlyStoppingCallback")


@ALL
@pytest.mark.parametrize("name", [name for name in CASES if name not in ALONE])
def test_options_that_are_drawn_together_are_as_exact(tmp_path: Path, name: str) -> None:
    kill_at, case = drawn(CASES, name, ALONE)
    assert_same_when_killed(train, tmp_path, kill_at, **case)


REFUSED: dict[str, dict[str, Any]] = {
    "load_best_model_at_end=True": EVALUATED | {"load_best_model_at_end": True, "save_steps": 3},
    "ignore_data_skip=True": {"ignore_data_skip": True},
    "auto_find_batch_size=True": {"auto_find_batch_size": True},
    "accelerator_config='split_batches'": {"accelerator_config": {"split_batches": True}},
    "enable_jit_checkpoint=True": {"enable_jit_checkpoint": True},
    "train_sampling_strategy='sequential'": {"train_sampling_strategy": "sequential"},
    "resume_from_checkpoint='elsewhere/checkpoint-5'": {"resume_from_checkpoint": "elsewhere/checkpoint-5"},
    "resume_from_checkpoint='elsewhere/checkpoint-500'": {"resume": "elsewhere/checkpoint-500"},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_adapter_cannot_keep_is_refused_by_name_before_anything_is_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^elastic\(trainer\): {name} of transformers.TrainingArguments: "):
        train(tmp_path, **REFUSED[name])
    assert RunDir(tmp_path).committed() == []


def test_what_does_less_is_warned_of_and_the_newest_checkpoint_of_output_dir_may_be_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tandem_trainer"):
        train(tmp_path, max_steps=1, save_total_limit=2, resume=str(tmp_path / "checkpoint-500"))
    warned = [record.getMessage() for record in caplog.records if "elastic(trainer)" in record.getMessage()]
    assert [sentence.split(" of ")[0] for sentence in warned] == ["elastic(trainer): save_total_limit=2"]


class Shadow(TrainerCallback):
    """An average of the weights as many scripts write it, which has no state."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        now = {name: one.detach().clone() for name, one in model.named_parameters()}
        before = getattr(self, "shadow", now)
        self.shadow = {name: one * 0.1 + before[name] * 0.9 for name, one in now.items()}


def test_weights_in_a_callback_without_a_state_are_refused_when_they_would_first_be_lost(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        train(tmp_path, callbacks=(Shadow,), kill_at=2)
    failure = RunDir(tmp_path).failed()
    assert "Shadow holds copies of the weights that checkpoints do not have" in failure["message"]


CHAT = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}w2 {% generation %}{{ message['content'] }}"
    "{% endgeneration %}{% else %}w3 {{ message['content'] }}{% endif %} {% endfor %}"
)


def of_trl(
    folder: Path,
    *,
    trainer: str,
    kill_at: int = NEVER,
    rows: Callable[[int], dict[str, Any]],
    reference: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train a small language model with a trainer of TRL, up to a kill; where it ended.

    Args:
        trainer: the trainer's name, without its end.
        rows: makes each of 44 samples, of which eight are in a step and four in the last one of an epoch.
        reference: whether it compares with a model that stays as it is.
    """
    import datasets
    import trl
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(32)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    tokenizer.chat_template = CHAT
    size = {"vocab_size": 32, "n_positions": 64, "n_embd": 16, "n_layer": 1, "n_head": 2}
    config = GPT2Config(bos_token_id=1, eos_token_id=1, pad_token_id=0, num_labels=1, **size)
    model = (GPT2ForSequenceClassification if trainer == "Reward" else GPT2LMHeadModel)(config)
    settings = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "disable_tqdm": True}
    settings |= {"per_device_train_batch_size": 8, "num_train_epochs": 2, "learning_rate": 0.01, "report_to": "none"}
    learner = elastic(
        getattr(trl, f"{trainer}Trainer")(
            model=model,
            args=getattr(trl, f"{trainer}Config")(str(folder), **(settings | options)),
            train_dataset=datasets.Dataset.from_list([rows(number) for number in range(44)]),
            processing_class=tokenizer,
            callbacks=[KillAt(folder, kill_at)],
            **({"ref_model": GPT2LMHeadModel(config)} if reference else {}),
        ),
        checkpoint={"everySteps": kill_at},
    )
    with script():
        learner.train()
    return {
        "step": learner.state.global_step,
        "rate": learner.optimizer.param_groups[0]["lr"],
        "weights": torch.cat([one.detach().flatten() for one in model.parameters()]),
    }


def text(number: int) -> str:
    """A text of three to nine words."""
    return " ".join(f"w{(number * place) % 29 + 3}" for place in range(1, 4 + number % 7))


def conversation(number: int) -> dict[str, Any]:
    asked, answered = ({"role": role, "content": text(number)} for role in ("user", "assistant"))
    return {"messages": [asked, answered]}


SFT: dict[str, Any] = {"trainer": "SFT", "rows": lambda number: {"text": text(number)}}
COMPLETIONS = SFT | {"rows": lambda number: {"prompt": text(number), "completion": f" {text(number + 3)}"}}
PAIRS: dict[str, Any] = {
    "rows": lambda number: {"prompt": f"{text(number)} ", "chosen": f"w{number % 7} w5", "rejected": text(number + 3)}
}
DPO = {"trainer": "DPO", "reference": True} | PAIRS
KTO: dict[str, Any] = {
    "trainer": "KTO",
    "reference": True,
    "rows": lambda number: {"prompt": f"{text(number)} ", "completion": text(number + 3), "label": number % 3 > 0},
}
REWARD = {"trainer": "Reward"} | PAIRS
CASES_OF_TRL: dict[str, dict[str, Any]] = {
    "SFTConfig packing": SFT | {"packing": True, "max_length": 16, "num_train_epochs": 4},
    "SFTConfig packing_strategy": SFT | {"packing": True, "packing_strategy": "wrapped", "max_length": 16},
    "SFTConfig pad_to_multiple_of": SFT | {"pad_to_multiple_of": 8, "gradient_accumulation_steps": 2},
    "SFTConfig max_length": SFT | {"max_length": 5, "truncation_mode": "keep_end"},
    "SFTConfig dataset_text_field": SFT | {"dataset_text_field": "body", "rows": lambda n: {"body": text(n)}},
    "SFTConfig completion_only_loss": COMPLETIONS | {"completion_only_loss": True},
    "SFTConfig completion_only_loss off": COMPLETIONS | {"completion_only_loss": False},
    "SFTConfig assistant_only_loss": SFT | {"assistant_only_loss": True, "rows": conversation},
    "SFTConfig loss_type": SFT | {"loss_type": "dft"},
    "SFTConfig shuffle_dataset": SFT | {"shuffle_dataset": True},
    "DPOConfig": DPO,
    "DPOConfig loss_type": DPO | {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    "DPOConfig label_smoothing": DPO | {"beta": 0.5, "label_smoothing": 0.1, "ld_alpha": 0.5},
    "DPOConfig f_divergence_type": DPO | {"f_divergence_type": "js_divergence", "use_weighting": True},
    "DPOConfig precompute_ref_log_probs": DPO | {"precompute_ref_log_probs": True, "precompute_ref_batch_size": 4},
    "DPOConfig disable_dropout": DPO | {"disable_dropout": False, "max_length": 12},
    "RewardConfig center_rewards_coefficient": REWARD | {"center_rewards_coefficient": 0.1},
    "RewardConfig disable_dropout": REWARD | {"disable_dropout": False, "pad_to_multiple_of": 8},
    "KTOConfig": KTO,
    "KTOConfig desirable_weight": KTO | {"beta": 0.5, "desirable_weight": 2.0, "undesirable_weight": 0.5},
    "KTOConfig precompute_ref_log_probs": KTO | {"precompute_ref_log_probs": True, "loss_type": "apo_zero_unpaired"},
}


@ALL
@pytest.mark.parametrize("name", CASES_OF_TRL)
def test_a_trainer_of_trl_ends_with_the_weights_of_the_undisturbed_run(tmp_path: Path, name: str) -> None:
    assert_same_when_killed(of_trl, tmp_path, 5, **CASES_OF_TRL[name])


@ALL
def test_a_reference_that_changes_while_it_trains_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"^elastic\(trainer\): sync_ref_model=True of trl\.DPOConfig: "):
        of_trl(tmp_path, **DPO, sync_ref_model=True)
