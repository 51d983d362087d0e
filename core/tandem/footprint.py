"""What a training step of a task takes: the question of `tandem plan`, and the answer of the process that traces it.

The command line imports no torch, so it asks a process of the trainer's (tandem_trainer.footprint): JSON on its
standard input, JSON on its standard output. Sizes are bytes.
"""

from typing import Annotated

from pydantic import Field

from tandem.job import Trainer
from tandem.model import Model

Bytes = Annotated[int, Field(ge=0)]


class Question(Model):
    """What is asked."""

    trainer: Trainer
    """The job's `spec.trainer`, which trains a task."""
    micro_batches: tuple[Annotated[int, Field(ge=1)], ...]
    """Samples of one forward pass: each size is traced."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that split each matrix: what one of them takes is asked for, the first, which has most."""
    by_stage: bool = False
    """Whether the stages of the job's pipeline are traced one by one, instead of the model as a whole."""
    devices: Annotated[int, Field(ge=1)] = 1
    """GPUs of one process over which `strategy: dp` divides each micro-batch, or `strategy: model` spreads the layers.
    Of `dp` the passes are those of the first GPU, which holds most."""


class Moment(Model):
    """What exists at a time of a step before which there are no gradients."""

    activations: Bytes
    """All that exists beyond parameters, buffers, optimizer state and gradients, with temporaries and the batch."""
    gradients: Bytes
    """Those of parameters, as far as they are computed."""


class Pass(Model):
    """A forward pass and its backward pass, with the step of the optimizer behind it."""

    samples: int
    """Of the micro-batch."""
    moments: Annotated[tuple[Moment, ...], Field(min_length=1)]
    """When most exists, where no gradient exists when the forward pass begins. Gradients come into being while
    activations go, so the moment depends on which share of the gradients a device keeps: for any share, from nothing to
    all, it is one of these."""
    accumulating: Bytes
    """Peak beyond parameters, buffers, optimizer state and all gradients, where all of them exist all the time."""
    flops: float
    """Operations of the forward and the backward pass, as torch counts them: those of matrix products, convolutions and
    attention."""
    added_up: Bytes = 0
    """Activations and their gradients that ranks which split matrices add up with each other."""
    moved: Bytes = 0
    """Activations and their gradients that go from one device of the process to another."""


class Held(Model):
    """What a micro-batch takes in a stage, beyond parameters, buffers, all gradients and the optimizer."""

    kept: Bytes
    """What exists from its forward pass to its backward pass, with its inputs and outputs."""
    forward: Bytes
    """The most that exists during its forward pass."""
    peak: Bytes
    """The most that exists during either pass."""


class StagePass(Held):
    """A micro-batch in a stage of a pipeline."""

    samples: int
    """Of the micro-batch."""
    uncast: Held | None = None
    """The same without copies of parameters in a lower precision. None: there are none."""
    sent: Bytes
    """What goes to the next stage; as much comes back."""
    flops: float
    """Operations of both passes, as for `Pass`."""
    added_up: Bytes = 0
    """As for `Pass`."""


class Stage(Model):
    """Consecutive parts of a model, on one rank of a pipeline."""

    parameters: Bytes
    gradients: Bytes
    """Those of the parameters that learn."""
    buffers: Bytes
    passes: tuple[StagePass, ...]
    """In the order of the question."""
    parts: tuple[Bytes, ...] = ()
    """Parameters of each part of the model in it, which FSDP gathers one after the other."""
    part_gradients: tuple[Bytes, ...] = ()
    """Gradients of each part, as for `gradients`."""


class Portion(Model):
    """What one of several devices of a process holds (`strategy: model`). Sizes are those of `Footprint`."""

    parameters: Bytes
    gradients: Bytes
    optimizer: Bytes
    buffers: Bytes
    casts: Bytes
    passes: tuple[Pass, ...]
    """Its part of them, in the order of the question; operations and what is moved are those of all devices."""


class Footprint(Model):
    """What the state of a task takes, and its passes."""

    parameters: Bytes
    """All parameters."""
    parameter_count: int
    """Numbers in them."""
    gradients: Bytes
    """Those of the parameters that learn."""
    optimizer: Bytes
    """State of the optimizer after a step."""
    buffers: Bytes
    """Buffers of the model, such as the statistics of batch normalization."""
    average: Bytes = 0
    """The moving average of the weights that `emaDecay` asks for."""
    casts: Bytes = 0
    """Copies of parameters in a lower precision, which the activations of each pass contain."""
    data: Bytes = 0
    """Training data that lies on the device as a whole."""
    samples: int
    """Of the training data, as many as the job uses."""
    blocks: tuple[Bytes, ...] | None = None
    """Parameters of each block of the model, which FSDP gathers one after the other. None where only the size of a
    model is known."""
    block_gradients: tuple[Bytes, ...] | None = None
    """Gradients of each block: of the parameters in it that learn. None: all do."""
    passes: tuple[Pass, ...] = ()
    """In the order of the question; none where the step could not be traced."""
    untraced: str = ""
    """Why not."""
    stages: tuple[Stage, ...] = ()
    """Of the job's pipeline, where they were asked for."""
    portions: tuple[Portion, ...] = ()
    """By device, where the layers were to be spread over several."""


class Mistake(Model):
    """What is wrong with the job."""

    path: tuple[str | int, ...]
    """Of the field of the manifest."""
    message: str


class Answer(Model):
    """One of the two."""

    footprint: Footprint | None = None
    mistakes: tuple[Mistake, ...] = ()
