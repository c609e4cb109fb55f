"""What members of a ring or a chain and their seed say: views, tokens, encoded gradients, measured links, round trips,
a job's profile."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import struct
import zlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import strategies as st

from configs.schema import CHANGEABLE, Profile
from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.ids import is_id
from ring.codecs import CODECS, codec_named
from ring.planning.measurements import LinkQuality
from ring.planning.schedule import plan_extended
from ring.staleness import Accepted, ContributionStatus, PullReply, PullRequest, packed, unpacked_untrusted
from ring.token import TOKEN_BYTES, Flag, Token, check_untrusted
from ring.view import View
from roles.process_group import GroupPlace, _place_untrusted
from roles.seed.jobs import JobController
from roles.seed.links import measured_untrusted
from roles.strategies.pipeline import figures_untrusted
from roles.strategies.secure import pair_keys_untrusted
from roles.worker.boundary import mean_loss_untrusted
from roles.worker.early_stop import EarlyStop
from roles.worker.job_state import JobSettings, JobState
from roles.worker.links import MeasureLinks
from roles.worker.worker import CheckpointRequest
from wire.job_messages import MAX_STAGES, MemberRecord, SettingChange, ViewAnnounced
from wire.schema import instance_untrusted

from .engine import accepted, target
from .strategies import FREE, REAL, WHOLE, made, mostly, mutated, mutated_text

LINEAGE = "ab" * 16

# -------------------------------------------------------------------------------------------------------------- views


@st.composite
def _announced(draw: st.DrawFn) -> ViewAnnounced:
    """Often a possible view: shares that follow one another, distinct members."""
    members: list[MemberRecord] = []
    for index in range(draw(st.sampled_from([1, 1, 2, 2, 3, 4, 0]))):
        first = sum(member.count for member in members) if draw(st.integers(0, 29)) else draw(WHOLE)
        likely = {
            "peer_id": st.just(f"p{index}"),
            "port": st.integers(1, 65535),
            "first": st.just(first),
            "count": st.integers(0, 3),
        }
        members.append(draw(made(MemberRecord, **likely)))
    small = st.floats(0, 100)
    return draw(
        made(
            ViewAnnounced,
            members=st.just(tuple(members)),
            generation=st.integers(1, 9),
            step=st.integers(0, 9),
            lineage=st.just(LINEAGE),
            square_sum=small,
            heartbeat_s=small,
            death_s=small,
            streams=st.integers(0, 17),
            sub_chunk_bytes=st.sampled_from([0, 8, 64 << 20, (64 << 20) + 1]),
            codec=st.sampled_from(CODECS),
            stages=st.sampled_from([1, 1, 1, 1, 0, 2, 3, 257]),
            ledger_step=st.integers(0, 9),
            reduce_bytes=st.integers(0, 1 << 40),
        )
    )


@target("views", _announced() | made(ViewAnnounced), "wire.schema.instance_untrusted")
def _check_view(message: ViewAnnounced) -> None:
    source = dataclasses.asdict(message)
    view = View.of(instance_untrusted(ViewAnnounced, source))
    assert dataclasses.asdict(view) == source
    assert view.size == len({member.peer_id for member in view.members}) > 0
    assert all(0 < member.port < 65536 for member in view.members), "a port that nobody can dial"
    assert view.codec not in CODECS or codec_named(view.codec).name == view.codec  # else a plugin has it
    rings = [view.stage_ring(rank) for rank in range(view.stages)]
    assert sorted(member.peer_id for ring in rings for member in ring.members) == sorted(
        member.peer_id for member in view.members
    )
    assert all(sum(member.count for member in ring.members) == sum(m.count for m in view.members) for ring in rings)


_STAGE = st.fixed_dictionaries(
    {}, optional={"stage": mostly(st.integers(0, 3), FREE), "stages": mostly(st.integers(1, 300), FREE)}
)


@target("stages", _STAGE, "wire.schema.instance_untrusted")
def _check_stage(params: dict[str, Any]) -> None:
    asked = instance_untrusted(CheckpointRequest, {"job": "a1", "step": 1} | params, lenient=True)
    assert 0 <= asked.stage < asked.stages <= MAX_STAGES


_PLACE = json.dumps(asdict(GroupPlace("a", "", 1, "machine"))).encode()


@target(
    "places of members in a store",
    mutated(st.just(_PLACE)) | st.binary(max_size=100),
    "roles.process_group._place_untrusted",
)
def _check_place(written: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        place = _place_untrusted(written)
        assert is_id(place.peer_id)
        assert 0 < place.port < 65536


# ------------------------------------------------------------------------------------------------------------- tokens

_MINE = Token(1, 2, Flag.HOLD, 0.5, bytes(16), bytes.fromhex(LINEAGE))
_TOKEN = _MINE.encode()


def _signed(body: bytes) -> bytes:
    """As it would be if it had not been damaged, but written so."""
    return body + zlib.crc32(body).to_bytes(4, "big")


@target(
    "tokens",
    mutated(st.just(_TOKEN)) | mutated(st.just(_TOKEN[:-4])).map(_signed) | st.binary(max_size=2 * TOKEN_BYTES),
    "ring.token.Token.decode_untrusted",
    "ring.token.check_untrusted",
)
def _check_token(data: bytes) -> None:
    with suppress(ProtocolError):
        check_untrusted(data, _MINE)
    token = Token.decode_untrusted(data)
    assert len(data) == TOKEN_BYTES
    assert token.encode() == data


# ------------------------------------------------------------------------------------------------ a parameter server

_REQUEST = PullRequest(True, 3, LINEAGE, b"d" * 16).encode()
_REPLY = PullReply(ContributionStatus.ACCEPTED, 2, 50, True, False, False, 7, LINEAGE, 0.5, 9, 100, b"d" * 16).encode()
_MADE_OF = packed([Accepted(0, 4, 2, 50, 0.5), Accepted(2, 5, 3, 50, 1.0)])


@target(
    "pulls",
    mutated(st.sampled_from([_REQUEST, _REPLY, _MADE_OF])) | st.binary(max_size=100),
    "ring.staleness.PullRequest.decode_untrusted",
    "ring.staleness.PullReply.decode_untrusted",
    "ring.staleness.unpacked_untrusted",
)
def _check_pulled(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert PullRequest.decode_untrusted(data).encode()[1:] == data[1:]
    with contextlib.suppress(ProtocolError):
        reply = PullReply.decode_untrusted(data)
        assert PullReply.decode_untrusted(reply.encode()) == reply
    with contextlib.suppress(ProtocolError):
        assert [one.rank for one in unpacked_untrusted(data, (1, 0, 1))] == [0, 2]


# -------------------------------------------------------------------------------------------------------- validations

_KNOWN = EarlyStop(2)
_KNOWN.add_validation(7, 2.5)


@target(
    "validations",
    mutated(st.just(_KNOWN.message())) | st.binary(max_size=40),
    "roles.worker.early_stop.EarlyStop.agree_untrusted",
    "roles.worker.boundary.mean_loss_untrusted",
)
def _check_validations(data: bytes) -> None:
    known = EarlyStop(2)
    known.agree_untrusted([data, bytes(8)], 9)
    known.add_validation(10, 2.0)
    assert len(known.message()) == len(_KNOWN.message())
    loss, odd = mean_loss_untrusted([data[:16], struct.pack("!dQ", 6.0, 3), data[16:]], 100)
    assert 0 <= loss <= 1e6 or (odd == [0, 1, 2] and math.isnan(loss))


# -------------------------------------------------------------------------------------------------------------- masks

_SECRET = X25519PrivateKey.from_private_bytes(b"\1" * 32)
_PUBLIC = _SECRET.public_key().public_bytes_raw()


@target(
    "masks",
    st.binary(min_size=32, max_size=32) | mutated(st.sampled_from([_PUBLIC, bytes(32)])),
    "roles.strategies.secure.pair_keys_untrusted",
    "roles.strategies.secure._shared_secret_untrusted",
)
def _check_key(data: bytes) -> None:
    keys = pair_keys_untrusted(_SECRET, [_PUBLIC, data], 0, "job 1 ")
    assert [len(key) for key in keys.values()] == [32]


# ------------------------------------------------------------------------------------------------------------- codecs


@dataclass(frozen=True)
class Encoded:
    """``numel`` elements in codec ``name``, or what claims to be."""

    name: str
    numel: int
    data: bytes


_NUMELS = st.integers(0, 700) | st.sampled_from([31, 32, 33, 63, 64, 65, 255, 256, 257, 511, 512, 513])


@st.composite
def _encoded(draw: st.DrawFn) -> Encoded:
    name, numel = draw(st.sampled_from(CODECS)), draw(_NUMELS)
    codec = codec_named(name)
    match draw(st.integers(0, 3)):
        case 0:
            return Encoded(name, numel, draw(st.binary(max_size=64)))
        case 1:
            size = codec.encoded_bytes(numel)
            return Encoded(name, numel, np.random.default_rng(draw(st.integers(0, 2**32))).bytes(size))
    values = np.random.default_rng(draw(st.integers(0, 2**32))).standard_normal(numel).astype(np.float32)
    out = np.empty(codec.encoded_bytes(numel), np.uint8)
    codec.encode(values, out)
    if not out.size:
        return Encoded(name, numel, b"")
    for _ in range(draw(st.integers(0, 3))):
        out[draw(st.integers(0, out.size - 1))] = draw(st.integers(0, 255))
    return Encoded(name, numel, out.tobytes())


_GUARD = 8
_MARK = np.float32(77.0)


@target(
    "codecs",
    _encoded(),
    "ring.codecs.kinds.Codec._check_untrusted",
    "ring.codecs.kinds.Codec._decode_add_untrusted",
    "ring.codecs.kinds.Fp32._decode_untrusted",
    "ring.codecs.kinds.Fp32._decode_add_untrusted",
    "ring.codecs.kinds.Bf16._decode_untrusted",
    "ring.codecs.kinds.Blockwise._decode_untrusted",
    "ring.codecs.kinds.TopK._decode_untrusted",
    "ring.codecs.kinds.TopK._decode_add_untrusted",
    "ring.codecs.kinds.TopK._elements_untrusted",
)
def _check_codec(case: Encoded) -> None:
    codec, encoded = codec_named(case.name), np.frombuffer(case.data, np.uint8)
    decoded = np.full(case.numel + 2 * _GUARD, _MARK, np.float32)
    added = np.full(case.numel + 2 * _GUARD, _MARK, np.float32)
    inside = slice(_GUARD, _GUARD + case.numel)
    added[inside] = 0
    try:
        codec.decode(encoded, decoded[inside])
    except ProtocolError:
        refused = True
    else:
        refused = False
    try:
        codec.decode_add(encoded, added[inside])
    except ProtocolError:
        assert refused, "decode takes what decode_add refuses"
    else:
        assert not refused, "decode_add takes what decode refuses"
        equal = (added[inside] == decoded[inside]) | (np.isnan(added[inside]) & np.isnan(decoded[inside]))
        assert equal.all()
    for array in (decoded, added):
        assert (array[:_GUARD] == _MARK).all(), "written before the array"
        assert (array[_GUARD + case.numel :] == _MARK).all(), "written past the array"


# -------------------------------------------------------------------------------------------------------------- links

_PORTS = st.integers(1, 65535)
_PEERS = st.fixed_dictionaries(
    {
        "peer": mostly(st.sampled_from(["a1", "b2", "-"]), FREE),
        "host": mostly(st.just("10.0.0.1"), FREE),
        "port": mostly(_PORTS, FREE),
    }
)
_TO_MEASURE = st.fixed_dictionaries(
    {},
    optional={
        "peers": mostly(st.lists(mostly(_PEERS, FREE), max_size=4), FREE),
        "deadline_s": mostly(st.floats(0.1, 10), REAL | FREE),
    },
)
_BANDWIDTHS = mostly(st.none() | st.floats(1e6, 1e9), FREE)
_LINK = st.fixed_dictionaries(
    {
        "peer": mostly(st.sampled_from(["a1", "b2", "c3"]), FREE),
        "latency_s": mostly(st.floats(0, 1), FREE),
        "bandwidth_bps": _BANDWIDTHS,
    }
)
_MEASURED = st.fixed_dictionaries({}, optional={"links": mostly(st.lists(mostly(_LINK, FREE), max_size=3), FREE)})


@target("links", st.tuples(_TO_MEASURE, _MEASURED), "roles.seed.links.measured_untrusted")
def _check_links(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    params, result = case
    try:
        asked = instance_untrusted(MeasureLinks, params, lenient=True)
    except ProtocolError:
        pass
    else:
        assert 0 <= asked.deadline_s < float("inf")
        assert all(is_id(target.peer) and 0 < target.port < 65536 for target in asked.peers)
    found = measured_untrusted(result, {"a1", "b2"})
    assert found.keys() <= {"a1", "b2"}
    assert all(isinstance(quality, LinkQuality) for quality in found.values())


# ------------------------------------------------------------------------------------------------------ chain figures


_FIGURES = st.tuples(st.floats(0, 10) | st.floats(), st.integers(0, 9) | st.integers(0, 2**32 - 1))


@target(
    "stage-figures",
    _FIGURES.map(lambda figures: struct.pack("!dI", *figures)),
    "roles.strategies.pipeline.figures_untrusted",
)
def _check_figures(payload: bytes) -> None:
    round_trip_s, room = figures_untrusted(payload)  # ``all_gather`` gives as many bytes as this member sent
    assert struct.unpack("!dI", payload) == (round_trip_s, room)
    plan_extended(4, [round_trip_s], 0.1, max_in_flight=[min(room or 4, 4)] * 2)


# ----------------------------------------------------------------------------------------------------------- profiles

_SPEC: dict[str, dict[str, Any]] = json.loads(Profile().to_spec())
_KEYS = [(table, name) for table, content in _SPEC.items() for name in content]


@st.composite
def _specs(draw: st.DrawFn) -> str:
    spec: dict[str, Any] = {table: dict(content) for table, content in _SPEC.items()}
    for _ in range(draw(st.integers(0, 3))):
        table, name = draw(st.sampled_from(_KEYS))
        spec.setdefault(table, {})
        match draw(st.integers(0, 3)):
            case 0:
                spec[table] = draw(FREE)
                break
            case 1:
                spec[table].pop(name, None)
            case _:
                spec[table][name] = draw(FREE)
    return json.dumps(spec)


_PIECES = ["[" * 9000, "{", "}", '"', "\\ud800", "1e999", "NaN", "Infinity", "9" * 5000, "-0", "null", "true", ","]


@target(
    "profiles",
    _specs() | mutated_text([json.dumps(_SPEC), "{}"], _PIECES),
    "configs.schema.Profile.from_spec_untrusted",
    peak_bytes=4 << 20,
)
def _check_profile(text: str) -> None:
    profile = Profile.from_spec_untrusted(text)
    with accepted():
        assert Profile.from_spec_untrusted(profile.to_spec()) == profile.alone()


_VALUES = st.sampled_from(
    ["0.5", "7", "true", "null", '"linear"', "[]", "NaN", "Infinity", "-1", "1e999", "9" * 60, "{"]
)


@target(
    "settings",
    st.lists(made(SettingChange, key=st.sampled_from(CHANGEABLE), value=_VALUES, step=st.integers(0, 9)), max_size=6),
    "configs.schema.Profile.with_changes_untrusted",
    "roles.worker.job_state.JobSettings.take_untrusted",
    "roles.worker.job_state.JobState.change_settings_untrusted",
    "roles.seed.jobs.JobController.check_changes_untrusted",
    peak_bytes=4 << 20,
)
def _check_settings(changes: list[SettingChange]) -> None:
    settings = JobSettings(Profile())
    state: Any = SimpleNamespace(_settings=settings, boundary=SimpleNamespace(profile=None), profile=None)
    controller: Any = SimpleNamespace(spec=Profile().to_spec())
    controller._profile_after = partial(JobController._profile_after, controller)
    try:
        JobState.change_settings_untrusted(state, changes)
    except ProtocolError:
        assert settings.now == settings.first, "a refused change has changed something"
        raise
    with accepted():
        JobController.check_changes_untrusted(controller, changes)
        assert [period.first_step for period in settings.periods] == sorted({0, *(item.step for item in changes)})
        assert settings.periods[-1].steps == settings.now.job.steps
        assert all(type(json.loads(item.value)) is int for item in changes if item.key == "job.steps")
