"""What donors say that they have, checked against what a member that heals has asked for, and against its own model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.core.errors import ProtocolError
from ring.token import is_lineage
from roles.engine import WHOLE, Blob, Stage
from roles.worker.given import CHUNK_BYTES, DIGEST_BYTES
from wire.heal_messages import HealOffer, HealRequest, StepLogged

News = tuple[bytes, float, bytes]
"""Of a step: digest, squared norm, and the digests of all stages of a split model."""


@dataclass(frozen=True, slots=True)
class Base:
    """A state, and the value that donors of it agree on. Without a root: the one that this member holds already."""

    step: int
    lineage: str
    square_sum: float = 0.0
    root: bytes = b""


@dataclass(frozen=True, slots=True)
class Self:
    """Who fetches, and what its own model is like: offers that differ are refused. ``stage``: the part of it that it
    holds, and takes."""

    peer_id: str
    name: str
    seed_host: str
    state: Sequence[Blob]
    reduce_bytes: int
    stage: Stage = WHOLE


def base_untrusted(offer: HealOffer, request: HealRequest, me: Self) -> Base:
    """The state that a donor offers to ``me``, who asked for it with ``request``.

    Raises:
        ProtocolError: no correct donor of this member's model offers this.
    """
    if offer.chunk_bytes != CHUNK_BYTES:
        raise ProtocolError(f"it gives chunks of {offer.chunk_bytes} bytes, this version takes {CHUNK_BYTES}")
    if not is_lineage(offer.lineage) or offer.step < 0:
        raise ProtocolError(f"it offers a state of step {offer.step} whose lineage is none")
    if not offer.blobs:
        if (offer.step, offer.lineage) != (request.have_step, request.have_lineage):
            raise ProtocolError("it offers steps after a state that is not this member's")
        return Base(offer.step, offer.lineage)
    if request.step >= 0 and (offer.step, offer.lineage) != (request.step, request.lineage):
        raise ProtocolError(f"it offers step {offer.step}, not step {request.step} as asked for")
    mine = [(blob.name, blob.view.nbytes) for blob in me.state]
    if [(record.name, record.size_bytes) for record in offer.blobs] != mine:
        raise ProtocolError("its state has other parts or sizes than this model's")
    if len(offer.root) != DIGEST_BYTES:
        raise ProtocolError("its table's digest is none")
    return Base(offer.step, offer.lineage, offer.square_sum, offer.root)


def news_untrusted(news: StepLogged, me: Self) -> News:
    """What a donor says of a step that its ring committed.

    Raises:
        ProtocolError: no correct donor of this member's model says this.
    """
    if len(news.digest) != DIGEST_BYTES or news.size_bytes != me.reduce_bytes:
        raise ProtocolError(f"it tells of step {news.step} what cannot be")
    if not _fits_the_stages(news, me.stage):
        raise ProtocolError(f"it tells of step {news.step} what is not of {me.stage}")
    return news.digest, news.square_sum, news.digests


def _fits_the_stages(news: StepLogged, stage: Stage) -> bool:
    if not stage.split:
        return not news.digests
    own = news.digests[DIGEST_BYTES * stage.index : DIGEST_BYTES * (stage.index + 1)]
    return len(news.digests) == DIGEST_BYTES * stage.count and own == news.digest
