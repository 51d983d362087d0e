"""Queueing and image pulls of a job's pods, as spans of traces. Kubernetes records both in Events, for an hour or so.
Pure."""

import re
from collections.abc import Iterable

from tandem.wire.trace import Span
from tandem_cli.view import JobEvent

_PULLED = re.compile(r'Successfully pulled image "(?P<image>[^"]*)" in (?P<took>[0-9.hmsµu]+)')
_PARTS = re.compile(r"([0-9.]+)(h|ms|m|s|µs|us)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "µs": 1e-6, "us": 1e-6}


def pod_spans(events: Iterable[JobEvent]) -> list[Span]:
    """The spans in which pods waited for a node, and in which their images were pulled.

    Args:
        events: events of the job and its pods, the oldest first.
    """
    spans: list[Span] = []
    waiting_since: dict[str, float] = {}
    for event in events:
        if event.reason == "FailedScheduling":
            waiting_since.setdefault(event.who, event.first)
        elif event.reason == "Scheduled" and event.who in waiting_since:
            begin = waiting_since.pop(event.who)
            spans.append(Span("queueing", begin, max(begin, event.at), event.who, {"pod": event.who}))
        elif event.reason == "Pulled" and (match := _PULLED.search(event.text)) is not None:
            took = sum(float(number) * _SECONDS[unit] for number, unit in _PARTS.findall(match["took"]))
            values = {"pod": event.who, "image": match["image"]}
            spans.append(Span("image pull", event.at - took, event.at, event.who, values))
    return spans
