"""A stage engine without torch: whole numbers modulo 127 instead of a model.

It keeps every promise of ``roles.engine``, costs microseconds, and is exact in every encoding, so whatever the
split, the order of the works or the encoding on the wire, the tokens are those of one part with all layers. They are
others as soon as anything is wrong: each layer mixes what comes in with its weights, with the position and with what
the session's earlier positions left behind, in their order.

A hidden state has ``WIDTH`` elements: one that is always 127, so that int8's scale is 1, and others from 0 to 126.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from p2ptrain.core.activations import activation_bytes
from p2ptrain.core.errors import ConfigError, P2PTrainError, ProtocolError, UserError
from p2ptrain.core.footprint import ModelSizes
from p2ptrain.core.serving import BLOCK_POSITIONS, PartSpec, Pass, Preempted, Ran, Sampling
from roles.worker.stages import Holding
from tests.run_one import run_one

WIDTH = 8
MODULUS = 127
Values = npt.NDArray[np.int64]


def stand_in_config(*, layers: int = 6, vocab_size: int = 97, context: int = 4096, rows: int = 3) -> str:
    """A ``config.json``. ``rows``: of each layer's weights, to make them larger."""
    return json.dumps(
        {
            "model_type": "stand-in",
            "hidden_size": WIDTH,
            "num_hidden_layers": layers,
            "vocab_size": vocab_size,
            "max_position_embeddings": context,
            "rows": rows,
        }
    )


def shapes_of(config: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, in the order of its layers. Raises ``ConfigError``."""
    try:
        values = json.loads(config)
        layers, vocab_size, rows = (int(values[key]) for key in ("num_hidden_layers", "vocab_size", "rows"))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"not a stand-in's config.json: {error}") from error
    return {
        "embed.weight": (vocab_size, WIDTH),
        **{f"layers.{layer}.weight": (rows, WIDTH) for layer in range(layers)},
        "norm.weight": (WIDTH,),
        "head.weight": (vocab_size, WIDTH),
    }


def sizes_of(config: str) -> ModelSizes:
    sizes = {name: 4 * math.prod(shape) for name, shape in shapes_of(config).items()}
    layers = tuple(size for name, size in sizes.items() if name.startswith("layers."))
    head = sizes["norm.weight"] + sizes["head.weight"]
    return ModelSizes(layers, (4 * WIDTH,) * len(layers), sizes["embed.weight"], head, 0)


def tensors_of(config: str, *, seed: int = 1) -> dict[str, npt.NDArray[np.float32]]:
    """The weights of a model: whole numbers, drawn from ``seed``."""
    random = np.random.default_rng(seed)
    return {name: random.integers(0, MODULUS, shape).astype("<f4") for name, shape in shapes_of(config).items()}


def write_model(directory: Path, config: str, *, seed: int = 1) -> Path:
    """A model directory as ``save_pretrained`` lays it out: ``config.json``, ``model.safetensors``, a tokenizer."""
    tensors = tensors_of(config, seed=seed)
    header: dict[str, Any] = {"__metadata__": {"format": "stand-in"}}
    offset = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(config)
    (directory / "tokenizer.json").write_text(json.dumps({"stand-in": True}))
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.writelines(tensor.tobytes() for tensor in tensors.values())
    return directory


# ------------------------------------------------------------------------------------------------------ hidden states


def encode(hidden: Values, encoding: str) -> bytes:
    """(rows, WIDTH) as it goes on the wire."""
    values = hidden.astype("<f4")
    match encoding:
        case "fp32":
            return values.tobytes()
        case "fp16":
            return values.astype("<f2").tobytes()
        case "bf16":  # the upper half: exact, for these numbers have 7 bits
            return (values.view("<u4") >> 16).astype("<u2").tobytes()
        case "int8":
            scale: npt.NDArray[Any] = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
            rounded: npt.NDArray[Any] = np.rint(values / scale)
            return bytes(scale.astype("<f4").tobytes() + rounded.astype("i1").tobytes())
    raise ProtocolError(f"no encoding of hidden states is called {encoding[:40]!r}")


def decode_hidden(payload: memoryview, encoding: str, count: int) -> Values:
    """Raises ``ProtocolError`` where these are no hidden states of ``count`` positions."""
    if payload.nbytes != activation_bytes(encoding, count, WIDTH):
        raise ProtocolError(f"{payload.nbytes} bytes are no {count} hidden states in {encoding}")
    if encoding == "int8":
        scales = np.frombuffer(payload[: 4 * count], "<f4")
        raw = np.frombuffer(payload[4 * count :], "i1").reshape(count, WIDTH) * scales[:, None]
    elif encoding == "bf16":
        raw = (np.frombuffer(payload, "<u2").astype("<u4") << 16).view("<f4")
    else:
        raw = np.frombuffer(payload, "<f4" if encoding == "fp32" else "<f2").astype("<f4")
    with np.errstate(invalid="ignore"):
        values: Values = np.rint(np.nan_to_num(raw)).astype(np.int64).reshape(count, WIDTH) % (MODULUS + 1)
    return values


# ---------------------------------------------------------------------------------------------------------- the engine


@dataclass
class _Session:
    positions: int
    sampling: Sampling
    # (layers, WIDTH) after each position: what a cache of keys and values is to a transformer.
    history: list[Values] = field(default_factory=list)
    preempted: bool = False
    order: float = 0.0

    @property
    def blocks(self) -> int:
        return -(-len(self.history) // BLOCK_POSITIONS)


class StandInStage:
    """See the module's docstring.

    Args:
        tensors: the part's, by name.
        on_run: called at the beginning of each work with (session, keep, count): to hold a test's work, or to fail.

    Attributes:
        sessions: by name, the first that is preempted last; for tests to look at.
        pool_blocks: blocks of all sessions together, once memory is reserved; until then as many as are needed.
        remembered: the first positions of texts, by the hash of their last block.
        batches: sessions of each call of ``run``.
    """

    def __init__(
        self,
        spec: PartSpec,
        tensors: Mapping[str, Values],
        *,
        context: int = 4096,
        on_run: Callable[[str, int, int], None] = lambda session, keep, count: None,
    ) -> None:
        self.spec = spec
        self.width = WIDTH
        self.encoding = "fp32"
        self.device = "stand-in"
        self.weights_bytes = 4 * sum(tensor.size for tensor in tensors.values())
        self.cache_position_bytes = 4 * WIDTH * (spec.stop - spec.start)
        self.vocab_size = int(json.loads(spec.config)["vocab_size"])
        self.sessions: dict[str, _Session] = {}
        self.pool_blocks = self.preemptions = 0
        self.remembered: dict[bytes, list[Values]] = {}
        self.batches: list[list[str]] = []
        self._tensors = tensors
        self._layers = [tensors[f"layers.{layer}.weight"].sum(axis=0) for layer in range(spec.start, spec.stop)]
        self._context = context
        self._on_run = on_run

    def length(self, session: str) -> int:
        """Positions that a session has taken."""
        return len(self.sessions[session].history)

    is_batched = True

    def open(
        self,
        session: str,
        *,
        positions: int,
        sampling: Sampling,
        block_hashes: Sequence[bytes] = (),
        adapter: str = "",
        order: float = 0.0,
    ) -> int:
        if positions > self._context:
            raise UserError(
                f"{positions} positions, and the model knows {self._context}", remedy="ask for fewer tokens"
            )
        if session in self.sessions:
            raise UserError(f"there is a session {session!r} on this part", remedy="close it first")
        if self.pool_blocks and positions > (most := self.pool_blocks * BLOCK_POSITIONS):
            raise UserError(f"{positions} positions, and there is memory for {most}", remedy="ask for fewer tokens")
        state = self.sessions[session] = _Session(positions, sampling, order=order)
        self.sessions = dict(sorted(self.sessions.items(), key=lambda item: item[1].order))
        for block_hash in block_hashes:
            if block_hash not in self.remembered:
                break
            state.history = list(self.remembered[block_hash])
        return len(state.history)

    @property
    def free_positions(self) -> int:
        if not self.pool_blocks:
            return 1 << 40
        return BLOCK_POSITIONS * (self.pool_blocks - sum(state.blocks for state in self.sessions.values()))

    def reserve(self, positions: int) -> None:
        self.pool_blocks = max(self.pool_blocks, -(-positions // BLOCK_POSITIONS))

    def run(self, passes: Mapping[str, Pass]) -> dict[str, Ran | P2PTrainError]:
        ran: dict[str, Ran | P2PTrainError] = {}
        self.batches.append(list(passes))
        for session in [session for session in self.sessions if session in passes]:
            try:
                self._make_room(session, passes[session])
                ran[session] = self._run_alone(session, passes[session])
            except P2PTrainError as error:
                ran[session] = error
        return ran

    def _make_room(self, session: str, work: Pass) -> None:
        """Drop the positions of sessions that were opened last. Raises ``Preempted``: this one's."""
        state = self.sessions[session]
        if state.preempted and work.keep:
            raise Preempted("older sessions needed the memory")
        state.preempted = False
        lacking = work.keep + work.count - BLOCK_POSITIONS * state.blocks
        for last in reversed(self.sessions.values()):
            if self.free_positions >= lacking:
                return
            if last.history or last is state:
                last.preempted, last.history = True, []
                self.preemptions += 1
            if last is state:
                raise Preempted("older sessions need the memory")

    def _run_alone(self, session: str, work: Pass) -> Ran:
        state, keep, count = self.sessions[session], work.keep, work.count
        samples, sample_index = work.samples, work.sample_index
        self._on_run(session, keep, count)
        if not 0 <= max(samples, len(work.targets)) <= (count if self.spec.stop == self.spec.layers else 0):
            raise ProtocolError(f"{samples} tokens are to be picked; tokens are picked on the last stage only")
        if keep > len(state.history):
            raise ProtocolError(f"{keep} positions are to be kept, and there are {len(state.history)}")
        if keep + count > state.positions:
            raise ProtocolError(f"{keep + count} positions, and the session is for {state.positions}")
        hidden = self._taken_in_untrusted(work.payload, work.encoding, count)
        del state.history[keep:]
        for row in range(count):
            hidden[row] = self._through_the_layers(state, hidden[row])
        for number, block_hash in enumerate(reversed(work.block_hashes)):
            end = (len(state.history) // BLOCK_POSITIONS - number) * BLOCK_POSITIONS
            self.remembered[block_hash] = state.history[:end]
        if self.spec.stop < self.spec.layers:
            return Ran(memoryview(encode(hidden, work.out_encoding)), ())
        normed = (hidden + self._tensors["norm.weight"]) % MODULUS
        logits = normed @ self._tensors["head.weight"].T % 1009  # else the largest row of the head always wins
        return Ran(
            memoryview(b""),
            tuple(
                picked(row, state.sampling, sample_index + index) for index, row in enumerate(logits[count - samples :])
            ),
            (-logits[np.arange(count - len(work.targets), count), list(work.targets)]).astype("<f4").tobytes(),
        )

    def close(self, session: str) -> None:
        self.sessions.pop(session, None)

    def _taken_in_untrusted(self, payload: memoryview, encoding: str, count: int) -> Values:
        """Raises ``ProtocolError`` where the payload is not what this stage takes."""
        if (self.spec.start == 0) != (encoding == "ids"):
            raise ProtocolError(f"{encoding[:40]!r} is not what a part that begins at layer {self.spec.start} takes")
        if encoding != "ids":
            return decode_hidden(payload, encoding, count)
        if payload.nbytes != 4 * count:
            raise ProtocolError(f"{payload.nbytes} bytes are no {count} token ids")
        ids = np.frombuffer(payload, "<i4")
        if count and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ProtocolError(f"a token id is none of the {self.vocab_size} that there are")
        return _marked(self._tensors["embed.weight"][ids] % MODULUS)

    def _through_the_layers(self, state: _Session, hidden: Values) -> Values:
        position = len(state.history)
        before = state.history[-1] if position else np.zeros((len(self._layers), WIDTH), np.int64)
        after = np.empty_like(before)
        for index, weights in enumerate(self._layers):
            after[index] = (3 * before[index] + hidden + position + weights) % MODULUS
            hidden = _marked(np.roll(2 * hidden + after[index] + weights, 1) % MODULUS)
        state.history.append(after)
        return hidden


def _marked(hidden: Values) -> Values:
    hidden[..., 0] = MODULUS
    return hidden


def picked(logits: Values, sampling: Sampling, sample_index: int) -> int:
    """The token of draw number ``sample_index``: the likeliest at temperature 0, else one drawn with the logits as
    chances."""
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")
    scores = logits[order] / (1000 * sampling.temperature)
    chances = np.exp(scores - scores.max())
    chances /= chances.sum()
    if sampling.top_k:
        chances[sampling.top_k :] = 0
    chances[1:][np.cumsum(chances)[:-1] >= sampling.top_p] = 0
    random = np.random.default_rng([sampling.seed % (1 << 64), sample_index])
    return int(order[random.choice(len(chances), p=chances / chances.sum())])


# --------------------------------------------------------------------------------------------------------- the builder


class StandInBuilder:
    """A ``roles.engine.PartBuilder`` of stand-ins.

    Args:
        on_finish: called with every part that is made.
        options: as of ``StandInStage``.
    """

    def __init__(
        self,
        spec: PartSpec,
        names: tuple[str, ...],
        *,
        on_finish: Callable[[StandInStage], None] = lambda stage: None,
        **options: Any,
    ) -> None:
        shapes = shapes_of(spec.config)
        if not 0 <= spec.start < spec.stop <= spec.layers == len([name for name in shapes if "layers." in name]):
            raise ConfigError(f"layers [{spec.start}, {spec.stop}) of {spec.layers} are no part of that model")
        first = ["embed.weight"] if spec.start == 0 else []
        last = ["norm.weight", "head.weight"] if spec.stop == spec.layers else []
        owned = [*first, *(f"layers.{layer}.weight" for layer in range(spec.start, spec.stop)), *last]
        if missing := set(owned) - set(names):
            raise ConfigError(f"the model's files lack {min(missing)}")
        self.wanted: Mapping[str, tuple[int, ...]] = {name: shapes[name] for name in owned}
        self.weights_bytes = 4 * sum(math.prod(shape) for shape in self.wanted.values())
        self.cache_position_bytes = 4 * WIDTH * (spec.stop - spec.start)
        self._spec, self._options, self._on_finish = spec, options, on_finish
        self._context = int(json.loads(spec.config)["max_position_embeddings"])
        self._placed: dict[str, Values] = {}

    def place(self, name: str, dtype: str, data: memoryview) -> None:
        if dtype != "F32":
            raise ConfigError(f"{name} is {dtype}: a stand-in's weights are F32")
        self._placed[name] = np.frombuffer(data, "<f4").astype(np.int64).reshape(self.wanted[name])

    def finish(self) -> StandInStage:
        if missing := self.wanted.keys() - self._placed.keys():
            raise ConfigError(f"{min(missing)} is missing")
        made = StandInStage(self._spec, self._placed, context=self._context, **self._options)
        self._on_finish(made)
        return made


def stand_in_part(config: str, start: int, stop: int, *, seed: int = 1, **options: Any) -> StandInStage:
    """A part, loaded without files. Options as of ``StandInStage``."""
    tensors = tensors_of(config, seed=seed)
    layers = int(json.loads(config)["num_hidden_layers"])
    builder = StandInBuilder(PartSpec(config, start, stop, layers), tuple(tensors), **options)
    for name in builder.wanted:
        builder.place(name, "F32", memoryview(tensors[name].tobytes()))
    return builder.finish()


def tokens_of(config: str, prompt: list[int], tokens: int, sampling: Sampling, *, seed: int = 1) -> list[int]:
    """What one part with all layers generates: the reference for every split. Raises as ``StandInStage.run``."""
    layers = int(json.loads(config)["num_hidden_layers"])
    whole = stand_in_part(config, 0, layers, seed=seed)
    whole.open("reference", positions=len(prompt) + tokens, sampling=sampling)
    made: list[int] = []
    ids = prompt
    for sample_index in range(tokens):
        payload = memoryview(np.array(ids, "<i4").tobytes())
        keep = len(whole.sessions["reference"].history)
        ran = run_one(
            whole,
            "reference",
            Pass(keep, payload, len(ids), "ids", "fp32", 1, sample_index),
        )
        made += ran.tokens
        ids = [ran.tokens[0]]
    return made


class StandIns:
    """Stand-ins for a worker of a test, and what became of them.

    ::

        stand_ins = StandIns(limit_bytes=1 << 20)
        peer = cluster.join(holding=stand_ins.holding)

    Args:
        limit_bytes: what the worker gives to parts.
        stream_bps: what it says of its memory.
        compute_flops: what it says of its speed; None: nothing.
        options: of ``StandInStage``, for every part.

    Attributes:
        engines: of parts that were loaded, in order; they stay here when they are unloaded.
    """

    def __init__(
        self,
        *,
        limit_bytes: int = 1 << 30,
        stream_bps: float = 1e9,
        compute_flops: float | None = None,
        **options: Any,
    ) -> None:
        self.engines: list[StandInStage] = []
        self._options = options
        self.holding = Holding(
            build_part=self._build,
            measure=lambda config, dtype, weights: (
                asdict(sizes_of(config)) | {"dtype": dtype or "fp32", "width": WIDTH}
            ),
            limit_bytes=limit_bytes,
            stream_bps=lambda: stream_bps,
            compute_flops=(lambda: compute_flops) if compute_flops is not None else None,
        )

    def _build(self, spec: PartSpec, names: tuple[str, ...]) -> StandInBuilder:
        return StandInBuilder(spec, names, on_finish=self.engines.append, **self._options)
