"""The page: its files, and what a real browser makes of them."""

from __future__ import annotations

import re
import socket
from importlib.resources import files
from pathlib import Path

import pytest

from roles.web.page import TYPES
from tests.roles.web.browser import CHROMIUM, browsing
from tests.roles.web.demo import DemoSeed, endpoint

from .conftest import LOCAL, Api

_STEP = "document.querySelector('#tiles dd').textContent"
_LINK = "document.getElementById('link-text')?.textContent"


def page_files() -> dict[str, bytes]:
    """Path → content of all that is served; ``/`` is the page itself."""
    root = Path(str(files("roles.web.page")))
    found = {f"/{file.relative_to(root).as_posix()}": file.read_bytes() for file in root.rglob("*.*")}
    served = {path: content for path, content in found.items() if Path(path).suffix in TYPES}
    return served | {"/": served.pop("/index.html")}


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for path, content in page_files().items():
        foreign = set(re.findall(r"(?:https?:|wss?:)?//[\w.-]+\.[a-z]+[^\s\"')]*", content.decode("latin-1")))
        assert foreign <= {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}, path  # only names
    page = page_files()["/"].decode()
    linked = re.findall(r'(?:src|href)="([^#"]+)"', page)
    shell = page_files()["/sw.js"].decode()
    assert {f"/{path}" for path in linked} <= set(page_files())
    assert all(path.strip("/") in shell for path in page_files() if path not in ("/", "/sw.js")), "it opens offline"
    assert not re.search(r"<style|<script>|\son\w+=|\sstyle=", page), "the policy forbids inline code"


@pytest.mark.asyncio(loop_scope="module")
async def test_files_are_answered_with_their_type_a_policy_and_from_the_cache_of_a_browser(api: Api) -> None:
    types = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".png": "image/png"}
    for path, content in page_files().items():
        status, _, headers = await api.ask("GET", path, headers=LOCAL | {"accept-encoding": "gzip"})
        assert status == 200, path
        assert headers["content-type"].startswith(types.get(Path(path).suffix, "")), path
        assert "script-src 'self'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        if Path(path).suffix in (".js", ".css", ".html") and len(content) > 500:
            assert (headers["content-encoding"], headers["vary"].lower()) == ("gzip", "accept-encoding")
        again = await api.ask("GET", path, headers=LOCAL | {"if-none-match": headers["etag"]})
        assert again[:2] == (304, "")
        assert (await api.ask("GET", path, headers=LOCAL | {"if-none-match": 'W/"other"'}))[0] == 200
    for path in ("/uplot/LICENSE", "/../app.py", "/__init__.py", "/uplot", "/none.js"):
        status, content, _ = await api.ask("GET", path)
        assert (status, content["error"]["code"]) == (404, "unknown_url")
    assert "MIT" in (files("roles.web.page") / "uplot" / "LICENSE").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium")
async def test_a_browser_shows_the_job_acts_on_it_and_survives_the_loss_of_its_connection(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seed, sock = DemoSeed(3), socket.create_server(("127.0.0.1", 0))
    async with browsing(tmp_path) as tab:
        async with endpoint(seed, sock) as address:
            await tab.resize(1440, 900)
            await tab.call("Page.navigate", url=f"{address}/#key=from-a-phone")
            await tab.until(f"{_LINK} === 'live' && {_STEP} === '640 of 2,000'")
            assert await tab.value("document.querySelectorAll('#nodes tbody tr').length") == 6
            assert await tab.value("document.querySelectorAll('.plot canvas').length") == 5
            assert "Ring of 2 members" in await tab.value("document.querySelector('#ring svg').ariaLabel")
            kept = "[sessionStorage.getItem('api-key'), location.hash].join()"
            assert await tab.value(kept) == "from-a-phone,", "nobody copies it from the address"
            await tab.value("document.getElementById('phone').click()")
            await tab.until("document.querySelector('dialog[open] .qr path')?.getAttribute('d').length > 1000")
            await tab.value("document.querySelector('dialog[open]').close()")
            await tab.until("document.getElementById('watch-code').childElementCount === 0")
            seed.tick()
            await tab.until(f"{_STEP} === '641 of 2,000'")
            await tab.press("p")
            await tab.until("document.getElementById('job-state').textContent.includes('paused')")
            await tab.value("document.getElementById('do-resume').click()")
            await tab.until("document.getElementById('job-state').textContent.includes('running')")
            assert seed.told == [("j1", "pause"), ("j1", "resume")]
            await tab.press("n")
            await tab.until("document.activeElement.name === 'profile'")
            await tab.press("Enter")
            await tab.until("document.querySelector('.note')?.textContent.includes('is created')")
            assert seed.created == 1
            for width in (360, 390):
                await tab.resize(width, 844)
                assert await tab.until("innerWidth === document.documentElement.scrollWidth && innerWidth") == width
            await tab.value("navigator.serviceWorker.ready.then(() => true)")
            assert "5 of 12" in await tab.until("document.querySelector('#experiments tbody').textContent")
            assert tab.problems == []
            seed.fetched.clear()
            await tab.value("sessionStorage.setItem('api-key', '\u201ckey\u201d')")
            await tab.value("import('/feed.js').then(({ask}) => ask('events').catch((it) => window.refused = it) && 0)")
            assert await tab.until("window.refused && [refused.status, refused.message].join(' ')") == (
                "401 this key is wrong: it has characters that no key has"
            )
            assert await tab.value("sessionStorage.getItem('api-key')") is None
            seed.lose()
            await tab.until("!document.getElementById('stale').hidden")
            await tab.until(f"{_LINK} === 'live'")
            assert seed.fetched == [641], "it goes on after the last step that it knows"
        assert caplog.messages == [], "no request failed unexpectedly"
        await tab.call("Page.reload")
        await tab.until(f"{_LINK} === 'not connected' && !document.getElementById('stale').hidden")
