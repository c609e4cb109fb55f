"""The files of the page at ``/``, by path."""

from __future__ import annotations

PLACEHOLDER = (
    b'<!doctype html><title>p2ptrain</title><p>The API is described at <a href="/api/v1/docs">/api/v1/docs</a>.'
)


def page_at(path: str) -> tuple[bytes, str] | None:
    """Content and content type of the file at ``path``, such as ``/``; None if there is none."""
    return (PLACEHOLDER, "text/html; charset=utf-8") if path == "/" else None
