"""Asks the coordinator for its snapshot, on a thread of its own: a slow answer must not delay supervision."""

import threading
from contextlib import suppress

from tandem.coordinator_client import CoordinatorClient, Refused, Unreachable
from tandem.snapshot import Snapshot

SECONDS = 0.5
"""Between two questions."""
TIMEOUT = 2.0
"""For one answer."""


class Watch:
    """The newest snapshot of the coordinator at `endpoint`, None until there is one."""

    def __init__(self, endpoint: str, token: str) -> None:
        self.newest: Snapshot | None = None
        self._client = CoordinatorClient(endpoint, token, timeout=TIMEOUT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop asking."""
        self._stop.set()
        self._thread.join(2 * TIMEOUT)

    def _watch(self) -> None:
        while not self._stop.is_set():
            # A coordinator that is being started again does not answer for a second; the last snapshot stays.
            with suppress(Unreachable, Refused):
                self.newest = self._client.status()
            self._stop.wait(SECONDS)
        self._client.close()
