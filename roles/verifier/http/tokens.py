"""``POST /tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from pydantic import Field

from p2ptrain.compute.text import Turn
from roles.http.answers import wrong
from roles.serving.texts import TextRequest, TokenizingService
from roles.verifier.http import bodies
from roles.verifier.http.answer import ToolUse, adapt_text, read_tool_use
from roles.verifier.http.chat import Messages, Tools, read_messages, read_tools


class TokenizeFields(bodies.StrictModel):
    model: bodies.ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None
    add_generation_prompt: Literal[True] = True


class DetokenizeFields(bodies.StrictModel):
    model: bodies.ModelName | None = None
    tokens: Annotated[list[bodies.TokenId], Field(fail_fast=True)]


def read_tokenize(body: bytes) -> TokenizeFields:
    fields = bodies.read_body_of(TokenizeFields, body)
    if (fields.prompt is None) == (fields.messages is None):
        raise wrong("prompt", "give it or messages, and not both")
    return fields


def read_detokenize(body: bytes) -> DetokenizeFields:
    return bodies.read_body_of(DetokenizeFields, body)


async def count_conversation(service: TokenizingService, turns: tuple[Turn, ...], use: ToolUse) -> list[int]:
    """Token ids of the prompt of a conversation's next answer."""
    adapted, _ = await adapt_text(service, TextRequest(turns=turns), use, None)
    return await service.tokenize_turns(adapted.turns, adapted.tools)


async def tokenize(service: TokenizingService, fields: TokenizeFields) -> dict[str, Any]:
    if fields.messages is not None:
        use = read_tool_use(read_tools(fields.tools), None, "", is_parallel=True)
        ids = await count_conversation(service, read_messages(fields.messages).finish("messages"), use)
    else:
        ids = await service.tokenize(fields.prompt or "", add_special=fields.add_special_tokens)
    document: dict[str, Any] = {"count": len(ids), "max_model_len": service.context, "tokens": ids, "token_strs": None}
    if fields.return_token_strs:
        texts = (service.token_bytes(token).decode("utf-8", "replace") for token in ids)
        document["token_strs"] = await asyncio.to_thread(list, texts)  # the first call takes long
    return document


async def detokenize(service: TokenizingService, fields: DetokenizeFields) -> dict[str, Any]:
    return {"prompt": await service.detokenize(fields.tokens)}
