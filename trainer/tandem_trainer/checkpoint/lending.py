"""The weights of one checkpoint, read and verified once for all evaluators of a node, in shared memory.

Evaluators start, stop and choose what to do each for itself, so they cannot divide the reading as the ranks of a group
do (checkpoint.node_memory). But the shards of one checkpoint are evaluated at the same time. So the first
that wants its weights becomes their *lender*: it takes a name in the abstract socket namespace that follows from the
checkpoint, reads and checks, seals the memory against every change, and hands its descriptor to all who ask under that
name. Who comes while it reads, waits. When the lender goes on to another checkpoint it gives the name up; the memory
stays for those that have it.

What is borrowed is mapped privately: a model that changes its weights changes its own copy of these pages alone.

Where there is no memfd, or the sockets of one container are not those of another, everybody reads for itself. Rejected:
a process of the node that lends (one more thing to start, watch and end), mapping the file (docs/decisions/0018).
"""

import fcntl
import hashlib
import mmap
import os
import socket
import threading
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from tandem.rundir.checkpoint import WEIGHTS, Broken, FileEntry, Manifest, verified_bytes
from tandem_trainer.checkpoint.format import parse
from tandem_trainer.checkpoint.node_memory import node_of_this_process
from tandem_trainer.checkpoint.reader import read_weights
from tandem_trainer.warm.forkserver import user_of

PATIENCE_SECONDS = 300.0
"""How long a borrower waits for a lender that reads, before it reads for itself."""
TRIES = 3
"""Lenders that end while they read, after which a borrower reads for itself."""
BACKLOG = 256


class Library:
    """What one evaluator reads and lends. Not thread-safe."""

    def __init__(self) -> None:
        self._lender: _Lender | None = None

    def weights(self, folder: Path, manifest: Manifest) -> dict[str, Tensor]:
        """The weights of a checkpoint that are evaluated, on the CPU; those asked for before are not lent any more.

        Raises:
            FileNotFoundError: the checkpoint is gone.
            Broken: it is damaged.
        """
        name = _name(folder, manifest)
        if self._lender is None or self._lender.name != name:
            self.close()
            content = self._found(name, folder, manifest.entry(WEIGHTS)) if name else None
            if content is None:
                return read_weights(folder, manifest)
        else:
            content = self._lender.content()
        try:
            return parse(content)
        except Broken as error:
            raise Broken(f"{manifest.name}/{WEIGHTS}: {error}") from error

    def close(self) -> None:
        """Lend nothing any more."""
        if self._lender is not None:
            self._lender.close()
            self._lender = None

    def _found(self, name: str, folder: Path, entry: FileEntry) -> memoryview | None:
        """The verified content, our own or borrowed; None if neither came about."""
        for _ in range(TRIES):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind("\0" + name)
            except OSError:
                listener.close()
                if (descriptor := _borrowed(name)) is not None:
                    return _mapped(descriptor, entry.size)
                continue
            listener.listen(BACKLOG)
            try:
                descriptor = _filled(folder, entry)
            except BaseException:
                listener.close()
                raise
            self._lender = _Lender(name, listener, descriptor, entry.size)
            return self._lender.content()
        return None


class _Lender:
    """Hands a descriptor to everybody of the same user who asks under a name."""

    def __init__(self, name: str, listener: socket.socket, descriptor: int, size: int) -> None:
        self.name, self._listener, self._descriptor, self._size = name, listener, descriptor, size
        self._thread = threading.Thread(target=self._serve, name="tandem-lender", daemon=True)
        self._thread.start()

    def content(self) -> memoryview:
        return _mapped(os.dup(self._descriptor), self._size)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        os.close(self._descriptor)

    def _serve(self) -> None:
        while True:
            try:
                borrower, _ = self._listener.accept()
            except OSError:
                return
            with borrower, suppress(OSError):
                if user_of(borrower) == os.getuid():
                    socket.send_fds(borrower, [b"!"], [self._descriptor])


def _borrowed(name: str) -> int | None:
    """A lender's descriptor, once it has read; None if it ended before, is no one of ours, or takes too long."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lender:
        lender.settimeout(PATIENCE_SECONDS)
        try:
            lender.connect("\0" + name)
            if user_of(lender) != os.getuid():
                return None
            _, descriptors, _, _ = socket.recv_fds(lender, 1, 1)
        except OSError:
            return None
    return descriptors[0] if descriptors else None


def _filled(folder: Path, entry: FileEntry) -> int:
    """Memory with the verified content of a file, sealed.

    Raises:
        FileNotFoundError, Broken, OSError: as verified_bytes.
    """
    descriptor = os.memfd_create("tandem-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, entry.size)
        with mmap.mmap(descriptor, entry.size) as memory, memoryview(memory) as place:
            verified_bytes(folder, entry, place)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _mapped(descriptor: int, size: int) -> memoryview:
    """The memory behind a descriptor, which is closed; changes to it are this process's own."""
    try:
        return memoryview(mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(descriptor)


def _name(folder: Path, manifest: Manifest) -> str:
    """What a checkpoint is lent under on this node; empty where nothing can be lent."""
    node = node_of_this_process()
    if not node or not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_ADD_SEALS"):
        return ""
    told = f"{node}\n{folder.resolve()}\n{manifest.digest}"
    return f"tandem-weights-{hashlib.sha256(told.encode()).hexdigest()}"
