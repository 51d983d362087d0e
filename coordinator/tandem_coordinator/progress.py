"""The progress of training, from the reports of the current generation's ranks."""

from collections.abc import Iterable, Iterator

from tandem.measures import Pace
from tandem.protocol import SAVING, SCRIPT, WORDLESS, RankReport
from tandem.status import CheckpointRef, Progress, Utilization


class Reports:
    """The last report of each rank, by replica, and the pace of training.

    After a generation was closed the last known loss and step stay, so that a view of the job does not flicker.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.loss: float | None = None
        self.measured: float | None = None
        """Samples a second, as the first rank measured them over its last half second."""
        self.samples_per_step: float | None = None
        """As its log says."""
        self.stepping = False
        """Whether a rank of this generation says something about its steps."""
        self.stepped = False
        """Whether one has made a step."""
        self.stepped_at: float | None = None
        """When training was last heard to have made a step, or to pause, in whatever generation."""
        self._ranks: dict[str, list[RankReport]] = {}
        self._taken: dict[str, float] = {}
        self._disobedient: set[str] = set()
        self._first: int | None = None
        self._lead: RankReport | None = None
        self._pace = Pace()

    def begin(self, generation: int) -> None:
        """A generation was formed: forget what the ranks of the one before said of themselves."""
        self.generation = generation
        self.stepping = self.stepped = False
        self._ranks.clear()
        self._disobedient.clear()
        self._first = None
        self._pace.clear()
        self.measured = None

    def take(self, replica: str, generation: int | None, ranks: Iterable[RankReport], now: float) -> None:
        """Take in what an agent reports; `now` is in seconds of any steady clock."""
        if generation != self.generation:
            return
        reports = sorted(ranks, key=lambda report: report.rank)
        if not reports:
            self.forget(replica)
            return
        self._ranks[replica] = reports
        self._taken[replica] = now
        self.stepping = self.stepping or any(report.phase not in WORDLESS for report in reports)
        self.stepped = self.stepped or any(report.has_stepped for report in reports)
        if all(report.saves for report in reports):
            self._disobedient.discard(replica)
        else:
            self._disobedient.add(replica)
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
        """The replica is gone."""
        self._disobedient.discard(replica)
        self._ranks.pop(replica, None)
        leads = [lead.rank for reports in self._ranks.values() if (lead := _lead(reports)) is not None]
        if self._first not in leads:
            self._first = min(leads, default=None)

    def of(self, replica: str) -> list[RankReport]:
        """What a replica's ranks said last."""
        return self._ranks.get(replica, [])

    def everyone(self) -> Iterator[tuple[str, RankReport]]:
        """The last report of each rank, with its replica."""
        for replica, reports in self._ranks.items():
            for report in reports:
                yield replica, report

    @property
    def saves(self) -> bool:
        """Whether ranks report, and all that do say that they obey `save-and-leave`."""
        return bool(self._ranks) and not self._disobedient

    @property
    def scripted(self) -> bool:
        """Whether ranks are of a script of the user's own that obeys no orders, whatever it says of its steps."""
        return any(report.script for _, report in self.everyone())

    @property
    def of_session(self) -> bool:
        """Whether a rank, of whatever generation, has said how far it is and obeys orders, as a session does."""
        return self._lead is not None and not self._lead.script

    @property
    def not_finite(self) -> RankReport | None:
        """What the first rank of such a script says, while its loss is NaN or infinite."""
        lead = self._lead if self.stepping else None
        return lead if lead is not None and lead.script and not lead.loss_is_finite else None

    @property
    def silent(self) -> bool:
        """Whether no rank of this generation says how far it is, as with a script that knows nothing of Tandem."""
        return all(report.phase == SCRIPT for _, report in self.everyone())

    @property
    def saving(self) -> bool:
        """Whether a rank says that it takes no more steps, and writes its last checkpoint."""
        return any(report.phase == SAVING for _, report in self.everyone())

    @property
    def pausing(self) -> bool:
        """Whether a rank says that it is at something that takes as long as it takes."""
        return any(report.pauses for _, report in self.everyone())

    @property
    def pause(self) -> str | None:
        """What ranks are at that pause, in a sentence; None while none does."""
        if self.finishing:
            return "all steps are taken, and the code after the loop runs"
        replica, report = next(((one, report) for one, report in self.everyone() if report.pauses), ("", None))
        return None if report is None else f"training pauses: rank {report.rank} ({replica}) is at {report.phase}"

    @property
    def finishing(self) -> bool:
        """Whether a rank says that all steps are taken, and the code after the loop runs."""
        return any(report.finishing for _, report in self.everyone())

    @property
    def step(self) -> int | None:
        """Optimizer steps completed, as far as is known."""
        return None if self._lead is None else self._lead.step

    def progress(self, newest: CheckpointRef | None = None) -> Progress | None:
        """How far training is; None before the first word of a rank.

        Args:
            newest: the newest checkpoint. That of this generation may be known before a rank says so, and from that of
                the generation before a new group goes on, which says nothing before it steps.
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
        """Samples a second over the last minute; what the first rank measures until its log says what a step is."""
        found = self._pace.throughput(self.samples_per_step)
        return self.measured if found is None else found

    def utilization(self, evaluator_cpu: float | None) -> Utilization | None:
        """Processor use of all ranks together; None if nothing is known."""
        ranks = [report for _, report in self.everyone()]
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
        """By rank, seconds since its processor use was measured; `now` as in `take`."""
        return {
            str(report.rank): round(now - self._taken[replica] + report.used_before, 2)
            for replica, report in self.everyone()
            if report.used_before is not None
        }

    def trainer_cpu(self) -> dict[str, float]:
        """Busy cores by rank."""
        return {str(report.rank): round(report.cpu, 3) for report in self._all() if report.cpu is not None}

    def trainer_gpu(self) -> dict[str, float]:
        """GPU utilization by rank."""
        return {str(report.rank): round(report.gpu, 3) for report in self._all() if report.gpu is not None}

    def trainer_busy(self) -> dict[str, float]:
        """Seconds of its own work in a step, by rank."""
        return {
            str(report.rank): round(report.busy_seconds, 6) for report in self._all() if report.busy_seconds is not None
        }

    def gpu_memory(self) -> dict[str, int]:
        """Bytes of GPU memory in use, by rank."""
        return {
            str(report.rank): report.gpu_memory_bytes for report in self._all() if report.gpu_memory_bytes is not None
        }

    def _all(self) -> list[RankReport]:
        return sorted((report for _, report in self.everyone()), key=lambda report: report.rank)


def _lead(reports: list[RankReport]) -> RankReport | None:
    """The first rank that says something about its steps."""
    return next((report for report in reports if report.phase not in WORDLESS), None)
