"""The data sets: real digits without a download, IDX files from a folder, and a clear word when there is nothing."""

import errno
import gzip
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.job.datasets import FILES
from tandem.job.tasks import Data
from tandem.rundir import lease
from tandem_trainer.data import load
from tandem_trainer.data.loading import read_idx
from tandem_trainer.failure import ConfigurationError, UnusableInput
from tests.support.disks import unreadable


def write_idx(path: Path, array: np.ndarray) -> None:
    content = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(folder: Path, suffix: str = "") -> np.ndarray:
    folder.mkdir(parents=True, exist_ok=True)
    images = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)
    for split, (image_file, label_file) in FILES.items():
        count = 20 if split == "train" else 5
        write_idx(folder / f"{image_file}{suffix}", images[:count])
        write_idx(folder / f"{label_file}{suffix}", (np.arange(count) % 10).astype(np.uint8))
    return images


def test_digits_are_the_ones_in_scikit_learn() -> None:
    from sklearn.datasets import load_digits

    train, test = load(Data(name="digits"), "train"), load(Data(name="digits"), "test")
    assert len(train) + len(test) == 1797
    assert (train.channels, train.image_size, train.classes) == (1, 8, 10)
    ours = torch.cat([train.images, test.images]).flatten(1) * 0.3759 + 0.3053
    theirs = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    torch.testing.assert_close(ours.sum(0), theirs.sum(0), rtol=1e-4, atol=1e-3)


def test_digits_test_set_has_a_fifth_of_each_class_and_shares_nothing() -> None:
    train, test = load(Data(name="digits"), "train"), load(Data(name="digits"), "test")
    for digit in range(10):
        share = (test.labels == digit).sum() / ((test.labels == digit).sum() + (train.labels == digit).sum())
        assert 0.19 < share <= 0.2
    known = {image.numpy().tobytes() for image in train.images}
    assert not any(image.numpy().tobytes() in known for image in test.images)


def test_synthetic_is_the_same_every_time_and_has_the_size_asked_for() -> None:
    config = Data(name="synthetic", samples=50, image_size=12)
    first, again = load(config, "train"), load(config, "train")
    assert first.images.shape == (50, 1, 12, 12)
    assert torch.equal(first.images, again.images)
    assert len(load(config, "test")) == 10


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("below", ["", "FashionMNIST/raw"])
def test_fashion_mnist_is_read_from_a_folder_of_idx_files(tmp_path: Path, suffix: str, below: str) -> None:
    images = write_mnist(tmp_path / below, suffix)
    samples = load(Data(name="fashion-mnist", path=str(tmp_path), download=False), "train")
    assert samples.images.shape == (20, 1, 28, 28)
    torch.testing.assert_close(samples.images[3, 0], (torch.tensor(images[3]) / 255 - 0.2860) / 0.3530)
    assert samples.labels.tolist() == [n % 10 for n in range(20)]
    assert len(load(Data(name="fashion-mnist", path=str(tmp_path), download=False), "test")) == 5


def test_a_missing_folder_is_named_together_with_what_to_put_there(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere"
    with pytest.raises(ConfigurationError) as error:
        load(Data(name="mnist", path=str(missing), download=False), "train")
    assert str(missing) in str(error.value)
    assert "train-images-idx3-ubyte[.gz]" in str(error.value)


def test_without_a_network_a_download_says_how_to_do_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.datasets

    def offline(root: str, download: bool) -> None:
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")

    monkeypatch.setattr(torchvision.datasets, "MNIST", offline)
    with pytest.raises(ConfigurationError, match="Without a network, put its four IDX files"):
        load(Data(name="mnist", path=str(tmp_path / "new")), "train")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "cannot be read"),
        (b"not an idx file at all", "not an IDX file"),
        (struct.pack(">HBBI", 0, 8, 1, 100) + b"short", "truncated"),
        (struct.pack(">HBBIII", 0, 8, 3, 2**31, 2**31, 2**31), "more than the maximum"),
        (struct.pack(">HBBI", 0, 0x0D, 1, 4) + b"\0" * 16, "not an IDX file of unsigned bytes"),
    ],
)
def test_garbage_is_refused_with_its_name(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=complaint) as error:
        read_idx(path)
    assert str(path) in str(error.value)
    compressed = tmp_path / "cut.gz"
    compressed.write_bytes(gzip.compress(content)[:-9])
    with pytest.raises(ConfigurationError, match=r"cut\.gz"):
        read_idx(compressed)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_disk_that_fails_is_no_mistake_in_the_job(tmp_path: Path, suffix: str) -> None:
    write_mnist(tmp_path, suffix)
    unreadable(tmp_path / f"{FILES['train'][1]}{suffix}")
    with pytest.raises(OSError, match="Input/output error"):
        load(Data(name="mnist", path=str(tmp_path), download=False), "train")


def test_a_folder_that_has_gone_stale_is_no_mistake_in_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(path: Path, **_: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setattr(Path, "stat", stale)
    with pytest.raises(OSError, match="Stale file handle"):
        load(Data(name="mnist", path=str(tmp_path), download=False), "train")


def test_a_disk_that_fails_while_data_is_downloaded_is_no_mistake_in_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision.datasets

    def failing(root: str, download: bool) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(torchvision.datasets, "MNIST", failing)
    with pytest.raises(OSError, match="Input/output error"):
        load(Data(name="mnist", path=str(tmp_path)), "train")


def test_a_damaged_file_is_an_unusable_input(tmp_path: Path) -> None:
    path = tmp_path / "labels.gz"
    content = bytearray(gzip.compress(struct.pack(">HBBI", 0, 8, 1, 4) + b"1234"))
    content[12:20] = b"damaged!"
    path.write_bytes(content)
    with pytest.raises(UnusableInput, match="cannot be read as an IDX file"):
        read_idx(path)


def test_images_and_labels_must_belong_together(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    write_idx(tmp_path / FILES["train"][1], np.zeros(19, dtype=np.uint8))
    with pytest.raises(ConfigurationError, match="not images and labels of the same samples"):
        load(Data(name="mnist", path=str(tmp_path), download=False), "train")


def cut(path: Path) -> None:
    """Leave half of a file, as a download does while it goes on or after it was killed."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where torchvision was asked to download MNIST to; it does so without a network."""
    import torchvision.datasets

    asked: list[str] = []

    def download(root: str, download: bool) -> None:
        asked.append(root)
        # torchvision keeps a file that is there already, whatever is in it.
        folder = Path(root) / "MNIST" / "raw"
        if not folder.exists():
            write_mnist(folder)

    monkeypatch.setattr(torchvision.datasets, "MNIST", download)
    return asked


def test_a_download_that_was_killed_half_way_is_made_again(tmp_path: Path, downloads: list[str]) -> None:
    raw = tmp_path / "MNIST" / "raw"
    write_mnist(raw)
    cut(raw / FILES["train"][0])
    assert len(load(Data(name="mnist", path=str(tmp_path)), "train")) == 20
    assert len(downloads) == 1
    assert len(load(Data(name="mnist", path=str(tmp_path)), "test")) == 5
    assert len(downloads) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["MNIST"]


def test_who_comes_while_another_downloads_waits_for_it(tmp_path: Path, downloads: list[str]) -> None:
    raw = tmp_path / "MNIST" / "raw"
    other = lease.acquire(tmp_path / ".MNIST.lease", "another")
    assert other is not None
    write_mnist(raw)
    cut(raw / FILES["train"][0])
    with ThreadPoolExecutor() as pool:
        loading = pool.submit(load, Data(name="mnist", path=str(tmp_path)), "train")
        with pytest.raises(TimeoutError):
            loading.result(1.0)
        write_mnist(raw)
        other.release()
        assert len(loading.result(60)) == 20
    assert downloads == []


def test_files_of_ones_own_that_are_damaged_are_named_and_not_replaced(tmp_path: Path, downloads: list[str]) -> None:
    write_mnist(tmp_path)
    cut(tmp_path / FILES["train"][0])
    with pytest.raises(ConfigurationError, match="truncated"):
        load(Data(name="mnist", path=str(tmp_path)), "train")
    assert downloads == []


def test_what_is_held_out_is_never_trained_on_and_always_the_same() -> None:
    whole = load(Data(name="digits"), "train")
    for share in (0.1, 0.25):
        config = Data(name="digits", validation=share)
        left, held_out = load(config, "train"), load(config, "validation")
        assert len(held_out) == round(share * len(whole))
        rows = [image.flatten().tolist() for part in (left, held_out) for image in part.images]
        assert sorted(rows) == sorted(image.flatten().tolist() for image in whole.images)
        assert torch.equal(held_out.images, load(config, "validation").images)
        assert held_out.labels.unique().tolist() == list(range(10))
        assert torch.equal(load(config, "test").images, load(Data(name="digits"), "test").images)
    assert len(load(Data(name="digits"), "validation")) == 0


def test_a_share_that_leaves_nothing_to_validate_with_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"data.validation: 0.0001 of 1442 samples leaves nothing to validate"):
        load(Data(name="digits", validation=0.0001), "train")
