"""Seeds made of several numbers."""

import hashlib


def mixed(*parts: int) -> int:
    """A 63-bit seed from several numbers, so that neighbouring numbers give unrelated streams."""
    data = b"".join(part.to_bytes(8, "little") for part in parts)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1
