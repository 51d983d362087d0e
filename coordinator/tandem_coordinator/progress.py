"""The progress of training, from the reports of the current generation's ranks."""

from collections.abc import Iterable, Iterator

from tandem.wire.measures import Pace
from tandem.wire.protocol import PHASES_WITHOUT_STEP, SAVING, SCRIPT, RankReport
from tandem.wire.status import CheckpointRef, Progress, Utilization


class Reports:
    """The last report of each rank, by replica, and the pace of training.

    After a generation was closed the last known loss and step stay, so that a view of the job does not flicker.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.loss: float | None = None
        self.measured: float | None = None
        """Samples per second, as the first rank measured them over its last half second."""
        self.samples_per_step: float | None = None
        """Samples per step, as the first rank's log says."""
        self.stepping = False
        """Whether a rank of this generation reports its steps."""
        self.stepped = False
        """Whether a rank of this generation has made a step."""
        self.stepped_at: float | None = None
        """Time of the last report of a step, or of a pause, in whatever generation."""
        self._ranks: dict[str, list[RankReport]] = {}
        self._received_at: dict[str, float] = {}
        self._without_save_order: set[str] = set()
        self._first: int | None = None
        self._lead: RankReport | None = None
        self._pace = Pace()

    def begin(self, generation: int) -> None:
        """Start over for a new generation: forget the reports of the ranks of the one before."""
        self.generation = generation
        self.stepping = self.stepped = False
        self._ranks.clear()
        self._without_save_order.clear()
        self._first = None
        self._pace.clear()
        self.measured = None

    def record(self, replica: str, generation: int | None, ranks: Iterable[RankReport], now: float) -> None:
        """Record an agent's report; `now` is in seconds of any steady clock."""
        if generation != self.generation:
            return
        reports = sorted(ranks, key=lambda report: report.rank)
        if not reports:
            self.forget(replica)
            return
        self._ranks[replica] = reports
        self._received_at[replica] = now
        self.stepping = self.stepping or any(report.phase not in PHASES_WITHOUT_STEP for report in reports)
        self.stepped = self.stepped or any(report.has_stepped for report in reports)
        if all(report.saves for report in reports):
            self._without_save_order.discard(replica)
        else:
            self._without_save_order.add(replica)
        if self.stepped_at is not None and any(report.pauses for report in reports):
            self.stepped_at = now
        # Of a script that logs its steps, any rank may be the only one that does.
        lead = _lead(reports)
        if lead is None:
            return
        self._first = lead.rank if self._first is None else min(self._first, lead.rank)
        if lead.rank != self._first:
            return
        if self._lead is None or lead.step != self._lead.step:
            self.stepped_at = now
        self._lead = lead
        if lead.loss is not None or not lead.loss_is_finite:
            self.loss = lead.loss
        self.measured = lead.throughput
        self._pace.add(now, lead.step)

    def forget(self, replica: str) -> None:
        """Forget a replica that is gone."""
        self._without_save_order.discard(replica)
        self._ranks.pop(replica, None)
        leads = [lead.rank for reports in self._ranks.values() if (lead := _lead(reports)) is not None]
        if self._first not in leads:
            self._first = min(leads, default=None)

    def of_replica(self, replica: str) -> list[RankReport]:
        """The last reports of a replica's ranks."""
        return self._ranks.get(replica, [])

    def all_reports(self) -> Iterator[tuple[str, RankReport]]:
        """The last report of each rank, with its replica."""
        for replica, reports in self._ranks.items():
            for report in reports:
                yield replica, report

    @property
    def saves(self) -> bool:
        """Whether ranks report, and all that do obey `save-and-leave`."""
        return bool(self._ranks) and not self._without_save_order

    def survive(self, replicas: int) -> bool:
        """Return whether all ranks report that they go on in the next generation.

        Args:
            replicas: number of replicas in the group.
        """
        return 0 < replicas == len(self._ranks) and all(report.survives for _, report in self.all_reports())

    @property
    def scripted(self) -> bool:
        """Whether ranks run a user's own script that obeys no orders, whether or not it reports its steps."""
        return any(report.script for _, report in self.all_reports())

    @property
    def of_session(self) -> bool:
        """Whether a rank, of whatever generation, has reported its steps and obeys orders, as a session does."""
        return self._lead is not None and not self._lead.script

    @property
    def not_finite(self) -> RankReport | None:
        """The report of the first rank of such a script, while its loss is NaN or infinite; otherwise None."""
        lead = self._lead if self.stepping else None
        return lead if lead is not None and lead.script and not lead.loss_is_finite else None

    @property
    def silent(self) -> bool:
        """Whether no rank of this generation reports its steps, as with a script that does not use Tandem."""
        return all(report.phase == SCRIPT for _, report in self.all_reports())

    @property
    def saving(self) -> bool:
        """Whether a rank reports that it takes no more steps, and writes its last checkpoint."""
        return any(report.phase == SAVING for _, report in self.all_reports())

    @property
    def pausing(self) -> bool:
        """Whether a rank reports that it is in `Session.pausing()`."""
        return any(report.pauses for _, report in self.all_reports())

    @property
    def pause(self) -> str | None:
        """Describe the pause, as a sentence; None while no rank pauses."""
        if self.finishing:
            return "all steps are taken, and the code after the loop runs"
        replica, report = next(((name, report) for name, report in self.all_reports() if report.pauses), ("", None))
        return None if report is None else f"training pauses: rank {report.rank} ({replica}) is at {report.phase}"

    @property
    def finishing(self) -> bool:
        """Whether a rank reports that all steps are taken, and the code after the loop runs."""
        return any(report.finishing for _, report in self.all_reports())

    @property
    def step(self) -> int | None:
        """Completed optimizer steps; None if unknown."""
        return None if self._lead is None else self._lead.step

    def progress(self, newest: CheckpointRef | None = None) -> Progress | None:
        """The progress of training; None before the first report of a rank.

        Args:
            newest: the newest checkpoint. That of this generation may be known before a rank reports its step, and a
            new
                group resumes from that of the generation before, and reports nothing before its first step.
        """
        lead = self._lead
        if lead is None:
            return None
        counts = newest is not None and (newest.generation == self.generation or not self.stepping)
        saved = newest.step if newest is not None and counts else 0
        total, step = lead.total_steps, max(lead.step, saved)
        return Progress(
            step=step,
            total_steps=total,
            epoch=lead.epoch * step / lead.step if lead.epoch is not None and lead.step else lead.epoch,
            percent=None if not total else min(100.0, 100.0 * step / total),
            remaining_seconds=self._pace.remaining_seconds(step, total),
        )

    @property
    def throughput(self) -> float | None:
        """Samples per second over the last minute; until the log of the first rank tells the size of a step, its own
        measurement."""
        measured = self._pace.throughput(self.samples_per_step)
        return self.measured if measured is None else measured

    def utilization(self, evaluator_cpu: float | None) -> Utilization | None:
        """Utilization of all ranks together; None if nothing is known."""
        ranks = [report for _, report in self.all_reports()]
        cpu = [report.cpu for report in ranks if report.cpu is not None]
        gpu = [report.gpu for report in ranks if report.gpu is not None]
        memory = [report.gpu_memory_bytes for report in ranks if report.gpu_memory_bytes is not None]
        if not cpu and not gpu and not memory and evaluator_cpu is None:
            return None
        return Utilization(
            trainer_cpu=sum(cpu) if cpu else None,
            evaluator_cpu=evaluator_cpu,
            gpu=sum(gpu) / len(gpu) if gpu else None,
            gpu_memory_bytes=sum(memory) if memory else None,
        )

    def used_before(self, now: float) -> dict[str, float]:
        """Seconds since the processor use was measured, by rank; `now` as in `record`."""
        return {
            str(report.rank): round(now - self._received_at[replica] + report.used_before, 2)
            for replica, report in self.all_reports()
            if report.used_before is not None
        }

    def trainer_cpu(self) -> dict[str, float]:
        """Busy cores by rank."""
        return {str(report.rank): round(report.cpu, 3) for report in self._all() if report.cpu is not None}

    def trainer_gpu(self) -> dict[str, float]:
        """GPU utilization by rank."""
        return {str(report.rank): round(report.gpu, 3) for report in self._all() if report.gpu is not None}

    def trainer_busy(self) -> dict[str, float]:
        """Seconds of own work in a step, by rank."""
        return {
            str(report.rank): round(report.busy_seconds, 6) for report in self._all() if report.busy_seconds is not None
        }

    def gpu_memory(self) -> dict[str, int]:
        """Bytes of GPU memory in use, by rank."""
        return {
            str(report.rank): report.gpu_memory_bytes for report in self._all() if report.gpu_memory_bytes is not None
        }

    def _all(self) -> list[RankReport]:
        return sorted((report for _, report in self.all_reports()), key=lambda report: report.rank)


def _lead(reports: list[RankReport]) -> RankReport | None:
    """The report of the first rank that reports its steps."""
    return next((report for report in reports if report.phase not in PHASES_WITHOUT_STEP), None)
