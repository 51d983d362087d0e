"""A job whose agents are driven by hand, for tests of what membership decides; the clock moves when they say so."""

from typing import Any

from tandem.wire.protocol import Answer, Sync
from tandem_coordinator.group_state import (
    Action,
    Announce,
    Close,
    Complete,
    Event,
    FailJob,
    Open,
    Rules,
    RunEnded,
    Synced,
    Tick,
)
from tandem_coordinator.membership import answer, initial_state, step
from tandem_coordinator.state_store import RecordedState

RULES = Rules(
    minimum=1,
    maximum=4,
    lost_after=3.0,
    grow_cooldown=10.0,
    grow_after=30.0,
    max_restarts=2,
    restart_window=100.0,
    start_after=3.0,
)


class Job:
    """A job whose agents are driven by hand: `joins`, `runs`, `leaves`, and the time that passes."""

    def __init__(self, target: int = 2, rules: Rules = RULES, **recorded: Any) -> None:
        self.now = 1000.0
        self.state = initial_state(rules, target, self.now, RecordedState(**recorded))
        self.actions: list[Action] = []
        self.beats: dict[str, Sync] = {}
        self.training = self.can_save = self.scripted = self.saving = self.pausing = self.finishing = False
        self.survive = False
        self.bucket_problem = ""
        self.step_seconds = 0.0
        self.checkpoint: int | None = None
        self.saved_step: int | None = None
        self.script_checkpoint: tuple[int, str] | None = None
        self.script_checkpoint_polled = float("inf")
        self.leaving: set[str] = set()
        self.rejoins: list[str] = []
        self.nodes: dict[str, str] = {}

    def tick(self) -> None:
        self.tell(
            Tick(
                checkpoint=self.checkpoint,
                saved_step=self.saved_step,
                script_checkpoint=self.script_checkpoint,
                script_checkpoint_polled=self.script_checkpoint_polled,
                training=self.training,
                can_save=self.can_save,
                survive=self.survive,
                scripted=self.scripted,
                step_seconds=self.step_seconds,
                saving=self.saving,
                pausing=self.pausing,
                finishing=self.finishing,
                bucket_problem=self.bucket_problem,
            )
        )

    def tell(self, event: Event) -> None:
        self.state, actions = step(self.state, event, self.now)
        self.actions += actions
        for action in actions:
            if isinstance(action, FailJob | Complete):
                self.tell(RunEnded(action.cause))

    def say(self, replica: str, state: str, **more: Any) -> Answer:
        sync = self.message(replica, state, **more)
        self.tell(Synced(sync))
        if state == "leaving":
            self.beats.pop(replica, None)
        else:
            self.beats[replica] = replace_reason(sync)
        self.tick()
        return answer(self.state, sync, recorded=self.state.number)

    def joins(self, replica: str, **more: Any) -> Answer:
        return self.say(replica, "joining", **more)

    def runs(self, replica: str, generation: int, **more: Any) -> Answer:
        return self.say(replica, "running", generation=generation, **more)

    def falls_silent(self, *replicas: str) -> None:
        for replica in replicas:
            self.beats.pop(replica, None)

    def passes(self, seconds: float) -> None:
        """Time passes in small ticks; every agent that is not silent repeats itself, and does what it is told."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now = min(until, self.now + 0.1)
            for replica, sync in list(self.beats.items()):
                self.tell(Synced(sync))
                told = answer(self.state, sync, recorded=self.state.number)
                if told.order == "end":
                    del self.beats[replica]
                elif told.order == "run" and told.membership is not None:
                    self.beats[replica] = self.message(
                        replica,
                        "running",
                        incarnation=sync.incarnation,
                        port=sync.port,
                        generation=told.membership.generation,
                    )
                elif told.order == "rejoin":
                    self.rejoins.append(replica)
                    self.beats[replica] = self.message(
                        replica,
                        "joining",
                        incarnation=sync.incarnation,
                        port=sync.port,
                        generation=sync.generation,
                        reason="MembershipChanged",
                    )
            self.tick()

    def forms(self, *replicas: str) -> int:
        """These agents join and run; the number of their generation."""
        for replica in replicas:
            self.joins(replica)
        self.passes(0.2)
        assert self.members() == list(replicas)
        return self.state.number

    def trains(self, *replicas: str) -> int:
        """They form a group whose ranks make steps, and save when asked."""
        number = self.forms(*replicas)
        self.training = self.can_save = True
        self.passes(0.2)
        return number

    def must_go(self, replica: str) -> Answer:
        return self.runs(replica, self.state.number, leaving=True)

    def save_and_stop(self, *replicas: str, gone: tuple[str, ...] = ()) -> None:
        """Their ranks have saved and ended: the agents come back, but for those that are gone."""
        for replica in replicas:
            number = self.state.number
            if replica in gone:
                self.say(replica, "leaving", generation=number)
            else:
                self.joins(replica, generation=number, reason="MembershipChanged")

    def message(self, replica: str, state: str, **more: Any) -> Sync:
        return message(replica, state, node=self.nodes.get(replica), **more)

    def said(self) -> list[str]:
        return [action.text for action in self.actions if isinstance(action, Announce)]

    def members(self) -> list[str]:
        if not self.state.open or self.state.latest is None:
            return []
        return [member.replica for member in self.state.latest.members]

    def closings(self) -> list[str]:
        return [action.cause.reason for action in self.actions if isinstance(action, Close)]

    def opened(self) -> list[Open]:
        return [action for action in self.actions if isinstance(action, Open)]

    def failed(self) -> bool:
        return any(isinstance(action, FailJob) for action in self.actions)


def formed(size: int, **options: Any) -> Job:
    """A job whose agents `worker-0`, `worker-1`, … have formed a group; as many as are wished for, if nothing else is
    said."""
    job = Job(**{"target": size} | options)
    job.forms(*(f"worker-{number}" for number in range(size)))
    return job


def in_training(size: int, **options: Any) -> Job:
    """Likewise, and its ranks make steps, and save when asked."""
    job = formed(size, **options)
    job.training = job.can_save = True
    job.passes(0.2)
    return job


def message(replica: str, state: str, **more: Any) -> Sync:
    fields = {"incarnation": f"{replica}-a", "address": "10.0.0.1", "port": 4000, "processes": 1} | more
    return Sync(replica=replica, state=state, **fields)  # type: ignore[arg-type]


def replace_reason(sync: Sync) -> Sync:
    """What the agent repeats afterwards: a wish for a new generation is said once."""
    return sync.model_copy(update={"reason": ""}) if sync.state == "running" else sync
