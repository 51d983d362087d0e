"""Names of a checkpoint's files, and keys of the `loop` entry in its manifest."""

from tandem.rundir import checkpoint

OPTIMIZER = checkpoint.OPTIMIZER
FULL_WEIGHTS = "state/weights.safetensors"
"""Weights as training had them, unrounded and not averaged."""
AVERAGE = "state/average.safetensors"
"""Averaged weights in full precision, written where those for evaluators are rounded."""
OBJECT_TENSORS = "state/others.safetensors"
"""Tensors of all other objects of the train state, such as schedules."""

TREES = "state/trees.json"
"""JSON file with the `loop` entries under NAMES_OF_TREES, written where they are too large for the manifest."""

AVERAGED = "averaged"
"""Key in the manifest's `loop`: whether the weights for evaluators are an average over steps."""
OBJECT_STATES = "others"
"""Key in the manifest's `loop`: the state of all other objects, as JSON and names of tensors."""
OPTIMIZERS = "optimizers"
"""Key in the manifest's `loop`: the parameters of each optimizer's groups, and the entries of its state that are not
tensors."""
EXTRA = "extra"
"""Key in the manifest's `loop`: the extra state of modules (`get_extra_state`)."""
REQUIRES_GRAD = "requiresGrad"
"""Key in the manifest's `loop`: `requires_grad` of the parameters that the script has changed since its start."""
NAMES_OF_TREES = (OBJECT_STATES, OPTIMIZERS, EXTRA)
