"""`tandem plan` as a user calls it, with a task that is really traced."""

import json

from tests.support.processes import tandem


def test_a_job_is_planned_as_its_manifest_says() -> None:
    words = ("examples/minigpt.yaml", "--device-memory", "80GB", "--workers", "1,2", "--price-per-hour", "2.5")
    result = tandem("plan", *words, "--json")
    assert result.returncode == 0, result.stderr
    assert "plan: traces a step of 32 samples" in result.stderr
    told = json.loads(result.stdout)
    assert told["recommendation"] == "ddp on 2 workers fits with 72.5 GiB to spare; fsdp is not needed."
    rows = {row["strategy"]: row for row in told["rows"]}
    assert list(rows) == ["single", "ddp", "fsdp"]
    # Measured by benchmarks/plan_error.py: 46.7 MiB.
    assert abs(rows["single"]["memory"]["peak"] / 46.7 / 2**20 - 1) < 0.1
    assert 0 < rows["ddp"]["seconds"]["compute"] < rows["single"]["seconds"]["compute"]
    assert rows["ddp"]["cost"] > 0
