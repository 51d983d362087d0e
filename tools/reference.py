"""The reference page: every field with type, default, bounds and meaning, for people."""

from collections.abc import Iterator
from typing import Any

from tandem.job import API_VERSION, KIND, DistributedTrainingJob
from tandem.manifest.fields import ABSENT, Node, Path, describe, dotted, tree
from tandem.model import Rule, Transition

INTRODUCTION = f"""\
<!-- Generated from core/tandem/job.py by `make generate`; do not edit. -->
# The {KIND}

Every field of a manifest with `apiVersion: {API_VERSION}`. `tandem validate FILE` checks a manifest against
this page; the API server applies the same rules on `kubectl apply`. A field without a default may be left out unless
it is marked *required*. Any field can be set on the command line: `tandem run FILE --set trainer.config.epochs=3`.
"""


def reference_page() -> str:
    """The page as Markdown."""
    root = tree(DistributedTrainingJob)
    parts = [INTRODUCTION]
    for path, node in _groups(root, ()):
        parts.append("\n".join(_section(path, node)))
    return "\n".join(parts)


def _groups(node: Node, path: Path) -> Iterator[tuple[Path, Node]]:
    yield path, node
    for name, child in node.fields.items():
        inner = child.items if child.kind == "list" and child.items else child
        if inner.kind == "object":
            yield from _groups(inner, (*path, name) if inner is child else (*path, name, 0))


def _section(path: Path, node: Node) -> Iterator[str]:
    assert node.model is not None
    title = dotted(path).replace("[0]", "[]")
    yield f"## {title or 'The top of the manifest'}\n"
    yield " ".join((node.model.__doc__ or "").split()) + "\n"
    yield "| field | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, child in node.fields.items():
        cells = [_name(name, child, path), describe(child), _default(child), child.description]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    stated: list[Rule | Transition] = [*node.model.rules, *node.model.transitions]
    notes = [f"- {rule.message[0].upper()}{rule.message[1:]}." for rule in stated]
    notes += [f"- `{name}` cannot be changed once the job exists." for name in node.model.immutable]
    notes += ["- Fields that are not listed are kept as they are."] if node.open else []
    if notes:
        yield "\n" + "\n".join(notes)
    yield ""


def _name(name: str, child: Node, path: Path) -> str:
    inner = child.items if child.kind == "list" and child.items else child
    if inner.kind != "object":
        return f"`{name}`"
    title = dotted((*path, name) if inner is child else (*path, f"{name}[]"))
    title = title.replace("[0]", "[]")
    anchor = "".join(letter for letter in title.lower() if letter.isalnum())
    return f"[`{name}`](#{anchor})"


def _default(node: Node) -> str:
    if node.required:
        return "*required*"
    value: Any = node.default
    if value is ABSENT or value is None or node.kind == "object":
        return ""
    if value == "" or value == {} or value == []:
        return "empty"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, list):
        return f"`[{', '.join(str(item) for item in value)}]`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"
