"""Generated files of the chart, but for the CRD, dashboards and alerts.

    charts/tandem/files/rights.yaml         permissions of the operator, from tandem_operator.rbac
    charts/tandem/files/rights-queues.yaml  its permissions to read flavors and priority classes
    charts/tandem/files/rights-waits.yaml   its permissions to read places in queues, and who has their quota
    charts/tandem/files/rights-lease.yaml   its permissions in the namespace of its Lease
    charts/tandem/README.md                 every value with its default and meaning, from values.yaml and its comments

In values.yaml a map whose entries have comments is a group of values; any other is one value.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tandem_operator.rbac import lease_rules, queue_rules, rules, wait_rules

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "tandem"

OPENING = """\
<!-- Generated from values.yaml by `make generate`; do not edit. -->
# Values of the chart

```sh
helm install tandem charts/tandem --namespace tandem-system --create-namespace \\
    --set images.registry=registry.example/team
```

Installing, upgrading, what stays after `helm uninstall`, and what to do when something does not work:
[docs/install.md](../../docs/install.md). A value that is not in these tables is refused.
"""
HEAD = "| value | default | meaning |\n|---|---|---|"


def rights_file(policy_rules: list[dict[str, Any]]) -> str:
    """The operator's policy rules as a YAML list, as a Role has them."""
    head = "# Generated from operator/tandem_operator/rbac.py by `make generate`; do not edit.\n"
    return head + yaml.dump(policy_rules, Dumper=_NoAliases, sort_keys=False)


class _NoAliases(yaml.SafeDumper):
    """Writes everything out, without anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def values_page() -> str:
    """The page with all values, a table for each group at the top.

    Raises:
        ValueError: a value has no comment.
    """
    text = (CHART / "values.yaml").read_text(encoding="utf-8")
    root = yaml.compose(text)
    assert isinstance(root, yaml.MappingNode)
    top = list(_entries(root, text.splitlines()))
    single = [row for path, entry in top if not entry.fields for row in _rows(path, entry)]
    parts = [OPENING, "\n".join([HEAD, *single]) + "\n"]
    for path, entry in top:
        if entry.fields:
            rows = [row for name, field in entry.fields for row in _rows(f"{path}.{name}", field)]
            parts.append("\n".join([f"## {path}\n\n{entry.comment}\n\n{HEAD}", *rows]) + "\n")
    return "\n".join(parts)


FILES: Mapping[str, Callable[[], str]] = {
    "charts/tandem/files/rights.yaml": lambda: rights_file(rules()),
    "charts/tandem/files/rights-queues.yaml": lambda: rights_file(queue_rules()),
    "charts/tandem/files/rights-waits.yaml": lambda: rights_file(wait_rules()),
    "charts/tandem/files/rights-lease.yaml": lambda: rights_file(lease_rules()),
    "charts/tandem/README.md": values_page,
}
"""Paths below the repository's root, each with the function that generates the content."""


@dataclass(frozen=True)
class ChartValue:
    """One value of values.yaml, or a group of them."""

    comment: str
    default: Any
    fields: "list[tuple[str, ChartValue]]"


def _entries(node: yaml.MappingNode, lines: list[str]) -> Iterator[tuple[str, ChartValue]]:
    for key, value in node.value:
        comment = _comment(lines, key.start_mark.line)
        if not comment:
            raise ValueError(f"values.yaml:{key.start_mark.line + 1}: there is no comment above {key.value!r}")
        is_group = isinstance(value, yaml.MappingNode) and any(
            _comment(lines, inner.start_mark.line) for inner, _ in value.value
        )
        fields = list(_entries(value, lines)) if is_group else []
        yield key.value, ChartValue(comment, yaml.safe_load(yaml.serialize(value)), fields)


def _comment(lines: list[str], line: int) -> str:
    """The comment directly above a line."""
    comment: list[str] = []
    while line > 0 and (above := lines[line - 1].strip()).startswith("#"):
        comment.insert(0, above.lstrip("# "))
        line -= 1
    return " ".join(comment)


def _rows(path: str, entry: ChartValue) -> Iterator[str]:
    default = "" if entry.fields else f"`{json.dumps(entry.default, ensure_ascii=False)}`"
    name = f"*{path}*" if entry.fields else f"`{path}`"
    yield f"| {name} | {default} | {entry.comment} |"
    for inner, field in entry.fields:
        yield from _rows(f"{path}.{inner}", field)


def main(program: str, files: Mapping[str, Callable[[], str]]) -> int:
    """Write the files below the repository's root; with --check only compare them.

    Args:
        program: name of the program in its help.
        files: paths below the root, each with the function that generates the content.

    Returns:
        0: the files are up to date; 1: `--check` found stale ones.
    """
    parser = argparse.ArgumentParser(prog=program, description="Write the generated files.")
    parser.add_argument("--check", action="store_true", help="write nothing; end with 1 if a file is stale")
    parser.add_argument("--root", type=Path, default=Path(), help="the repository's root (default: this folder)")
    options = parser.parse_args()
    stale = []
    for name, content in files.items():
        path, text = options.root / name, content()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not options.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{name} is stale; run: make generate" if options.check else f"wrote {name}")
    return 1 if options.check and stale else 0
