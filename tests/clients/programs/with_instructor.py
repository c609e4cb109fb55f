"""Instructor: its modes, over OpenAI's and Anthropic's clients."""

from __future__ import annotations

from typing import Literal

import instructor
from common import MODEL, MOST, URL, WEATHER, attempt
from openai import OpenAI
from pydantic import BaseModel


class Trip(BaseModel):
    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2, 3]


plain = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
ASK = {"model": MODEL, "messages": [{"role": "user", "content": WEATHER}], "response_model": Trip, "max_retries": 0}


def ask(mode):
    return instructor.from_openai(plain, mode=mode).chat.completions.create(**ASK, max_tokens=MOST).model_dump()


for mode in ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON"):
    attempt(mode, lambda: ask(getattr(instructor.Mode, mode)))


def partial():
    made = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)
    return [part.model_dump() for part in made.chat.completions.create_partial(**ASK, max_tokens=MOST)][-1]


attempt("partial objects of a stream", partial)
