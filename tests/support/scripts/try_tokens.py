"""Every request to coordinators with a token that is not theirs, and without: `try_tokens.py TOKEN PLACE…`."""

import json
import signal
import sys
import urllib.error
import urllib.request

MEMBER = {"incarnation": "i", "address": "10.0.0.1", "port": 1, "processes": 1, "state": "leaving", "finished": True}
ASKED = [
    ("GET", "/status", b""),
    ("GET", "/v1/brief", b""),
    ("GET", "/metrics", b""),
    ("DELETE", "/status", b""),
    ("POST", "/v1/target", b'{"replicas": 1}'),
    ("POST", "/v1/sync", b"x" * 2**22),
    *(("POST", "/v1/sync", json.dumps({"replica": f"r{number}", **MEMBER}).encode()) for number in range(20)),
]


def answer(place: str, method: str, path: str, body: bytes, token: str | None) -> str:
    """A code, or what was raised."""
    request = urllib.request.Request(f"http://{place}{path}", body or None, method=method)
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answered:
            return str(answered.status)
    except urllib.error.HTTPError as error:
        return str(error.code)
    except OSError as error:
        return type(error).__name__


own, *places = sys.argv[1:]
found = {
    place: sorted({answer(place, *one, token) for token in (None, "", own, "x" * 4_000) for one in ASKED})
    for place in places
}
print("answered", json.dumps(found), flush=True)
signal.pause()
