"""A function as a job: how the ranks find it, what is refused, and that they call it with the same arguments."""

import functools
import importlib.util
import json
import linecache
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tandem import Client, UserError
from tandem.job.manifest.reading import parse_job
from tandem.job.manifest.source import parse
from tandem_cli.client import client as client_module
from tandem_cli.client.function import CELL, function_job

FUNCTION = """
def train(rate, epochs=1, *, names=()):
    import json
    from pathlib import Path

    Path("called").write_text(json.dumps([rate, epochs, names]))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of code, with modules that are imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").touch()
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def imported(name: str, source: str) -> ModuleType:
    Path(*name.split(".")).with_suffix(".py").write_text(source)
    importlib.invalidate_caches()
    return importlib.import_module(name)


def cell(source: str, name: str = "train", **variables: Any) -> Callable[..., object]:
    """A function as the cell of a notebook defines it."""
    source = dedent(source)
    file = f"<cell {len(linecache.cache)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    scope = {"__name__": "__main__", **variables}
    exec(compile(source, file, "exec"), scope)
    function: Callable[..., object] = scope[name]
    return function


def job(function: Any, *args: Any, kwargs: dict[str, Any] | None = None, code: str = ".", run: bool = False) -> Any:
    """The manifest of a job; with `run`, a rank has run its program in a copy of the folder."""
    with function_job(function, args, kwargs or {}, 2, "", Path(code)) as (manifest, path):
        trainer = parse_job(parse(json.dumps(manifest).encode(), "x")).spec.trainer
        if run:
            assert trainer.command is not None
            command = [sys.executable, *trainer.command[1:], *trainer.args]
            subprocess.run(command, cwd=path, check=True, timeout=60)
            assert (path / "called").exists(), "it works in the folder of its code"
            Path("result").write_bytes((path / "called").read_bytes())
        return manifest


def refused(function: Any, *args: Any, **more: Any) -> str:
    with pytest.raises(UserError) as error:
        job(function, *args, **more)
    assert "\n" not in str(error.value)
    return str(error.value)


class TestItIsCalled:
    @pytest.mark.parametrize("module", ["digits", "package.digits", "package"])
    def test_with_its_arguments_by_module_and_name(self, module: str) -> None:
        if module == "package":
            Path("package/__init__.py").write_text(FUNCTION)
            function = importlib.import_module("package").train
        else:
            function = imported(module, FUNCTION).train
        given = ["ä", "a\"'\\", "$TANDEM_RUN_DIR", "$$", None]
        made = job(function, 0.1, kwargs={"names": given}, run=True)
        assert json.loads(Path("result").read_text()) == [0.1, 1, given]
        assert "$" not in "".join(made["spec"]["trainer"]["args"]), "the kubelet and the agent would replace variables"
        assert f"import_module('{module}').train(" in made["spec"]["trainer"]["command"][2]
        assert (made["metadata"], made["spec"]["workers"]) == ({"name": "train"}, {"replicas": 2})

    def test_from_a_script_which_is_then_a_module(self, monkeypatch: pytest.MonkeyPatch) -> None:
        script = Path("train-digits.py")
        script.write_text(FUNCTION)
        spec = importlib.util.spec_from_file_location("__main__", script)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.__spec__ = None
        monkeypatch.setitem(sys.modules, "__main__", module)
        job(module.train, 1, run=True)
        assert json.loads(Path("result").read_text()) == [1, 1, []]

    def test_from_a_decorated_definition(self) -> None:
        text = dedent("""
            import functools

            def same(function):
                @functools.wraps(function)
                def call(*args, **kwargs):
                    return function(*args, **kwargs)

                return call

            """)
        job(imported("digits", f"{text}@same{FUNCTION}").train, 1, run=True)

    def test_from_a_cell_beside_the_modules_of_the_folder(self) -> None:
        Path("beside.py").write_text("RATE = 0.5\n")
        Path("data").mkdir()
        Path("data/link").symlink_to("../beside.py")
        source = """
        def train(epochs: int = 3):
            import json
            from pathlib import Path
            from beside import RATE

            class Model:
                size = 3
                double = size * 2

            total = sum(number for number in range(epochs))
            again = train.__name__
            Path("called").write_text(json.dumps([RATE, Path("data/link").read_text(), total, Model.double, again]))
        """
        job(cell(source), 3, run=True)
        assert json.loads(Path("result").read_text()) == [0.5, "RATE = 0.5\n", 3, 6, "train"]
        assert not Path(f"{CELL}.py").exists(), "the user's folder stays as it is"

    def test_from_a_cell_that_a_debugger_has_written_to_a_file(
        self, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path_factory.mktemp("kernel") / "1234.py"
        file.write_text(FUNCTION)
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(FUNCTION, str(file), "exec"), scope)
        monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
        job(scope["train"], 1, run=True)


@pytest.mark.parametrize("place", ["Kubernetes", "Slurm"])
def test_on_a_cluster_its_code_goes_the_way_of_other_code(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[set[str], Any, str]] = []

    class Cluster:
        def __init__(self, *_: object) -> None:
            pass

        def submit(self, jobs: Any, settings: tuple[str, ...], pack: Any, report: object) -> Iterator[Any]:
            sent.append((set(pack.names), jobs[0][1]["spec"]["trainer"]["code"], pack.digest))
            yield SimpleNamespace(run=None)

    monkeypatch.setattr(client_module, place, Cluster)
    Path("beside.py").touch()
    run = Client(**{place.lower(): "team"}).train(cell(FUNCTION), 1)  # type: ignore[arg-type]
    ((names, code, digest),) = sent
    assert (run.name, names, code) == ("train", {"beside.py", "package/__init__.py", f"{CELL}.py"}, digest)


def outer() -> Callable[[], None]:
    def inner() -> None:
        pass

    return inner


async def coroutine() -> None:
    pass


class Callables:
    def method(self) -> None:
        pass


class TestItIsRefused:
    @pytest.mark.parametrize(
        ("function", "name"),
        [
            (lambda: None, "TestItIsRefused.<lambda>"),
            (outer(), "outer.<locals>.inner"),
            (Callables().method, "Callables.method"),
            (functools.partial(outer), "functools.partial("),
            (print, "print"),
            ("train.py", "'train.py'"),
        ],
    )
    def test_unless_a_name_at_the_top_level_finds_it(self, function: Any, name: str) -> None:
        assert refused(function).startswith(
            f"train takes a function that a file or a cell defines with def at its top level, and not {name}"
        )

    def test_if_a_call_does_not_run_it(self) -> None:
        assert refused(coroutine) == "coroutine is a coroutine or a generator, which a call does not run"

    def test_if_its_file_is_elsewhere(self, tmp_path: Path) -> None:
        (tmp_path / "src").mkdir()
        function = imported("digits", FUNCTION).train
        assert refused(function, 1, code="src") == (
            "the job would import train from digits in the folder src, and it is in "
            f"{tmp_path / 'digits.py'}; give the folder to import from: code=…"
        )
        (tmp_path / "src/digits.py").write_text("another file\n")
        assert "and it is in" in refused(function, 1, code="src")

    def test_if_its_name_stands_for_something_else(self) -> None:
        module = imported("digits", f"{FUNCTION}\n\nfirst = train\n{FUNCTION}")
        assert "the job would import train from digits" in refused(module.first, 1)

    @pytest.mark.parametrize(
        ("args", "kwargs", "sentence"),
        [
            ((), {}, "train cannot be called so: missing a required argument: 'rate'"),
            ((1,), {"epoch": 2}, "train cannot be called so: got an unexpected keyword argument 'epoch'"),
            ((Path(),), {}, "the call of train has a value that no manifest can have: Object of type PosixPath is not"),
            ((float("nan"),), {}, "the call of train has a value that no manifest can have: "),
            (((1, 2),), {}, "arguments are sent as JSON, and [(1, 2)] would be received as [[1, 2]]"),
            (({1: 2},), {}, "arguments are sent as JSON, and [{1: 2}] would be received as [{'1': 2}]"),
        ],
    )
    def test_with_arguments_that_it_would_not_receive(self, args: Any, kwargs: Any, sentence: str) -> None:
        assert refused(imported("digits", FUNCTION).train, *args, kwargs=kwargs).startswith(sentence)

    @pytest.mark.parametrize(
        ("source", "names"),
        [
            ("def train():\n    return torch.zeros(SIZE)", "SIZE, torch"),
            ("def train(model: nn.Module = None):\n    pass", "nn"),
            ("def train(rate=RATE):\n    pass", "RATE"),
            ("@decorator\ndef train():\n    pass", "decorator"),
            (
                "def train():\n    class Net(Base):\n        def forward(self):\n            return F.relu(self)\n",
                "Base, F",
            ),
            ("def train():\n    get_ipython().system('ls')", "get_ipython"),
            ("def train():\n    global count\n    count += 1", "count"),
        ],
    )
    def test_if_it_uses_names_of_the_notebook(self, source: str, names: str, monkeypatch: pytest.MonkeyPatch) -> None:
        known = {"nn": SimpleNamespace(Module=object), "RATE": 1, "decorator": lambda function: function}
        shell: Any = lambda: None  # noqa: E731
        shell.__module__ = "IPython.core.getipython"
        monkeypatch.setattr("builtins.get_ipython", shell, raising=False)
        assert refused(cell(source, **known)) == (
            f"train uses {names}, and a job gets only the source of a function of a cell: import or define that in "
            "train, or move it to a file of the folder that code=… names"
        )

    def test_if_its_source_is_unknown(self) -> None:
        scope: dict[str, Any] = {"__name__": "__main__"}
        exec("def train(): pass", scope)
        assert refused(scope["train"]) == (
            "the source of train is unknown; define it in a file, or in a cell of a notebook"
        )

    def test_in_a_job(self, monkeypatch: pytest.MonkeyPatch) -> None:
        function = imported("digits", FUNCTION).train
        monkeypatch.setenv("TANDEM_STEP_LOG", "tandem_trainer.step_log")
        assert 'put it under if __name__ == "__main__":' in refused(function, 1)

    def test_if_the_folder_is_none(self) -> None:
        assert refused(cell(FUNCTION), 1, code="nowhere") == "--code takes a folder, and nowhere is not there"

    def test_if_the_job_is_invalid_as_any_other(self) -> None:
        function = imported("digits", FUNCTION).train
        with pytest.raises(UserError, match=r"spec\.workers\.replicas must be a whole number from 1"):
            Client().train(function, 1, workers=0)
        with pytest.raises(UserError, match=r"metadata\.name must be"):
            Client().train(function, 1, name="My digits")
