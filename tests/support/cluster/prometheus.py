"""Prometheus and promtool, from Debian's package: only the programs, so that no service is ever started."""

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from tests.support.cluster.machine.places import CACHE
from tests.support.ports import reserved_port

FOLDER = CACHE / "prometheus"
STOP_SECONDS = 20.0


def program(name: str) -> str:
    """The path of `prometheus` or `promtool`; fetched and unpacked if this machine has none."""
    if found := shutil.which(name):
        return found
    unpacked = FOLDER / "usr" / "bin" / name
    if not unpacked.exists():
        _fetch()
    return str(unpacked)


def _fetch() -> None:
    if shutil.which("apt-get") is None:
        pytest.fail("install prometheus and promtool: there is no apt-get here that could fetch them")
    FOLDER.mkdir(parents=True, exist_ok=True)
    for command in (["apt-get", "update", "-qq"], ["apt-get", "download", "-qq", "prometheus"]):
        done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    (package,) = FOLDER.glob("prometheus_*.deb")
    subprocess.run(["dpkg", "-x", package, FOLDER], check=True, timeout=120)
    package.unlink()


class Prometheus:
    def __init__(self, port: int) -> None:
        self._address = f"http://127.0.0.1:{port}/api/v1"

    def now(self, expr: str, at: float | None = None) -> list[dict[str, Any]]:
        """The value of each series of a query at a moment, now by default."""
        found: list[dict[str, Any]] = self._ask("query", query=expr, **({} if at is None else {"time": at}))["result"]
        return found

    def over(self, expr: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """The values of each series of a query over time."""
        asked = self._ask("query_range", query=expr, start=start, end=end, step=step)
        found: list[dict[str, Any]] = asked["result"]
        return found

    def healthy_targets(self) -> set[str]:
        """Names of scrapes whose last one went well."""
        return {target["scrapePool"] for target in self.targets() if target["health"] == "up"}

    def targets(self) -> list[dict[str, Any]]:
        """Every target as it was scraped last."""
        found: list[dict[str, Any]] = self._ask("targets", state="active")["activeTargets"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Every rule as it was evaluated last."""
        return [rule for group in self._ask("rules")["groups"] for rule in group["rules"]]

    def _ask(self, what: str, **query: Any) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(
                f"{self._address}/{what}?{urllib.parse.urlencode(query)}", timeout=30
            ) as answer:
                content = json.load(answer)
        except urllib.error.HTTPError as error:
            pytest.fail(f"{query}: {error.read().decode()}")
        assert content["status"] == "success", content
        data: dict[str, Any] = content["data"]
        return data


@contextmanager
def scraping(
    folder: Path,
    targets: Mapping[str, str],
    with_token: Mapping[str, tuple[str, str]] = MappingProxyType({}),
    rules: Sequence[Path] = (),
    seconds: float = 1.0,
) -> Iterator[Prometheus]:
    """A Prometheus that reads some /metrics, for a while.

    Args:
        folder: for its data and configuration.
        targets: name and host:port of each.
        with_token: name, and host:port and token of each.
        seconds: between two scrapes.
    """
    configuration = folder / "prometheus.yaml"
    scrapes = [
        {"job_name": name, "honor_labels": True, "static_configs": [{"targets": [address]}]}
        for name, address in targets.items()
    ]
    scrapes += [
        {
            "job_name": name,
            "honor_labels": True,
            "static_configs": [{"targets": [address]}],
            "authorization": {"credentials": token},
        }
        for name, (address, token) in with_token.items()
    ]
    body = {
        "global": {"scrape_interval": f"{seconds:g}s", "evaluation_interval": "5s"},
        "rule_files": [str(path) for path in rules],
        "scrape_configs": scrapes,
    }
    configuration.write_text(yaml.safe_dump(body))
    with configured(folder, configuration, program("prometheus")) as found:
        yield found


@contextmanager
def configured(folder: Path, configuration: Path, binary: str | Path) -> Iterator[Prometheus]:
    """A Prometheus with this configuration, for a while; its data and its log go into the folder."""
    port = reserved_port()
    command = [binary, f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=dict(os.environ))
    try:
        deadline = time.monotonic() + 120
        while True:
            assert process.poll() is None, (folder / "prometheus.log").read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/-/ready", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline, (folder / "prometheus.log").read_text()
                time.sleep(0.1)
        yield Prometheus(port)
    finally:
        process.kill()
        process.wait(STOP_SECONDS)
