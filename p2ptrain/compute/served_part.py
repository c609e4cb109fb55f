"""A loaded part of a model and its sessions: the computation of one stage of a served model.

``ServedPart`` and its builder implement ``roles.engine.StageEngine`` and ``PartBuilder`` structurally, because compute
imports no roles. A session is a KV cache for the positions that it was opened for and, on the last stage, a ``Picker``.
A request that is refused (``ProtocolError``) leaves its session as it was; any other failure cuts it to ``keep``
positions.

A model that does not split is served whole, by ``WholeModel``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.generation.utils import ALL_CACHE_NAMES

from p2ptrain.compute.activations import DTYPES, bytes_of, decode_untrusted, encode, ids_untrusted
from p2ptrain.compute.adapter import MergedTable
from p2ptrain.compute.captured import Capture, CudaCapture, PassRunner, SessionSteps, can_capture
from p2ptrain.compute.device import ComputeDevice, check_memory, pick_device, translate_out_of_memory
from p2ptrain.compute.key_value_cache import KeyValueCache
from p2ptrain.compute.layout import LayerRange, NotSplit, layer_sizes, split_refusal
from p2ptrain.compute.model import check_architecture, first_line, load_model, without_dropout
from p2ptrain.compute.part import ContextLimit, OnBytes, PartAssembly, PartModel, tensors_bytes
from p2ptrain.compute.picking import Picker
from p2ptrain.compute.quantized import choose_weights, quantize_linears
from p2ptrain.compute.split_check import check_splits
from p2ptrain.core.activations import IDS, activation_bytes
from p2ptrain.core.adapters import file_of, is_adapter, read_adapter
from p2ptrain.core.errors import ConfigError, P2PTrainError, ProtocolError, ResourceError, UserError
from p2ptrain.core.serving import PartSpec, Pass, Ran, Sampling, check_positions
from p2ptrain.core.tensor_files import MAX_CONFIG_BYTES, TensorTable, config_untrusted

MAX_SESSIONS = 256
_SMALLER_PART = "choose a smaller dtype, or split the model over more workers"
_FEWER_SESSIONS = "close other sessions or programs, or give this peer fewer layers"


# -------------------------------------------------------------------------------------------------------------- loading


def load_whole(
    directory: Path,
    *,
    device: str = "auto",
    dtype: str = "",
    weights: str = "",
    on_bytes: OnBytes = lambda done_bytes, total_bytes: None,
) -> ServedPart:
    """Load all layers of the model in ``directory`` as one part, for a verifier or a drafter. Blocking. An adapter is
    merged into its base's weights.

    Args:
        device, dtype, weights: as in ``PartSpec``.
        on_bytes: called on this thread after each piece; an exception from it ends the loading.

    Raises:
        ConfigError: there is no model, or it is quantized in a format that ``choose_weights`` does not know.
        StorageError: a file cannot be read.
        UserError, ResourceError: see ``ServedPartBuilder``.
    """
    path = file_of(directory, "config.json")
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1).decode()
    except (OSError, UnicodeDecodeError) as error:
        text = f"cannot read {path}: {error}"
        raise ConfigError(text, remedy="give a model directory that save_pretrained wrote") from error
    table = _table_of(directory)
    try:
        layers = config_of(text).num_hidden_layers
        builder = ServedPartBuilder(PartSpec(text, 0, layers, layers, dtype, device, weights), table.entries)
    except NotSplit:
        return _load_unsplit(PartSpec(text, 0, 1, 1, dtype, device, weights), directory, on_bytes)
    builder.place_all(table, on_bytes)
    return builder.finish()


def _load_unsplit(spec: PartSpec, directory: Path, on_bytes: OnBytes) -> ServedPart:
    device = pick_device(spec.device)
    loaded, dtype = load_module(directory, device, spec.dtype, spec.weights)
    model = WholeModel(loaded)
    on_bytes(model.weights_bytes, model.weights_bytes)
    layers = len(model.part)
    return ServedPart(replace(spec, stop=layers, layers=layers), model, DTYPES[dtype], device)


def load_module(directory: Path, device: ComputeDevice, wanted: str = "", weights: str = "") -> tuple[Any, str]:
    """Transformers' model in ``directory``, in evaluation mode, and its dtype, a key of ``DTYPES``. An adapter is
    merged into its base's weights. ``weights``: as in ``PartSpec``. Raises as ``load_whole``."""
    table = _table_of(directory)
    try:
        config = AutoConfig.from_pretrained(table.directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # each architecture validates in its own way and with its own exceptions
        text = f"{table.directory / 'config.json'} is not valid: {first_line(error)}"
        raise ConfigError(text, remedy="correct the file, or use another model") from error
    if getattr(config, "quantization_config", None) is not None:
        text = f"this {config.model_type!r} model is quantized, and is served only if it splits"
        raise ConfigError(text, remedy="use the model's unquantized weights")
    dtype = choose_dtype(config, wanted)
    total_bytes = sum(math.prod(entry.shape) for entry in table.entries.values()) * dtype.itemsize
    check_memory(total_bytes, device, f"the model in {table.directory}", _SMALLER_PART)
    loaded: Any = load_model(table.directory, dtype)
    if isinstance(table, MergedTable):
        for name, parameter in table.adapted.items():
            loaded.get_parameter(parameter).data.copy_(table.tensor(name))
    loaded = loaded.to(device.torch_device).eval()
    head = loaded.get_output_embeddings()
    quantize_linears([module for module in loaded.base_model.children() if module is not head], weights)
    return loaded, _encoding_of(dtype)


def _table_of(directory: Path) -> TensorTable:
    return MergedTable(read_adapter(directory)) if is_adapter(directory) else TensorTable(directory)


def config_of(text: str) -> PretrainedConfig:
    """The configuration in a ``config.json`` that a peer sent. No code of the model is run. Raises ``ConfigError``: it
    is invalid, or its model is not supported."""
    try:
        table = config_untrusted(text)
    except ProtocolError as error:
        raise ConfigError(error.message, remedy="use the config.json of the model's directory") from error
    check_architecture(table["model_type"])
    try:
        config = AutoConfig.for_model(**table)
    except Exception as error:  # each architecture validates in its own way and with its own exceptions
        raise NotSplit(f"this config.json is not a valid {table['model_type']!r}: {first_line(error)}") from error
    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise split_refusal(config, "its configuration has no num_hidden_layers")
    choose_weights(config)
    return without_dropout(config)


def choose_dtype(config: PretrainedConfig, wanted: str = "") -> torch.dtype:
    """The dtype of the computation: ``wanted``, a key of ``DTYPES``, or that of the configuration, or fp32. Raises
    ``ConfigError``."""
    if wanted and wanted not in DTYPES:
        raise ConfigError(f"a part cannot be computed in {wanted!r}", remedy=f"use {', '.join(DTYPES)}")
    # Not that of the files: a stage without them must get the same result.
    configured = str(getattr(config, "dtype", None)).removeprefix("torch.")
    usual = next((dtype for dtype in DTYPES.values() if str(dtype) == f"torch.{configured}"), torch.float32)
    return DTYPES.get(wanted, usual)


def _encoding_of(dtype: torch.dtype) -> str:
    return next(name for name, known in DTYPES.items() if known == dtype)


def measure_model(text: str, dtype: str, weights: str = "") -> dict[str, Any]:
    """The bytes of a model's layers and caches, and more (``roles.serving.worker_pool.ModelMeasurement``).

    Raises ``ConfigError`` if it does not split."""
    config = config_of(text)
    check_splits(config)
    chosen = choose_dtype(config, dtype)
    return asdict(layer_sizes(config, chosen, weights)) | {"dtype": _encoding_of(chosen), "width": config.hidden_size}


class ServedPartBuilder(PartAssembly):
    """Implements ``roles.engine.PartBuilder``, and the class ``BuildPart``. Raises ``ConfigError``: the configuration
    is invalid, the architecture cannot be split, or the files lack a tensor; ``UserError``: this machine has no such
    device; ``ResourceError``: there is too little memory for the weights."""

    def __init__(self, spec: PartSpec, names: Collection[str]) -> None:
        config, part = config_of(spec.config), LayerRange(spec.start, spec.stop, spec.layers)
        check_splits(config)
        self._spec, self._compute_device = spec, pick_device(spec.device)
        dtype = choose_dtype(config, spec.dtype)
        place = self._compute_device.torch_device
        super().__init__(config, part, names, dtype=dtype, device=place, weights=spec.weights)
        what = f"a part of {len(part)} of {part.layers} layers"
        check_memory(self.weights_bytes, self._compute_device, what, _SMALLER_PART)

    def finish(self) -> ServedPart:
        """Return the part. Raises ``ConfigError`` if a tensor is missing."""
        return ServedPart(self._spec, self.build_model(), self._dtype, self._compute_device)


# ------------------------------------------------------------------------------------------------------------- sessions


@dataclass(slots=True)
class _Session:
    """A history.

    Attributes:
        picker: of the last stage.
        ids: if the model has switches (``ContextLimit``), the token ids of all positions. The cache may have fewer
            positions, which are then computed again.
        passed_switches: number of switches that the cached keys are beyond.
    """

    cache: KeyValueCache | TokenHistory
    picker: Picker | None
    ids: Tensor
    passed_switches: int = 0
    steps: SessionSteps = field(default_factory=dict)


class ServedPart:
    """Implements ``roles.engine.StageEngine``, which documents the attributes. ``context``: as in ``ContextLimit``."""

    def __init__(
        self, spec: PartSpec, model: PartModel | WholeModel, dtype: torch.dtype, device: ComputeDevice
    ) -> None:
        self.spec = spec
        self.width, self.vocab_size = model.width, model.vocab_size
        self.encoding = _encoding_of(dtype)
        self.weights_bytes = model.weights_bytes
        self.cache_position_bytes = model.cache_position_bytes
        self.device = device.label
        self.context = model.context
        self._dtype, self._compute_device = dtype, device
        self._model: Any = model
        self._sessions: dict[str, _Session] = {}
        self._runner: PassRunner | None = None
        if device.kind == "cuda":
            self.capture_steps(CudaCapture(device.torch_device))

    def capture_steps(self, capture: Capture) -> None:
        """Replay decoding steps from now on, if the model's can be captured."""
        if can_capture(self._model):
            self._runner = PassRunner(self._model, capture)

    @property
    def cache_bytes(self) -> int:
        """Allocated cache memory of all open sessions."""
        return sum(session.cache.nbytes for session in self._sessions.values())

    free_positions = 1 << 40  # a session's whole cache is allocated when it opens

    def reserve(self, positions: int) -> None:
        """See ``free_positions``."""

    def open(self, session: str, *, positions: int, sampling: Sampling, block_hashes: Sequence[bytes] = ()) -> int:
        """Open a session of at most ``positions`` positions, and allocate its whole cache. Raises ``UserError``: the
        model's context is shorter, ``sampling`` is invalid, or the session exists already; ``ResourceError``: there is
        too little memory for the cache, or there are ``MAX_SESSIONS`` sessions."""
        if session in self._sessions:
            raise UserError(f"this part already has a session {session[:64]!r}", remedy="close it, or use another name")
        check_positions(positions, self.context)
        if len(self._sessions) >= MAX_SESSIONS:
            raise ResourceError(f"this part already has {MAX_SESSIONS} sessions, the maximum", remedy="close one")
        picker = Picker(sampling, selects_first=self._compute_device.kind == "cuda")
        what = f"the cache of a text of {positions} tokens"
        remedy = "ask for fewer tokens, or fewer texts at a time"
        check_memory(positions * self.cache_position_bytes, self._compute_device, what, remedy)
        with translate_out_of_memory(what, _FEWER_SESSIONS):
            cache = self._model.new_cache(positions)
        ids = torch.zeros(0, dtype=torch.int64)
        self._sessions[session] = _Session(cache, picker if self._model.part.last else None, ids)
        return 0

    def run(self, passes: Mapping[str, Pass]) -> dict[str, Ran | P2PTrainError]:
        """See ``StageEngine.run``."""
        ran: dict[str, Ran | P2PTrainError] = {}
        for session, work in passes.items():
            try:
                ran[session] = self._run_alone(session, work)
            except P2PTrainError as error:
                ran[session] = error
        return ran

    def _run_alone(self, session: str, work: Pass) -> Ran:
        state = self._sessions.get(session)
        if state is None:
            raise ProtocolError(f"there is no session {session[:64]!r} on this part")
        self._check_request(state, work)
        activation_bytes(work.out_encoding, 0, self.width)
        x = self._input(work)
        state.cache.cut(work.keep)
        try:
            with torch.inference_mode(), translate_out_of_memory("the next tokens of a session", _FEWER_SESSIONS):
                # The last stage computes one row even without samples, because ``logits=0`` would mean all rows.
                x, rows = x.to(self._compute_device.torch_device), max(1, work.samples, len(work.targets))
                out = self._compute(state, x, work.keep, rows)
                if state.picker is None:
                    return Ran(encode(out, work.out_encoding), ())
                tokens = state.picker.pick(out[-work.samples :], work.sample_index) if work.samples else ()
                if not work.targets:
                    return Ran(memoryview(b""), tokens)
                logits, targets = out[-len(work.targets) :].float(), torch.tensor(work.targets, device=out.device)
                losses = F.cross_entropy(logits, targets, reduction="none")
                return Ran(memoryview(b""), tokens, bytes(bytes_of(losses.neg())))
        except BaseException:
            state.cache.cut(work.keep)  # only some layers may have the new positions
            state.ids = state.ids[: work.keep]
            raise

    def close(self, session: str) -> None:
        self._sessions.pop(session, None)

    def _compute(self, state: _Session, x: Tensor, keep: int, rows: int) -> Tensor:
        """Logits of the last ``rows`` positions, or hidden states of all of ``x``, which follow the first ``keep``.
        Where the number of positions passes a switch, they are computed again from the first one, so that a row depends
        on the ids alone, however they came."""
        if self._runner is not None and isinstance(state.cache, KeyValueCache):
            return self._runner.forward(x, keep, state.cache, state.steps, rows=rows)
        cache, switches = state.cache, self._model.switches
        stop = keep + len(x)
        if switches:
            x = state.ids = torch.cat([state.ids[:keep].to(x.device), x])
        outs: list[Tensor] = []
        done = stop - rows
        for end in (*(switch for switch in switches if done < switch < stop), stop):
            passed = bisect_left(switches, end)
            if passed != state.passed_switches:
                cache.cut(0)
                state.passed_switches = passed
            start, first = cache.length, 0 if switches else keep
            positions = torch.arange(start, end, device=x.device)
            new = x[None, start - first : end - first]
            outs.append(self._model.forward(new, positions, cache, logits=end - done)[0])
            done = end
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def _check_request(self, state: _Session, work: Pass) -> None:
        keep, count, samples = work.keep, work.count, work.samples
        length = len(state.ids) if self._model.switches else state.cache.length
        most = state.cache.positions
        if not 0 <= keep <= length:
            raise ProtocolError(f"cannot keep {keep} positions: the session has {length}")
        if count < 1 or keep + count > most:
            raise ProtocolError(f"cannot add {count} positions to {keep}: the session was opened for {most}")
        targets = work.targets
        if (samples or targets) and state.picker is None:
            raise ProtocolError("only the last stage samples and scores tokens")
        if not 0 <= samples <= count or len(targets) > count:
            raise ProtocolError(f"cannot sample {samples} tokens and score {len(targets)} at {count} positions")
        if targets:
            if not 0 <= min(targets) <= max(targets) < self.vocab_size:
                raise ProtocolError(f"targets from {min(targets)} to {max(targets)}, of {self.vocab_size} token ids")
            what, remedy = f"scoring {len(targets)} tokens of {self.vocab_size}", "score fewer tokens in a pass"
            check_memory(12 * len(targets) * self.vocab_size, self._compute_device, what, remedy)
        if not 0 <= work.sample_index <= most:  # one sample per position; skipping ahead takes time
            raise ProtocolError(f"sample index {work.sample_index} is out of range in a session of {most} positions")

    def _input(self, work: Pass) -> Tensor:
        if not self._model.part.first:
            return decode_untrusted(work.payload, work.encoding, work.count, self.width, self._dtype)
        if work.encoding != IDS:
            raise ProtocolError(f"the first stage takes token ids ({IDS}), not {work.encoding[:32]!r}")
        return ids_untrusted(work.payload, work.count, self.vocab_size)


# -------------------------------------------------------------------------------------------- models that do not split


@dataclass(slots=True)
class TokenHistory:
    """The cache of one session of a ``WholeModel``, with the interface of ``KeyValueCache``.

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
            self.ids, self.state = self.ids[:keep], {}


class WholeModel:
    """All layers of a model, run as transformers' ``generate`` runs it; its attributes and methods are those of
    ``PartModel`` that serving needs.

    It knows nothing about the model's layers and their cache: ``prepare_inputs_for_generation`` makes the inputs of
    each pass. The cache of some models cannot be rolled back. So only a pass that adds one token at the end uses it.
    Any other pass computes the session again from the first token.
    """

    cache_position_bytes = 0  # not known

    def __init__(self, model: Any) -> None:
        self._model = model.eval()
        config = model.config.get_text_config()
        layers = getattr(config, "num_hidden_layers", None) or 1
        self.part = LayerRange(0, layers, layers)
        self.width, self.vocab_size = getattr(config, "hidden_size", 0), int(config.vocab_size)
        self.context, self.switches = ContextLimit.of(config, is_whole=True)
        self.weights_bytes = tensors_bytes(model)

    def new_cache(self, positions: int) -> TokenHistory:
        return TokenHistory(positions, torch.zeros(0, dtype=torch.int64, device=self._model.device))

    def forward(self, x: Tensor, positions: Tensor, cache: TokenHistory, *, logits: int) -> Tensor:
        """Logits (1, ``logits``, vocab) of the last of the token ids ``x`` (1, T), which follow those in ``cache``."""
        model, goes_on = self._model, bool(cache.state) and x.shape[1] == 1
        ids = torch.cat([cache.ids, x[0]])[None]
        state = cache.state if goes_on else {"attention_mask": torch.ones_like(ids), "use_cache": True}
        cache.state = {}  # what a failed pass leaves in the model's own cache is not used
        if model._supports_logits_to_keep():
            state = state | {"logits_to_keep": logits}
        inputs = model.prepare_inputs_for_generation(
            ids, next_sequence_length=1 if goes_on else None, is_first_iteration=not goes_on, **state
        )
        outputs = model(**inputs, return_dict=True)
        state = model._update_model_kwargs_for_generation(outputs, state)
        cache.ids, cache.state = ids[0], state if any(state.get(name) is not None for name in ALL_CACHE_NAMES) else {}
        return cast(Tensor, outputs.logits[:, -logits:])
