"""The reference page of exit codes: every one with its name and meaning, for people."""

import ast
import inspect

from tandem.exitcode import OF_COMMANDS, ExitCode

HEAD = """\
<!-- Generated from core/tandem/exitcode.py by `make generate`; do not edit. -->
# Exit codes

`tandem run` ends with the codes marked in the second column, every other `tandem` command with 0, 1, 2 or 130. The
others are those of training processes, agents, evaluators and coordinators, as they stand in logs, pods and events.

| code | `tandem` | name | meaning |
|---|---|---|---|
"""
FOOT = """
A script of your own may end with any code; other than 0, it has failed, whatever the code means here. Of a process
that a signal has ended, messages name the signal (`was killed by signal 9 (SIGKILL)`); a shell, and Kubernetes, say 128
plus its number. 137 is SIGKILL, which the kernel also sends when memory runs out.
"""


def exits_page() -> str:
    """The page as Markdown."""
    meanings = _meanings()
    rows = [
        f"| {code.value} | {'yes' if code in OF_COMMANDS else ''} | `{code.name}` | {meanings[code.name]} |"
        for code in ExitCode
    ]
    return HEAD + "\n".join(rows) + "\n" + FOOT


def _meanings() -> dict[str, str]:
    """What stands below each member in the source."""
    body = ast.parse(inspect.getsource(ExitCode)).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for member, words in zip(body.body, body.body[1:], strict=False):
        if isinstance(member, ast.Assign) and isinstance(member.targets[0], ast.Name):
            assert isinstance(words, ast.Expr)
            found[member.targets[0].id] = " ".join(str(ast.literal_eval(words.value)).split())
    return found
