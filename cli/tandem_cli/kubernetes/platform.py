"""The platform `kubernetes`: a job on a cluster."""

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tandem.errors import UserError
from tandem.formatting import count_noun
from tandem.job.labels import WORKER
from tandem.rundir.layout import RunDir
from tandem.wire.stacks import Inspection, RankStacks
from tandem_cli.kubernetes import execution, forwarding
from tandem_cli.kubernetes.execution import executable, holder, inspect, inspect_all, interact
from tandem_cli.kubernetes.following import Follower, first_line, merged_lines, select_pods, validate_selection
from tandem_cli.kubernetes.forwarding import Forward
from tandem_cli.kubernetes.job_view import RESOURCE, fetch_job, fetch_job_view, fetch_pods
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl, NoClusterError, NotFound
from tandem_cli.local.known import other_runs
from tandem_cli.log_lines import Line, LogSelection, Notify
from tandem_cli.output import echo
from tandem_cli.platforms import IsClosed, Run, ShowAttachment, ShowPage
from tandem_cli.view import JobEvent, JobView, PodView

POLL_SECONDS = 1.0


class OnKubernetes(Run):
    """A job, which may not exist: the first request finds out.

    Args:
        name: the job's name.
        by_name: whether the user named the cluster, so that a job on it is meant, and not a local run.
    """

    on_leaving = "Ctrl-C leaves; the job continues"
    forgets = "; Kubernetes deletes events after an hour or so"
    copies_run_dir = True

    def __init__(self, name: str, kubectl: Kubectl, by_name: bool) -> None:
        self.name = name
        self._kubectl, self._is_confirmed = kubectl, by_name

    def view(self, events: tuple[JobEvent, ...] | None = None) -> JobView:
        with self._explaining_errors():
            return fetch_job_view(self._kubectl, self.name, events)

    def is_over(self, view: JobView) -> bool:
        return view.job.ended

    def run_dir(self, checkpoints: Sequence[str] = ()) -> RunDir:
        from tandem_cli.kubernetes.copying import copy  # takes a tenth of a second, and most calls do not need it

        folder = Path("runs", self.name)
        with self._explaining_errors():
            copied = copy(self._kubectl, self.name, folder, checkpoints or ["none"], "", lambda count, total: None)
        if copied.faults:
            raise UserError(f"{self.name} was copied incompletely: {'; '.join(copied.faults)}")
        return RunDir(folder)

    def log(
        self, selection: LogSelection, follow: bool, notify: Notify, is_closed: IsClosed = lambda: False
    ) -> Iterator[Line]:
        with self._explaining_errors():
            fetch_job(self._kubectl, self.name)
        pods = fetch_pods(self._kubectl, self.name)
        validate_selection(pods, selection, self.name)
        selected, last_timestamps = select_pods(pods, selection), dict[str, int]()
        if not selected and not follow:
            notify(f"no pod of {self.name} has a log; see: tandem status {self.name}{self._kubectl.options()}")
            return
        yield from merged_lines(self._kubectl, selected, selection.tail, last_timestamps, notify)
        if not follow:
            return
        follower = Follower(self._kubectl, self.name, selection, last_timestamps, notify)
        try:
            yield from follower.lines(is_closed)
        finally:
            follower.close()

    def page(self, port: int, show: ShowPage) -> int:
        with self._explaining_errors():
            if end := self._end_message():
                raise UserError(f"{end}, so it has no live page any more. See: tandem status {self.name}")
            token = forwarding.token(self._kubectl, self.name)
            forward = Forward(self._kubectl, self.name, port)
        with forward:
            show(forward.endpoint, token, True)
            echo(f"http://{forward.endpoint} is forwarded to {self.name}; Ctrl-C closes it", err=True)
            echo(forwarding.keep_open(forward, self._end_message_if_known, lambda text: echo(text, err=True)), err=True)
        return 0

    def inspect(self, rank: int | None) -> Inspection:
        with self._explaining_errors():
            pods = self._workers()
        if rank is not None:
            return self._inspect_rank(pods, rank)
        inspections, errors = inspect_all(self._kubectl, pods, None)
        if not inspections:
            raise errors[0]
        for error in errors:
            echo("", mark=f"warning: {first_line(error)}", colour="yellow", err=True)
        return _joined(inspections)

    def attach(self, stacks: RankStacks, show: ShowAttachment) -> int:
        pod = next((pod for pod in self._workers() if pod.name == stacks.replica), None)
        if pod is None:
            raise UserError(f"{stacks.replica} of {self.name} has just ended; try again")
        attachment = execution.attach(self._kubectl, pod, stacks.rank)
        show(attachment)
        assert attachment.port is not None, "it was shown"
        echo(f"local port {attachment.port} is forwarded to {pod.name}; Ctrl-C closes it", err=True)
        return execution.forward(self._kubectl, pod, attachment.port)

    def shell(self, process: str) -> int:
        with self._explaining_errors():
            job = fetch_job(self._kubectl, self.name)
        if job.ended:
            raise UserError(
                f"{self.name} has ended ({job.status.phase}), so it has no pods any more. See: tandem status "
                f"{shlex.quote(self.name)}{self._kubectl.options()}"
            )
        pods = fetch_pods(self._kubectl, self.name)
        validate_selection(pods, LogSelection("", (process,)), self.name)
        running = executable([pod for pod in pods if process in (pod.name, pod.pod)])
        if not running:
            reason = next(
                (pod.why or pod.state for pod in reversed(pods) if process in (pod.name, pod.pod)), "it has no pod"
            )
            raise UserError(f"{process} of {self.name} is not running: {reason}")
        return interact(self._kubectl, running[-1])

    def scale(self, replicas: int) -> str:
        with self._explaining_errors():
            job = fetch_job(self._kubectl, self.name)
        if job.ended:
            raise UserError(f"{self.name} has ended ({job.status.phase})")
        self._kubectl.run("scale", f"{RESOURCE}/{self.name}", f"--replicas={replicas}")
        return f"{self.name} scaled to {count_noun(replicas, 'worker')}, if the cluster has room"

    def stop(self, immediately: bool) -> str:
        """Suspend the job, as `runPolicy.suspend` does."""
        if immediately:
            raise UserError(
                "--now is for local runs and runs on SLURM; to stop a job on Kubernetes without saving, delete it"
            )
        with self._explaining_errors():
            job = fetch_job(self._kubectl, self.name)
        if job.ended or job.status.phase == "Suspended":
            raise UserError(f"{self.name} is not running ({job.status.phase})")
        self._kubectl.run("patch", RESOURCE, self.name, *_suspending("true"))
        # The pods save before they end.
        while not (job := fetch_job(self._kubectl, self.name)).ended and (
            job.status.phase != "Suspended" or fetch_pods(self._kubectl, self.name)
        ):
            time.sleep(POLL_SECONDS)
        if job.ended:
            return f"{self.name} has ended meanwhile ({job.status.phase})"
        saved = job.status.latest_checkpoint
        checkpoint = f"saved at step {saved.step:,}" if saved else "nothing was saved"
        command = shlex.join(["kubectl", "patch", "dtj", self.name, *_suspending("false")])
        return f"{self.name} is suspended; {checkpoint}. To resume it: {command}{self._kubectl.options()}"

    def resume(self) -> str:
        """Resume the job, as `runPolicy.suspend: false` does."""
        with self._explaining_errors():
            self._kubectl.run("patch", RESOURCE, self.name, *_suspending("false"))
        return f"{self.name} is resumed"

    @contextmanager
    def _explaining_errors(self) -> Iterator[None]:
        """Explain errors of the first requests: a name that is no local run may be mistyped.

        Raises:
            ClusterError: the cluster does not answer; lists the local runs, unless the user named the cluster.
        """
        try:
            yield
        except NotFound:
            raise
        except NoClusterError as error:
            if self._is_confirmed:
                raise
            message = f"no run of this machine is called {self.name}, and kubectl has no cluster configured for a job"
            raise NoClusterError(f"{message}{other_runs()}") from error
        except ClusterError as error:
            if self._is_confirmed:
                raise
            raise ClusterError(f"{error}\nno run of this machine is called {self.name}{other_runs()}") from error
        self._is_confirmed = True

    def _end_message(self) -> str:
        """Describe how the job has ended; empty if it has not."""
        job = fetch_job(self._kubectl, self.name)
        return f"{self.name} has ended ({job.status.phase})" if job.ended else ""

    def _end_message_if_known(self) -> str:
        try:
            return self._end_message()
        except NotFound:
            return f"{self.name} was deleted"
        except ClusterError:
            return ""

    def _workers(self) -> list[PodView]:
        """Return the running pods of workers."""
        job = fetch_job(self._kubectl, self.name)
        if job.ended:
            raise UserError(f"{self.name} has ended ({job.status.phase}), so it has no stacks")
        pods = executable(fetch_pods(self._kubectl, self.name, WORKER))
        if not pods:
            command = f"tandem status {self.name}{self._kubectl.options()}"
            raise UserError(f"no worker of {self.name} is running; see: {command}")
        return pods

    def _inspect_rank(self, pods: Sequence[PodView], rank: int) -> Inspection:
        """Inspect the worker that probably has the rank; then the right one, or all if their order is unknown."""
        probable = pods[min(rank, len(pods) - 1)]
        first = inspect(self._kubectl, probable, rank)
        if _has(first, rank):
            return first
        if (actual := holder(pods, first, rank)) is not None and actual is not probable:
            second = inspect(self._kubectl, actual, rank)
            if _has(second, rank):
                return second
        remaining, errors = inspect_all(self._kubectl, [pod for pod in pods if pod is not probable], rank)
        joined = _joined([first, *remaining])
        if errors and not _has(joined, rank):
            raise errors[0]
        return joined


def _suspending(value: str) -> list[str]:
    return ["--type=merge", "-p", f'{{"spec":{{"runPolicy":{{"suspend":{value}}}}}}}']


def _has(inspection: Inspection, rank: int) -> bool:
    return any(stacks.rank == rank for stacks in inspection.ranks)


def _joined(inspections: Sequence[Inspection]) -> Inspection:
    ranks = sorted(
        (stacks for inspection in inspections for stacks in inspection.ranks), key=lambda stacks: stacks.rank
    )
    return Inspection(ranks=ranks)
