"""Upload and download of a checkpoint beside plain parallel requests of the same bytes: `make bench-bucket`.

The server is versitygw over a folder of this machine. Both sides send and get the same files through the same client,
and take turns, A B A B, each round in a process of its own, whose peak of memory is measured. Tandem's side verifies
each checksum, before it sends and before it writes, and its download is synced to the disk.
"""

import argparse
import multiprocessing as mp
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.goals import conclude, judge_median
from tandem.rundir.bucket import PIECE_BYTES, THREADS, claim
from tandem.rundir.checkpoint import CHUNK_BYTES
from tandem.rundir.download import Downloader
from tandem.rundir.layout import RunDir
from tandem.rundir.upload import Uploader
from tests.support.buckets import CREDENTIALS, a_run, add_checkpoint, place, versitygw

ROUNDS = 5
BYTES = 370_000_000
"""Bytes of each of the two files of the checkpoint."""
MAX_MEMORY = 1.2
"""Goal: peak of memory, in sizes of the state. Mapped pages of the files count, though they are the page cache's."""
MAX_RATIO = 1.25
"""Goal: times as long as plain requests. A checksum of each byte, a sync and a commit are in it."""


def plain_upload(url: str, prefix: str, folder: Path) -> None:
    """Send the files of a checkpoint in pieces, THREADS at a time."""
    store = place(url, prefix)
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        content = file.read_bytes()
        view = memoryview(content)
        with ThreadPoolExecutor(THREADS) as pool:
            list(
                pool.map(
                    lambda start, file=file, view=view: store.put(
                        f"{file.name}/{start}", view[start : start + PIECE_BYTES]
                    ),
                    range(0, len(content), PIECE_BYTES),
                )
            )


def tandem_upload(url: str, prefix: str, folder: Path) -> None:
    """Bring a run directory with this checkpoint into a bucket."""
    rundir = RunDir(folder.parent.parent)
    (rundir.path / "buckets.json").unlink(missing_ok=True)
    store = place(url, prefix)
    uploader = Uploader(store, rundir, claim(store, rundir, is_empty=False))
    uploader.survey()
    uploader.upload_checkpoints()


def plain_download(url: str, prefix: str, target: Path) -> None:
    """Get what `plain_upload` has sent, in ranges, THREADS at a time, into one file each."""
    store = place(url, prefix)
    target.mkdir()
    for entry in store.entries():
        descriptor = os.open(target / entry.name.replace("/", "-"), os.O_WRONLY | os.O_CREAT)
        with ThreadPoolExecutor(THREADS) as pool:
            list(
                pool.map(
                    lambda start, entry=entry, descriptor=descriptor: os.pwrite(
                        descriptor,
                        store.read_range(entry.name, start, min(CHUNK_BYTES, entry.size - start)) or b"",
                        start,
                    ),
                    range(0, entry.size, CHUNK_BYTES),
                )
            )
        os.fsync(descriptor)
        os.close(descriptor)


def tandem_download(url: str, prefix: str, target: Path) -> None:
    """Get the checkpoints of a run in a bucket."""
    rundir = RunDir(target)
    downloader = Downloader(place(url, prefix))
    downloader.records(rundir)
    result = downloader.checkpoints(rundir, ["all"])
    assert result.checkpoints
    assert not result.faults


def measured(do: Callable[[str, str, Path], None], url: str, prefix: str, folder: Path) -> tuple[float, float]:
    """Seconds of a call, and its peak of memory in bytes, in a process of its own."""
    context = mp.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(do, url, prefix, folder, sending))
    process.start()
    sending.close()
    seconds, peak = receiving.recv()
    process.join()
    return seconds, peak


def _measure(do: Callable[[str, str, Path], None], url: str, prefix: str, folder: Path, sending: object) -> None:
    # The peak of a process outlives fork and exec; this resets it to what the process has now.
    Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    started = time.perf_counter()
    do(url, prefix, folder)
    seconds = time.perf_counter() - started
    sending.send((seconds, _peak() - before))  # type: ignore[attr-defined]


def _peak() -> int:
    """Peak of this process's memory in bytes, with the pages of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def main() -> int:
    """Measure both sides in turns, and judge the goals."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bucket")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--bytes", type=int, default=BYTES, help="bytes of each of the two files")
    options = parser.parse_args()
    os.environ.update(CREDENTIALS)
    times: dict[str, list[float]] = {"upload": [], "download": []}
    ratios: dict[str, list[float]] = {"upload": [], "download": []}
    peaks: dict[str, list[float]] = {"upload": [], "download": []}
    size = 2 * options.bytes
    with tempfile.TemporaryDirectory() as scratch, versitygw(Path(scratch, "server")) as url:
        rundir = a_run(Path(scratch, "run"), steps=())
        name = add_checkpoint(rundir, 10, options.bytes).name
        folder = rundir.checkpoint(name)
        for index in range(options.rounds):
            plain, _ = measured(plain_upload, url, f"plain-{index}", folder)
            own, peak = measured(tandem_upload, url, f"tandem-{index}", folder)
            times["upload"].append(own)
            ratios["upload"].append(own / plain)
            peaks["upload"].append(peak / size)
            plain, _ = measured(plain_download, url, f"plain-{index}", Path(scratch, f"plain-{index}"))
            own, peak = measured(tandem_download, url, f"tandem-{index}", Path(scratch, f"tandem-{index}"))
            times["download"].append(own)
            ratios["download"].append(own / plain)
            peaks["download"].append(peak / size)
            print(
                f"round {index}: upload {times['upload'][-1]:.2f} s, {ratios['upload'][-1]:.2f} times plain requests; "
                f"download {times['download'][-1]:.2f} s, {ratios['download'][-1]:.2f} times",
                flush=True,
            )
            place(url, f"plain-{index}").delete([entry.name for entry in place(url, f"plain-{index}").entries()])
            for side in ("plain", "tandem"):
                shutil.rmtree(Path(scratch, f"{side}-{index}"))
    verdicts = []
    for direction in ("upload", "download"):
        median = statistics.median(times[direction])
        print(f"{direction} of {size / 1e9:.2f} GB: {median:.2f} s, {size / 1e6 / median:.0f} MB/s")
        verdicts.append(judge_median(f"{direction} <= {MAX_RATIO} x plain requests", ratios[direction], MAX_RATIO, "x"))
        verdicts.append(judge_median(f"{direction}: memory <= {MAX_MEMORY} x state", peaks[direction], MAX_MEMORY, "x"))
    return conclude(verdicts)


if __name__ == "__main__":
    sys.exit(main())
