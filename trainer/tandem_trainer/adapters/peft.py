"""Models of peft in the loops of other libraries: a checkpoint holds the weights that learn, and a digest of the
others.

As with the adapters of `causal-lm` (tandem_trainer.language.lora), each start of the script loads the base model. A
checkpoint of another base is refused before it is used.

Frozen parameters are omitted; buffers stay, because a forward pass may change them. This is for a model that is itself
a PeftModel, not for one that contains a PeftModel.
"""

import sys
from collections.abc import Callable

from torch import nn

from tandem_trainer.language.lora import Base, exclude_from_state

BASE = "tandem_base"
"""Name of the module that holds the digest of the base."""
ADVICE = "load the model that the run started with, with the same weights in every start, before adding the adapters"


def omit_base(model: nn.Module) -> Callable[[], None]:
    """Omit the frozen parameters of a PeftModel from its state. Any other model is unchanged.

    Returns:
        A function that undoes this, because a script may save the whole model after training.
    """
    # A script that has not imported peft has no PeftModel.
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return lambda: None
    # Tied weights have several names.
    parameters = list(model.named_parameters(remove_duplicate=False))
    frozen = {name: parameter for name, parameter in parameters if not parameter.requires_grad}
    if not frozen:
        return lambda: None
    base = Base(ADVICE)
    base.learn(frozen)
    model.add_module(BASE, base.to(next(iter(frozen.values())).device))
    hooks = exclude_from_state(model, frozen)

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        delattr(model, BASE)

    return undo
