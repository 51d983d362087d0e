"""A pretrained language model of a folder or of the hub: its configuration, its tokenizer and its weights.

The model is built of its configuration alone, without weights: ranks that are restored from a checkpoint and evaluators
never read those. Ranks that begin read them from memory-mapped safetensors files, so a node reads each byte once.

Code that comes with a model is never run (`trust_remote_code`), and nothing is unpickled.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tandem.causal_lm import is_folder_name
from tandem.formatting import one_line
from tandem.rundir.lineage import Origin
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.language.attention import ATTENTION
from tandem_trainer.language.hub import MAX_WHY, asked, first_line, is_commit, why

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

FIELD = "spec.trainer.parameters.pretrained"
SAFE = {"trust_remote_code": False}


def is_installed() -> bool:
    """Whether the library is there."""
    return find_spec("transformers") is not None


@dataclass(frozen=True)
class Pretrained:
    """Which model it is."""

    name: str
    """A folder, or the model's id on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub; None: its main branch."""
    dtype: str = "auto"
    """Type of the weights while they are trained; `auto`: the model's own."""

    def config(self) -> "PretrainedConfig":
        """The model's configuration.

        Raises:
            UnusableInput: there is no such model, or it cannot be had.
            ConfigurationError: it is one that cannot be trained.
        """
        from transformers import AutoConfig

        self._quiet()
        config: PretrainedConfig = self._asked("has no configuration that can be read", AutoConfig.from_pretrained)
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigurationError(f"{FIELD}: {self.name} is quantized, and such weights cannot be trained")
        return config

    def pinned(self) -> "Pretrained":
        """The same at the commit that its branch has now. As it is where nobody tells: `config` then says what is
        wrong, or finds it in the cache."""
        if self._is_folder() or is_folder_name(self.name) or is_commit(self.revision):
            return self
        from huggingface_hub import HfApi

        try:
            found = asked(self.name, lambda: HfApi().model_info(self.name, revision=self.revision))
        except Exception:  # of a library, which has no common one
            return self
        return replace(self, revision=found.sha)

    def origin(self) -> Origin:
        """Where its weights come from."""
        if self._is_folder():
            return Origin(path=str(Path(self.name).expanduser().absolute()))
        return Origin(path=self.name, revision=self.revision if is_commit(self.revision) else None)

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer.

        Raises:
            UnusableInput: there is no such model, or it has none.
        """
        from transformers import AutoTokenizer

        self._quiet()
        found: PreTrainedTokenizerBase = self._asked("has no tokenizer that can be read", AutoTokenizer.from_pretrained)
        # Of a folder without its files the library makes one that knows no word.
        if not found("a", add_special_tokens=False)["input_ids"]:
            raise UnusableInput(f"{FIELD}: {self.name} has no tokenizer that can be read: none of its files is there")
        return found

    def model(self, config: "PretrainedConfig") -> "PreTrainedModel":
        """The model without its weights: its tensors hold anything, but for tables that are computed.

        Raises:
            ConfigurationError: it is no causal language model, or has no attention that takes a mask.
        """
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        options = {} if self.dtype == "auto" else {"dtype": getattr(torch, self.dtype)}
        try:
            with no_init_weights():
                make: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
                model = make(config, attn_implementation=ATTENTION, **SAFE, **options)
        except ValueError as error:
            raise ConfigurationError(f"{FIELD}: {self.name} {_why_not(error)}") from error
        # What the library does after it has drawn weights.
        model.tie_weights()
        name_shared_once(model)
        return model

    def load(self, model: nn.Module) -> None:
        """Put the pretrained weights into a model.

        Args:
            model: what `model` built, which may be split over ranks by now.

        Raises:
            UnusableInput: they cannot be read, or are not all of the model's.
        """
        from tandem_trainer.checkpoint.state import load_weights

        load_weights(model, self.weights(next(model.parameters()).dtype))

    def weights(self, dtype: torch.dtype | str = "auto") -> dict[str, Tensor]:
        """The pretrained weights.

        Args:
            dtype: of the tensors; `auto`: the model's own.

        Raises:
            UnusableInput: they cannot be read, or are not all of the model's.
        """
        from transformers import AutoModelForCausalLM

        self._quiet()
        loaded, info = self._asked(
            "has no weights that can be read, as safetensors files",
            AutoModelForCausalLM.from_pretrained,
            dtype=dtype,
            use_safetensors=True,
            attn_implementation=ATTENTION,
            output_loading_info=True,
        )
        lacking = sorted({str(name) for what in ("missing_keys", "mismatched_keys") for name in info[what]})
        if lacking:
            raise UnusableInput(
                f"{FIELD}: the files of {self.name} lack {lacking[0]}"
                + (f" and {len(lacking) - 1} more tensors" if len(lacking) > 1 else "")
                + " of its causal language model; they are those of another model"
            )
        name_shared_once(loaded)
        return {name: tensor for name, tensor in loaded.state_dict().items() if isinstance(tensor, Tensor)}

    def generation(self) -> "GenerationConfig | None":
        """How the model writes by default; None if that is not told."""
        from transformers import GenerationConfig

        try:
            found: GenerationConfig = self._asked("says not how it writes", GenerationConfig.from_pretrained)
        except UnusableInput:
            return None  # Not every model has one.
        return found

    def _asked(self, lacks: str, ask: Callable[..., Any], **options: Any) -> Any:
        """What a library's from_pretrained returns.

        Args:
            lacks: what to say of the model where it fails.
        """
        is_folder = self._is_folder()
        if not is_folder and is_folder_name(self.name):
            raise UnusableInput(f"{FIELD}: {self.name} is no folder")
        name = str(Path(self.name).expanduser()) if is_folder else self.name
        try:
            return ask(name, revision=self.revision, **SAFE, **options)
        except Exception as error:  # of a library, which has no common one
            told = "" if is_folder else why(error)
            if not told and not isinstance(error, OSError | ValueError | KeyError | ImportError):
                raise
            if not told:
                raise UnusableInput(f"{FIELD}: {self.name} {lacks}: {first_line(error)}") from error
            raise UnusableInput(
                f"{FIELD}: {self.name} is no folder here, and {told} ({first_line(error)}). Without a network, give a "
                "folder with the model, or download it before to the cache that HF_HOME names"
            ) from error

    def _is_folder(self) -> bool:
        return Path(self.name).expanduser().is_dir()

    def _quiet(self) -> None:
        from transformers.utils import logging

        # Bars of progress of many ranks in one log tell nobody anything.
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def name_shared_once(model: nn.Module) -> None:
    """Have the state of a model hold a tensor that it uses at two places, such as tied embeddings, under its first name
    alone: a second name would be saved a second time."""
    first: dict[int, str] = {}
    others: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            others[name] = known
    if not others:
        return

    def left_out(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in others:
            state.pop(prefix + name, None)

    def put_in(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, known in others.items():
            if prefix + known in state:
                state[prefix + name] = state[prefix + known]

    model.register_state_dict_post_hook(left_out)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(put_in)  # type: ignore[no-untyped-call]


def write_beside(pretrained: Pretrained, folder: Path, dtype: str | None) -> list[str]:
    """Write configuration and tokenizer beside exported weights: transformers opens the folder as a pretrained model.

    Args:
        dtype: of the weights that were written; None: that of the model.

    Returns:
        Names of the files.
    """
    config, before = pretrained.config(), {path.name for path in folder.iterdir()}
    config.architectures = [type(pretrained.model(config)).__name__]
    if dtype is not None:
        config.dtype = getattr(torch, dtype)
    config.save_pretrained(folder)
    pretrained.tokenizer().save_pretrained(folder)
    if (generation := pretrained.generation()) is not None:
        generation.save_pretrained(folder)
    return sorted({path.name for path in folder.iterdir()} - before)


def _why_not(error: ValueError) -> str:
    text = one_line(next(iter(str(error).splitlines()), ""))[:MAX_WHY]
    if "Unrecognized configuration class" in text:
        return "is no causal language model that transformers knows"
    return f"cannot be trained: {text}"
