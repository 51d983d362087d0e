"""What the operator is told of a job: little enough for one that watches thousands, whatever the size of the job."""

from tandem.snapshot import GenerationView, Snapshot

MOST_GENERATIONS = 20
MOST_NAMES = 48 * 2**10
"""Characters of all names of members: those of 1,000 to 2,000."""
MOST_WORDS = 200
"""Characters of why a generation was formed."""


def brief(whole: Snapshot) -> Snapshot:
    """A snapshot of some 100 KiB at most: the status, and the last generations.

    Each member is named once, in the newest generation that has it: what counts is who was ever in the group.
    """
    views: list[GenerationView] = []
    named: set[str] = set()
    left = MOST_NAMES
    for view in reversed(whole.generations[-MOST_GENERATIONS:]):
        members = []
        for name in view.members:
            if name not in named and len(name) <= left:
                members.append(name)
                named.add(name)
                left -= len(name)
        replicas = len(view.members) if view.replicas is None else view.replicas
        views.append(
            view.model_copy(update={"members": members, "replicas": replicas, "detail": view.detail[:MOST_WORDS]})
        )
    views.reverse()
    return Snapshot(job=whole.job, time=whole.time, status=whole.status, generations=views)
