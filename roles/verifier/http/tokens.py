"""``POST /tokenize`` and ``/detokenize``, as vLLM has them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal

from pydantic import Field

from roles.http.answers import wrong
from roles.serving.texts import TextRequest, TokenizingService
from roles.verifier.http import bodies
from roles.verifier.http.answer import Question, prompt_of
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


def read_tokenize(body: bytes) -> Question:
    fields = bodies.read_body_of(TokenizeFields, body)
    if (fields.prompt is None) == (fields.messages is None):
        raise wrong("prompt", "give it or messages, and not both")
    turns = read_messages(fields.messages).finish("messages") if fields.messages is not None else ()
    use = read_tools(fields.tools)

    async def tokenize(service: TokenizingService) -> dict[str, Any]:
        if turns:
            ids = await prompt_of(service, TextRequest(turns=turns), use)
        else:
            ids = await service.tokenize(fields.prompt or "", add_special=fields.add_special_tokens)
        strings = None
        if fields.return_token_strs:
            texts = (service.token_bytes(token).decode("utf-8", "replace") for token in ids)
            strings = await asyncio.to_thread(list, texts)  # the first call takes long
        return {"count": len(ids), "max_model_len": service.context, "tokens": ids, "token_strs": strings}

    return fields.model, tokenize


def read_detokenize(body: bytes) -> Question:
    fields = bodies.read_body_of(DetokenizeFields, body)

    async def detokenize(service: TokenizingService) -> dict[str, Any]:
        return {"prompt": await service.detokenize(fields.tokens)}

    return fields.model, detokenize
