"""The files of the page at ``/``, and the headers that keep foreign code out of it."""

from __future__ import annotations

from pathlib import Path, PurePath

from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope

TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".webmanifest": "application/manifest+json",
}
"""The files that are served, and their types, on which operating systems do not agree."""
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
    "x-content-type-options": "nosniff",
}


def page() -> ASGIApp:
    return GZipMiddleware(_Files(directory=Path(__file__).parent))


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        name = "index.html" if path == "." else path
        if (kind := TYPES.get(PurePath(name).suffix)) is None:
            raise HTTPException(404)
        response = await super().get_response(name, scope)
        response.headers.update(_HEADERS | {"content-type": kind})
        return response
