"""Detection of secrets in manifests, and their removal.

Detected are names of variables and of command options, and values: addresses with a password, and tokens with a known
prefix.
"""

import re
from collections.abc import Iterator
from typing import Any

HIDDEN = "(hidden)"
Path = tuple[str | int, ...]
"""Path of a value."""
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
_HARMLESS_OPTION = re.compile(
    r"(?:^|_)(?:PAD|EOS|BOS|UNK|SEP|CLS|MASK|STOP)_TOKEN(?:$|_)|TOKEN_(?:LIMIT|IDS?|TYPES?|COUNT)$|^KEY$", re.IGNORECASE
)
"""Options of commands that are no secrets despite their names: tokens of a text, and keys of a record."""
_INLINE_OPTION = re.compile(r"(?<!\S)(--?[A-Za-z][\w-]*)([ =])(?!-)(\S+)")
"""An option with its value within one argument, as in a shell command line."""


def looks_secret(name: str) -> bool:
    """Whether a variable of that name probably holds a secret."""
    return _NAME.search(name) is not None


def without_secrets(text: str) -> str:
    """The text without passwords of addresses, tokens, and values of secret options."""
    without_options = _INLINE_OPTION.sub(
        lambda match: f"{match[1]}{match[2]}{HIDDEN}" if _is_secret_option(match[1]) else match[0], text
    )
    return _TOKEN.sub(HIDDEN, _ADDRESS.sub(rf"\1:{HIDDEN}@", without_options))


def _is_secret_option(option: str) -> bool:
    name = option.lstrip("-").replace("-", "_")
    return looks_secret(name) and not _HARMLESS_OPTION.search(name)


def hide_secrets(manifest: Any) -> Any:
    """A copy of an unvalidated manifest without values that are probably secrets."""
    if isinstance(manifest, str):
        return without_secrets(manifest)
    if isinstance(manifest, list):
        return _hide_in_list(manifest)
    if not isinstance(manifest, dict):
        return manifest
    copy = {name: hide_secrets(value) for name, value in manifest.items()}
    if copy.get("value") and isinstance(copy.get("name"), str) and looks_secret(copy["name"]):
        copy["value"] = HIDDEN
    return copy


def secret_paths(manifest: Any, redacted: Any = None, path: Path = ()) -> Iterator[Path]:
    """Paths of the values that are probably secrets.

    Args:
        redacted: the manifest without secrets (`hide_secrets`), in recursive calls.
        path: path of `manifest` in the whole one.
    """
    redacted = hide_secrets(manifest) if not path else redacted
    if isinstance(manifest, dict):
        for name, value in manifest.items():
            yield from secret_paths(value, redacted[name], (*path, name))
    elif isinstance(manifest, list):
        for index, value in enumerate(manifest):
            yield from secret_paths(value, redacted[index], (*path, index))
    elif manifest != redacted:
        yield path


def _hide_in_list(items: list[Any]) -> list[Any]:
    """A list without the values of secret command options."""
    redacted: list[Any] = []
    is_value = False
    for item in items:
        option = _OPTION.fullmatch(item) if isinstance(item, str) else None
        is_secret = option is not None and _is_secret_option(option[1])
        if is_value and option is None and isinstance(item, str):
            redacted.append(HIDDEN)
        elif is_secret and option is not None and option[2]:
            redacted.append(f"{item.partition('=')[0]}={HIDDEN}")
        else:
            redacted.append(hide_secrets(item))
        is_value = is_secret and option is not None and not option[2]
    return redacted
