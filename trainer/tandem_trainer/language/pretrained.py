"""A pretrained language model from a folder or the hub: its configuration, its tokenizer and its weights.

The model is built from its configuration alone, without weights: ranks that restore a checkpoint and evaluators never
read these. Ranks that start fresh read them from memory-mapped safetensors files, so a node reads each byte once.

Code that comes with a model is never run (`trust_remote_code`), and nothing is unpickled.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tandem.formatting import one_line
from tandem.job.causal_lm import is_folder_name
from tandem.rundir.lineage import Origin
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.language.attention import ATTENTION
from tandem_trainer.language.hub import MAX_ERROR_LENGTH, failure_reason, first_line, is_commit, with_retries

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

FIELD = "spec.trainer.parameters.pretrained"
NO_REMOTE_CODE = {"trust_remote_code": False}


def is_installed() -> bool:
    """Whether transformers is installed."""
    return find_spec("transformers") is not None


@dataclass(frozen=True)
class Pretrained:
    """Identity of a pretrained model."""

    name: str
    """A folder, or the model's id on the hub."""
    revision: str | None = None
    """Branch, tag or commit on the hub; None: its main branch."""
    dtype: str = "auto"
    """Dtype of the weights during training; `auto`: the model's own."""

    def config(self) -> "PretrainedConfig":
        """The model's configuration.

        Raises:
            UnusableInput: there is no such model, or it cannot be loaded.
            ConfigurationError: the model cannot be trained.
        """
        from transformers import AutoConfig

        self._disable_progress_bars()
        config: PretrainedConfig = self._load("has no configuration that can be read", AutoConfig.from_pretrained)
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigurationError(f"{FIELD}: {self.name} is quantized, and such weights cannot be trained")
        return config

    def pinned(self) -> "Pretrained":
        """Pin the model to the commit that its branch has now. If the hub does not answer, it stays unpinned: `config`
        then reports the problem, or uses the cache."""
        if self._is_folder() or is_folder_name(self.name) or is_commit(self.revision):
            return self
        from huggingface_hub import HfApi

        try:
            info = with_retries(self.name, lambda: HfApi().model_info(self.name, revision=self.revision))
        except Exception:  # the library has no common base class
            return self
        return replace(self, revision=info.sha)

    def origin(self) -> Origin:
        """Return the origin of the weights."""
        if self._is_folder():
            return Origin(path=str(Path(self.name).expanduser().absolute()))
        return Origin(path=self.name, revision=self.revision if is_commit(self.revision) else None)

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The model's tokenizer.

        Raises:
            UnusableInput: there is no such model, or it has no tokenizer.
        """
        from transformers import AutoTokenizer

        self._disable_progress_bars()
        tokenizer: PreTrainedTokenizerBase = self._load(
            "has no tokenizer that can be read", AutoTokenizer.from_pretrained
        )
        # For a folder without files of a tokenizer, the library makes one without words.
        if not tokenizer("a", add_special_tokens=False)["input_ids"]:
            raise UnusableInput(f"{FIELD}: {self.name} has no tokenizer that can be read: none of its files is there")
        return tokenizer

    def model(self, config: "PretrainedConfig") -> "PreTrainedModel":
        """Build the model without its weights: its tensors are uninitialized, except tables that are computed.

        Raises:
            ConfigurationError: it is no causal language model, or none of its attention functions takes a mask.
        """
        from transformers import AutoModelForCausalLM
        from transformers.initialization import no_init_weights

        options = {} if self.dtype == "auto" else {"dtype": getattr(torch, self.dtype)}
        try:
            with no_init_weights():
                make: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
                model = make(config, attn_implementation=ATTENTION, **NO_REMOTE_CODE, **options)
        except ValueError as error:
            raise ConfigurationError(f"{FIELD}: {self.name} {_config_problem(error)}") from error
        # As the library does after it has initialized weights.
        model.tie_weights()
        name_shared_once(model)
        return model

    def load(self, model: nn.Module) -> None:
        """Load the pretrained weights into a model.

        Args:
            model: result of `model`, which may be split over ranks.

        Raises:
            UnusableInput: the weights cannot be read, or are incomplete.
        """
        from tandem_trainer.checkpoint.state import load_weights

        load_weights(model, self.weights(next(model.parameters()).dtype))

    def weights(self, dtype: torch.dtype | str = "auto") -> dict[str, Tensor]:
        """Read the pretrained weights.

        Args:
            dtype: dtype of the tensors; `auto`: the model's own.

        Raises:
            UnusableInput: the weights cannot be read, or are incomplete.
        """
        from transformers import AutoModelForCausalLM

        self._disable_progress_bars()
        loaded, info = self._load(
            "has no weights that can be read, as safetensors files",
            AutoModelForCausalLM.from_pretrained,
            dtype=dtype,
            use_safetensors=True,
            attn_implementation=ATTENTION,
            output_loading_info=True,
        )
        missing = sorted({str(name) for kind in ("missing_keys", "mismatched_keys") for name in info[kind]})
        if missing:
            raise UnusableInput(
                f"{FIELD}: the files of {self.name} lack {missing[0]}"
                + (f" and {len(missing) - 1} more tensors" if len(missing) > 1 else "")
                + " of its causal language model; they are those of another model"
            )
        name_shared_once(loaded)
        return {name: tensor for name, tensor in loaded.state_dict().items() if isinstance(tensor, Tensor)}

    def generation(self) -> "GenerationConfig | None":
        """Return the default settings of generation; None if the model has none."""
        from transformers import GenerationConfig

        try:
            settings: GenerationConfig = self._load("says not how it writes", GenerationConfig.from_pretrained)
        except UnusableInput:
            return None  # Not every model has them.
        return settings

    def _load(self, problem: str, ask: Callable[..., Any], **options: Any) -> Any:
        """Call one of the library's `from_pretrained`.

        Args:
            problem: message about the model if the call fails.
            ask: the function.
            options: further arguments.
        """
        is_folder = self._is_folder()
        if not is_folder and is_folder_name(self.name):
            raise UnusableInput(f"{FIELD}: {self.name} is no folder")
        name = str(Path(self.name).expanduser()) if is_folder else self.name
        try:
            return ask(name, revision=self.revision, **NO_REMOTE_CODE, **options)
        except Exception as error:  # the library has no common base class
            hub_reason = "" if is_folder else failure_reason(error)
            if not hub_reason and not isinstance(error, OSError | ValueError | KeyError | ImportError):
                raise
            if not hub_reason:
                raise UnusableInput(f"{FIELD}: {self.name} {problem}: {first_line(error)}") from error
            raise UnusableInput(
                f"{FIELD}: {self.name} is no folder here, and {hub_reason} ({first_line(error)}). Without a network, "
                "give a folder with the model, or download it before to the cache that HF_HOME names"
            ) from error

    def _is_folder(self) -> bool:
        return Path(self.name).expanduser().is_dir()

    def _disable_progress_bars(self) -> None:
        from transformers.utils import logging

        # Progress bars of many ranks in one log are unreadable.
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def name_shared_once(model: nn.Module) -> None:
    """Make the state of a model hold a shared tensor, such as tied embeddings, under its first name only: a second name
    would be saved a second time."""
    first: dict[int, str] = {}
    first_names: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = first.setdefault(id(parameter), name)
        if first_name != name:
            first_names[name] = first_name
    if not first_names:
        return

    def drop(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for name in first_names:
            state.pop(prefix + name, None)

    def add(module: nn.Module, state: dict[str, Any], prefix: str, *arguments: Any) -> None:
        for name, first_name in first_names.items():
            if prefix + first_name in state:
                state[prefix + name] = state[prefix + first_name]

    model.register_state_dict_post_hook(drop)  # type: ignore[no-untyped-call]
    model.register_load_state_dict_pre_hook(add)  # type: ignore[no-untyped-call]


def write_beside(pretrained: Pretrained, folder: Path, dtype: str | None) -> list[str]:
    """Write configuration and tokenizer beside exported weights: transformers opens the folder as a pretrained model.

    Args:
        pretrained: model with the configuration and the tokenizer.
        folder: folder with the weights.
        dtype: dtype of the written weights; None: that of the model.

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


def _config_problem(error: ValueError) -> str:
    text = one_line(next(iter(str(error).splitlines()), ""))[:MAX_ERROR_LENGTH]
    if "Unrecognized configuration class" in text:
        return "is not a causal language model that transformers knows"
    return f"cannot be trained: {text}"
