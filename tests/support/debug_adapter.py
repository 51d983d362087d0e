"""A debugger without a person: a client of the Debug Adapter Protocol."""

import json
import socket
from typing import Any, Self


class DebugClient:
    """Attached to a process that listens for a debugger, until it is closed."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._stream = self._socket.makefile("rb")
        self._number = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._socket.close()

    def attach(self, file: str, line: int) -> None:
        """Attach, with a breakpoint."""
        self.request("initialize", adapterID="test")
        self._send("attach", justMyCode=False)
        self._wait("event", "initialized")
        self.request("setBreakpoints", source={"path": file}, breakpoints=[{"line": line}])
        self.request("configurationDone")

    def stopped(self) -> list[dict[str, Any]]:
        """The frames of the thread that has reached a breakpoint, the innermost first."""
        event = self._wait("event", "stopped")
        frames: list[dict[str, Any]] = self.request("stackTrace", threadId=event["body"]["threadId"])["stackFrames"]
        return frames

    def evaluate(self, expression: str, frame: dict[str, Any]) -> str:
        return str(self.request("evaluate", expression=expression, frameId=frame["id"])["result"])

    def request(self, command: str, **arguments: Any) -> dict[str, Any]:
        """The body of the answer."""
        self._send(command, **arguments)
        answer = self._wait("response", command)
        assert answer["success"], answer
        body: dict[str, Any] = answer.get("body") or {}
        return body

    def _send(self, command: str, **arguments: Any) -> None:
        self._number += 1
        message = {"seq": self._number, "type": "request", "command": command, "arguments": arguments}
        body = json.dumps(message).encode()
        self._socket.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)

    def _wait(self, kind: str, name: str) -> dict[str, Any]:
        while True:
            length = 0
            while line := self._stream.readline().strip():
                field, _, value = line.partition(b":")
                length = int(value) if field.lower() == b"content-length" else length
            message: dict[str, Any] = json.loads(self._stream.read(length))
            if message["type"] == kind and name in (message.get("command"), message.get("event")):
                return message
