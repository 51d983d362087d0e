"""Every sample exactly once, whoever reads it."""

import dataclasses
import traceback
from collections import Counter, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tandem.rundir.checkpoint import DataPosition
from tandem_trainer.adapters.micro_batches import CollateParts
from tandem_trainer.data import feeding
from tandem_trainer.data.feeding import RankBatch, Reading, Stream, cut, feed, to_device
from tandem_trainer.data.order import Order
from tandem_trainer.data.supply import Resident

sizes = st.integers(1, 40)


class Numbers:
    def __init__(self, size: int) -> None:
        self.size, self.starts = size, 0

    def __iter__(self) -> Iterator[int]:
        self.starts += 1
        yield from range(100, 100 + self.size)


class Seekable(Numbers):
    def start_at(self, epoch: int, cursor: int) -> Iterator[int]:
        yield from range(100 + cursor, 100 + self.size)


def never(step: int) -> bool:
    return False


def read(world_size: int, rank: int = 0, transform: Any = None) -> Reading:
    return Reading(rank, world_size, seed=5, transform=transform)


def values(fed: RankBatch) -> list[int]:
    return [int(value) for value in fed.data] if fed.weight else []


@given(size=sizes, batch=sizes, worlds=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
def test_a_table_gives_each_sample_once_in_an_epoch_whatever_the_ranks_and_restarts(
    size: int, batch: int, worlds: list[int], data: st.DataObject
) -> None:
    order = Order(size, batch, seed=5)
    steps = 2 * order.steps_per_epoch
    cuts = sorted(data.draw(st.lists(st.integers(0, steps), min_size=len(worlds) - 1, max_size=len(worlds) - 1)))
    seen: list[list[int]] = []
    for world, start, end in zip(worlds, [0, *cuts], [*cuts, steps], strict=True):
        ranks = [
            list(feed(range(100, 100 + size), order, range(start, end), read(world, rank))) for rank in range(world)
        ]
        seen += [[value for fed in feds for value in values(fed)] for feds in zip(*ranks, strict=True)]
    undisturbed = [values(fed) for fed in feed(range(100, 100 + size), order, range(steps), read(1))]
    assert seen == undisturbed
    counts = Counter(value for batch_of_one in seen for value in batch_of_one)
    assert counts == Counter(dict.fromkeys(range(100, 100 + size), 2))


@given(size=sizes, batch=sizes, world=st.integers(1, 4), stop=st.integers(0, 80), seekable=st.booleans())
def test_a_stream_gives_each_sample_once_in_an_epoch_whatever_the_ranks_and_restarts(
    size: int, batch: int, world: int, stop: int, seekable: bool
) -> None:
    def stream(world: int, rank: int) -> Stream:
        return Stream((Seekable if seekable else Numbers)(size), batch, 2, None, read(world, rank))

    whole = [values(fed) for fed in stream(1, 0).feed(None, 0, never)]
    assert Counter(value for part in whole for value in part) == Counter(dict.fromkeys(range(100, 100 + size), 2))

    first = stream(1, 0)
    pages = first.feed(None, 0, never)
    begun = [values(next(pages)) for _ in range(min(stop, len(whole)))]
    pages.more()
    ranks = [list(stream(world, rank).feed(first.position(0), len(begun), never)) for rank in range(world)]
    rest = [[value for fed in feds for value in values(fed)] for feds in zip(*ranks, strict=True)]
    assert begun + rest == whole


@given(size=sizes, batch=sizes, other=sizes, stop=st.integers(0, 80), seekable=st.booleans())
def test_a_stream_goes_on_in_batches_of_another_size_and_gives_each_sample_once(
    size: int, batch: int, other: int, stop: int, seekable: bool
) -> None:
    kind = Seekable if seekable else Numbers
    first = Stream(kind(size), batch, 2, None, read(1))
    pages, seen, steps = first.feed(None, 0, never), [], 0
    while steps < stop and pages.more():
        seen += values(next(pages))
        steps += 1
    pages.more()
    rest = Stream(kind(size), other, 2, None, read(1)).feed(first.position(0), steps, never)
    seen += [value for fed in rest for value in values(fed)]
    assert seen == 2 * list(range(100, 100 + size))


def test_a_stream_without_partial_batches_begins_each_epoch_at_its_start() -> None:
    stream = Stream(Numbers(5), 2, 2, None, read(1), drop_last=True)
    fed = list(stream.feed(None, 0, never))
    assert [values(one) for one in fed] == [[100, 101], [102, 103], [100, 101], [102, 103]]
    assert (stream.position(0).epoch, stream.position(0).cursor) == (2, 0)


def test_a_stream_leaves_out_what_a_rewind_says_and_ends_after_its_steps() -> None:
    stream = Stream(Numbers(10), 2, 2, 8, read(1))
    fed = list(stream.feed(None, 0, lambda step: step in (1, 4, 5)))
    assert [values(one) for one in fed] == [[100, 101], [104, 105], [106, 107], [102, 103], [104, 105]]
    assert fed[3].position == DataPosition(seed=5, epoch=1, cursor=2)


def test_the_position_of_a_stream_is_that_of_the_batch_which_comes_next_or_of_the_end() -> None:
    stream = Stream(Numbers(3), 2, 1, None, read(1))
    pages = stream.feed(None, 0, never)
    positions = []
    while pages.more():
        positions.append(stream.position(0))
        next(pages)
    assert [(position.epoch, position.cursor) for position in [*positions, stream.position(0)]] == [
        (0, 0),
        (0, 2),
        (1, 0),
    ]


def test_a_stream_that_ends_after_its_steps_stands_behind_the_last_one() -> None:
    stream = Stream(Numbers(10), 3, 1, 2, read(1))
    pages = stream.feed(None, 0, never)
    next(pages), next(pages)
    assert (stream.position(2).epoch, stream.position(2).cursor) == (0, 6), "where a run with more steps goes on"


def test_what_is_drawn_for_a_sample_depends_on_nothing_but_seed_epoch_and_sample() -> None:
    def noise(value: int) -> tuple[int, float]:
        return value, torch.rand(()).item()

    order = Order(9, 4, seed=5)
    drawn = {}
    for world in (1, 3):
        for rank in range(world):
            for fed in feed(range(9), order, range(6), read(world, rank, noise)):
                if fed.weight:
                    for value, number in zip(*fed.data, strict=True):
                        key = (fed.position.epoch, int(value))
                        assert drawn.setdefault(key, float(number)) == float(number)
    assert len(drawn) == len(set(drawn.values())) == 18


class Broken:
    """A data set of pictures of which one cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, number: int) -> int:
        if number == 5:
            raise OSError("Truncated File Read")
        return number


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named(workers: int) -> None:
    """The library that reads it knows neither its place nor its file."""
    reading = dataclasses.replace(read(1), workers=workers)
    with pytest.raises(OSError, match=r"Truncated|Caught") as caught:
        list(feed(Broken(), Order(8, 8, seed=5), range(1), reading))
    told = "".join(traceback.format_exception(caught.value))
    assert "sample 5 cannot be read: OSError: Truncated File Read" in told


def test_a_batch_of_any_shape_is_cut_and_moved() -> None:
    Pair = namedtuple("Pair", "image label")
    batch = {"pair": Pair(torch.arange(6).reshape(3, 2), torch.arange(3)), "names": ["a", "b", "c"], "size": 3}
    found = cut(batch, 3, 1, 3)
    assert found["pair"].image.tolist() == [[2, 3], [4, 5]]
    assert found["pair"].label.tolist() == [1, 2]
    assert found["names"] == ["b", "c"]
    assert found["size"] == 3
    assert to_device(batch, torch.device("cpu"))["pair"].label.tolist() == [0, 1, 2]
    assert cut([torch.arange(2), torch.arange(2)], 2, 0, 1)[1].tolist() == [0]
    assert cut(["a", "b", "c"], 3, 0, 2) == ["a", "b"]


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_a_field_that_is_a_list_of_samples_is_cut_whatever_their_sizes(channels: int) -> None:
    """Detection: images and boxes of different sizes, in tuples."""
    samples = [(torch.full((channels, 2, 2), number), {"boxes": torch.zeros(channels)}) for number in range(4)]
    images, targets = cut(tuple(zip(*samples, strict=True)), 4, 1, 3)
    assert [int(image[0, 0, 0]) for image in images] == [1, 2]
    assert images[0].shape == (channels, 2, 2)
    assert [len(target["boxes"]) for target in targets] == [channels] * 2
    named = cut({"images": [image for image, _ in samples], "rows": np.arange(8).reshape(4, 2)}, 4, 1, 3)
    assert [int(image[0, 0, 0]) for image in named["images"]] == [1, 2]
    assert named["rows"].tolist() == [[2, 3], [4, 5]]


def test_lists_that_torch_makes_of_fields_are_no_samples() -> None:
    """A pair in a sample, and as many samples as are in a pair."""
    reading = Reading(0, 1, seed=5)
    pairs = [((torch.tensor(number), torch.tensor(10 + number)), "ab"[number]) for number in range(2)]
    (fed,) = feed(pairs, Order(2, 2, seed=5), range(1), reading)
    assert fed.layout.of_fields
    (first, second), names = cut(fed.data, 2, 1, 2, fed.layout)
    assert (first.tolist(), second.tolist(), list(names)) == ([fed.mine[1]], [10 + fed.mine[1]], ["ab"[fed.mine[1]]])


@pytest.mark.parametrize("data", [[{"image": torch.zeros(3, 2)}] * 4, {"tokens": torch.zeros(9)}, 7])
def test_what_cannot_be_cut_is_refused_and_left_whole_in_one_part(data: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"cannot cut the {type(data).__name__} .* each of the 4 samples. Let collate"
    ):
        cut(data, 4, 0, 2)
    assert cut(data, 4, 0, 4) is data


def images(number: int) -> dict[str, torch.Tensor]:
    """A sample of detection, with as many channels and boxes as there are samples."""
    return {"image": torch.full((number, 2, 2), float(number)), "boxes": torch.zeros(number, 4)}


COLLATES: dict[str, Any] = {
    "the samples": lambda samples: samples,
    "a list of them": list,
    "a tuple of changed ones": lambda samples: tuple({**sample, "drawn": torch.rand(1)} for sample in samples),
}


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", COLLATES)
def test_a_batch_that_is_a_list_of_samples_is_cut_between_them(name: str, count: int) -> None:
    reading = Reading(0, 1, seed=5, collate=COLLATES[name])
    (fed,) = feed([images(count)] * count, Order(count, count, seed=5), range(1), reading)
    part = cut(fed.data, count, 1, 2, fed.layout)
    assert len(part) == 1
    assert part[0] is fed.data[1]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_list_of_fields_is_none_of_samples_however_many_there_are(count: int) -> None:
    """And finding that out changes no random number."""

    def collate(samples: list[Any]) -> list[Any]:
        return [torch.rand(len(samples)), torch.arange(len(samples)), [sample["boxes"] for sample in samples]]

    fed = [
        next(iter(feed([images(2)] * 4, Order(4, count, seed=5), range(1), Reading(0, 1, seed=5, collate=one))))
        for one in (collate, lambda samples: (*collate(samples), None))
    ]
    noise, numbers, boxes = cut(fed[0].data, count, 1, 2, fed[0].layout)
    assert (len(noise), numbers.tolist(), len(boxes)) == (1, [1], 1)
    assert fed[0].data[0].equal(fed[1].data[0])


def test_a_collate_that_changes_its_samples_gets_each_of_them_once() -> None:
    def collate(samples: list[Any]) -> list[Any]:
        return [sample.pop("image").div_(255) for sample in samples]

    samples = [{"image": torch.full((2,), 255.0)} for _ in range(2)]
    fed = next(iter(feed(samples, Order(2, 2, seed=5), range(1), Reading(0, 1, seed=5, collate=collate))))
    assert [image.tolist() for image in fed.data] == [[1.0, 1.0]] * 2
    assert fed.layout.of_samples


def test_samples_that_cannot_be_copied_and_those_of_adapters_are_collated_once() -> None:
    calls = []

    def collate(samples: list[Any]) -> list[Any]:
        calls.append(len(samples))
        return [[sample] for sample in samples]

    Reading(0, 1, seed=5, collate=collate).collated([(number for number in range(2))] * 2)
    assert calls == [2]
    Reading(0, 1, seed=5, collate=CollateParts(collate, 2)).collated([1, 2])
    assert calls == [2, 1, 1]


def test_a_collate_that_leaves_samples_out_is_refused_and_its_next_batch_is_cut_between_them() -> None:
    def collate(samples: list[Any]) -> list[Any]:
        return [{"image": sample["image"].clone()} for sample in samples if not sample.get("broken")]

    reading = Reading(0, 1, seed=5, collate=collate)
    whole, broken = [images(2) for _ in range(3)], {**images(2), "broken": True}
    assert not reading.collated([*whole[:2], broken])[1].of_samples
    data, layout = reading.collated(whole)
    assert layout.of_samples
    assert len(cut(data, 3, 0, 2, layout)) == 2
    data, layout = reading.collated([*whole[:2], broken])
    with pytest.raises(ValueError, match="cannot cut the list of 2 samples that collate made of 3"):
        cut(data, 3, 0, 2, layout)


def test_a_list_of_tensors_within_a_field_is_refused_unless_it_has_one_or_a_row_for_each_sample() -> None:
    """Features of three scales, and packed ones."""
    batch = {"features": [torch.zeros(4, 8), torch.zeros(4, 4), torch.zeros(4, 2)], "label": torch.zeros(4)}
    assert [feature.shape for feature in cut(batch, 4, 0, 2)["features"]] == [(2, 8), (2, 4), (2, 2)]
    with pytest.raises(ValueError, match="cannot cut a list of 3 items for 4 samples: a list of tensors"):
        cut({**batch, "features": [torch.zeros(4, 8), torch.zeros(16), torch.zeros(5)]}, 4, 0, 2)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_list_within_a_batch_is_one_of_inputs_or_of_samples_as_a_probe_shows(count: int) -> None:
    """Two inputs of a model, and pictures with as many channels as there are samples."""

    def collate(samples: list[Any]) -> list[Any]:
        rows = torch.stack([sample["boxes"][0] for sample in samples])
        return [[rows, rows + 1], torch.arange(len(samples)), [sample["image"] for sample in samples]]

    data, layout = Reading(0, 1, seed=5, collate=collate).collated([images(count)] * count)
    inputs, numbers, pictures = cut(data, count, 0, 1, layout)
    assert [len(rows) for rows in inputs] == [1, 1]
    assert numbers.tolist() == [0]
    assert [picture.shape for picture in pictures] == [(count, 2, 2)]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_tensor_that_belongs_to_the_batch_stays_whole_however_many_samples_there_are(count: int) -> None:
    """Class weights, a picture of the batch, and time before samples: each as long as there are samples."""

    def collate(samples: list[Any]) -> dict[str, Any]:
        rows = torch.stack([sample["boxes"][0] for sample in samples])
        return {
            "rows": rows,
            "weights": torch.arange(count),
            "nested": {"weights": np.arange(count), "inputs": [torch.arange(count), rows]},
            "by time": torch.zeros(count, len(samples), 8),
        }

    reading = Reading(0, 1, seed=5, collate=collate)
    data, layout = reading.collated([images(count)] * count)
    part = cut(data, count, 0, 1, layout)
    assert part["rows"].shape == (1, 4)
    assert part["weights"].tolist() == list(range(count))
    assert len(part["nested"]["weights"]) == count
    assert [len(tensor) for tensor in part["nested"]["inputs"]] == [count, 1]
    assert part["by time"].shape == (count, count, 8)


def test_lengths_decide_with_a_warning_where_collate_takes_no_other_number_of_samples(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        return {"rows": torch.stack(samples).reshape(3, 2)}

    feeding._warn_of_guess.cache_clear()
    data, layout = Reading(0, 1, seed=5, collate=collate).collated([torch.zeros(2)] * 3)
    for _ in range(2):
        assert cut(data, 3, 0, 2, layout)["rows"].shape == (2, 2)
    assert [record.message[:38] for record in caplog.records] == ["collate takes no batch of one sample f"]
    # Adapters hand over whole batches of the framework's own.
    caplog.clear()
    cut(data, 3, 0, 2)
    assert not caplog.records


@pytest.mark.parametrize("convert", [torch.tensor, np.array])
def test_rows_of_samples_that_are_padded_to_a_fixed_number_are_cut_with_a_warning(
    convert: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def collate(samples: list[int]) -> dict[str, Any]:
        return {"x": convert([*samples, *[0] * (4 - len(samples))]), "names": [f"{sample}" for sample in samples]}

    feeding._warn_of_guess.cache_clear()
    reading = Reading(0, 1, seed=5, collate=collate)
    # The last sample of the second batch is equal to the padding.
    for samples in ([1, 2, 3, 4], [5, 6, 7, 0], [1, 2, 3, 4]):
        data, layout = reading.collated(samples)
        part = cut(data, 4, 2, 4, layout)
        assert (part["x"].tolist(), part["names"]) == (samples[2:], [f"{sample}" for sample in samples[2:]])
    assert [record.message[:38] for record in caplog.records] == ["collate takes no batch of one sample f"]


def test_a_probe_that_shows_nothing_leaves_what_others_have_shown() -> None:
    def collate(samples: list[int]) -> dict[str, torch.Tensor]:
        if len(samples) == 3:
            raise ValueError("three are too few")
        return {"rows": torch.tensor(samples), "weights": torch.ones(4)}

    reading = Reading(0, 1, seed=5, collate=collate)
    for samples in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4]):
        data, layout = reading.collated(samples)
    assert {name: len(part) for name, part in cut(data, 4, 0, 2, layout).items()} == {"rows": 2, "weights": 4}


class Talks:
    """A stream of texts with pictures that are drawn at random."""

    def __init__(self, texts: list[str], label: Any = 1) -> None:
        self.texts, self.label = texts, label

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for text in self.texts:
            yield {"text": text, "picture": torch.rand(2), "label": (self.label, np.arange(3))}


def contents(dataset: Talks, rank: int = 0) -> list[int]:
    stream = Stream(dataset, 2, 1, None, read(2, rank))
    return [fed.content for fed in stream.feed(None, 0, never)]


def test_ranks_see_by_a_digest_whether_a_stream_gives_them_the_same_samples() -> None:
    texts = ["a", "b", "c", "d"]
    assert contents(Talks(texts)) == contents(Talks(texts), rank=1)
    other_files, other_labels = contents(Talks(["a", "b", "d", "c"])), contents(Talks(texts, label=torch.tensor(2)))
    assert other_files[0] == contents(Talks(texts))[0]
    assert other_files[1] != contents(Talks(texts))[1]
    assert other_labels[0] != contents(Talks(texts, label=torch.tensor(1)))[0]


class Folder:
    """Pictures in a folder, by their places in its listing."""

    def __init__(self, listed: list[str], label: Any = len) -> None:
        self.listed, self.label = listed, label

    def __len__(self) -> int:
        return len(self.listed)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.rand(2), self.label(self.listed[number])


def common(dataset: Any, rank: int = 0, **options: Any) -> list[int]:
    """Digests of what every rank reads, of the batches of two epochs."""
    reading = dataclasses.replace(read(2, rank), **options)
    return [fed.common for fed in feed(dataset, Order(8, 4, seed=5), range(4), reading)]


def test_ranks_see_by_a_digest_whether_a_number_stands_for_the_same_sample() -> None:
    names = ["a" * (number + 1) for number in range(8)]
    ours = common(Folder(names))
    assert ours[0]
    assert ours[1:] == [0] * 3, "once"
    assert ours == common(Folder(names), rank=1) == common(Folder(names), transform=lambda sample: 0)
    assert ours == common(Folder(names), collate=len, workers=1)
    assert common(Folder(names[::-1]))[0] != ours[0]


def test_samples_that_are_drawn_anew_each_time_are_not_compared() -> None:
    def drawn() -> list[int]:
        generator = np.random.default_rng()
        return common(Folder(["a"] * 8, label=lambda name: int(generator.integers(2**40))))

    assert drawn() == drawn()
    seeded = Folder(["a"] * 8, label=lambda name: int(torch.randint(2**40, ())))
    assert common(seeded) == common(seeded, rank=1)


def test_what_collate_draws_does_not_depend_on_a_start() -> None:
    def drawn(steps: range) -> list[float]:
        reading = dataclasses.replace(read(1), collate=lambda samples: torch.rand(()))
        return [float(fed.data) for fed in feed(Folder(["a"] * 8), Order(8, 4, seed=5), steps, reading)]

    assert drawn(range(1, 4)) == drawn(range(4))[1:]


def test_ranks_whose_samples_are_in_memory_compare_some_too() -> None:
    def content(labels: Tensor) -> list[int]:
        supply = Resident([torch.rand(8, 2), labels], Order(8, 4, seed=5), 0, 2)
        return [supply.read(step).content for step in range(2)]

    assert content(torch.arange(8)) == content(torch.arange(8))
    assert content(torch.arange(8))[1] == 0
    assert content(torch.arange(8))[0] != content(torch.arange(8).flip(0))[0]


def test_a_stream_is_begun_once_for_each_epoch() -> None:
    numbers = Numbers(5)
    assert len(list(Stream(numbers, 2, 3, None, read(1)).feed(None, 0, never))) == 9
    assert numbers.starts == 3
