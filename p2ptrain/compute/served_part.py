"""A loaded part of a model and its sessions: the computation of one stage of a served model.

``ServedPart`` and its builder implement ``roles.engine.StageEngine`` and ``PartBuilder`` structurally, because compute
imports no roles. A session is a KV cache for the positions that it was opened for and, on the last stage, a ``Picker``.
A failed ``run`` leaves the session cut to ``keep`` positions.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.generation.utils import ALL_CACHE_NAMES

from p2ptrain.compute.activations import DTYPES, decode_untrusted, encode, ids_untrusted
from p2ptrain.compute.adapter import MergedTable
from p2ptrain.compute.device import ComputeDevice, check_memory, pick_device
from p2ptrain.compute.key_value_cache import KeyValueCache
from p2ptrain.compute.layout import LayerRange, NotSplit, layer_sizes, refused
from p2ptrain.compute.model import check_architecture, first_line, load_model, without_dropout
from p2ptrain.compute.part import OnBytes, PartAssembly, PartModel, context_of
from p2ptrain.compute.picking import Picker
from p2ptrain.compute.split_check import check_splits
from p2ptrain.core.activations import IDS, activation_bytes
from p2ptrain.core.adapters import file_of, is_adapter, read_adapter
from p2ptrain.core.errors import ConfigError, ProtocolError, ResourceError, StorageError, UserError
from p2ptrain.core.model_config import MAX_CONFIG_BYTES, config_untrusted
from p2ptrain.core.serving import PartSpec, Pass, Ran, Sampling, check_positions
from p2ptrain.core.tensor_files import TensorTable

MAX_SESSIONS = 256


@dataclass(slots=True)
class _Session:
    """A history. If the model has switches (``context_of``) the positions are those of ``ids``, their token ids; the
    cache may have fewer, which are then computed again. ``kind``: number of switches that the cached keys are beyond.
    """

    cache: KeyValueCache | TokenHistory
    picker: Picker | None  # on the last stage
    ids: Tensor
    kind: int = 0


_LESS = "choose a smaller dtype, or split the model over more workers"


def load_whole(
    directory: Path, *, device: str = "auto", dtype: str = "", on_bytes: OnBytes = lambda done_bytes, total_bytes: None
) -> ServedPart:
    """Load all layers of the model in ``directory`` as one part, for a verifier or a drafter. Blocking. An adapter is
    merged into its base's weights.

    Args:
        device, dtype: as in ``PartSpec``.
        on_bytes: called on this thread after each piece; an exception from it ends the loading.

    Raises:
        ConfigError: there is no model, or it is quantized.
        StorageError: a file cannot be read.
        UserError, ResourceError: see ``ServedPartBuilder``.
    """
    path, remedy = file_of(directory, "config.json"), "give a model directory that save_pretrained wrote"
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes", remedy=remedy)
        text = path.read_text("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {path}", remedy=remedy) from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text", remedy=remedy) from error
    table = MergedTable(read_adapter(directory)) if is_adapter(directory) else TensorTable(directory)
    try:
        layers = config_of(text).num_hidden_layers
        builder = ServedPartBuilder(PartSpec(text, 0, layers, layers, dtype, device), table.entries)
    except NotSplit:
        return _load_unsplit(text, table, device=device, dtype=dtype, on_bytes=on_bytes)
    builder.place_all(table, on_bytes)
    return builder.finish()


def _load_unsplit(text: str, table: TensorTable, *, device: str, dtype: str, on_bytes: OnBytes) -> ServedPart:
    place, directory = pick_device(device), table.directory
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each architecture validates in its own way and with its own exceptions
        raise ConfigError(f"{directory / 'config.json'} is not valid: {first_line(error)}") from error
    spec = PartSpec(text, 0, 1, 1, dtype, device)
    computed = _dtype(dtype, config)
    total_bytes = sum(math.prod(entry.shape) for entry in table.entries.values()) * computed.itemsize
    check_memory(total_bytes, place, f"the model in {directory}", _LESS)
    loaded: Any = load_model(directory, computed)
    if isinstance(table, MergedTable):
        for name, parameter in table.adapted.items():
            loaded.get_parameter(parameter).data.copy_(table.tensor(name))
    model = WholeModel(loaded.to(place.torch_device))
    on_bytes(total_bytes, total_bytes)
    layers = len(model.part)
    return ServedPart(replace(spec, stop=layers, layers=layers), model, computed, place)


def config_of(text: str) -> PretrainedConfig:
    """The configuration in a ``config.json`` that a peer sent. No code of the model is run.

    Raises:
        ConfigError: it is invalid, or its model is not supported.
    """
    try:
        table = config_untrusted(text)
    except ProtocolError as error:
        raise ConfigError(error.message, remedy="use the config.json of the model's directory") from error
    check_architecture(table["model_type"])
    if table.get("quantization_config") is not None:
        raise ConfigError(
            f"this {table['model_type']!r} model is quantized, which parts do not support",
            remedy="use the model's unquantized weights",
        )
    try:
        config = AutoConfig.for_model(**table)
    except Exception as error:  # each architecture validates in its own way and with its own exceptions
        raise NotSplit(f"this config.json is not a valid {table['model_type']!r}: {first_line(error)}") from error
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise refused(config, "its configuration has no num_hidden_layers")
    return without_dropout(config)


def _dtype(wanted: str, config: PretrainedConfig) -> torch.dtype:
    if wanted and wanted not in DTYPES:
        raise ConfigError(f"a part cannot be computed in {wanted!r}", remedy=f"use {', '.join(DTYPES)}")
    return DTYPES[wanted] if wanted else dtype_of(config)


def name_of(dtype: torch.dtype) -> str:
    return next(name for name, each in DTYPES.items() if each == dtype)


def dtype_of(config: PretrainedConfig) -> torch.dtype:
    """Default dtype of the computation: the configuration's ``dtype``, or fp32."""
    named = str(getattr(config, "dtype", None)).removeprefix("torch.")
    # Only the configuration counts, because a stage without the files must get the same result.
    return next((dtype for dtype in DTYPES.values() if str(dtype) == f"torch.{named}"), torch.float32)


@functools.lru_cache(maxsize=8)
def measured(text: str, dtype: str) -> dict[str, Any]:
    """The bytes of a model's layers and caches, and more (``roles.serving.worker_pool.ModelMeasurement``).

    Raises ``ConfigError`` if it does not split."""
    config = config_of(text)
    check_splits(config)
    computed = _dtype(dtype, config)
    about = {"dtype": name_of(computed), "width": config.hidden_size}
    return asdict(layer_sizes(config, computed)) | about


class ServedPartBuilder:
    """Implements ``roles.engine.PartBuilder``, and the class ``BuildPart``.

    Raises:
        ConfigError: the configuration is invalid, the architecture cannot be split, or the files lack a tensor.
        UserError: this machine has no such device.
        ResourceError: there is too little memory for the weights.
    """

    def __init__(self, spec: PartSpec, names: Collection[str]) -> None:
        config, part = config_of(spec.config), LayerRange(spec.start, spec.stop, spec.layers)
        check_splits(config)
        self._spec, self._dtype, self._device = spec, _dtype(spec.dtype, config), pick_device(spec.device)
        self._assembly = PartAssembly(config, part, names, dtype=self._dtype, device=self._device.torch_device)
        self.wanted: Mapping[str, tuple[int, ...]] = self._assembly.wanted
        self.weights_bytes = sum(math.prod(shape) for shape in self.wanted.values()) * self._dtype.itemsize
        self.cache_position_bytes = self._assembly.cache_position_bytes
        what = f"a part of {len(part)} of {part.layers} layers"
        check_memory(self.weights_bytes, self._device, what, _LESS)

    def place(self, name: str, dtype: str, data: memoryview, start: int = 0) -> None:
        """Copy bytes [start, ...) of a tensor. Pieces come in order. Raises as ``PartAssembly.place_bytes``."""
        self._assembly.place_bytes(name, dtype, data, start)

    def place_all(self, table: TensorTable, on_bytes: OnBytes) -> None:
        """Read all tensors from a model directory. Raises as ``PartAssembly.place_all``."""
        self._assembly.place_all(table, on_bytes)

    def finish(self) -> ServedPart:
        """Return the part. Raises ``ConfigError`` if a tensor is missing."""
        return ServedPart(self._spec, self._assembly.finish(), self._dtype, self._device)


class ServedPart:
    """Implements ``roles.engine.StageEngine``, which documents the attributes. ``context``: as in ``PartModel``."""

    def __init__(
        self, spec: PartSpec, model: PartModel | WholeModel, dtype: torch.dtype, device: ComputeDevice
    ) -> None:
        self.spec = spec
        self.width, self.vocab_size = model.width, model.vocab_size
        self.encoding = name_of(dtype)
        self.weights_bytes = model.weights_bytes
        self.cache_position_bytes = model.cache_position_bytes
        self.device = device.label
        self.context = model.context
        self._dtype, self._place = dtype, device
        self._model: Any = model
        self._sessions: dict[str, _Session] = {}

    @property
    def cache_bytes(self) -> int:
        """Allocated cache memory of all open sessions."""
        return sum(session.cache.nbytes for session in self._sessions.values())

    def open(self, session: str, *, positions: int, sampling: Sampling) -> None:
        """Open a session of at most ``positions`` positions, and allocate its whole cache.

        Raises:
            UserError: the model's context is shorter, ``sampling`` is invalid, or the session exists already.
            ResourceError: there is too little memory for the cache, or there are ``MAX_SESSIONS`` sessions.
        """
        if session in self._sessions:
            raise UserError(f"this part already has a session {session[:64]!r}", remedy="close it, or use another name")
        check_positions(positions, self._model.context)
        if len(self._sessions) >= MAX_SESSIONS:
            raise ResourceError(f"this part already has {MAX_SESSIONS} sessions, the maximum", remedy="close one")
        picker = Picker(sampling)
        cache_bytes = positions * self.cache_position_bytes
        what = f"the cache of a text of {positions} tokens"
        check_memory(cache_bytes, self._place, what, "ask for fewer tokens, or fewer texts at a time")
        with _translate_out_of_memory("the cache of a session", self._place):
            cache = self._model.new_cache(positions)
        ids = torch.zeros(0, dtype=torch.int64)
        self._sessions[session] = _Session(cache, picker if self._model.part.last else None, ids)

    def run(self, session: str, work: Pass) -> Ran:
        """See ``StageEngine.run``. After a ``ProtocolError`` the session is unchanged, after any other it is cut to
        ``keep``."""
        state = self._checked(session, work)
        activation_bytes(work.out_encoding, 0, self.width)
        with self._forward(state, work) as out:
            if state.picker is not None:  # the last stage; without samples it drops the logits
                return Ran(memoryview(b""), state.picker.pick(out, work.sample_index) if work.samples else ())
            return Ran(encode(out, work.out_encoding), ())

    @contextmanager
    def _forward(self, state: _Session, work: Pass) -> Iterator[Tensor]:
        """Yield logits of the last max(1, samples) positions, or hidden states of all: (rows, entries). An exception
        here or in the block cuts the session to ``keep``."""
        # The last stage computes one row even without samples, because ``logits=0`` would mean all rows.
        x, keep = self._input(work), work.keep
        state.cache.cut(min(keep, state.cache.length))
        try:
            with torch.inference_mode(), _translate_out_of_memory("the next positions of a session", self._place):
                yield self._computed(state, x.to(self._place.torch_device), keep, max(1, work.samples))
        except BaseException:
            state.cache.cut_to_at_most(keep)  # only some layers may have the new positions
            state.ids = state.ids[:keep]
            raise

    def _computed(self, state: _Session, x: Tensor, keep: int, rows: int) -> Tensor:
        """The last ``rows`` rows. Where the number of positions passes a switch, they are computed again from the first
        one, so that a row depends on the ids alone, however they came."""
        cache, switches = state.cache, self._model.switches
        stop = keep + len(x)
        if switches:
            x = state.ids = torch.cat([state.ids[:keep].to(x.device), x])
        outs: list[Tensor] = []
        done = stop - rows
        for end in (*(each for each in switches if done < each < stop), stop):
            kind = bisect_left(switches, end)
            if kind != state.kind:
                cache.cut(0)
                state.kind = kind
            start, first = cache.length, 0 if switches else keep
            positions = torch.arange(start, end, device=x.device)
            outs.append(
                self._model.forward(x[None, start - first : end - first], positions, cache, logits=end - done)[0]
            )
            done = end
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def close(self, session: str) -> None:
        self._sessions.pop(session, None)

    def _checked(self, session: str, work: Pass) -> _Session:
        keep, count, samples, sample_index = work.keep, work.count, work.samples, work.sample_index
        state = self._sessions.get(session)
        if state is None:
            raise ProtocolError(f"there is no session {session[:64]!r} on this part")
        length = len(state.ids) if self._model.switches else state.cache.length
        most = state.cache.positions
        if not 0 <= keep <= length:
            raise ProtocolError(f"cannot keep {keep} positions: the session has {length}")
        if count < 1 or keep + count > most:
            raise ProtocolError(f"cannot add {count} positions to {keep}: the session was opened for {most}")
        if samples and state.picker is None:
            raise ProtocolError("only the last stage samples tokens")
        if not 0 <= samples <= count:
            raise ProtocolError(f"cannot sample {samples} tokens at {count} positions")
        if not 0 <= sample_index <= most:  # one sample per position; skipping ahead takes time
            raise ProtocolError(f"sample index {sample_index} is out of range in a session of {most} positions")
        return state

    def _input(self, work: Pass) -> Tensor:
        payload, count, encoding = work.payload, work.count, work.encoding
        if self._model.part.first:
            if encoding != IDS:
                raise ProtocolError(f"the first stage takes token ids ({IDS}), not {encoding[:32]!r}")
            return ids_untrusted(payload, count, self.vocab_size)
        return decode_untrusted(payload, encoding, count, self.width, self._dtype)


@contextmanager
def _translate_out_of_memory(what: str, place: ComputeDevice) -> Iterator[None]:
    """Translate torch's out-of-memory errors to ``ResourceError``. On a CPU they are plain ``RuntimeError``s."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise ResourceError(
            f"{place.label} has too little memory for {what}",
            remedy="close other sessions or programs, or give this peer fewer layers",
        ) from error


# -------------------------------------------------------------------------------------------- models that do not split


@dataclass(slots=True)
class TokenHistory:
    """The cache of one session, with the interface of ``KeyValueCache``.

    Attributes:
        ids: token ids of all positions so far, shape (length,).
        state: keyword arguments for ``prepare_inputs_for_generation`` of the next token, with the model's own cache.
            Empty if there is no cache that fits ``ids``: then the next pass starts from the first token.
        nbytes: 0, because the size of the model's cache is not known.
    """

    positions: int
    ids: Tensor
    state: dict[str, Any] = field(default_factory=dict)
    nbytes: int = 0

    @property
    def length(self) -> int:
        return len(self.ids)

    def cut(self, keep: int) -> None:
        if keep < self.length:
            self.cut_to_at_most(keep)

    def cut_to_at_most(self, keep: int) -> None:
        self.ids, self.state = self.ids[:keep], {}


class WholeModel:
    """All layers of a model; its attributes and methods are those of ``PartModel`` that serving needs."""

    cache_position_bytes = 0  # not known

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        config = model.config.get_text_config()
        layers = getattr(config, "num_hidden_layers", None) or 1
        self.part = LayerRange(0, layers, layers)
        self.width, self.vocab_size = getattr(config, "hidden_size", 0), int(config.vocab_size)
        self.context, self.switches = context_of(config, is_whole=True)
        self.weights_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def new_cache(self, positions: int) -> TokenHistory:
        return TokenHistory(positions, torch.zeros(0, dtype=torch.int64, device=self._model.device))

    def forward(self, x: Tensor, positions: Tensor, cache: TokenHistory, *, logits: int) -> Tensor:
        """Logits (1, ``logits``, vocab) of the last of the token ids ``x`` (1, T), which follow those in ``cache``."""
        model, goes_on = self._model, bool(cache.state) and x.shape[1] == 1
        ids = torch.cat([cache.ids, x[0]])[None]
        state = cache.state if goes_on else {"attention_mask": torch.ones_like(ids), "use_cache": True}
        if model._supports_logits_to_keep():
            state = state | {"logits_to_keep": logits}
        wanted = model.prepare_inputs_for_generation(
            ids, next_sequence_length=1 if goes_on else None, is_first_iteration=not goes_on, **state
        )
        outputs = model(**wanted, return_dict=True)
        state = model._update_model_kwargs_for_generation(outputs, state)
        cache.ids, cache.state = ids[0], state if any(state.get(name) is not None for name in ALL_CACHE_NAMES) else {}
        return cast(Tensor, outputs.logits[:, -logits:])
