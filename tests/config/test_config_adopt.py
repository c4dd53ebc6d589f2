"""Configurations as DeepSpeed reads them: what is left out or replaced, with which words, and what stays refused."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from commands import call
from zeromesh import Settings
from zeromesh.apps.cli.command_errors import WRONG_INPUT
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.config.adopt import adopt, fixed, warn_of
from zeromesh.config.errors import ConfigError
from zeromesh.config.optimizer_names import EXACT_OPTIMIZERS
from zeromesh.config.settings import entries
from zeromesh.config.special_keys import EXACT, RENAMED, look_up

CONFIGS = Path(__file__).parent / "configs"
LR = {"lr": 1e-4, "betas": [0.9, 0.95]}


def with_zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def optimizer(kind: str, **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": LR | params}}


ONE_BIT = {"freeze_step": 400, "cuda_aware": False, "comm_backend_name": "nccl", "bias_correction": False}

READ: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    ({"cuda_visible_devices": 0, "seed": 1}, {"seed": 1}, ["cuda_visible_devices: was 0, is left out"]),
    ({"train_batch_siz": 8}, {}, ["did you mean train_batch_size?"]),
    ({"fp16": {"enabled": True, "opt_level": "O2"}}, {"fp16": {"enabled": True}}, ['fp16.opt_level: was "O2"']),
    ({"int8": {"enabled": True}}, {}, ["int8: was"]),
    ({"zero_allow_untested_optimizer": 1}, {"zero_allow_untested_optimizer": True}, ["was 1, is true"]),
    ({"bf16": {"enabled": "True"}}, {"bf16": {"enabled": True}}, ['was "True", is true']),
    # TRL adds such keys; the section's own value is the one that DeepSpeed takes.
    (
        {"zero_optimization.stage": 2, "fp16.enabled": False, "zero_optimization.reduce_bucket_size": 5},
        with_zero(stage=2, reduce_bucket_size=5) | {"fp16": {"enabled": False}},
        ["moved into its section", "moved into its section", "moved into its section"],
    ),
    ({"zero_optimization.stage": 2, **with_zero(stage=3)}, with_zero(stage=3), ["is left out: its section has 3"]),
    ({"seed.x": 2, "seed": 1}, {"seed": 1}, ["its section is not an object"]),
    (optimizer("OneBitAdam", **ONE_BIT), optimizer("adam"), ['"OneBitAdam", is "adam"', *["adam takes no such"] * 4]),
    (optimizer("ZeroOneAdam", var_freeze_step=3), optimizer("adam"), ["gradients are exact", "adam takes no such"]),
    (
        optimizer("OneBitLamb", coeff_beta=0.9, bias_correction=False),
        optimizer("lamb", bias_correction=False),
        ["gradients are exact", "lamb takes no such"],
    ),
    (optimizer("MuAdam"), optimizer("adam", adam_w_mode=False), ["muP's learning rates"]),
    (optimizer("MuAdamW"), optimizer("adamw"), ["muP's learning rates"]),
    (optimizer("MuSGD"), optimizer("sgd"), ["muP's learning rates"]),
    (
        with_zero(stage=2, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"}),
        with_zero(stage=2, offload_optimizer={"device": "cpu"}),
        ["offload_param: was", ],
    ),
    (with_zero(offload_optimizer={"device": "cpu"}), with_zero(), ["only if zero_optimization.stage is 1 or more"]),
    (with_zero(stage=2, cpu_offload_param=True), with_zero(stage=2), ["cpu_offload_param: was true"]),
    (with_zero(stage=3, offload_param={"device": "cpu"}), with_zero(stage=3, offload_param={"device": "cpu"}), []),
    (
        {"flops_profiler": {"enabled": True, "profile_step": -1}, "fp16": {"loss_scale": 8, "hysteresis": 0}},
        {"fp16": {"loss_scale": 8}},
        ["no update has this profile_step", "fp16.loss_scale is fixed"],
    ),
    (
        {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        {"bf16": {"enabled": True}},
        ["kept in fp32"],
    ),
    (with_zero(stage=2, zenflow={"topk_ratio": 0.1}), with_zero(stage=2), ["every update is exact"]),
    ({"autotuning": {"enabled": True, "fast": True}}, {"autotuning": {"fast": True}}, ["values in the file"]),
    # DeepSpeed refuses what is unknown in this section; nothing hangs on what was meant here.
    (with_zero(stage3_param_persitence_threshold=1), with_zero(), ["persistence_threshold has no effect"]),
    (with_zero(comm_overlap=True), with_zero(), ["zero_optimization.overlap_comm has no effect"]),
    (with_zero(stage=2, device="none"), with_zero(stage=2), ['"none" asks for nothing']),
    (
        {"data_efficiency": {"enabled": True, "data_routing": {"enabled": True, "random_ltd": {"enabled": True}}}},
        {"data_efficiency": {"enabled": True}},
        ["only after convert_to_random_ltd, which is refused"],
    ),
    ({"expert_parallel": {"enabled": True, "load_balance_coeff": None}}, {}, ["it changes where experts are"]),
    (
        {"expert_parallel": {"enabled": True, "load_balance_coeff": None, "autoep_size": 4, "preset_model": "mixtral"}},
        {"mesh": {"expert": 4}},
        ["is mesh.expert = 4"],
    ),
    ({"comms_logger": {"any": 1}, "offload": "auto"}, {"comms_logger": {"any": 1}, "offload": "auto"}, []),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected", "said"), READ)
def test_what_deepspeed_ignores_or_only_it_has_is_replaced_with_a_reason(given, expected, said) -> None:
    before = json.dumps(given)
    document, changes = adopt(given)
    assert json.dumps(given) == before, "the user's dict stays as it is"
    assert document == expected
    assert len(changes) == len(said)
    for part, change in zip(said, changes, strict=True):
        assert part in str(change)
    Settings.load(document)
    assert adopt(document) == (document, [])


def test_sections_of_an_application_are_read_by_its_settings_and_left_by_those_of_the_engine() -> None:
    given = {"run": {"steps": 2, "step": 3, "output": "runs"}}
    document, (change,) = fixed(given, TrainSettings)
    assert document == {"run": {"steps": 2, "output": "runs"}}
    assert "run.step: was 3, is left out" in str(change)
    assert "did you mean run.steps?" in str(change)
    assert fixed(given) == (given, [])
    Settings.load(given)


def test_a_misspelt_section_of_an_application_is_named_by_the_settings_of_the_engine() -> None:
    with pytest.raises(ValueError, match="hugingface is not a known key; did you mean huggingface"):
        Settings.load({"hugingface": {}})


@pytest.mark.parametrize(
    "given",
    [
        with_zero(stage=2, device="cpu"),
        with_zero(stge=2),
        {"fp16": {"enabled": True, "hysteresis": 0}},
        {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
        {"sparse_attention": {"mode": "fixed"}},
        {"expert_parallel": {"enabled": True}},
        {"expert_parallel": {"enabled": True, "load_balance_coeff": 1e-3}},
        {"expert_parallel": {"enabled": True, "load_balance_coeff": None, "score_func": "sigmoid"}},
        {"train_batch_size": "8"},
    ],
    ids=str,
)
def test_what_cannot_be_expressed_stays_and_is_refused(given: dict[str, Any]) -> None:
    document, changes = adopt(given)
    assert (document, changes) == (given, [])
    with pytest.raises(ConfigError):
        Settings.load(document)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_what_loads_strictly_is_not_changed(path: Path) -> None:
    document, changes = adopt(path)
    assert changes == []
    assert Settings.load(document) == Settings.load(path)


def test_a_warning_lists_all_changes_and_is_silent_without_any(caplog: pytest.LogCaptureFixture) -> None:
    warn_of(adopt({"cuda_visible_devices": 0, "int8": 1})[1])
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert [line.split(":")[0].strip() for line in record.getMessage().splitlines()[1:]] == [
        "cuda_visible_devices",
        "int8",
    ]
    caplog.clear()
    warn_of([])
    assert not caplog.records


def test_rows_name_what_there_is() -> None:
    assert {path.rpartition(".")[0] for path in EXACT} <= {"", *entries()}
    for name, row in EXACT_OPTIMIZERS.items():
        with pytest.raises(ConfigError, match=f"use {row.name}"):
            Settings.load({"optimizer": {"type": name}})
        Settings.load({"optimizer": {"type": row.name}})


OLD = """{ // of my last project
 "_comment": "read by people", "_comment": "twice",
 "train_batch_size": 8, "cuda_visible_devices": 0, /* "seed": 1, */
 "bfloat16": {"enabled": true, "comment": ["a", "list"]},  # "#" in a comment
 "optimizer": {"type": "OneBitAdam", "params": {"lr": "auto", "freeze_step": 3}},
 "tensorboard": {"output_path": "http://host/#a /*b*/ ,}"},
 "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu",}, "prefetch_bucket_size": 3},
}
"""


def test_a_file_is_written_anew_with_every_change_explained_and_no_second_time(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(OLD)
    first = call("config", "--fix", old)
    assert first.exit_code == 0, first.output
    new.write_text(first.stdout)
    assert json.loads(first.stdout) == {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "optimizer": {"type": "adam", "params": {"lr": "auto"}},
        "tensorboard": {"output_path": "http://host/#a /*b*/ ,}"},
        "zero_optimization": {"stage": 2, "stage3_prefetch_bucket_size": 3},
        "gradient_clipping": 1.0,
    }
    said = [line.partition(": was ")[0] for line in first.stderr.splitlines() if ": was " in line]
    assert said == [
        "bfloat16",
        "zero_optimization.prefetch_bucket_size",
        "optimizer.type",
        "optimizer.params.freeze_step",
        "zero_optimization.offload_param",
        "cuda_visible_devices",
    ]
    assert "comments are left out" in first.stderr
    assert '"auto" stays, for a Trainer or the planner to fill in: optimizer.params.lr' in first.stderr
    again = call("config", "--fix", new)
    assert (again.exit_code, again.stdout) == (0, first.stdout)
    assert ": was " not in again.stderr
    assert "comments" not in again.stderr
    shown = call("config", new)
    assert look_up(json.loads(shown.stdout), "zero_optimization.stage") == (True, 2)


def test_no_file_is_written_where_something_cannot_be_expressed(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text('{"cuda_visible_devices": 0, "quantize_training": {"enabled": true}}')
    result = call("config", "--fix", old)
    assert (result.exit_code, result.stdout) == (WRONG_INPUT, "")
    assert "quantize_training is not available; compress the model" in result.stderr


def test_a_key_with_dots_is_a_path_there_and_an_error_here() -> None:
    with pytest.raises(ConfigError, match="write reduce_bucket_size inside of zero_optimization"):
        Settings.load({"zero_optimization.reduce_bucket_size": 5})


def test_comments_are_read_as_comments_from_dicts_too() -> None:
    given = {"_comment": "a", "//": 1, "comment": "b", "bf16": {"_comment_2": {"x": 1}, "enabled": True}}
    assert Settings.load(given) == Settings.load({"bf16": {"enabled": True}})
    with pytest.raises(ConfigError, match="comment is not a known key"):
        Settings.load({"comment": {"enabled": True}})


def test_every_other_name_is_explained() -> None:
    assert all(new in entries() for new in RENAMED.values())
