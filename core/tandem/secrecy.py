"""Values that are probably secrets: which variables hold one, and a manifest without them."""

import re
from typing import Any

HIDDEN = "(hidden)"
_SECRET = re.compile(
    r"SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|TOKEN(?:_|$)|(?:^|_|API|ACCESS|PRIVATE)KEY(?:_|$)", re.IGNORECASE
)


def looks_secret(name: str) -> bool:
    """Whether a variable of that name probably holds a secret."""
    return _SECRET.search(name) is not None


def hidden(manifest: Any) -> Any:
    """A copy of a job's manifest, as it was found, without the values of variables that are probably secrets."""
    if isinstance(manifest, list):
        return [hidden(one) for one in manifest]
    if not isinstance(manifest, dict):
        return manifest
    copy = {name: hidden(value) for name, value in manifest.items()}
    if copy.get("value") and isinstance(copy.get("name"), str) and looks_secret(copy["name"]):
        copy["value"] = HIDDEN
    return copy
