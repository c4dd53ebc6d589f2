"""Reading a configuration: what is accepted, what is refused, and with which words."""

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from zeromesh.apps.train.train_settings import ResolvedTrainSettings
from zeromesh.apps.train.train_settings import TrainSettings as Settings  # all keys: the engine's and the trainer's
from zeromesh.base.placement import ROWS
from zeromesh.base.precision import LossScale, Precision
from zeromesh.config.errors import ConfigError
from zeromesh.config.settings import entries
from zeromesh.config.special_keys import (
    GONE,
    NOT_YET,
    ON_IF_THERE,
    OURS,
    RENAMED,
    UNREAD,
    WITHOUT_EFFECT,
    look_up,
    sections_of,
)

CONFIGS = Path(__file__).parent / "configs"
ACCEPTED = sorted(CONFIGS.glob("*.json"))


def nested(path: str, value: Any) -> dict[str, Any]:
    first, _, rest = path.partition(".")
    return {first: nested(rest, value) if rest else value}


def problems(source: Any, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        Settings.load(source, overrides)
    return caught.value.problems


@pytest.mark.parametrize("path", ACCEPTED, ids=lambda path: path.stem)
def test_real_files_load_from_every_source_alike_and_read_back_as_themselves(path: Path) -> None:
    settings = Settings.load(path)
    assert settings == Settings.load(str(path)) == Settings.load(json.loads(path.read_text()))
    assert pickle.loads(pickle.dumps(settings.resolve(4))) == settings.resolve(4)
    assert settings.resolve(2).train_batch_size > 0
    resolved = settings.resolve(4, settings.resolve_mesh(4))
    assert Settings.load(resolved) is resolved
    again = Settings.load(json.loads(resolved.to_json()))
    assert again.resolve_mesh(4) == settings.resolve_mesh(4)
    assert again.resolve(4).to_json() == resolved.to_json()
    assert again.resolve(4).to_json() == resolved.to_json()


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("onebit", ["optimizer.type"]),
        ("apex", ["amp"]),
        ("parallel", ["zero_optimization.zero_quantized_nontrainable_weights"]),
    ],
)
def test_files_that_need_more_are_refused_naming_each_key_once(name: str, keys: list[str]) -> None:
    found = problems(CONFIGS / "refused" / f"{name}.json")
    assert [problem.split(" ")[0] for problem in found] == keys


def test_the_configs_of_the_tests_use_most_of_what_users_write() -> None:
    """The files above would prove little if they had few keys."""
    written = {
        path for path in entries(Settings) for file in ACCEPTED if look_up(json.loads(file.read_text()), path)[0]
    }
    assert len(written) > 120


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"train_batch_siz": 8}, "train_batch_siz is not a known key; did you mean train_batch_size?"),
        ({"fp16": {"enable": True}}, "fp16.enable is not a known key; did you mean fp16.enabled?"),
        ({"zero_optimization": {"stge": 1}}, "did you mean zero_optimization.stage?"),
        (
            {"zero_optimization": {"offload_param": {"pin_memry": True}}},
            "did you mean zero_optimization.offload_param.pin_memory?",
        ),
        ({"run": {"steps": 1, "sample": {"lenght": 5}}}, "did you mean run.sample.length?"),
        ({"stage": 3}, "did you mean zero_optimization.stage?"),
        ({"steps": 3}, "did you mean run.steps?"),
        ({"lr": 3}, "did you mean optimizer.params.lr?"),
        ({"dropout": 0.1}, "did you mean model.dropout?"),
        ({"sequence_length": 8}, "did you mean model.sequence_length or huggingface.sequence_length?"),
        ({"bfloat61": {}}, "did you mean bfloat16?"),
        ({"mesh": {"zzz": 1}}, "mesh has replicate, data, pipeline, context, tensor, expert"),
        ({"qqqqqqqqq": 1}, "docs/configuration.md lists them all"),
    ],
)
def test_an_unknown_key_is_named_with_its_path_and_the_nearest_one(document: dict[str, Any], expected: str) -> None:
    (problem,) = problems(document)
    assert expected in problem


@pytest.mark.parametrize(
    "section", ["", *(path for path, entry in entries(Settings).items() if entry.section and path not in UNREAD)]
)
def test_no_section_at_any_depth_takes_an_unknown_key(section: str) -> None:
    path = f"{section}.no_such_key".lstrip(".")
    assert any(problem.startswith(f"{path} is not a known key") for problem in problems(nested(path, 1)))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"seed": 1, "seed": 1}', "seed"),
        ('{"fp16": {"enabled": true, "loss_scale": 0, "enabled": false}}', "fp16.enabled"),
        (
            '{"zero_optimization": {"offload_param": {"device": "none", "device": "none"}}}',
            "zero_optimization.offload_param.device",
        ),
        ('{"optimizer": {"type": "sgd", "params": {"lr": 1, "lr": 2}}}', "optimizer.params.lr"),
    ],
)
def test_a_repeated_key_is_named_with_its_path(tmp_path: Path, text: str, key: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="config.json") as caught:
        Settings.load(file)
    assert caught.value.problems == (f"{key} stands more than once; keep one of them",)


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_other_name_is_read_as_the_key_itself_and_never_beside_it(old: str, new: str) -> None:
    assert new in entries(Settings)
    value = {"bf16": {"enabled": True}, "tensor_parallel.tensor_parallel": {"tp_size": 2}}.get(new, 3)
    assert Settings.load(nested(old, value)) == Settings.load(nested(new, value))
    assert (Settings.load(nested(old, value)) == Settings.load(nested(new.rpartition(".")[0] or "mesh", {}))) is (
        new in UNREAD
    )
    section, _, name = new.rpartition(".")
    both = {old.rpartition(".")[2]: value, name: value}
    (problem,) = problems(nested(section, both) if section else both)
    assert old in problem
    assert new in problem


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"train_batch_size": "32"}, ['train_batch_size = "32"', "a whole number >= 1", "write 32 without quotes"]),
        ({"train_batch_size": True}, ["train_batch_size = true", "a whole number >= 1"]),
        ({"train_batch_size": 0}, ["train_batch_size = 0", "a whole number >= 1"]),
        ({"train_batch_size": -8}, ["train_batch_size = -8", "a whole number >= 1"]),
        ({"train_batch_size": 2.5}, ["train_batch_size = 2.5", "the nearest are 2 and 3"]),
        ({"gradient_clipping": -1}, ["gradient_clipping = -1", "a number >= 0", "leave it out for 0.0"]),
        ({"gradient_clipping": True}, ["gradient_clipping = true", "a number >= 0"]),
        ({"gradient_clipping": None}, ["gradient_clipping = null", "a number >= 0"]),
        ({"gradient_clipping": float("inf")}, ["gradient_clipping = Infinity", "a number >= 0"]),
        ({"gradient_predivide_factor": 0}, ["gradient_predivide_factor = 0", "a number > 0"]),
        ({"zero_optimization": {"stage": 4}}, ["zero_optimization.stage = 4", ">= 0 and <= 3"]),
        ({"zero_optimization": {"stage": -1}}, ["zero_optimization.stage = -1", ">= 0 and <= 3"]),
        ({"zero_optimization": 2}, ["zero_optimization = 2", "must be an object", "stage"]),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, ['device = "gpu"', 'did you mean "cpu"?']),
        ({"fp16": {"enabled": 1}}, ["fp16.enabled = 1", "true or false", "write true"]),
        ({"fp16": {"enabled": "False"}}, ['fp16.enabled = "False"', "write false without quotes"]),
        ({"fp16": True}, ["fp16 = true", "must be an object", "enabled"]),
        ({"autotuning": True}, ["autotuning = true", "must be an object"]),
        ({"data_efficiency": [{"enabled": True}]}, ["data_efficiency = ", "must be an object"]),
        ({"fp16": {"loss_scale": -1}}, ["fp16.loss_scale = -1", ">= 0"]),
        ({"fp16": {"loss_scale_window": 0}}, ["fp16.loss_scale_window = 0", ">= 1"]),
        ({"torch_autocast": {"dtype": "fp61"}}, ['torch_autocast.dtype = "fp61"', 'did you mean "fp16"?']),
        ({"units": ["Block", 3]}, ["units[1] = 3", "a list of strings"]),
        ({"seed": 10**400}, ["seed = 1", "<= 9223372036854775807"]),
        ({"zero_optimization": {"mics_shard_size": -2}}, ["mics_shard_size = -2", ">= -1"]),
        ({"slots": {"parameter": 1}}, ["slots.parameter = 1", ">= 2"]),
        ({"mesh": {"data": 0}}, ["mesh.data = 0", "-1 for what is left"]),
        ({"mesh": {"data": -2}}, ["mesh.data = -2", ">= -1"]),
        ({"mesh": {"replicate": -1}}, ["mesh.replicate = -1", ">= 1"]),
        ({"optimizer": {"params": {}}}, ["optimizer.type is missing", "torch.optim"]),
        ({"optimizer": {"type": "sgd", "params": [1]}}, ["optimizer.params = [1]", "an object"]),
        ({"optimizer": {"type": "adamm"}}, ['optimizer.type = "adamm"', 'did you mean "adam"?']),
        ({"optimizer": {"type": "RMSProp2"}}, ['did you mean "RMSprop"?']),
        ({"optimizer": {"type": "qqqq"}}, ["adam, adamw, lamb, lion, adagrad, sgd, muon"]),
        ({"scheduler": {"type": "WarmUp"}}, ['scheduler.type = "WarmUp"', 'did you mean "WarmupLR"?']),
        ({"scheduler": {"type": "StepLr2"}}, ['did you mean "StepLR"?']),
        ({"data": {"train": []}}, ["data.train = []", "at least one"]),
        ({"run": {"steps": 0}}, ["run.steps = 0", ">= 1"]),
        ({"fp16": {1: 2}}, ["fp16.1 is not a known key"]),
        (
            {"model": {"hidden_size": 10, "layers": 1, "heads": 3, "sequence_length": 8}},
            ["hidden_size = 10", "heads = 3", "9 and 12"],
        ),
        (
            {"model": {"hidden_size": 12, "layers": 1, "heads": 6, "kv_heads": 4, "sequence_length": 8}},
            ["kv_heads = 4", "heads = 6", "[1, 2, 3, 6]"],
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["fp16.enabled and bf16.enabled", "only one"]),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, ["only one of bf16.bf16_master", "set both"]),
        (
            {"zero_optimization": {"mics_shard_size": 2, "zero_hpz_partition_size": 2}},
            ["mics_shard_size", "zero_hpz_partition_size"],
        ),
    ],
)
def test_a_wrong_value_is_one_problem_with_key_value_rule_and_remedy(document, expected) -> None:
    (problem,) = problems(document)
    for part in expected:
        assert part in problem


def test_all_problems_come_in_one_error_that_is_a_value_error() -> None:
    document = {
        "train_batch_size": "8",
        "grdient_clipping": 1,
        "amp": {"enabled": True},
        "mesh": {"expert": 0},
        "optimizer": {"type": "OneBitLamb"},
    }
    with pytest.raises(ValueError, match="has 5 problems") as caught:
        Settings.load(document)
    for key in ("train_batch_size", "grdient_clipping", "amp", "mesh.expert", "optimizer.type"):
        assert f"\n  - {key}" in str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "a bracket is not closed"),
        ('{\n  "fp16": {"enabled": true}\n', "a bracket is not closed"),
        ('{"seed": 1, /* a comment', "this comment is not closed by */"),
        ('{"fp16": {"enabled": True}}', "JSON writes true, false and null"),
        ('{"seed": 1,,}', "keys are in double quotes"),
        ('{\n  // a comment\n  # {\n /*\n*/ "seed": True}', 'line 5, column 12: "*/ \\"seed\\": True}"'),
        ("", "is empty; write a configuration"),
        ("[1]", "must be an object"),
    ],
)
def test_files_without_a_json_object_are_refused_by_name(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="broken.json") as caught:
        Settings.load(file)
    assert expected in str(caught.value)


@pytest.mark.parametrize("source", [None, 3, ["a"], "no/such/file.json", Path("no/such/file.json"), CONFIGS])
def test_sources_other_than_files_and_dicts_are_refused(source: Any) -> None:
    assert len(problems(source)) == 1


@pytest.mark.parametrize("path", [path for path, entry in entries(Settings).items() if not entry.required])
def test_auto_means_unset_for_every_key(path: str) -> None:
    document = nested(path, "auto")
    if path.startswith(("optimizer.", "scheduler.")):
        document[path.split(".")[0]]["type"] = {"optimizer": "sgd", "scheduler": "WarmupLR"}[path.split(".")[0]]
    required = {
        "model": {"hidden_size": 8, "layers": 1, "heads": 2, "sequence_length": 8},
        "huggingface": {"path": "a", "sequence_length": 8},
        "data": {"train": ["a"]},
        "run": {"steps": 1},
    }
    top = path.split(".")[0]
    if path == "embedding_tables.optimizer.params":
        document[top]["optimizer"]["type"] = "sgd"
    if path.startswith("lora."):
        document["huggingface"] = required["huggingface"]
    if path.startswith("huggingface.quantization."):  # weights that are trained by adapters alone
        document["lora"] = {}
    if "." in path and top in required:
        document[top].update(required[top])
    settings = Settings.load(document)
    found, value = look_up(json.loads(settings.to_json()), path)
    # The default of the one has that name; the other asks the planner.
    named = {"context_parallel.strategy", "activation_checkpointing.granularity"}
    assert not found or value != "auto" or path in named


@pytest.mark.parametrize(
    ("document", "path", "expected"),
    [
        ({"train_batch_size": 5e8}, "train_batch_size", 500_000_000),
        ({"zero_optimization": {"stage": 2.0}}, "zero_optimization.stage", 2),
        ({"zero_optimization": True}, "zero_optimization.stage", 1),  # its oldest form
        ({"zero_optimization": False}, "zero_optimization.stage", 0),
        ({"steps_per_print": float("inf")}, "steps_per_print", None),
        ({"units": "Block"}, "units", ["Block"]),
        ({}, "gradient_clipping", 0.0),
        ({"optimizer": {"type": "adam", "params": {"lr": "auto", "eps": 1e-6}}}, "optimizer.params", {"eps": 1e-6}),
        *(({"optimizer": {"type": name}}, "optimizer.type", name) for name in ("ADAMW", "lamb", "Muon", "nadam")),
        *(({"scheduler": {"type": name}}, "scheduler.type", name) for name in ("WSD", "OneCycle", "LinearLR")),
    ],
)
def test_values_are_read_in_every_form_that_users_write(document: dict[str, Any], path: str, expected: object) -> None:
    found = look_up(json.loads(Settings.load(document).to_json()), path)[1]
    assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize("name", ["bf16", "bfloat16", "BF16", "torch.bfloat16", torch.bfloat16])
def test_a_dtype_has_one_name_however_it_is_written(name: object) -> None:
    settings = Settings.load({"communication_data_type": name})
    assert settings.communication_data_type == "bf16"
    assert settings.precision.communicate is torch.bfloat16


REQUIRED: dict[str, dict[str, Any]] = {"data": {"train": "a"}, "run": {"steps": 1}}
"""Keys that sections must have, beside those that are gone."""


@pytest.mark.parametrize(
    ("section", "value"),
    [
        (section, value)
        for section in GONE
        for value in (False, None, "auto", *(({}, {"enabled": False, "x": 1}) if section not in ON_IF_THERE else ()))
    ],
)
def test_sections_that_are_gone_may_stand_there_switched_off(section: str, value: Any) -> None:
    parent = section.rpartition(".")[0]
    around = nested(parent, {}) if parent.count(".") else {}  # a section that is given may have defaults of its own
    name = section.partition(".")[0]
    if name in REQUIRED:
        around = {name: REQUIRED[name]}
    document = {**around, **nested(section, value)}
    if name in REQUIRED:
        document[name] |= REQUIRED[name]
    assert Settings.load(document) == Settings.load(around)


@pytest.mark.parametrize("section", GONE)
def test_sections_that_are_gone_are_refused_with_a_remedy(section: str) -> None:
    name = section.partition(".")[0]
    required = [f"{name}.{key}={value}" for key, value in REQUIRED.get(name, {}).items()]
    (problem,) = problems(nested(section, {"enabled": True}), *required)
    assert problem == f"{section} is not available; {GONE[section]}"


def test_every_row_of_the_tables_is_about_a_key() -> None:
    assert {*WITHOUT_EFFECT, *NOT_YET, *OURS} <= set(entries(Settings))
    assert not set(GONE) & set(entries(Settings))


@pytest.mark.parametrize("path", NOT_YET)
def test_unsupported_keys_are_refused_in_the_words_of_the_table_and_their_defaults_allowed(path: str) -> None:
    entry = entries(Settings)[path]
    value: Any = {}
    if not entry.section:
        value = not entry.default if "true" in entry.rule else "nvme" if "nvme" in entry.rule else 2
        value = "fp32" if "fp32" in entry.rule else value
    elif path == "weight_quantization":
        value = {"num_bits": 4}
    (problem,) = problems(nested(path, value), "zero_optimization.stage=3")
    assert problem.startswith(f"{path} = ")
    assert "is not in this version yet" in problem
    for value in NOT_YET[path].allowed:
        Settings.load(nested(path, value), ["zero_optimization.stage=3"])


def no_effect_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    return [line.strip() for message in messages for line in message.splitlines()[1:]]


def test_keys_without_effect_are_reported_once_and_only_if_set(caplog: pytest.LogCaptureFixture) -> None:
    document = {
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": "auto"},
        "comet": {"enabled": True, "project": "x"},
        "amp": {"enabled": False},
    }
    with caplog.at_level(logging.INFO, logger="zeromesh"):
        settings = Settings.load(document)
        Settings.load(settings).resolve(2).to_json()
    assert [line.split(":")[0] for line in no_effect_lines(caplog)] == [
        "comet",
        "zero_optimization.overlap_comm",
        "amp",
    ]
    assert len(caplog.records) == 1
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="zeromesh"):
        Settings.load(CONFIGS / "train.json")
    assert not caplog.records, "every key of it counts"


@pytest.mark.parametrize("path", WITHOUT_EFFECT)
def test_keys_without_effect_take_any_value_and_are_not_in_the_settings(path: str) -> None:
    allowed = {"weight_quantization": None, "datastates_ckpt": None, "optimizer.legacy_fusion": 1}
    document = nested(path, allowed.get(path, {"no_such_key": 1}))
    if path.startswith("optimizer."):
        document["optimizer"]["type"] = "adam"
    assert not look_up(json.loads(Settings.load(document).to_json()), path)[0]


@pytest.mark.parametrize("written", [{"overlap_comm": True}, {"no_such_key": 1}])
def test_files_of_earlier_versions_are_read_without_the_keys_that_have_left(written: dict[str, Any]) -> None:
    document = json.loads(Settings.load({"data": {"train": "a"}}).resolve(1).to_json())
    document["data"]["workers"] = 3
    document["zero_optimization"] |= written
    if "no_such_key" in written:
        with pytest.raises(ValueError, match="no_such_key"):
            ResolvedTrainSettings.reread(document)
    else:
        assert ResolvedTrainSettings.reread(document).data is not None


def test_an_override_changes_one_key_and_creates_its_section() -> None:
    document = {"zero_optimization": {"stage": 1, "mics_shard_size": 2}}
    settings = Settings.load(document, ["zero_optimization.stage=3", "optimizer.type=sgd", "optimizer.params.lr=1e-2"])
    assert (settings.zero_optimization.stage, settings.zero_optimization.mics_shard_size) == (3, 2)
    assert (settings.optimizer.type, settings.optimizer.params) == ("sgd", {"lr": 0.01})
    assert document == {"zero_optimization": {"stage": 1, "mics_shard_size": 2}}
    assert Settings.load({}, ["seed=1", "seed=2"]).seed == 2
    settings = Settings.load(Settings.load({"seed": 5, "train_batch_size": 8}).resolve(2), ["gradient_clipping=1"])
    assert (settings.seed, settings.train_batch_size, settings.gradient_clipping) == (5, 8, 1.0)


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("fp16.enabled=true", "fp16.enabled", True),
        ('units=["A", "B"]', "units", ["A", "B"]),
        ("units=Block", "units", ["Block"]),
        ("bfloat16.enabled=true", "bf16.enabled", True),
        ("gradient_clipping=auto", "gradient_clipping", 0.0),
        ("zero_optimization=true", "zero_optimization.stage", 1),
        ('mesh={"replicate": 2}', "mesh.replicate", 2),
        ('run.sample.prompts=["a=b"]', "run.sample.prompts", ["a=b"]),
        ("train_batch_size=5e2", "train_batch_size", 500),
    ],
)
def test_the_value_of_an_override_is_json_or_a_bare_word(override: str, path: str, value: Any) -> None:
    settings = Settings.load({"gradient_clipping": 1.0, "run": {"steps": 1}}, [override])
    assert look_up(json.loads(settings.to_json()), path) == (True, value)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "zero_optimization.stag=3",
            "zero_optimization.stag is not a known key; did you mean zero_optimization.stage?",
        ),
        ("seed.x=3", "seed = "),
        ("seed", "path=value"),
        ("=3", "path=value"),
        ("a..b=3", "path=value"),
        ("seed=True", 'seed = "True"'),
        ('optimizer={"type": "sgd", "type": "sgd"}', "optimizer.type stands more than once"),
    ],
)
def test_a_wrong_override_gets_the_same_errors(override: str, expected: str) -> None:
    assert expected in problems({}, override)[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_is_a_row(stage: int) -> None:
    assert Settings.load({"zero_optimization": {"stage": stage}}).row == ROWS[stage]


@pytest.mark.parametrize(
    ("zero", "tiers"),
    [
        ({"offload_optimizer": {"device": "cpu"}}, ("device", "host", "host")),
        ({"offload_param": {"device": "cpu"}}, ("host", "device", "device")),
        ({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}, ("host", "host", "host")),
        ({"cpu_offload": True}, ("device", "host", "host")),
        ({"cpu_offload": False, "cpu_offload_param": True}, ("host", "device", "device")),
        ({"offload_optimizer": {"device": "none"}}, ("device", "device", "device")),
        ({"offload_param": {"device": "nvme", "nvme_path": "/disk"}}, ("nvme", "device", "device")),
    ],
)
def test_offload_sections_set_the_tiers_of_the_row(zero: dict[str, Any], tiers: tuple[str, ...]) -> None:
    row = Settings.load({"zero_optimization": {"stage": 3, **zero}}).row
    assert (row.parameter_tier.value, row.gradient_tier.value, row.optimizer_tier.value) == tiers


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "set zero_optimization.stage to 1, 2 or 3, also on one"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "set zero_optimization.stage to 3, also on one rank"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "offload_param.device is nvme, but nvme_path is missing"),
        (
            {"stage": 3, "cpu_offload": True, "offload_optimizer": {"device": "none"}},
            "offload_optimizer.device is 'none', but the older cpu_offload is True; keep one of them",
        ),
    ],
)
def test_contradictory_offload_sections_are_refused(zero: dict[str, Any], message: str) -> None:
    (problem,) = problems({"zero_optimization": zero})
    assert message in problem


FP16_SCALE = LossScale(None, 12, 500, 3, True, 2.0)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, Precision()),
        ({"bf16": {"enabled": True}}, Precision(compute=torch.bfloat16)),
        ({"bf16": {"enabled": False}}, Precision()),
        ({"fp16": {"enabled": True}}, Precision(compute=torch.float16, loss_scale=LossScale())),
        (
            {"fp16": {"enabled": True, "loss_scale": 128, "auto_cast": False}},
            Precision(compute=torch.float16, loss_scale=LossScale(static=128.0), cast_inputs=False),
        ),
        ({"torch_autocast": {"enabled": True}}, Precision(autocast=torch.bfloat16)),
        (
            {"torch_autocast": {"enabled": True, "dtype": "float16"}, "fp16": {"initial_scale_power": 8}},
            Precision(autocast=torch.float16, loss_scale=LossScale(initial_power=8)),
        ),
        (
            {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "bf16"}},
            Precision(communicate=torch.float32, accumulate=torch.bfloat16),
        ),
        (
            json.loads((CONFIGS / "zero3_fp16.json").read_text()),
            Precision(torch.float16, torch.float16, torch.float32, cast_inputs=False, loss_scale=FP16_SCALE),
        ),
    ],
)
def test_the_precision_of_a_configuration(document: dict[str, Any], expected: Precision) -> None:
    assert Settings.load(document).precision == expected


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({}, None),
        ({"gradient_predivide_factor": 1}, 1.0),
        ({"gradient_predivide_factor": 2}, 2.0),
        ({"prescale_gradients": True}, 4.0),
        ({"prescale_gradients": True, "gradient_predivide_factor": 2}, 4.0),
    ],
)
def test_predivide_factors_follow_from_both_of_their_keys(document, expected) -> None:
    resolved = Settings.load(document | {"train_micro_batch_size_per_gpu": 3}).resolve(4)
    assert resolved.gradient_predivide == expected


def test_every_key_with_an_effect_is_printed_and_others_only_if_set() -> None:
    plain = json.loads(Settings.load({"zero_optimization": {"overlap_comm": True}}).resolve(1).to_json())
    for path in entries(Settings):
        above = path.rpartition(".")[0]
        if look_up(plain, above)[1] is None and above:
            continue
        assert look_up(plain, path)[0] is sections_of(path).isdisjoint(UNREAD), path


def test_settings_do_not_change() -> None:
    document = {"optimizer": {"type": "sgd", "params": {"lr": 1.0}}}
    settings = Settings.load(document)
    document["optimizer"]["params"]["lr"] = 2.0  # type: ignore[index]
    assert settings.optimizer.params == {"lr": 1.0}
    with pytest.raises(ValueError, match="frozen"):
        settings.seed = 1  # type: ignore[misc]


def test_settings_as_text_depend_on_values_alone() -> None:
    first = Settings.load({"seed": 1, "fp16": {"enabled": False}}).to_json()
    assert first == Settings.load({"fp16": {"enabled": False}, "seed": 1.0}).to_json()
    assert first != Settings.load({"seed": 2}).to_json()


def schedule(step: int) -> float:
    return 1.0 / (step + 1)


def test_arguments_that_json_cannot_hold_are_printed_by_name() -> None:
    params = {"lr_lambda": schedule, "dtype": torch.float32}
    settings = Settings.load({"scheduler": {"type": "LambdaLR", "params": params}})
    assert settings.scheduler.params["lr_lambda"] is schedule
    printed = json.loads(settings.to_json())["scheduler"]["params"]
    assert printed == {"lr_lambda": f"{__name__}.schedule", "dtype": "torch.float32"}


def test_the_sections_of_train() -> None:
    settings = Settings.load(CONFIGS / "train.json")
    assert (settings.model.vocab_size, settings.model.kv_heads, settings.model.architecture) == (None, 4, "llama")
    assert (settings.data.train, settings.data.validation, settings.data.suffixes) == (
        ("python-stdlib",),
        None,
        (".py",),
    )
    assert (settings.run.ranks, settings.run.sample.prompts) == (2, ("def ",))
    bare = Settings.load({})
    assert (bare.model, bare.data, bare.run) == (None, None, None)
