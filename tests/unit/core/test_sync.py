"""Run directories of pods that share no disk, kept equal through a bucket."""

import os
import random
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tandem.rundir import lease, sync_client
from tandem.rundir.bucket import JobWriter, SupersededWriter, claim
from tandem.rundir.checkpoint import FILE, Broken
from tandem.rundir.durable import replace_json
from tandem.rundir.layout import RunDir, checkpoint_name
from tandem.rundir.lineage import GenerationRecord
from tandem.rundir.store import Store, StoreUnavailableError
from tandem.rundir.sync import DeletedCheckpoint, Synchronizer
from tandem.rundir.sync_service import SyncService
from tandem.rundir.sync_state import STATE_FILE
from tests.support.buckets import add_checkpoint, exchanging, store
from tests.support.checkpoints import begin, commit
from tests.support.manifests import job, run_directory

pytestmark = pytest.mark.usefixtures("credentials")
OWNER = "0b6a2a1e"


class Pod:
    """One pod's run directory and its exchange."""

    def __init__(self, url: str, path: Path, coordinates: bool = False) -> None:
        self.url, self.rundir, self.coordinates = url, RunDir(path), coordinates
        self.rundir.create()
        self.restart()

    def restart(self) -> None:
        """A new process, which knows what the disk tells."""
        bucket = store(self.url)
        writer = claim(bucket, self.rundir, True, owner=OWNER) if self.coordinates else JobWriter(bucket, OWNER)
        self.sync = Synchronizer(bucket, self.rundir, writer)

    def exchange(self) -> "Pod":
        self.sync.exchange()
        return self

    def upload(self) -> "Pod":
        self.sync.upload()
        return self

    def fetch(self, name: str, paths: list[str] | None = None) -> None:
        self.sync.fetch(name, self.rundir.manifest(name).digest, paths)

    @property
    def content(self) -> dict[str, bytes]:
        return self.files(self.rundir)

    @staticmethod
    def files(rundir: RunDir) -> dict[str, bytes]:
        """The files of a run directory, but for those of checkpoints and those of one pod."""
        files = (path for path in rundir.path.rglob("*") if path.is_file())
        names = {path.relative_to(rundir.path).as_posix(): path.read_bytes() for path in files}
        own = ("buckets.json", STATE_FILE)
        return {
            name: content
            for name, content in names.items()
            if name not in own and (not name.startswith("checkpoints/") or name.endswith(FILE))
        }


@pytest.fixture
def pods(url: str, tmp_path: Path) -> Callable[[int], list[Pod]]:
    """A coordinator's pod with a job, and others."""

    def make(count: int) -> list[Pod]:
        first = Pod(url, tmp_path / "pod-0", coordinates=True)
        run_directory(first.rundir.path, job())
        first.exchange()
        return [first, *(Pod(url, tmp_path / f"pod-{number}").exchange() for number in range(1, count))]

    return make


def test_what_one_pod_writes_the_others_get(pods: Callable[[int], list[Pod]]) -> None:
    first, second, third = pods(3)
    assert second.rundir.read_job() == first.rundir.read_job()
    begin(second.rundir, 1)
    second.rundir.training_log(1).write_bytes(b'{"step": 1}\n')
    (third.rundir.evaluations / "step-000000010").mkdir()
    replace_json(third.rundir.evaluations / "step-000000010" / "g000001.json", {"loss": 1})
    for pod in (second, third, first, second):
        pod.exchange()
    assert first.content == second.content
    assert third.exchange().content == first.content
    # Logs grow, hints change, files are deleted.
    with second.rundir.training_log(1).open("ab") as log:
        log.write(b'{"step": 2}\n' * 200_000)
    replace_json(third.rundir.best_file, {"value": 1})
    (third.rundir.evaluations / "step-000000010" / "g000001.json").unlink()
    for pod in (second, third, first, second, third):
        pod.exchange()
    assert first.content == second.content == third.content
    assert len(first.rundir.training_log(1).read_bytes()) == 12 * 200_001
    assert "evaluations/step-000000010/g000001.json" not in first.content


def test_a_pod_that_waits_costs_one_listing(pods: Callable[[int], list[Pod]]) -> None:
    _, second = pods(2)
    second.exchange()
    requests = second.sync._store.requests
    before = requests.total()
    second.exchange()
    assert requests.total() - before == 2  # a listing before the parts, and one after them


def evaluate(rundir: RunDir, steps: range) -> None:
    for step in steps:
        folder = rundir.evaluations / checkpoint_name(step)
        folder.mkdir()
        replace_json(folder / "g000001.json", {"metrics": {"loss": 1 / step, "accuracy": 0.5}}, durable=False)


def test_a_new_pod_of_a_long_run_costs_no_request_for_each_evaluation(
    pods: Callable[[int], list[Pod]], url: str, tmp_path: Path
) -> None:
    (first,) = pods(1)
    costs = {}
    for count in (10, 1000):
        evaluate(first.rundir, range(len(list(first.rundir.evaluations.iterdir())) + 1, count + 1))
        first.exchange().upload()
        new = Pod(url, tmp_path / f"new-{count}")
        new.exchange()
        assert new.content == first.content
        used = new.sync._store
        costs[count] = used.requests["read"], used.requests["list"], used.received
    print(costs)
    assert costs[10][:2] == (12, 2)
    assert costs[1000][0] < 70
    assert costs[1000][1] == 3
    assert costs[1000][2] < 400 * 1000


def test_an_exchange_records_as_much_as_has_changed(
    pods: Callable[[int], list[Pod]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.rundir.sync_state.MIN_OUTDATED", 10)
    first, _ = pods(2)
    recorded = first.rundir.path / STATE_FILE
    evaluate(first.rundir, range(1, 100))
    first.exchange()
    for number in range(3):
        before = recorded.stat()
        evaluate(first.rundir, range(1000 + number, 1001 + number))
        first.exchange()
        assert recorded.stat().st_ino == before.st_ino
        assert 0 < recorded.stat().st_size - before.st_size < 1000
    # Many changes of one file: outdated lines make way.
    for number in range(300):
        replace_json(first.rundir.best_file, {"value": number}, durable=False)
        first.sync._push_file("best.json", first.rundir.best_file)
        first.sync._state.record()
    assert recorded.read_bytes().count(b"\n") < 150
    first.restart()
    assert first.exchange().sync._store.requests["write"] == 1, "its claim"


@pytest.mark.parametrize("damage", [lambda content: content[:-7], lambda content: content[:-100] + bytes(100)])
def test_a_record_that_was_cut_off_costs_nothing(
    pods: Callable[[int], list[Pod]], damage: Callable[[bytes], bytes]
) -> None:
    first, second = pods(2)
    evaluate(first.rundir, range(1, 5))
    first.exchange()
    evaluate(first.rundir, range(5, 6))
    first.exchange()
    recorded = first.rundir.path / STATE_FILE
    recorded.write_bytes(damage(recorded.read_bytes()))
    first.restart()
    (first.rundir.evaluations / checkpoint_name(1) / "g000001.json").unlink()
    first.exchange()
    assert second.exchange().content == first.content
    assert len(list(second.rundir.evaluations.rglob("*.json"))) == 4
    first.restart()
    assert first.exchange().content == second.content


def test_of_two_records_of_one_generation_the_first_counts(
    pods: Callable[[int], list[Pod]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, second, third = pods(3)

    def record(pod: Pod, members: list[str]) -> bool:
        monkeypatch.setattr("tandem.rundir.sync_client.exchange", pod.sync.exchange)
        generation = GenerationRecord(generation=1, world_size=1, started_at=0.0, members=members)
        return pod.rundir.record_generation(generation)

    assert record(second, ["a"])
    assert not record(third, ["b"])
    assert third.rundir.generation_records() == second.rundir.generation_records()
    assert second.exchange().rundir.generation_records()[0].members == ["a"]


def test_of_two_that_take_a_lease_at_once_one_has_it(pods: Callable[[int], list[Pod]]) -> None:
    _, second, third = pods(3)
    acquired = []
    for pod in (second, third):
        held = lease.acquire(pod.rundir.leases / "evaluate-step-000000010.json", pod.rundir.path.name)
        assert held is not None
        acquired.append(held)
    second.exchange()
    third.exchange()
    assert [held.is_held() for held in acquired] == [True, False]
    acquired[0].release()
    second.exchange()
    third.exchange()
    assert list(third.rundir.leases.iterdir()) == []


def test_a_checkpoint_is_committed_in_the_bucket_and_its_files_are_got_on_request(
    pods: Callable[[int], list[Pod]],
) -> None:
    first, second, third = pods(3)
    begin(second.rundir, 1)
    add_checkpoint(second.rundir, 10)
    second.exchange()
    assert third.exchange().rundir.committed() == []
    second.upload()
    second.sync.require_sent("step-000000010", second.rundir.manifest("step-000000010").digest)
    manifest = third.exchange().rundir.manifest("step-000000010")
    assert manifest == second.rundir.manifest("step-000000010")
    folder = third.rundir.checkpoint("step-000000010")
    assert [path.name for path in folder.iterdir()] == [FILE]
    third.fetch("step-000000010", ["weights.safetensors"])
    assert sorted(path.name for path in folder.iterdir()) == [FILE, "weights.safetensors"]
    third.fetch("step-000000010")
    for entry in manifest.files:
        assert (folder / entry.path).read_bytes() == (
            second.rundir.checkpoint("step-000000010") / entry.path
        ).read_bytes()
    # Retention deletes it in one pod, and everywhere.
    os.rename(second.rundir.checkpoint("step-000000010"), second.rundir.checkpoints / ".gone")  # noqa: PTH104
    second.upload()
    assert third.exchange().rundir.checkpoint_names() == first.exchange().rundir.checkpoint_names() == []
    assert [entry.name for entry in store(third.url).entries("parts/")] == []
    with pytest.raises(DeletedCheckpoint):
        third.sync.fetch("step-000000010", manifest.digest)


def test_a_checkpoint_of_a_generation_that_counts_no_longer_is_not_sent(pods: Callable[[int], list[Pod]]) -> None:
    _, second, third = pods(3)
    begin(second.rundir, 1)
    ten = add_checkpoint(second.rundir, 10)
    second.upload()
    third.exchange()
    # Cut off from the bucket, the first group goes on while another one begins from step 10.
    add_checkpoint(second.rundir, 20)
    digest = second.rundir.manifest("step-000000020").digest
    begin(third.rundir, 2, parent=ten)
    third.exchange()
    twenty = add_checkpoint(third.rundir, 20, generation=2)
    third.upload()
    second.upload()
    with pytest.raises(DeletedCheckpoint):
        second.sync.require_sent("step-000000020", digest)
    second.exchange()
    assert second.rundir.manifest("step-000000020").reference == twenty
    assert [manifest.reference for manifest in second.rundir.committed()] == [twenty, ten]


def test_an_older_checkpoint_of_a_name_gives_way(pods: Callable[[int], list[Pod]]) -> None:
    _, second, third = pods(3)
    begin(second.rundir, 1)
    ten, twenty = (add_checkpoint(second.rundir, step) for step in (10, 20))
    second.upload()
    third.exchange()
    begin(third.rundir, 2, parent=ten)
    third.rundir.set_aside(twenty.name, mark=".stale")
    newer = add_checkpoint(third.rundir, 20, generation=2)
    third.upload()
    assert second.exchange().rundir.manifest(twenty.name).reference == newer
    second.fetch(newer.name)
    digests = {entry.name.split("/")[1] for entry in store(second.url).entries("parts/")}
    assert len(digests) == 2, "the parts of the older one are gone"


def test_only_the_newest_files_stay_on_a_disk(pods: Callable[[int], list[Pod]]) -> None:
    _, second = pods(2)
    begin(second.rundir, 1)
    for step in (10, 20, 30, 40):
        add_checkpoint(second.rundir, step)
        second.upload()
    complete = {
        name for name in second.rundir.checkpoint_names() if len(list(second.rundir.checkpoint(name).iterdir())) > 1
    }
    assert complete == {"step-000000030", "step-000000040"}
    assert len(second.rundir.committed()) == 4
    second.fetch("step-000000010")
    assert (second.rundir.checkpoint("step-000000010") / "weights.safetensors").exists()


def test_damage_on_a_disk_is_not_sent_and_damage_in_the_bucket_is_not_got_twice(
    pods: Callable[[int], list[Pod]],
) -> None:
    _, second, third = pods(3)
    begin(second.rundir, 1)
    add_checkpoint(second.rundir, 10)
    (second.rundir.checkpoint("step-000000010") / "weights.safetensors").write_bytes(b"0" * 3000)
    second.upload()
    with pytest.raises(Broken, match="does not match its checksum"):
        second.sync.require_sent("step-000000010", second.rundir.manifest("step-000000010").digest)
    assert third.exchange().rundir.checkpoint_names() == []

    add_checkpoint(second.rundir, 20)
    second.upload()
    (part,) = [entry.name for entry in store(third.url).entries("parts/") if "weights" in entry.name]
    store(third.url).put(part, b"0" * 3000)
    third.exchange()
    with pytest.raises(Broken):
        third.fetch("step-000000020")
    third.rundir.set_aside("step-000000020")
    third.upload()
    assert third.exchange().rundir.checkpoint_names() == []
    assert second.exchange().rundir.checkpoint_names()[-1] == "step-000000020", "here it is sound"


@pytest.mark.parametrize("content", [b"", b"0" * 3000, None])
def test_what_is_damaged_here_alone_is_got_again_and_nothing_else(
    pods: Callable[[int], list[Pod]], content: bytes | None
) -> None:
    _, second, third = pods(3)
    begin(second.rundir, 1)
    add_checkpoint(second.rundir, 10)
    second.upload()
    third.exchange().fetch("step-000000010")
    folder = third.rundir.checkpoint("step-000000010")
    expected = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for path in (folder / "weights.safetensors", folder / FILE):
        path.unlink() if content is None else path.write_bytes(content)
    third.sync.repair("step-000000010", ())
    assert third.rundir.manifest("step-000000010") == second.rundir.manifest("step-000000010")
    reads = third.sync._store.requests["read"]
    third.sync.repair("step-000000010")
    assert third.sync._store.requests["read"] == reads + 1
    assert {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == expected


def test_what_the_bucket_does_not_have_whole_cannot_be_got_again(pods: Callable[[int], list[Pod]]) -> None:
    _, second, third = pods(3)
    begin(second.rundir, 1)
    add_checkpoint(second.rundir, 10)
    with pytest.raises(DeletedCheckpoint, match="not in the bucket"):
        second.sync.repair("step-000000010")
    second.upload()
    third.exchange().fetch("step-000000010")
    (part,) = [entry.name for entry in store(third.url).entries("parts/") if "weights" in entry.name]
    store(third.url).put(part, b"0" * 3000)
    third.sync.repair("step-000000010")
    (third.rundir.checkpoint("step-000000010") / "weights.safetensors").write_bytes(b"1" * 3000)
    with pytest.raises(Broken):
        third.sync.repair("step-000000010")


def test_a_restarted_exchange_knows_what_was_equal(pods: Callable[[int], list[Pod]]) -> None:
    first, second = pods(2)
    replace_json(first.rundir.coordinator_file, {"generation": 1})
    first.exchange()
    begin(second.exchange().rundir, 1)
    second.exchange()
    # Both processes die; one file changes and one is deleted meanwhile.
    replace_json(first.rundir.coordinator_file, {"generation": 2})
    (first.rundir.leases / "old.json").write_text("{}")
    second.exchange()
    first.restart()
    second.restart()
    first.exchange()
    second.exchange()
    assert first.content == second.content
    assert b"2" in second.content["coordinator.json"]
    assert second.rundir.newest_generation() == 1


def test_the_end_comes_after_the_checkpoints(pods: Callable[[int], list[Pod]]) -> None:
    _, second, third = pods(3)
    begin(second.rundir, 1)
    final = add_checkpoint(second.rundir, 10)
    second.rundir.mark_done(final)
    second.exchange()
    assert not third.exchange().rundir.ended()
    second.upload()
    second.exchange()
    assert third.exchange().rundir.ended()
    assert third.rundir.committed()[0].reference == final


def test_a_directory_that_is_gone_deletes_nothing(pods: Callable[[int], list[Pod]]) -> None:
    first, second = pods(2)
    second.rundir.path.rename(second.rundir.path.with_name("moved"))
    with pytest.raises(FileNotFoundError):
        second.exchange()
    assert first.exchange().rundir.job_file.exists()


def test_a_bucket_of_another_job_is_not_written(pods: Callable[[int], list[Pod]], url: str, tmp_path: Path) -> None:
    _, second = pods(2)
    other = Synchronizer(store(url), second.rundir, JobWriter(store(url), "another"))
    with pytest.raises(SupersededWriter, match="not for this job"):
        other.exchange()


def test_an_exchange_says_when_no_record_arrives_and_when_the_first_one_does(
    pods: Callable[[int], list[Pod]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process before it may have reported a problem, so its first success is news."""
    for name in ("RETRY_SECONDS", "EXCHANGE_SECONDS", "LOOK_SECONDS"):
        monkeypatch.setattr(f"tandem.rundir.sync_service.{name}", 0.01)
    (first,) = pods(1)
    ending = threading.Event()
    reports = list[tuple[str, bool]]()
    exchange, upload = first.sync.exchange, first.sync.upload

    def failing(work: Callable[[], None], number: int, why: str) -> Callable[[], None]:
        def attempt() -> None:
            if len(reports) == number:
                raise OSError(why)
            work()

        return attempt

    def report(text: str, blocks: bool) -> None:
        reports.append((text, blocks))
        if len(reports) == 5:
            ending.set()

    monkeypatch.setattr(first.sync, "upload", failing(upload, 1, "a part is missing"))
    monkeypatch.setattr(first.sync, "exchange", failing(exchange, 3, "it does not answer"))
    SyncService(first.sync, report, ending).run(None, sweeps=False)
    assert reports == [
        ("", False),
        ("a part is missing", False),
        ("", False),
        ("it does not answer", True),
        ("", False),
    ]


def test_who_waits_for_an_exchange_in_vain_is_told_that_it_may_pass(
    pods: Callable[[int], list[Pod]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (first,) = pods(1)

    def exchange() -> None:
        raise OSError("it does not answer")

    monkeypatch.setattr(first.sync, "exchange", exchange)
    with exchanging(first.sync, tmp_path / "socket"), pytest.raises(StoreUnavailableError, match="does not answer"):
        sync_client.exchange(patience=0)


class Breaking:
    """A store whose n-th request fails, before or after it has arrived."""

    def __init__(self, bucket: Store, number: int, arrives: bool) -> None:
        self._bucket, self._number, self._arrives, self.requests = bucket, number, arrives, 0
        self.location = bucket.location

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._bucket, name)

        def request(*args: Any, **more: Any) -> Any:
            self.requests += 1
            if self.requests != self._number:
                return method(*args, **more)
            if self._arrives:
                method(*args, **more)
            raise StoreUnavailableError("played")

        return request


@pytest.mark.parametrize("arrives", [False, True])
def test_every_request_may_fail(url: str, tmp_path: Path, arrives: bool) -> None:
    """The next exchange continues, wherever the last one broke off."""
    for number in range(1, 100):
        place = f"{url}-{number}"
        first = Pod(place, tmp_path / f"first-{number}", coordinates=True)
        run_directory(first.rundir.path, job())
        begin(first.rundir, 1)
        first.exchange()
        bucket: Any = Breaking(store(place), number, arrives)
        pod = RunDir(tmp_path / f"broken-{number}")
        pod.create()
        exchange = Synchronizer(bucket, pod, JobWriter(bucket, OWNER))
        name = f"broken-{number}"

        def write(pod: RunDir = pod, name: str = name, step: int = number) -> None:
            (pod.evaluations / name).mkdir()
            (pod.evaluations / name / "g.json").write_text(f'"{name}"')
            (pod.log / f"{name}.jsonl").write_text(name)
            (pod.leases / f"{name}.json").write_text("{}")
            add_checkpoint(pod, step)

        def delete(pod: RunDir = pod, name: str = name) -> None:
            (pod.leases / f"{name}.json").unlink()

        failures = 0
        for work in (exchange.exchange, write, exchange.exchange, exchange.upload, delete, exchange.exchange):
            try:
                work()
            except StoreUnavailableError:
                failures += 1
                work()
        assert failures == (bucket.requests >= number)
        if not failures:
            return
        first.exchange()
        assert (first.rundir.log / f"{name}.jsonl").read_text() == name
        assert (first.rundir.evaluations / name / "g.json").read_text() == f'"{name}"'
        assert list(first.rundir.leases.iterdir()) == []
        assert first.rundir.manifest(checkpoint_name(number)) == pod.manifest(checkpoint_name(number))
        first.fetch(checkpoint_name(number))
    pytest.fail("there are more requests than were broken off")


def test_parts_that_belong_to_no_checkpoint_are_swept(pods: Callable[[int], list[Pod]]) -> None:
    first, second = pods(2)
    begin(second.rundir, 1)
    add_checkpoint(second.rundir, 10)
    manifest = second.rundir.manifest("step-000000010")
    second.sync._uploader.upload_parts(manifest)
    suspects = first.sync.sweep({})
    assert len(suspects) == 1
    second.upload()
    assert first.sync.sweep(suspects) == {}
    second.fetch("step-000000010")
    commit(second.rundir, 20, files={"weights.safetensors": b"1" * 100})
    second.sync._uploader.upload_parts(second.rundir.manifest("step-000000020"))
    assert first.sync.sweep(first.sync.sweep({})) == {}
    assert {entry.name.split("/")[1] for entry in store(second.url).entries("parts/")} == {manifest.digest[:32]}


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.full("core")) for seed in range(3, 60))]
)
def test_in_any_order_with_any_failures_everybody_ends_with_the_same_run(url: str, tmp_path: Path, seed: int) -> None:
    """Pods write, exchange, upload, delete, restart and are lost, and one request in ten fails."""
    chance = random.Random(seed)
    place = f"{url}-{seed}"

    class Failing(Breaking):
        def __init__(self) -> None:
            super().__init__(store(place), 0, False)

        def __getattr__(self, name: str) -> Any:
            if is_calm or chance.random() < 0.9:
                return getattr(self._bucket, name)
            self._number, self._arrives = self.requests + 1, chance.random() < 0.5
            return super().__getattr__(name)

    is_calm = True
    first = Pod(place, tmp_path / "first", coordinates=True)
    run_directory(first.rundir.path, job())
    first.exchange()
    count = 0

    def pod() -> RunDir:
        nonlocal count
        count += 1
        rundir = RunDir(tmp_path / f"pod-{count}")
        rundir.create()
        return rundir

    def process(rundir: RunDir) -> Synchronizer:
        bucket: Any = Failing()
        return Synchronizer(bucket, rundir, JobWriter(bucket, OWNER))

    pods = [(rundir, process(rundir)) for rundir in (pod(), pod(), pod())]
    begun, written, sent = dict[int, GenerationRecord](), set[str](), dict[str, str]()
    is_calm = False
    for turn in range(120):
        index = chance.randrange(len(pods))
        rundir, exchange = pods[index]
        try:
            match chance.choice(
                ["exchange"] * 4 + ["upload"] * 2 + ["score", "log", "generation", "save", "fetch", "restart", "lose"]
            ):
                case "exchange":
                    exchange.exchange()
                case "upload":
                    exchange.upload()
                    for name in rundir.checkpoint_names():
                        digest = rundir.manifest(name).digest
                        with suppress(DeletedCheckpoint, Broken):
                            exchange.require_sent(name, digest)
                            sent[name] = digest
                case "score":
                    (rundir.evaluations / f"score-{turn}").mkdir()
                    replace_json(rundir.evaluations / f"score-{turn}" / "g.json", {"turn": turn})
                    exchange.exchange()
                    written.add(f"evaluations/score-{turn}/g.json")
                case "log":
                    with (rundir.log / f"{rundir.path.name}.jsonl").open("a") as file:
                        file.write(f"{turn}\n")
                case "generation":
                    exchange.exchange()
                    newest = rundir.committed()[0].reference if rundir.committed() else None
                    record = GenerationRecord(
                        generation=rundir.newest_generation() + 1, resumed_from=newest, world_size=1, started_at=turn
                    )
                    if rundir.record_generation(record):
                        exchange.exchange()
                        if rundir.generation_record(record.generation) == record:
                            begun[record.generation] = record
                case "save" if rundir.newest_generation():
                    step = 10 + turn
                    add_checkpoint(rundir, step, generation=rundir.newest_generation())
                case "fetch" if sent:
                    exchange.exchange()
                    name = chance.choice([*sent])
                    if rundir.checkpoint(name).exists():
                        exchange.fetch(name, rundir.manifest(name).digest)
                case "restart":
                    pods[index] = rundir, process(rundir)
                case "lose":
                    lost = pod()
                    pods[index] = lost, process(lost)
                case _:
                    pass
        except StoreUnavailableError:
            continue
    is_calm = True
    for _ in range(3):
        for _, exchange in pods:
            exchange.upload()
            exchange.exchange()
        first.exchange()
    contents = [Pod.files(rundir) for rundir, _ in pods]
    for content in contents:
        assert {name: content.get(name) for name in content.keys() ^ Pod.files(first.rundir).keys()} == {}
        assert content == Pod.files(first.rundir)
    for generation, record in begun.items():
        assert first.rundir.generation_record(generation) == record
    assert written <= contents[0].keys()
    for name, digest in sent.items():
        assert first.rundir.manifest(name).digest == digest
        first.fetch(name)
