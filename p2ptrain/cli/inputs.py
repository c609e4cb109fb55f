"""The data and the model that a person names, checked before any process starts; models of the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from p2ptrain.cli.output import json_output
from p2ptrain.cli.runtime import option
from p2ptrain.cluster.console import Console
from p2ptrain.core.adapters import is_adapter, is_model
from p2ptrain.core.errors import ConfigError, NetworkError, UserError
from p2ptrain.core.tensor_files import adapter_alone
from p2ptrain.core.text_files import find_files
from p2ptrain.core.texts import human_bytes

if TYPE_CHECKING:
    from configs.schema import Profile

DownloadOption = Annotated[
    bool, option("--download", "Fetch the model from the Hugging Face hub if its name is an id, OWNER/NAME.")
]
FETCHED = ("*.safetensors", "*.json", "tokenizer.model", "merges.txt", "vocab.txt", "chat_template.jinja")
"""Files of a model that are read here. Others, such as pickles, are not fetched."""
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[\w][\w.-]{0,95}", re.ASCII)


def checked(profile: Profile, *, download: bool = False) -> Profile:
    """The profile, with the directory of a model that was fetched. Raises ``UserError`` if data or model are missing,
    and as ``model_directory``."""
    if not profile.data.private:
        find_files(profile.data.path, profile.data.format)
    if not profile.model.path:
        return profile
    found = model_directory(profile.model.path, download=download, key="model.path")
    if is_adapter(found):
        raise adapter_alone(found)
    if not is_model(found):
        text = f"model.path = {profile.model.path!r} holds no model: it has no config.json"
        raise ConfigError(text, remedy="name a directory as save_pretrained writes it")
    model = profile.model.model_copy(update={"path": str(found)})
    return profile.model_copy(update={"model": model})


def model_directory(name: str, *, download: bool = False, key: str = "") -> Path:
    """The directory ``name``; or, with ``download``, that of the hub's model with this id. ``key``: the setting with
    this name; empty: it is an option's.

    Raises:
        UserError: there is none, or it has no weights in safetensors.
        NetworkError: the hub does not answer.
    """
    if Path(name).is_dir():
        return Path(name)
    what = f"{key} = {name}" if key else name
    if not _HUB_ID.fullmatch(name):
        remedy = f"name the directory of a model{f', --set {key}=DIR' if key else ''}; "
        remedy += "`p2ptrain checkpoints list` shows where jobs store theirs"
        raise UserError(f"{what} is not a directory", remedy=remedy)
    if not download:
        remedy = "if it is a model of the Hugging Face hub, --download fetches it"
        raise UserError(f"{what} is not a directory on this machine", remedy=remedy)
    found = _fetched(name)
    if not any(found.glob("*.safetensors")):
        raise UserError(f"{name} has no weights in safetensors", remedy="choose a model that has; pickles are not read")
    return found


def _fetched(name: str) -> Path:
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # read when it is imported
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import RepositoryNotFoundError

    place = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}")

    def text() -> str:
        there_bytes = sum(path.stat().st_size for path in place.glob("blobs/*"))
        return f"fetching {name}: {human_bytes(there_bytes)}"

    try:
        with Console(quiet=json_output.wanted).during(text):
            return Path(
                snapshot_download(
                    name,
                    allow_patterns=list(FETCHED),
                    ignore_patterns=["*/*"],
                    endpoint=os.environ.get("HF_ENDPOINT"),
                )
            )
    except RepositoryNotFoundError as error:
        remedy = "check its name; for a private or gated model set HF_TOKEN"
        raise UserError(f"the Hugging Face hub does not show {name}", remedy=remedy) from error
    except Exception as error:
        patterns = " ".join(f"--include '{pattern}'" for pattern in FETCHED)
        local = name.rpartition("/")[2]
        raise NetworkError(
            f"cannot fetch {name}: {str(error).splitlines()[0] if str(error) else type(error).__name__}",
            remedy=f"on a machine that reaches the hub run: hf download {name} {patterns} --local-dir {local}"
            "; copy the directory here, and give its path",
        ) from error
