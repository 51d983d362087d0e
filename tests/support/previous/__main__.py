"""`python -m tests.support.previous COMMIT`: keep the sources of a version that has landed."""

import sys

from tests.support.previous import ARCHIVE, packed

ARCHIVE.write_bytes(packed(sys.argv[1]))
