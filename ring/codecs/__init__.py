"""Encodings for the elements of an all-reduce: unchanged, or in fewer bytes. Needs only numpy.

=====  =====================================================  ==================
name   what is sent                                           bytes of a float32
=====  =====================================================  ==================
fp32   the elements as they are                               100 %
bf16   8 significant bits, the range of float32               50 %
fp16   11 significant bits, 6e-8 to 65504                     50 %
int8   whole steps, -127 to 127, one step per 64 elements     25.8 %
int4   whole steps, -8 to 7, one step per 32 elements         14.1 %
topk   the largest 8 of every 256 elements                    2.3 %
=====  =====================================================  ==================

All codecs guarantee:

* **Fixed size.** The number of bytes depends only on the number of elements, so both ends of a link can plan with it.
* **Equal bits.** Decoding is exact in float32, so the same bytes decode to the same bits on every machine.
* **Visible non-finite values.** If an element is not finite, its decoded value is not finite (in a blockwise codec, all
  of its block), and the step's check sees it. No input warns or raises.
* **Untrusted bytes.** Decoding raises ``ProtocolError`` or returns values, finite or not.

Scales are bfloat16, not float16: gradients of large models lie around 1e-8, where a float16 scale is zero.

A codec keeps scratch memory for the largest sub-chunk so far. It belongs to one session and one thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from p2ptrain.core import plugins
from p2ptrain.core.errors import ConfigError
from ring.codecs.kinds import F32, U8, Bf16, Codec, Fp16, Fp32, Int4, Int8, TopK

__all__ = ["CODECS", "F32", "U8", "Codec", "codec_named"]

_KINDS: Final[dict[str, type[Codec]]] = {kind.name: kind for kind in (Fp32, Bf16, Fp16, Int8, Int4, TopK)}

CODECS: Final[tuple[str, ...]] = tuple(_KINDS)
"""All names, the largest encoding first."""


def codec_named(name: str, settings: Mapping[str, object] | None = None) -> Codec:
    """A new codec with its own scratch memory. ``settings``: of a plugin. Raises ``ConfigError`` for an unknown name,
    and as ``plugins.make``."""
    if name not in _KINDS and f"codecs:{name}" not in plugins.installed():
        raise ConfigError(f"no codec is named {name!r}", remedy=f"known are {', '.join(CODECS)}")
    if name in _KINDS:
        return _KINDS[name]()
    codec: Codec = plugins.make(f"codecs:{name}", Codec, settings or {})
    with plugins.blamed(f"codecs:{name}", " when it was tried"):  # what it raises within a step would reach nobody
        values = np.linspace(-1, 1, 1000, dtype=np.float32)
        encoded = np.empty(codec.encoded_bytes(values.size), np.uint8)
        codec.encode(values, encoded)
        codec.decode_add(encoded, values)
    return codec
