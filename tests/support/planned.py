"""Which samples each step of the digits example takes, computed without a run.

What `tandem run`, SLURM and Kubernetes train is compared with this one value, each by a test of its own, so all three
are equal.
"""

from tandem.job.manifest.reading import read_job
from tandem_trainer.data.loading import load
from tandem_trainer.data.order import Batches, Order, digest
from tests.support import EXAMPLES


def planned_samples(steps: int) -> dict[int, str]:
    """The digest of the samples of each step, from 1."""
    trainer = read_job(EXAMPLES / "digits.yaml").spec.trainer
    config = trainer.settings_of_loop
    batches = Batches(Order(len(load(trainer.images.data, "train")), config.global_batch_size, config.seed))
    return {step + 1: digest(batches.ids(step)) for step in range(steps)}
