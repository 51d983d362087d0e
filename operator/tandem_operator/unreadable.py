"""Objects that cannot be taken in: each is told once, counted, and passed over. Nobody's object harms another's.

Whoever may make a pod in some namespace may write into it what he likes. What comes of that must be a line in the log:
an exception here would end the sweep for all jobs, and again after each restart.
"""

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from tandem_operator import kinds
from tandem_operator.kinds import Kind

MOST_REMEMBERED = 1_000
"""Versions of objects that were told of, so as not to tell of them at each sweep."""
MOST_LINES, SECONDS = 20, 60.0
"""Lines in the log in so many seconds; what comes on top is counted alone."""
MOST_WORDS = 200

log = logging.getLogger("tandem.operator")


class UnreadableObjects:
    """Counts and tells of them.

    Args:
        clock: seconds of any steady clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter({kind.name: 0 for kind in (kinds.JOB, *kinds.WATCHED)})
        """By kind: versions of objects that could not be read."""
        self._clock = clock
        self._known: OrderedDict[tuple[str, ...], None] = OrderedDict()
        self._began, self._lines, self._untold = float("-inf"), 0, 0

    def note(self, kind: Kind, body: Any, why: object) -> None:
        """An object could not be read.

        Args:
            body: the object, of which nothing is taken for granted.
            why: a sentence, or what was raised.
        """
        metadata = body.get("metadata") if isinstance(body, Mapping) else None
        fields = ("namespace", "name", "uid", "resourceVersion")
        given = [metadata.get(field) if isinstance(metadata, Mapping) else None for field in fields]
        identity = tuple(_cut(one) for one in given)
        key = (kind.name, *identity)
        if key in self._known:
            self._known.move_to_end(key)
            return
        self._known[key] = None
        if len(self._known) > MOST_REMEMBERED:
            self._known.popitem(last=False)
        self.counts[kind.name] += 1
        now = self._clock()
        if now - self._began >= SECONDS:
            if self._untold:
                log.warning("event=unreadable-untold count=%d", self._untold)
            self._began, self._lines, self._untold = now, 0, 0
        if self._lines >= MOST_LINES:
            self._untold += 1
            return
        self._lines += 1
        words = _cut(why) if isinstance(why, str) else f"{type(why).__name__}: {_cut(why)}"
        log.warning("event=unreadable kind=%s object=%s/%s error=%r", kind.name, *identity[:2], words)


def _cut(value: object) -> str:
    """Some words of anything, whatever it is."""
    if isinstance(value, str):
        return value[:MOST_WORDS]
    if isinstance(value, BaseException):
        # Pydantic's own words quote what was given, and may be long.
        return str(value)[:MOST_WORDS]
    return "" if value is None else type(value).__name__
