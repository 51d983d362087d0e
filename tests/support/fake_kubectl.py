"""A kubectl for tests: a small script that answers as it was told to, and notes what it was asked.

What a real one says was copied from kubectl 1.35 on a real cluster.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = """\
import json, os, sys, time
folder = os.path.dirname(os.path.abspath(__file__))
words = sys.argv[1:]
given = "" if sys.stdin is None or "-" not in words else sys.stdin.read()
with open(os.path.join(folder, "asked.jsonl"), "a") as asked:
    asked.write(json.dumps({"words": words, "given": given, "pid": os.getpid()}) + "\\n")
with open(os.path.join(folder, "answers.json")) as file:
    answers = json.load(file)
for answer in answers:
    if all(word in words for word in answer["words"]):
        sys.stdout.write(answer["says"])
        sys.stdout.flush()
        sys.stderr.write(answer["complains"])
        sys.stderr.flush()
        with open(os.path.join(folder, "answered"), "a") as answered:
            answered.write(".")
        deadline = time.monotonic() + 600
        while answer["stays"] and time.monotonic() < deadline:
            time.sleep(0.05)
        sys.exit(answer["code"])
sys.stderr.write("error: nobody told me what to answer to " + " ".join(words))
sys.exit(1)
"""


@dataclass(frozen=True)
class Asked:
    words: list[str]
    given: str
    pid: int


class FakeKubectl:
    """To be put first into PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._answers: list[dict[str, Any]] = []
        program = folder / "kubectl"
        program.write_text(f"#!{sys.executable} -IS\n{SCRIPT}")
        program.chmod(0o755)
        self._write()

    @property
    def path(self) -> str:
        """PATH with it."""
        return f"{self.folder}{os.pathsep}{os.environ['PATH']}"

    def answers(
        self, *words: str, says: Any = "", complains: str = "", code: int | None = None, stays: bool = False
    ) -> None:
        """From now on, to calls with all of these words; the newest answer counts.

        Args:
            says: its output; what is no text, as JSON.
            stays: it does not end by itself (but after ten minutes).
        """
        text = says if isinstance(says, str) else json.dumps(says)
        end = (1 if complains else 0) if code is None else code
        new = {"words": words, "says": text, "complains": complains, "code": end, "stays": stays}
        self._answers = [new, *(old for old in self._answers if old["words"] != words)]
        self._write()

    @property
    def asked(self) -> list[Asked]:
        notes = self.folder / "asked.jsonl"
        return [Asked(**json.loads(line)) for line in notes.read_text().splitlines()] if notes.exists() else []

    @property
    def answered(self) -> int:
        """How many calls have said all that they had to say; those that stay are still there."""
        notes = self.folder / "answered"
        return notes.stat().st_size if notes.exists() else 0

    def _write(self) -> None:
        fresh = self.folder / "answers.json.new"
        fresh.write_text(json.dumps(self._answers))
        fresh.replace(self.folder / "answers.json")


def job(name: str = "digits", **status: Any) -> dict[str, Any]:
    """A job as the API server shows it."""
    metadata = {
        "name": name,
        "namespace": "team",
        "uid": f"uid-of-{name}",
        "creationTimestamp": "2026-11-21T12:00:00Z",
        "generation": 1,
    }
    return {"apiVersion": "tandem.dev/v1alpha1", "kind": "DistributedTrainingJob", "metadata": metadata} | (
        {"spec": {}, "status": status} if status else {"spec": {}}
    )


def pod(
    role: str,
    index: int | None = None,
    state: dict[str, Any] | None = None,
    *,
    name: str = "",
    restarts: int = 0,
    ready: bool = True,
    node: str = "node-1",
    **more: Any,
) -> dict[str, Any]:
    """A pod as the API server shows it; running unless another state of its container is given."""
    labels = {"tandem.dev/role": role} | ({} if index is None else {"tandem.dev/index": str(index)})
    own = name or f"digits-{role}" + ("" if index is None else f"-{index}") + "-abcde"
    running = {"running": {"startedAt": "2026-11-21T12:00:10Z"}}
    container = {"name": role, "restartCount": restarts, "ready": ready, "state": running if state is None else state}
    return {
        "metadata": {
            "name": own,
            "uid": f"uid-of-{own}",
            "labels": labels,
            "creationTimestamp": "2026-11-21T12:00:05Z",
            **more.pop("metadata", {}),
        },
        "spec": {"nodeName": node},
        "status": {"phase": "Running", "containerStatuses": [container], **more},
    }


def event(
    kind: str, name: str, reason: str, message: str, at: str = "2026-11-21T12:00:20Z", **more: Any
) -> dict[str, Any]:
    """An Event as the API server shows it."""
    return {
        "metadata": {"creationTimestamp": at, "resourceVersion": "10"},
        "involvedObject": {"kind": kind, "name": name},
        "reason": reason,
        "message": message,
        "type": "Normal",
        "count": 1,
        "firstTimestamp": at,
        "lastTimestamp": at,
        **more,
    }


def items(*all_of_them: dict[str, Any]) -> dict[str, Any]:
    """A list as the API server sends it."""
    return {"kind": "List", "items": list(all_of_them)}
