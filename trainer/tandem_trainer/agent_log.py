"""What an agent says: one line for each event, to standard error. torchrun itself shows warnings alone."""

import logging
import sys

log = logging.getLogger("tandem.agent")


def log_to_stderr() -> None:
    """Have it shown; a second time nothing happens."""
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s level=%(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
