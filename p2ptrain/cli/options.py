"""Options of a command from the fields of a dataclass, which are their declaration, their default and their help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from pathlib import Path
from typing import Any, get_type_hints

from typer.core import TyperCommand

from p2ptrain.core.errors import UserError

HTTP_EXAMPLE = "such as 127.0.0.1:8000, where programs reach it"


def takes_options(kind: type[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command every field of the dataclass ``kind`` as an option; its argument ``options`` receives them."""
    declared, hints = fields(kind), get_type_hints(kind, include_extras=True)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def called(**arguments: Any) -> None:
            options = kind(**{each.name: arguments.pop(each.name) for each in declared})
            command(**arguments, options=options)

        signature = inspect.signature(command, eval_str=True)
        parameters = [each for each in signature.parameters.values() if each.name != "options"]
        for each in declared:
            default = each.default if each.default_factory is MISSING else each.default_factory()
            keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
            parameters.append(inspect.Parameter(each.name, keyword, default=default, annotation=hints[each.name]))
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        return called

    return decorate


class WithBareSplit(TyperCommand):
    """A command that accepts ``--split`` without a number, which means the best number of stages (0)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, with_number(args))
        except Exception as error:  # a parser error; its type depends on the version of Typer
            at = args.index("--split") + 1 if "--split" in args else len(args)
            word = args[at] if at < len(args) and not args[at].startswith("-") else ""
            if word and "unexpected extra" in str(error) and f"({word})" in str(error):
                remedy = "write --split N, or --split alone for the fastest number"
                raise UserError(f"--split {word} is not a number of parts", remedy=remedy) from None
            raise


def with_number(args: list[str]) -> list[str]:
    """Give every ``--split`` without a number the number 0."""
    words = list[str]()
    for number, word in enumerate(args):
        if word == "--":
            return [*words, *args[number:]]
        is_bare = word == "--split" and not (number + 1 < len(args) and args[number + 1].isdecimal())
        words.append("--split=0" if is_bare else word)
    return words


def check_http(http: tuple[str, int] | None, api_keys: Path | None) -> None:
    """Raises ``UserError`` for a key without an endpoint."""
    if api_keys is not None and http is None:
        raise UserError("--api-key-file is for an HTTP endpoint", remedy="add --http HOST:PORT, or leave it out")


def host_and_port(option: str, text: str, meaning: str) -> tuple[str, int] | None:
    """Read HOST:PORT; None if ``text`` is empty. Raises ``UserError``."""
    from wire.address import parse_address

    if not text:
        return None
    remedy = f"write HOST:PORT, {meaning}"
    try:
        host, port = parse_address(text, default_port=1)
        named = port == parse_address(text, default_port=2)[1]
    except UserError as problem:
        raise UserError(f"{option}: {problem.message}", remedy=remedy) from None
    if not named:
        raise UserError(f"{option} {text} has no port", remedy=remedy)
    return host, port
