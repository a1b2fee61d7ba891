"""A headless chromium, spoken to over its DevTools pipe: no package, no port, no network."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
_ANSWER_S = 60.0


def find() -> str | None:
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Page:
    """One page. `requests` holds the addresses that it asked for."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict] = []
        self.requests: list[str] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._send("Page.enable")
        self._send("Network.enable")

    def open(self, path: Path, width: int, height: int = 900, scheme: str = "light") -> None:
        """Loads a file as a window of this width, in CSS pixels, shows it."""
        self.requests.clear()
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self._send("Emulation.setEmulatedMedia", media="screen", features=[feature])
        self._events.clear()
        self._send("Page.navigate", url=path.resolve().as_uri())
        self._await("Page.loadEventFired")

    def evaluate(self, script: str) -> object:
        answer = self._send("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"].get("description"))
        return answer["result"].get("value")

    def screenshot(self, path: Path, whole: bool = True, clip: dict | None = None) -> None:
        options: dict = {"format": "png", "captureBeyondViewport": whole}
        if clip:
            options["clip"] = {**clip, "scale": 1}
        data = self._send("Page.captureScreenshot", **options)["data"]
        path.write_bytes(base64.b64decode(data))

    def _send(self, method: str, **parameters: object) -> dict:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def _await(self, event: str) -> None:
        while not any(e.get("method") == event for e in self._events):
            self._receive()

    def _receive(self) -> dict:
        end = time.monotonic() + _ANSWER_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            part = os.read(self._in, 1 << 20)
            if not part:
                raise RuntimeError("the browser has gone")
            self._buffer += part
        text, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        if "method" in message:
            self._events.append(message)
        return message


@contextmanager
def browser(program: str) -> Iterator[Page]:
    """A page of a fresh browser, which ends with the block."""
    to_child, to_browser = os.pipe()
    from_browser, from_child = os.pipe()

    def place_pipes() -> None:  # the browser reads from 3 and writes to 4
        inner_in, inner_out = os.dup(to_child), os.dup(from_child)
        os.dup2(inner_in, 3)
        os.dup2(inner_out, 4)

    with tempfile.TemporaryDirectory(prefix="ingot-browser-", ignore_cleanup_errors=True) as home:
        process = subprocess.Popen(
            [
                program,
                "--headless",
                "--remote-debugging-pipe",
                f"--user-data-dir={home}",
                "--no-first-run",
                "--no-sandbox",  # a container's root has no sandbox; the pages are our own
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
                "--hide-scrollbars",
                "about:blank",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place_pipes,
            close_fds=False,
            env={**os.environ, "HOME": home},
        )
        os.close(to_child)
        os.close(from_child)
        try:
            yield Page(to_browser, from_browser)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(to_browser)
            os.close(from_browser)
