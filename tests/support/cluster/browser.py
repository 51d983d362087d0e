"""A real Chromium without a window, asked over its DevTools protocol: aiohttp's client is all that takes."""

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import aiohttp

START_SECONDS = 60.0
ANSWER_SECONDS = 30.0
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # as root, in a container, it has no other way; it opens our own page alone
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-port=0",
)


class Moved(Exception):  # noqa: N818 - it is what pages do
    """The page was left while it was asked."""


class Browser:
    """One browser with one page. Use it in `with`."""

    def __init__(self) -> None:
        program = shutil.which("chromium")
        assert program is not None, "Debian's package chromium is not installed"
        self._folder = Path(tempfile.mkdtemp(prefix="tandem-browser-"))
        self._log = (self._folder / "log.txt").open("wb")
        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self._folder}", "about:blank"],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        self._runner = asyncio.Runner()
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._asked = 0
        self.complaints: list[str] = []
        """What the page's console said that is wrong: errors, and what a content security policy refused."""
        try:
            self._runner.run(self._connect())
        except BaseException:
            self.close()
            raise

    def go(self, address: str) -> None:
        self._ask("Page.navigate", url=address)

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript is in the page."""
        try:
            found = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        except Moved:
            found = self._ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def text(self, name: str) -> str:
        """The words of the element with an id; empty while it is not there."""
        return str(self.value(f"(document.getElementById({json.dumps(name)}) || {{}}).innerText || ''"))

    def until(self, true: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
        """Wait until something is true, and return it."""
        deadline = time.monotonic() + seconds
        while not (found := true()):
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
            time.sleep(0.1)
        return found

    def screen(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Have a screen of so many pixels, and a reader who prefers light or dark."""
        narrow = width < 700
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=narrow)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0) -> None:
        """Have the mouse do something at a place of the screen: `Moved`, `Pressed` or `Released`."""
        button = "none" if kind == "Moved" and not clicks else "left"
        pressed = 1 if button == "left" and kind != "Released" else 0
        self._ask(
            "Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, button=button, buttons=pressed, clickCount=clicks
        )

    def touch(self, kind: str, *places: tuple[float, float]) -> None:
        """Have fingers do something: `Start`, `Move` or `End`; all that are on the screen then."""
        points = [{"x": x, "y": y, "id": index} for index, (x, y) in enumerate(places)]
        self._ask("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=points)

    def key(self, name: str) -> None:
        """Press a key and let it go."""
        text = {"text": name} if len(name) == 1 else {}
        self._ask("Input.dispatchKeyEvent", type="keyDown", key=name, **text)
        self._ask("Input.dispatchKeyEvent", type="keyUp", key=name)

    def picture(self, path: Path, whole: bool = True) -> None:
        """Take a picture, of the whole page or of what the screen shows."""
        found = self._ask("Page.captureScreenshot", captureBeyondViewport=whole, format="png")
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait(20)
        self._runner.run(self._disconnect())
        self._runner.close()
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._runner.run(self._exchange(method, parameters))

    async def _exchange(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        assert self._socket is not None
        self._asked += 1
        await self._socket.send_json({"id": self._asked, "method": method, "params": parameters})
        async with asyncio.timeout(ANSWER_SECONDS):
            while True:
                message = json.loads((await self._socket.receive()).data)
                if message.get("id") == self._asked:
                    if "error" in message:
                        raise Moved(str(message["error"]))
                    return dict(message["result"])
                self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(message["params"]["exceptionDetails"])[:500])
        entry = message.get("params", {}).get("entry", {}) if message.get("method") == "Log.entryAdded" else {}
        if entry.get("level") == "error" and entry.get("source") != "network":
            self.complaints.append(str(entry.get("text")))

    async def _connect(self) -> None:
        file, deadline = self._folder / "DevToolsActivePort", time.monotonic() + START_SECONDS
        while not file.exists() or "\n" not in file.read_text():
            assert self._process.poll() is None, (self._folder / "log.txt").read_text()
            assert time.monotonic() < deadline, "Chromium did not start"
            await asyncio.sleep(0.05)
        port = int(file.read_text().splitlines()[0])
        self._session = aiohttp.ClientSession()
        async with self._session.get(f"http://127.0.0.1:{port}/json") as answer:
            page = next(one for one in await answer.json(content_type=None) if one["type"] == "page")
        self._socket = await self._session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=2**27)
        for domain in ("Page", "Runtime", "Log"):
            await self._exchange(f"{domain}.enable", {})

    async def _disconnect(self) -> None:
        # A session that is closed leaves its WebSocket's connection open.
        if self._socket is not None:
            await self._socket.close()
        if self._session is not None:
            await self._session.close()
