"""How the elements of an all-reduce travel: whole, or in fewer bytes. Needs numpy only.

=====  =====================================================  ==================
name   what is sent                                           bytes of a float32
=====  =====================================================  ==================
fp32   the elements as they are                               100 %
bf16   8 significant bits, the range of float32               50 %
fp16   11 significant bits, 6e-8 to 65504                     50 %
int8   whole steps, 127 a side, a step for each 64 elements   25.8 %
int4   whole steps, -8 to 7, a step for each 32 elements      14.1 %
topk   the largest 8 of every 256 elements                    2.3 %
=====  =====================================================  ==================

What all codecs promise:

* **Fixed size.** The bytes depend on the number of elements alone, so both ends of a link plan with them.
* **Equal bits.** Decoding is exact in float32, so the same bytes decode to the same bits on every machine.
* **Nothing is hidden.** Where an element is not finite, its decoded value is not finite (in the blockwise codecs the
  whole block's), and the step's finite check sees it. No input warns or raises.
* **A peer's bytes may be anything.** Decoding raises ``ProtocolError`` or gives values, finite or not.

Scales are bfloat16, not float16: gradients of large models lie around 1e-8, where a float16 scale is zero.

A codec keeps scratch memory of the largest sub-chunk that it met. It belongs to one session and one thread.
"""

from __future__ import annotations

from typing import Final

from p2ptrain.core.errors import ConfigError
from ring.codecs.base import F32, U8, Codec
from ring.codecs.kinds import Bf16, Fp16, Fp32, Int4, Int8, TopK

__all__ = ["CODECS", "F32", "U8", "Codec", "codec_named"]

_KINDS: Final[dict[str, type[Codec]]] = {kind.name: kind for kind in (Fp32, Bf16, Fp16, Int8, Int4, TopK)}

CODECS: Final[tuple[str, ...]] = tuple(_KINDS)
"""All names, the largest first."""


def codec_named(name: str) -> Codec:
    """A new codec, with scratch memory of its own. Raises ``ConfigError`` for an unknown name."""
    if name not in _KINDS:
        raise ConfigError(f"no codec is named {name!r}", remedy=f"known are {', '.join(CODECS)}")
    return _KINDS[name]()
