"""Those that write text in the demo cluster: a verifier, a drafter that it makes most of, and one far away."""

from __future__ import annotations

import dataclasses
import random

from wire.records import PeerInfo, ServingInfo
from wire.text_messages import DrafterFigures


def noise(*key: object) -> float:
    """Between -1 and 1, the same for the same key."""
    return random.Random(repr(key)).uniform(-1.0, 1.0)


def verifier(step: int, *, idle: bool = False) -> ServingInfo:
    """It writes two texts, and one waits; or ``idle``, as it was."""
    wave = noise("pace", step // 3)
    stats = {
        "tokens_per_s": 0.0 if idle else 52.0 + 6 * wave,
        "waiting": 0.0 if idle else 1.0,
        "tokens": 41_200.0 + 40 * step,
        "prompt_tokens_per_s": 0.0 if idle else 310.0,
        "first_ms": 180.0,
        "first_p95_ms": 640.0,
        "between_ms": 19.0,
        "between_p95_ms": 31.0,
        "cached_share": 0.62,
        "preemptions": 2.0,
        "alpha": 0.81,
        "accepted_length": 3.84,
        "alone_share": 0.04,
        "wasted_share": 0.27,
        "bytes_per_token": 11.4,
        "token_ms": 19.2 - wave,
        "verify_ms": 13.1,
        "draft_ms": 5.3 - wave,
        "wait_ms": 0.6,
        "rest_ms": 0.2,
        "alone_ms": 45.7,
        "speed_up": 45.7 / (18.4 - wave),
    }
    return ServingInfo(
        id="verifier/code-400m",
        peer="verifier",
        name="vera",
        role="verifier",
        host="192.168.1.31",
        port=7338,
        model="code-400m",
        vocab_size=32_000,
        context=4096,
        tokenizer="9f86d081",
        http="http://192.168.1.31:8000/v1",
        sessions=0 if idle else 2,
        stats=stats,
        drafters=[DrafterFigures("dora", 0.83, 0.6), DrafterFigures("nils", 0.34, 41.0)],
    )


def drafters(step: int) -> list[ServingInfo]:
    """Of the verifier."""
    return [
        ServingInfo(
            id=f"{name}/{model}",
            peer=name,
            name=name,
            role="drafter",
            host="192.168.1.32",
            port=7338,
            model=model,
            tokenizer=tokenizer,
            sessions=2,
            stats={"tokens_per_s": pace + 9 * noise(name, step)},
        )
        for name, model, tokenizer, pace in (
            ("dora", "code-40m", "9f86d081", 150.0),
            ("nils", "code-15m", "9f86d081", 64.0),
        )
    ]


def writer(like: PeerInfo, info: ServingInfo) -> PeerInfo:
    """The peer that serves this, on a machine like another peer's."""
    return dataclasses.replace(
        like,
        id=info.peer,
        name=info.name,
        roles=[info.role],
        state="serving" if info.sessions else "idle",
        address=f"{info.host}:{info.port}",
        in_bps=0.0,
        out_bps=0.0,
        tokens_per_s=info.stats["tokens_per_s"],
        job="",
        rank=None,
        generation=0,
        step=0,
        share=0,
        model=info.model,
        sessions=info.sessions,
    )
