"""The compared ways to save. All save the same tensors of the same model and optimizer, into one file system.

Each has the settings that suit it best: `dcp` a gloo group of its own (on the training group `async_save` deadlocks),
the asynchronous ones a permanent stager, which for the process stages into shared memory.
"""

import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from tandem.rundir.checkpoint import DataPosition
from tandem.rundir.layout import RunDir
from tandem.rundir.lineage import GenerationRecord
from tandem_trainer.checkpoint.saving import Author, Saver
from tandem_trainer.checkpoint.state import NamedOptimizer, weights
from tandem_trainer.checkpoint.train_state import Contents
from tests.support import manifests


class Side(Protocol):
    """One way to save. Created once for each rank; every method is called on all ranks."""

    def save(self, step: int) -> None:
        """Save, or start to; its duration is the stall of training."""

    def done(self) -> bool:
        """Whether this rank's part of the last save is done."""

    def ended(self) -> float:
        """Time at which the last save was done on this rank, by time.perf_counter.

        Raises:
            RuntimeError: the save failed.
        """

    def clear(self) -> None:
        """Delete what was saved."""

    def close(self) -> None:
        """End everything."""


class Tandem:
    """Saver, as the loop uses it: two ranks write one checkpoint, retention deletes the one before."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        rank, world_size = dist.get_rank(), dist.get_world_size()
        rundir = RunDir(folder)
        if rank == 0:
            rundir.create()
            rundir.write_job(manifests.job("bench", checkpoint={"keepLast": 1}))
            rundir.record_generation(GenerationRecord(generation=1, world_size=world_size, started_at=time.time()))
        dist.barrier()
        self._saver = Saver(rundir, Author(1, None, world_size, rank), lambda: None, self._report)
        self._saver.prepare(Contents(weights(model), NamedOptimizer(model, optimizer).state().tensors))
        self._ended, self._problem = 0.0, ""

    def save(self, step: int) -> None:
        position = DataPosition(seed=0, epoch=0, cursor=step)
        contents = Contents(weights(self._model), NamedOptimizer(self._model, self._optimizer).state().tensors)
        self._saver.save(step, position, contents)

    def _report(self, outcome: dict[str, Any]) -> None:
        self._ended = time.perf_counter()
        self._problem = "" if outcome.keys() & {"committed", "written"} else str(outcome)

    def done(self) -> bool:
        return not self._saver.busy

    def ended(self) -> float:
        if self._problem:
            raise RuntimeError(self._problem)
        return self._ended

    def clear(self) -> None:
        pass  # retention does it, during the next save

    def close(self) -> None:
        self._saver.close()


class _Files:
    """Saves into a folder of its own each time."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._folder, self._model, self._optimizer = folder, model, optimizer
        self._ended = 0.0
        self._problem: BaseException | None = None

    def save(self, step: int) -> None:
        self._save(self._folder / str(step))
        self._ended = time.perf_counter()

    def _save(self, path: Path) -> None:
        raise NotImplementedError

    def done(self) -> bool:
        return True

    def ended(self) -> float:
        if self._problem is not None:
            raise RuntimeError(str(self._problem))
        return self._ended

    def clear(self) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def close(self) -> None:
        self.clear()


class TorchSave(_Files):
    """torch.save on rank 0, as in most scripts: nothing is synced to the disk, no other rank writes."""

    def _save(self, path: Path) -> None:
        if dist.get_rank() == 0:
            path.mkdir(parents=True)
            state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
            torch.save(state, path / "checkpoint.pt.tmp")
            (path / "checkpoint.pt.tmp").rename(path / "checkpoint.pt")


class DcpSave(_Files):
    """torch.distributed.checkpoint.save."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, model, optimizer)
        self._group = dist.new_group(backend="gloo")

    def _state(self) -> dict[str, Any]:
        moments = NamedOptimizer(self._model, self._optimizer).state().tensors
        return {"model": weights(self._model), "optimizer": moments}

    def _save(self, path: Path) -> None:
        dcp.save(self._state(), checkpoint_id=path, process_group=self._group)


class DcpAsyncThread(DcpSave):
    """torch.distributed.checkpoint.async_save in a thread."""

    KIND, OPTIONS = AsyncCheckpointerType.THREAD, StagingOptions(False, False, False, False)

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(folder, model, optimizer)
        self._stager = DefaultStager(self.OPTIONS)
        self._future: Future[Any] = Future()

    def save(self, step: int) -> None:
        response = dcp.async_save(
            self._state(),
            checkpoint_id=self._folder / str(step),
            process_group=self._group,
            async_checkpointer_type=self.KIND,
            async_stager=self._stager,
        )
        self._future = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
        self._future.add_done_callback(self._note)

    def _note(self, future: Future[Any]) -> None:
        self._problem, self._ended = future.exception(), time.perf_counter()

    def done(self) -> bool:
        return self._future.done()

    def close(self) -> None:
        self._stager.close()
        super().close()


class DcpAsyncProcess(DcpAsyncThread):
    """torch.distributed.checkpoint.async_save in a permanent process."""

    KIND, OPTIONS = AsyncCheckpointerType.PROCESS, StagingOptions(False, True, False, False)


class Accelerate(_Files):
    """Accelerator.save_state, with this model and optimizer as if it had prepared them for training."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from accelerate import Accelerator  # type: ignore[import-not-found]

        super().__init__(folder, model, optimizer)
        self._accelerator = Accelerator(cpu=True)
        # Not wrapped in a second DistributedDataParallel: the model is trained by the loop around.
        self._accelerator.prepare_model(model, evaluation_mode=True)
        self._accelerator.prepare_optimizer(optimizer)

    def _save(self, path: Path) -> None:
        self._accelerator.save_state(os.fspath(path))


SIDES: dict[str, Callable[[Path, nn.Module, torch.optim.Optimizer], Side]] = {
    "tandem": Tandem,
    "torch.save": TorchSave,
    "dcp.save": DcpSave,
    "dcp.async_save, thread": DcpAsyncThread,
    "dcp.async_save, process": DcpAsyncProcess,
    "accelerate": Accelerate,
}
"""Sides in the order of their turns and of the table."""
