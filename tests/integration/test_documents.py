"""The commands of README and docs, run as they stand there, in the order of the pages. What needs a cluster, a GPU or
half an hour says so in a comment beside it, and is only parsed: tests/unit/repository/test_documents.py.

A `tandem run` of a page starts warm (tests.support.warm_run), one of README as its reader's does.

`make test` runs the blocks of the pages that changed since the commit in `.ci/since`, the gate those of README as well;
the full tier runs those of all pages, since a command may change without the page that shows it.
"""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT, reach
from tests.support.documents import PAGES, Block, blocks
from tests.support.local_run import LocalRun
from tests.support.processes import environment
from tests.support.warm_run import WARM_TANDEM, warm_run_environment

pytestmark = pytest.mark.timeout(900)
FULL = pytest.mark.full("cli", "trainer", "evaluator", "coordinator", "examples")
RUNS = [block for page in PAGES for block in blocks(page) if block.language in ("sh", "python") and not block.not_run]
ALONE = [block for block in RUNS if not block.beside_a_run]
BESIDE = sorted((block for block in RUNS if block.beside_a_run), key=lambda block: "tandem stop" in block.text)
"""The run is stopped last."""
WARM = ".warm"
"""The folder of a `tandem` whose runs start warm."""
GATE = pytest.mark.gate(
    "tests/integration/test_run.py::TestFromBeginningToEnd::test_it_says_that_the_run_is_complete",
    "tests/integration/test_run.py::TestFromBeginningToEnd::test_the_final_checkpoint_is_evaluated_and_the_best_one_named",
)
"""Of README: these run its manifest for fewer epochs, from a cold start; test_run_commands has those beside a run."""
CHANGED = reach.changed_files(reach.base())


def marks(block: Block) -> tuple[pytest.MarkDecorator, ...]:
    """The mark of the gate, or of the full tier, for a block of a page that did not change; in an unknown history, all
    pages may have."""
    page = block.page.relative_to(ROOT).as_posix()
    unchanged = CHANGED is not None and page not in CHANGED
    if page == "README.md" and not block.in_full_tier:
        return (GATE,) if unchanged else ()
    return (FULL,) if block.in_full_tier or unchanged else ()


def checkout(folder: Path) -> Path:
    """A folder as a clone is after `make setup`, in which no run has been."""
    for name in ("Makefile", "README.md", "charts", "docs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv").symlink_to(Path(sys.prefix))
    command = folder / WARM / "tandem"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.join(WARM_TANDEM)} "$@"\n')
    command.chmod(0o755)
    return folder


def runs_well(block: Block, folder: Path) -> None:
    """Run a block to its end, as a shell and a person who looks at errors would."""
    own = f"{folder / WARM}:{Path(sys.prefix) / 'bin'}"
    # README is for those who have just cloned, and have no `tandem` in their PATH.
    path = "/usr/local/bin:/usr/bin:/bin" if block.page.name == "README.md" else f"{own}:/usr/bin:/bin"
    if block.beside_a_run:
        path = f"{own}:{path}"
    variables = {"PATH": path, "BROWSER": "true", "XDG_STATE_HOME": str(folder / "state"), **warm_run_environment()}
    if block.language == "sh":
        command = ["bash", "-euo", "pipefail", "-c", block.text]
    else:
        command = [sys.executable, "-c", f"{block.given}\n{block.text}"]
    done = subprocess.run(
        command, cwd=folder, env=environment(variables), stdin=subprocess.DEVNULL, capture_output=True, timeout=600
    )
    assert done.returncode == 0, (
        f"{block}\n{block.text}\n{done.stdout.decode()[-2000:]}\n{done.stderr.decode()[-2000:]}"
    )


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def going(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where `tandem run examples/digits.yaml` goes on."""
    folder = checkout(tmp_path_factory.mktemp("going"))
    (folder / "runs").mkdir()
    (folder / "runs" / "run").symlink_to("digits")
    words = ["--set", "trainer.loop.epochs=5000", "--run-dir", "runs/digits"]
    with LocalRun(
        folder / "runs",
        *words,
        manifest=Path("examples/digits.yaml"),
        cwd=folder,
        variables={"XDG_STATE_HOME": str(folder / "state")},
        warm=True,
    ) as run:
        run.reaches(100)
        yield folder


@pytest.mark.parametrize("block", [pytest.param(one, id=str(one), marks=marks(one)) for one in ALONE])
def test_a_block_runs_as_it_stands(block: Block, workspace: Path) -> None:
    if block.page.name != "README.md" and not (workspace / "runs" / "digits").exists():
        # The pages go on from README, whose blocks are not among those of the full tier.
        for earlier in [one for one in ALONE if one.page.name == "README.md"]:
            runs_well(earlier, workspace)
    runs_well(block, workspace)


@pytest.mark.parametrize("block", [pytest.param(one, id=str(one), marks=marks(one)) for one in BESIDE])
def test_a_block_beside_a_run_runs_as_it_stands(block: Block, going: Path) -> None:
    runs_well(block, going)


def test_what_is_documented_is_wrong_if_it_fails(tmp_path: Path) -> None:
    block = Block(ROOT / "docs" / "guide.md", 1, "sh", "tandem validate there-is-none.yaml\n")
    with pytest.raises(AssertionError, match=r"there-is-none\.yaml"):
        runs_well(block, tmp_path)
