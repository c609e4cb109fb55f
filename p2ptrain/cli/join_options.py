"""The options of ``p2ptrain join``: their declaration, checks and meaning."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

from p2ptrain.cli.runtime import (
    HTTP_EXAMPLE,
    STATE_DEFAULT,
    ApiKeyOption,
    DownloadOption,
    HttpOption,
    LinkOption,
    MemberPortOption,
    NameOption,
    RelayOption,
    SeedArgument,
    SplitOption,
    StragglerOption,
    check_http,
    host_and_port,
    is_text,
    option_field,
)
from p2ptrain.cli.text_options import WeightsOption, check_dtype, newest_in
from p2ptrain.cluster.access import Target, read_targets
from p2ptrain.cluster.running import default_state_dir
from p2ptrain.core.errors import UserError
from p2ptrain.core.hours import OpenHours
from p2ptrain.core.texts import check_one_of, size_of

ROLES = ("worker", "verifier", "drafter")
KINDS = ("train", "serve", "draft")
LEAST_MEMORY_BYTES = 64 << 10  # a smaller --memory most likely lacks its unit


@dataclass(frozen=True, slots=True)
class JoinOptions:
    """What a person gives ``join``. Each field is an option, and its help describes it; the properties read the texts.

    Attributes:
        split: of a verifier: number of stages over workers; 0: the fastest number; None: the whole model is here.
    """

    address: SeedArgument = ""
    also: list[str] = option_field("--also SEED", "Another address where the seed may be, if it is restored there.", [])
    code: str = option_field(
        "--code DIGITS", "The six digits that `p2ptrain ticket code` shows at the seed; default: asks if necessary.", ""
    )
    no_discovery: bool = option_field("--no-discovery", "Do not look for a seed on this network.", False)
    role: str = option_field(
        "--role ROLE", "worker: trains, and holds parts; verifier: writes text; drafter: drafts it.", "worker"
    )
    models: list[Path] = option_field(
        "--model DIR",
        "For a verifier or drafter: a checkpoint or adapter, or a directory with some. A verifier may have several."
        " For a worker with --allow draft: its draft model.",
        [],
        callback=lambda models: [Path(is_text(str(model))) for model in models],
    )
    adapters: list[Path] = option_field(
        "--adapter DIR", "For a verifier: a LoRA adapter of its --model, a model of its own for clients.", []
    )
    download: DownloadOption = False
    name: NameOption = ""
    state: Path | None = option_field("--state DIR", f"Where checkpoints are kept. {STATE_DEFAULT}", None)
    slot: int | None = option_field(
        "--slot N", "Slot to use in --state; default: the first free one.", None, min=1, max=64
    )
    host: str = option_field(
        "--host ADDRESS", "Listen here for other members; default: where the seed can reach it.", ""
    )
    port: MemberPortOption = None
    advertise: str = option_field("--advertise HOST:PORT", "Address that other peers dial, behind NAT or a proxy.", "")
    allow: str = option_field(
        "--allow LIST",
        "For a worker: what the seed may have it do: train, serve (hold parts of models), draft (with --model DIR, and"
        " while no job needs it).",
        "train,serve",
    )
    hours: str = option_field(
        "--hours FROM-TO", "Take part only in these hours of the day, in local time, such as 22-8 or 9:30-17.", ""
    )
    weight: float = option_field(
        "--weight X",
        "For a verifier: how its models matter, as job.weight.",
        1.0,
        min=0.001,
        max=1e3,
    )
    relay: RelayOption = None
    data: str = option_field(
        "--data PATH",
        "For a worker: its own text, in jobs with data.private = true; default: data.path of the job.",
        "",
    )
    device: str = option_field("--device KIND", "auto, cpu, cuda, cuda:1, mps; default: auto, or as the job says.", "")
    devices: str = option_field(
        "--devices N|all",
        "For a worker: compute with so many devices of this machine, each in a process of its own; on CPUs: so"
        " many processes. With torchrun or srun: with all their processes.",
        "",
    )
    threads: int = option_field(
        "--threads N", "CPU threads for computing; 0: automatic, or as the job says.", 0, min=0, max=1024
    )
    memory: str = option_field(
        "--memory SIZE",
        "Memory limit for models, their parts and caches, such as 4GiB; default: for a worker 80 % of the "
        "device's free memory, else no limit.",
        "",
    )
    dtype: str = option_field(
        "--dtype TYPE",
        "For a verifier or drafter: compute in fp32, bf16 or fp16; default: the model's. On a GPU drafts hardly ever"
        " change a verifier's text in fp32, and weights and caches take twice the memory of bf16.",
        "",
    )
    weights: WeightsOption = ""
    split: SplitOption = None
    http: HttpOption = ""
    api_keys: ApiKeyOption = None
    upstream: str = option_field(
        "--upstream URL",
        "For a verifier without a model: an existing server with OpenAI's /v1 (vLLM, SGLang, llama.cpp, Ollama), which"
        " writes the texts.",
        "",
    )
    upstream_key: Path | None = option_field("--upstream-key-file FILE", "File with the key of that server.", None)
    sessions: int = option_field("--sessions N", "For a verifier or drafter: texts at a time; 0: default.", 0, min=0)
    wait: float = option_field(
        "--wait SECONDS",
        "Wait so long for a seed that does not answer; 0: not at all; default: until it does.",
        math.inf,
        min=0,
        show_default=False,
    )
    attack: str = option_field("--attack KIND", "", "", hidden=True)  # of ``p2ptrain chaos``
    with_parent: bool = option_field("--with-parent", "", False, hidden=True)
    link: LinkOption = ""
    straggler: StragglerOption = 1.0

    @property
    def targets(self) -> list[Target]:
        """Seeds, in the order in which they are tried. Raises as ``read_targets``."""
        return [target for text in (self.address, *self.also) for target in read_targets(text)]

    @property
    def root(self) -> Path:
        """The state directory, absolute, because other machines show the paths of checkpoints."""
        return (self.state or default_state_dir()).absolute()

    @property
    def allowed(self) -> frozenset[str]:
        return frozenset(self.allow.replace(" ", "").split(","))

    @property
    def open_hours(self) -> OpenHours | None:
        """Raises ``UserError``."""
        return OpenHours.parse(self.hours) if self.hours else None

    @property
    def memory_bytes(self) -> int:
        return size_of(self.memory, "--memory") if self.memory else 0

    @property
    def advertised(self) -> tuple[str, int]:
        return host_and_port("--advertise", self.advertise, "the address that others dial") or ("", 0)

    @property
    def http_place(self) -> tuple[str, int] | None:
        return host_and_port("--http", self.http, HTTP_EXAMPLE)

    def resolve(self) -> JoinOptions:
        """The options with the directories of all models, after all checks. Raises ``UserError``."""
        from configs.schema import DEVICE_KIND
        from wire.address import read_code

        role = self.role
        check_one_of("--role", role, ROLES)
        code = read_code(self.code) if self.code else ""
        if self.devices and role != "worker":
            raise UserError(f"--devices is not for a {role}", remedy="leave it out; --device chooses its device")
        if self.device and not re.fullmatch(DEVICE_KIND, self.device):
            raise UserError(f"--device {self.device} is not a device", remedy="use auto, cpu, cuda, cuda:1, ... or mps")
        check_dtype(self.dtype, self.weights)
        if 0 < self.memory_bytes < LEAST_MEMORY_BYTES:
            raise UserError(f"--memory {self.memory} is too small", remedy="add a unit, such as 4GiB")
        _ = self.advertised, self.http_place, self.open_hours  # refused here, not when they are used
        for kind in self.allowed:
            check_one_of("--allow", kind, KINDS)
        of_both = {"--model": bool(self.models), "--sessions": bool(self.sessions)}
        of_both |= {"--dtype": bool(self.dtype), "--weights": bool(self.weights)}
        of_verifiers = {"--split": self.split is not None, "--http": bool(self.http), "--adapter": bool(self.adapters)}
        of_verifiers["--api-key-file"] = self.api_keys is not None
        of_verifiers["--weight"] = self.weight != 1
        device, memory_bytes, threads = self.device, self.memory_bytes, self.threads
        of_workers = {"--device": bool(device), "--memory": bool(memory_bytes), "--threads": bool(threads)}
        if self.upstream or self.upstream_key is not None:
            self._check_upstream(of_both | of_verifiers | of_workers)
            return replace(self, code=code, upstream=self.upstream.rstrip("/").removesuffix("/v1"))
        drafts = role == "worker" and "draft" in self.allowed
        if drafts and (len(self.models) != 1 or self.devices):
            text = "a worker drafts with one model, and not with --devices"
            raise UserError(text, remedy="name the model's directory with --model, or leave draft out of --allow")
        forbidden = of_verifiers if role == "drafter" or drafts else of_both | of_verifiers if role == "worker" else {}
        if extra := next((option for option, is_set in forbidden.items() if is_set), None):
            role_for = "verifier" if extra in of_verifiers else "drafter, or verifier"
            raise UserError(f"{extra} is not for a {role}", remedy=f"add --role {role_for}, or leave it out")
        if role == "worker" and not drafts:
            return replace(self, code=code)
        extra = next((option for option, is_set in of_workers.items() if is_set), None)
        if self.split is not None and extra is not None:
            text = f"{extra} does not apply to a verifier with --split: workers compute its model"
            raise UserError(text, remedy=f"leave it out, and give it to the workers: p2ptrain join {extra} ...")
        check_http(self.http_place, self.api_keys)
        if self.api_keys is not None:
            from roles.http.access import read_key

            read_key(self.api_keys, lambda _: None)  # fail early; a warning about its mode comes later
        if not self.models:
            raise UserError(f"a {role} needs a model", remedy="name its directory with --model")
        if role == "drafter" and len(self.models) > 1:
            raise UserError("a drafter has one model", remedy="leave the others out, or start a drafter for each")
        if self.adapters and (len(self.models) > 1 or self.split is not None):
            what = "--split" if self.split is not None else "several models"
            text = f"--adapter does not work with {what}: adapters share the layers of one model on this machine"
            raise UserError(
                text, remedy="merge each: p2ptrain checkpoints merge ADAPTER OUT, and name OUT with --model"
            )
        models, adapters = (
            [newest_in(path, download=self.download) for path in paths] for paths in (self.models, self.adapters)
        )
        return replace(self, code=code, models=models, adapters=adapters)

    def _check_upstream(self, of_models: dict[str, bool]) -> None:
        """Raise ``UserError`` for what contradicts ``upstream``. ``of_models``: options → whether they are set."""
        if self.role != "verifier":
            raise UserError(f"--upstream is not for a {self.role}", remedy="add --role verifier, or leave it out")
        if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", self.upstream):
            raise UserError(f"--upstream {self.upstream!r} is not a URL", remedy="such as http://127.0.0.1:8000")
        if extra := next((option for option, is_set in of_models.items() if is_set), None):
            text = f"{extra} does not apply with --upstream: that server has the models, and the seed answers HTTP"
            raise UserError(text, remedy="leave it out, or leave --upstream out")
