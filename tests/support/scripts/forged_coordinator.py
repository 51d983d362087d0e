"""What a tenant runs as the coordinator of his job: `forged_coordinator.py KIND VICTIM`. It has nothing but Python."""

import gzip
import http.server
import json
import signal
import sys

PORT = 7070
LIES = {
    "phase": "Failed",
    "restarts": 2**52,
    "progress": {"step": 2**52, "percent": -1e300},
    "message": "\x1b[2J" + "x" * 20_000,
    "conditions": [{"type": "Failed", "status": "True", "reason": "Lies", "message": "of another job"}],
}
kind, victim = sys.argv[1:]


class Forged(http.server.BaseHTTPRequestHandler):
    """Tells what token it was given, and answers as it likes."""

    def do_GET(self) -> None:
        print("was given", self.headers.get("Authorization"), flush=True)
        match kind:
            case "redirects":
                self._begin(307, Location="https://kubernetes.default.svc/api")
            case "floods":
                self._begin(200)
                self._without_end(b"[")
            case "refuses":
                self._begin(500)
                self._without_end(b"x")
            case "packs":
                body = gzip.compress(b"[" * 2**24)
                self._begin(200, **{"Content-Encoding": "gzip", "Content-Length": str(len(body))})
                self.wfile.write(body)
            case "stalls":
                signal.sigwait([signal.SIGTERM])
            case "lies":
                body = json.dumps({"job": victim, "time": 0, "status": LIES}).encode()
                self._begin(200, **{"Content-Length": str(len(body))})
                self.wfile.write(body)

    do_POST = do_GET  # noqa: N815 - what the server calls

    def _begin(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _without_end(self, what: bytes) -> None:
        while True:
            self.wfile.write(what * 65_536)


http.server.ThreadingHTTPServer(("", PORT), Forged).serve_forever()
