"""Watches for checkpoints whose optimizer state is of another step than their weights.

Weights and moments are staged and written as files of their own, and a checksum of a file says nothing of its age. A
manifest names the updates that the optimizer had made when it was written, and the file of moments has the
optimizer's own counter, so the two are compared: a header and four bytes are read for each checkpoint.
"""

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.rundir.checkpoint import COUNTER, COUNTERS, OPTIMIZER, Manifest
from tandem.wire.status import OPTIMIZER_DIFFERS, Corruption, joined

MAX_HEADER_BYTES = 64 * 2**20
"""Longest header that is read."""
_LENGTH = struct.Struct("<Q")
_FORMATS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i"}


class OptimizerWatch:
    """Compares the optimizer's counters of checkpoints with their manifests."""

    def __init__(self) -> None:
        self.corruptions: list[Corruption] = []
        """Differences that were found."""

    def record(self, folder: Path, manifest: Manifest) -> None:
        """Compare a checkpoint. A file that is not there, or cannot be read, is not compared.

        Args:
            folder: its folder.
        """
        claimed = manifest.loop.get(COUNTERS)
        if not isinstance(claimed, dict):
            return
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
            for name, count in _counters(folder / OPTIMIZER, claimed).items():
                if count != claimed[name]:
                    message = (
                        f"{manifest.name} of generation {manifest.generation} holds an optimizer state after "
                        f"{count:,g} updates of {name.removesuffix(COUNTER)}, and the optimizer had made "
                        f"{claimed[name]:,g}"
                    )
                    self.corruptions = joined(
                        [*self.corruptions, Corruption(reason=OPTIMIZER_DIFFERS, message=message)]
                    )
                    return


def _counters(path: Path, names: dict[str, Any]) -> dict[str, float]:
    """Read the counters with these names from a file of moments.

    Raises:
        OSError: it cannot be read.
        ValueError, KeyError, TypeError, AttributeError, struct.error: it is not such a file.
    """
    with path.open("rb") as file:
        (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
        if length > MAX_HEADER_BYTES:
            return {}
        entries = json.loads(file.read(length))
        counters = {}
        for name in names.keys() & entries.keys():
            content, (start, end) = _FORMATS.get(entries[name]["dtype"]), entries[name]["data_offsets"]
            if content is not None and end - start == struct.calcsize(content):
                file.seek(_LENGTH.size + length + start)
                counters[name] = float(struct.unpack(content, file.read(end - start))[0])
    return counters
