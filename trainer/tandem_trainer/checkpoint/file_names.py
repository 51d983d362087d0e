"""The names of a checkpoint's files, and of the keys in its manifest's `loop`."""

OPTIMIZER = "state/optimizer.safetensors"
FULL_WEIGHTS = "state/weights.safetensors"
"""The weights as training had them."""
AVERAGE = "state/average.safetensors"
"""Averaged weights in full precision, where those for evaluators have less."""
OTHERS = "state/others.safetensors"
"""Tensors of whatever else the run keeps."""

TREES = "state/trees.json"
"""What stands in the manifest's `loop` under NAMES_OF_TREES, where that is large."""

AVERAGED = "averaged"
"""In the manifest's `loop`: the weights for evaluators are an average over steps."""
OTHER_STATES = "others"
"""In the manifest's `loop`: the state of everything else, as JSON and names of tensors."""
OPTIMIZERS = "optimizers"
"""In the manifest's `loop`: for each optimizer the parameters of its groups, and what of its state is no tensor."""
EXTRA = "extra"
"""In the manifest's `loop`: what modules keep beside tensors."""
REQUIRES_GRAD = "requiresGrad"
"""Key in the manifest's `loop`: `requires_grad` of the parameters that the script has changed since its start."""
NAMES_OF_TREES = (OTHER_STATES, OPTIMIZERS, EXTRA)
