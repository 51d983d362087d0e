"""A session: Tandem in your own training script, with exact resume, fast checkpoints, metrics, and leaving on request.

    with Session("runs/mine") as session:
        model = session.distribute(Net())
        optimizer = torch.optim.AdamW(model.parameters())
        session.keep(model, optimizer)
        for batch in session.batches(dataset, 64, epochs=5):
            images, labels = batch.data
            losses = cross_entropy(model(images), labels, reduction="none")
            batch.mean(losses).backward()
            optimizer.step()
            optimizer.zero_grad()

It runs alone, under plain torchrun, and as `trainer.command` of a job, where the job's run directory and checkpoint
settings take the place of those given here. The loop stays the script's: what has to happen between two steps happens
when it asks for the next batch. The code after the loop runs when all steps are taken, and only then: a process that
is asked to save and leave does so when it asks for a batch.

**The code after the loop is a part of the run.** DONE ends a job: agents end what still runs, and the operator ends its
pods. So the last checkpoint is committed when the loop ends, and DONE is written when all ranks are through: where an
agent watches, at the end of the script, else at the end of the `with` block. Meanwhile the pulse says `finishing`:
no hang is declared, and no worker that joins or leaves closes the group. If the code after the loop fails, the rank
fails: the group starts again, finds no steps left, and comes to the same place.

Rejected: callbacks and a trainer class (a loop that cannot be read), a call at the end of each step (forgotten, or put
in the wrong branch), wrapping the script's own loader (its position belongs to one world size).
"""

import atexit
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from tandem.formatting import one_line
from tandem.job.resource import CheckpointSpec
from tandem.job.tasks import RewindOn
from tandem.processes.exitcode import ExitCode
from tandem.processes.launch import RUN_DIR
from tandem.rundir.layout import RunDir
from tandem_trainer import step_log
from tandem_trainer.agreement import Terms, agree, dtypes_of
from tandem_trainer.batch import Batch
from tandem_trainer.checkpoint.state import unwrapped
from tandem_trainer.checkpoint.train_state import Stateful, TrainState
from tandem_trainer.data.feeding import Collate
from tandem_trainer.data.keyed import mixed
from tandem_trainer.data.sampling import EpochOrder
from tandem_trainer.elastic_run import ElasticRun
from tandem_trainer.ending import code_of, leave
from tandem_trainer.failure import ConfigurationError
from tandem_trainer.meter import Stopwatch
from tandem_trainer.open_files import close_files
from tandem_trainer.process_group import Group, PeerFault
from tandem_trainer.pulse import Pulse, Watchdog, check_name
from tandem_trainer.rank_context import StopRequest
from tandem_trainer.session_data import SessionData
from tandem_trainer.session_loop import SessionLoop
from tandem_trainer.session_regroup import SessionRegroup
from tandem_trainer.session_settings import agreed_settings, parse_settings
from tandem_trainer.strategies.session_models import Models, SessionStrategy
from tandem_trainer.strategies.strategy import Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

log = logging.getLogger(__name__)


MAX_REASON_LENGTH = 500
"""Maximum length of the reason in `Session.stop`, in characters."""
CLEANUP_SECONDS = 10.0
"""Time limit for `finally` clauses around a session that ends before it is complete, in seconds."""
WITHOUT_CLEANUP = {ExitCode.PEER_LOST, ExitCode.SUPERSEDED}
"""Exit codes after which no clean-up of the script runs: its collectives would wait for a lost peer, and a superseded
process must not write."""


class Session:
    """Training of one script, in one of its processes.

    Args:
        folder: the run directory, where there is no job that brings one.
        seed: of initial weights, data order, dropout and augmentation.
        checkpoint: when to save and what to keep, where there is no job, by the names of `spec.checkpoint`:
            `{"everySteps": 100, "keepLast": 3}`; default: every 60 seconds.
        rewind_on: which losses send training back to an older checkpoint, and have the data around them left out:
            "NotFinite", those that are NaN or infinite; "Spikes", also those that are for some time worse than the
            untrained model's; "Never".
        device: device on which this rank computes; None: its GPU, if there is one.
        tensor_parallel: the tensor-parallel degree: this many neighbouring ranks split each matrix and work on the
            same samples. Must divide the number of ranks per worker. Ignored with one rank.

    Raises:
        ConfigurationError: there is neither a folder nor a job, `checkpoint` has no such settings, the ranks of a
            worker cannot be divided, or the job has had a session in this script.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        seed: int = 0,
        checkpoint: CheckpointSpec | Mapping[str, Any] | None = None,
        rewind_on: RewindOn = "NotFinite",
        device: torch.device | None = None,
        tensor_parallel: int = 1,
    ) -> None:
        # The pulse first: from here on the agent knows of this rank, and the watchdog obeys its orders.
        self._pulse = Pulse.open_for_rank()
        if self._pulse is not None:
            Watchdog(self._pulse).start()
        settings = parse_settings(checkpoint)
        path = os.environ.get(RUN_DIR) or folder
        if path is None:
            raise ConfigurationError('give the session a folder, Session("runs/mine"), or start it with tandem run')
        # A script may change its working directory.
        self._rundir = RunDir(Path(path).absolute())
        self._refuse_second_session()
        self._stop = StopRequest(self._pulse)
        survival = self._survival = SessionRegroup.create(self._rundir, self._pulse, self._stop, device)
        # A second session of the same job is refused before it joins a collective.
        self._loop: SessionLoop | None = None
        self._first_group = survival.join_first() if survival else Group.join(self._pulse is not None, device)
        self._seed, self._settings = seed, settings
        self._checkpoint = agreed_settings(self._rundir, self._group, settings)
        self._terms = Terms(seed=seed, settings={"tensor_parallel": tensor_parallel, "rewind_on": rewind_on})
        # Compare what is known so far. Ranks whose settings differ would hang in different collectives later.
        agree(self._group, self._terms)
        self._rewind_on = rewind_on
        self._busy = Stopwatch(self._group.device)
        if survival is not None and tensor_parallel > 1:
            survival.refuse("tensor_parallel")
        per_worker = self._per_worker() if tensor_parallel > 1 else 0
        self._models = Models(self._group, seed, self._busy, tensor_parallel, per_worker, survival)
        self._train_state: TrainState | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._failed = False
        self._code: ExitCode | None = None
        self._error_before = _last_error()
        self._process = os.getpid()
        _open.append(self)
        # From now on `tandem.log` of this process only adds values to the log of this session.
        step_log.use_session(self)
        torch.manual_seed(mixed(seed))

    @property
    def device(self) -> torch.device:
        """Device on which this rank computes."""
        return self._group.device

    @property
    def rank(self) -> int:
        """Global rank of this process, from 0."""
        return self._place().rank

    @property
    def world_size(self) -> int:
        """Number of processes now; it may differ after a restart, and where processes outlive their group."""
        return self._place().world_size

    @property
    def dp_rank(self) -> int:
        """Data-parallel rank: the index of this rank's share of the samples. Neighbouring ranks have the same one with
        `tensor_parallel`."""
        self._place()
        return self._models.dp_rank

    @property
    def dp_size(self) -> int:
        """Data-parallel world size: the number of shares into which the samples of a step are divided."""
        self._place()
        return self._models.dp_size

    @property
    def mesh(self) -> "DeviceMesh":
        """Device mesh of all ranks. Ranks along `shard` have different samples, those along `tensor` the same ones. For
        a script that splits its model itself, with `fully_shard(model, mesh=session.mesh["shard"])` or
        `parallelize_module(model, session.mesh["tensor"], plan)`. Collective when it is first asked for.

        Raises:
            ConfigurationError: with one process there is no mesh.
        """
        if self._survival is not None:
            self._survival.refuse("the script asks for session.mesh")
        return self._models.mesh

    @property
    def step(self) -> int:
        """Optimizer steps completed, known from `batches` on; the batch that is being used does not count yet."""
        return 0 if self._elastic is None else self._elastic.step

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole run, known from `batches` on; None if only the end of the data tells."""
        return None if self._elastic is None else self._elastic.total_steps

    def global_batch_size(self, of_one: int) -> int:
        """Return the samples of a step over all ranks, for a framework that counts those of one rank. Collective.

        The number stays that with which the run started, whatever the number of ranks now: the number in its newest
        checkpoint, or, for a new run, `of_one` for each process of the job's spec; without a job, for each process that
        exists. Processes that work on the same samples count once.

        Args:
            of_one: samples of a step of one rank.
        """
        recorded, processes = None, self.world_size
        tensor_parallel = self.world_size // self.dp_size
        # Rank 0 decides: the others may read the run directory before or after a write.
        if self.rank == 0:
            if os.environ.get(RUN_DIR):
                workers = self._rundir.read_job().spec.workers
                processes = workers.replicas * workers.processes
            recorded = next(
                (manifest.data.batch for manifest in self._rundir.committed() if manifest.data is not None), None
            )
        answer = self._group.tell({"known": recorded, "size": of_one * (processes // tensor_parallel)})
        if answer["known"] not in (None, answer["size"]) and self.rank == 0:
            log.warning(
                "setting=global_batch_size is %d, as this run began; batch sizes and replicas of now would make it %d",
                *(answer["known"], answer["size"]),
            )
        return int(answer["known"] or answer["size"])

    @property
    def _elastic(self) -> ElasticRun | None:
        return None if self._loop is None else self._loop.elastic

    @property
    def _is_lost(self) -> bool:
        """Whether the script is in a step that was lost with its group."""
        return self._survival is not None and self._survival.is_lost

    @property
    def _end_code(self) -> ExitCode | None:
        return None if self._loop is None else self._loop.end_code

    @property
    def _group(self) -> Group:
        return self._first_group if self._loop is None else self._loop.group

    def _place(self) -> Group:
        """Return the group, for a script that asks for its place in it."""
        if self._survival is not None and self._elastic is None:
            self._survival.refuse("the script asks for its rank, or the number of ranks, before its loop")
        return self._group

    def _refuse_second_session(self) -> None:
        """Refuse a second session of one job in one process.

        Raises:
            ConfigurationError: an earlier session uses the job's run directory, with its checkpoints and its order.
        """
        if os.environ.get(RUN_DIR) and self._rundir.path in _used_folders:
            raise ConfigurationError(
                "the script begins a second session, and a job has one, with its checkpoints and its order of samples. "
                "Make each a job of its own, for instance with the fold or the stage as an argument of the script"
            )

    def _per_worker(self) -> int:
        """Return the ranks of each worker; 0 if there is one worker. Collective."""
        if not os.environ.get(RUN_DIR):
            return int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        spec = {"processes": self._rundir.read_job().spec.workers.processes} if self._group.rank == 0 else {}
        return int(self._group.tell(spec)["processes"])

    def follow(self, model: nn.Module) -> None:
        """Measure the time of forward passes of a model that a framework distributes."""
        if self._survival is not None:
            self._survival.refuse("a framework distributes the model")
        self._models.time(model)

    def share(self, model: nn.Module) -> None:
        """Copy the weights of rank 0 to all ranks, for a framework that does so only later. Collective."""
        self._models.share(model)

    def distribute(
        self,
        model: nn.Module,
        sample_dropout: bool = True,
        *,
        strategy: SessionStrategy = "ddp",
        tensor_plan: Plan | None = None,
        comm_hook: Callable[[Any, Any], Any] | None = None,
        comm_state: Any = None,
        **options: Any,
    ) -> nn.Module:
        """Put a model on the device and have its gradients averaged over the ranks. A script may have several models.
        Collective, before the optimizer is made.

        With `fsdp` each rank holds a part of each tensor, and the weights of a block while it computes: a member of a
        `ModuleList` or `Sequential`. Ranks begin with the weights of rank 0. Where there is one rank, nothing is
        averaged or split, and only `sample_dropout` counts; with `ddp` also where nothing in the model learns. So it is
        with a model that the script has split itself, on `mesh`.

        Args:
            sample_dropout: dropout draws by sample, so that the loss does not depend on the number of ranks. For models
                in which the first dimension of what is dropped out is that of the samples.
            strategy: `ddp` or `fsdp` (docs/strategies.md).
            tensor_plan: how `Session(tensor_parallel=…)` splits the modules of this model: a pattern of names, with *
                for any part, to `colwise`, `rowwise` or `replicated_with_grad_allreduce`, or the `tp_plan` of a model
                of Hugging Face's (docs/strategies.md). Needs `fsdp`.
            comm_hook: what averages a bucket of gradients, such as those in torch.distributed.algorithms.
            comm_state: its first argument.
            options: with `ddp` of torch.nn.parallel.DistributedDataParallel: `find_unused_parameters=True` where a step
                may leave a parameter without a gradient, `static_graph=True`, `bucket_cap_mb=…`, and so on; with
                `fsdp` of torch.distributed.fsdp.fully_shard: `reshard_after_forward=False`, `mp_policy=…`,
                `offload_policy=…`, `mesh=…`.

        Raises:
            ConfigurationError: the plan is none for this model, tensor parallelism is to go without `fsdp`, a model to
                split has no weights yet, or the script has split it so that not all gradients would be averaged.
            TypeError: torch has no such option, or it is the session's to choose.
            ValueError: a session has no such strategy.
        """
        if strategy == "fsdp" or any(parameter.requires_grad for parameter in model.parameters()):
            # Ranks that distribute different models would hang in different collectives.
            self._terms = replace(self._terms, strategy=(*self._terms.strategy, strategy))
            agree(self._group, replace(self._terms, dtypes=dtypes_of(model.parameters())))
        return self._models.distribute(model, sample_dropout, strategy, tensor_plan, comm_hook, comm_state, options)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
        """Clip the norm of the gradients to `max_norm`, however the parameters are split. Collective.

        torch's function of this name takes parameters of one mesh at a time, and with tensor parallelism there are
        several.

        Returns:
            The norm before clipping, a scalar.
        """
        return self._models.clip([parameters] if isinstance(parameters, Tensor) else [*parameters], max_norm)

    def keep(
        self,
        model: nn.Module | Mapping[str, nn.Module],
        optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None = None,
        average: nn.Module | None = None,
        **states: Stateful | MutableMapping[str, Any],
    ) -> None:
        """Register the state that checkpoints hold; it is restored when the batches begin. Register the same on every
        rank.

        Args:
            model: model, or the result of `distribute` or `torch.compile`; several by name.
            optimizer: optimizer of the model; several by name. The learning rate shown is that of the first.
            average: averaged weights, exported in the place of the model: an `AveragedModel`, whose count of updates is
                kept, too, or any module of the model's shape.
            states: a schedule, a scaler, whatever has `state_dict` and `load_state_dict`; or a dictionary of numbers,
                texts and tensors, which is changed in place.

        Raises:
            ConfigurationError: no rank has all of the optimizer's state.
            TypeError: one of the `states` is neither, or something has a state that a checkpoint cannot hold.
            ValueError: the optimizer has parameters that the model does not have.
        """
        for name, other in states.items():
            if not isinstance(other, Stateful | MutableMapping):
                raise TypeError(f"{name} has no state_dict and load_state_dict, and is not a dictionary")
        if isinstance(model, Mapping):
            # One module with the others in it: names of their tensors begin with the names given here.
            model = nn.ModuleDict({name: unwrapped(module) for name, module in model.items()})
        first = next(iter(optimizer.values()), None) if isinstance(optimizer, Mapping) else optimizer
        self._optimizer = first
        self._train_state = TrainState(model, optimizer, average, states, hyperparameters=True)
        self._train_state.contents({}).check()
        if self._survival is not None:
            optimizers = optimizer.values() if isinstance(optimizer, Mapping) else [optimizer] if optimizer else []
            self._survival.watch(unwrapped(model), optimizers, average, states)

    def batches(
        self,
        dataset: Any,
        global_batch_size: int | None = None,
        *,
        order: EpochOrder | None = None,
        epochs: int = 1,
        max_steps: int | None = None,
        drop_last: bool = False,
        loader_workers: int = 0,
        collate: Collate = default_collate,
        transform: Callable[[Any], Any] | None = None,
    ) -> Iterator[Batch]:
        """Iterate over the remaining steps, each with this rank's share of its samples. Can be called once.

        Each sample comes exactly once in an epoch, whatever the number of ranks and restarts. A data set with a length
        is shuffled anew for each epoch; any other iterable is read in its own order (tandem_trainer.data.feeding). With
        an `order` an epoch is what that says, whatever the number of ranks and restarts.

        Args:
            dataset: of torch's kind: with `__len__` and `__getitem__`, or iterable.
            global_batch_size: samples of one step over all ranks together; None with an order that gives batches.
            order: a function of seed and epoch that gives the sample ids of an epoch in their order, or its batches:
                `Weighted`, `Bucketed`, or your own (tandem_trainer.data.sampling). The same on every rank.
            max_steps: the number of steps after which training ends, if that comes first.
            drop_last: leave out the last batch of an epoch where it is smaller than the others.
            loader_workers: processes of this rank that read ahead; 0: samples are read when their step begins.
            collate: makes a batch of a list of samples.
            transform: applied to each sample, in the loader workers; what it draws at random follows from the sample.

        Raises:
            ConfigurationError: the data and the arguments do not go together.
            RuntimeError: it was called before, or a batch was not used.
        """
        if self._train_state is None:
            raise RuntimeError("call session.keep(model, optimizer) before session.batches(...)")
        if self._elastic is not None:
            raise RuntimeError("session.batches(...) was called already; a session has one loop")
        self._refuse_second_session()
        # Rejected before any collective: a mistake in the arguments is the same on every rank.
        data = SessionData(
            dataset=dataset,
            global_batch_size=global_batch_size,
            order=order,
            epochs=epochs,
            max_steps=max_steps,
            drop_last=drop_last,
            seed=self._seed,
            loader_workers=loader_workers,
            collate=collate,
            transform=transform,
            pin=self._group.device.type == "cuda",
        )
        loop = SessionLoop(
            rundir=self._rundir,
            group=self._group,
            pulse=self._pulse,
            stop=self._stop,
            survival=self._survival,
            models=self._models,
            busy=self._busy,
            rewind_on=self._rewind_on,
            settings=self._settings,
            checkpoints=self._checkpoint,
            terms=self._terms,
            train_state=self._train_state,
            optimizer=self._optimizer,
            data=data,
        )
        self._loop = loop
        loop.begin()
        _used_folders.add(self._rundir.path)
        return loop.batches()

    def stop(self, reason: str) -> None:
        """End training early: the loop ends on all ranks after the same step.

            if worse_for == 5:
                session.stop("the validation loss has not fallen for 5 epochs")

        All ranks may call it, or one alone. Several ranks agree about twice a second, so up to 100 short steps may
        follow. The last checkpoint is saved, the code after the loop runs, and the status of the run has this reason.
        After the last step it changes nothing.

        Args:
            reason: shown in the status of the run; one line of at most 500 characters.

        Raises:
            RuntimeError: the batches have not begun.
            ValueError: no reason is given.
        """
        if self._elastic is None:
            raise RuntimeError("call session.stop(...) in the loop over session.batches(...)")
        if not (text := one_line(reason).strip()[:MAX_REASON_LENGTH]):
            raise ValueError("session.stop(...) takes a reason, which people read in the status of the run")
        self._elastic.end_early(text)

    @contextlib.contextmanager
    def pausing(self, name: str) -> Iterator[None]:
        """Exclude a block from hang detection and from the time of steps: a validation, an upload.

            with session.pausing("validation"):
                accuracy = evaluate(model)

        Until the end of the block no hang is declared, whether all ranks pause or one does and the others wait for it.
        Its time counts neither as a step's nor towards the time that a planned change waits for a save. The block may
        stand before, in and after the loop.

        Args:
            name: the phase shown meanwhile, 1 to 16 ASCII characters.

        Raises:
            ValueError: the name is no valid phase.
        """
        check_name(name)
        with contextlib.ExitStack() as stack:
            if self._pulse is not None:
                stack.enter_context(self._pulse.pausing(name))
            if self._elastic is not None:
                stack.enter_context(self._elastic.meter.pausing())
            stack.enter_context(self._busy.pausing())
            yield

    def log_values(self, step: int, values: dict[str, float]) -> None:
        """Write values that the script logs with `tandem.log` for a step, once its batches have begun."""
        if self._elastic is not None:
            self._elastic.log_values(step, values)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Wrap the loop of a framework. An error ends this process as in a `with` block of the session; what follows
        the loop is code after it, up to the end of the script."""
        try:
            yield
            self.leave_loop()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """End the session in the way that the job's coordinator understands.

        A loop that was left with `break` has stopped early, on all ranks after the same step. After an error, or when
        asked to leave, the process ends with the exit code for it: enclosing `finally` clauses still run, for at most
        CLEANUP_SECONDS, and files are closed. The process ends at once where another rank is gone.
        """
        try:
            if error is None:
                self.leave_loop()
            if error is None or self._exits_well(error):
                # Under an agent the run is complete at the end of the script, after the code behind the block.
                if self._pulse is None:
                    self._close()
                return
        except (Exception, SystemExit) as end_error:
            error = end_error
        if isinstance(error, Exception) and self._is_lost:
            error = PeerFault(f"the group was lost in a step in which the script raised {error!r}")
        self._models.close()
        self._failed = True
        code = self._code_after(error)
        if code in WITHOUT_CLEANUP:
            self._leave(code)
        if code is not None:
            self._code = code
            if self._pulse is not None:
                self._pulse.last_word(code)
            if self._pulse is not None or self._group.world_size > 1:
                # The other ranks and the agent wait for the end of this process.
                deadline = threading.Timer(CLEANUP_SECONDS, self._leave, [code])
                deadline.daemon = True
                deadline.start()
            raise SystemExit(int(code)) from None

    def _exits_well(self, error: BaseException) -> bool:
        """Return whether a script exits with 0 after its loop has ended."""
        return isinstance(error, SystemExit) and not error.code and self._end_code == ExitCode.DONE

    def _code_after(self, error: BaseException) -> ExitCode | None:
        """Return the exit code after an error; None where Python's own is right."""
        if self._end_code not in (None, ExitCode.DONE):
            return self._end_code
        if isinstance(error, Exception):
            return code_of(error, self._rundir, has_peers=self._group.world_size > 1)
        return None

    def _leave(self, code: ExitCode) -> NoReturn:
        close_files()
        leave(code, self._pulse)

    def _close(self) -> None:
        """Close the session of this rank, and mark the run complete when all ranks have come here. Collective."""
        _open.remove(self)
        if self._end_code == ExitCode.DONE:
            assert self._elastic is not None
            self._group.barrier()
            self._elastic.complete()
        if self._pulse is not None:
            self._pulse.last_word(ExitCode.DONE)
        _groups.append(self._group)

    def _end_of_script(self) -> None:
        """Close the session at the end of the interpreter, where an error may have been raised outside of any `with`
        block."""
        # A forked child, such as a loader worker, inherits the exit function.
        if self._process != os.getpid():
            return
        if self._code is not None:
            # Python's own finalization would wait for the process group, whose peers may be gone.
            self._leave(self._code)
        error = _last_error()
        if error is not self._error_before and isinstance(error, Exception) and self._group.world_size > 1:
            self._leave(ExitCode.PEER_LOST if self._is_lost else ExitCode.FAILED)
        # The script ends with the code that the session raised: announce it, so that it counts as Tandem's.
        if (
            isinstance(error, SystemExit)
            and self._end_code
            and error.code == self._end_code
            and self._pulse is not None
        ):
            self._pulse.last_word(self._end_code)
        # An error that no block has seen is reported by Python. The agent sees a failed rank.
        if self._failed or error is not self._error_before:
            return
        try:
            self.leave_loop()
            if self._end_code in (None, ExitCode.DONE):
                self._close()
            elif self._pulse is not None:
                self._pulse.last_word(self._end_code)
        except (Exception, SystemExit) as error:
            self._leave(self._code_after(error) or ExitCode.FAILED)

    def has_left_loop(self) -> bool:
        """Whether the script had left its loop where this run starts from, for a framework whose loop would go on.
        Collective, after `batches`."""
        return self._elastic is not None and self._elastic.resume_early_end()

    def leave_loop(self) -> None:
        """End a loop that the script, or a framework, left early: save the last checkpoint. Collective. Does nothing if
        the loop has ended."""
        if self._loop is not None and self._elastic is not None and self._loop.end_code is None:
            self._loop.leave()


_used_folders: set[Path] = set()
"""Run directories in which a session of this process has begun to train."""
_open: list[Session] = []
"""Sessions of this process that are open."""
_groups: list[Group] = []
"""Groups of the sessions that are closed."""


def _end_of_script() -> None:
    error, folder = _last_error(), os.environ.get(RUN_DIR)
    if isinstance(error, ConfigurationError) and folder:
        # The session itself may have raised it, before any `with` block.
        code = code_of(error, RunDir(Path(folder)), has_peers=False)
        close_files()
        leave(code, Pulse.current)
    for session in _open[:]:
        session._end_of_script()
    if not isinstance(error, Exception):
        for group in _groups:
            group.leave()


# Registered at import, so that it runs after all exit functions of the script.
atexit.register(_end_of_script)


def _last_error() -> BaseException | None:
    """Return the last unhandled error."""
    error: BaseException | None = getattr(sys, "last_value", None)
    return error
