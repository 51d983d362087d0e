"""The token of each job, derived from the operator's key and the job's UID.

So it can be computed again whenever it is needed: a Secret that somebody has deleted is recreated as it was, and the
operator reads no Secrets but the one with its own key (docs/decisions/0021-tokens-of-jobs.md).

The key is in a Secret of the operator's own namespace. The first operator that starts creates it.
"""

import base64
import binascii
import hashlib
import hmac
import secrets

from tandem_operator import kinds
from tandem_operator.api import ApiServer, RequestRefused

KEY_BYTES = 32
FIELD = "key"


class NoKey(Exception):  # noqa: N818 - reads as the sentence it is
    """The operator's key cannot be read or created; says why."""


def token(key: bytes, uid: str) -> str:
    """A job's token: 43 characters that nobody can guess without the key."""
    mac = hmac.new(key, f"tandem.dev/token/{uid}".encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(mac).decode().rstrip("=")


async def operator_key(api: ApiServer, namespace: str, name: str) -> bytes:
    """The key in the operator's Secret, which is created if it does not exist.

    Raises:
        NoKey: the Secret holds none, or may neither be read nor created.
        Unavailable: the API server did not answer.
    """
    try:
        secret = await api.get(kinds.SECRET, namespace, name)
        if secret is None:
            data = {FIELD: base64.b64encode(secrets.token_bytes(KEY_BYTES)).decode()}
            metadata = {"name": name, "namespace": namespace}
            manifest = {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "immutable": True, "data": data}
            try:
                secret = await api.create(kinds.SECRET, {**manifest, "metadata": metadata})
            except RequestRefused as error:
                if error.reason != "AlreadyExists":
                    raise
                # Another operator was faster.
                secret = await api.get(kinds.SECRET, namespace, name)
    except RequestRefused as error:
        raise NoKey(f"the Secret {namespace}/{name} with the operator's key: {error}") from error
    try:
        key = base64.b64decode(((secret or {}).get("data") or {})[FIELD], validate=True)
    except (KeyError, TypeError, binascii.Error):
        key = b""
    if len(key) < KEY_BYTES:
        raise NoKey(
            f"the Secret {namespace}/{name} has no field {FIELD} of {KEY_BYTES} bytes; delete it to get a new one"
        )
    return key
