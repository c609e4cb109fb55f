"""What the programs share: the server's address and model, and a line for each thing that was tried."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from typing import Any

URL = os.environ.get("SERVER", "http://127.0.0.1:8000")
MODEL = os.environ["MODEL"]
MOST = 250
"""Tokens of an answer: enough for a call of the tool, also with much white space."""
WEATHER = "What is the weather in Oslo?"
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


def attempt(name: str, act: Callable[[], Any]) -> None:
    """Print whether ``act`` ended well, with the beginning of what it returned or raised."""
    began = time.monotonic()
    try:
        result = act()
    except Exception as error:
        if os.environ.get("TRACE"):
            traceback.print_exc()
        kind, text = "FAILED", f"{type(error).__name__}: {error}"
    else:
        kind, text = "ok", result if isinstance(result, str) else json.dumps(result, default=str)
    seconds = time.monotonic() - began
    print(f"{kind:<7} {name:<34} {seconds:5.1f} s  {text[:240]!r}", flush=True)
