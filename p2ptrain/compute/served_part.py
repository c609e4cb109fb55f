"""A loaded part of a model and its sessions: the computation of one stage of a served model.

``ServedPart`` and its builder implement ``roles.engine.StageEngine`` and ``PartBuilder`` structurally, because compute
imports no roles. A session is a ``BlockTable`` of keys and values and, on the last stage, a ``Picker``. A request that
is refused (``ProtocolError``) leaves its session as it was; any other failure cuts it to ``keep`` positions, or, if the
session was preempted, to none.

A model that does not split is served whole, by ``WholeModel``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig
from transformers.generation.utils import ALL_CACHE_NAMES

from p2ptrain.compute.activations import DTYPES, bytes_of, decode_untrusted, encode, ids_untrusted
from p2ptrain.compute.adapter import MergedTable
from p2ptrain.compute.blocks import SessionTables
from p2ptrain.compute.captured import MOST_NEW, Capture, CudaCapture, PassRunner
from p2ptrain.compute.device import ComputeDevice, check_memory, pick_device, translate_out_of_memory
from p2ptrain.compute.key_value_cache import BatchCache, KeyValueMemory, SessionCache, SessionRows, attend_in_batches
from p2ptrain.compute.layout import LayerRange, NotSplit, layer_sizes, split_refusal
from p2ptrain.compute.linears import RowPadding, can_pack, replace_linears
from p2ptrain.compute.model import check_architecture, directory_config, first_line, load_model, without_dropout
from p2ptrain.compute.part import OnBytes, PartAssembly, PartModel, context_limit, tensors_bytes
from p2ptrain.compute.picking import Picker
from p2ptrain.compute.quantized import choose_weights, quantize_linears
from p2ptrain.compute.served_adapters import ServedAdapters, own_hashes
from p2ptrain.compute.split_check import check_splits
from p2ptrain.core.adapters import file_of, is_adapter, read_adapter
from p2ptrain.core.errors import ConfigError, JobFailed, P2PTrainError, ProtocolError, UserError
from p2ptrain.core.serving import BLOCK_POSITIONS, PartSpec, Pass, Ran, Sampling, blocks_of, check_positions
from p2ptrain.core.tensor_files import MAX_CONFIG_BYTES, TensorTable, config_untrusted

_SMALLER_PART = "choose a smaller dtype, or split the model over more workers"
_FEWER_SESSIONS = "close other sessions or programs, or give this peer fewer layers"


# -------------------------------------------------------------------------------------------------------------- loading


def load_whole(
    directory: Path,
    *,
    device: str = "auto",
    dtype: str = "",
    weights: str = "",
    adapters: Mapping[str, Path] | None = None,
    on_bytes: OnBytes = lambda done_bytes, total_bytes: None,
) -> ServedPart:
    """Load all layers of the model in ``directory`` as one part, for a verifier or a drafter. Blocking. An adapter is
    merged into its base's weights.

    Args:
        device, dtype, weights: as in ``PartSpec``.
        adapters: directories of adapters of this model, by name, for sessions that use one.
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
        place = pick_device(device)
        loaded, encoding = load_module(directory, place, dtype, weights)
        model = WholeModel(loaded)
        on_bytes(model.weights_bytes, model.weights_bytes)
        part = ServedPart(model, DTYPES[encoding], place)
    else:
        builder.place_all(table, on_bytes)
        part = builder.finish()
    for name, adapter in (adapters or {}).items():
        part.add_adapter(name, MergedTable(read_adapter(adapter, directory)))
    return part


def load_module(directory: Path, device: ComputeDevice, wanted: str = "", weights: str = "") -> tuple[Any, str]:
    """Transformers' model in ``directory``, in evaluation mode, and its dtype, a key of ``DTYPES``. An adapter is
    merged into its base's weights. ``weights``: as in ``PartSpec``. Raises as ``load_whole``."""
    table = _table_of(directory)
    config = directory_config(table.directory)
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
        self._batches = check_splits(config)
        self._compute_device = pick_device(spec.device)
        dtype = choose_dtype(config, spec.dtype)
        place = self._compute_device.torch_device
        super().__init__(config, part, names, dtype=dtype, device=place, weights=spec.weights)
        packs = self._batches and can_pack(self._compute_device.kind, dtype)
        has_copy = packs and part.first and part.last and self._whole.tied  # of the embedding, packed for the output
        copied_bytes = self._whole.model.get_input_embeddings().weight.nbytes if has_copy else 0
        what = f"a part of {len(part)} of {part.layers} layers"
        check_memory(self.weights_bytes + copied_bytes, self._compute_device, what, _SMALLER_PART)
        self.allocate_quantized()

    def finish(self) -> ServedPart:
        """Return the part. Raises ``ConfigError`` if a tensor is missing."""
        return ServedPart(self.build_model(), self._dtype, self._compute_device, batches=self._batches)


# ------------------------------------------------------------------------------------------------------------- sessions


@dataclass(slots=True)
class _Session:
    """What a session has beside its ``BlockTable``.

    Attributes:
        picker: of the last stage.
        adapter: its name; empty: the model itself.
        ids: of a ``WholeModel``, or if the model has switches (``context_limit``): the token ids of all positions.
        computed: number of positions whose keys are computed; with switches it may be less than those of ``ids``.
        passed_switches: number of switches that these keys are beyond.
        state: of a ``WholeModel``, see ``WholeModel.forward``.
    """

    picker: Picker | None
    adapter: str
    ids: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    computed: int = 0
    passed_switches: int = 0
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _ReadyPass:
    """A pass of a session that has the memory for it. ``x``: its rows; ``rows``: where they are."""

    name: str
    session: _Session
    work: Pass
    x: Tensor
    rows: SessionRows

    @property
    def wanted(self) -> int:
        """Number of final rows that the last stage computes logits for: one also without samples, which shows whether
        the numbers are finite."""
        return max(1, self.work.samples, len(self.work.targets))


class ServedPart:
    """Implements ``roles.engine.StageEngine``, which documents the attributes. ``context``: as in ``context_limit``.

    Passes of several sessions are computed together if transformers lets the model's layers use our attention, as
    ``check_splits`` finds out. Of the families that it is tested with, falcon's do not. Models that compute their keys
    again beyond some length (``context_limit``), and those that do not split, compute one session at a time.
    """

    def __init__(
        self, model: PartModel | WholeModel, dtype: torch.dtype, device: ComputeDevice, *, batches: bool = False
    ) -> None:
        self.width, self.vocab_size = model.width, model.vocab_size
        self.encoding = _encoding_of(dtype)
        self.weights_bytes = model.weights_bytes
        self.cache_position_bytes = model.cache_position_bytes
        self.device = device.label
        self.context = model.context
        self.is_batched = batches and not model.switches and device.kind in ("cpu", "cuda")  # others never ran
        self._compute_device, self._model = device, cast(Any, model)
        self._memory = model.new_memory()
        self._tables, self._sessions = SessionTables(), dict[str, _Session]()
        self._padding = RowPadding()
        self._keeps_ids = bool(model.switches) or isinstance(model, WholeModel)
        self._runner: PassRunner | None = None
        self._adapters = ServedAdapters(self._model.module)
        if self.is_batched:
            attend_in_batches(self._model.module)
            if can_pack(device.kind, dtype):
                replace_linears(self._model.module)
                self._padding = RowPadding.of(self._model.module)
        if device.kind == "cuda":
            self.capture_passes(CudaCapture(device.torch_device))

    def capture_passes(self, capture: Capture) -> None:
        """Compute in the form that suits a GPU from now on, and replay passes that repeat."""
        if self.is_batched:
            self._runner = PassRunner(self._model, self._memory, capture)

    def add_adapter(self, name: str, table: MergedTable) -> None:
        """Load an adapter. Raises ``StorageError``: its file cannot be read."""
        self.weights_bytes += self._adapters.add(name, table, DTYPES[self.encoding], self._compute_device.torch_device)

    @property
    def free_positions(self) -> int:
        """See ``StageEngine``."""
        return self._tables.pool.available * BLOCK_POSITIONS

    def reserve(self, positions: int) -> None:
        """See ``StageEngine``."""
        blocks = blocks_of(positions)
        if (new := blocks - self._tables.pool.count) > 0:
            what, remedy = f"the cache of {positions} tokens", "ask for fewer tokens, or fewer texts at a time"
            check_memory(new * BLOCK_POSITIONS * self.cache_position_bytes, self._compute_device, what, remedy)
            with translate_out_of_memory(what, _FEWER_SESSIONS):
                self._memory.grow(blocks * BLOCK_POSITIONS)
            self._tables.pool.grow(blocks)

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
        """See ``StageEngine``. Raises ``UserError``: the model's context, or the reserved memory, is shorter, or the
        session exists already."""
        if session in self._sessions:
            raise UserError(f"this part already has a session {session[:64]!r}", remedy="close it, or use another name")
        check_positions(positions, self.context)
        if adapter and adapter not in self._adapters.names:
            raise UserError(f"there is no adapter {adapter[:64]!r}", remedy="load it with the model")
        picker = Picker(sampling, selects_first=self._compute_device.kind == "cuda")
        if blocks_of(positions) > (most := self._tables.pool.count):
            text = f"a text of {positions} tokens does not fit: there is memory for {most * BLOCK_POSITIONS}"
            raise UserError(text, remedy="ask for fewer tokens, or give it more memory: --memory")
        self._sessions[session] = _Session(picker if self._model.part.last else None, adapter)
        hashes = () if self._keeps_ids else own_hashes(adapter, block_hashes)
        return self._tables.open(session, positions, hashes, order)

    def close(self, session: str) -> None:
        if self._sessions.pop(session, None) is not None:
            self._tables.close(session)

    def run(self, passes: Mapping[str, Pass]) -> dict[str, Ran | P2PTrainError]:
        """See ``StageEngine``."""
        ran: dict[str, Ran | P2PTrainError] = {}
        ready: list[_ReadyPass] = []
        known = [name for name in self._tables if name in passes]  # the first comers are the first to have memory
        with torch.inference_mode():
            for name in (*known, *(name for name in passes if name not in self._tables)):
                try:
                    ready.append(self._prepare(name, passes[name]))
                except P2PTrainError as error:
                    ran[name] = error
            for group in self._groups(ready):
                ran |= self._run_together(group)
        return ran

    def _groups(self, ready: list[_ReadyPass]) -> list[list[_ReadyPass]]:
        """What is computed in one pass of the model."""
        if not self.is_batched:
            return [[each] for each in ready]
        if self._runner is None:
            return [ready] if ready else []
        few: dict[str, list[_ReadyPass]] = {}
        for each in ready:
            if each.work.count <= MOST_NEW:
                few.setdefault(each.session.adapter, []).append(each)
        return [*few.values(), *([each] for each in ready if each.work.count > MOST_NEW)]

    def _prepare(self, name: str, work: Pass) -> _ReadyPass:
        """Check a request, and cut its session to ``keep``, with memory for the new positions."""
        session = self._sessions.get(name)
        if session is None:
            raise ProtocolError(f"there is no session {name[:64]!r} on this part")
        self._check_request(name, session, work)
        x, stop = self._input(work).to(self._compute_device.torch_device), work.keep + work.count
        for new in self._tables.extend(name, work.keep, stop):
            self._memory.begin(new.block, new.source, new.count)
        return _ReadyPass(name, session, work, x, SessionRows(list(self._tables[name].blocks), work.keep, stop))

    def _run_together(self, group: list[_ReadyPass]) -> dict[str, Ran | P2PTrainError]:
        ran: dict[str, Ran | P2PTrainError] = {}
        try:
            with translate_out_of_memory("the next tokens of a session", _FEWER_SESSIONS):
                outs = self._compute(group)
                # In hidden states a number that is not finite reaches the last row. The largest number shows it.
                tops = torch.stack([(out if self._model.part.last else out[-1].abs()).max() for out in outs])
                for each, out, is_finite in zip(group, outs, tops.isfinite().tolist(), strict=True):
                    ran[each.name] = self._finish(each, out, is_finite)
        except P2PTrainError as error:
            ran |= {each.name: error for each in group if each.name not in ran}
        finally:
            for each in group:  # only some layers may have the new positions of a pass that failed
                if not isinstance(ran.get(each.name), Ran):
                    self._undo(each)
        return ran

    def _finish(self, each: _ReadyPass, out: Tensor, is_finite: bool) -> Ran | P2PTrainError:
        """The result of a pass. ``out``: hidden states of its rows, or logits of the last ``wanted``."""
        work, picker = each.work, each.session.picker
        if not is_finite:
            text = "the model's hidden states or logits are not finite, so no next token can be chosen"
            return JobFailed(
                text, remedy="compute in fp32 or bf16 (fp16 overflows in some models), and check its files"
            )
        tokens: tuple[int, ...] = ()
        scores, tops, payload = b"", b"", memoryview(b"")
        if picker is None:
            payload = encode(out, work.out_encoding)
        elif work.samples:
            tokens = picker.pick_pass(out, work)
        if work.scored:
            logprobs = out[-work.scored :].float().log_softmax(-1)
            targets = torch.tensor(work.targets or tokens, device=out.device)
            scores = bytes(bytes_of(logprobs.gather(1, targets[:, None])))
            if work.tops:
                likeliest = logprobs.topk(min(work.tops, self.vocab_size))
                tops = bytes(bytes_of(likeliest.indices.int())) + bytes(bytes_of(likeliest.values))
        self._tables.finish(each.name, each.rows.stop, own_hashes(each.session.adapter, work.block_hashes))
        return Ran(payload, tokens, scores, tops)

    def _undo(self, each: _ReadyPass) -> None:
        """Cut a session to ``keep`` after its pass failed. Numbers that are not finite would spoil masked sums."""
        keep, session = each.work.keep, each.session
        self._tables.cut(each.name, keep)
        session.ids, session.computed, session.state = session.ids[:keep], min(session.computed, keep), {}
        if keep % BLOCK_POSITIONS:
            self._memory.clear(each.rows.table[keep // BLOCK_POSITIONS], keep % BLOCK_POSITIONS)

    def _compute(self, group: list[_ReadyPass]) -> list[Tensor]:
        """Of each pass the hidden states of its rows, or the logits of the last ``wanted``."""
        if not self.is_batched:
            return [self._compute_alone(each) for each in group]
        x, ends = torch.cat([each.x for each in group]), list(accumulate(each.work.count for each in group))
        wanted = [row for each, end in zip(group, ends, strict=True) for row in range(end - each.wanted, end)]
        if self._runner is not None:
            adapter = group[0].session.adapter
            self._adapters.use_one(adapter)
            out = self._runner.forward(x, [each.rows for each in group], wanted, adapter)
        else:
            out = self._compute_rows(group, x, wanted)
        counts = [each.wanted if self._model.part.last else each.work.count for each in group]
        return list(torch.split(out[: sum(counts)], counts))

    def _compute_rows(self, group: list[_ReadyPass], x: Tensor, wanted: list[int]) -> Tensor:
        """Of the rows ``x`` the hidden states, or the logits of those ``wanted``; more rows may follow."""
        rows, total = [each.rows for each in group], self._padding.rows(len(x))
        positions = torch.cat([torch.arange(each.start, each.stop) for each in rows])
        x, positions = (
            torch.cat([both, both[-1:].expand(total - len(both), *both.shape[1:])]) for both in (x, positions)
        )
        index = torch.tensor(wanted + wanted[-1:] * (self._padding.least - len(wanted)))
        self._adapters.use([(each.session.adapter, each.work.count, each.wanted) for each in group], total)
        cache = BatchCache(self._memory, rows, total)
        return cast(Tensor, self._model.forward(x[None], positions, cache, logits=index, rows=cache)[0])

    def _compute_alone(self, each: _ReadyPass) -> Tensor:
        """Where the number of positions passes a switch, they are computed again from the first one, so that a row
        depends on the ids alone, however they came."""
        session, keep, stop, x = each.session, each.work.keep, each.rows.stop, each.x
        self._adapters.use_one(session.adapter)
        switches, first = self._model.switches, 0 if self._keeps_ids else keep
        if keep < session.computed:
            session.computed, session.state = keep, {}
        if self._keeps_ids:
            x = session.ids = torch.cat([session.ids[:keep].to(x.device), x])
        else:
            session.computed = keep  # also those that it shares
        outs: list[Tensor] = []
        done = stop - each.wanted
        for end in (*(switch for switch in switches if done < switch < stop), stop):
            passed = bisect_left(switches, end)
            if passed != session.passed_switches:
                session.computed, session.passed_switches, session.state = 0, passed, {}
            start = session.computed
            positions = torch.arange(start, end, device=x.device)
            if isinstance(self._model, WholeModel):
                outs.append(self._model.forward(x[None, :end], session.state, start=start, logits=end - done)[0])
            else:
                cache = SessionCache(self._memory, SessionRows(each.rows.table[: blocks_of(end)], start, end))
                new = x[None, start - first : end - first]
                outs.append(self._model.forward(new, positions, cache, logits=end - done)[0])
            session.computed = done = end
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    def _check_request(self, name: str, session: _Session, work: Pass) -> None:
        """What the session, and the model, decide. The caller has checked the rest."""
        keep, count, targets, table = work.keep, work.count, work.targets, self._tables[name]
        most, length = table.positions, table.length
        if not 0 <= keep <= length and not (table.was_preempted and keep > 0):
            raise ProtocolError(f"cannot keep {keep} positions: the session has {length}")
        if keep + count > most:
            raise ProtocolError(f"cannot add {count} positions to {keep}: the session was opened for {most}")
        if work.scored:
            if targets and not 0 <= min(targets) <= max(targets) < self.vocab_size:
                raise ProtocolError(f"targets from {min(targets)} to {max(targets)}, of {self.vocab_size} token ids")
            what, remedy = f"scoring {work.scored} tokens of {self.vocab_size}", "score fewer tokens in a pass"
            check_memory(12 * work.scored * self.vocab_size, self._compute_device, what, remedy)
        if session.picker is not None and work.samples:
            session.picker.check_untrusted(work, self.vocab_size)

    def _input(self, work: Pass) -> Tensor:
        if not self._model.part.first:
            return decode_untrusted(work.payload, work.encoding, work.count, self.width, DTYPES[self.encoding])
        return ids_untrusted(work.payload, work.count, self.vocab_size)


# -------------------------------------------------------------------------------------------- models that do not split


class WholeModel:
    """All layers of a model, run as transformers' ``generate`` runs it; its attributes and methods are those of
    ``PartModel`` that serving needs.

    It knows nothing about the model's layers and their cache: ``prepare_inputs_for_generation`` makes the inputs of
    each pass. The cache of some models cannot be rolled back. So only a pass that adds one token at the end uses it.
    Any other pass computes the session again from the first token.
    """

    cache_position_bytes = 0  # not known

    def __init__(self, model: Any) -> None:
        self.module = model.eval()
        config = model.config.get_text_config()
        layers = getattr(config, "num_hidden_layers", None) or 1
        self.part = LayerRange(0, layers, layers)
        self.width, self.vocab_size = getattr(config, "hidden_size", 0), int(config.vocab_size)
        self.context, self.switches = context_limit(config, is_whole=True)
        self.weights_bytes = tensors_bytes(model)

    def new_memory(self) -> KeyValueMemory:
        """Its sessions have the model's own caches."""
        return KeyValueMemory(self.module.config, [], self.module.dtype, self.module.device)

    def forward(self, ids: Tensor, state: dict[str, Any], *, start: int, logits: int) -> Tensor:
        """Logits (1, ``logits``, vocab) of the last of the token ids (1, T).

        Args:
            state: keyword arguments for ``prepare_inputs_for_generation``, with the model's own cache of the first
                ``start`` ids. Empty if there is none, then the pass starts from the first id. It is brought up to date.
        """
        model, goes_on = self.module, bool(state) and ids.shape[1] == start + 1
        known = dict(state) if goes_on else {"attention_mask": torch.ones_like(ids), "use_cache": True}
        state.clear()  # what a failed pass leaves in the model's own cache is not used
        if model._supports_logits_to_keep():
            known["logits_to_keep"] = logits
        inputs = model.prepare_inputs_for_generation(
            ids, next_sequence_length=1 if goes_on else None, is_first_iteration=not goes_on, **known
        )
        outputs = model(**inputs, return_dict=True)
        known = model._update_model_kwargs_for_generation(outputs, known)
        state.update(known if any(known.get(name) is not None for name in ALL_CACHE_NAMES) else {})
        return cast(Tensor, outputs.logits[:, -logits:])
