"""Models of peft in the loops of other libraries: a checkpoint holds what learns, and a digest of what does not.

As with the adapters of `causal-lm` (tandem_trainer.language.lora), each start of the script loads the base. A
checkpoint that belongs to another base is refused before anything of it is used.

Left out are frozen parameters; buffers stay, because a forward pass may change them. This is for a model that is itself
a PeftModel, not for one that has a PeftModel as a part.
"""

import sys
from collections.abc import Callable

from torch import nn

from tandem_trainer.language.lora import Base, leave_out

BASE = "tandem_base"
"""Name of the module that knows the base."""
ADVICE = "load the model with which the run began, with the same weights in every start, before the adapters are added"


def leave_base_out(model: nn.Module) -> Callable[[], None]:
    """Have the state of a PeftModel be without its frozen parameters. Any other model stays as it is.

    Returns:
        What undoes that: a script may save the whole model after training.
    """
    # Who has not imported it has no model of it.
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return lambda: None
    # Tied weights have several names.
    named = list(model.named_parameters(remove_duplicate=False))
    frozen = {name: parameter for name, parameter in named if not parameter.requires_grad}
    if not frozen:
        return lambda: None
    base = Base(ADVICE)
    base.learn(frozen)
    model.add_module(BASE, base.to(next(iter(frozen.values())).device))
    hooks = leave_out(model, frozen)

    def undo() -> None:
        for hook in hooks:
            hook.remove()
        delattr(model, BASE)

    return undo
