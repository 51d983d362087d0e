"""A collector of OpenTelemetry, played by an HTTP server that decodes what it is sent."""

import threading
import time
from http.server import ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.http_server import QuietHandler


class Collector(ThreadingHTTPServer):
    """A collector that remembers spans, and may refuse them or take its time."""

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.code, self.seconds = 200, 0.0
        super().__init__(("127.0.0.1", port), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()


class _Handler(QuietHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(self.server.seconds)
        if self.server.code == 200:
            self.server.paths.append(self.path)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                values = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
                self.server.resources.append(values)
                self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(self.server.code)
        self.end_headers()
