"""The schema: what it accepts, what it documents, and that a peer's JSON cannot hurt."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from configs.loader import PROFILES_DIR, describe, load, shipped
from configs.schema import SPEC_LIMIT_BYTES, Link, LinkPresetName, Profile, fields, render_example
from p2ptrain.core.errors import ProtocolError


def test_defaults_are_valid_and_every_field_is_documented() -> None:
    Profile.model_validate({})
    for key, field in fields():
        assert field.description, key
        assert field.description.endswith("."), key
        assert not field.is_required(), key


def test_example_is_up_to_date() -> None:
    written = (PROFILES_DIR / "example.toml").read_text(encoding="utf-8")
    assert written == render_example(), "run: python -m configs.schema > configs/profiles/example.toml"


def test_example_holds_every_default() -> None:
    loaded = load("example", {}, [])
    assert loaded.profile == Profile()
    assert set(loaded.sources.values()) == {"profile example"}


@pytest.mark.parametrize("name", ["example", "lora", "pair", "sharded", "small", "tiny", "wan"])
def test_every_shipped_profile_loads_and_says_what_it_is_for(name: str) -> None:
    assert name in shipped()
    profile = load(name, {}, []).profile
    assert Profile.from_spec_untrusted(profile.to_spec()) == profile.alone()
    assert describe(shipped()[name])


def test_link_presets_are_those_of_the_shaper() -> None:
    from wire.emulate import PRESETS

    assert sorted(["", *PRESETS]) == sorted(get_args(LinkPresetName))
    assert all(name in str(Link.model_fields["preset"].description) for name in PRESETS)


def test_the_longest_profile_fits_a_spec() -> None:
    longest = "\x01" * 1024  # six bytes each in JSON
    names = ["n" * 128] * 32
    model, lora = {"path": longest, "freeze": names}, {"targets": names}
    profile = Profile.model_validate({"model": model, "lora": lora, "data": {"path": longest}})
    assert len(profile.to_spec().encode()) <= SPEC_LIMIT_BYTES
    assert Profile.from_spec_untrusted(profile.to_spec()) == profile


@pytest.mark.parametrize(
    ("strategy", "older", "name"), [("server", "sgd", "sgd"), ("server", "adamw", "muon"), ("sync", "sgd", "muon")]
)
def test_a_job_that_was_stored_with_the_older_name_of_its_optimizer_can_be_read(
    strategy: str, older: str, name: str
) -> None:
    tables = Profile.model_validate({"job": {"strategy": strategy}, "optimizer": {"name": "muon"}}).model_dump()
    tables["server"]["optimizer"] = older
    assert Profile.from_spec_untrusted(json.dumps(tables)).optimizer.name == name
    with pytest.raises(ValidationError, match=r"server\.optimizer"):  # of a new profile
        Profile.model_validate(tables)


def test_a_job_that_was_stored_with_settings_that_are_no_more_can_be_read() -> None:
    tables = Profile.model_validate({"pipeline": {"cuts": [2]}}).model_dump()
    tables["pipeline"] |= {"schedule": "gpipe", "max_in_flight": 3}
    assert Profile.from_spec_untrusted(json.dumps(tables)).pipeline.cuts == [2]
    with pytest.raises(ValidationError, match=r"pipeline\.schedule"):  # of a new profile
        Profile.model_validate(tables)


def test_profiles_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Profile().job.steps = 3


def _spec(**tables: object) -> str:
    return json.dumps(json.loads(Profile().to_spec()) | tables)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the job's profile: Invalid JSON"),
        ("[]", "the job's profile"),
        ("null", "the job's profile"),
        ("{" * 5000, "the job's profile"),
        ("[" * 20000, "the job's"),
        (_spec(job={"steps": "400"}), "job.steps"),
        (_spec(job={"steps": True}), "job.steps"),
        (_spec(job={"steps": 0}), "job.steps"),
        (_spec(job={"stepz": 4}), "job.stepz"),
        (_spec(extra={}), "extra"),
        (_spec(optimizer={"lr": float("nan")}), "optimizer.lr"),
        (_spec(model={"heads": 3}), "model.hidden_size = 128 is not a multiple of model.heads = 3"),
        ('{"job": {"seed": 1e400}}', "job.seed"),
        ("\ud800", "the job's"),
        (" " * (SPEC_LIMIT_BYTES + 1), "more than 32768 bytes"),
        ("é" * (SPEC_LIMIT_BYTES // 2 + 1), "more than 32768 bytes"),
    ],
)
def test_a_bad_spec_is_a_protocol_error(text: str, message: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        Profile.from_spec_untrusted(text)
    assert message in caught.value.message


def test_a_recurrent_model_has_no_heads_and_no_context() -> None:
    sizes = {"hidden_size": 30, "heads": 7, "kv_heads": 3, "context": 2}
    assert Profile.model_validate({"model": {"architecture": "lstm", **sizes}}).model.hidden_size == 30
    with pytest.raises(ValidationError):
        Profile.model_validate({"model": sizes})


def test_a_model_is_split_where_strategy_and_stages_both_say_so() -> None:
    job, batch = {"strategy": "pipeline", "workers": 5}, {"micro_batches": 2}
    profile = Profile.model_validate({"job": job, "batch": batch, "pipeline": {"stages": 2, "cuts": [3]}})
    assert (profile.stages, Profile().stages) == (2, 1)
    assert Profile.model_validate(SHARDED | {"sharded": {"shards": 2}}).stages == 2
    assert Profile.from_spec_untrusted(profile.to_spec()) == profile


@pytest.mark.parametrize(
    ("job", "pipeline", "said"),
    [
        ({"strategy": "pipeline"}, {}, "pipeline.stages = 0: they contradict each other"),
        ({"strategy": "pipeline"}, {"stages": 1}, "pipeline.stages = 1: they contradict each other"),
        ({}, {"stages": 2}, "job.strategy = 'sync', pipeline.stages = 2: they contradict each other"),
        ({"workers": 1}, {"stages": 2}, "pipeline.stages = 2 is more than job.workers = 1"),
        ({"exact": True}, {"stages": 2}, "job.exact = True, job.strategy = 'pipeline'"),
        ({"workers": 5}, {"stages": 5}, "pipeline.stages = 5 is more than model.layers = 4"),
        ({"workers": 20}, {"stages": 2}, "more replicas than micro-batches"),
        ({"workers": 3}, {"stages": 3, "cuts": [1]}, "1 cuts make 2 parts"),
        ({"workers": 3}, {"stages": 3, "cuts": [2, 2]}, "each cut must be greater than the one before"),
        ({"workers": 3}, {"stages": 3, "cuts": [2, 4]}, "the last part would have no layer"),
    ],
)
def test_a_split_that_cannot_be_is_refused(job: dict[str, Any], pipeline: dict[str, Any], said: str) -> None:
    if pipeline.get("stages", 0) > 1 and job:
        job = {"strategy": "pipeline", **job}
    with pytest.raises(ValidationError) as caught:
        Profile.model_validate({"job": job, "pipeline": pipeline})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "directory", ["/etc", "..", "../x", "a/../../x", "~", "~root/x", "C:x", "\\\\host\\x", "a\\..\\x", "a/.. /x"]
)
def test_a_job_cannot_choose_where_on_the_seed_s_machine_its_files_are(directory: str) -> None:
    for inside in ("", "mine", "a/b.c/d"):
        assert Profile.model_validate({"track": {"directory": inside}}).track.directory == inside
    with pytest.raises(ValidationError, match="the seed's own directory of tracked files only"):
        Profile.model_validate({"track": {"directory": directory}})
    with pytest.raises(ProtocolError, match="the job's profile"):
        Profile.from_spec_untrusted(_spec(track={"directory": directory}))


BASE = {"path": "base"}
PAIR = {"layers": 1, "hidden_size": 32, "heads": 2, "kv_heads": 1, "intermediate_size": 48}
FEDERATED: dict[str, Any] = {"job": {"strategy": "federated"}}
SHARDED: dict[str, Any] = {"job": {"strategy": "sharded"}}
SERVER: dict[str, Any] = {"job": {"strategy": "server"}}


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"lora": {"rank": 8}}, "lora.rank = 8, model.path = '': LoRA needs a trained model"),
        (
            {"validation": {"patience": 3}, "data": {"validation_fraction": 0}},
            "validation.patience = 3, data.validation_fraction = 0.0: no text is held out",
        ),
        ({"lora": {"base": "nf4"}}, "lora.base = 'nf4', lora.rank = 0: only a model"),
        ({"lora": {"rank": 8}, "model": BASE | {"freeze": ["a"]}}, "lora.rank = 8, model.freeze = ['a']: with LoRA"),
        ({"lora": {"rank": 8, "base": "bf16"}, "model": BASE}, "device.precision = 'fp32': fp32 arithmetic"),
        (
            {"device": {"precision": "bf16-weights"}, "model": BASE | {"freeze": ["a"]}},
            "device.precision = 'bf16-weights', model.freeze = ['a']: frozen weights",
        ),
        (
            FEDERATED | {"device": {"precision": "bf16-weights"}, "lora": {"rank": 8}, "model": BASE},
            "device.precision = 'bf16-weights', job.strategy = 'federated': rounds",
        ),
        (
            {"device": {"gradient_checkpointing": True}, "job": {"strategy": "pipeline"}, "pipeline": {"stages": 2}},
            "device.gradient_checkpointing = True, job.strategy = 'pipeline'",
        ),
        (
            FEDERATED | {"lora": {"rank": 8, "base": "nf4"}, "model": BASE},
            "lora.base = 'nf4', federated.average = 'exact'",
        ),
        (
            FEDERATED | {"lora": {"rank": 8}, "model": BASE, "ring": {"codec": "int4"}},
            "ring.codec = 'int4', federated.",
        ),
        (FEDERATED | {"drafter": {"layers": 1}}, "drafter.layers = 1, job.strategy = 'federated'"),
        (SHARDED | {"lora": {"rank": 8}, "model": BASE}, "lora.rank = 8, job.strategy = 'sharded': all parameters"),
        (
            {"job": {"strategy": "pipeline"}, "pipeline": {"stages": 2}, "data": {"private": True}},
            "data.private = True, job.strategy = 'pipeline'",
        ),
        ({"job": {"exact": True}, "device": {"compile": "on"}}, "device.compile = 'on', job.exact = True"),
        ({"job": {"exact": True}, "data": {"private": True}}, "data.private = True, job.exact = True"),
        (SHARDED | {"data": {"private": True}}, "data.private = True, job.strategy = 'sharded': the workers"),
        ({"data": {"format": "preference"}}, "lora.rank = 0: the reference is the model without its adapters"),
        (
            SERVER | {"data": {"format": "preference"}, "lora": {"rank": 8}, "model": BASE},
            "data.format = 'preference', job.strategy = 'server': only whole models",
        ),
        (
            SHARDED | {"optimizer": {"name": "muon"}},
            "optimizer.name = 'muon', job.strategy = 'sharded': Muon needs whole",
        ),
        (SHARDED | {"sharded": {"shards": 3}}, "sharded.shards = 3 is more than job.workers = 2"),
        (SHARDED | {"batch": {"micro_batches": 1}}, "job.workers = 2 is more than batch.micro_batches = 1"),
        ({"job": {"strategy": "local", "steps": 3}, "local": {"fragments": 4}}, "local.fragments = 4 is more than"),
        ({"job": {"strategy": "local", "steps": 1}, "local": {"overlap": True}}, "local.overlap = True, job.steps = 1"),
        ({"drafter": {**PAIR, "layers": 5}}, "drafter.layers = 5 is more than model.layers = 4"),
        ({"drafter": {**PAIR, "hidden_size": 33}}, "drafter.hidden_size = 33 is not a multiple of drafter.heads = 2"),
        ({"drafter": {**PAIR, "kv_heads": 3}}, "drafter.heads = 2 is not a multiple of drafter.kv_heads = 3"),
        ({"drafter": PAIR, "model": {"path": "x"}}, "drafter.layers = 1, model.path = 'x': a drafter is a new model"),
    ],
)
def test_strategies_and_fine_tuning_that_cannot_be_are_refused(tables: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Profile.model_validate(tables)
    assert said in str(caught.value)


@pytest.mark.parametrize(("rule", "least"), [("median", 5), ("krum", 7), ("multi_krum", 7), ("bulyan", 11)])
def test_a_rule_has_the_members_that_it_needs(rule: str, least: int) -> None:
    def profile(workers: int) -> Profile:
        tables = {"job": {"workers": workers}, "batch": {"micro_batches": 16}}
        return Profile.model_validate(tables | {"robust": {"rule": rule, "byzantine": 2}})

    assert profile(least).robust.least == least
    with pytest.raises(ValidationError, match=f"this rule needs {least} members"):
        profile(least - 1)


@pytest.mark.parametrize(
    "tables",
    [
        SHARDED,
        {"job": {"strategy": "pipeline"}, "pipeline": {"stages": 2}},
        {"job": {"exact": True}},
        {"ring": {"codec": "int8"}},
        {"ring": {"codec": "auto"}},
        {"job": {"strategy": "local"}, "local": {"fragments": 2}},
        {"job": {"strategy": "local"}, "local": {"overlap": True}},
        FEDERATED | {"federated": {"sample": 2}},
        FEDERATED | {"lora": {"rank": 8}, "model": BASE},
    ],
)
def test_a_rule_is_refused_where_whole_vectors_are_not_exchanged(tables: dict[str, Any]) -> None:
    several = {"job": tables.get("job", {}) | {"workers": 4}}
    assert Profile.model_validate(tables | several)
    with pytest.raises(ValidationError, match=r"robust\.rule = 'median', "):
        Profile.model_validate(tables | several | {"robust": {"rule": "median"}})


def test_a_mean_withstands_no_wrong_vector() -> None:
    with pytest.raises(ValidationError, match="the mean withstands no wrong vector"):
        Profile.model_validate({"robust": {"rule": "mean"}})
    assert Profile.model_validate({"robust": {"rule": "mean", "byzantine": 0}}).robust.least == 1


def test_a_drafter_is_a_job_of_its_own() -> None:
    profile = Profile.model_validate({"job": {"steps": 70}, "drafter": {**PAIR, "steps": 90, "lr": 0.5}})
    own = profile.of_drafter()
    assert Profile.model_validate(own.model_dump()) == own
    assert own.model.model_dump() == profile.model.model_dump() | PAIR
    assert (own.job.steps, own.optimizer.lr, own.drafter.layers) == (90, 0.5, 0)
    assert (own.data, own.batch, own.checkpoint, own.job.seed) == (
        profile.data, profile.batch, profile.checkpoint, profile.job.seed
    )  # fmt: skip
    assert profile.to_spec() == profile.alone().to_spec() == Profile.model_validate({"job": {"steps": 70}}).to_spec()


def test_the_drafter_of_a_split_model_is_trained_whole_with_the_rest_of_its_settings() -> None:
    split = {"job": {"strategy": "pipeline", "workers": 8}, "pipeline": {"stages": 4}, "batch": {"micro_batches": 2}}
    own = Profile.model_validate({**split, "drafter": PAIR}).of_drafter()
    assert Profile.model_validate(own.model_dump()) == own
    assert (own.job.strategy, own.stages, own.job.workers) == ("sync", 1, 2)
    assert (own.job.steps, own.optimizer.lr) == (Profile().job.steps, Profile().optimizer.lr)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("model.layers", "3", "model.layers of a job cannot change; what can: job.steps, "),
        ("optimizer.lr", "-1", "optimizer.lr: Input should be greater than 0"),
        ("optimizer.lr", "1e", "is not JSON"),
        ("validation.every", "5", "losses tell about a text"),
    ],
)
def test_settings_of_a_job_change_within_bounds(key: str, value: str, problem: str) -> None:
    private: dict[str, Any] = {
        "job": {"strategy": "local"}, "data": {"private": True}, "privacy": {"epsilon": 1.0}, "validation": {"every": 0}
    }  # fmt: skip
    profile = Profile.model_validate(private)
    changed = profile.with_changes_untrusted([("optimizer.lr", "0.25"), ("job.steps", "7"), ("optimizer.lr", "0.5")])
    assert (changed.optimizer.lr, changed.job.steps, changed.privacy) == (0.5, 7, profile.privacy)
    with pytest.raises(ProtocolError, match=problem):
        profile.with_changes_untrusted([(key, value)])
