"""A rank of Tandem's own loop that starts cold."""

import os
import subprocess
from pathlib import Path

from tandem.processes.exitcode import ExitCode
from tandem.processes.launch import RUN_DIR, module_command
from tandem.rundir.code import Code


def test_a_file_of_the_jobs_code_takes_no_name_of_what_tandem_imports(tmp_path: Path) -> None:
    code = Code(tmp_path / "tandem-code-0123")
    code.folder.mkdir()
    for name in ("logging", "random", "yaml"):
        (code.folder / f"{name}.py").write_text("raise SystemExit(99)")
    variables = {name: value for name, value in os.environ.items() if name != RUN_DIR}
    ended = subprocess.run(
        module_command("tandem_trainer"),
        cwd=code.folder,
        env=variables | code.variables(variables),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == ExitCode.CONFIGURATION, ended.stderr
    assert f"set {RUN_DIR}" in ended.stdout
