"""How agents, operator and commands speak with a coordinator of another version (docs/decisions/0020-versions.md).

Each request and each answer carries a header with the protocol that its sender reads. Versions before the second send
none, and refuse a message with a field that they do not know; so they are sent the fields of the first alone. From the
second on, unknown fields are passed over, and everything is sent.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from tandem import messages, snapshot, status
from tandem.model import Model

HEADER = "Tandem-Protocol"
FIRST = 1
"""Of a peer that does not say: it refuses unknown fields."""
PROTOCOL = 2
"""What this version reads."""

FIRST_FIELDS: Mapping[type[Model], str] = {
    messages.Member: "replica incarnation address port processes",
    messages.Membership: "generation members reason",
    messages.RankReport: "rank step phase total_steps epoch loss throughput busy_seconds saves cpu gpu"
    " gpu_memory_bytes",
    messages.Sync: "replica incarnation address port processes state reason generation membership leaving ranks",
    messages.Answer: "order membership why stacks",
    messages.Target: "replicas",
    status.Condition: "type status reason message observed_generation last_transition_time",
    status.Members: "desired ready min max summary",
    status.Progress: "step total_steps epoch percent remaining_seconds",
    status.Utilization: "trainer_cpu evaluator_cpu gpu gpu_memory_bytes",
    status.Straggler: "rank replica ratio",
    status.CheckpointRef: "name step generation",
    status.Score: "name step metric value",
    status.Status: "phase conditions observed_generation workers evaluators world_size generation restarts progress"
    " loss throughput utilization stragglers latest_checkpoint latest_evaluation best_checkpoint evaluation_lag_steps"
    " start_time completion_time message",
    snapshot.RankView: "rank step cpu gpu gpu_memory_bytes busy_seconds",
    snapshot.MemberView: "replica address state silent_seconds ranks",
    snapshot.GenerationView: "generation world_size members opened_at closed_at reason detail",
    snapshot.EvaluatorView: "name state cpu silent_seconds",
    snapshot.Event: "at kind text",
    snapshot.Snapshot: "job time status members generations evaluators events",
}
"""The fields of the first protocol. They never change; nothing is added here."""

FIRST_WORDS: Mapping[str, str] = {"StoreUnreachable": "MembershipChanged"}
"""Reasons that the first protocol does not know, in its own words."""


class Headers(Protocol):
    """Of a request or an answer, whichever library holds them."""

    def get(self, name: str, default: str, /) -> str:
        """The value of one header."""


OURS = {HEADER: str(PROTOCOL)}
"""The header of this version."""


def spoken(headers: Headers) -> int:
    """The protocol that the sender of a message reads."""
    said = headers.get(HEADER, "")
    return int(said) if said.isascii() and said.isdecimal() and len(said) <= 9 else FIRST


def worded(message: Model, protocol: int) -> dict[str, Any]:
    """The JSON form of a message, for a peer that reads this protocol."""
    whole = message.dump()
    return whole if protocol > FIRST else _of_the_first(message, whole)


def _of_the_first(message: Model, whole: Mapping[str, Any]) -> dict[str, Any]:
    fields = type(message).model_fields
    names = {name: fields[name].alias or name for name in FIRST_FIELDS.get(type(message), " ".join(fields)).split()}
    return {alias: _pruned(getattr(message, name), whole[alias]) for name, alias in names.items() if alias in whole}


def _pruned(value: object, whole: Any) -> Any:
    if isinstance(value, Model):
        return _of_the_first(value, whole)
    if isinstance(value, str):
        return FIRST_WORDS.get(value, whole)
    if isinstance(value, list):
        return [_pruned(one, part) for one, part in zip(value, whole, strict=True)]
    return whole
