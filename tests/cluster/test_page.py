"""The live page in a real Chromium: of a run on this machine, and of a job on the cluster through `tandem open`."""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.cluster.browser import Browser
from tests.support.cluster.operated import Job, Operator, manifest
from tests.support.cluster.pods import Namespace
from tests.support.local_run import LocalRun
from tests.support.processes import TANDEM, tandem
from tests.support.waiting import until

ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/open#[A-Za-z0-9_-]+")
LONG = ("--set", "trainer.loop.epochs=4000", "--set", "evaluators.processesPerReplica=1")
PHONE, DESK = 390, 1280

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def browser() -> Iterator[Browser]:
    with Browser() as made:
        made.screen(DESK)
        yield made


def address_of(run: Path) -> str:
    said = tandem("open", run, "--print")
    return said.stdout.strip()


def step(browser: Browser) -> int:
    found = re.search(r"step ([0-9,]+)", browser.text("head"))
    return int(found[1].replace(",", "")) if found else 0


def pictures(browser: Browser) -> int:
    return int(browser.value("document.querySelectorAll('#losses svg, #speed svg, #use svg').length"))


def box(browser: Browser) -> str:
    return str(browser.value("document.querySelector('#speed svg')?.getAttribute('viewBox') || ''"))


def test_a_run_on_this_machine_is_seen_live_over_the_death_of_its_coordinator_and_to_its_end(
    browser: Browser, tmp_path: Path
) -> None:
    with LocalRun(tmp_path, *LONG) as run:
        run.reaches(50)
        address = address_of(run.path)
        browser.go(address)
        browser.until(lambda: pictures(browser) == 3, "three pictures")
        assert urlsplit(str(browser.value("location.href"))).path.startswith("/page/")
        assert browser.value("location.hash + document.cookie") == ""
        assert address.partition("#")[2] not in str(browser.value("document.documentElement.outerHTML"))

        # Numbers and pictures change by themselves: nobody loads the page again.
        browser.value("window.sinceTheBeginning = true")
        before, shown = step(browser), browser.value("document.getElementById('losses').innerHTML")
        browser.until(lambda: step(browser) > before, "another step")
        browser.until(lambda: browser.value("document.getElementById('losses').innerHTML") != shown, "another picture")
        assert "evaluated" in browser.until(lambda: browser.text("checkpoints"), "checkpoints")
        drawn = "getComputedStyle(document.querySelector('#speed svg path[stroke]')).stroke"
        light = browser.value(drawn)
        browser.screen(DESK, dark=True)
        assert browser.value(drawn) != light

        # A phone has its own pictures, and nothing that sticks out.
        browser.screen(PHONE, 844)
        browser.until(lambda: box(browser).startswith("0 0 358"), "pictures for a phone")
        assert browser.value("document.documentElement.scrollWidth") == PHONE

        killed = run.of("coordinator")
        assert killed is not None
        killed.send_signal(signal.SIGSTOP)
        browser.until(lambda: "has not answered since" in browser.text("banner"), "that it is lost", 30)
        assert browser.value("document.body.className") == "stale"
        killed.kill()
        last = step(browser)
        browser.until(lambda: not browser.text("banner") and step(browser) > last, "that it is back", 60)
        assert "generation 1 with 2 replicas" in browser.text("events")

        run.interrupt()
        assert run.ends() == 130
        browser.until(lambda: "has not answered since" in browser.text("banner"), "that it is gone", 30)
        assert browser.value("window.sinceTheBeginning")
    assert browser.complaints == []


def test_the_page_says_how_a_run_ended(browser: Browser, tmp_path: Path) -> None:
    with LocalRun(tmp_path, "--set", "trainer.loop.epochs=60", "--set", "evaluators.processesPerReplica=1") as run:
        run.reaches(10)
        browser.go(address_of(run.path))
        browser.until(lambda: "The job is over" in browser.text("banner"), "the end", 180)
        assert "Succeeded" in browser.text("head")
        assert "step 1,380 of 1,380" in browser.text("head")
        assert run.ends() == 0
    browser.go("about:blank")
    assert browser.complaints == []


def test_an_invitation_that_was_used_says_what_to_do(browser: Browser, tmp_path: Path) -> None:
    with LocalRun(tmp_path, *LONG) as run:
        run.reaches(1)
        address = address_of(run.path)
        browser.go(address)
        browser.until(lambda: browser.text("head"), "the page")
        browser.go("about:blank")
        browser.go(address)
        browser.until(lambda: "this invitation was used" in browser.text("said"), "the refusal")
        assert "tandem open" in browser.text("how")


def test_a_job_on_the_cluster_is_opened_through_kubectl_and_found_again_after_its_coordinator_was_deleted(
    browser: Browser, namespace: Namespace, operator: Operator, tmp_path: Path
) -> None:
    job = Job(namespace, "seen")
    whole = manifest("seen")
    whole["spec"]["trainer"]["loop"]["epochs"] = 5000
    job.apply(whole)
    job.trains()
    said, told = tmp_path / "said.txt", tmp_path / "told.txt"
    with said.open("w") as out, told.open("w") as errors:
        command = [TANDEM, "open", "seen", "-n", namespace.name, "--print"]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env={**os.environ, "COLUMNS": "200"}
        )
    try:
        until(lambda: ADDRESS.search(said.read_text()), "the address", 60.0, otherwise=told.read_text)
        found = ADDRESS.search(said.read_text())
        assert found is not None
        browser.go(found[0])
        browser.until(lambda: pictures(browser) == 3, "three pictures", 90)
        before = step(browser)
        browser.until(lambda: step(browser) > before, "another step")
        namespace("delete", "pod", "-l", "tandem.dev/job=seen,tandem.dev/role=coordinator", "--wait=false")
        browser.until(lambda: "has not answered since" in browser.text("banner"), "that it is lost", 60)
        last = step(browser)
        browser.until(lambda: not browser.text("banner") and step(browser) > last, "that it is back", 180)
        assert "the job starts" in browser.text("generations")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.wait(20)
        namespace("delete", "dtj", "seen", "--wait=false")
    assert browser.complaints == []
