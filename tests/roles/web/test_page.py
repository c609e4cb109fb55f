"""The page: its files, and what a real browser makes of them."""

from __future__ import annotations

import asyncio
import re
import socket
from importlib.resources import files
from pathlib import Path

import pytest

from roles.http.answers import Problem
from roles.web.page import TYPES
from tests.roles.web.browser import CHROMIUM, DEADLINE_S, browsing
from tests.roles.web.demo import DemoModels, DemoSeed, endpoint

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
    licences = [(files("roles.web.page") / name / "LICENSE").read_text() for name in ("uplot", "markdown-it")]
    assert all("Permission is hereby granted, free of charge" in text for text in licences), "MIT"


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


_ANSWER = "document.querySelector('#chat-log .answer:last-child')"
_FACTS = f"{_ANSWER}?.querySelector('.facts').textContent"
_FIELD = "document.getElementById('chat-text').value"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH: apt-get install chromium")
async def test_a_browser_chats_with_a_model_stops_it_edits_the_question_and_has_it_answered_again(
    tmp_path: Path,
) -> None:
    goes_on = asyncio.Event()
    seed, models, sock = DemoSeed(3), DemoModels(goes_on.wait), socket.create_server(("127.0.0.1", 0))
    question = {"role": "user", "content": "How does a ring sum?"}
    async with browsing(tmp_path) as tab, endpoint(seed, sock, models) as address:
        await tab.resize(1440, 900)
        await tab.call("Page.navigate", url=f"{address}/#chat")
        await tab.until("document.activeElement?.id === 'chat-text'")
        await tab.write("Why?")
        await tab.press("Enter")
        await tab.until(f"{_ANSWER}?.textContent.startsWith('A')")
        assert await tab.value(_FIELD) == ""
        await tab.press("Escape")
        async with asyncio.timeout(DEADLINE_S):
            await models.left.wait()
        await tab.until(f"{_FACTS}?.includes('stopped')")
        await tab.press("ArrowUp")
        assert await tab.value(_FIELD) == "Why?"
        await tab.value("document.getElementById('chat-text').select()")
        await tab.write(question["content"])
        goes_on.set()
        await tab.press("Enter")
        facts = await tab.until(f"{_FACTS}?.includes('218 tokens') && {_FACTS}")
        assert facts.startswith("vera · drafted by dora, nils, 81% accepted · first token "), facts
        assert [each["messages"][0]["content"] for each in models.asked] == ["Why?", question["content"]]
        kinds = f"[...{_ANSWER}.querySelectorAll('.markdown *')].map((it) => it.localName)"
        assert {"strong", "td", "ol", "pre", "a"} <= set(found := await tab.value(kinds)), found
        assert "img" not in found, "what a model writes is never HTML"
        links = f"[...{_ANSWER}.querySelectorAll('a')].map((it) => it.getAttribute('href'))"
        assert await tab.value(links) == ["https://example.org/ring"]
        answer = await tab.value(f"{_ANSWER}.querySelector('.markdown').textContent")
        await tab.value(f"{_ANSWER}.querySelector('[data-verb=retry]').click()")
        await tab.until(f"document.getElementById('chat-stop').hidden && {_FACTS}?.includes('218 tokens')")
        assert models.asked[2] == models.asked[1] | {"messages": [question]}
        assert tab.problems == []
        models.loads = [40.0]
        await tab.value("document.getElementById('chat-model').value = 'llama-3.2-3b'")
        await tab.write("And then?")
        await tab.press("Enter")
        await tab.until(f"{_ANSWER}?.textContent.includes('with code-400m yet (about 20 s left)')")
        assert await tab.value(f"{_ANSWER}.querySelector('progress').value") == 40
        await tab.until(f"document.getElementById('chat-stop').hidden && {_FACTS}?.includes('218 tokens')")
        assert "stages: atlas 0–9, borea 9–18, castor 18–28" in await tab.value(_FACTS)
        assert [turn["role"] for turn in models.asked[3]["messages"]] == ["user", "assistant", "user"]
        await tab.resize(360, 740)
        assert await tab.until("innerWidth === document.documentElement.scrollWidth && innerWidth") == 360
        await tab.call("Page.reload")
        await tab.until("document.querySelector('[data-open]')")
        await tab.value("document.querySelector('[data-open]').click()")
        assert await tab.value("document.querySelector('.answer .markdown').textContent") == answer, "it is built alike"
        await tab.value("document.querySelector('[data-delete]').click()")
        await tab.until("document.querySelector('dialog[open]')")
        await tab.value("document.getElementById('confirm-yes').click()")
        await tab.until("!document.querySelector('[data-open], #chat-log article')")
        assert await tab.value("Object.keys(localStorage).filter((key) => key.startsWith('chat:'))") == []
        models.refusal = Problem(403, "this key may only look", code="read_only")
        await tab.call("Page.reload")
        await tab.until("document.querySelector('#chat-log')?.textContent.includes('may only look')")
        await tab.value("document.querySelector('[data-verb=unlock]').click()")
        await tab.until("document.activeElement?.name === 'key'")
        models.refusal = Problem(404, "there is no GET /v1/models here")
        await tab.call("Page.reload")
        await tab.until(f"{_LINK} === 'live' && document.getElementById('tiles')?.checkVisibility()")
        assert not await tab.value("document.getElementById('to-chat').checkVisibility()"), "other seeds have no chat"
