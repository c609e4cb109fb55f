"""LoRA adapters in PEFT's format (Hu et al., arXiv 2106.09685), as directories on this machine. Standard library only.

``adapter_config.json`` names the base model and the scale, ``adapter_model.safetensors`` has two factors for each
adapted matrix. What an adapter does not have (configuration, often the tokenizer) is its base's. ``compute.adapter``
adds the factors to the base's weights. An adapter that changes the base in any other way is refused.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.core.disk import RealDisk
from p2ptrain.core.errors import ConfigError
from p2ptrain.core.tensor_files import ADAPTER_CONFIG, ADAPTER_FILE, TensorTable

_MAX_CONFIG_BYTES = 1 << 20
_KNOWN = frozenset(
    {"auto_mapping", "base_model_name_or_path", "exclude_modules", "fan_in_fan_out", "inference_mode",
     "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core",
     "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
     "target_modules", "task_type", "use_rslora"}
)  # fmt: skip
"""Keys of ``adapter_config.json`` that only say where the factors are, or that ``Adapter`` follows."""
_UNUSED: tuple[object, ...] = (None, False, "none", {}, [], 0)


@dataclass(frozen=True, slots=True)
class Adapter:
    """Factors A (r, in) and B (out, r) for matrices (out, in) of the model in ``base``."""

    directory: Path
    base: Path
    alpha: float
    is_rank_stabilized: bool

    def scale(self, rank: int) -> float:
        """B A is multiplied by it."""
        return self.alpha / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def file(self, name: str) -> Path:
        """Path of a file of the model: the adapter's own, or its base's."""
        own = self.directory / name
        return own if own.is_file() else self.base / name


def is_adapter(directory: Path) -> bool:
    return (directory / ADAPTER_CONFIG).is_file() and not (directory / "config.json").is_file()


def read_adapter(directory: Path, base: Path | None = None) -> Adapter:
    """The adapter in ``directory``.

    Args:
        base: directory of its base model; None: the one that it names, seen from ``directory`` or from here.

    Raises:
        ConfigError: it is no LoRA adapter that can be merged, or the base is not there. StorageError: it is unreadable.
    """
    path = directory / ADAPTER_CONFIG
    try:
        table = json.loads(RealDisk().read(path, max_bytes=_MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON", remedy="save the adapter again") from error
    if not isinstance(table, dict) or not isinstance(table.get("peft_type"), str):
        raise ConfigError(f"{path} is not the configuration of an adapter", remedy="save the adapter again with peft")
    _check_plain(path, table)
    alpha, name = table.get("lora_alpha"), table.get("base_model_name_or_path")
    if not isinstance(alpha, int | float) or not 0 < alpha < 1e9:
        raise ConfigError(f"{path} has no lora_alpha", remedy="save the adapter again with peft")
    found = [base] if base is not None else [directory / name, Path(name)] if isinstance(name, str) and name else []
    for place in found:
        if os.path.isfile(place / "config.json"):  # False for a name that is too long
            return Adapter(directory, place, float(alpha), bool(table.get("use_rslora")))
    raise ConfigError(
        f"the base model of the adapter {directory} is not there: {base or name or 'none is named'}",
        remedy=f"merge them: p2ptrain checkpoints merge {directory} OUT --base DIR, and use OUT; or correct "
        f"base_model_name_or_path in its {ADAPTER_CONFIG}",
    )


def _check_plain(path: Path, table: dict[str, object]) -> None:
    kind, start = table["peft_type"], table.get("init_lora_weights", True)
    used = [f"{key} = {value}" for key, value in table.items() if key not in _KNOWN and value not in _UNUSED]
    if start not in (True, False, "gaussian"):  # others, such as pissa, change the base's weights too
        used.append(f"init_lora_weights = {start}")
    if kind == "LORA" and not used:
        return
    what = f"is of the type {kind!r}" if kind != "LORA" else f"has {used[0][:100]}"
    raise ConfigError(
        f"the adapter {path.parent} {what}, which p2ptrain does not merge: only plain LoRA",
        remedy="merge it with peft: PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(...)",
    )


def file_of(directory: Path, name: str) -> Path:
    """Path of a model's file; of an adapter that has none, of its base's. Raises as ``read_adapter``."""
    return read_adapter(directory).file(name) if is_adapter(directory) else directory / name


def model_name(directory: Path) -> str:
    """The public name of the model in a directory: the directory's name; for a job's checkpoint ``JOB@STEP``; in the
    cache of the Hugging Face hub ``OWNER/NAME``."""
    resolved = directory.resolve()
    above, home = resolved.parent, resolved.parent.parent
    if resolved.name.startswith("step-") and above.name == "checkpoints":
        return f"{home.name}@{resolved.name.removeprefix('step-').lstrip('0') or '0'}"
    if above.name == "snapshots" and home.name.startswith("models--"):
        return home.name.removeprefix("models--").replace("--", "/", 1)
    return resolved.name


def weights_of(directory: Path) -> Path:
    """The directory with the weights of a whole model: of an adapter, its base. Raises as ``read_adapter``."""
    return read_adapter(directory).base if is_adapter(directory) else directory


def fingerprint(directory: Path) -> str:
    """``TensorTable.fingerprint`` of a model, or of an adapter with its base."""
    whole = TensorTable(weights_of(directory)).fingerprint()
    if not is_adapter(directory):
        return whole
    adapter, factors = read_adapter(directory), TensorTable(directory, ADAPTER_FILE).fingerprint()
    text = f"{whole} {factors} {adapter.alpha} {adapter.is_rank_stabilized}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def is_model(directory: str | Path) -> bool:
    """Whether it has a model, or an adapter of one."""
    return Path(directory, "config.json").is_file() or is_adapter(Path(directory))
