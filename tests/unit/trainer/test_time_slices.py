"""Threads of gloo get the shortest time slice, others keep theirs, and nothing else of a thread changes."""

import os
import platform
import subprocess
import sys
from textwrap import dedent

import pytest

from tandem_trainer.time_slices import SLICE_SECONDS

KERNEL = tuple(int(part) for part in platform.release().split(".")[:2])
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or KERNEL < (6, 12), reason="threads have time slices of their own since Linux 6.12"
)


def test_threads_of_gloo_go_first_and_what_computes_keeps_its_slice() -> None:
    script = """
        import os, threading
        import torch.distributed as dist
        from pathlib import Path
        from tandem_trainer.time_slices import SLICE_SECONDS, shorten_time_slices, slice_seconds
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        before = slice_seconds(threading.get_native_id())
        while not (count := shorten_time_slices()):
            pass  # Threads name themselves once they run.
        names = {int(one.name): (one / "comm").read_text() for one in Path("/proc/self/task").iterdir()}
        theirs = [thread for thread, name in names.items() if "gloo_tcp" in name]
        assert count == len(theirs) > 0, (count, names)
        assert all(slice_seconds(thread) == SLICE_SECONDS for thread in theirs)
        assert slice_seconds(threading.get_native_id()) == before != SLICE_SECONDS
        assert all(os.sched_getscheduler(thread) == os.SCHED_BATCH for thread in theirs)
        os._exit(0)
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_slice_needs_no_right() -> None:
    script = f"""
        import ctypes, os, platform, threading
        from tandem_trainer.time_slices import shorten_time_slices, slice_seconds
        os.setgid(65534), os.setuid(65534)
        name = open("/proc/self/comm").read().strip()
        assert shorten_time_slices(name) >= 1
        assert slice_seconds(threading.get_native_id()) == {SLICE_SECONDS}
    """
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    done = subprocess.run([sys.executable, "-c", dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
