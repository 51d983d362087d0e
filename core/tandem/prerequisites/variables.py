"""Variables of the training processes that a cluster brings, and that this machine has to have instead."""

from collections.abc import Iterator

from tandem.job import DistributedTrainingJob
from tandem.prerequisites.site import Site
from tandem.unmet import Unmet


def variables(job: DistributedTrainingJob, site: Site) -> Iterator[Unmet]:
    """Variables that come from somewhere else and are not set here."""
    if not site.is_here or site.variables is None:
        return
    for index, variable in enumerate(job.spec.trainer.env):
        source = variable.value_from
        if source is not None and not source.optional and variable.name not in site.variables:
            message = (
                f"spec.trainer.env: {variable.name} comes from a Secret, a ConfigMap or a pod, which a cluster has; "
                f"here it is taken from the environment: set {variable.name} and try again"
            )
            yield Unmet(("spec", "trainer", "env", index, "name"), message)
