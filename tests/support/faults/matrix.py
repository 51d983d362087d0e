"""Plays faults one after the other, judges each, and counts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.support.faults.scene import Findings, Scene, Server

Faults = dict[str, int]
"""How many of each kind were played."""


class Matrix:
    """Plays one fault after the other and keeps count of what went wrong."""

    def __init__(self, scene: Scene, server: Server, tally: Faults) -> None:
        self.scene, self.server, self._tally = scene, server, tally
        self.played = 0
        self.wrong: list[str] = []

    def steps(self, writers: Callable[[], Sequence[Mapping[str, Any]]]) -> list[list[list[str]]]:
        """What undisturbed writers do: kind and place of each step of each of them. They must succeed."""
        self.scene.reset()
        reports = self.server.play(writers())
        findings = self.scene.judge(said(reports), committed=True)
        assert not findings.wrong, findings.wrong
        return [report["points"] for report in reports]

    def play(
        self,
        what: str,
        writers: Callable[[], Sequence[Mapping[str, Any]]],
        committed: bool | None,
        died: int | None = None,
        turns: Sequence[int] | None = None,
    ) -> None:
        """Play one fault and judge it.

        Args:
            committed: whether the new checkpoint must be there afterwards; None: if the writer says so.
            died: which writer must have been killed; all others must have ended by themselves.
        """
        self.scene.reset()
        reports = self.server.play(writers(), turns)
        findings = self.scene.judge(said(reports), committed)
        for number, report in enumerate(reports):
            expected = -9 if number == died else 0
            findings.expect(report["code"] == expected, f"writer {number} ended with {report['code']}")
            findings.expect(number == died or report["answers"], f"writer {number} did not answer")
        self.count(what, findings)

    def count(self, what: str, findings: Findings) -> None:
        """Note one fault."""
        self.played += 1
        kind = what.split(" at ")[0]
        self._tally[kind] = self._tally.get(kind, 0) + 1
        self.wrong += [f"{what}: {wrong}" for wrong in findings.wrong]

    def expect_all_right(self, at_least: int) -> None:
        """Raise AssertionError if anything was wrong, or if there were suspiciously few faults."""
        assert not self.wrong, f"{len(self.wrong)} wrong in {self.played} faults:\n" + "\n".join(self.wrong[:20])
        assert self.played >= at_least


def said(reports: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [answer for report in reports for answer in report["answers"]]


def replayed(
    matrix: Matrix, writers: Callable[[], Sequence[Mapping[str, Any]]], turns: Sequence[int]
) -> list[dict[str, Any]]:
    """Let writers take their turns on the history as it was."""
    matrix.scene.reset()
    return matrix.server.play(writers(), turns)
