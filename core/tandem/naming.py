"""Names as Kubernetes takes them, and paths as operating systems do.

A manifest with a name that no object can have is refused when it is read, with the rule, and not minutes later by
whatever is made of it. (https://kubernetes.io/docs/concepts/overview/working-with-objects/names/)
"""

from typing import Annotated

from pydantic import Field

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
LABEL = f"^{_LABEL}$"
SUBDOMAIN = rf"^{_LABEL}(\.{_LABEL})*$"
SUBDOMAIN_OR_EMPTY = rf"^({_LABEL}(\.{_LABEL})*)?$"
KEY = r"^[-._a-zA-Z0-9]+$"
IMAGE = r"^[^\s\x00]+$"
PATH = r"^[^\x00]+$"
WORD = r"^[^\x00]*$"

_PARTS = "lower-case letters, digits, dashes and dots, beginning and ending with a letter or digit"
RULES = {
    LABEL: "lower-case letters, digits and dashes, beginning and ending with a letter or digit",
    SUBDOMAIN: _PARTS,
    SUBDOMAIN_OR_EMPTY: f"{_PARTS}, or nothing",
    KEY: "letters, digits, dashes, underscores and dots",
    IMAGE: "a name such as registry/team/image:tag, without spaces",
    PATH: "a path without zero characters",
    WORD: "text without zero characters",
}
"""What each pattern wants, in words that follow "must be"."""

Label = Annotated[str, Field(pattern=LABEL, max_length=63)]
"""The name of a namespace."""
ObjectName = Annotated[str, Field(pattern=SUBDOMAIN, max_length=253)]
"""The name of most objects: an RFC 1123 subdomain."""
ShortName = Annotated[str, Field(pattern=SUBDOMAIN, max_length=63)]
"""The name of an object that is written into a label, which has no more room."""
PerhapsName = Annotated[str, Field(pattern=SUBDOMAIN_OR_EMPTY, max_length=253)]
"""The name of an object, or nothing, where nothing has a meaning of its own."""
Key = Annotated[str, Field(pattern=KEY, max_length=253)]
"""A key of a Secret or a ConfigMap."""
Image = Annotated[str, Field(pattern=IMAGE, max_length=1024)]
"""A container image."""
FilePath = Annotated[str, Field(pattern=PATH, max_length=4096)]
"""The path of a file or a folder."""
