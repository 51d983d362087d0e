"""Jobs on Kubernetes, for the commands that work on every platform."""

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tandem.errors import UserError
from tandem.formatting import several
from tandem.labels import WORKER
from tandem.stacks import Inspection, RankStacks
from tandem_cli.kubernetes import execution, forwarding, job_view
from tandem_cli.kubernetes.execution import executable, holder, inspect, inspect_all, interact
from tandem_cli.kubernetes.following import Follower, check, chosen, first_line, whole
from tandem_cli.kubernetes.forwarding import Forward
from tandem_cli.kubernetes.job_view import RESOURCE, ask_job, ask_pods
from tandem_cli.kubernetes.kubectl import ClusterError, Kubectl, NoCluster, NotFound
from tandem_cli.local.known import other_runs
from tandem_cli.log_lines import Choice, Line, Tell
from tandem_cli.output import echo
from tandem_cli.platforms import Run, ShowAttachment, ShowPage
from tandem_cli.view import JobEvent, JobView, Pod

POLL_SECONDS = 1.0


class OnKubernetes(Run):
    """A job, which need not be there: the first question tells.

    Args:
        name: of the job.
        by_name: the user has named the cluster, so a job on it is meant, and no run of this machine.
    """

    on_leaving = "Ctrl-C leaves; the job goes on"
    forgets = "; Kubernetes forgets events after an hour or so"

    def __init__(self, name: str, kubectl: Kubectl, by_name: bool) -> None:
        self.name = name
        self._kubectl, self._is_meant = kubectl, by_name

    def look(self, known: tuple[JobEvent, ...] | None = None) -> JobView:
        with self._asked():
            return job_view.look(self._kubectl, self.name, known)

    def is_over(self, seen: JobView) -> bool:
        return seen.job.ended

    def log(self, choice: Choice, follow: bool, tell: Tell) -> Iterator[Line]:
        with self._asked():
            ask_job(self._kubectl, self.name)
        there = ask_pods(self._kubectl, self.name)
        check(there, choice, self.name)
        wanted, seen = chosen(there, choice), dict[str, int]()
        if not wanted and not follow:
            tell(f"no pod of {self.name} has a log: see tandem status {self.name}{self._kubectl.options()}")
            return
        yield from whole(self._kubectl, wanted, choice.tail, seen, tell)
        if not follow:
            return
        follower = Follower(self._kubectl, self.name, choice, seen, tell)
        try:
            yield from follower.lines()
        finally:
            follower.close()

    def page(self, port: int, show: ShowPage) -> int:
        with self._asked():
            if over := self._ended():
                raise UserError(
                    f"{over}, and its coordinator is gone, and the page with it. See: tandem status {self.name}"
                )
            token = forwarding.token(self._kubectl, self.name)
            forward = Forward(self._kubectl, self.name, port)
        with forward:
            show(forward.endpoint, token, True)
            echo(f"http://{forward.endpoint} leads to {self.name}; Ctrl-C closes it", err=True)
            echo(forwarding.until_it_ends(forward, self._ended_if_known, lambda text: echo(text, err=True)), err=True)
        return 0

    def inspect(self, rank: int | None) -> Inspection:
        with self._asked():
            pods = self._workers()
        if rank is not None:
            return self._with_rank(pods, rank)
        found, errors = inspect_all(self._kubectl, pods, None)
        if not found:
            raise errors[0]
        for error in errors:
            echo("", mark=f"warning: {first_line(error)}", colour="yellow", err=True)
        return _joined(found)

    def attach(self, one: RankStacks, show: ShowAttachment) -> int:
        pod = next((pod for pod in self._workers() if pod.name == one.replica), None)
        if pod is None:
            raise UserError(f"{one.replica} of {self.name} has just ended; try again")
        found = execution.attach(self._kubectl, pod, one.rank)
        show(found)
        assert found.port is not None, "it was shown"
        echo(f"port {found.port} of this machine leads to {pod.name}; Ctrl-C closes it", err=True)
        return execution.forward(self._kubectl, pod, found.port)

    def shell(self, who: str) -> int:
        with self._asked():
            job = ask_job(self._kubectl, self.name)
        if job.ended:
            raise UserError(
                f"{self.name} has ended ({job.status.phase}), and its pods with it. See: tandem status "
                f"{shlex.quote(self.name)}{self._kubectl.options()}"
            )
        pods = ask_pods(self._kubectl, self.name)
        check(pods, Choice("", (who,)), self.name)
        running = executable([pod for pod in pods if who in (pod.name, pod.pod)])
        if not running:
            why = next((pod.why or pod.state for pod in reversed(pods) if who in (pod.name, pod.pod)), "it has no pod")
            raise UserError(f"{who} of {self.name} is not running now: {why}")
        return interact(self._kubectl, running[-1])

    def scale(self, replicas: int) -> str:
        with self._asked():
            job = ask_job(self._kubectl, self.name)
        if job.ended:
            raise UserError(f"{self.name} has ended ({job.status.phase})")
        self._kubectl.ask("scale", f"{RESOURCE}/{self.name}", f"--replicas={replicas}")
        return f"{self.name} goes on with {several(replicas, 'worker')}, as far as the cluster has room"

    def stop(self, at_once: bool) -> str:
        """Suspend it, as `runPolicy.suspend` does: what the operator then does, and what goes on later, is the same."""
        if at_once:
            raise UserError(
                "--now is for runs of this machine and on SLURM; a job on Kubernetes saves and leaves, or is deleted"
            )
        with self._asked():
            job = ask_job(self._kubectl, self.name)
        if job.ended or job.status.phase == "Suspended":
            raise UserError(f"{self.name} is not running ({job.status.phase})")
        self._kubectl.ask("patch", RESOURCE, self.name, *_suspending("true"))
        # Its pods save before they are gone.
        while not (job := ask_job(self._kubectl, self.name)).ended and (
            job.status.phase != "Suspended" or ask_pods(self._kubectl, self.name)
        ):
            time.sleep(POLL_SECONDS)
        if job.ended:
            return f"{self.name} has ended meanwhile ({job.status.phase})"
        saved = job.status.latest_checkpoint
        what = f"saved at step {saved.step:,}" if saved else "nothing was saved"
        again = shlex.join(["kubectl", "patch", "dtj", self.name, *_suspending("false")])
        return f"{self.name} is suspended; {what}. It goes on after: {again}{self._kubectl.options()}"

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """The first questions: a cluster that does not answer may not have been meant.

        Raises:
            ClusterError: it does not; says which runs there are, unless a cluster was asked for by name.
        """
        try:
            yield
        except NotFound:
            raise
        except NoCluster as error:
            if self._is_meant:
                raise
            nobody = f"no run of this machine is called {self.name}, and kubectl knows no cluster to ask for a job"
            raise NoCluster(f"{nobody}{other_runs()}") from error
        except ClusterError as error:
            if self._is_meant:
                raise
            raise ClusterError(f"{error}\nno run of this machine is called {self.name}{other_runs()}") from error
        self._is_meant = True

    def _ended(self) -> str:
        """How the job has ended, empty while it has not."""
        job = ask_job(self._kubectl, self.name)
        return f"{self.name} has ended ({job.status.phase})" if job.ended else ""

    def _ended_if_known(self) -> str:
        try:
            return self._ended()
        except NotFound:
            return f"{self.name} was deleted"
        except ClusterError:
            return ""

    def _workers(self) -> list[Pod]:
        """The pods of workers that can be asked."""
        job = ask_job(self._kubectl, self.name)
        if job.ended:
            raise UserError(f"{self.name} has ended ({job.status.phase}), so there are no stacks")
        pods = executable(ask_pods(self._kubectl, self.name, WORKER))
        if not pods:
            where = f"tandem status {self.name}{self._kubectl.options()}"
            raise UserError(f"no worker of {self.name} is running now: see {where}")
        return pods

    def _with_rank(self, pods: Sequence[Pod], rank: int) -> Inspection:
        """Asks one worker. If the rank is another's, it asks that one, or all if nobody knows the order of the
        workers."""
        guess = pods[min(rank, len(pods) - 1)]
        first = inspect(self._kubectl, guess, rank)
        if _has(first, rank):
            return first
        if (right := holder(pods, first, rank)) is not None and right is not guess:
            second = inspect(self._kubectl, right, rank)
            if _has(second, rank):
                return second
        found, errors = inspect_all(self._kubectl, [pod for pod in pods if pod is not guess], rank)
        joined = _joined([first, *found])
        if errors and not _has(joined, rank):
            raise errors[0]
        return joined


def _suspending(value: str) -> list[str]:
    return ["--type=merge", "-p", f'{{"spec":{{"runPolicy":{{"suspend":{value}}}}}}}']


def _has(found: Inspection, rank: int) -> bool:
    return any(one.rank == rank for one in found.ranks)


def _joined(found: Sequence[Inspection]) -> Inspection:
    ranks = sorted((one for answer in found for one in answer.ranks), key=lambda one: one.rank)
    return Inspection(ranks=ranks)
