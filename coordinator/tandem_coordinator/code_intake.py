"""Receives the job's code from `tandem submit --code` and stores it in the run directory.

    GET /v1/code/DIGEST     {"present": true | false}
    PUT /v1/code/DIGEST     the pack's bytes

Accepts only the digest in the job's spec: a client with the token can upload that code, and no other. The size of the
upload is limited. The bytes are written to disk as they arrive, and the file gets its final name after its digest has
been verified. Uploading the same pack again changes nothing.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from aiohttp import web

from tandem.formatting import duration, size
from tandem.job.resource import DistributedTrainingJob
from tandem.rundir.code import MAX_PACKED_BYTES
from tandem.rundir.durable import commit_file, temporary_beside
from tandem.rundir.layout import RunDir

log = logging.getLogger("tandem.coordinator")

READ_TIMEOUT_SECONDS = 30.0
"""Time without data after which a sender is assumed to be gone, in seconds; another one may be waiting."""
CHUNK_BYTES = 2**20
"""Size of one write, in bytes: a shared disk is slow with small ones."""


class CodeIntake:
    """The code of one job. All methods belong to the event loop.

    Args:
        arrived: called once the code has arrived, with a sentence.
    """

    def __init__(self, job: DistributedTrainingJob, rundir: RunDir, arrived: Callable[[str], None]) -> None:
        self._digest, self._rundir, self._arrived = job.spec.trainer.code, rundir, arrived
        self._turn = asyncio.Lock()

    async def get(self, request: web.Request) -> web.Response:
        """Answer whether the code is present."""
        return web.json_response({"present": await asyncio.to_thread(self._pack(request).exists)})

    async def put(self, request: web.Request) -> web.Response:
        """Receive the code."""
        pack = self._pack(request)
        if (request.content_length or 0) > MAX_PACKED_BYTES:
            raise _too_large()
        async with self._turn:
            if await asyncio.to_thread(pack.exists):
                return web.json_response({"present": True})
            started = time.monotonic()
            try:
                length = await self._write(request, pack)
            except OSError as error:
                if isinstance(error, ConnectionError):
                    raise
                log.exception("event=code-not-written")
                raise web.HTTPInsufficientStorage(
                    text=f"the code cannot be written to the volume: {error.strerror or error}"
                ) from error
            seconds = time.monotonic() - started
        self._arrived(f"its code has arrived: {self._digest}, {size(length)} packed, in {duration(seconds)}")
        return web.json_response({"present": True})

    def _pack(self, request: web.Request) -> Path:
        digest = request.match_info["digest"]
        if self._digest is None:
            raise web.HTTPBadRequest(text="this job has no code (spec.trainer.code), so none is taken")
        if digest != self._digest:
            raise web.HTTPBadRequest(text=f"this job's code is {self._digest}, and no other is taken")
        return self._rundir.pack(self._digest)

    async def _write(self, request: web.Request, pack: Path) -> int:
        """Write the upload to the pack; returns its size in bytes."""
        temporary, digest, length = temporary_beside(pack), hashlib.sha256(), 0
        file = await asyncio.to_thread(_open, temporary)
        try:
            chunk = bytearray()
            while content := await _next(request):
                length += len(content)
                if length > MAX_PACKED_BYTES:
                    raise _too_large()
                chunk += content
                if len(chunk) >= CHUNK_BYTES:
                    await asyncio.to_thread(_append, file, digest.update, bytes(chunk))
                    chunk.clear()
            await asyncio.to_thread(_append, file, digest.update, bytes(chunk))
            await asyncio.to_thread(file.close)
            if f"sha256:{digest.hexdigest()}" != self._digest:
                raise web.HTTPBadRequest(
                    text=f"the {length} bytes that arrived have the digest sha256:{digest.hexdigest()}; send it again"
                )
            await asyncio.to_thread(commit_file, temporary, pack)
        finally:
            file.close()
            with suppress(FileNotFoundError):
                await asyncio.to_thread(temporary.unlink)
        return length


async def _next(request: web.Request) -> bytes:
    """Read the next bytes; empty at the end."""
    try:
        async with asyncio.timeout(READ_TIMEOUT_SECONDS):
            return await request.content.readany()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"no data for {READ_TIMEOUT_SECONDS:g} s; send it again") from None


def _open(temporary: Path) -> BinaryIO:
    temporary.parent.mkdir(exist_ok=True)
    return temporary.open("xb")


def _append(file: BinaryIO, update: Callable[[bytes], None], chunk: bytes) -> None:
    update(chunk)
    file.write(chunk)


def _too_large() -> web.HTTPBadRequest:
    return web.HTTPBadRequest(text=f"the code may have {MAX_PACKED_BYTES} bytes packed at most")
