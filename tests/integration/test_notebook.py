"""The client in a notebook, with a real kernel: the example, a display that updates itself, and a kernel that dies."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

from tandem import Client
from tandem_cli.local.known import is_alive
from tests.support import ROOT
from tests.support.local_run import DIGITS, SECONDS
from tests.support.worlds.simulated_run import make_run

pytestmark = pytest.mark.timeout(900)
EXAMPLE = ROOT / "examples" / "notebook.ipynb"
INTERRUPTED = """
import os, signal
looks = []
def is_over(view):
    looks.append(view)
    if len(looks) == 2:
        run.name = "renamed"
    if len(looks) == 4:
        os.kill(os.getpid(), signal.SIGINT)
    return False
run._run.is_over = is_over
run.watch()
"""
"""A cell that shows a run without end, changes it, and is interrupted."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the notebook."""
    monkeypatch.chdir(tmp_path)
    for name in ("XDG_STATE_HOME", "IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path.parent / f"{tmp_path.name}-{name.lower()}"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    yield tmp_path
    for run in Client().runs():
        if is_alive(run._run.run_dir().path):
            run.stop(now=True)


def executed(*cells: str) -> Any:
    """The cells of a notebook after a kernel has executed them."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    return execute(notebook)


def execute(notebook: Any) -> Any:
    kernels: list[Any] = []
    client = NotebookClient(notebook, timeout=600, startup_timeout=600, kernel_name="python3")
    client.on_notebook_start = lambda notebook: kernels.append(client.km.provisioner.process)
    try:
        client.execute()
    finally:
        for kernel in kernels:
            # Jupyter abandons a kernel that has not ended 5 s after it was killed.
            kernel.kill()
            kernel.wait()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def pages(cell: Any) -> list[str]:
    """The displays of a cell, as HTML."""
    return [output.data["text/html"] for output in cell.outputs if output.output_type != "stream"]


def test_a_display_updates_itself_until_the_end_or_an_interrupt() -> None:
    make_run(Path("runs/digits"), steps=100)
    first, second, last = executed(
        "from tandem import Client\nrun = Client().run('digits')\nrun.watch()",
        INTERRUPTED,
        "run",
    )
    for cell in (first, second, last):
        (page,) = pages(cell)
        assert "Training loss" in page
        assert len(cell.outputs) == 1, "a library prints nothing"
    assert "<b>renamed</b>" in pages(second)[0]


def test_a_function_of_a_cell_that_needs_the_notebook_is_refused() -> None:
    with pytest.raises(CellExecutionError, match="train uses torch, and a job gets only the source of a function"):
        executed(
            "import torch\ndef train():\n    return torch.zeros(1)",
            "from tandem import Client\nClient().train(train)",
        )


@pytest.mark.full("cli", "trainer", "evaluator", "coordinator", "examples")
def test_the_example_runs_from_its_first_cell_to_its_last(folder: Path) -> None:
    shutil.copy(DIGITS, folder)
    notebook = nbformat.read(EXAMPLE, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is committed without outputs"
    cells = execute(notebook)
    watched = [cell for cell in cells if ".watch()" in cell.source]
    assert [("Succeeded" in page, "Training loss" in page) for cell in watched for page in pages(cell)] == [
        (True, True),
        (True, True),
    ]
    *_, swept, best = cells
    (page,) = pages(swept)
    assert "2 trials: " in page
    assert "The best accuracy is" in page
    assert "'trainer.loop.optimizer.learningRate': 0.001" in best.outputs[0].data["text/plain"]
    assert sorted(path.name for path in folder.iterdir()) == ["digits.yaml", "runs"]


@pytest.mark.full("cli", "trainer", "evaluator", "coordinator", "examples")
def test_a_run_outlives_its_kernel() -> None:
    with pytest.raises(DeadKernelError):
        executed(
            "def train(steps):\n"
            "    import time, tandem\n"
            "    for step in range(steps):\n"
            "        time.sleep(0.05)\n"
            "        tandem.log(step=step + 1, loss=1 / (step + 1), total=steps)\n",
            "import os, signal\nfrom tandem import Client\nrun = Client().train(train, 100)\n"
            "run.wait(until='Running')\nos.kill(os.getpid(), signal.SIGKILL)",
        )
    run = Client().run("train")
    run.wait(SECONDS, check=True)
    assert [loss.step for loss in run.losses()] == list(range(1, 101))
