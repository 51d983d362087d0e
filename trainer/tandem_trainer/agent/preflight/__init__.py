"""The pre-flight: a member tests itself and its network before its ranks start.

The agent starts one short-lived process for each rank (`processes`), on the rank's device, with a prefix of its own in
the generation's store. Each process reports its findings in lines of JSON as it goes, so that those of a process that
dies or hangs are known, too. There are three checks, each with an exactly known result:

1. a matrix product and a sum of small integers, so that every order of additions gives the same floats;
2. between the first ranks of every two replicas, or of MAX_ROUNDS pairs for each replica: blocks that are sent there
and back;
3. a sum over all ranks, if every pair was connected.

The coordinator judges the reports of all members (tandem_coordinator.preflight).
"""

import json
from dataclasses import asdict, dataclass

LIMIT_SECONDS = 90.0
"""Timeout of a pre-flight as a whole, in seconds; the coordinator waits longer."""
ARRIVAL_SECONDS = 20.0
"""Timeout for another process to start, after this one has. Each agent has imported torch before it joined, so a
process that does the same starts within seconds of the others; one that cannot reach the store never does."""
PAIRS_SECONDS = 60.0
"""Timeout for all pairs together."""
PAIR_SECONDS = 5.0
"""Timeout for two processes to connect, and for each block."""
READY_SECONDS = 30.0
"""Timeout for the peer of a pair to finish its earlier pairs. It may have waited for a process that never came, and
then for two that it could not reach."""
SUM_SECONDS = 20.0
"""Timeout for the sum over all ranks."""
MAX_ROUNDS = 8
"""Maximum number of pairs of each replica: in a world of thousands, eight show what is slow or disconnected."""
MAX_FAILED_PAIRS = 2
"""Number of failed connections after which a member stops trying, because its other peers would wait for it."""


@dataclass(frozen=True)
class ProcessPlace:
    """Position of one process of a pre-flight."""

    replica: int
    """Index of its replica."""
    replicas: int
    rank: int
    """Global rank."""
    world_size: int
    local_rank: int
    address: str
    """Address of the store."""
    port: int
    prefix: str
    """Prefix of the keys in the store."""
    agent: int
    """Process id of the agent that has started it; it ends with the agent."""

    def encoded(self) -> str:
        """Encode as a command line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def decoded(cls, argument: str) -> "ProcessPlace":
        """Decode a command line argument."""
        return cls(**json.loads(argument))


def opponents(replica: int, replicas: int, rounds: int = MAX_ROUNDS) -> list[int | None]:
    """Return the replica's opponent in each round of a tournament (the circle method); None for a pause. In each round
    every replica is in at most one pair, so that pairs do not share bandwidth at either end."""
    size = replicas + replicas % 2
    turning = size - 1
    opponents_by_round: list[int | None] = []
    for number in range(min(rounds, turning)):
        if replica == turning:
            # The replica with the fixed seat meets the one that would otherwise meet itself.
            other = number * (size // 2) % turning
        else:
            other = (number - replica) % turning
            other = turning if other == replica else other
        opponents_by_round.append(other if other < replicas else None)
    return opponents_by_round
