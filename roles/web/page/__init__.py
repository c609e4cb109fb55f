"""The files of the page at ``/``, and the headers that keep foreign code out of it."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath

from starlette.exceptions import HTTPException
from starlette.responses import Response

_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
}
_POLICY = (  # only this origin's files run, and no text can become HTML or code
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; manifest-src 'self'; "
    "worker-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types page"
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "cross-origin-opener-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "vary": "accept-encoding",
    "x-content-type-options": "nosniff",
}


@cache
def page_files() -> dict[str, tuple[bytes, dict[str, str]]]:
    """Path → content and headers; ``/`` is the page itself."""
    found: dict[str, tuple[bytes, dict[str, str]]] = {}
    for folder in ("", "uplot/"):
        for file in (files(__name__) / folder).iterdir():
            if kind := _TYPES.get(PurePosixPath(file.name).suffix):
                content = file.read_bytes()
                tag = f'W/"{hashlib.blake2b(content, digest_size=12).hexdigest()}"'
                path = "/" if file.name == "index.html" else f"/{folder}{file.name}"
                found[path] = content, _HEADERS | {"etag": tag, "content-type": kind}
    return found


def page_answer(path: str, given: Mapping[str, str]) -> Response:
    """The answer to a request for the file at ``path``, with the headers ``given``. Raises ``HTTPException``."""
    if path not in page_files():
        raise HTTPException(404)
    content, headers = page_files()[path]
    if given.get("if-none-match") == headers["etag"]:
        return Response(None, 304, headers)
    if "gzip" in given.get("accept-encoding", ""):
        return Response(gzip.compress(content), 200, headers | {"content-encoding": "gzip"})
    return Response(content, 200, headers)
