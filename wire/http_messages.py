"""Messages that carry one request to a verifier, on a connection of its own: an HTTP client's from the seed (purpose
``http``), or a question for text from an operator (purpose ``generate``, ``wire.text_messages``)::

    caller → verifier    HttpRequest, then one bulk frame (its body)
    verifier → caller    HttpPart as the answer is written; or StreamRefused instead of any of them

The caller closes the connection after the last part, or earlier if it wants no more: then the verifier stops writing.
The seed reads no faster than its client, and TCP slows down the verifier. Both sides send KeepAlive.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from wire.messages import Message
from wire.schema import Bound
from wire.text_messages import MODEL_CHARS

MOST_HTTP_BYTES = 4 << 20
"""Largest body of a request. A verifier's own endpoint may take less."""
PART_BYTES = 32 << 10
TARGET_CHARS, HEADER_CHARS = 2048, 512
HeaderName = Annotated[str, Bound(pattern="[a-z0-9-]{1,64}")]
HeaderValue = Annotated[str, Bound(pattern=f"[ -~]{{0,{HEADER_CHARS}}}")]
Headers = Annotated[dict[HeaderName, HeaderValue], Bound(0, 16)]


class HttpRequest(Message, kind=75):
    """A client's request, with the headers that matter to models. ``target``: path and query, percent-encoded.
    ``model``: the model that its body names; empty: none."""

    method: Annotated[str, Bound(pattern="[A-Z]{1,16}")]
    target: Annotated[str, Bound(pattern=f"/[!-~]{{0,{TARGET_CHARS}}}")]
    headers: Headers = field(default_factory=dict)
    size_bytes: Annotated[int, Bound(0, MOST_HTTP_BYTES)] = 0
    model: Annotated[str, Bound(0, MODEL_CHARS)] = ""


class HttpPart(Message, kind=77):
    """The next part of the answer's body. The first one has the status and the headers; of others the status is 0."""

    data: Annotated[bytes, Bound(0, PART_BYTES)]
    is_last: bool
    status: Annotated[int, Bound(0, 599)] = 0
    headers: Headers = field(default_factory=dict)
