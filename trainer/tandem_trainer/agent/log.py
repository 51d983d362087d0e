"""Log of an agent: one line for each event, to standard error. torchrun itself shows warnings only."""

import logging
import sys

log = logging.getLogger("tandem.agent")


def log_to_stderr() -> None:
    """Send the log to standard error; a second call does nothing."""
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s level=%(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
