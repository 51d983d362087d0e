"""Weights of one checkpoint, read and verified once for all evaluators of a node, in shared memory.

Evaluators start, stop and choose their work independently, so they cannot divide the reading as the ranks of a group do
(checkpoint.node_memory). But the shards of one checkpoint are evaluated at the same time. So the first evaluator that
needs its weights becomes their *lender*: it binds a name in the abstract socket namespace that is derived from the
checkpoint, reads and checks the weights, seals the memory against every change, and sends its descriptor to every
process that connects to this name. Processes that connect while it reads wait. When the lender moves on to another
checkpoint it gives up the name; the memory stays with the processes that have it.

Borrowed memory is mapped privately: a model that changes its weights changes only its own copy of these pages.

Where there is no memfd, or containers do not share a socket namespace, every evaluator reads for itself. Rejected: a
lending process for each node (one more process to start, watch and end), mapping the file (docs/decisions/0018).
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

from tandem.rundir.checkpoint import WEIGHTS, Broken, FileEntry, Manifest, digest_of, verified_bytes
from tandem_trainer.agent.warm.forkserver import user_of
from tandem_trainer.checkpoint.format import parse
from tandem_trainer.checkpoint.node_memory import node_of_this_process

PATIENCE_SECONDS = 300.0
"""Timeout of a borrower for a lender that reads, in seconds; then it reads for itself."""
MAX_ATTEMPTS = 3
"""Number of lenders that may end while they read before a borrower reads for itself."""
BACKLOG = 256


class Library:
    """Weights that one evaluator reads and lends. Not thread-safe."""

    def __init__(self) -> None:
        self._lender: _Lender | None = None
        self._content: memoryview | None = None

    def weights(self, folder: Path, manifest: Manifest) -> dict[str, Tensor]:
        """Return the weights for evaluators of a checkpoint, on the CPU; those of the last call are not lent any more.

        Raises:
            FileNotFoundError: the checkpoint is gone.
            Broken: it is damaged.
        """
        name, entry = _lending_name(folder, manifest), manifest.entry(WEIGHTS)
        # An evaluator holds the weights once, also while it reads the next ones.
        self._content = None
        if self._lender is None or self._lender.name != name:
            self.close()
            content = (self._obtain(name, folder, entry) if name else None) or verified_bytes(folder, entry)
        else:
            content = self._lender.content()
        self._content = content
        try:
            return parse(content)
        except Broken as error:
            raise Broken(f"{manifest.name}/{WEIGHTS}: {error}") from error

    def digest(self) -> str:
        """Return the digest of the memory behind the tensors of the last call, as it is now."""
        assert self._content is not None
        return digest_of(self._content)

    def close(self) -> None:
        """Stop lending."""
        self._content = None
        if self._lender is not None:
            self._lender.close()
            self._lender = None

    def _obtain(self, name: str, folder: Path, entry: FileEntry) -> memoryview | None:
        """Return the verified content, read here or borrowed; None if neither succeeded."""
        for _ in range(MAX_ATTEMPTS):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                # Binding decides who lends: the kernel gives the name to one process only.
                listener.bind("\0" + name)
            except OSError:
                listener.close()
                if (descriptor := _borrow(name)) is not None:
                    return _map(descriptor, entry.size)
                continue
            # Listen before the read: borrowers that connect meanwhile wait in the backlog.
            listener.listen(BACKLOG)
            try:
                descriptor = _read_sealed(folder, entry)
            except BaseException:
                listener.close()
                raise
            self._lender = _Lender(name, listener, descriptor, entry.size)
            return self._lender.content()
        return None


class _Lender:
    """Sends a descriptor to every process of the same user that connects to a name."""

    def __init__(self, name: str, listener: socket.socket, descriptor: int, size: int) -> None:
        self.name, self._listener, self._descriptor, self._size = name, listener, descriptor, size
        self._thread = threading.Thread(target=self._serve, name="tandem-lender", daemon=True)
        self._thread.start()

    def content(self) -> memoryview:
        return _map(os.dup(self._descriptor), self._size)

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
                # The abstract namespace has no permissions, so the other side's user is checked.
                if user_of(borrower) == os.getuid():
                    socket.send_fds(borrower, [b"!"], [self._descriptor])


def _borrow(name: str) -> int | None:
    """Return the lender's descriptor, once it has read; None if it ended, is another user's process, or takes too
    long."""
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


def _read_sealed(folder: Path, entry: FileEntry) -> int:
    """Create sealed memory with the verified content of a file.

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


def _map(descriptor: int, size: int) -> memoryview:
    """Map the memory behind a descriptor, privately, and close the descriptor."""
    try:
        return memoryview(mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(descriptor)


def _lending_name(folder: Path, manifest: Manifest) -> str:
    """Return the name under which a checkpoint is lent on this node; empty where lending is not possible."""
    node = node_of_this_process()
    if not node or not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_ADD_SEALS"):
        return ""
    identity = f"{node}\n{folder.resolve()}\n{manifest.digest}"
    return f"tandem-weights-{hashlib.sha256(identity.encode()).hexdigest()}"
