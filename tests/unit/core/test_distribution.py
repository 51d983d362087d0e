"""The name under which Tandem is installed."""

import re
import subprocess
import tomllib

from tandem.processes import distribution
from tests.support import ROOT

FOREIGN = re.compile(r"pip install [^\n`#]*(?<![\w/.-])tandem(?![\w/-])|(?<![\w/-])tandem\\?\[[a-z{]")
"""A call that installs somebody else's package."""


def test_nothing_tells_a_user_to_install_the_package_of_somebody_else() -> None:
    """Whoever did so would run foreign code."""
    command = ["git", "ls-files", "-z", "*.md", "*.py", "*.toml", "*.sh", "*Dockerfile", "Makefile", "*.yaml"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [
        ROOT / name for name in listed.split("\0") if name and not name.startswith("tests/unit/core/test_distribution")
    ]
    assert len(files) > 500
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in files
        for line in path.read_text("utf-8").splitlines()
        if FOREIGN.search(line) and "Do not type" not in line
    ]
    assert found == []


def test_the_name_is_that_of_the_project_and_the_modules_keep_theirs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (project["name"], list(project["scripts"])) == (distribution.NAME, ["tandem"])
    assert distribution.version() == project["version"]
    assert distribution.install_command("local") == "pip install 'tandem-training[local]'"
