"""Data sets in shards of litdata and MosaicML's streaming, in a folder and in a bucket: any sample by its index, the
same samples for the same steps in any world, and one sentence about each that cannot be read."""

import itertools
import json
import os
import pickle
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from torch.utils.data import Subset, default_collate

from tandem.job.causal_lm import SmallModel
from tandem.job.tasks import Loop
from tandem_trainer.causal_lm import CausalLM, CausalLMConfig, _passage
from tandem_trainer.data import shard_files
from tandem_trainer.data.feeding import Reading, feed
from tandem_trainer.data.order import Order, Passes
from tandem_trainer.data.sampling import plain_order
from tandem_trainer.data.sharded import Sharded, shards_of
from tandem_trainer.data.supply import whole_and_slice
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tandem_trainer.session_data import SessionData
from tandem_trainer.train import order_of
from tests.support.buckets import BUCKET, CREDENTIALS, answering, moto, place
from tests.support.shards import index_of, library, row, write_litdata, write_mds, write_tokens

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:The given (buffer|NumPy array) is not writable"
)
SAMPLES = 95
WRITERS = {"litdata": ("litdata", write_litdata), "mds": ("streaming", write_mds)}


@pytest.fixture(scope="module", autouse=True)
def libraries() -> Iterator[None]:
    with library("litdata"), library("streaming"):
        yield


@pytest.fixture(scope="module", params=WRITERS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of each format, not to be changed."""
    folder = tmp_path_factory.mktemp("shards") / str(request.param)
    WRITERS[request.param][1](folder, SAMPLES)
    return folder


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    return Path(shutil.copytree(written, tmp_path / written.name))


def shard_paths(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != "index.json")


def numbers(dataset: Sharded, order: Order, step: int, world: int, workers: int = 0) -> list[int]:
    """The samples of a step, as the ranks of a world read them together."""
    read: list[int] = []
    for rank in range(world):
        batch = next(feed(dataset, order, [step], Reading(rank, world, order.seed, workers)))
        if batch.weight:
            read += batch.data["number"].tolist()
    return read


def test_each_sample_is_read_by_its_index(written: Path) -> None:
    dataset = Sharded(written)
    assert len(dataset) == SAMPLES
    for number in [94, 0, 17, 50, 17, 93]:
        assert dataset[number]["number"] == number
        assert np.array_equal(dataset[number]["tokens"], row(number, 17))
    assert pickle.loads(pickle.dumps(dataset))[17]["number"] == 17, "a loader worker may get a copy"
    with pytest.raises(IndexError):
        dataset[SAMPLES]


def test_the_samples_of_a_step_are_the_same_in_any_world_and_after_a_restart(written: Path) -> None:
    order = plain_order(Sharded(written, window=2), 10, seed=3, drop_last=False)
    alone = [numbers(Sharded(written, window=2), order, step, 1) for step in range(20)]
    for epoch in (alone[:10], alone[10:]):
        assert sorted(itertools.chain(*epoch)) == list(range(SAMPLES))
    # Two ranks, which become three in the middle of an epoch, and one that starts again.
    worlds = [2] * 5 + [3] * 7 + [1] * 8
    dataset = Sharded(written, window=2)
    assert [numbers(dataset, order, step, world) for step, world in enumerate(worlds)] == alone


def test_a_session_reads_in_the_order_of_the_shards_and_its_ranks_compare_it(written: Path) -> None:
    dataset = Sharded(written, window=2)
    data = SessionData(
        dataset=dataset,
        global_batch_size=10,
        order=None,
        epochs=2,
        max_steps=None,
        drop_last=False,
        seed=3,
        loader_workers=0,
        collate=default_collate,
        transform=None,
        pin=False,
    ).open(0, 1)
    assert isinstance(data.steps, Passes)
    assert data.steps.data_steps == 20
    assert data.steps.order.shards == dataset.shard_order
    assert data.name == f"shards {data.steps.position(3).shards}"


def test_a_slice_keeps_its_ids_and_is_shuffled_as_a_whole(written: Path) -> None:
    whole, first, end = whole_and_slice(Subset(Sharded(written), range(20, 60)))
    order = order_of(Loop(global_batch_size=40), first, end, shards=shards_of(whole))
    assert order.shards is None
    assert sorted(numbers(whole, order, 0, 2)) == list(range(20, 60))


def test_loader_workers_read_the_same_samples(written: Path) -> None:
    dataset = Sharded(written, window=2)
    order = plain_order(dataset, 10, seed=3, drop_last=False)
    assert numbers(dataset, order, 4, 2, workers=2) == numbers(dataset, order, 4, 1)


def test_tokens_of_litdata_are_cut_into_samples(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", 50, length=34)
    dataset = Sharded(tmp_path / "tokens", block=17)
    assert len(dataset) == 100
    assert dataset[3].tolist() == row(1, 34)[17:].tolist()
    with pytest.raises(UnusableInput, match="give block, the number of tokens of a sample"):
        Sharded(tmp_path / "tokens")


SHARDS, PER_SHARD = 100_000, 10_000
"""Of a data set with a billion samples."""


def large_tokens(folder: Path) -> int:
    """Let an index of litdata list a billion samples. Returns the bytes of a shard."""
    write_tokens(folder, 10)
    index, size = index_of(folder), 4 * (1 + 2) + 4 * PER_SHARD * 17
    index["chunks"] = [
        {"chunk_bytes": size, "chunk_size": 1, "dim": PER_SHARD * 17, "filename": f"chunk-0-{shard}.bin"}
        for shard in range(SHARDS)
    ]
    (folder / "index.json").write_text(json.dumps(index))
    return size


def test_a_run_resumes_at_step_a_million_of_a_billion_samples_within_a_second(tmp_path: Path) -> None:
    size, step, batch = large_tokens(tmp_path / "tokens"), 10**6, 512
    planned = plain_order(Sharded(tmp_path / "tokens", block=17), batch, 3, False)
    # Only the shards that the step reads are there; they are sparse.
    epoch, within = divmod(step, planned.steps_per_epoch)
    assert planned.samples == 10**9
    assert planned.shards is not None
    for shard in planned.shards.shards_from(planned.seed_of(epoch), within * batch):
        with (tmp_path / f"tokens/chunk-0-{shard}.bin").open("wb") as file:
            file.truncate(size)

    before, memory = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    dataset = Sharded(tmp_path / "tokens", block=17)
    order = plain_order(dataset, batch, 3, False)
    first = next(feed(dataset, order, [step], Reading(1, 4, 3)))
    seconds = time.process_time() - before
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
    assert first.data.shape == (128, 17)
    assert seconds < 1, f"{seconds:.2f} s"
    assert grown < 200, f"{grown:.0f} MiB"


def test_the_index_of_a_billion_samples_of_mosaicml_is_read_within_a_second(tmp_path: Path) -> None:
    write_mds(tmp_path / "mds", 13)
    index = index_of(tmp_path / "mds")
    (shard,) = index["shards"]
    index["shards"] = [
        {**shard, "samples": PER_SHARD, "raw_data": {**shard["raw_data"], "basename": f"shard.{number:05}.mds"}}
        for number in range(SHARDS)
    ]
    (tmp_path / "mds/index.json").write_text(json.dumps(index))
    before = time.process_time()
    dataset = Sharded(tmp_path / "mds")
    assert len(plain_order(dataset, 512, 3, False).shards.ids(1, 512_000_000, 512_000_512)) == 512  # type: ignore[union-attr]
    seconds = time.process_time() - before
    assert seconds < 1, f"{seconds:.2f} s"


def damaged_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = index_of(folder)
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: shutil.rmtree(folder), "is not a folder, so it is no data set in shards"),
        (lambda folder: (folder / "index.json").unlink(), "has no index.json that can be read"),
        (lambda folder: (folder / "index.json").write_text("{"), "index.json is not JSON"),
        (lambda folder: (folder / "index.json").write_text("[1]"), "is not an index of MosaicML's streaming or of"),
        (lambda folder: (folder / "index.json").write_text('{"weight_map": {}}'), "is not an index of MosaicML's"),
        (lambda folder: (folder / "index.json").write_text('{"version": 2, "shards": []}'), "has no samples"),
        (lambda folder: (folder / "index.json").write_text('{"version": 2, "shards": [{"format": "mds"}]}'), "damaged"),
        (lambda folder: (folder / "index.json").write_text('{"chunks": [{}], "config": {}}'), "index.json is damaged"),
        (lambda folder: (folder / "index.json").write_text('{"version": 9, "shards": []}'), "has version 9 of"),
        (lambda folder: damaged_index(folder, outside), "names a shard outside of the data set: ../x"),
        (lambda folder: shard_paths(folder)[0].unlink(), "lacks the shard .* that its index.json lists"),
        (
            lambda folder: shard_paths(folder)[0].write_bytes(b"1"),
            "has 1 bytes and its index.json says [0-9,]+: the shard",
        ),
        (lambda folder: overwrite(shard_paths(folder)[0]), "is damaged: sample [0-9]+ of it cannot be read"),
    ],
)
def test_one_sentence_says_what_is_wrong(copy: Path, damage: Callable[[Path], object], sentence: str) -> None:
    damage(copy)
    with pytest.raises(UnusableInput, match=sentence) as error:
        dataset = Sharded(copy)
        [dataset[number] for number in range(SAMPLES)]
    assert str(copy) in str(error.value)
    assert "\n" not in str(error.value)


def outside(index: dict[str, Any]) -> None:
    for shard in index.get("shards", []):
        shard["raw_data"]["basename"] = "../x"
    for chunk in index.get("chunks", []):
        chunk["filename"] = "../x"


def overwrite(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def test_a_shard_of_another_data_set_is_refused_by_its_size(copy: Path, tmp_path: Path) -> None:
    WRITERS["litdata" if copy.name == "litdata" else "mds"][1](tmp_path / "other", SAMPLES, length=19)
    shutil.copy(tmp_path / "other/index.json", copy)
    with pytest.raises(UnusableInput, match="the shard is damaged, or the index is that of another data set"):
        Sharded(copy)[0]


def test_pickled_columns_are_refused(tmp_path: Path) -> None:
    from litdata.streaming.cache import Cache
    from streaming import MDSWriter

    with MDSWriter(out=str(tmp_path / "mds"), columns={"x": "pkl"}) as writer:
        writer.write({"x": {1, 2}})
    (tmp_path / "litdata").mkdir()
    cache = Cache(str(tmp_path / "litdata"), chunk_size=1)
    cache[0] = {"x": {1, 2}}
    cache.done()
    cache.merge()
    for name in ("mds", "litdata"):
        with pytest.raises(UnusableInput, match="pickle can run any code"):
            Sharded(tmp_path / name)[0]


def test_a_library_that_is_not_installed_is_named(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("litdata.streaming.item_loader", "streaming.base.compression"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(ConfigurationError, match=r"install (litdata|mosaicml-streaming) \(pip install"):
        Sharded(written)


@pytest.mark.parametrize(("options", "sentence"), [({"window": 0}, "window=0"), ({"cache_bytes": 5}, "3 windows of 8")])
def test_arguments_that_do_not_fit_are_refused(written: Path, options: dict[str, int], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        Sharded(written, **options)  # type: ignore[arg-type]


def test_compressed_shards_are_read_from_a_bounded_cache(tmp_path: Path) -> None:
    write_mds(tmp_path / "mds", SAMPLES, compression="zstd")
    assert len(index_of(tmp_path / "mds")["shards"]) > 6
    dataset = Sharded(tmp_path / "mds", window=2, cache=tmp_path / "cache")
    assert dataset._files.cache is not None
    leftover = dataset._files.cache / "..shard.00003.mds.stored.123"
    leftover.touch()
    assert [dataset[number]["number"] for number in range(SAMPLES)] == list(range(SAMPLES))
    assert len(list((tmp_path / "cache").rglob("*.mds"))) == 6
    assert not leftover.exists()
    overwrite(shard_paths(tmp_path / "mds")[0])
    with pytest.raises(UnusableInput, match=r"is damaged: its xxh64 is not that of index\.json"):
        Sharded(tmp_path / "mds", window=2, cache=tmp_path / "another")[0]


def test_a_cache_that_another_user_could_fill_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mds(tmp_path / "mds", SAMPLES, compression="zstd")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "shared"))
    default = tmp_path / "shared" / f"tandem-shards-{os.getuid()}"
    default.mkdir(parents=True, mode=0o777)
    Sharded(tmp_path / "mds")
    assert default.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(default)
    default.symlink_to(tmp_path)
    with pytest.raises(UnusableInput, match="is not a folder that this user alone can write to"):
        Sharded(tmp_path / "mds")


TINY = {"length": 16, "layers": 1, "heads": 2, "width": 16}


def test_a_language_model_takes_the_passages_of_either_format(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens", 20, length=34)
    write_mds(tmp_path / "mds", 20)
    for name, samples in (("tokens", 40), ("mds", 20)):
        shards = {"train": str(tmp_path / name), "test": str(tmp_path / name)}
        task = CausalLM(CausalLMConfig.model_validate({**TINY, "shards": shards}))
        data = task.data("train")
        assert len(data) == samples
        batch = task.collate([data[number] for number in range(4)])
        assert task.loss(task.model(), batch).shape == (4,)


@pytest.mark.parametrize(
    ("parameters", "written_length", "sentence"),
    [
        ({}, 19, "a sample has 19 tokens; length 16 needs 17"),
        ({"column": "text"}, 17, "has no column text, only number, tokens"),
        ({"column": "number"}, 17, "and not a row of tokens"),
    ],
)
def test_samples_that_are_no_passages_are_named(
    parameters: dict[str, str], written_length: int, sentence: str, tmp_path: Path
) -> None:
    write_mds(tmp_path / "mds", 5, length=written_length)
    shards = {"train": str(tmp_path / "mds"), "test": str(tmp_path / "mds"), **parameters}
    with pytest.raises(UnusableInput, match=sentence):
        CausalLM(CausalLMConfig.model_validate({**TINY, "shards": shards})).data("train")[0]


def test_a_token_that_the_tokenizer_does_not_know_is_named() -> None:
    with pytest.raises(UnusableInput, match="data has a token 256, and the tokenizer knows 256"):
        _passage("data", "tokens", 2, 256, np.array([1, 256]))


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"text": "t"}, "text belongs to a text"),
        ({"heldOut": 0.2}, "heldOut belongs to a text"),
        ({"tokenizer": "bpe"}, "needs the tokenizerFile that made the tokens"),
    ],
)
def test_parameters_of_a_text_are_refused_beside_shards(parameters: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        SmallModel.model_validate({"shards": {"train": "a", "test": "b"}, **parameters})


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as monkeypatch, moto() as url:
        for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": url}.items():
            monkeypatch.setenv(name, value)
        yield url


def upload(folder: Path, url: str, prefix: str) -> str:
    store = place(url, prefix)
    for path in folder.iterdir():
        store.put(path.name, path.read_bytes())
    return f"s3://{BUCKET}/{prefix}"


def test_a_bucket_is_read_shard_by_shard_ahead_of_loader_workers(
    written: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = upload(written, bucket, f"data/{written.name}")
    dataset = Sharded(source, window=2, cache=tmp_path / "cache")
    order = plain_order(dataset, 10, seed=3, drop_last=False)
    from_folder = numbers(Sharded(written, window=2), plain_order(Sharded(written, window=2), 10, 3, False), 4, 1)
    assert numbers(dataset, order, 4, 2, workers=1) == from_folder
    assert dataset._files._ahead is not None
    dataset._files._ahead.join()
    needed = order.shards.shards_from(order.seed_of(0), 40) if order.shards else []
    assert dataset._files.cache is not None
    kept = {path.name for path in dataset._files.cache.iterdir() if not path.name.startswith(".")}
    assert kept == {shard_paths(written)[shard].name for shard in needed}
    # They are in the cache, so the bucket is not asked again.
    monkeypatch.setattr(shard_files.ShardFiles, "_fetch", None)
    assert numbers(dataset, order, 4, 1) == from_folder


def test_one_sentence_says_what_is_wrong_in_a_bucket(
    written: Path, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def problem(source: str) -> str:
        with pytest.raises(UnusableInput) as error:
            Sharded(source, cache=tmp_path / "cache")[0]
        return str(error.value)

    prefix = f"bad/{written.name}"
    source = upload(written, bucket, prefix)
    first = shard_paths(written)[0].name
    place(bucket, prefix).put(first, b"1")
    size = shard_paths(written)[0].stat().st_size
    assert problem(source) == f"{source}/{first} has not the {size:,} bytes that its index says"
    place(bucket, prefix).delete([first])
    assert re.search(f"there is no s3://{BUCKET}/{prefix}/{first}", problem(source))
    assert "there is no s3://bucket/nothing/index.json" in problem(f"s3://{BUCKET}/nothing")
    assert "add a prefix" in problem(f"s3://{BUCKET}")
    with answering(403, "AccessDenied") as url:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        assert "the credentials may not read objects below s3://bucket/data" in problem(f"s3://{BUCKET}/data")
