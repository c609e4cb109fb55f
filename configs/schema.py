"""The typed schema of a profile. ``p2ptrain profiles show`` and ``profiles/example.toml`` are generated from it; the
latter by ``python -m configs.schema``.

A profile defines a job but not where it runs. Every member of a job gets the same profile, as JSON.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from datetime import date
from itertools import pairwise
from pathlib import PureWindowsPath
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from p2ptrain.core import plugins
from p2ptrain.core.errors import ProtocolError
from p2ptrain.core.texts import did_you_mean

LinkPresetName = Literal[
    "", "lan", "wifi", "metro", "wan", "transcontinental", "satellite", "lossy", "good", "cellular", "degraded",
    "brownout",
]  # fmt: skip
"""Empty, and the names in ``wire.emulate.PRESETS``. configs may not import wire, so a test compares the two."""

SPEC_LIMIT_BYTES = 32 * 1024
RECURRENT = frozenset({"lstm", "mamba", "falcon_mamba"})
"""Architectures with neither attention heads nor a longest context."""

Text = Annotated[str, Field(max_length=1024)]
NamePattern = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.*?-]{1,128}$")]
PluginName = Annotated[str, Field(pattern=f"^{plugins.NAME}$")]
"""Of a plugin, in place of a name that is built in. ``[plugins.NAME]`` says which package has it."""
StrategyName = Literal["sync", "pipeline", "sharded", "local", "federated", "server"]
FormatName = Literal["auto", "text", "jsonl", "csv", "parquet", "chat", "preference"]
CodecName = Literal["fp32", "bf16", "fp16", "int8", "int4", "topk", "auto"]
TrackerName = Literal["wandb", "tensorboard", "mlflow", "jsonl"]
PluginValue = Annotated[str, Field(max_length=1024)] | bool | int | float


class Conflict(ValueError):
    """Settings that contradict each other. ``keys``: the dotted keys involved, such as ``model.heads``."""

    def __init__(self, *keys: str, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.keys, self.problem, self.remedy = keys, problem, remedy


class Table(BaseModel):
    """Base of all tables: strict types, no unknown keys, immutable. The text below a field is its description."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


class Job(Table):
    """The run as a whole."""

    strategy: StrategyName | PluginName = "sync"
    """What members exchange: 'sync' reduces the gradients of every step. The table of each other strategy says what it
    does: [pipeline], [sharded], [local], [federated], [server]."""
    steps: int = Field(default=400, ge=1, le=10**9)
    """Optimizer steps of the whole run."""
    seed: int = Field(default=1337, ge=0, lt=2**63)
    """Seed of the initial weights and of the order of the samples."""
    exact: bool = False
    """Exact mode: sum gradients in fixed point, so that the number and order of members change no bit. A run with
    faults ends with the same hash as one without (on equal hardware). Twice the bytes."""
    workers: int = Field(default=2, ge=1, le=1024)
    """Workers that must be ready before the run starts; it continues with fewer or more."""
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """How much this job matters beside other jobs and served models that share the workers. The heaviest gets the
    workers that it needs first; those beyond all needs are shared by weight."""


class Model(Table):
    """The model: a transformers architecture with these sizes, or a model from a local directory."""

    architecture: str = Field(default="llama", pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")
    """Model type as transformers names it: llama, qwen2, qwen3, mistral, gpt2, ...; or lstm, p2ptrain's own, for which
    only hidden_size, layers and tie_embeddings count."""
    path: Text = ""
    """Directory of a model to train further, on every worker; it sets the sizes. If it has a config.json and no
    weights, a new model of these sizes begins. Empty: a new model of the sizes below."""
    tokenizer: Text = ""
    """Tokenizer of a new model, on every worker: a directory with tokenizer.json and its settings, or the file (of
    another name: alone, without an end token). `p2ptrain tokenizer train` makes one. Empty: that of model.path, else
    each byte is a token."""
    keep_optimizer: bool = False
    """Go on with the optimizer's moments of the checkpoint that model.path names, too."""
    hidden_size: int = Field(default=128, ge=8, le=65536)
    """Width of the residual stream; a multiple of heads."""
    layers: int = Field(default=4, ge=1, le=1024)
    """Number of transformer blocks."""
    heads: int = Field(default=4, ge=1, le=1024)
    """Attention heads; a multiple of kv_heads."""
    kv_heads: int = Field(default=4, ge=1, le=1024)
    """Heads of keys and values (fewer than heads: grouped-query attention)."""
    intermediate_size: int = Field(default=344, ge=8, le=2**20)
    """Width of the feed-forward layer."""
    context: int = Field(default=256, ge=2, le=2**20)
    """Longest sequence that the model can see, in tokens."""
    tie_embeddings: bool = True
    """Use one matrix for the input embedding and the output."""
    freeze: list[NamePattern] = Field(default=[], max_length=32)
    """Parameters that do not train, by name, such as 'model.embed_tokens.*' ('*' stands for any text)."""


class Lora(Table):
    """Fine-tuning by low-rank adapters (LoRA): the model of model.path stays as it is. Small matrices beside its linear
    layers train; only they are exchanged, and saved in PEFT's format."""

    rank: int = Field(default=0, ge=0, le=4096)
    """Rank of the adapters; 0: no LoRA, the whole model trains."""
    alpha: int = Field(default=16, ge=1, le=65536)
    """The adapters' output is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share of the adapters' inputs that are dropped in training."""
    targets: list[NamePattern] = Field(default=["all-linear"], min_length=1, max_length=32)
    """Names of the linear layers that get adapters, such as ["q_proj", "v_proj"]; 'all-linear': all but the output."""
    base: Literal["fp32", "bf16", "nf4"] = "fp32"
    """How the model's linear layers are held in memory: fp32, bf16 (only with device.precision bf16 or bf16-weights) or
    nf4 (4 bits; needs the package bitsandbytes)."""


def _real_date(text: str) -> str:
    if text:
        date.fromisoformat(text)
    return text


class Data(Table):
    """The training text. All workers train on the same one, unless it is private: members compare its SHA-256."""

    path: Text = Field(default="stdlib", min_length=1)
    """'stdlib' (Python's standard library), a file, a directory or a glob."""
    format: FormatName | PluginName = "auto"
    """'text': whole files. 'jsonl' (also an array in a .json), 'csv' (also .tsv), 'parquet' (needs the package
    pyarrow): a text in each row. 'auto': by the suffix of each file, else text. 'chat': conversations in rows of JSON
    or .parquet, each a list of {role, content}; they go through the model's chat template, only the assistant's answers
    are learned (the loss of a step is the mean over their tokens) unless they have the weight 0, and those that share a
    sequence do not see each other. 'chat' of 'stdlib': questions about its modules and functions, answered by their
    docstrings. 'preference': rows {prompt, chosen, rejected}, texts or lists of messages; LoRA learns to prefer the
    chosen answer (see [preference]), and a pair is one sequence of a micro-batch."""
    document_end: Literal["auto", "none"] = "auto"
    """What ends a text that is no conversation, a file or a row. 'auto': the tokenizer's end token, so that the model
    learns to stop, and before the next text comes what the tokenizer puts before a prompt; without an end token, a line
    end. 'none': always a line end."""
    date: Annotated[str, AfterValidator(_real_date)] = Field(default="", pattern=r"^(\d{4}-\d{2}-\d{2})?$")
    """The date that a chat template prints, such as 2026-11-28; empty: the day on which the job was created (UTC)."""
    text_key: str = Field(default="", max_length=128)
    """Key of the text, or of the messages, in each row; empty: 'text', with format 'chat' 'messages'."""
    bad_rows: float = Field(default=0.01, ge=0, le=1)
    """Share of the rows that may be unusable: they are left out and told at the worker. With more the data is
    refused."""
    private: bool = False
    """Each worker trains on its own text, which never leaves its machine: only its size does. Each computes its
    micro-batches from its own text, and validates on its own held-out sequences."""
    share: bool = True
    """A worker that lacks the text, model.path or model.tokenizer on its disk fetches it from other workers of the job;
    of the text only its tokens travel. Private text is never sent."""
    share_mbps: float = Field(default=0, ge=0, le=1e6)
    """Most Mbit/s at which a worker fetches them, if others need its link, too; 0: as fast as they come."""
    limit_bytes: int = Field(default=0, ge=0, le=2**50)
    """Most bytes of text to use; 0: all of it."""
    sequence_tokens: int = Field(default=128, ge=2, le=2**20)
    """Tokens of a training sequence; at most model.context."""
    validation_fraction: float = Field(default=0.05, ge=0, le=0.5)
    """Share of the sequences held out for validation, at least one; 0: none, and nothing is validated."""


class Preference(Table):
    """Direct preference optimization (DPO), with data.format = 'preference' and LoRA. The reference is the model
    without its adapters."""

    beta: float = Field(default=0.1, gt=0, le=100)
    """With a larger one the model stays closer to the reference."""


class Batch(Table):
    """The global batch of a step. Its size is the same for any number of members; they share its micro-batches."""

    micro_batches: int = Field(default=8, ge=1, le=65536)
    """Micro-batches in a step; at most so many workers can share a step."""
    micro_batch_sequences: int = Field(default=4, ge=1, le=65536)
    """Sequences in a micro-batch; memory grows with it."""


class Pipeline(Table):
    """Split a model that is too large for one worker. Workers that hold one part each form a replica of the model.
    Replicas share the micro-batches."""

    stages: int = Field(default=0, ge=0, le=256)
    """Parts of the model: each worker holds one of them. 0: not split."""
    cuts: list[Annotated[int, Field(ge=1, le=1023)]] = Field(default=[], max_length=255)
    """First layers of the second and each later part; empty: chosen by memory, speed and links."""
    activations: Literal["fp32", "bf16", "fp16", "int8"] = "fp32"
    """Encoding of hidden states between parts; their gradients use fp32 with fp32, else bf16."""
    recompute: bool = False
    """Compute the hidden states of a part again in its backward pass, rather than keep them."""


class Sharded(Table):
    """Strategy 'sharded' (FSDP2), for a model whose layers fit a worker one at a time, but not all at once with their
    gradients and moments. The workers of a replica hold some rows of every tensor each. They gather a layer before
    they compute it, each for micro-batches of its own. Replicas share the micro-batches."""

    shards: int = Field(default=2, ge=2, le=256)
    """Workers that hold a replica of the model together."""
    accumulate: bool = True
    """Keep whole gradients until the last micro-batch of a step, and sum them over the replica once. false: after every
    micro-batch. Then gradients, too, take 1/shards of the memory, but they are sent more often."""
    offload: bool = False
    """With a GPU: keep parameters, gradients and moments in the host's memory, and update them there."""


class Local(Table):
    """Strategy 'local' (DiLoCo), for slow links: a step of the job is an outer step. Each of its batch.micro_batches is
    a step of one worker's optimizer on its own copy, so with n workers each takes about 1/n of them. Then the workers
    exchange how far they came, and all take one step with Nesterov momentum."""

    outer_lr: float = Field(default=0.7, gt=0, le=10)
    """Learning rate of the outer step."""
    outer_momentum: float = Field(default=0.9, ge=0, lt=1)
    """Nesterov momentum of the outer step."""
    fragments: int = Field(default=1, ge=1, le=256)
    """Parts of the model. Each step exchanges one of them, in turn, so it sends less at a time."""
    overlap: bool = False
    """Exchange what was computed in the step before, while this step is computed: workers never wait for the network
    unless it is slower than they are."""


class Federated(Table):
    """Strategy 'federated': a step of the job is a round. Its batch.micro_batches are shared in proportion to the
    workers' texts. Each is a step of one worker's optimizer on its own copy; then the copies are averaged. With
    data.private = true each worker has its own text, which does not leave it."""

    average: Literal["exact", "frozen-a", "naive"] = "exact"
    """How LoRA adapters are averaged. 'exact': the mean of the products B A; what the averaged adapters lack of it is
    added to the model, so a checkpoint is a whole model, and each round sends the adapters of all its workers.
    'frozen-a': only B trains, so its mean is exact. 'naive': the means of A and of B, which is not exact."""
    sample: int = Field(default=0, ge=0, le=1024)
    """Workers that take part in a round, drawn anew for each; 0: all, but with exact averages at most job.workers."""
    most_share: float = Field(default=0.5, gt=0, le=1)
    """The largest share of a round for one worker, however large it says that its text is: nobody else can count it. 1:
    no limit. Two workers with 0.5 share equally."""
    proximal: float = Field(default=0.0, ge=0, le=1000)
    """FedProx: pull towards the averaged model, added to the gradient as this factor times the difference; 0: none."""
    secure: bool = False
    """Secure aggregation: random masks hide what one worker sends, and cancel in the sum, so nobody sees the change of
    one worker. Needs 3 workers; with fewer the job waits. Twice the bytes. See docs/privacy.md."""


class Server(Table):
    """Strategy 'server': asynchronous training with bounded staleness. One member, the server, holds the newest version
    of the model. Each of the others pulls it, computes a gradient and pushes that, and waits for no slower one. A step
    of the job is a version. See docs/server.md."""

    buffer: int = Field(default=1, ge=1, le=1024)
    """Gradients, of distinct workers, that make a version. Each is of batch.micro_batches / buffer micro-batches."""
    bound: int = Field(default=0, ge=0, le=10_000)
    """Most versions that may be made between a worker's pull and the version with its gradient; with more the gradient
    is refused. 0: for each worker 50 x (median time of all workers for a gradient / its own), from 5 to 500."""


class Privacy(Table):
    """Differential privacy of each worker's text, with data.private = true: what a step takes of it is clipped, and
    noise is added to the sum of all workers. docs/privacy.md says what it promises. Needs the package
    dp-accounting."""

    epsilon: float = Field(default=0.0, ge=0, le=10**6)
    """Budget: the job ends before its steps spend more than this, at the delta below. 0: no privacy."""
    unit: Literal["member", "sample"] = "member"
    """What is protected. 'member': the whole text of a worker, with strategies 'local' and 'federated'. 'sample': each
    sequence of data.sequence_tokens, with strategy 'sync' and batch.micro_batch_sequences = 1."""
    delta: float = Field(default=1e-5, gt=0, lt=1)
    """Probability that the bound epsilon may fail; much less than 1 / number of workers."""
    noise: float = Field(default=1.0, gt=0, le=10**6)
    """Standard deviation of the noise in the sum of all workers, as a multiple of clip_norm."""
    clip_norm: float = Field(default=1.0, gt=0, le=10**6)
    """Longest change of the model (L2 norm) that a worker contributes to a step; longer ones are scaled down. With unit
    'sample': longest gradient of a sequence."""


class Drafter(Table):
    """A smaller model that drafts for the main model. `p2ptrain up` trains it in a separate job on the same text. All
    settings that are not in this table are those of the main model's job."""

    layers: int = Field(default=0, ge=0, le=1024)
    """Transformer blocks of the drafter, a fraction of model.layers; 0: no drafter."""
    hidden_size: int = Field(default=64, ge=8, le=65536)
    """Width of the residual stream; a multiple of heads."""
    heads: int = Field(default=4, ge=1, le=1024)
    """Attention heads; a multiple of kv_heads."""
    kv_heads: int = Field(default=4, ge=1, le=1024)
    """Heads of keys and values."""
    intermediate_size: int = Field(default=172, ge=8, le=2**20)
    """Width of the feed-forward layer."""
    steps: int = Field(default=0, ge=0, le=10**9)
    """Optimizer steps of the drafter's run; 0: job.steps."""
    lr: float = Field(default=0.0, ge=0, le=10)
    """Highest learning rate of the drafter; 0: optimizer.lr."""


class Optimizer(Table):
    """How a gradient changes the weights: the optimizer, with a linear warm-up and then a schedule for its rate. With
    strategies 'local' and 'federated' the optimizer of the workers' own steps."""

    name: Literal["adamw", "muon", "sgd"] = "adamw"
    """'adamw'. 'muon': Muon for the matrices of hidden layers, and AdamW for the rest (embeddings, output, norms), with
    one learning rate; it keeps one array of momentum for a matrix instead of two moments. 'sgd': plain SGD, which keeps
    nothing: with strategy 'server' a pull is a third as large."""
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """Learning rate after the warm-up: 'cosine' and 'linear' fall to the last step; 'constant' stays; 'wsd' stays, and
    falls linearly in the last decay_share of the steps."""
    lr: float = Field(default=3e-3, gt=0, le=10)
    """Highest learning rate, reached after the warm-up."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate of the last step, as a share of lr."""
    warmup_steps: int = Field(default=40, ge=0, le=10**9)
    """Steps in which the learning rate grows from 0 to lr."""
    decay_share: float = Field(default=0.2, gt=0, le=1)
    """With schedule 'wsd': the last share of the steps after the warm-up, in which the learning rate falls."""
    weight_decay: float = Field(default=0.1, ge=0, le=10)
    """Decoupled weight decay of matrices (norms and biases have none)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of the gradients."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the mean of the squared gradients."""
    eps: float = Field(default=1e-8, gt=0, le=1)
    """Added to the root of the squared gradients' mean."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Of Muon: decay of its mean of the gradients (with Nesterov's look ahead)."""
    clip_norm: float = Field(default=1.0, ge=0)
    """Longest global gradient (L2 norm); longer ones are scaled down. 0: never."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of each target's probability that is spread evenly over the vocabulary, in the training loss."""
    z_loss: float = Field(default=0.0, ge=0, le=1)
    """Factor of the squared logarithm of the softmax's denominator, added to the training loss (such as 1e-4)."""


class Validation(Table):
    """How often the loss on the held-out text is measured. Members share this work."""

    every: int = Field(default=50, ge=0, le=10**9)
    """Steps between two validations; 0: only after the last step."""
    batches: int = Field(default=8, ge=1, le=65536)
    """Micro-batches of held-out text in a validation, at most all there are."""
    patience: int = Field(default=0, ge=0, le=10**6)
    """Validations without a better loss after which the job stops early; its next step is the last. 0: never."""


class Checkpoint(Table):
    """How often checkpoints are written, how many are kept, and on how many members."""

    every: int = Field(default=100, ge=0, le=10**9)
    """Steps between two checkpoints; 0: only after the last step."""
    keep: int = Field(default=3, ge=2, le=1000)
    """Newest checkpoints that each writer keeps; older ones are deleted."""
    best: bool = False
    """Also keep the one with the least validation loss. Steps that are saved and validated count, so make one interval
    a multiple of the other."""
    copies: int = Field(default=2, ge=1, le=1024)
    """Members that write one (the lowest ranks), each on its own disk. Of a split model: replicas whose stages write
    their parts, and members that collect those of all stages. With strategy 'server' the server alone writes one."""


CHANGEABLE = (
    *("job.steps", "validation.every", "checkpoint.every"),
    *(f"optimizer.{name}" for name in ("lr", "min_lr_ratio", "warmup_steps", "weight_decay", "clip_norm")),
    *("optimizer.schedule", "optimizer.decay_share"),
)
"""Settings of a running job that can change between two steps. What others decide is made when the job begins: the
state, the windows, the ring."""

DEVICE_KIND = r"^(auto|cpu|mps|cuda(:\d{1,2})?)$"


class Device(Table):
    """The device on which each worker computes. Kind 'auto' takes CUDA, then MPS, then the CPU."""

    kind: str = Field(default="auto", pattern=DEVICE_KIND)
    """auto, cpu, cuda, cuda:1, ... or mps."""
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads of a worker; 0: the cores, shared by the workers of a machine."""
    precision: Literal["fp32", "tf32", "bf16", "bf16-weights"] = "fp32"
    """Arithmetic of the forward and backward pass: fp32; tf32 (on CUDA matrix products have 11 significant bits;
    elsewhere the same as fp32); bf16 (mixed: matrix products in bf16, for which each pass rounds the weights); or
    bf16-weights (all of it in bf16, with a copy of the weights that is rounded once after each step). Where GPUs share
    the rows of a model, both compute all of it in bf16. Weights that train, gradients and moments stay in fp32."""
    gradient_checkpointing: bool = False
    """Compute the hidden states of each layer again in the backward pass, rather than keep them. A part of a split
    model has pipeline.recompute instead."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the model's layers with torch.compile, while steps go on without. auto: on a CUDA device, if enough time
    is left, and they become faster; not with precision tf32 or job.exact. on: on any device."""


class Ring(Table):
    """The exchange between members. Automatic settings are chosen from the measured links for every new view."""

    order: Literal["auto", "joined"] = "auto"
    """Order of the members in the ring: 'auto' makes the slowest link as fast as possible, 'joined' keeps the order in
    which members joined."""
    codec: CodecName | PluginName = "fp32"
    """Encoding of gradients: fp32 is exact, the others are smaller and less exact; 'auto': the smallest that
    error_budget allows if steps wait for the network."""
    error_budget: float = Field(default=0.03, ge=0, le=1)
    """Largest relative error of one exchange that codec 'auto' may cause (bf16 0.004, int8 0.025, int4 0.25, topk 1);
    int8, int4 and topk add their error to the next exchange."""
    streams: int = Field(default=0, ge=0, le=16)
    """Connections to each neighbour for bulk data: more fill a fast link with long delay; 0: automatic."""
    sub_chunk_bytes: int = Field(default=0, ge=0, le=16 * 1024 * 1024, multiple_of=1024)
    """Bytes reduced and sent on as one piece: small pieces overlap better, large ones cost less; 0: automatic."""
    bucket_bytes: int = Field(default=0, ge=0, le=2**30, multiple_of=1024)
    """Bytes of gradients that are sent as soon as they are computed, while the backward pass continues;
    0: automatic."""


class Guard(Table):
    """Protection against bad gradients. Gradients that are not finite are never applied."""

    outlier_factor: float = Field(default=1000.0, ge=0, le=1e12)
    """A gradient so many times longer than the running median is applied only after another member has computed it too;
    0: no limit."""


RobustRule = Literal[
    "", "mean", "median", "trimmed_mean", "geometric_median", "centered_clipping", "krum", "multi_krum", "bulyan"
]


class Robust(Table):
    """Protection against members that contribute wrong vectors, by mistake or on purpose. Every member gathers the
    vectors of all members (gradients, or how far a model came), rather than sum them, and applies the same rule to
    them. So it needs memory for, and sends, as many vectors as there are members. Each vector counts the same, so the
    micro-batches are shared equally. See docs/robust.md."""

    rule: RobustRule = ""
    """How the vectors are combined. Empty: they are summed. 'mean' withstands no wrong vector. 'median' and
    'trimmed_mean' are of each coordinate. With 'geometric_median' and 'centered_clipping' far vectors count less.
    'krum': the vector that is nearest to the others; 'multi_krum': the mean of the n - f nearest; 'bulyan': the mean
    around the median of vectors that Krum selects."""
    byzantine: int = Field(default=1, ge=0, le=255)
    """Wrong vectors in a step that the rule must withstand, f. It needs more members: 2f + 1, for 'krum' and
    'multi_krum' 2f + 3, for 'bulyan' 4f + 3. With fewer the job waits. With 'mean' 0."""

    @property
    def least(self) -> int:
        """Fewest members of a step."""
        f = self.byzantine
        return {"": 1, "mean": 1, "krum": 2 * f + 3, "multi_krum": 2 * f + 3, "bulyan": 4 * f + 3}.get(
            self.rule, 2 * f + 1
        )


class Link(Table):
    """Emulation of a slow network between the workers of `p2ptrain up`, for experiments on one machine."""

    preset: LinkPresetName = ""
    """Kind of link: lan, wifi, metro, wan, transcontinental, satellite, lossy; good, cellular, degraded or brownout.
    Empty: the network as it is."""


class Membership(Table):
    """When a silent member counts as dead. A member whose connection is closed counts as dead at once."""

    heartbeat_s: float = Field(default=0.0, ge=0, le=3600)
    """Seconds between two heartbeats; 0: from the measured round trip."""
    death_s: float = Field(default=0.0, ge=0, le=86400)
    """Seconds of silence after which a member is dead, at least three heartbeats; 0: automatic."""


class Track(Table):
    """Copies of the job's metrics for other programs. The seed writes them, from its own records, so only its machine
    needs their packages and keys. See docs/tracking.md."""

    to: list[TrackerName | PluginName] = Field(default=[], max_length=4)
    """'jsonl': a line of JSON for each step. 'tensorboard': its files. Needs the package tensorboard.
    'wandb': Weights & Biases. Needs the package wandb, and WANDB_API_KEY in the seed's environment
    unless offline. 'mlflow': the server at MLFLOW_TRACKING_URI in the seed's environment."""
    directory: Text = ""
    """Directory for the files, with one directory in it for each job. It is made in 'track' beside the seed's records,
    and cannot be elsewhere. Empty: 'track' itself."""
    project: str = Field(default="p2ptrain", pattern=r"^[A-Za-z0-9_.-]{1,128}$")
    """Project of W&B; experiment of MLflow."""
    offline: bool = False
    """W&B: only write files. `wandb sync` uploads them later."""


class Plugins(Table):
    """Plugins: names that are not built in and that job.strategy, data.format, ring.codec, track.to or
    model.architecture names. [plugins.NAME] has the package of one, such as package = "mine" or "mine==1.2", and its
    settings: texts, numbers, true or false. See docs/plugins.md."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, PluginValue] = Field(init=False)

    def package_of(self, name: str) -> str:
        return str(getattr(self, f"{name}.package", ""))

    def settings_of(self, name: str) -> dict[str, PluginValue]:
        found = ((key.partition("."), value) for key, value in (self.model_extra or {}).items())
        return {key: value for (of, _, key), value in found if of == name and key != "package"}


class Profile(Table):
    """All settings of a job. Immutable. Equal profiles give equal results."""

    job: Job = Job()
    model: Model = Model()
    lora: Lora = Lora()
    data: Data = Data()
    preference: Preference = Preference()
    batch: Batch = Batch()
    pipeline: Pipeline = Pipeline()
    sharded: Sharded = Sharded()
    local: Local = Local()
    federated: Federated = Federated()
    server: Server = Server()
    privacy: Privacy = Privacy()
    optimizer: Optimizer = Optimizer()
    validation: Validation = Validation()
    checkpoint: Checkpoint = Checkpoint()
    device: Device = Device()
    ring: Ring = Ring()
    guard: Guard = Guard()
    robust: Robust = Robust()
    link: Link = Link()
    membership: Membership = Membership()
    track: Track = Track()
    drafter: Drafter = Drafter()
    plugins: Plugins = Plugins()

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, tables: Any, info: ValidationInfo) -> Any:
        """Of stored jobs, ``server.optimizer`` is an older name of ``optimizer.name``, for strategy 'server' only. The
        schedule of a pipeline and its most micro-batches in flight, which changed no bit, are no longer set."""
        match info.mode, tables:
            case "json", {"pipeline": {"schedule": _, "max_in_flight": _, **rest}, **others}:
                tables = {"pipeline": rest, **others}
        match info.mode, tables:
            case "json", {"server": {"optimizer": old, **rest}, "job": {"strategy": kind}, "optimizer": {**optimizer}}:
                name = {"name": "sgd"} if (old, kind) == ("sgd", "server") else {}
                return tables | {"server": rest, "optimizer": optimizer | name}
        return tables

    @model_validator(mode="after")
    def _cross_check(self) -> Profile:
        _check(self)
        return self

    @property
    def stages(self) -> int:
        """Number of parts of the model, stages or shards; 1 if it is not split."""
        return self.sharded.shards if self.job.strategy == "sharded" else max(self.pipeline.stages, 1)

    @property
    def needs(self) -> dict[str, str]:
        """The plugins that a worker needs: ``kind:name`` → package. Raises ``Conflict``: a name is not known."""
        found = dict[str, str]()
        for kind, (key, built_in) in _PLUGGED.items():
            value = self.value(key)
            for name in set(value if isinstance(value, list) else [value]).difference(built_in):
                package = self.plugins.package_of(name)
                if (package or built_in) and not re.fullmatch(plugins.PACKAGE, package):
                    raise _unknown_name(self, kind, name)
                found |= {f"{kind}:{name}": package} if package and kind != "trackers" else {}
        return found

    @property
    def loss_unit(self) -> str:
        return "nats/pair" if self.data.format == "preference" else "nats/token"

    def value(self, key: str) -> Any:
        """The value of a dotted key, such as ``optimizer.lr``."""
        table, _, name = key.partition(".")
        return getattr(getattr(self, table), name)

    def with_changes_untrusted(self, changes: Iterable[tuple[str, str]]) -> Profile:
        """The profile after ``changes``, keys and values as JSON, of a job that runs. Raises ``ProtocolError``."""
        tables = self.model_dump()
        for key, value in changes:
            if key not in CHANGEABLE:
                raise ProtocolError(f"{key[:64]} of a job cannot change; what can: {', '.join(CHANGEABLE)}")
            table, _, name = key.partition(".")
            try:
                tables[table][name] = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise ProtocolError(f"{key} = {value[:64]!r} is not JSON") from error
        return Profile.from_spec_untrusted(json.dumps(tables))

    def alone(self) -> Profile:
        """The profile of the main model's job, without the drafter."""
        return self.model_copy(update={"drafter": Drafter()})

    def of_drafter(self) -> Profile:
        """The profile of the drafter's job; call it only if ``drafter.layers`` is not 0. A drafter is never split."""
        own = self.drafter
        sizes = {
            name: getattr(own, name) for name in ("layers", "hidden_size", "heads", "kv_heads", "intermediate_size")
        }
        job = {"steps": own.steps or self.job.steps, "workers": min(self.job.workers, self.batch.micro_batches)}
        tables = {
            "job": self.job.model_copy(update={"strategy": "sync", **job}),
            "model": self.model.model_copy(update=sizes | {"freeze": []}),
            "pipeline": Pipeline(),
            "optimizer": self.optimizer.model_copy(update={"lr": own.lr or self.optimizer.lr}),
        }
        return self.alone().model_copy(update=tables)

    def to_spec(self) -> str:
        """The profile that a job's workers get: JSON without the drafter, at most ``SPEC_LIMIT_BYTES`` long."""
        return self.alone().model_dump_json()

    @classmethod
    def from_spec_untrusted(cls, text: str) -> Profile:
        """Parse a profile from a peer's JSON. Raises ``ProtocolError``."""
        if len(text.encode(errors="replace")) > SPEC_LIMIT_BYTES:
            raise ProtocolError(f"a job's profile has more than {SPEC_LIMIT_BYTES} bytes")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the job's profile"
            raise ProtocolError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from error


# ----------------------------------------------------------------------------------------- contradictory settings

_PLUGIN = "a plugin"  # in place of the name of a strategy that is one
_NOT_PIPELINE = ("sync", "sharded", "local", "federated", "server", _PLUGIN)
_NOT_SHARDED = ("sync", "pipeline", "local", "federated", "server", _PLUGIN)
_NEEDS: dict[str, tuple[tuple[str, tuple[Any, ...], str], ...]] = {
    "job.exact": (
        ("job.strategy", ("sync",), "exact mode is for strategy 'sync' only"),
        ("ring.codec", ("fp32", "auto"), "exact mode allows no codec that rounds"),
    ),
    "data.private": (
        ("job.strategy", ("sync", "local", "federated"), "the workers of a replica, and of a server, read one text"),
        ("job.exact", (False,), "which text a step reads depends on who computes it, so failures do change the result"),
    ),
    "device.gradient_checkpointing": (
        ("job.strategy", _NOT_PIPELINE, "the parts of a split model have pipeline.recompute instead"),
    ),
    "drafter.layers": (
        ("job.strategy", ("sync", "pipeline", "sharded"), "a drafter trains with strategy 'sync' or beside 'pipeline'"),
        ("model.path", ("",), "a drafter is a new model of bytes, so its tokens differ from those of this model"),
    ),
    "lora.rank": (
        ("model.freeze", ([],), "with LoRA none of the model's own parameters train"),
        ("job.strategy", _NOT_SHARDED, "all parameters of a sharded model train"),
    ),
    "model.keep_optimizer": (
        ("job.strategy", ("sync",), "other strategies keep other moments"),
        ("lora.rank", (0,), "a checkpoint of adapters is no model.path"),
        ("model.freeze", ([],), "moments are of all parameters"),
    ),
    "model.freeze": (("job.strategy", _NOT_SHARDED, "all parameters of a sharded model train"),),
    "robust.rule": (
        ("job.strategy", ("sync", "local", "federated", "server"), "a rule needs whole vectors, not workers' parts"),
        ("job.exact", (False,), "a rule needs more than sums"),
        ("ring.codec", ("fp32",), "codecs encode sums, not single vectors"),
        ("local.fragments", (1,), "the members' vectors would differ in their parts"),
        ("local.overlap", (False,), "the members' vectors would differ in their steps"),
        ("federated.sample", (0,), "members that are not drawn have no vector"),
    ),
    "robust.rule = mean": (("robust.byzantine", (0,), "the mean withstands no wrong vector"),),
    "lora.base = bf16": (("device.precision", ("bf16", "bf16-weights"), "fp32 arithmetic needs weights in fp32"),),
    "federated.secure": (
        ("job.strategy", ("federated",), "masks are for averages of rounds"),
        ("ring.codec", ("fp32",), "masks cancel only in exact sums"),
        ("robust.rule", ("",), "a rule looks at what each worker sends"),
    ),
    "privacy.epsilon": (
        ("data.private", (True,), "it protects the text of each worker from the others"),
        ("ring.codec", ("fp32",), "the promise is about the sum, and a codec rounds what each worker sends"),
        ("validation.every", (0,), "losses tell about a text"),
        ("robust.rule", ("",), "how far one worker's text can move the result of a rule is not known"),
    ),
    "data.format = preference": (
        ("job.strategy", ("sync", "local", _PLUGIN), "only whole models that all share learn from pairs"),
        ("optimizer.label_smoothing", (0.0,), "a pair's loss has no such term"),
        ("optimizer.z_loss", (0.0,), "a pair's loss has no such term"),
        ("privacy.epsilon", (0.0,), "it is counted for sequences, and a pair has two"),
        ("data.limit_bytes", (0,), "pairs are read whole"),
    ),
    "device.precision = bf16-weights": (
        ("job.strategy", ("sync", "pipeline", "sharded", "local", "server", _PLUGIN), "rounds change rounded weights"),
        ("model.freeze", ([],), "frozen weights are rounded in memory, and would be saved so"),
    ),
    "device.compile = on": (
        ("job.exact", (False,), "compiled layers round in another way than those of a worker that has not compiled"),
        ("device.precision", ("fp32", "bf16", "bf16-weights"), "TF32 is switched for passes while layers are compiled"),
    ),
    "optimizer.name = muon": (
        ("job.strategy", _NOT_SHARDED, "Muon needs whole matrices, and a shard has rows of them"),
    ),
}
"""A setting → where it is on, or has the value, what other settings must be: key, allowed values, and why."""
_PRIVACY_NEEDS = {
    "member": (
        ("job.strategy", ("local", "federated"), "only changes of whole copies are clipped and noised"),
        ("local.overlap", (False,), "a step would count twice"),
        ("local.fragments", (1,), "the inner steps of a step would count in several"),
    ),
    "sample": (
        ("job.strategy", ("sync",), "with unit 'sample' the gradients of single sequences are clipped and noised"),
        ("batch.micro_batch_sequences", (1,), "each sequence is clipped alone"),
        ("drafter.layers", (0,), "a drafter's job would have a budget of its own on the same text"),
    ),
}
"""The same for privacy.epsilon, by privacy.unit."""


def _check(profile: Profile) -> None:
    """Raise ``Conflict`` if settings that are valid alone contradict each other."""
    profile.needs  # noqa: B018 - raises
    new, strategy, stages = not profile.model.path, profile.job.strategy, profile.pipeline.stages
    if new and profile.model.architecture not in RECURRENT:  # compute checks the sizes of a model directory
        _check_heads(profile, "model")
        _check_at_most(profile, "data.sequence_tokens", "model.context")
    if profile.model.keep_optimizer and new:
        why, remedy = "there is no checkpoint to begin from", "name its directory: model.path"
        raise _conflict(profile, "model.keep_optimizer", "model.path", why=why, remedy=remedy)
    if (strategy == "pipeline") != (stages >= 2):
        remedy = "strategy 'pipeline' with pipeline.stages of 2 or more, or another strategy with 0"
        raise _conflict(profile, "job.strategy", "pipeline.stages", why="they contradict each other", remedy=remedy)
    for setting, needs in (*_NEEDS.items(), ("privacy.epsilon", _PRIVACY_NEEDS[profile.privacy.unit])):
        key, _, value = setting.partition(" = ")
        for need in needs if value in ("", profile.value(key)) else ():
            _check_need(profile, key, *need)
    match strategy:
        case "pipeline":
            _check_at_most(profile, "pipeline.stages", "job.workers", why=": each part needs a worker")
            if new:
                _check_at_most(profile, "pipeline.stages", "model.layers", why=": each part needs a layer")
            _check_cuts(profile)
        case "server":
            _check_server(profile)
        case _:
            _check_at_most(
                profile, "job.workers", "batch.micro_batches", why=": some workers would have no micro-batch"
            )
    if strategy == "sharded":
        _check_at_most(profile, "sharded.shards", "job.workers", why=": each shard needs a worker")
        if profile.device.kind == "mps":
            why = "FSDP2 runs on CPUs and on CUDA"
            raise _conflict(profile, "device.kind", "job.strategy", why=why, remedy="device.kind = 'cpu'")
    if strategy != "server" and profile.job.workers // profile.stages > profile.batch.micro_batches:
        why = "more replicas than micro-batches, so some replicas would have none"
        remedy = f"job.workers at most {profile.batch.micro_batches * stages}"
        raise _conflict(profile, "job.workers", "pipeline.stages", "batch.micro_batches", why=why, remedy=remedy)
    for key in ("validation.patience", "checkpoint.best"):
        if profile.value(key) and not profile.validation.every:
            why = "only the last step is validated"
            raise _conflict(profile, key, "validation.every", why=why, remedy="validation.every at least 1")
        if profile.value(key) and not profile.data.validation_fraction:
            why, remedy = "no text is held out", "data.validation_fraction above 0"
            raise _conflict(profile, key, "data.validation_fraction", why=why, remedy=remedy)
    if strategy == "local":
        _check_at_most(profile, "local.fragments", "job.steps", why=": some would never be exchanged")
        if profile.local.overlap and profile.job.steps < 2:
            why, remedy = "what a step computes is exchanged in the next one", "more job.steps"
            raise _conflict(profile, "local.overlap", "job.steps", why=why, remedy=remedy)
    place = PureWindowsPath(profile.track.directory)  # knows drives, and takes \ for / everywhere
    if place.anchor or not all(part.strip(" .") for part in place.parts) or profile.track.directory.startswith("~"):
        why = "a job may write to the seed's own directory of tracked files only"
        remedy = "a relative path without '..' and '~', such as 'mine'; it is made in that directory"
        raise _conflict(profile, "track.directory", why=why, remedy=remedy)
    _check_lora(profile)
    _check_members(profile)
    beats = ("membership.heartbeat_s", "membership.death_s")
    beat, death = profile.membership.heartbeat_s, profile.membership.death_s
    if (beat == 0) != (death == 0):
        raise _conflict(profile, *beats, why="one is automatic (0), the other is set", remedy="set both, or neither")
    if death < 3 * beat:
        remedy = f"{beats[1]} at least {3 * beat}, so that a late heartbeat is allowed"
        raise _conflict(profile, *beats, why="death_s is less than three heartbeats", remedy=remedy)
    if profile.drafter.layers:
        _check_at_most(profile, "drafter.layers", "model.layers", why=": such a drafter is not faster than the model")
        if profile.model.architecture not in RECURRENT:
            _check_heads(profile, "drafter")


_PLUGGED = {
    "strategies": ("job.strategy", get_args(StrategyName)),
    "readers": ("data.format", get_args(FormatName)),
    "codecs": ("ring.codec", get_args(CodecName)),
    "trackers": ("track.to", get_args(TrackerName)),
    "models": ("model.architecture", ()),  # transformers knows them
}
"""Kind of plugins → the setting that names them, and the names that are built in."""


def _unknown_name(profile: Profile, kind: str, name: str) -> Conflict:
    """The error of a name that is neither built in nor that of a plugin with a package."""
    key, built_in = _PLUGGED[kind]
    installed = [entry for place, entry in plugins.installed().items() if place.startswith(kind)]
    here = {point.name: owner.split()[0] for point, owner in installed}
    remedy = "" if name in here else did_you_mean(name, [*built_in, *here])
    remedy += f"built in are {', '.join(built_in) or 'those of transformers'}; for a plugin say its "
    mine = here.get(name, "mine")
    remedy += f"package, such as plugins.{name}.package = '{mine}' or '{mine}==1.2'"
    return _conflict(profile, key, why=f"{name!r} is not known", remedy=remedy)


def _check_need(profile: Profile, key: str, other: str, allowed: tuple[Any, ...], why: str) -> None:
    value = profile.value(other)
    if other == "job.strategy" and value not in get_args(StrategyName):
        value = _PLUGIN
    if profile.value(key) and value not in allowed:
        values = [str(value).lower() if isinstance(value, bool) else repr(value) for value in allowed]
        remedy = f"{other} = {' or '.join(values)}, or leave {key} out"
        raise _conflict(profile, key, other, why=why, remedy=remedy)


def _check_server(profile: Profile) -> None:
    most, needed = profile.job.workers - 1, max(profile.server.buffer, profile.robust.least)
    if most < needed:
        why = f"this job needs {needed + 1} workers: the server, and those whose gradients make a version"
        raise _conflict(profile, "job.workers", why=why, remedy=f"job.workers at least {needed + 1}")
    if profile.robust.rule and profile.server.buffer < profile.robust.least:
        why = f"the rule needs {profile.robust.least} gradients in a version for so many wrong ones"
        remedy = f"server.buffer at least {profile.robust.least}, or a smaller robust.byzantine"
        raise _conflict(profile, "server.buffer", "robust.rule", "robust.byzantine", why=why, remedy=remedy)
    _check_divides(profile, "batch.micro_batches", "server.buffer")


def _check_members(profile: Profile) -> None:
    """A robust rule, and secure aggregation, need some members of a step."""
    robust, federated = profile.robust, profile.federated
    if robust.rule and profile.job.workers < robust.least:
        why = f"this rule needs {robust.least} members for so many wrong ones"
        remedy = f"job.workers at least {robust.least}, or a smaller robust.byzantine"
        raise _conflict(profile, "robust.rule", "robust.byzantine", "job.workers", why=why, remedy=remedy)
    for key, least in (("job.workers", 0), ("federated.sample", 1)):
        if federated.secure and least <= profile.value(key) < 3:
            why = "of two workers that take part each knows what the other sent"
            raise _conflict(profile, "federated.secure", key, why=why, remedy=f"{key} at least 3")


def _check_lora(profile: Profile) -> None:
    lora = profile.lora
    if not lora.rank:
        if lora.base != "fp32":
            why, remedy = "only a model that LoRA keeps frozen can be held so", "set lora.rank, such as 8"
            raise _conflict(profile, "lora.base", "lora.rank", why=why, remedy=remedy)
        if profile.data.format == "preference":
            why, remedy = "the reference is the model without its adapters", "set lora.rank, such as 8, and model.path"
            raise _conflict(profile, "data.format", "lora.rank", why=why, remedy=remedy)
        return
    if not profile.model.path:
        why, remedy = "LoRA needs a trained model", "name its directory: model.path"
        raise _conflict(profile, "lora.rank", "model.path", why=why, remedy=remedy)
    if profile.job.strategy == "federated" and profile.federated.average == "exact":
        for key in ("robust.rule", "federated.secure", "privacy.epsilon"):
            why = "exact averages need the adapters of each worker, one by one"
            _check_need(profile, key, "federated.average", ("frozen-a", "naive"), why)
        other = "or federated.average = 'frozen-a'"
        if lora.base != "fp32":
            why = "exact averages change the model"
            raise _conflict(profile, "lora.base", "federated.average", why=why, remedy=f"lora.base = 'fp32', {other}")
        if profile.ring.codec not in ("fp32", "bf16", "fp16"):
            why = "exact averages allow no codec that adds its error to the next round"
            raise _conflict(profile, "ring.codec", "federated.average", why=why, remedy=f"ring.codec = 'bf16', {other}")


def _check_cuts(profile: Profile) -> None:
    cuts, stages = profile.pipeline.cuts, profile.pipeline.stages
    if not cuts:
        return
    if len(cuts) != stages - 1:
        why, remedy = f"{len(cuts)} cuts make {len(cuts) + 1} parts", f"{stages - 1} cuts, or none"
        raise _conflict(profile, "pipeline.cuts", "pipeline.stages", why=why, remedy=remedy)
    if any(before >= after for before, after in pairwise(cuts)):
        why, remedy = "each cut must be greater than the one before", f"such as {sorted(set(cuts))}"
        raise _conflict(profile, "pipeline.cuts", why=why, remedy=remedy)
    if not profile.model.path and cuts[-1] >= profile.model.layers:
        remedy = f"the last cut at most {profile.model.layers - 1}"
        why = "the last part would have no layer"
        raise _conflict(profile, "pipeline.cuts", "model.layers", why=why, remedy=remedy)


def _check_heads(profile: Profile, table: str) -> None:
    size, heads = f"{table}.hidden_size", f"{table}.heads"
    _check_divides(profile, size, heads)
    _check_divides(profile, heads, f"{table}.kv_heads")
    width = profile.value(size) // profile.value(heads)
    if width % 2:
        why = f"each head has an odd width of {width}, and rotary positions need an even one"
        raise _conflict(profile, size, heads, why=why, remedy=f"{size} = {(width + 1) * profile.value(heads)}")


def _check_divides(profile: Profile, key: str, by_key: str) -> None:
    value, by = profile.value(key), profile.value(by_key)
    if value % by:
        below = value // by * by or by
        problem = f"{key} = {value} is not a multiple of {by_key} = {by}"
        raise Conflict(key, by_key, problem=problem, remedy=f"{key} could be {below} or {below + by}")


def _check_at_most(profile: Profile, key: str, most_key: str, *, why: str = "") -> None:
    value, most = profile.value(key), profile.value(most_key)
    if value > most:
        problem = f"{key} = {value} is more than {most_key} = {most}{why}"
        raise Conflict(key, most_key, problem=problem, remedy=f"{key} at most {most}, or {most_key} at least {value}")


def _conflict(profile: Profile, *keys: str, why: str, remedy: str) -> Conflict:
    settings = ", ".join(f"{key} = {profile.value(key)!r}" for key in keys)
    return Conflict(*keys, problem=f"{settings}: {why}", remedy=remedy)


def fields() -> Iterator[tuple[str, FieldInfo]]:
    """Every setting as (dotted key, field), in the order of the schema."""
    for table, field in tables():
        for name, item in field.model_fields.items():
            yield f"{table}.{name}", item


def tables() -> Iterator[tuple[str, type[Table]]]:
    """Every table as (name, class), in the order of the schema."""
    for name, field in Profile.model_fields.items():
        assert isinstance(field.annotation, type)
        assert issubclass(field.annotation, Table)
        yield name, field.annotation


_EXAMPLE_HEAD = """\
# Every setting with its default: copy what you change into a file of your own
#
#   p2ptrain up --profile ./my.toml
#
# A file may extend a shipped profile (base = "tiny", above the first table). Every file is overridden by the
# environment (P2PTRAIN__OPTIMIZER__LR=1e-3) and the command line (--set optimizer.lr=1e-3).
# Made from configs/schema.py by `python -m configs.schema`."""


def render_example() -> str:
    """``profiles/example.toml``: every setting with its default and its text."""
    lines = [_EXAMPLE_HEAD]
    for table, model in tables():
        lines += ["", *_comment(model.__doc__), f"[{table}]"]
        for name, field in model.model_fields.items():
            lines += [*_comment(field.description), f"{name} = {json.dumps(field.default)}"]  # as TOML writes scalars
    return "\n".join(lines) + "\n"


def _comment(text: str | None) -> list[str]:
    return textwrap.wrap(" ".join((text or "").split()), 118, initial_indent="# ", subsequent_indent="# ")


if __name__ == "__main__":
    print(render_example(), end="")
