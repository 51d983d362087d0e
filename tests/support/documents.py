"""The blocks of code in README and docs, what comments that nobody sees say of them, and whether a command exists.

A comment right before a block says how it is meant:

    <!-- not run: needs a cluster -->    it is only parsed, and the reason stands there
    <!-- beside a run -->                it is run while `tandem run examples/digits.yaml` goes on in that folder
    <!-- given: PYTHON -->               what a Python block takes for granted, run before it
    <!-- full tier -->                   it takes long, and is run in the full tier alone

All other blocks of sh and Python are run as they stand, in a folder that is a checkout with a complete `runs/digits`.
"""

import ast
import importlib
import re
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer.core
import typer.main
import yaml

from tandem.errors import UserError
from tandem.job.manifest.reading import parse_job
from tandem.job.manifest.source import parse
from tandem.job.resource import Spec
from tandem_cli.main import application
from tests.support import ROOT

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
_BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^ *```$", re.DOTALL | re.MULTILINE)
_MARK = re.compile(
    r"<!-- (?P<word>not run: |beside a run|full tier|given:\s)(?P<rest>(?:(?!-->).)*?)\s*-->\s*\Z", re.DOTALL
)
_INLINE = re.compile(r"`((?:tandem|make) [^`\n]+)`")
KUBECTL = {
    *("annotate", "apply", "auth", "config", "create", "delete", "describe", "exec", "get", "label", "logs", "patch"),
    *("port-forward", "rollout", "scale", "wait"),
}
HELM = {"install", "upgrade", "uninstall", "template", "rollback", "get", "list"}
# What typer raises for a wrong command line; it has no public name for it.
_USAGE: Any = typer.BadParameter.__mro__[1]
OTHERS = {".", "eval", "git", "module", "openssl", "pip", "python", "python3", "sacctmgr", "sinfo", "torchrun"}


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    not_run: str = ""
    """Why it is only parsed."""
    beside_a_run: bool = False
    given: str = ""
    """Python that it takes for granted."""
    in_full_tier: bool = False
    """Whether it is run in the full tier alone."""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """The blocks of a page. One that shows a session has only what was typed, after `$ `."""
    return list(_blocks(page, page.read_text()))


def blocks_of(text: str) -> list[Block]:
    """The blocks of a text, for tests of what is here."""
    return list(_blocks(ROOT / "text.md", text))


def _blocks(page: Path, whole: str) -> Iterator[Block]:
    for found in _BLOCK.finditer(whole):
        language, text = found["language"], textwrap.dedent(found["text"])
        typed = [line[2:] for line in text.splitlines() if line.startswith("$ ")]
        if not language and typed:
            language, text = "sh", "\n".join(typed) + "\n"
        mark = _MARK.search(whole[: found.start()])
        word, rest = (mark["word"].strip(), mark["rest"]) if mark else ("", "")
        yield Block(
            page,
            whole.count("\n", 0, found.start()) + 1,
            language,
            text,
            not_run=rest if word == "not run:" else "",
            beside_a_run=word == "beside a run",
            given=rest if word == "given:" else "",
            in_full_tier=word == "full tier",
        )


def inline_commands(page: Path) -> list[tuple[int, str]]:
    """Commands within sentences, each with its line."""
    text = _BLOCK.sub(lambda found: "\n" * found[0].count("\n"), page.read_text())
    return [(text.count("\n", 0, found.start()) + 1, found[1]) for found in _INLINE.finditer(text)]


def problems(block: Block) -> list[str]:
    """What is wrong with a block without running it."""
    try:
        if block.language == "sh":
            return [wrong for words in commands(block.text) if (wrong := command_problem(words))]
        if block.language == "python":
            return _python_problems(f"{block.given}\n{block.text}")
        if block.language == "yaml":
            return _yaml_problems(block.text)
    except (ValueError, SyntaxError, yaml.YAMLError, UserError) as error:
        return [str(error)]
    return []


def commands(text: str) -> list[list[str]]:
    """The simple commands of a shell script. Of here-documents and loops there are none in documentation."""
    found: list[list[str]] = []
    for line in re.sub(r"\\\n", " ", re.sub(r"\|\n", "| ", text)).splitlines():
        words: list[str] = []
        # A list of words keeps `$(…)` within quotes as one of them.
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
        lexer.whitespace_split = True
        for word in lexer:
            if set(word) <= set("|&;"):
                found.append(words)
                words = []
            else:
                words.append(word)
        found.append(words)
    return [words for words in found if words]


def command_problem(words: list[str], in_a_sentence: bool = False) -> str:
    """Why a command cannot be right; empty if it may be.

    Args:
        in_a_sentence: what it needs may be left out there.
    """
    name, rest = words[0], words[1:]
    if name == "tandem":
        return _tandem_problem(rest, in_a_sentence)
    if name == "make":
        targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        unknown = [word for word in rest if "=" not in word and not word.startswith("-") and word not in targets]
        return f"make has no target {unknown[0]}" if unknown else ""
    if name in ("kubectl", "helm"):
        verb = _verb(rest)
        return "" if verb in (KUBECTL if name == "kubectl" else HELM) else f"{name} {verb}: not a known command"
    if "=" in name or name in OTHERS:
        return ""
    return f"{name}: not a command that is known here"


def _verb(words: list[str]) -> str:
    skip = False
    for word in words:
        if skip or word.startswith("-"):
            skip = not skip and word in ("-n", "--namespace", "--context")
            continue
        return word
    return ""


def _tandem_problem(words: list[str], in_a_sentence: bool) -> str:
    command: Any = typer.main.get_command(application(words))
    if words and any(words[0] in parameter.opts for parameter in command.params):
        # Of `tandem` itself: it would be carried out.
        return ""
    context, rest, called = None, list(words), "tandem"
    try:
        while isinstance(command, typer.core.TyperGroup):
            context = command.make_context(called, rest, parent=context)
            name, *rest = [*context._protected_args, *context.args]
            if name not in command.commands:
                return f"{called} has no command {name}"
            command, called = command.commands[name], f"{called} {name}"
        command.make_context(called, rest, parent=context)
    except typer.Exit:
        return ""
    except _USAGE as error:
        lacks = type(error).__name__ in ("MissingParameter", "NoArgsIsHelpError")
        return "" if lacks and in_a_sentence else f"tandem {shlex.join(words)}: {error.format_message()}"
    return ""


def plain(sentence: str) -> list[str]:
    """A command within a sentence, or a synopsis, as words that could be typed."""
    words = re.sub(r"[\[\]]", "", sentence.split(" | ")[0].split(" && ")[0]).replace("…", "")
    return ["1" if word == "N" else word.split("|")[0] for word in shlex.split(words, comments=True)]


def _python_problems(text: str) -> list[str]:
    tree = ast.parse(text)
    wrong = []
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0].startswith(("tandem", "tests"))
        ):
            module = importlib.import_module(node.module)
            wrong += [f"{node.module} has no {one.name}" for one in node.names if not hasattr(module, one.name)]
    return wrong


def _yaml_problems(text: str) -> list[str]:
    for content in yaml.safe_load_all(text):
        keys = set(content) if isinstance(content, dict) else set()
        fields = {field.alias or name for name, field in Spec.model_fields.items()}
        if content.get("kind") == "DistributedTrainingJob":
            parse_job(parse(text.encode(), "block"))
        elif keys == {"spec"} or keys <= fields:
            _check_part_of_a_job(content["spec"] if keys == {"spec"} else content)
        elif keys <= set(values := yaml.safe_load((ROOT / "charts/tandem/values.yaml").read_text())):
            return [f"the chart has no value {path}" for path in _unknown(content, values)]
    return []


def _check_part_of_a_job(part: dict[str, Any]) -> None:
    whole = yaml.safe_load((ROOT / "examples/digits.yaml").read_text())
    if "preload" in part.get("elasticity", {}):
        whole = yaml.safe_load((ROOT / "examples/own-script.yaml").read_text())
    if ":" in part.get("trainer", {}).get("task", ""):
        whole = yaml.safe_load((ROOT / "examples/own-task.yaml").read_text())
    parse_job(parse(yaml.safe_dump(_merged(whole, {"spec": part})).encode(), "block"))


def _merged(whole: Any, part: Any) -> Any:
    if isinstance(whole, dict) and isinstance(part, dict):
        return {**whole, **{key: _merged(whole.get(key), value) for key, value in part.items()}}
    return part


def _unknown(given: Any, known: Any, path: str = "") -> Iterator[str]:
    # An empty mapping takes what the user likes.
    if isinstance(given, dict) and isinstance(known, dict) and known:
        for key, value in given.items():
            if key not in known:
                yield f"{path}{key}"
            else:
                yield from _unknown(value, known[key], f"{path}{key}.")
