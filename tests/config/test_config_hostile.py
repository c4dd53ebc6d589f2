"""Values that nobody means, in every key: each is an error of one paragraph, or works; none ends in a traceback."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from commands import call
from zeromesh.apps.cli.command_errors import WRONG_INPUT
from zeromesh.apps.train.check import check
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.config.errors import ConfigError
from zeromesh.config.settings import entries


def nested(depth: int, container: type) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value} if container is dict else [value]
    return value


def holding_itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["a"] = [value, value]
    return value


PLAIN: list[Any] = [
    None, True, 0, 1, 3, -1, 1.5, 5e-324, 32e9, 1e308, -1e308, float("nan"), float("inf"), 2**31 - 1, 2**31, 2**40,
    2**63 - 1, 2**63, 10**30, "", "x" * 1000, "\x00", "\ud800", "1e308", [], [1e308, 1e308], [[]], {}, {"a": 1},
    {"": 0}, {"enabled": True},
]  # fmt: skip
"""Values that a file may have."""

STRANGE = [
    10**5000, -(10**5000), nested(5000, dict), nested(5000, list), nested(100_000, list), holding_itself(), b"x",
    object(), {1, 2}, 1j, {1: 2}, ("a",), float,
]  # fmt: skip
"""Values that a dict may have besides; whole numbers of more than 4,300 digits cannot even be printed."""

TRAINS = {
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    "model": {"hidden_size": 8, "layers": 1, "heads": 2, "sequence_length": 8},
    "data": {"train": "text", "vocabulary_size": 260},
    "run": {"steps": 1, "output": "out"},
}

OF_TRAIN = ("model", "huggingface", "lora", "data", "run")

SWITCHES = ("fp16", "bf16", "torch_autocast", "activation_checkpointing", "csv_monitor", "flops_profiler", "profile")

SCHEDULES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "WarmupLR": ({}, ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "warmup_type", "last_batch_iteration")),
    "WarmupDecayLR": ({"total_num_steps": 10}, ("total_num_steps",)),
    "WarmupCosineLR": ({"total_num_steps": 10}, ("total_num_steps", "warmup_min_ratio", "cos_min_ratio")),
    "OneCycle": (
        {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2},
        (
            "cycle_min_lr", "cycle_first_step_size", "cycle_second_step_size", "cycle_first_stair_count",
            "cycle_second_stair_count", "decay_step_size", "decay_lr_rate", "cycle_min_mom",
        ),
    ),
    "LRRangeTest": ({}, ("lr_range_test_min_lr", "lr_range_test_step_size", "lr_range_test_step_rate")),
    "WSD": ({"total_num_steps": 10}, ("total_num_steps", "decay_num_steps", "min_ratio")),
    "StepLR": ({"step_size": 2}, ("step_size", "gamma")),
}  # fmt: skip

WORDS = 3000
"""Characters of a message, which may list problems with several keys."""


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("one two three " * 500)
    return tmp_path


def put(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(document)
    *parents, last = path.split(".")
    section = document
    for name in parents:
        section = section.setdefault(name, {})
    section[last] = value
    return document


def attempt(action: Any, *given: Any) -> str | None:
    """Return what an action's error says, if it is of the kinds that commands print; others are not caught."""
    try:
        action(*given)
    except (ValueError, OSError, FloatingPointError) as error:
        message = str(error)
        assert message.strip()
        assert "\n\n" not in message
        assert "Traceback" not in message
        if not isinstance(error, OSError):  # which have the name of a file, however long
            assert len(message) < WORDS, message[:WORDS]
        return message
    return None


def work_out(document: Any) -> None:
    settings = TrainSettings.load(document)
    settings.to_json()
    for ranks in (1, 6):
        sizes = settings.resolve_mesh(ranks)
        for elastic in (False, True):
            resolved = settings.resolve(sizes["replicate"] * sizes["data"], sizes, elastic)
            assert resolved.row is not None
            assert resolved.precision is not None
            assert TrainSettings.load(resolved.to_json() and json.loads(resolved.to_json())) is not None


def document_for(path: str, value: Any) -> dict[str, Any]:
    top, section = path.split(".")[0], path.rpartition(".")[0]
    document: dict[str, Any] = {"optimizer": TRAINS["optimizer"]}
    if top in TRAINS:
        document[top] = TRAINS[top]
    if section in SWITCHES:
        document = put(document, f"{section}.enabled", True)
    if "offload" in section:
        document = put(put(document, "zero_optimization.stage", 3), f"{section}.device", "cpu")
    return put(document, path, value)


KEYS = [path for path, entry in entries(TrainSettings).items() if not entry.section]


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    "path", ["train_batch_size", "optimizer.params", "zero_optimization", "zero_optimization.stage"]
)
def test_strange_values_are_refused(path: str, value: Any) -> None:
    message = attempt(work_out, document_for(path, value))
    assert message is not None or (path == "optimizer.params" and isinstance(value, dict))


@pytest.mark.parametrize("seed", range(4))
def test_a_draw_of_hostile_values_is_worked_out_or_refused(seed: int) -> None:
    draw = random.Random(seed)
    for path in draw.sample(KEYS, 60):
        attempt(work_out, document_for(path, draw.choice(PLAIN)))


@pytest.mark.full
def test_hostile_values_in_every_key_are_worked_out_or_refused() -> None:
    for path in KEYS:
        for value in [*PLAIN, *STRANGE]:
            attempt(work_out, document_for(path, value))


SIZES: list[tuple[str, Any, str]] = [
    ("model.hidden_size", 32e9, "model.hidden_size = 32000000000: must be a whole number >= 1 and <= 2147483647"),
    ("model.hidden_size", 2**31 - 2, "the section 'model' is of a model that cannot be built"),
    ("model.layers", 1e308, "must be a whole number >= 1 and <= 10000"),
    ("model.heads", 10**30, "model.heads = "),
    ("train_batch_size", 1e308, "must be a whole number >= 1 and <= 1099511627776"),
    ("model.vocab_size", 1e308, "must be a whole number >= 1 and <= 2147483647"),
]


@pytest.mark.parametrize(("path", "value", "words"), SIZES)
def test_sizes_beyond_all_machines_are_refused(path: str, value: Any, words: str, folder: Path) -> None:
    document = put(TRAINS, "model.vocab_size", 2**31 - 1)  # with which all memory is too little for a large hidden size
    message = attempt(lambda: check(TrainSettings.load(put(document, path, value))))
    assert message is not None
    assert words in message


@pytest.mark.full
def test_hostile_values_in_the_keys_of_a_training_run_are_refused_before_it(folder: Path) -> None:
    for path in KEYS:
        if path.startswith((*OF_TRAIN, "train_", "gradient", "mesh", "pipeline", "tensor_parallel", "optimizer")):
            for value in PLAIN:
                if path.startswith(("model.", "data.")) and value in (2**31 - 1, 2**31, 2**40):
                    continue  # some of these sizes would fit into the memory of a large machine, and take it
                attempt(lambda: check(TrainSettings.load(put(TRAINS, path, value))))  # noqa: B023


def train_twice(document: dict[str, Any]) -> None:
    engine = zeromesh.initialize(model=nn.Linear(2, 1), config=document)[0]
    try:
        for _ in range(2 * min(3, engine.gradient_accumulation_steps())):
            engine.backward(engine(torch.ones(1, 2)).float().sum())
            engine.step()
    finally:
        engine.destroy()


@pytest.mark.some(2)
@pytest.mark.parametrize("name", SCHEDULES)
def test_hostile_values_in_a_schedule_train_or_are_refused(name: str) -> None:
    params, keys = SCHEDULES[name]
    for key in keys:
        for value in (0, -1, 1e308, float("inf"), float("nan"), 10**30, "x", [], [1.0, 2.0], None, True):
            scheduler = {"type": name, "params": {**params, key: value}}
            attempt(train_twice, {"optimizer": TRAINS["optimizer"], "scheduler": scheduler})


@pytest.mark.full
def test_hostile_values_in_every_key_train_or_are_refused(folder: Path) -> None:
    options = [f"optimizer.params.{key}" for key in ("lr", "betas", "eps", "weight_decay", "amsgrad", "fused", "x")]
    for path in [key for key in KEYS if not key.startswith(OF_TRAIN) and key != "wandb.enabled"] + options:
        for value in PLAIN:
            attempt(train_twice, document_for(path, value))


FILES = {
    "nested objects": '{"a": ' * 5000 + "1" + "}" * 5000,
    "nested lists": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "a long number": '{"train_batch_size": ' + "1" * 5000 + "}",
    "a large number": '{"train_batch_size": 1e308}',
    "an infinite number": '{"gradient_clipping": 1e400}',
    "half a character": '{"units": "\\ud800"}',
    "zeros": "\x00" * 100,
    "nothing": "",
    "a list": "[]",
}


@pytest.mark.parametrize("kind", FILES)
def test_a_hostile_file_is_an_error_of_the_command(kind: str, folder: Path) -> None:
    (folder / "config.json").write_text(FILES[kind])
    result = call("train", "config.json")
    assert result.exit_code == WRONG_INPUT, result.output
    assert result.output.startswith("error: ")
    assert "\n\n" not in result.output.strip()
    assert len(result.output) < WORDS


@pytest.mark.parametrize("override", ["a=" + "[" * 5000, "train_batch_size=" + "1" * 5000, "model.layers=1e308"])
def test_a_hostile_override_is_an_error_of_the_command(override: str, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(TRAINS))
    result = call("train", "config.json", "--set", override)
    assert result.exit_code == WRONG_INPUT, result.output
    assert result.output.startswith("error: ")


def test_a_device_is_not_read_as_a_configuration() -> None:
    with pytest.raises(ConfigError, match="is a device; give the path of a JSON or YAML file"):
        TrainSettings.load("/dev/zero")


def test_sizes_for_another_number_of_ranks_are_found_at_once() -> None:
    sizes = TrainSettings.load({"train_batch_size": 2**40, "train_micro_batch_size_per_gpu": 2**39 - 1})
    resolved = sizes.resolve(2, elastic=True)
    assert (resolved.train_micro_batch_size_per_gpu, resolved.gradient_accumulation_steps) == (2**38, 2)
    with pytest.raises(ConfigError, match=r"numbers of them that work: 1, 2, 4, .*, \.\.\.; or set"):
        sizes.resolve(3, elastic=True)
