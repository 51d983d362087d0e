"""Memory and operations of a training step: the request of `tandem plan`, and the response of the tracing process.

The command line imports no torch, so it starts a process of the trainer's (tandem_trainer.footprint): JSON on its
standard input, JSON on its standard output. Sizes are bytes.
"""

from typing import Annotated

from pydantic import Field

from tandem.job.trainer import Trainer
from tandem.model import Model

Bytes = Annotated[int, Field(ge=0)]


class FootprintRequest(Model):
    """A request to trace a task."""

    trainer: Trainer
    """The job's `spec.trainer`, with a task."""
    micro_batches: tuple[Annotated[int, Field(ge=1)], ...]
    """Micro-batch sizes to trace, in samples."""
    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Number of ranks that split each matrix. The footprint is that of the first one, which has most."""
    by_stage: bool = False
    """Whether to trace the stages of the job's pipeline one by one, instead of the model as a whole."""


class Moment(Model):
    """Memory at a time of a step that begins without gradients."""

    activations: Bytes
    """All memory beyond parameters, buffers, optimizer state and gradients, with temporaries and the batch."""
    gradients: Bytes
    """Gradients of parameters computed so far."""


class Pass(Model):
    """A forward pass and its backward pass, with the step of the optimizer behind it."""

    samples: int
    """Samples in the micro-batch."""
    moments: Annotated[tuple[Moment, ...], Field(min_length=1)]
    """Candidates for the peak memory, if no gradient exists when the forward pass begins. Gradients are allocated while
    activations are freed, so the peak depends on the share of the gradients that a device keeps: for any share, from
    none to all, it is at one of these moments."""
    accumulating: Bytes
    """Peak beyond parameters, buffers, optimizer state and all gradients, if all of them exist all the time."""
    flops: float
    """Floating-point operations of the forward and the backward pass, as torch counts them: those of matrix products,
    convolutions and attention."""
    added_up: Bytes = 0
    """Activations and their gradients that ranks of tensor parallelism all-reduce."""


class StageMemory(Model):
    """Memory of a micro-batch in a stage, beyond parameters, buffers, all gradients and the optimizer."""

    kept: Bytes
    """Memory that exists from its forward pass to its backward pass, with its inputs and outputs."""
    forward: Bytes
    """Peak during its forward pass."""
    peak: Bytes
    """Peak during either pass."""


class StagePass(StageMemory):
    """A micro-batch in a stage of a pipeline."""

    samples: int
    """Samples in the micro-batch."""
    uncast: StageMemory | None = None
    """Memory without copies of parameters in a lower precision. None: there are no copies."""
    sent: Bytes
    """Bytes sent to the next stage; as many come back."""
    flops: float
    """Operations of both passes, as for `Pass`."""
    added_up: Bytes = 0
    """Activations and their gradients, as for `Pass`."""


class StageFootprint(Model):
    """Consecutive parts of a model, on one rank of a pipeline."""

    parameters: Bytes
    gradients: Bytes
    """Gradients of the trainable parameters."""
    buffers: Bytes
    passes: tuple[StagePass, ...]
    """Passes in the order of the request."""
    parts: tuple[Bytes, ...] = ()
    """Parameters of each of its parts of the model, which FSDP gathers one after another."""
    part_gradients: tuple[Bytes, ...] = ()
    """Gradients of each part, as for `gradients`."""


class Footprint(Model):
    """Memory of a task's state, and its passes."""

    parameters: Bytes
    """All parameters."""
    parameter_count: int
    """Number of parameters."""
    gradients: Bytes
    """Gradients of the trainable parameters."""
    optimizer: Bytes
    """State of the optimizer after a step."""
    buffers: Bytes
    """Buffers of the model, such as the statistics of batch normalization."""
    average: Bytes = 0
    """The moving average of the weights (`emaDecay`)."""
    casts: Bytes = 0
    """Copies of parameters in a lower precision, which the activations of each pass contain."""
    data: Bytes = 0
    """Training data that is stored on the device as a whole."""
    samples: int
    """Number of training samples that the job uses."""
    blocks: tuple[Bytes, ...] | None = None
    """Parameters of each block of the model, which FSDP gathers one after another. None where only the size of a model
    is known."""
    block_gradients: tuple[Bytes, ...] | None = None
    """Gradients of the trainable parameters of each block. None: all are trainable."""
    passes: tuple[Pass, ...] = ()
    """Passes in the order of the request; empty where the step could not be traced."""
    untraced: str = ""
    """Reason for which the step could not be traced."""
    stages: tuple[StageFootprint, ...] = ()
    """Stages of the job's pipeline, if requested."""


class JobMistake(Model):
    """A mistake in the job."""

    path: tuple[str | int, ...]
    """Path of the field in the manifest."""
    message: str


class FootprintResponse(Model):
    """The response: a footprint, or mistakes."""

    footprint: Footprint | None = None
    mistakes: tuple[JobMistake, ...] = ()
