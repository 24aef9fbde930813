"""Headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--remote-debugging-port=0", "--host-resolver-rules=MAP * ~NOTFOUND"),
    "--allow-file-access-from-files",
)
PATIENCE = 120


class Tab:
    """One tab: commands, and the errors that its pages have reported since the last `open`."""

    def __init__(self, socket: Any, session: str) -> None:
        self._socket, self._session, self._number = socket, session, 0
        self._loaded = False
        self.errors: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        self._socket.send(json.dumps(message | {"sessionId": self._session}))
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, file: Path) -> None:
        """Load a file and wait until its scripts have run."""
        self._loaded, self.errors = False, []
        self.call("Page.navigate", url=file.as_uri())
        while not self._loaded:
            self._next()

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression; promises are awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def _next(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv(timeout=PATIENCE))
        method, found = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            details = found["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(one.get("value", "")) for one in found["args"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] == "error":
            self.errors.append(f"{found['entry']['text']} {found['entry'].get('url', '')}")
        return message


@contextmanager
def opened(profile: Path) -> Iterator[Tab]:
    """Start Chromium with a tab; skips the test without Debian's chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("needs Debian's chromium on PATH")
    client = pytest.importorskip("websockets.sync.client", reason="needs the extra dev")
    command = [chromium, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = profile / "DevToolsActivePort"
        until = time.monotonic() + PATIENCE
        while not (port.is_file() and port.read_text().count("\n")):
            assert process.poll() is None, f"chromium ended with {process.returncode}"
            assert time.monotonic() < until, "chromium did not open its port"
            time.sleep(0.1)
        number, path = port.read_text().split()
        address = f"ws://127.0.0.1:{number}{path}"
        with client.connect(address, max_size=None, proxy=None) as socket:
            browser = Tab(socket, "")
            browser._session = _session(socket)
            for domain in ("Page", "Runtime", "Log"):
                browser.call(f"{domain}.enable")
            yield browser
    finally:
        process.terminate()
        process.wait(timeout=30)


def _session(socket: Any) -> str:
    """Return the session of a new tab."""
    found: dict[str, Any] = {}
    steps: list[tuple[str, dict[str, Any]]] = [
        ("Target.createTarget", {"url": "about:blank"}),
        ("Target.attachToTarget", {"flatten": True}),
    ]
    for number, (method, parameters) in enumerate(steps):
        content = parameters | ({"targetId": found["targetId"]} if found else {})
        socket.send(json.dumps({"id": -1 - number, "method": method, "params": content}))
        while (answer := json.loads(socket.recv(timeout=PATIENCE))).get("id") != -1 - number:
            pass
        found = answer["result"]
    return str(found["sessionId"])
