"""The reference pages: every field of a job, every metric and every exit code, for people."""

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from textwrap import dedent
from typing import Any, get_args

from tandem.job.adapter_options import TABLES, Option, Table
from tandem.job.manifest.fields import ABSENT, Node, Path, dotted, tree, with_trainer
from tandem.job.resource import API_VERSION, KIND, DistributedTrainingJob
from tandem.job.sweep import SWEEP_KIND, Sweep
from tandem.job.tasks import ImageParameters
from tandem.model import Model, Rule, Transition
from tandem.processes.exitcode import COMMAND_EXIT_CODES, ExitCode
from tandem.rundir import records
from tandem.rundir.records import Record
from tandem.wire.metrics import ALL, COMMON, OPERATOR, Metric, OperatorMetric

JOB_HEAD = f"""\
<!-- Generated from core/tandem/job/resource.py by `make generate`; do not edit. -->
# The {KIND}

Every field of a manifest with `apiVersion: {API_VERSION}`. `tandem validate FILE` checks a manifest against
this page; the API server applies the same rules on `kubectl apply`. A field without a default may be left out unless
it is marked *required*. Any field can be set on the command line: `tandem run FILE --set trainer.loop.epochs=3`.
"""
SWEEP_HEAD = f"""\
<!-- Generated from core/tandem/job/sweep.py by `make generate`; do not edit. -->
# The {SWEEP_KIND}

Every field of a file with `kind: {SWEEP_KIND}`, for `tandem sweep` ([sweeps.md](../sweeps.md)). `tandem validate FILE`
checks it.
"""
METRICS_HEAD = """\
<!-- Generated from core/tandem/wire/metrics.py by `make generate`; do not edit. -->
# Metrics

A job's coordinator answers `/metrics` on port 7070 with the job's token, and on port 7071 without it (on a laptop with
`tandem run --metrics-port 7071`, for this machine alone). The operator answers on port 8080. Series of a rank, a worker
or an evaluator disappear with it, and those of a job with its coordinator.

The chart's monitors set `job` and `namespace` from the scraped pod, so that no pod can export another job's metrics.
If you scrape in another way, set `honorLabels: true`, and scrape only pods that you trust. Counters restart with their
process; `rate` and `increase` handle that. A value that is not known is absent, never 0.
"""
EXITS_HEAD = """\
<!-- Generated from core/tandem/processes/exitcode.py by `make generate`; do not edit. -->
# Exit codes

`tandem run` ends with the codes marked in the second column, every other `tandem` command with 0, 1, 2 or 130. The
others are those of training processes, agents, evaluators and coordinators, as shown in logs, pods and events.

| code | `tandem` | name | meaning |
|---|---|---|---|
"""
EXITS_FOOT = """
A script of your own may exit with any code; with a code other than 0 it has failed, whatever the code means here. A
code of a training process has the meaning above only if Tandem chose it: in a built-in task, a session or an adapter.
Messages name the signal that killed a process (`was killed by signal 9 (SIGKILL)`); a shell, and Kubernetes, report 128
plus its number. 137 is SIGKILL, which the kernel also sends when memory runs out. Where the kernel's counter shows that
it did, the message says so: `killed by the kernel (SIGKILL): the memory limit of 2 GB is used up`.
"""


def sweep_page() -> str:
    """The page as Markdown."""
    return _fields_page(SWEEP_HEAD, tree(Sweep).fields["spec"], ("spec",))


def job_page() -> str:
    """The page as Markdown."""
    root = tree(DistributedTrainingJob)
    description = root.fields["spec"].fields["trainer"].fields["parameters"].description
    images = replace(tree(ImageParameters), description=description, required=False, default=ABSENT)
    return _fields_page(JOB_HEAD, with_trainer(root, parameters=images), ())


def _fields_page(head: str, root: Node, top: Path) -> str:
    """A page with a section for each group of fields.

    Args:
        top: path of the root.
    """
    sections: dict[str, tuple[Path, Node]] = {}
    for path, node in _groups(root, top):
        sections.setdefault(_model(node), (path, node))
    places = {name: path for name, (path, _) in sections.items()}
    return "\n".join([head, *("\n".join(_section(path, node, places)) for path, node in sections.values())])


ENTRIES: Mapping[str, str | int] = {"list": 0, "map": "NAME"}
"""Place of an entry in a path, by the kind that has entries."""


def _groups(node: Node, path: Path) -> Iterator[tuple[Path, Node]]:
    yield path, node
    for name, child in node.fields.items():
        inner = child.items if child.kind in ENTRIES and child.items else child
        if inner.kind == "object" and not child.deprecated:
            yield from _groups(inner, (*path, name) if inner is child else (*path, name, ENTRIES[child.kind]))


def _model(node: Node) -> str:
    assert node.model is not None
    return node.model.__name__


def _section(path: Path, node: Node, places: Mapping[str, Path]) -> Iterator[str]:
    """The section of a group of fields, which stands once for all places that have such a group.

    Args:
        places: path of each section, by the name of its model.
    """
    assert node.model is not None
    title = dotted(path).replace("[0]", "[]")
    yield f"## {title or 'The top of the manifest'}\n"
    yield " ".join((node.model.__doc__ or "").split()) + "\n"
    yield "| field | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, child in node.fields.items():
        inner = child.items if child.kind in ENTRIES and child.items else child
        cells = [_name(name, inner, places), _kind(child), _default(child), child.description]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    stated: list[Rule | Transition] = [*node.model.rules, *node.model.transitions]
    notes = list(dict.fromkeys(f"- {rule.message[0].upper()}{rule.message[1:]}." for rule in stated))
    notes += [f"- `{name}` cannot be changed once the job exists." for name in node.model.immutable]
    notes += ["- Fields that are not listed are kept as they are."] if node.open else []
    if notes:
        yield "\n" + "\n".join(notes)
    yield ""


def _name(name: str, inner: Node, places: Mapping[str, Path]) -> str:
    if inner.kind != "object" or inner.deprecated:
        return f"`{name}`"
    title = dotted(places[_model(inner)]).replace("[0]", "[]")
    anchor = "".join(letter for letter in title.lower() if letter.isalnum())
    return f"[`{name}`](#{anchor})"


def _kind(node: Node) -> str:
    """The type of a field and the bounds of a number, for a cell of a table."""
    if node.choices:
        return ", ".join(f"`{choice}`" for choice in node.choices)
    bounds = ((">", node.exclusive_minimum), ("≥", node.minimum), ("<", node.exclusive_maximum), ("≤", node.maximum))
    limits = [f"{sign} {bound:,.12g}" for sign, bound in bounds if bound is not None]
    match node.kind:
        case "list":
            if node.items is None:
                return "list"
            return f"list of {'groups' if node.items.kind == 'object' else _kind(node.items)}"
        case "object":
            return "group"
        case "number":
            return ", ".join(["number or text" if node.or_text else "number", *limits])
    return ", ".join([node.kind, *limits])


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


def metrics_page() -> str:
    """The page as Markdown."""
    jobs = ["## A job", "", f"Each also has the labels {' and '.join(f'`{name}`' for name in COMMON)}.", ""]
    return "\n".join([METRICS_HEAD, *jobs, *_metrics(ALL), "", "## The operator", "", *_metrics(OPERATOR), ""])


def _metrics(metrics: tuple[Metric, ...] | tuple[OperatorMetric, ...]) -> Iterator[str]:
    yield "| name | kind | labels | meaning |"
    yield "|---|---|---|---|"
    for metric in metrics:
        own = metric.own if isinstance(metric, Metric) else metric.labels
        yield f"| `{metric.name}` | {metric.kind} | {', '.join(f'`{label}`' for label in own)} | {metric.help} |"


def exits_page() -> str:
    """The page as Markdown."""
    meanings = _meanings()
    rows = [
        f"| {code.value} | {'yes' if code in COMMAND_EXIT_CODES else ''} | `{code.name}` | {meanings[code.name]} |"
        for code in ExitCode
    ]
    return EXITS_HEAD + "\n".join(rows) + "\n" + EXITS_FOOT


def _meanings() -> dict[str, str]:
    """The docstring below each member in the source."""
    body = ast.parse(inspect.getsource(ExitCode)).body[0]
    assert isinstance(body, ast.ClassDef)
    meanings = {}
    for member, docstring in zip(body.body, body.body[1:], strict=False):
        if isinstance(member, ast.Assign) and isinstance(member.targets[0], ast.Name):
            assert isinstance(docstring, ast.Expr)
            meanings[member.targets[0].id] = " ".join(str(ast.literal_eval(docstring.value)).split())
    return meanings


HEAD = """\
<!-- Generated from core/tandem/rundir/records.py by `make generate`; do not edit. -->
# Logs of a run

The folder `log/` of a run directory contains logs for people, reports and your own programs; no process of a job
depends on them. Each file has one writer and one JSON object a line: `kind` is the type of the record, `time` is in
seconds since the epoch. A value that is not known is absent, and a loss may be `NaN` or `Infinity`.

A line may be torn by a crash or a full disk, and the last one may be incomplete: skip lines that are not JSON. Also
skip kinds and fields that are not listed here: a newer version may write them. Where two generations log the same step,
the later one counts.

    jq -r 'select(.kind == "step") | [.step, .loss] | @tsv' runs/digits/log/train-g000001.jsonl

The output of the processes of `tandem run` is in `log/worker-0.txt`, `log/coordinator.txt` and so on. At 64 MiB such a
file is moved to `log/worker-0.txt.1`, in place of an older one.
"""
LOGS = (
    ("log/train-g000007.jsonl", "Written by rank 0 of generation 7.", records.TrainingRecord),
    ("log/coordinator.jsonl", "Written by the coordinator.", records.CoordinatorRecord),
    ("log/evaluator-NAME.jsonl", "Written by each process that evaluates.", records.EvaluatorRecord),
)
TYPES = {
    "WholeNumber": "integer",
    "Count": "integer",
    "int": "integer",
    "Number": "number",
    "float | None": "number",
    "Anything": "number",
    "Amount": "number ≥ 0",
    "Seconds": "seconds",
    "Timestamp": "time",
    "Amounts": "map",
    "UsageByPurpose": "map",
    "UsageByPurpose | None": "map",
    "Text": "text",
    "Texts": "list",
    "PlainName": "text",
}
"""Types of fields by their annotations; everything else is text."""


@dataclass(frozen=True)
class Described:
    """A documented field."""

    name: str
    kind: str
    meaning: str


def logs_page() -> str:
    """The page as Markdown."""
    return "\n".join([HEAD, *(line for log in LOGS for line in _log(*log))])


def _log(path: str, writer: str, union: Any) -> Iterator[str]:
    yield f"## `{path}`\n\n{writer}\n"
    for record in get_args(union):
        yield f"### `{record.model_fields['kind'].default}`\n\n{_one_line(record.__doc__)}\n"
        if fields := list(described(record)):
            yield "| field | type | meaning |\n|---|---|---|"
            yield from (f"| `{field.name}` | {field.kind} | {field.meaning} |" for field in fields)
            yield ""


def described(record: type[Record]) -> Iterator[Described]:
    """The fields of a record, except those that every line has."""
    for base in reversed(record.__mro__):
        if base in (Record, Model) or not issubclass(base, Model):
            continue
        body = ast.parse(dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, docstring in zip(body.body, [*body.body[1:], None], strict=True):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            name = statement.target.id
            if name == "kind" or name not in record.model_fields:
                continue
            meaning = (
                docstring.value.value
                if isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)
                else ""
            )
            alias = record.model_fields[name].alias or name
            yield Described(alias, TYPES.get(ast.unparse(statement.annotation), "text"), _one_line(str(meaning)))


def _one_line(text: str | None) -> str:
    return " ".join((text or "").split())


OPTIONS_HEAD = """\
<!-- Generated from core/tandem/job/adapter_options.py by `make generate`; do not edit. -->
# Options of libraries under an adapter

Support of the [adapters](../adapters.md) for each option of Hugging Face's Trainer, TRL, accelerate and Lightning.

- *exact*: the option works as its library documents it, and a run that was killed and resumed ends with the weights of
  an undisturbed run.
- *condition*: exact under the condition in the note.
- *warned*: the option does less than its library documents. The log says so at each start.
- *refused*: the run ends at once, with a message that names the option and its replacement.

An option of a newer library version that is not listed here causes a warning by name if you set it.
"""


def options_page() -> str:
    """The page as Markdown."""
    return "\n".join([OPTIONS_HEAD, *(line for table in TABLES for line in _options(table))])


def _options(table: Table) -> Iterator[str]:
    yield f"## `{table.call}`\n"
    exact = [f"`{name}`" for name, option in table.options.items() if option.treatment == "exact"]
    if exact:
        yield f"Exact: {', '.join(exact)}.\n"
    limited = [(name, option) for name, option in table.options.items() if option.treatment != "exact"]
    if limited:
        alike: dict[tuple[str, str], list[str]] = {}
        for name, option in limited:
            alike.setdefault((_treatment(option), option.note), []).append(f"`{name}`")
        yield "| option | treatment | note |\n|---|---|---|"
        yield from (f"| {', '.join(names)} | {kind} | {note}. |" for (kind, note), names in alike.items())
        yield ""


def _treatment(option: Option) -> str:
    values = ", ".join(f"`{value}`" for value in option.values)
    return f"{option.treatment}: {values}" if values else option.treatment
