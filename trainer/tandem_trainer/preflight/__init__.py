"""The pre-flight: a member tests itself and its network before its ranks start.

The agent starts one short-lived process for each rank (`processes`), on the rank's device, with a prefix of its own in
the generation's store. Each process says what it found in lines of JSON as it goes, so that what was found is known
also of one that dies or hangs. There are three checks, each of them of things whose result is known exactly:

1. a matrix product and a sum, whose numbers are small integers, so that every order of additions gives the same floats;
2. between the first ranks of every two replicas, or of ROUNDS pairs of each, blocks that travel there and back;
3. a sum over all ranks, if everybody was reached.

The coordinator judges the reports of all members (tandem_coordinator.preflight).
"""

import json
from dataclasses import asdict, dataclass

LIMIT_SECONDS = 90.0
"""For a pre-flight as a whole; the coordinator waits longer."""
ARRIVE_SECONDS = 20.0
"""For another process to begin, after this one has. Each agent has imported torch before it joined, so a process that
does the same begins within seconds of the others; one that does not reach the store never does."""
PAIRS_SECONDS = 60.0
"""For all pairs together."""
PAIR_SECONDS = 5.0
"""For two processes to connect, and for each block."""
READY_SECONDS = 30.0
"""For the other one of a pair to be done with its pairs before. It may have waited for one that never came, and then
for two that it did not reach."""
SUM_SECONDS = 20.0
"""For the sum over all ranks."""
ROUNDS = 8
"""So many pairs of each replica are tried at most: in a world of thousands, what is slow or cut off shows in eight."""
GIVE_UP = 2
"""After this many failed connections a member stops trying: the rest would wait for it."""


@dataclass(frozen=True)
class ProcessPlace:
    """Where one process of a pre-flight stands."""

    replica: int
    """Index of its replica."""
    replicas: int
    rank: int
    """Global rank."""
    world_size: int
    local_rank: int
    address: str
    """Of the store."""
    port: int
    prefix: str
    """Of its keys."""
    agent: int
    """The process that has started it, and without which it ends."""

    def encoded(self) -> str:
        """As an argument."""
        return json.dumps(asdict(self))

    @classmethod
    def decoded(cls, argument: str) -> "ProcessPlace":
        """From an argument."""
        return cls(**json.loads(argument))


def opponents(replica: int, replicas: int, rounds: int = ROUNDS) -> list[int | None]:
    """Whom a replica is paired with in each round of a tournament (the circle method); None: it pauses. In each round
    everybody is in one pair at most, so that no pair takes bandwidth from another at one end."""
    size = replicas + replicas % 2
    turning = size - 1
    found: list[int | None] = []
    for number in range(min(rounds, turning)):
        if replica == turning:
            # The one that stays in its seat meets whoever would meet itself.
            other = number * (size // 2) % turning
        else:
            other = (number - replica) % turning
            other = turning if other == replica else other
        found.append(other if other < replicas else None)
    return found
