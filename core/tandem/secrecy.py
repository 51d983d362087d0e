"""Secrets in manifests: where one probably stands, and a manifest without them.

Judged are the names of variables and of options of commands, and values: addresses with a password, and tokens whose
beginning says what they are.
"""

import re
from collections.abc import Iterator
from typing import Any

HIDDEN = "(hidden)"
Path = tuple[str | int, ...]
"""Where a value stands."""
_NAME = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|TOKEN(?:_|$)|_(?:PWD|PAT)(?:_|$)|^PAT$"
    r"|(?:^|_|API|ACCESS|PRIVATE)KEY(?:_|$)",
    re.IGNORECASE,
)
_ADDRESS = re.compile(r"(?<=://)([^/\s:@]*):[^/\s@]+@")
"""User and password of an address."""
_TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[opsur]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|sk-[\w-]{16,}"
    r"|xox[abeprs]-[\w-]{10,}|AKIA[A-Z0-9]{16}|AIza[\w-]{30,}|dapi[0-9a-f]{32}|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{30,}"
    r"|eyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*",
    re.DOTALL,
)
"""Tokens of Hugging Face, GitHub, GitLab, OpenAI and others of its kind, Slack, AWS, Google, Databricks, npm and PyPI,
JSON web tokens, and private keys."""
_OPTION = re.compile(r"--?([A-Za-z][\w-]*)(=.+)?", re.DOTALL)
_OF_TEXT = re.compile(
    r"(?:^|_)(?:PAD|EOS|BOS|UNK|SEP|CLS|MASK|STOP)_TOKEN(?:$|_)|TOKEN_(?:LIMIT|IDS?|TYPES?|COUNT)$|^KEY$", re.IGNORECASE
)
"""Options of commands whose names only sound so: tokens of a text, and keys of a record."""
_IN_A_LINE = re.compile(r"(?<!\S)(--?[A-Za-z][\w-]*)([ =])(?!-)(\S+)")
"""An option with its value within one word, as in the line of a shell."""


def looks_secret(name: str) -> bool:
    """Whether a variable of that name probably holds a secret."""
    return _NAME.search(name) is not None


def without_secrets(text: str) -> str:
    """A text without passwords of addresses, tokens, and values of options with names of secrets."""
    shown = _IN_A_LINE.sub(lambda one: f"{one[1]}{one[2]}{HIDDEN}" if _is_secret_option(one[1]) else one[0], text)
    return _TOKEN.sub(HIDDEN, _ADDRESS.sub(rf"\1:{HIDDEN}@", shown))


def _is_secret_option(option: str) -> bool:
    name = option.lstrip("-").replace("-", "_")
    return looks_secret(name) and not _OF_TEXT.search(name)


def hidden(manifest: Any) -> Any:
    """A copy of a job's manifest, as it was found, without values that are probably secrets."""
    if isinstance(manifest, str):
        return without_secrets(manifest)
    if isinstance(manifest, list):
        return _of_list(manifest)
    if not isinstance(manifest, dict):
        return manifest
    copy = {name: hidden(value) for name, value in manifest.items()}
    if copy.get("value") and isinstance(copy.get("name"), str) and looks_secret(copy["name"]):
        copy["value"] = HIDDEN
    return copy


def secrets(manifest: Any, shown: Any = None, path: Path = ()) -> Iterator[Path]:
    """Where values stand that are probably secrets.

    Args:
        shown: the same without them.
    """
    shown = hidden(manifest) if not path else shown
    if isinstance(manifest, dict):
        for name, value in manifest.items():
            yield from secrets(value, shown[name], (*path, name))
    elif isinstance(manifest, list):
        for index, value in enumerate(manifest):
            yield from secrets(value, shown[index], (*path, index))
    elif manifest != shown:
        yield path


def _of_list(items: list[Any]) -> list[Any]:
    """A list, of which a command's options with names of secrets lose their values."""
    found: list[Any] = []
    follows = False
    for one in items:
        option = _OPTION.fullmatch(one) if isinstance(one, str) else None
        is_secret = option is not None and _is_secret_option(option[1])
        if follows and option is None and isinstance(one, str):
            found.append(HIDDEN)
        elif is_secret and option is not None and option[2]:
            found.append(f"{one.partition('=')[0]}={HIDDEN}")
        else:
            found.append(hidden(one))
        follows = is_secret and option is not None and not option[2]
    return found
