"""The job that is disturbed: three replicas of the built-in trainer and an evaluator; and the same job undisturbed."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.recovery.sides import AUTHORITY, FOREVER, BestTandemTrainer
from benchmarks.recovery.surroundings import Network, spawn
from tandem.processes import launch
from tandem.rundir.layout import RunDir
from tandem_trainer.checkpoint.reader import read_contents
from tandem_trainer.data import load
from tandem_trainer.data.order import Batches, Order, digest
from tests.soak import script as soak_script
from tests.soak.verdict import Log, Verdict, compare, judge, second_writers
from tests.support.lines import read_lines
from tests.support.manifests import images

SCRIPT = str(Path(soak_script.__file__))


class SoakJob(BestTandemTrainer):
    """Real digits on a model without dropout (whose draws depend on the number of ranks) and with a small constant
    rate, so that the loss of every step can be compared with an undisturbed run's."""

    name = "soak"
    full = 3
    evaluators = {"replicas": 1}
    trainer = images(
        {
            "model": "baby-cnn",
            "data": {"name": "digits"},
            "globalBatchSize": 128,
            "epochs": FOREVER,
            "optimizer": {"name": "sgd", "learningRate": 0.002, "momentum": 0.0},
        }
    )

    def __init__(self, folder: Path, network: Network) -> None:
        super().__init__(folder, network)
        self._evaluator: subprocess.Popen[bytes] | None = None
        self._logs: dict[int, Log] = {}
        self._read: dict[Path, int] = {}
        self._batches = Batches(self.order())
        self._digests: dict[int, str] = {}

    def order(self) -> Order:
        """The order of its samples."""
        config, parameters = self.job.spec.trainer.settings_of_loop, self.job.spec.trainer.images
        return Order(len(load(parameters.data, "train")), config.global_batch_size, config.seed)

    def alone(self, steps: int) -> list[str]:
        """The command of one rank that takes so many steps of the job in its run directory."""
        return [sys.executable, "-m", "tandem_trainer"]

    def start(self) -> None:
        super().start()
        self.start_evaluator()

    def start_evaluator(self) -> None:
        """Start the evaluator, beside the authority: it needs no network."""
        variables = launch.environment(self.job, self.run_dir.path, "evaluator-0")
        command = launch.evaluator_command(0)
        self._evaluator = spawn(self.network, AUTHORITY, command, variables, self.folder / "evaluator.txt")

    def kill_evaluator(self) -> None:
        """Kill it, with SIGKILL."""
        self._evaluator.kill()
        self._evaluator.wait()

    def other_processes(self) -> list[subprocess.Popen[bytes]]:
        return super().other_processes() + ([self._evaluator] if self._evaluator else [])

    def verdict(self) -> Verdict:
        """What holds and what does not, by now."""
        records = self.run_dir.generation_records()
        committed = self.run_dir.committed()
        for path in sorted(self.run_dir.log.glob("train-g*.jsonl")):
            log = self._logs.setdefault(int(path.stem.removeprefix("train-g")), Log())
            lines, self._read[path] = read_lines(path, self._read.get(path, 0))
            for line in lines:
                log.take(line)
        opened = {
            line["generation"]: line["time"]
            for line in read_lines(self.run_dir.log / "coordinator.jsonl")[0]
            if line["kind"] == "generation"
        }
        found = judge(records, self._logs, opened, self._expected)
        began: dict[int, dict[int, float]] = {}
        for manifest in committed:
            began.setdefault(manifest.generation, {})[manifest.step] = manifest.created_at
        violations = found.violations + second_writers(records, self._logs, began)
        violations += [f"{name} is damaged: {why}" for name, why in self.run_dir.damaged().items()]
        if self.run_dir.ended():
            violations.append("the job has ended, which it should not")
        if self.run_dir.rewind_records():
            violations.append("the loss was taken for useless, and the run was rewound")
        if self._evaluator is not None and self._evaluator.poll() is not None:
            violations.append(f"the evaluator ended with {self._evaluator.returncode}")
        return Verdict(found.counting, found.unlogged, violations)

    def deviations(self, verdict: Verdict) -> list[str]:
        """Where the loss is not that of a run of one rank that nobody disturbs. Takes as long as that run."""
        return compare(verdict.counting, self._undisturbed(max(verdict.counting, default=0)))

    def violations_at_end(self) -> list[str]:
        """What is wrong with what is left on the disk, beside what the losses show."""
        return []

    def evaluated(self) -> int:
        """Checkpoints that were evaluated."""
        return len(list(self.run_dir.evaluations.glob("step-*/g??????.json")))

    def _undisturbed(self, steps: int) -> dict[int, float]:
        run_dir = RunDir(self.folder / "undisturbed")
        run_dir.create()
        body: dict[str, Any] = self.job.dump()
        if "loop" in body["spec"]["trainer"]:
            body["spec"]["trainer"]["loop"]["maxSteps"] = steps
        body["spec"]["checkpoint"] = {"everySteps": max(1, steps)}
        run_dir.write_job(type(self.job).parse(body))
        variables = {"OMP_NUM_THREADS": "1", launch.RUN_DIR: str(run_dir.path)}
        with (self.folder / "undisturbed.txt").open("wb") as output:
            subprocess.run(
                self.alone(steps),
                env=os.environ | variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                check=True,
            )
        lines = [line for path in run_dir.log.glob("train-g*.jsonl") for line in read_lines(path)[0]]
        return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}

    def _expected(self, step: int) -> str:
        if step not in self._digests:
            self._digests[step] = digest(self._batches.ids(step - 1))
        return self._digests[step]


class SoakSession(SoakJob):
    """A script of the user's own with what makes state go astray: frozen layers, groups in an order that is not the
    model's, moments, and an average."""

    name = "soak-session"
    evaluators = {"replicas": 0}
    trainer = {"command": ["python", SCRIPT]}

    def order(self) -> Order:
        return soak_script.ORDER

    def alone(self, steps: int) -> list[str]:
        return [sys.executable, SCRIPT, "--steps", str(steps)]

    def start_evaluator(self) -> None:
        """It has none: weights of one's own have no task to be evaluated by."""

    def kill_evaluator(self) -> None:
        """There is none."""

    def violations_at_end(self) -> list[str]:
        """What is wrong with the newest checkpoint, beside what the losses show."""
        newest = self.run_dir.committed()[0]
        contents = read_contents(self.run_dir.checkpoint(newest.name), newest)
        return soak_script.wrong(newest.step, contents)
