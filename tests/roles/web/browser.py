"""A headless Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DEADLINE_S = 30.0
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--remote-debugging-port=0",
)
_UNTIL = """
new Promise((resolve, reject) => {
  const deadline = performance.now() + 1000 * %s;
  const look = () => {
    const value = (%s);
    if (value) resolve(value);
    else if (performance.now() > deadline) reject(new Error("this stayed false: " + %s));
    else setTimeout(look, 20);
  };
  look();
})"""


class Tab:
    """One tab. ``problems``: errors that its console shows, and exceptions that nothing caught."""

    def __init__(self, connection: ClientConnection) -> None:
        self.problems: list[Any] = []
        self._connection = connection
        self._session: dict[str, str] = {}
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def listen(self) -> None:
        """Take what the browser says, until it closes the connection."""
        with suppress(ConnectionClosed):
            async for said in self._connection:
                self._take(json.loads(said))

    def _take(self, message: dict[str, Any]) -> None:
        match message:
            case {"id": number, **answer}:
                self._answers.pop(number).set_result(answer)
            case {"method": "Runtime.exceptionThrown", "params": problem}:
                self.problems.append(problem)
            case {"method": "Log.entryAdded", "params": {"entry": {"level": "error"} as problem}}:
                self.problems.append(problem)
            case {"method": "Runtime.consoleAPICalled", "params": {"type": "error"} as problem}:
                self.problems.append(problem)

    async def begin(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        answer = self._answers[number]
        await self._connection.send(json.dumps({"id": number, "method": method, "params": params, **self._session}))
        async with asyncio.timeout(DEADLINE_S + 1):
            said = await answer
        assert "error" not in said, (method, said["error"])
        result: dict[str, Any] = said["result"]
        return result

    async def value(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]["exception"]["description"]
        return found["result"].get("value")

    async def until(self, condition: str) -> Any:
        """Wait until a JavaScript expression is true, and return its value."""
        return await self.value(_UNTIL % (DEADLINE_S, condition, json.dumps(condition)))

    async def resize(self, width: int, height: int) -> None:
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **shape)

    async def press(self, key: str) -> None:
        text = "\r" if key == "Enter" else key if len(key) == 1 else ""
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, text=text)

    async def write(self, text: str) -> None:
        """Write where the focus is."""
        await self.call("Input.insertText", text=text)

    async def picture(self) -> bytes:
        """A PNG of what the tab shows."""
        return base64.b64decode((await self.call("Page.captureScreenshot", format="png"))["data"])


@asynccontextmanager
async def browsing(home: Path) -> AsyncIterator[Tab]:
    """A tab of a fresh browser, which keeps its files in ``home``."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM,
        *_OPTIONS,
        f"--user-data-dir={home}",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"HOME": str(home)},
    )
    assert process.stderr is not None
    try:
        async with asyncio.timeout(DEADLINE_S):
            while b"DevTools listening on " not in (line := await process.stderr.readline()):
                assert line, "Chromium ended before it listened"
        address = line.split()[-1].decode()
        async with asyncio.TaskGroup() as tasks, connect(address, max_size=None, proxy=None) as socket:
            tasks.create_task(process.stderr.read())
            tab = Tab(socket)
            tasks.create_task(tab.listen())
            await tab.begin()
            yield tab
            await tab.call("Browser.close")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
