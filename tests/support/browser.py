"""A headless Chromium, driven through the pipe of its DevTools protocol: no port, no package beside Python's own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("TORCHACE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
DEADLINE = 180.0  # seconds for anything that is waited for: a loaded machine is slow, not wrong
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--remote-debugging-pipe",
)  # fmt: skip
# Chromium reads commands from file 3 and writes answers to file 4.
LAUNCH = """
import fcntl, os, sys
commands, answers = (fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3])
os.dup2(commands, 3)
os.dup2(answers, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """Chromium as a context manager; `folder` holds its profile and what it writes to stderr."""

    def __init__(self, folder: Path) -> None:
        assert CHROMIUM is not None
        self._ids = itertools.count(1)
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._pages: dict[str, Page] = {}
        self._log = folder / "chromium.log"
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", LAUNCH, str(commands), str(answers), CHROMIUM, *FLAGS,
                 f"--user-data-dir={folder / 'profile'}"],
                pass_fds=(commands, answers), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        os.close(commands)
        os.close(answers)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self._send("Browser.close", {}, None)
        try:
            self._process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        self._reader.join()  # ends with the pipe, which ended with Chromium
        os.close(self._in)

    def page(self, *, width: int = 1400, height: int = 1000, scheme: str = "light") -> Page:
        """A new tab of that size, for a reader who prefers that color scheme."""
        context = self.call("Target.createBrowserContext")["browserContextId"]  # no memory of other tabs
        target = self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session, context)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        page.call("Emulation.setDeviceMetricsOverride", size)
        page.call("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})
        return page

    def call(self, method: str, params: dict[str, Any] | None = None, session: str | None = None) -> dict[str, Any]:
        """Sends one command and returns its answer; what happens meanwhile is noted by the pages."""
        id_ = self._send(method, params or {}, session)
        end = time.monotonic() + DEADLINE
        while (message := self.hear(end - time.monotonic())) is not None:
            if message.get("id") == id_:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return dict(message["result"])
        raise TimeoutError(f"no answer to {method} in {DEADLINE:g} s; {self._stderr_text()}")

    def hear(self, seconds: float) -> dict[str, Any] | None:
        """The next message, or None where none comes in time."""
        try:
            message = self._messages.get(timeout=max(seconds, 0))
        except queue.Empty:
            return None
        if message is None:
            raise RuntimeError(f"Chromium has ended; {self._stderr_text()}")
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.note(message["method"], message["params"])
        return message

    def _send(self, method: str, params: dict[str, Any], session: str | None) -> int:
        command = {"id": next(self._ids), "method": method, "params": params}
        if session is not None:
            command["sessionId"] = session
        data = memoryview(json.dumps(command).encode() + b"\0")
        while data:
            data = data[os.write(self._out, data) :]
        return int(command["id"])

    def _read(self) -> None:
        rest = b""
        while data := os.read(self._in, 1 << 16):
            *whole, rest = (rest + data).split(b"\0")
            for message in whole:
                self._messages.put(json.loads(message))
        self._messages.put(None)

    def _stderr_text(self) -> str:
        return "its log ends with " + self._log.read_text("utf-8", "replace")[-1000:]


class Page:
    """One tab; `errors` lists console errors and failed requests."""

    def __init__(self, browser: Browser, session: str, context: str) -> None:
        self.errors: list[str] = []
        self._browser, self._session, self._context = browser, session, context
        self._loads = 0

    def call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._browser.call(method, params, self._session)

    def note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Page.loadEventFired":
            self._loads += 1
        elif event == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        elif event == "Network.loadingFailed" and not params.get("canceled"):  # left by going to another page
            self.errors.append(f"{params['type']} failed: {params['errorText']}")
        elif event == "Network.responseReceived" and params["response"]["status"] >= 400:
            self.errors.append(f"{params['response']['status']} for {params['response']['url']}")

    def open(self, url: str) -> None:
        """Goes to an address and waits until all of the page is loaded."""
        before = self._loads
        answer = self.call("Page.navigate", {"url": url})
        assert "errorText" not in answer, f"{url}: {answer['errorText']}"
        self._until(lambda: self._loads > before, lambda: f"{url} to load")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page, as JSON."""
        answer = self.call("Runtime.evaluate", {"expression": expression, "returnByValue": True, "awaitPromise": True})
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(f"{expression}: {details.get('exception', {}).get('description') or details['text']}")
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Waits until an expression is true in the page, and returns its value."""
        found: Any = None

        def true() -> bool:
            nonlocal found
            try:
                found = self.value(expression)
            except RuntimeError as error:  # between two pages there is none to ask
                found = error
            return bool(found) and not isinstance(found, RuntimeError)

        self._until(true, lambda: f"{expression}, which was {found!r} in the end")
        return found

    def click(self, selector: str) -> None:
        """A click of the mouse in the middle of what the selector finds."""
        box = self.wait(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            " e.scrollIntoView({block: 'center', behavior: 'instant'}); const b = e.getBoundingClientRect();"
            " const x = b.left + b.width / 2, y = b.top + b.height / 2, hit = document.elementFromPoint(x, y);"
            " return b.width && hit && (e.contains(hit) || hit.contains(e)) ? {x, y} : null; })()"
        )
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", {"type": kind, **box, "button": "left", "clickCount": 1})

    def write(self, text: str) -> None:
        """Types a text, key by key, into whatever has the focus."""
        for letter in text:
            self.call("Input.dispatchKeyEvent", {"type": "keyDown", "text": letter, "key": letter})
            self.call("Input.dispatchKeyEvent", {"type": "keyUp", "key": letter})

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", {"browserContextId": self._context})

    def _until(self, true: Callable[[], bool], what: Callable[[], str]) -> None:
        end = time.monotonic() + DEADLINE
        while not true():
            assert time.monotonic() < end, f"waited {DEADLINE:g} s for {what()}; errors so far: {self.errors}"
            self._browser.hear(0.05)
