"""The client: where jobs go, and which runs there are."""

from collections.abc import Callable, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from tandem.errors import UserError
from tandem.wire.status import Status
from tandem_cli.client.function import function_job
from tandem_cli.client.job_input import JobInput, Overrides, read_input, settings_of, without_lines
from tandem_cli.client.run import RunHandle
from tandem_cli.client.sweep import SweepHandle, SweepInput, start_sweep
from tandem_cli.cluster import validate_job_name
from tandem_cli.kubernetes.job_view import fetch_jobs
from tandem_cli.kubernetes.kubectl import Kubectl
from tandem_cli.kubernetes.platform import OnKubernetes
from tandem_cli.kubernetes.submission import Kubernetes
from tandem_cli.local.known import RUNS, job_name, list_runs, other_runs
from tandem_cli.local.platform import OnThisMachine
from tandem_cli.local.submission import ThisMachine
from tandem_cli.packing import packed_if_given, with_code
from tandem_cli.platforms import Cluster, checked
from tandem_cli.runs import find_own_run, in_folder
from tandem_cli.slurm.submission import Slurm
from tandem_cli.sweep.definition import TrialPlatform, find_sweep
from tandem_launcher.slurm.jobs import submission_of


class Client:
    """Submits jobs, and finds runs. It holds no connection, and is cheap to make.

        Client()                                          this machine
        Client(kubernetes="team-a", context="prod")       a namespace, through kubectl
        Client(slurm=True), Client(slurm="profile")       the SLURM cluster of this login node

    Args:
        kubernetes: namespace; empty with a context: the namespace of the context.
        context: context of the kubeconfig; empty: the current one.
        slurm: a profile of `~/.config/tandem/slurm.yaml`; True: the default one.

    Raises:
        UserError: Kubernetes and SLURM are both given.
    """

    def __init__(self, *, kubernetes: str = "", context: str = "", slurm: bool | str = False) -> None:
        if slurm and (kubernetes or context):
            raise UserError("give kubernetes= or slurm=, not both")
        self._kubernetes, self._context, self._slurm = kubernetes, context, slurm

    def submit(
        self,
        job: JobInput,
        *,
        overrides: Overrides = (),
        code: str | PathLike[str] | None = None,
        run_dir: str | PathLike[str] | None = None,
        fresh: bool = False,
    ) -> RunHandle:
        """Validate a job, start it, and return its run, which outlives this process.

        On this machine, `tandem run --detach` is started; it returns once the job has passed all checks. A run
        directory with saved work is resumed, and one that is complete is returned as it is.

        Args:
            job: a path, YAML text, a dict, a `Job`, or a `tandem.job.resource.DistributedTrainingJob`.
            overrides: fields to change, as the option `--set` does.
            code: folder that the job gets and works in, as the option `--code`.
            run_dir: run directory; None: `runs/NAME`. On Kubernetes there is none to choose.
            fresh: move an earlier run in that directory away and start over; not on Kubernetes.

        Raises:
            UserError: the job is invalid, or the place refuses it or does not answer.
        """
        path = None if run_dir is None else Path(run_dir)
        cluster = self._cluster(path, fresh)
        source = read_input(job)
        notes: list[str] = []
        with packed_if_given(None if code is None else Path(code)) as pack, without_lines():
            settings = with_code(settings_of(overrides), pack)
            jobs = [checked(source, settings)]
            # The list: a platform goes on after it has named a job, for example to send its code.
            (submitted,) = list(cluster.submit(jobs, settings, pack, lambda text, _: notes.append(text.strip())))
        return RunHandle(submitted.run, jobs[0][0].metadata.name, tuple(notes))

    def train(
        self,
        function: Callable[..., object],
        *args: Any,
        kwargs: Mapping[str, Any] | None = None,
        workers: int = 1,
        code: str | PathLike[str] = ".",
        name: str = "",
        overrides: Overrides = (),
        run_dir: str | PathLike[str] | None = None,
        fresh: bool = False,
    ) -> RunHandle:
        """Submit a job in which every rank calls a function, as if it were a script; its result is ignored.

        The ranks import it by module and name from the folder of the code. A function of a notebook's cell is sent as
        source, so it may use only what it imports or defines itself.

        Args:
            args: positional arguments of the function: what JSON can express.
            kwargs: keyword arguments of the function.
            workers: number of workers.
            code: folder that the job gets, imports the function from, and works in.
            name: name of the job; empty: derived from the function.
            overrides: other fields of the job, see `submit`.
            run_dir: see `submit`.
            fresh: see `submit`.

        Raises:
            UserError: the job could not find or call the function; and as `submit`.
        """
        with function_job(function, args, kwargs or {}, workers, name, Path(code)) as (job, folder):
            return self.submit(job, overrides=overrides, code=folder, run_dir=run_dir, fresh=fresh)

    def sweep(
        self,
        sweep: SweepInput,
        *,
        job: JobInput | None = None,
        name: str = "",
        overrides: Overrides = (),
        code: str | PathLike[str] | None = None,
        folder: str | PathLike[str] | None = None,
    ) -> SweepHandle:
        """Start a sweep, which tries a job with different settings, in a process of its own; or continue it.

        Args:
            sweep: a file or text of kind Sweep, or a dict: of a whole sweep, or of its `spec`.
            job: the job, as for `submit`; None: the one that the sweep names.
            name: name of the sweep; empty: its own, or `NAME-sweep` of the job.
            overrides: fields to change in all trials, see `submit`.
            code: see `submit`.
            folder: folder of the sweep; None: `runs/NAME`.

        Raises:
            UserError: the sweep or its job is invalid, the folder has another sweep, or Optuna is not installed.
        """
        destination = TrialPlatform(
            kubernetes=self._kubernetes,
            context=self._context,
            slurm=bool(self._slurm),
            profile=self._slurm if isinstance(self._slurm, str) else "",
        )
        path, packed = None if folder is None else Path(folder), None if code is None else Path(code)
        return start_sweep(self, sweep, job, name, settings_of(overrides), packed, path, destination)

    def find_sweep(self, name: str | PathLike[str]) -> SweepHandle:
        """Return a sweep by its name or folder.

        Raises:
            UserError: there is none.
        """
        place = find_sweep(fspath(name))
        if place is None:
            raise UserError(f"there is no sweep called {fspath(name)} in {RUNS}")
        return SweepHandle(self, place)

    def run(self, name: str | PathLike[str]) -> RunHandle:
        """Return a run by its name, its folder, or the URL of its place in a bucket; on Kubernetes a job by its name.

        Raises:
            UserError: there is none; the message suggests others.
        """
        word = fspath(name)
        if self.is_on_kubernetes:
            job = OnKubernetes(validate_job_name(word), self._kubectl, by_name=True)
            return RunHandle(job, job.view(()).job.name)
        run = find_own_run(word)
        if run is None:
            raise UserError(f"no run of this machine is called {word}{other_runs()}")
        return _handle(run)

    def runs(self) -> list[RunHandle]:
        """Return all runs: of this machine, the newest first; with SLURM, those submitted to it; or the jobs of the
        namespace.

        Raises:
            UserError: the cluster does not answer.
        """
        if self.is_on_kubernetes:
            kubectl = self._kubectl
            names = [job.name for job in fetch_jobs(kubectl)]
            return [RunHandle(OnKubernetes(name, kubectl, by_name=True), name) for name in names]
        return [_handle(in_folder(path)) for path in list_runs() if not self._slurm or submission_of(path) is not None]

    def __repr__(self) -> str:
        if self.is_on_kubernetes:
            return f"Client(kubernetes={self._kubernetes!r}, context={self._context!r})"
        return f"Client(slurm={self._slurm!r})" if self._slurm else "Client()"

    def statuses(self, selector: str) -> dict[str, Status]:
        """Return the status of all jobs on Kubernetes that a label selector matches, by name, with a single request.

        Raises:
            UserError: the cluster does not answer.
        """
        return {job.name: job.status for job in fetch_jobs(self._kubectl, selector=selector)}

    @property
    def is_on_kubernetes(self) -> bool:
        """Whether jobs go to Kubernetes."""
        return bool(self._kubernetes or self._context)

    @property
    def scales(self) -> bool:
        """Whether the number of workers can change while a run is running."""
        return self.is_on_kubernetes or bool(self._slurm)

    @property
    def _kubectl(self) -> Kubectl:
        return Kubectl(self._kubernetes, self._context)

    def _cluster(self, run_dir: Path | None, fresh: bool) -> Cluster:
        if self.is_on_kubernetes:
            if run_dir is not None or fresh:
                raise UserError("run_dir= and fresh= are for this machine and SLURM; Kubernetes has volumes")
            return Kubernetes(self._kubernetes, self._context)
        if self._slurm:
            return Slurm(self._slurm if isinstance(self._slurm, str) else "", run_dir, fresh, None)
        return ThisMachine(run_dir, fresh)


def _handle(run: OnThisMachine) -> RunHandle:
    return RunHandle(run, job_name(run.path) or run.path.resolve().name)
