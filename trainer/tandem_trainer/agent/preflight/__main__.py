"""One process of a pre-flight: `python -m tandem_trainer.agent.preflight PLACE`. Each line of its output is a JSON
object.

- `{"at": "matrix product"}`: the check that it is about to run.
- `{"wrong": "…"}`: a wrong result of its own; the process ends then.
- `{"productSeconds": 0.004}`
- `{"pair": 2, "bytesPerSecond": 1.2e9}`: between its replica and this one; null if it could not be reached.
- `{"allReduce": "right"}`, or `wrong`, or `failed`.
"""

import json
import os
import sys

from tandem_trainer.agent.preflight import ProcessPlace
from tandem_trainer.pulse import die_with_parent


def main() -> None:
    """Run the checks of the process that the argument describes."""
    place = ProcessPlace.decoded(sys.argv[1])
    die_with_parent()
    if os.getppid() != place.agent:
        return
    # Libraries print to standard output; move them to standard error, so that it has only results.
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def report(**result: object) -> None:
        print(json.dumps(result), file=results, flush=True)

    # Imported only now: importing torch takes seconds, in which the agent may die.
    from tandem_trainer.agent.preflight.process import check

    check(place, report)
    # Skip the teardown of the interpreter and its process groups, which takes time and may fail.
    os._exit(0)


if __name__ == "__main__":
    main()
