"""Gives jobs to Kubernetes, by server-side apply: what others have set in a job stays theirs."""

import json
from collections.abc import Sequence
from typing import Any

from tandem.formatting import one_line
from tandem.job import DistributedTrainingJob
from tandem.manifest.reading import refuse
from tandem_cli.job_words import summary, warnings
from tandem_cli.kubernetes import upload
from tandem_cli.kubernetes.job_view import RESOURCE
from tandem_cli.kubernetes.kubectl import Kubectl, KubectlResult
from tandem_cli.kubernetes.references import missing
from tandem_cli.output import each_checked, echo
from tandem_cli.packing import Pack
from tandem_cli.platforms import Checked, Cluster

MANAGER = "tandem"
"""Who the API server is told has set these fields."""


class Kubernetes(Cluster):
    """The cluster that kubectl is set up for.

    Args:
        dry_run: have the cluster check everything, and change nothing.
        check: --dry-run, and see that what a job refers to is there.
        force: overwrite what was changed by other means.
    """

    def __init__(self, namespace: str, context: str, dry_run: bool, check: bool, force: bool) -> None:
        self._namespace, self._context = namespace, context
        self._dry_run, self._check, self._force = dry_run or check, check, force

    def submit(self, jobs: Sequence[Checked], settings: tuple[str, ...], pack: Pack | None) -> None:
        if pack is not None:
            each_checked(lambda one: refuse(pack.left_out(one[0]), one[2], settings), jobs)
        if self._check:
            each_checked(lambda one: refuse(missing(one[0], self._kubectl(one[1])), one[2], settings), jobs)
        for job, data, _ in jobs:
            kubectl = self._kubectl(data)
            before = kubectl.ask("get", RESOURCE, job.metadata.name, "--ignore-not-found", "-o", "json").text
            after = self._applied(kubectl, data)
            for warning in (*warnings(job), *after.warnings):
                echo(f" {one_line(warning)}", mark="warning:", colour="yellow", err=True)
            self._tell(job, json.loads(before or "null"), json.loads(after.text), kubectl.options())
            if pack is not None and not self._dry_run:
                upload.send(kubectl, job.metadata.name, pack)

    def _kubectl(self, data: dict[str, Any]) -> Kubectl:
        return Kubectl(self._namespace or str(data["metadata"].get("namespace") or ""), self._context)

    def _applied(self, kubectl: Kubectl, data: dict[str, Any]) -> KubectlResult:
        more = ["--dry-run=server"] if self._dry_run else []
        more += ["--force-conflicts"] if self._force else []
        words = ("apply", "--server-side", f"--field-manager={MANAGER}", *more, "-f", "-", "-o", "json")
        return kubectl.ask(*words, given=json.dumps(data))

    def _tell(
        self, job: DistributedTrainingJob, before: dict[str, Any] | None, after: dict[str, Any], options: str
    ) -> None:
        name, place = job.metadata.name, after["metadata"].get("namespace", "default")
        what = told(before, after, self._dry_run)
        echo(f" in namespace {place}: {one_line(summary(job))}", mark=what, colour="green")
        if not self._dry_run:
            echo(f"  tandem status {name}{options} --watch")
            echo(f"  tandem logs {name}{options} --follow")


def told(before: dict[str, Any] | None, after: dict[str, Any], dry_run: bool) -> str:
    """What became of a job, as a verb."""
    if before is None:
        return "would be made" if dry_run else "made"
    if _wanted(before) == _wanted(after):
        return "is up to date"
    return "would be changed" if dry_run else "changed"


def _wanted(whole: dict[str, Any]) -> tuple[Any, ...]:
    metadata = whole["metadata"]
    return whole.get("spec"), metadata.get("labels"), metadata.get("annotations")
