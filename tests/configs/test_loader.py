"""The loader: which layer wins, and what a person reads where one is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.loader import load
from configs.schema import Profile, fields
from p2ptrain.core.errors import ConfigError

TINY_STEPS = load("tiny", {}, []).profile.job.steps
LR_KEYS = (
    "[optimizer] has name, schedule, lr, min_lr_ratio, warmup_steps, decay_share, weight_decay, beta1, beta2, eps, "
    "momentum, clip_norm, label_smoothing, z_loss"
)
TABLES = (
    "the tables are job, model, lora, data, preference, batch, pipeline, sharded, local, federated, server, privacy, "
    "optimizer, validation, checkpoint, device, ring, guard, robust, link, membership, track, drafter, plugins"
)
SHIPPED = "these ship: chat, example, federated, local, lora, pair, private, robust, server, sharded, small, tiny, wan"


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "my.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


# -------------------------------------------------------------------------------------------------------------- layers


def test_each_layer_is_stronger_than_the_last(tmp_path: Path) -> None:
    path = _file(
        tmp_path,
        'base = "tiny"\n\n[job]\nseed = 7\nworkers = 3\n\n[optimizer]\nbeta1 = 0.8\nbeta2 = 0.9\n',
    )
    environ = {
        "P2PTRAIN__JOB__WORKERS": "4",
        "P2PTRAIN__OPTIMIZER__BETA1": ".7",
        "P2PTRAIN_SEED": "no setting",
        "HOME": "/",
    }
    loaded = load(path, environ, ["optimizer.beta1=0.6"])
    assert loaded.profile.job.steps == TINY_STEPS
    assert loaded.profile.job.seed == 7
    assert loaded.profile.job.workers == 4
    assert loaded.profile.optimizer.beta1 == 0.6
    assert loaded.profile.optimizer.beta2 == 0.9
    assert loaded.sources["device.kind"] == "default"
    assert loaded.sources["job.steps"] == "profile tiny"
    assert loaded.sources["job.seed"] == f"{path}:4"
    assert loaded.sources["optimizer.beta2"] == f"{path}:9"
    assert loaded.sources["job.workers"] == "P2PTRAIN__JOB__WORKERS"
    assert loaded.sources["optimizer.beta1"] == "--set optimizer.beta1=0.6"


def test_a_plugin_has_a_table_of_settings(tmp_path: Path) -> None:
    table = '[plugins.fp24]\npackage = "mine==1.2"\nrounds = 2\nscale = 0.5\nname = "x"\n'
    path = _file(tmp_path, f'base = "tiny"\n[ring]\ncodec = "fp24"\n{table}')
    loaded = load(path, {"P2PTRAIN__PLUGINS__FP24__ROUNDS": "3"}, ["plugins.fp24.fast=true", "plugins.other.x=no"])
    assert loaded.profile.plugins.settings_of("fp24") == {"rounds": 3, "scale": 0.5, "name": "x", "fast": True}
    assert loaded.profile.needs == {"codecs:fp24": "mine==1.2"}
    assert loaded.sources["plugins.fp24.package"] == f"{path}:5"
    assert Profile.from_spec_untrusted(loaded.profile.to_spec()) == loaded.profile


@pytest.mark.parametrize("package", ["", "--index-url x", "a b", "x>=1", "x==", "x\ny"])
def test_a_package_of_a_plugin_is_a_name_perhaps_with_a_version(package: str) -> None:
    sets = ["ring.codec=fp24", f"plugins.fp24.package={package}"]
    assert "ring.codec = 'fp24': 'fp24' is not known" in _refusal("tiny", sets=sets)[0]


def test_the_last_override_wins() -> None:
    assert load("tiny", {}, ["job.seed=1", "job.seed=2"]).profile.job.seed == 2


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("job.steps=1_000", 1000),
        ("optimizer.lr=3e-4", 3e-4),
        ("optimizer.lr=1", 1),
        ("optimizer.lr = 0.5 ", 0.5),
        ("model.tie_embeddings=false", False),
        ("model.tie_embeddings=True", True),
        ("data.path=12", "12"),
        ("data.path=a=b", "a=b"),
        ('data.path="with space"', "with space"),
        ("link.preset=", ""),
        ("link.preset=wan", "wan"),
    ],
)
def test_text_becomes_what_the_key_wants(override: str, value: object) -> None:
    key = override.partition("=")[0].strip()
    assert load("tiny", {}, [override]).profile.value(key) == value
    variable = "P2PTRAIN__" + key.upper().replace(".", "__")
    assert load("tiny", {variable: override.partition("=")[2]}, []).profile.value(key) == value


# -------------------------------------------------------------------------------------------------------------- errors


def _refusal(profile: str, environ: dict[str, str] | None = None, sets: list[str] | None = None) -> tuple[str, str]:
    with pytest.raises(ConfigError) as caught:
        load(profile, environ or {}, sets or [])
    return caught.value.message, caught.value.remedy


@pytest.mark.parametrize(
    ("override", "message", "remedy"),
    [
        ("job.steps", "no value", "write --set table.key=value, such as --set optimizer.lr=3e-3"),
        ("optimizer.lrr=1", "unknown key optimizer.lrr", f"did you mean optimizer.lr? {LR_KEYS}"),
        ("optimizer.zzz=1", "unknown key optimizer.zzz", LR_KEYS),
        ("optim.lr=1", "unknown key optim.lr", f"did you mean optimizer.lr? {TABLES}"),
        ("modle.zzz=1", "unknown key modle.zzz", f"did you mean model? {TABLES}"),
        ("zzz=1", "unknown key zzz", TABLES),
        ("plugins.fp24=1", "unknown key plugins.fp24", "[plugins] has NAME.package"),
        ("plugins=1", "plugins is a table", "set one of its keys, such as plugins.NAME.package"),
        (
            "ring.codec=int9",
            "ring.codec = 'int9': 'int9' is not known",
            "did you mean int8? built in are fp32, bf16, fp16, int8, int4, topk, auto; for a plugin say its package, "
            "such as plugins.int9.package = 'mine' or 'mine==1.2'",
        ),
        ("lr=1", "unknown key lr", "it belongs to a table: optimizer.lr"),
        ("model=1", "model is a table", "set one of its keys, such as model.architecture"),
        (
            "model.hidden_size=130",
            "model.hidden_size = 130 is not a multiple of model.heads = 4",
            "model.hidden_size could be 128 or 132",
        ),
        (
            "model.hidden_size=132",
            "model.hidden_size = 132, model.heads = 4: "
            "each head has an odd width of 33, and rotary positions need an even one",
            "model.hidden_size = 136",
        ),
        (
            "model.kv_heads=8",
            "model.heads = 4 is not a multiple of model.kv_heads = 8",
            "model.heads could be 8 or 16",
        ),
        (
            "data.sequence_tokens=1024",
            "data.sequence_tokens = 1024 is more than model.context = 256",
            "data.sequence_tokens at most 256, or model.context at least 1024",
        ),
        (
            "job.workers=20",
            "job.workers = 20 is more than batch.micro_batches = 8: some workers would have no micro-batch",
            "job.workers at most 8, or batch.micro_batches at least 20",
        ),
        (
            "membership.death_s=3",
            "membership.heartbeat_s = 0.0, membership.death_s = 3.0: one is automatic (0), the other is set",
            "set both, or neither",
        ),
    ],
)
def test_a_wrong_override_is_named_with_what_would_be_right(override: str, message: str, remedy: str) -> None:
    defaults = "example"  # its values are those of the schema, so tuning a profile does not touch these messages
    assert _refusal(defaults, sets=[override]) == (f"--set {override}: {message}", remedy)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("job.steps=many", '"many" must be a whole number'),
        ("job.steps=1.5", "1.5 must be a whole number"),
        ("job.steps=0", "0 must be greater than or equal to 1"),
        ("optimizer.lr=fast", '"fast" must be a number'),
        ("optimizer.lr=nan", "nan must be a finite number"),
        ("model.tie_embeddings=maybe", '"maybe" must be true or false'),
        ("ring.codec=Fp8", "\"Fp8\" must be 'fp32', 'bf16', 'fp16', 'int8', 'int4', 'topk' or 'auto'"),
        ("device.kind=gpu", '"gpu" is not an allowed value'),
        ("ring.sub_chunk_bytes=5000", "5000 must be a multiple of 1024"),
    ],
)
def test_a_value_that_cannot_be_is_answered_with_what_the_key_is(override: str, message: str) -> None:
    key = override.partition("=")[0]
    description = " ".join((dict(fields())[key].description or "").split())
    assert _refusal("example", sets=[override]) == (f"--set {override}: {key} = {message}", f"{key}: {description}")


def test_death_takes_two_beats() -> None:
    message, remedy = _refusal("tiny", sets=["membership.heartbeat_s=5", "membership.death_s=9"])
    assert message == (
        "--set membership.death_s=9: membership.heartbeat_s = 5.0, membership.death_s = 9.0: "
        "death_s is less than three heartbeats"
    )
    assert remedy == "membership.death_s at least 15.0, so that a late heartbeat is allowed"


def test_a_conflict_is_blamed_on_the_strongest_layer() -> None:
    message, _ = _refusal("example", {"P2PTRAIN__MODEL__HEADS": "3"})
    assert (
        message == "the variable P2PTRAIN__MODEL__HEADS: model.hidden_size = 128 is not a multiple of model.heads = 3"
    )


def test_a_wrong_variable_is_named() -> None:
    message, remedy = _refusal("tiny", {"P2PTRAIN__OPTIMIZER__LRR": "1"})
    assert message == "P2PTRAIN__OPTIMIZER__LRR: unknown key optimizer.lrr"
    assert remedy == f"did you mean P2PTRAIN__OPTIMIZER__LR? {LR_KEYS}"
    message, _ = _refusal("tiny", {"P2PTRAIN__JOB__STEPS": "many"})
    assert message == 'the variable P2PTRAIN__JOB__STEPS: job.steps = "many" must be a whole number'


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("[optimizer]\n# lr = 1\nlr = 'fast'\n", 3, 'optimizer.lr = "fast" must be a number'),
        ("[job]\nsteps = 3\n\n[optimizer]\n\n  lrr = 1\n", 6, "unknown key optimizer.lrr"),
        ("[job]\nsteps = 3\n[ optimizer ]\n'lr' = -1\n", 4, "optimizer.lr = -1 must be greater than 0"),
        ("\noptimizer.lr = true\n", 2, "optimizer.lr = true must be a number"),
        ("\n\noptimizer = { lr = -1 }\n", 3, "optimizer.lr = -1 must be greater than 0"),
        ("[data]\npath = 3\n", 2, "data.path = 3 must be text"),
        ("[job]\nsteps = 3\n[modle]\nheads = 3\n", 3, "unknown key modle"),
        ("model = 3\n", 1, "model is a table"),
        ("[[model]]\n", 1, "model is a table"),
        ("[model.heads]\nx = 1\n", 1, "model.heads = {'x': 1} must be a whole number"),
        ("[job]\nsteps = 3\nsteps = 4\n", 3, "not TOML: Cannot overwrite a value"),
        ("[job]\nsteps = \n", 2, "not TOML: Invalid value"),
        ("\nbase = 'tinny'\n", 2, 'base = "tinny" is not a shipped profile'),
        ("\nbase = 3\n", 2, "base = 3 is not a shipped profile"),
        ("[model]\nlayers = 2\nheads = 3\n", 3, "model.hidden_size = 128 is not a multiple of model.heads = 3"),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    path = _file(tmp_path, text)
    assert _refusal(path)[0] == f"{path}:{line}: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a" + ".a" * 400_000 + " = 1", ":1: a key has more than 16 parts"),
        ("x = 1\n[a" + ' . "\\"."' * 16 + "]", ":2: a key has more than 16 parts"),
        ("a = " + "[" * 100_000, ": more than 16 tables or lists are nested"),
        ("a = " + "[" * 20 + "]" * 20, ": more than 16 tables or lists are nested"),
        ("a = " + "9" * 5000, ": not TOML: Exceeds the limit (4300 digits)"),
        ("a = 0x" + "f" * 5000, ": a number has more than 64 bits"),
        ("'" + "k" * 5000 + "' = 1", ":1: unknown key kkkk"),
        ('a = """\n[' + " " * 900_000 + '\n"""', ":1: unknown key a"),
    ],
    ids=lambda text: text[:20],
)
def test_a_hostile_file_is_refused_in_a_moment(tmp_path: Path, text: str, message: str) -> None:
    path = _file(tmp_path, text)
    refusal = _refusal(path)[0]
    assert refusal.startswith(f"{path}{message}")
    assert len(refusal) < 1000


def test_an_unknown_profile_lists_those_that_ship() -> None:
    own = "; a file of your own is given as a path, such as ./my.toml"
    assert _refusal("tinny") == (
        "no profile named 'tinny' ships with p2ptrain",
        f"did you mean tiny? {SHIPPED}{own}",
    )
    assert _refusal("zzz")[1] == SHIPPED + own


def test_a_drafter_has_what_its_table_says_and_else_what_the_job_has(tmp_path: Path) -> None:
    own = load("pair", {}, ["job.steps=7", "optimizer.lr=0.5"]).profile.of_drafter()
    assert (own.job.steps, own.optimizer.lr) == (7, 0.01), "the profile names a rate of the drafter's, and no steps"
    mine = _file(tmp_path, 'base = "pair"\n[drafter]\nsteps = 9\n')
    for loaded in (load(mine, {}, ["job.steps=7"]), load("pair", {}, ["drafter.steps=9", "job.steps=7"])):
        assert (loaded.profile.of_drafter().job.steps, loaded.profile.job.steps) == (9, 7)


@pytest.mark.parametrize("text", ["2,3", "[2, 3]", " 2 , 3 "])
def test_a_list_is_written_with_or_without_brackets(text: str) -> None:
    split = ["job.strategy=pipeline", "job.workers=3", "pipeline.stages=3"]
    assert load("tiny", {}, [*split, f"pipeline.cuts={text}"]).profile.pipeline.cuts == [2, 3]
    with pytest.raises(ConfigError, match=r"pipeline\.cuts"):
        load("tiny", {}, [*split, "pipeline.cuts=2,x"])
