"""A whole model as one part: what a verifier or a drafter computes with, loaded from a model directory.

It is a part like any other (``compute.served_part``), with all layers. So whatever splits can be computed with, and
beside that what is only refused because its parts would compute something else than the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from p2ptrain.compute.anatomy import NotSplit, Part
from p2ptrain.compute.served_part import ServedPart, ServedPartBuilder, config_of
from p2ptrain.compute.split import PIECE_BYTES
from p2ptrain.compute.split_check import check_whole
from p2ptrain.core.errors import ConfigError, StorageError
from p2ptrain.core.serving import PartSpec
from p2ptrain.core.tensor_files import TensorTable

_MAX_CONFIG_BYTES = 1 << 20
_REMEDY = "use a model of the llama, qwen2, qwen3, mistral or gpt2 family; p2ptrain generate -c may run this one alone"

OnBytes = Callable[[int, int], None]
"""Told of (bytes placed, bytes in all)."""


def load_whole(
    directory: Path,
    *,
    device: str = "auto",
    dtype: str = "",
    on_bytes: OnBytes = lambda done_bytes, total_bytes: None,
) -> ServedPart:
    """All layers of the model in ``directory``, ready to compute. Blocking. Memory is checked before any is taken.

    Args:
        device: as of ``compute.device.pick_device``.
        dtype: of weights, cache and arithmetic: ``fp32``, ``bf16`` or ``fp16``; empty: what the files hold.
        on_bytes: called on this thread after each piece; what it raises ends the loading.

    Raises:
        ConfigError: there is no model, or none from whose cache positions can be taken back; it is quantized.
        StorageError: a file cannot be read.
        UserError: there is no such device.
        ResourceError: there is too little memory for the weights.
    """
    config_text = _config_text(directory / "config.json")
    table = TensorTable(directory)
    config = config_of(config_text)
    try:
        check_whole(config)
        part = Part(0, config.num_hidden_layers, config.num_hidden_layers)
        spec = PartSpec(config_text, part.start, part.stop, part.layers, dtype, device)
        builder = ServedPartBuilder(spec, config, part, table.entries)
    except NotSplit as error:
        text = f"a {config.model_type!r} model can neither verify drafts nor make them: {error.why}"
        raise ConfigError(text, remedy=_REMEDY) from error
    for name, shape in builder.wanted.items():
        if table.entries[name].shape != shape:
            text = f"{name} is of shape {table.entries[name].shape}; by config.json it is {shape}"
            raise ConfigError(text, remedy="use config.json and *.safetensors of one model")
    sizes = {name: table.entries[name].size_bytes for name in builder.wanted}
    done_bytes, total_bytes = 0, sum(sizes.values())
    for name, size_bytes in sizes.items():
        for start in range(0, max(1, size_bytes), PIECE_BYTES):
            data = table.read(name, start, min(size_bytes, start + PIECE_BYTES))
            builder.place(name, table.entries[name].dtype, memoryview(data), start)
            done_bytes += len(data)
            on_bytes(done_bytes, total_bytes)
    return builder.finish()


def _config_text(path: Path) -> str:
    remedy = "a model directory is what save_pretrained writes"
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_CONFIG_BYTES} bytes", remedy=remedy)
        return path.read_text("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {path}", remedy=remedy) from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text", remedy=remedy) from error
