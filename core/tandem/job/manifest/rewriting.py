"""Rewrites a manifest of the version before in the current form: `spec.trainer.config` becomes `parameters` and `loop`.

The text is edited, and not the data written anew: comments, order and quotes stay. The result is parsed, and a manifest
that would mean anything else is refused.
"""

from itertools import pairwise

from yaml import compose, scan
from yaml.nodes import CollectionNode, MappingNode, Node, ScalarNode

from tandem.errors import ManifestError, UserError
from tandem.job.manifest.reading import parse_job
from tandem.job.manifest.source import parse
from tandem.job.resource import DistributedTrainingJob
from tandem.job.tasks import ImageParameters, Loop

Pair = tuple[ScalarNode, Node]


def rewritten(text: str, file: str) -> str:
    """The text of a valid manifest without `spec.trainer.config`.

    Raises:
        UserError: only a person can do it; for instance, a group there is merged from elsewhere.
    """
    trainer = _pair(_pair(compose(text), "spec"), "trainer")
    if (pair := _pair(trainer, "config")) and _is_plain(text, *pair):
        changed = _with_two_groups(text, *pair, _is_inline(trainer and trainer[1]))
        try:
            if _meaning(changed, file) == _meaning(text, file):
                return changed
        except ManifestError:
            pass  # an anchor that stood in the group is used elsewhere, for instance
    raise UserError(
        f"{file}: config has an alias, an anchor, a merged group, a comment between braces or a field without a value, "
        "and is not rewritten; move its fields to loop and parameters"
    )


def _pair(parent: Node | Pair | None, name: str) -> Pair | None:
    """The key and the value of a group's member; None if it has none of its own, but a merged one."""
    group = parent[1] if isinstance(parent, tuple) else parent
    members: list[Pair] = group.value if isinstance(group, MappingNode) else []
    return next((pair for pair in members if pair[0].value == name), None)


def _is_plain(text: str, key: ScalarNode, config: Node) -> bool:
    """Whether a group stands below its key, merges no other one, and loses no comment if its braces are rewritten."""
    if config.start_mark.index < key.end_mark.index or _is_merged(config):
        return False
    if not _is_inline(config):
        return True
    begin, end = key.start_mark.index, config.end_mark.index
    tokens = [token for token in scan(text) if begin <= token.start_mark.index < end]
    gaps = (text[one.end_mark.index : other.start_mark.index] for one, other in pairwise(tokens))
    return not any("#" in gap for gap in gaps)


def _is_inline(node: Node | None) -> bool:
    return isinstance(node, CollectionNode) and bool(node.flow_style)


def _is_merged(group: Node) -> bool:
    return isinstance(group, MappingNode) and any(key.value == "<<" for key, _ in group.value)


def _with_two_groups(text: str, key: ScalarNode, config: Node, is_inline: bool) -> str:
    pairs: list[Pair] = config.value if isinstance(config, MappingNode) else []
    groups = {
        "parameters": [pair for pair in pairs if pair[0].value in ImageParameters.model_fields],
        "loop": [pair for pair in pairs if pair[0].value not in ImageParameters.model_fields],
    }
    written = text[key.start_mark.index : key.end_mark.index]  # with quotes, if it has any
    groups = {name: members for name, members in groups.items() if members} or {"loop": []}
    groups = {written.replace("config", name): members for name, members in groups.items()}
    if _is_inline(config) or not pairs:
        texts = [
            f"{name}: {{{', '.join(text[first.start_mark.index : last.end_mark.index] for first, last in members)}}}"
            for name, members in groups.items()
        ]
        separator = ", " if is_inline else "\n" + " " * key.start_mark.column
        return text[: key.start_mark.index] + separator.join(texts) + text[config.end_mark.index :]
    is_ended = text.endswith("\n")
    lines = (text if is_ended else text + "\n").splitlines(keepends=True)
    parts = _lines_of_members(lines, key, pairs)
    head = lines[key.start_mark.line]
    result = lines[: key.start_mark.line]
    for name, members in groups.items():
        result.append(head[: key.start_mark.column] + name + head[key.end_mark.column :])
        head = " " * key.start_mark.column + f"{written}:\n"  # without the comment that may stand in the first line
        result += [line for member in members for line in parts[member[0].value]]
    changed = "".join(result + lines[_end(config) :])
    return changed if is_ended else changed.removesuffix("\n")


def _end(node: Node) -> int:
    """The line after a value. The end of a block is its last value's, for YAML's own lies behind comments."""
    if isinstance(node, CollectionNode) and node.value and not _is_inline(node):
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return node.end_mark.line + (node.end_mark.column > 0)


def _lines_of_members(lines: list[str], key: ScalarNode, pairs: list[Pair]) -> dict[str, list[str]]:
    """The lines of each member, with the comments above it."""
    starts = [key.start_mark.line + 1, *(_end(value) for _, value in pairs)]
    return {member.value: lines[start:end] for (member, _), start, end in zip(pairs, starts, starts[1:], strict=False)}


def _meaning(text: str, file: str) -> object:
    job: DistributedTrainingJob = parse_job(parse(text.encode(), file))
    trainer = job.spec.trainer
    body = job.dump()
    for name in ("config", "loop", "parameters"):
        body["spec"]["trainer"].pop(name, None)
    loop = trainer.settings_of_loop.model_dump(include=set(Loop.model_fields) - {"rewind_on"})
    return body, trainer.images, loop, trainer.rewind_on
