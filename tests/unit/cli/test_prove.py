"""Which steps of a run can be taken again, and which of its files are not those of its record."""

import time
from pathlib import Path

import pytest

from tandem.errors import UserError
from tandem.rundir.code import store_pack
from tandem.rundir.durable import replace_json
from tandem.rundir.lineage import Continuation, GenerationRecord, chain
from tandem.rundir.provenance import CheckpointEntry, ProvenanceChain, read_chain
from tandem.wire.status import CheckpointRef
from tandem_cli.commands.prove import describe_signers
from tandem_cli.packing import packed
from tandem_cli.prove.files import FilesBesideChain, compare_files
from tandem_cli.prove.replay import code_folder
from tandem_cli.prove.window import Window, Windows
from tandem_coordinator.provenance_log import ProvenanceLog
from tandem_coordinator.run_watcher import RunDirectory
from tests.support.worlds.small_run import SmallRun


def entry(step: int, generation: int = 1) -> CheckpointEntry:
    return CheckpointEntry(
        time=1.0, name=f"step-{step:09d}", step=step, generation=generation, digest="a" * 64, content="b" * 64
    )


def record(
    generation: int, resumed_from: CheckpointEntry | None = None, continues: Continuation | None = None
) -> GenerationRecord:
    parent = None if resumed_from is None else resumed_from.reference
    return GenerationRecord(
        generation=generation, resumed_from=parent, continues=continues, world_size=2, started_at=1.0
    )


def windows(
    records: list[GenerationRecord], checkpoints: list[CheckpointEntry], existing: list[CheckpointEntry]
) -> Windows:
    return Windows(records, chain(records), checkpoints, frozenset(entry.name for entry in existing))


def steps(window: Window) -> tuple[int, int, int, int, int]:
    """Generation, start, first, last and end."""
    return window.generation.generation, window.start_step, window.first, window.last, window.end.step


FIRST = [entry(step) for step in (100, 200, 300, 400)]


def test_steps_begin_with_the_newest_checkpoint_before_them_that_exists() -> None:
    some = windows([record(1)], FIRST, [FIRST[0], FIRST[3]])
    assert steps(some.around(350, 360)) == (1, 100, 350, 360, 400)
    # The first step after a checkpoint, and the last before the next.
    assert steps(some.around(101, 200)) == (1, 100, 101, 200, 200)
    assert steps(some.around(100, 101)) == (1, 0, 100, 101, 200)


def test_the_beginning_of_a_run_is_always_there() -> None:
    assert steps(windows([record(1)], FIRST, []).around(7, 9)) == (1, 0, 7, 9, 100)


def test_a_restart_begins_with_the_checkpoint_that_it_resumed_from() -> None:
    some = windows([record(1), record(2, FIRST[2])], [*FIRST, entry(350, 2)], FIRST)
    assert steps(some.around(310, 320)) == (2, 300, 310, 320, 350)
    # Two groups have taken these, and a group of either size gives other sums.
    with pytest.raises(UserError, match="no generation that counts has taken steps 290 to 310"):
        some.around(290, 310)


def test_checkpoints_that_do_not_count_are_passed_over() -> None:
    some = windows([record(1), record(2, FIRST[0])], [*FIRST, entry(200, 2)], [FIRST[0]])
    assert steps(some.around(150, 160)) == (2, 100, 150, 160, 200)
    with pytest.raises(UserError, match="no generation that counts has taken steps 250 to 260"):
        some.around(250, 260)


def test_survivors_began_with_what_no_disk_has() -> None:
    survived = record(2, FIRST[1], Continuation(generation=1, step=250))
    later = [entry(300, 2), entry(400, 2)]
    some = windows([record(1), survived], [*FIRST[:2], *later], [*FIRST[:2], *later])
    assert steps(some.around(301, 310)) == (2, 300, 301, 310, 400)
    with pytest.raises(UserError, match="generation 2 has taken step 260, but no checkpoint from before still exists"):
        some.around(260, 260)


@pytest.mark.parametrize("seed", range(20))
def test_steps_chosen_at_random_can_be_taken(seed: int) -> None:
    near = [entry(step) for step in (100, 104, 108, 112, 150)]
    some = windows([record(1), record(2, near[1])], [*near[:2], entry(109, 2), entry(300, 2)], [near[1], entry(300, 2)])
    window = some.choose(10, seed)
    assert window == some.choose(10, seed)
    assert window.start_step < window.first <= window.last <= window.end.step
    assert window.last - window.first == 9
    # No further than to the next checkpoint that has ten steps.
    assert (window.start_step, window.end.step) in ((0, 100), (104, 300))


def test_fewer_steps_are_chosen_where_there_are_no_more() -> None:
    assert steps(windows([record(1)], [entry(4)], []).choose(10, 1)) == (1, 0, 1, 4, 4)


def test_a_script_that_saves_elsewhere_has_no_steps_to_choose() -> None:
    with pytest.raises(UserError, match="--steps none verifies the record"):
        windows([record(1)], [], []).choose(10)


@pytest.fixture
def run(tmp_path: Path) -> SmallRun:
    made = SmallRun(tmp_path / "run")
    made.begin(1)
    for step in (50, 100):
        made.save(step, accuracy=0.5)
    job = made.rundir.read_job()
    RunDirectory(made.rundir, job.spec.evaluation, provenance=ProvenanceLog(made.rundir, job)).poll(time.time())
    return made


def compared(run: SmallRun) -> FilesBesideChain:
    return compare_files(run.rundir, read_chain(run.rundir.provenance))


def test_files_of_the_record_are_counted(run: SmallRun) -> None:
    # Two manifests, two results, a generation.
    assert compared(run) == FilesBesideChain(5, frozenset({"step-000000050", "step-000000100"}), [], [])


def test_what_was_deleted_is_no_problem(run: SmallRun) -> None:
    for path in (*run.rundir.checkpoint("step-000000050").rglob("*.*"), *run.rundir.generations.iterdir()):
        path.unlink()
    for folder in ("state", ""):
        (run.rundir.checkpoint("step-000000050") / folder).rmdir()
    assert compared(run) == FilesBesideChain(3, frozenset({"step-000000100"}), [], [])


def test_what_came_later_is_named(run: SmallRun) -> None:
    run.save(150, accuracy=0.9)
    assert compared(run).unrecorded == ["step-000000150", "the result of step-000000150"]


def test_an_altered_result_and_an_altered_record_are_named(run: SmallRun) -> None:
    run.evaluate(CheckpointRef(name="step-000000050", step=50, generation=1), 0.99)
    replace_json(run.rundir.generations / "000001.json", {"generation": 1, "worldSize": 8, "startedAt": 1.0})
    assert compared(run).problems == [
        "the record of generation 1 is not the one of the record",
        "the result of step-000000050 is not the one of the record",
    ]


def test_a_checkpoint_in_the_place_of_another_is_named(run: SmallRun) -> None:
    folder = run.rundir.checkpoint("step-000000100")
    folder.rename(folder.with_name("old"))
    run.save(100, weights=None)
    (problem,) = compared(run).problems
    assert problem == "the manifest of step-000000100 is not the one of the record"


def test_code_is_what_the_job_ran_or_is_refused(run: SmallRun, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.py").write_text("print(1)")
    with packed(source) as pack:
        digest = pack.digest
        with pytest.raises(UserError, match=r"is not in .*--code DIR"):
            code_folder(run.rundir, digest, None, tmp_path / "first")
        store_pack(run.rundir, digest, pack.file)
    unpacked = code_folder(run.rundir, digest, None, tmp_path / "second")
    assert unpacked is not None
    assert (unpacked / "train.py").read_text() == "print(1)"
    assert code_folder(run.rundir, digest, source, tmp_path / "third") == source
    assert code_folder(run.rundir, None, None, tmp_path / "third") is None
    (source / "train.py").write_text("print(2)")
    with pytest.raises(UserError, match=f"is not the code of the job: .* and the job ran {digest}"):
        code_folder(run.rundir, digest, source, tmp_path / "third")
    with pytest.raises(UserError, match="and the job ran without a pack"):
        code_folder(run.rundir, None, source, tmp_path / "third")
    run.rundir.pack(digest).write_bytes(b"damaged")
    with pytest.raises(UserError, match="is damaged on the volume"):
        code_folder(run.rundir, digest, None, tmp_path / "fourth")


def test_entries_without_a_signature_in_a_signed_record_are_counted() -> None:
    chain = ProvenanceChain(signers=("KEY",), unsigned=3)
    assert describe_signers(chain) == "by KEY; 3 entries are not signed"
    assert describe_signers(ProvenanceChain(signers=("KEY",))) == "by KEY"
    assert describe_signers(ProvenanceChain(unsigned=3)).startswith("no: ")
