"""One process of a pre-flight: `python -m tandem_trainer.preflight PLACE`. Each line of its output is a JSON object.

- `{"at": "matrix product"}`: what it is about to do.
- `{"wrong": "…"}`: what it did wrong by itself; it ends then.
- `{"productSeconds": 0.004}`
- `{"pair": 2, "bytesPerSecond": 1.2e9}`: between its replica and this one; null: it was not reached.
- `{"allReduce": "right"}`, or `wrong`, or `failed`.
"""

import json
import os
import sys

from tandem_trainer.preflight import ProcessPlace
from tandem_trainer.pulse import die_with_parent


def main() -> None:
    """Be the process that the argument describes."""
    place = ProcessPlace.decoded(sys.argv[1])
    die_with_parent()
    if os.getppid() != place.agent:
        return
    # Libraries print to the standard output; what is said here must stay alone.
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(**found: object) -> None:
        print(json.dumps(found), file=results, flush=True)

    # Importing torch takes seconds, in which the agent may die.
    from tandem_trainer.preflight.process import check

    check(place, say)
    # Taking the interpreter and its groups apart takes time, and may fail.
    os._exit(0)


if __name__ == "__main__":
    main()
