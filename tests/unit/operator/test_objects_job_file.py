"""The job as the operator hands it to its processes."""

import json

from tandem.job.resource import DistributedTrainingJob
from tandem.processes.launch import SUBMITTED_ANNOTATION
from tandem_operator import objects, pods
from tests.support import manifests


def test_the_coordinator_is_told_when_the_job_was_made() -> None:
    made = manifests.manifest("digits")
    made["metadata"] |= {"namespace": "lab", "creationTimestamp": "2026-11-30T10:00:00Z"}
    config = objects.job_file(DistributedTrainingJob.read(made), "uid-1")
    written = DistributedTrainingJob.read(json.loads(config["data"][pods.JOB_FILE]))
    assert written.metadata.annotations[SUBMITTED_ANNOTATION] == "2026-11-30T10:00:00Z"
