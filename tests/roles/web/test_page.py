"""The page: its files, and what a real browser makes of them."""

from __future__ import annotations

import re
import socket
from importlib.resources import files
from pathlib import Path

import pytest
from starlette.exceptions import HTTPException

from roles.web.page import page_answer, page_files
from tests.roles.web.browser import CHROMIUM, browsing
from tests.roles.web.demo import DemoSeed, endpoint

_STEP = "document.querySelector('#tiles dd').textContent"
_LINK = "document.getElementById('link-text')?.textContent"


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for path in page_files():
        content = page_files()[path][0].decode("latin-1")
        foreign = set(re.findall(r"(?:https?:|wss?:)?//[\w.-]+\.[a-z]+[^\s\"')]*", content))
        assert foreign <= {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}, path  # only names
    page = page_files()["/"][0].decode()
    linked = re.findall(r'(?:src|href)="([^#"]+)"', page)
    shell = page_files()["/sw.js"][0].decode()
    assert {f"/{path}" for path in linked} <= set(page_files())
    assert all(path.strip("/") in shell for path in page_files() if path not in ("/", "/sw.js")), "it opens offline"
    assert not re.search(r"<style|<script>|\son\w+=|\sstyle=", page), "the policy forbids inline code"


def test_files_are_answered_with_their_type_a_policy_and_from_the_cache_of_a_browser() -> None:
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".png": "image/png"}
    for path in page_files():
        answer = page_answer(path, {})
        assert answer.headers["content-type"].startswith(types.get(Path(path).suffix, "")), path
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = page_answer(path, {"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.body) == (304, b"")
        assert page_answer(path, {"if-none-match": 'W/"other"'}).status_code == 200
    assert page_answer("/", {})
    for path in ("/uplot/LICENSE", "/../app.py"):
        with pytest.raises(HTTPException):
            page_answer(path, {})
    assert "MIT" in (files("roles.web.page") / "uplot" / "LICENSE").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium")
async def test_a_browser_shows_the_job_acts_on_it_and_survives_the_loss_of_its_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seed, sock = DemoSeed(3), socket.create_server(("127.0.0.1", 0))
    async with browsing(tmp_path) as tab:
        async with endpoint(seed, sock) as address:
            await tab.resize(1440, 900)
            await tab.call("Page.navigate", url=address)
            await tab.until(f"{_LINK} === 'live' && {_STEP} === '640 of 2,000'")
            assert await tab.value("document.querySelectorAll('#nodes tbody tr').length") == 6
            assert await tab.value("document.querySelectorAll('.plot canvas').length") == 5
            assert "Ring of 2 members" in await tab.value("document.querySelector('#ring svg').ariaLabel")
            seed.tick()
            await tab.until(f"{_STEP} === '641 of 2,000'")
            await tab.press("p")
            await tab.until("document.getElementById('job-state').textContent.includes('paused')")
            await tab.value("document.getElementById('do-resume').click()")
            await tab.until("document.getElementById('job-state').textContent.includes('running')")
            assert seed.told == [("j1", "pause"), ("j1", "resume")]
            for width in (360, 390):
                await tab.resize(width, 844)
                assert await tab.until("innerWidth === document.documentElement.scrollWidth && innerWidth") == width
            await tab.value("navigator.serviceWorker.ready.then(() => true)")
            assert "5 of 12" in await tab.until("document.querySelector('#experiments tbody').textContent")
            assert tab.problems == []
            seed.fetched.clear()
            seed.lose()
            await tab.until("!document.getElementById('stale').hidden")
            await tab.until(f"{_LINK} === 'live'")
            assert seed.fetched == [641], "it goes on after the last step that it knows"
        assert caplog.messages == [], "no request failed unexpectedly"
        await tab.call("Page.reload")
        await tab.until(f"{_LINK} === 'not connected' && !document.getElementById('stale').hidden")
