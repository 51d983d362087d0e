"""Charts in a real Chromium: values are read off them and parts enlarged, by mouse, keys and fingers."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tandem import formatting
from tandem.rundir.layout import RunDir
from tandem.wire.status import Progress, Score, Snapshot, Status
from tandem_cli.report.writing import write
from tandem_coordinator.charts import drawing
from tandem_coordinator.page.routes import LivePage
from tests.support import manifests
from tests.support.cluster.browser import Browser
from tests.support.worlds.simulated_run import T0, make_run

DESK, PHONE = 1280, 390


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "digits", steps=900, kills={430: "WorkerFailed"}, gpus=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as made:
        yield made


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    return write(run, png=False).page


@pytest.fixture
def report(browser: Browser, page: Path) -> Iterator["Charts"]:
    """The report of a run, on a desk."""
    browser.screen(DESK)
    yield Charts(browser, f"file://{page}", "document.querySelector('.charted')")
    assert browser.complaints == []


class Charts:
    """The charts of one figure of a page."""

    def __init__(self, browser: Browser, address: str, host: str) -> None:
        self.browser = browser
        self._host = host
        # What the browser shows until the page has come may be the same page of the test before.
        browser.value("window.before = true")
        browser.go(address)
        browser.until(lambda: browser.value("!window.before && document.readyState === 'complete'"), "the page")
        browser.until(lambda: self.value("host.querySelector('svg g.chart') !== null"), "a chart")
        self.value("host.scrollIntoView({block: 'center'})")

    def value(self, expression: str) -> Any:
        return self.browser.value(f"(() => {{ const host = {self._host}; return host && ({expression}); }})()")

    def at(self, x: float, y: float = 0.3) -> tuple[float, float]:
        """A place of the first chart's plot, by its shares of width and height, on the screen."""
        box = json.loads(
            self.value(
                """(() => {
                  const svg = [...host.querySelectorAll('svg')].find((one) => one.getBoundingClientRect().width > 0);
                  const shape = svg.getBoundingClientRect(), pixels = shape.width / svg.viewBox.baseVal.width;
                  const plot = svg.querySelector('.chart').dataset.plot.split(' ').map((part) => part * pixels);
                  return JSON.stringify([shape.left + plot[0], plot[1], shape.top + plot[2], plot[3] - plot[2]]);
                })()"""
            )
        )
        return box[0] + x * box[1], box[2] + y * box[3]

    def hover(self, x: float) -> None:
        self.browser.mouse("Moved", *self.at(x))

    def drag(self, begin: float, end: float) -> None:
        self.browser.mouse("Moved", *self.at(begin))
        self.browser.mouse("Pressed", *self.at(begin), clicks=1)
        self.browser.mouse("Moved", *self.at((begin + end) / 2), clicks=1)
        self.browser.mouse("Moved", *self.at(end), clicks=1)
        self.browser.mouse("Released", *self.at(end), clicks=1)

    @property
    def said(self) -> str:
        """What the readout says, on one line; empty while there is none."""
        box = "document.querySelector('.readout')"
        return " ".join(str(self.browser.value(f"{box} && !{box}.hidden ? {box}.innerText : ''")).split())

    @property
    def steps(self) -> list[int]:
        """What stands at the first chart's x axis."""
        shown = "[...host.querySelectorAll('svg')].find((one) => one.getBoundingClientRect().width > 0)"
        shown = f"[...{shown}.querySelector('.chart').querySelectorAll(':scope > .ticks text')]"
        return [int(word.replace(",", "")) for word in self.value(f"{shown}.map((text) => text.textContent)")]

    @property
    def drawn(self) -> str:
        """The drawing without the crosshair."""
        return str(
            self.value(
                """[...[...host.querySelectorAll('svg')].find((one) => one.getBoundingClientRect().width > 0)
                  .querySelectorAll('.chart > *:not(.cross)')].map((one) => one.outerHTML).join('')"""
            )
        )


def accuracy(run: Path, step: int) -> str:
    (file,) = run.glob(f"evaluations/step-{step:09d}/g*1.json")
    return f"{100 * json.loads(file.read_text())['metrics']['accuracy']:.2f} %"


def loss(run: Path, step: int) -> float:
    lines = [
        json.loads(line) for path in sorted(run.glob("log/train-*.jsonl")) for line in path.read_text().splitlines()
    ]
    return float(next(line["loss"] for line in reversed(lines) if line["kind"] == "step" and line["step"] == step))


def test_the_mouse_reads_the_values_of_all_curves_at_a_step(report: Charts, run: Path) -> None:
    report.hover(200 / 900)
    assert report.said.startswith("step 200 ")
    assert f"Test accuracy {accuracy(run, 200)}" in report.said
    low, high = report.said.partition("each step ")[2].split(" mean of")[0].split(" to ")
    assert float(low) - 1e-4 <= loss(run, 200) <= float(high) + 1e-4
    assert report.value("host.querySelectorAll('path.cross').length") >= 1
    report.browser.mouse("Moved", 2, 2)
    assert report.said == ""
    assert report.value("host.querySelectorAll('.cross').length") == 0


@pytest.mark.parametrize(
    "value", [0.0, 3.1e-6, 0.00042, 0.0213, 0.9987, 1.0, 2.3026, 12.34, 98.6, 123.4, 1234.6, 12_345_678.0]
)
def test_a_number_has_the_form_that_it_has_everywhere(report: Charts, value: float) -> None:
    assert report.value(f"Charts.told({value!r}, 'number')") == formatting.number(value)
    assert report.value(f"Charts.told({value!r}, 'cores')") == formatting.cores(value)
    assert report.value(f"Charts.word({value!r}, 'number')") == drawing.word(value, "number")
    if value <= 1.0:
        assert report.value(f"Charts.told({value!r}, 'share')") == formatting.score("accuracy", value)
        assert report.value(f"Charts.word({value!r}, 'share')") == drawing.word(value, "share")


def test_a_part_that_was_chosen_fills_the_chart_and_a_double_click_shows_all_as_it_was(report: Charts) -> None:
    whole, steps = report.drawn, report.steps
    report.drag(0.4, 0.6)
    assert 350 <= min(report.steps) < max(report.steps) <= 550
    report.hover(0.5)
    assert abs(int(report.said.split()[1]) - 450) <= 3
    assert report.value("document.querySelector('.reset').hidden") is False
    for _ in range(2):
        report.browser.mouse("Pressed", *report.at(0.5), clicks=2)
        report.browser.mouse("Released", *report.at(0.5), clicks=2)
    assert (report.steps, report.drawn) == (steps, whole)
    assert report.value("document.querySelector('.reset').hidden") is True


def test_a_part_without_a_point_of_a_curve_still_has_an_axis(report: Charts) -> None:
    for _ in range(4):
        report.drag(0.5, 0.52)
    assert "NaN" not in report.drawn
    assert len(set(report.steps)) == len(report.steps) >= 1


def test_keys_read_values_enlarge_and_show_all(report: Charts, run: Path) -> None:
    report.value("host.focus({focusVisible: true})")
    assert "Arrow keys read values" in report.value("document.activeElement.getAttribute('aria-label')")
    report.browser.key("Home")
    assert report.said.startswith("step 0 ")
    report.browser.key("ArrowRight")
    assert report.said.startswith("step 9 ")
    assert report.browser.value("document.querySelector('.readout').getAttribute('aria-live')") == "polite"
    before = report.steps
    report.browser.key("+")
    assert max(report.steps) < max(before)
    report.browser.key("End")
    assert report.said.startswith("step 455 ")
    report.browser.key("Escape")
    assert report.steps == before
    assert report.said == ""


def test_fingers_read_values_enlarge_and_show_all_and_scroll_the_page_as_ever(report: Charts, run: Path) -> None:
    report.browser.screen(PHONE, 844)
    report.value("host.scrollIntoView({block: 'center'})")
    before = report.steps
    report.browser.touch("Start", report.at(300 / 900))
    report.browser.touch("End")
    assert report.said.startswith("step 300 ")
    box = "document.querySelector('.readout').getBoundingClientRect()"
    assert report.browser.value(f"{box}.left >= 0 && {box}.right <= {PHONE}")
    report.browser.touch("Start", report.at(0.4))
    report.browser.touch("Start", report.at(0.4), report.at(0.6))
    report.browser.touch("Move", report.at(0.2), report.at(0.8))
    report.browser.touch("End")
    assert 150 <= min(report.steps) < max(report.steps) <= 750
    for _ in range(2):
        report.browser.touch("Start", report.at(0.5))
        report.browser.touch("End")
    assert report.steps == before
    assert report.value("getComputedStyle(host.querySelector('svg')).touchAction") == "pan-y"


def test_a_phone_shows_the_scores_first_no_cell_wider_than_itself_and_that_a_table_goes_on(report: Charts) -> None:
    report.browser.screen(PHONE, 844)
    assert report.browser.value("document.documentElement.scrollWidth") == PHONE
    widths = "[...document.querySelectorAll('td.long')].map((cell) => cell.getBoundingClientRect().width)"
    assert 0 < report.browser.value(f"Math.max(...{widths})") <= PHONE
    heads = "[...document.querySelectorAll('th')]"
    seen = report.browser.value(
        f"{heads}.filter((head) => head.getBoundingClientRect().right <= {PHONE}).map((head) => head.textContent)"
    )
    assert {"Step", "At", "Accuracy", "Loss"} <= set(seen)
    # The shade lies still, and the paper that hides it at the end of a table moves with the table.
    shade = "getComputedStyle(document.querySelector('.scroll')).backgroundAttachment"
    assert report.browser.value(shade) == "local, local, scroll, scroll"


class Job:
    """A coordinator that has nothing but a run directory."""

    job = manifests.job()

    def glance(self, most: int, observed: object = None) -> tuple[Snapshot, int]:
        best = Score(name="step-000000550", step=550, metric="accuracy", value=0.9833)
        status = Status(phase="Running", progress=Progress(step=600, total_steps=900), best_checkpoint=best)
        return Snapshot(job="digits", time=T0, status=status), 0


@contextmanager
def served(run: Path) -> Iterator[str]:
    """The live page of a run; the address that opens it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def begin() -> tuple[web.AppRunner, str]:
        page, application = LivePage(Job(), "token", RunDir(run)), web.Application()  # type: ignore[arg-type]
        page.add_to(application)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        return runner, f"http://{host}:{port}/open#{page._sessions.invite()}"

    runner, address = asyncio.run_coroutine_threadsafe(begin(), loop).result(60)
    try:
        yield address
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def test_on_the_live_page_what_was_enlarged_stays_so_while_new_pictures_come(browser: Browser, tmp_path: Path) -> None:
    run = make_run(tmp_path / "digits", steps=600, gpus=True)
    log = next(run.glob("log/train-*.jsonl"))
    browser.screen(DESK)
    with served(run) as address:
        charts = Charts(browser, address, "document.getElementById('losses')")
        charts.drag(0.4, 0.6)
        charts.hover(0.5)
        shown, said = charts.steps, charts.said
        assert 235 <= min(shown) < max(shown) <= 365
        old = charts.value("host.innerHTML.length")
        with log.open("a") as file:
            for step in range(601, 801):
                time = T0 + 60 + step / 100
                file.write(json.dumps({"kind": "step", "time": time, "step": step, "loss": 0.5, "lr": 1e-3}) + "\n")
        browser.until(
            lambda: charts.value("Number(host.querySelector('.chart').dataset.high)") == 800, "another picture"
        )
        assert charts.value("host.innerHTML.length") != old
        assert charts.steps == shown
        # The mean is of a 50th of the run, which is longer now.
        assert charts.said.split(" mean of")[0] == said.split(" mean of")[0]
        charts.value("document.querySelector('.reset:not([hidden])').click()")
        assert max(charts.steps) >= 700
        browser.go("about:blank")
    assert browser.complaints == []
