"""Of all tests: drawn inputs have no deadline of their own, which only a busy machine would miss."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("suite", settings.default, deadline=None)
settings.load_profile("suite")
