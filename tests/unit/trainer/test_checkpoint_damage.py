"""A checkpoint that was damaged on the disk, in whichever way, is never taken for sound, and costs no other one.

Each damage is followed by a fresh start, which must take the newest sound checkpoint with every bit as it was saved,
set the damaged one aside with a reason, and go on. Faults while a checkpoint is written are in
tests/integration/test_checkpoint_faults.py.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tandem.rundir.checkpoint import FILE, WEIGHTS
from tandem_trainer.checkpoint.file_names import OPTIMIZER
from tandem_trainer.checkpoint.restoring import NoUsableCheckpoint, restore
from tandem_trainer.process_group import Group
from tests.support.faults.scene import CHUNK, Findings, Save, Scene, Server, put, small_chunks

NEWEST, BEFORE, FIRST = Save(40, 2), Save(30, 2), Save(20, 1)
Damage = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    server = Server()
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            small_chunks(monkeypatch)
            yield Scene(server, tmp_path_factory.mktemp("damage"))
    finally:
        server.close()


def flips(content: bytes) -> Iterator[tuple[str, bytes]]:
    """One bit each, at the places where it might be overlooked and at some others."""
    chance = random.Random(len(content))
    borders = [place + shift for place in range(0, len(content), CHUNK) for shift in (-1, 0, 1)]
    places = {0, 7, 8, 9, 64, len(content) - 1, *borders, *(chance.randrange(len(content)) for _ in range(20))}
    for place in sorted(place for place in places if 0 <= place < len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << chance.randrange(8)
        yield f"bit flipped in byte {place}", bytes(damaged)


def cuts(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Too short, down to nothing."""
    for size in sorted({0, 1, 8, len(content) // 2, len(content) // CHUNK * CHUNK, len(content) - 2}):
        yield f"cut to {size} bytes", content[:size]


def growths(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Too long."""
    yield "one byte more", content + b"\0"
    yield "a chunk more", content + bytes(CHUNK)
    yield "twice", content * 2


def losses(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Blocks that never reached the disk, or reached the wrong place."""
    for start in range(0, len(content) - 512, 1024):
        yield f"block of zeros at {start}", content[:start] + bytes(512) + content[start + 512 :]
    half = len(content) // 2
    yield "halves swapped", content[half:] + content[:half]


@pytest.mark.parametrize("file", [WEIGHTS, OPTIMIZER, FILE])
@pytest.mark.parametrize("damages", [flips, cuts, growths, losses], ids=lambda damages: damages.__name__)
def test_altered_bytes_are_noticed_wherever_they_are(
    scene: Scene, file: str, damages: Callable[[bytes], Iterator[tuple[str, bytes]]]
) -> None:
    sound = scene.trees[NEWEST][file]
    wrong, count = [], 0
    for what, content in damages(sound):
        assert content != sound, what
        scene.reset()
        (scene.rundir.checkpoint(NEWEST.name) / file).write_bytes(content)
        wrong += [f"{what}: {finding}" for finding in passed_over(scene).wrong]
        count += 1
    assert not wrong, f"{len(wrong)} wrong in {count} damages:\n" + "\n".join(wrong[:20])
    assert count >= 2


def passed_over(scene: Scene) -> Findings:
    """What is wrong after the newest checkpoint was damaged."""
    findings = Findings()
    scene.expect_restored(findings, BEFORE, passed_over=[NEWEST.name])
    aside = scene.rundir.checkpoints / f"{NEWEST.name}.bad"
    findings.expect(aside.is_dir(), "it was not set aside")
    why = aside.with_name(f"{aside.name}.why.json")
    findings.expect(why.exists() and NEWEST.name in json.loads(why.read_text())["why"], "nobody says why")
    if not findings.wrong:
        scene.go_on(findings, BEFORE)
    return findings


def deleted(path: Path) -> None:
    path.unlink()


def made_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def made_a_link_to_nowhere(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def taken_from_the_checkpoint_before(path: Path) -> None:
    """As when a folder is written over in part."""
    shutil.copy(str(path).replace(NEWEST.name, BEFORE.name), path)


def exchanged_for_the_other_file(path: Path) -> None:
    folder = path.parents[1] if path.parent.name == "state" else path.parent
    shutil.copy(folder / (WEIGHTS if path.name != WEIGHTS else OPTIMIZER), path)


@pytest.mark.parametrize("file", [WEIGHTS, OPTIMIZER, FILE])
@pytest.mark.parametrize(
    "damage",
    [
        deleted,
        made_a_folder,
        made_a_link_to_nowhere,
        taken_from_the_checkpoint_before,
        exchanged_for_the_other_file,
    ],
    ids=lambda damage: damage.__name__,
)
def test_a_file_that_is_not_the_right_one_is_noticed(scene: Scene, file: str, damage: Callable[[Path], None]) -> None:
    scene.reset()
    damage(scene.rundir.checkpoint(NEWEST.name) / file)
    assert passed_over(scene).wrong == []


def test_several_damaged_ones_cost_only_themselves(scene: Scene) -> None:
    order = [NEWEST, BEFORE, FIRST, Save(10, 1)]
    for count in range(1, len(order)):
        scene.reset()
        damage(scene, order[:count])
        findings = Findings()
        scene.expect_restored(findings, order[count], passed_over=[save.name for save in order[:count]])
        assert findings.wrong == []


def test_with_all_of_them_damaged_nothing_is_begun_anew_until_the_user_deletes_them(scene: Scene) -> None:
    scene.reset()
    damage(scene, scene.SAVED)
    alone = Group(0, 1, 0, torch.device("cpu"))
    for _ in range(2):
        with pytest.raises(NoUsableCheckpoint, match=r"are damaged \(4 in total\), .* To start over, delete"):
            restore(scene.rundir, alone, lambda loaded: None)
    shutil.rmtree(scene.rundir.checkpoints)
    assert restore(scene.rundir, alone, lambda loaded: None).loaded is None


def damage(scene: Scene, saves: Sequence[Save]) -> None:
    for number, save in enumerate(saves):
        file = scene.rundir.checkpoint(save.name) / (WEIGHTS, OPTIMIZER, FILE)[number % 3]
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 16
        file.write_bytes(content)


def test_a_checkpoint_under_the_name_of_a_later_step_is_no_checkpoint(scene: Scene) -> None:
    scene.reset()
    put(scene.rundir.checkpoint("step-000000060"), scene.trees[NEWEST])
    (scene.rundir.checkpoint("step-000000070")).mkdir()
    (scene.rundir.checkpoint("step-000000080")).write_bytes(b"a file")
    findings = Findings()
    scene.expect_restored(findings, NEWEST, passed_over=[f"step-0000000{number}" for number in (60, 70, 80)])
    assert findings.wrong == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"name": "step-000000010", "step": 10, "generation": 1}', b"\xff"])
def test_hints_decide_nothing(scene: Scene, content: bytes) -> None:
    scene.reset()
    scene.rundir.latest_file.write_bytes(content)
    findings = Findings()
    scene.expect_continued(findings, NEWEST)
    assert findings.wrong == []


@pytest.mark.parametrize("content", [b"", b"{}", b'{"generation": 7, "worldSize": 1, "startedAt": 0}'])
def test_a_damaged_lineage_is_for_people_to_mend(scene: Scene, content: bytes) -> None:
    """Without it nobody can tell which checkpoints count: guessing could resume from the wrong one."""
    scene.reset()
    (scene.rundir.generations / "000002.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"000002\.json is damaged"):
        restore(scene.rundir, Group(0, 1, 0, torch.device("cpu")), lambda loaded: None)
    assert len(scene.present(Findings())) == len(scene.SAVED)
