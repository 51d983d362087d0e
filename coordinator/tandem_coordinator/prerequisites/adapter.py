"""Checks whether a script sets options that an adapter refuses, before a library is imported.

The adapter refuses them when training starts, after torch and the library have been imported on all workers. Here only
literals are read, where a script makes the library's object (`TrainingArguments(…, fsdp=True)`) and among its
arguments (`--fsdp True`). The object may never be used, so the findings are warnings.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tandem.job.adapter_options import (
    CONFIGS_OF_TRL,
    LIGHTNING_CALLBACKS,
    OWN_LOOPS,
    TABLES,
    TRAINING_ARGUMENTS,
    Option,
    is_same,
)

ADAPTERS = "tandem_trainer.adapters."
ADAPTER_OF = {"trl": "transformers"}
"""The adapter of a library that has another name."""
PARSERS = ("HfArgumentParser", "TrlParser")
"""Classes that read the options of `TrainingArguments` from a script's arguments."""
UNDECIDED = ("resume_from_checkpoint", "strategy")
"""Options of which an adapter refuses some values, depending on other options or on the library."""
CALLS = {
    (table.call.partition(".")[0], table.call.rpartition(".")[2]): {
        **(TRAINING_ARGUMENTS.options if table in CONFIGS_OF_TRL.values() else {}),
        **table.options,
    }
    for table in TABLES
}
"""The options of each call, by its library and its last name."""
CLASSES = {"trl": OWN_LOOPS.options, "lightning": LIGHTNING_CALLBACKS.options}
"""Classes that are listed themselves, by their library."""


class RefusedOption(NamedTuple):
    """An option that an adapter refuses."""

    text: str
    """The option as it is written."""
    note: str
    """Reason, and what to use instead."""
    line: int = 0
    """Line of the script."""
    argument: int | None = None
    """Position among the script's arguments, if it is one of those."""


def refused_options(script: ast.Module, args: Sequence[str]) -> Iterator[RefusedOption]:
    """Find what the adapters that a script imports refuse of its options."""
    nodes = list(ast.walk(script))
    names = _imported(nodes)
    adapters = {name.removeprefix(ADAPTERS).partition(".")[0] for name in names.values() if name.startswith(ADAPTERS)}
    for call in nodes:
        if not isinstance(call, ast.Call):
            continue
        first, _, attribute = ast.unparse(call.func).partition(".")
        name = f"{names.get(first, '')}.{attribute}".rstrip(".")
        library, last = name.partition(".")[0], name.rpartition(".")[2]
        if ADAPTER_OF.get(library, library) not in adapters:
            continue
        if (entry := CLASSES.get(library, {}).get(last)) and entry.treatment == "refused":
            yield RefusedOption(last, entry.note, call.lineno)
        options = CALLS.get((library, last), {})
        for keyword in call.keywords:
            if note := _refusal(options, keyword.arg or "", _literal(keyword.value)):
                yield RefusedOption(ast.unparse(keyword), note, keyword.value.lineno)
    if "transformers" in adapters and any(name.rpartition(".")[2] in PARSERS for name in names.values()):
        yield from _among(args)


def _imported(nodes: Sequence[ast.AST]) -> dict[str, str]:
    """Map the names that a script imports to the full ones."""
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                # `import a.b` binds `a`.
                first = alias.name.partition(".")[0]
                names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _among(args: Sequence[str]) -> Iterator[RefusedOption]:
    """Find refused options among the arguments of a script."""
    options = {
        name: option
        for table in (TRAINING_ARGUMENTS, *CONFIGS_OF_TRL.values())
        for name, option in table.options.items()
    }
    for position, (word, following) in enumerate(zip(args, [*args[1:], "--"], strict=True)):
        name, assigned, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            continue
        if not assigned:
            value = "true" if following.startswith("--") else following
        literal = {"true": True, "false": False}.get(value.lower(), value)
        if note := _refusal(options, name, literal):
            yield RefusedOption(f"--{name} {value}" if value else word, note, argument=position)


def _literal(value: ast.expr) -> Any:
    """Return the value of a literal; None, which nothing refuses, for anything else."""
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError):
        return None


def _refusal(options: Mapping[str, Option], name: str, value: Any) -> str:
    """Return why an option is refused with a value; empty if it is not."""
    option = options.get(name)
    if option is None or option.treatment != "refused" or name in UNDECIDED or is_same(value, option.default):
        return ""
    return option.note if value is not None and option.concerns(value) else ""
