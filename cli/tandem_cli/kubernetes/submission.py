"""Submits jobs to Kubernetes by server-side apply, so that fields of other managers stay theirs."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from tandem.formatting import one_line
from tandem.job.manifest.reading import raise_for_unmet
from tandem.job.resource import DistributedTrainingJob
from tandem_cli.job_words import summary, warnings
from tandem_cli.kubernetes import upload
from tandem_cli.kubernetes.job_view import RESOURCE
from tandem_cli.kubernetes.kubectl import Kubectl, KubectlResult
from tandem_cli.kubernetes.platform import OnKubernetes
from tandem_cli.kubernetes.references import missing
from tandem_cli.output import check_all
from tandem_cli.packing import Pack
from tandem_cli.platforms import Checked, Cluster, Report, SubmittedJob

MANAGER = "tandem"
"""Field manager of these fields."""


class Kubernetes(Cluster):
    """The cluster of kubectl's configuration.

    Args:
        dry_run: let the cluster validate everything, and change nothing.
        check: like `dry_run`, and check that the objects exist to which a job refers.
        force: overwrite fields that other field managers have changed.
        draws: show on standard error how much of the code is sent.
    """

    def __init__(
        self,
        namespace: str,
        context: str,
        dry_run: bool = False,
        check: bool = False,
        force: bool = False,
        draws: bool = False,
    ) -> None:
        self._namespace, self._context = namespace, context
        self._dry_run, self._check, self._force = dry_run or check, check, force
        self._draws = draws

    def submit(
        self, jobs: Sequence[Checked], settings: tuple[str, ...], pack: Pack | None, report: Report
    ) -> Iterator[SubmittedJob]:
        if pack is not None:
            check_all(lambda checked: raise_for_unmet(pack.missing_scripts(checked[0]), checked[2], settings), jobs)
        if self._check:
            check_all(
                lambda checked: raise_for_unmet(missing(checked[0], self._kubectl(checked[1])), checked[2], settings),
                jobs,
            )
        for job, data, _ in jobs:
            kubectl = self._kubectl(data)
            before = kubectl.run("get", RESOURCE, job.metadata.name, "--ignore-not-found", "-o", "json").text
            after = self._apply(kubectl, data)
            for warning in (*warnings(job), *after.warnings):
                report(f"warning: {one_line(warning)}", True)
            yield self._submitted(job, json.loads(before or "null"), json.loads(after.text), kubectl)
            if pack is not None and not self._dry_run:
                upload.send(kubectl, job.metadata.name, pack, report, self._draws)

    def _kubectl(self, data: dict[str, Any]) -> Kubectl:
        return Kubectl(self._namespace or str(data["metadata"].get("namespace") or ""), self._context)

    def _apply(self, kubectl: Kubectl, data: dict[str, Any]) -> KubectlResult:
        options = ["--dry-run=server"] if self._dry_run else []
        options += ["--force-conflicts"] if self._force else []
        args = ("apply", "--server-side", f"--field-manager={MANAGER}", *options, "-f", "-", "-o", "json")
        return kubectl.run(*args, stdin=json.dumps(data))

    def _submitted(
        self, job: DistributedTrainingJob, before: dict[str, Any] | None, after: dict[str, Any], kubectl: Kubectl
    ) -> SubmittedJob:
        name, place, options = job.metadata.name, after["metadata"].get("namespace", "default"), kubectl.options()
        commands = (f"tandem status {name}{options} --watch", f"tandem logs {name}{options} --follow")
        return SubmittedJob(
            run=OnKubernetes(name, kubectl, by_name=True),
            outcome=outcome(before, after, self._dry_run),
            description=f"in namespace {place}: {one_line(summary(job))}",
            next_steps=() if self._dry_run else commands,
        )


def outcome(before: dict[str, Any] | None, after: dict[str, Any], dry_run: bool) -> str:
    """Return the verb for the result of an apply."""
    if before is None:
        return "would be created" if dry_run else "created"
    if _user_fields(before) == _user_fields(after):
        return "unchanged"
    return "would be changed" if dry_run else "changed"


def _user_fields(item: dict[str, Any]) -> tuple[Any, ...]:
    metadata = item["metadata"]
    return item.get("spec"), metadata.get("labels"), metadata.get("annotations")
