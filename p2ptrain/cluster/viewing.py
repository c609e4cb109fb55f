"""The full-screen view of a cluster, and what it does over connections of its own."""

from __future__ import annotations

import shlex
from collections.abc import AsyncGenerator
from functools import partial
from os.path import expanduser

from p2ptrain.cluster.access import operator, read_target, shown_address
from p2ptrain.cluster.client import AsyncClient
from p2ptrain.core.errors import ConfigError
from tui.app import P2PTrainApp
from tui.source import Messages, OperatorActions, SeedSource

MOST_TOKENS = 2048
"""Of an answer in a chat; the viewer may stop it before."""


def new_app(seed: str) -> P2PTrainApp:
    """The view of this seed, as commands take it. Raises ``UserError`` as ``read_target``."""

    async def create_job(profile: str, text: str) -> str:
        path, settings = _read_words(text)
        async with AsyncClient(seed) as client:
            return await client.create_job(profile or path, settings)

    def stream(model: str, verifier: str, turns: Messages) -> AsyncGenerator[str, None]:
        return AsyncClient(seed).stream(turns, model=model, verifier=verifier, max_new_tokens=MOST_TOKENS)

    actions = OperatorActions(_describe_profiles, create_job, stream)
    return P2PTrainApp(SeedSource(partial(operator, seed), shown_address(read_target(seed)), actions))


def _describe_profiles() -> dict[str, str]:
    from configs.loader import describe, shipped

    return {name: f"{name:<10} {describe(path)}" for name, path in shipped().items()}


def _read_words(text: str) -> tuple[str, dict[str, object]]:
    """The path, and the overrides ``table.key=value``, in a line that a person typed, with quotes as in a shell. Raises
    ``ConfigError``."""
    from configs.loader import read_overrides

    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters, lexer.escape = True, "", ""  # paths of Windows have backslashes
    try:
        words = list(lexer)
    except ValueError as error:
        raise ConfigError(f"{text}: {error}", remedy="put a value with blanks between quotes") from None
    path = " ".join(word for word in words if "=" not in word)
    return expanduser(path), read_overrides([word for word in words if "=" in word])
