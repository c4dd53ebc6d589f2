"""Questions that people ask the planner, each in one line, with answers that follow from parameters times bytes."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from commands import call
from zeromesh.apps.plan.cost.named_models import catalogue, close_names, find_model

GB = 1e9
Told = dict[str, Any]


class Question(NamedTuple):
    """A command, patterns of the answer, and what holds of the numbers."""

    asked: str
    command: str
    says: tuple[str, ...] = ()
    holds: Callable[[Told], bool] = lambda told: True
    fits: bool = True
    quick: bool = False  # runs in ``make test``
    needs: tuple[str, ...] = ("transformers",)


def best(told: Told) -> Told:
    first: Told = told["layouts"][0]
    return first


def on_device(told: Told) -> bool:
    return not (best(told)["host_bytes_of_node"] or best(told)["nvme_bytes_of_node"])


def peak(told: Told, state: str) -> float:
    """Return bytes of a state at the peak."""
    return float(best(told)["device_peak_bytes"].get(state, 0.0))


ADAPTERS = ("transformers", "peft")
QUESTIONS = [
    # 16 bytes for each of 6.7 x 10^9 parameters are 108 GB.
    Question(
        "Will a 7B fit on my 24 GB card?",
        "7b --gpu rtx-4090 --gpus 1",
        (r"optimizer on NVMe|all on", r"LoRA \(r = 16\) fits in the devices' memory: \d+\.\d GB of 25\.2 GB"),
        lambda told: best(told)["host_bytes_of_node"] + best(told)["nvme_bytes_of_node"] > 14 * 6.7 * GB,
        needs=ADAPTERS,
    ),
    # 0.516 bytes for 6.98 x 10^9 parameters of linear layers, 2 for 1.05 x 10^9 of both tables, 2 for adapters.
    Question(
        "Does QLoRA of an 8B fit on it?",
        "llama-3.1-8b --gpu rtx-4090 --gpus 1 --qlora",
        (),
        # Some of the adapters' states may rest on the host, so that the layout is a safe one.
        lambda told: 5.5 * GB < peak(told, "parameter") < 6.0 * GB and told["layouts"][0]["host_bytes_of_node"] < GB,
        needs=ADAPTERS,
    ),
    # 2 bytes for each frozen parameter, and 16 for each of 42 x 10^6 of adapters.
    Question(
        "LoRA of an 8B on one H100?",
        "llama-3.1-8b --gpu h100 --gpus 1 --lora 16",
        (),
        lambda told: on_device(told) and 16.1 * GB < peak(told, "parameter") < 16.3 * GB,
        needs=ADAPTERS,
    ),
    Question(
        "And all of its weights?",
        "llama-3.1-8b --gpu h100 --gpus 1",
        (r"LoRA \(r = 16\) fits in the devices' memory",),
        lambda told: not on_device(told),  # 128 GB
        needs=ADAPTERS,
    ),
    # 1.13 TB by 84.9 GB are 13.3 devices.
    Question("How many H100 do I need for 70B?", "70b --gpu h100", (r"Fewest h100: .*, 16 devices without them",)),
    Question("How many 4090 do I need for 7B?", "7b --gpu rtx-4090", (r"Fewest rtx-4090: 1 device .*, 8 devices",)),
    Question(
        "Can 70B be trained on one 24 GB card?",
        "70b --gpu rtx-4090 --gpus 1 --host-memory 64",
        ("Nothing fits", r"1\. "),
        fits=False,
        needs=(),
    ),
    Question(
        "QLoRA of 70B on one A100?",
        "llama-3.1-70b --gpu a100-80gb --gpus 1 --qlora",
        (),
        lambda told: 36 * GB < peak(told, "parameter") < 42 * GB or not on_device(told),
        needs=ADAPTERS,
    ),
    Question("Which micro-batch?", "7b --gpu h100 --gpus 8", (r"room for micro-batches of \d+ samples?",), needs=()),
    # 6 operations a parameter and token are 1.7 hours at the peak of eight H100.
    Question(
        "How long do a billion tokens take?",
        "llama-3.1-8b --gpu h100 --gpus 8 --tokens 1e9",
        (r"1\.00 G tokens take \d+\.?\d* hours; --price PER_NODE_AND_HOUR adds",),
        lambda told: 1.7 < told["hours"] < 8 and told["cost"] is None,
    ),
    Question(
        "What do they cost?",
        "7b --gpu h100 --gpus 8 --tokens 1B --price 98",
        (r"hours and cost \d+.*, at 98 an hour for 1 node",),
        lambda told: abs(told["cost"] - 98 * told["hours"]) < 1e-6 * told["cost"],
        quick=True,
        needs=(),
    ),
    Question(
        "What is the cheapest way on up to four nodes?",
        "1.3b --gpu h100 --gpus 8 --nodes 4 --goal cost --price 98",
        (),
        lambda told: best(told)["price_per_million_tokens"] > 0,
        needs=(),
    ),
    Question("Can I train BERT?", "bert-base --gpu t4 --gpus 1", ("sequences of 512 tokens",), on_device),
    Question("And ViT?", "vit-base --gpu rtx-4090 --gpus 1", ("32 for each device",), on_device),
    Question("And ResNet?", "resnet-50 --gpu rtx-4090 --gpus 1", (), on_device),
    # 16 bytes for 2.57 x 10^9 parameters are 41 GB.
    Question(
        "And the UNet of SDXL?",
        "sdxl-unet --gpu a100-80gb --gpus 1 --batch 8",
        (),
        lambda told: on_device(told) and 41 * GB < best(told)["device_bytes"][0] < 83 * GB,
        needs=(),
    ),
    Question("And Whisper?", "whisper-small --gpu rtx-3090 --gpus 1", ("sequences of 448 tokens",), on_device),
    Question("And T5?", "t5-base --gpu rtx-3090 --gpus 1", ("sequences of",), on_device),
    Question(
        "Does an 8B take texts of 32k on one node?",
        "llama-3.1-8b --gpu h100 --gpus 8 --sequence 32768 --batch 8",
        (),
        lambda told: max(best(told)["device_bytes"]) < 85 * GB,
    ),
    Question(
        "What does the plan assume?",
        "7b --gpu rtx-4090 --gpus 1 --batch 4",
        (r"workstation-1 with 68\.7 GB of host memory", "change with --host-memory", r"sequences of 2048 tokens"),
    ),
    Question(
        "Is the time a fact?",
        "1.3b --gpu h100 --gpus 1",
        (r"A step takes .* \(likely .*\)", "Memory is from a formula; give a folder with config.json"),
        quick=True,
        needs=(),
    ),
    Question(
        "A mixture of experts on one node?",
        "mixtral-8x7b --gpu h100 --gpus 8 --layouts 1",
        (),
        lambda told: sum(best(told)["device_bytes"]) > 0,
    ),
    Question(
        "DeepSeek V3 on my workstation?",
        "deepseek-r1 --gpu rtx-4090 --gpus 1",
        ("Nothing fits",),
        fits=False,  # 10.7 TB of states, and 2 TB of disk
    ),
    Question("And GPT-2 on a T4?", "gpt2 --gpu t4 --gpus 1", (), on_device),
]


@pytest.mark.parametrize(
    "question",
    [pytest.param(row, id=row.asked, marks=() if row.quick else pytest.mark.full) for row in QUESTIONS],
)
def test_a_question_is_answered(question: Question, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if missing := [name for name in question.needs if find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)} is not installed")
    result = call("plan", *shlex.split(question.command), "--json")
    assert result.exit_code == (0 if question.fits else 2), result.output
    told = json.loads(result.stdout)
    text = " ".join((*told["assumed"], *told["answer"]))
    for pattern in question.says:
        assert re.search(pattern, text), text
    assert question.holds(told), json.dumps(told["layouts"][:1], indent=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_the_largest_models_of_a_machine_grow_with_what_is_saved() -> None:
    """Without a model, the planner says which ones fit."""
    lines = call("plan", "--gpu", "rtx-4090", "--gpus", "1").stdout.splitlines()
    largest = {line[:4]: line.rpartition("memory ")[2].split()[0] for line in lines if "devices' memory  " in line}
    sizes = [catalogue()[largest[way]].parameters for way in ("full", "LoRA", "QLoR")]
    assert sizes == sorted(sizes)
    assert 16 * sizes[0] < 25.2 * GB  # its states are in the device's memory
    assert 2 * sizes[1] < 25.2 * GB
    assert 0.5 * sizes[2] < 25.2 * GB


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU is planned for by its GPU")
def test_this_machine_is_planned_for_by_default() -> None:
    result = call("plan", "llama:layers=2,hidden=64,heads=2", "--batch", "4", "--sequence", "64")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "This machine has no GPU: planned for its processor" in text
    assert "such as --gpu rtx-4090" in text


def test_the_written_configuration_has_the_adapters(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    small = "llama:layers=2,hidden=64,heads=2"
    result = call(
        "plan", small, "--qlora", "--lora", "4", "--gpu", "l4", "--gpus", "1", "--batch", "2", "--out", tmp_path
    )
    assert result.exit_code == 0, result.output
    document = json.loads((tmp_path / "config.json").read_text())
    assert document["lora"] == {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    assert document["huggingface"]["quantization"] == {"bits": 4, "type": "nf4", "double": True}


# Parameters as model cards and papers print them, in millions.
PUBLISHED = {
    "gpt2": 124, "gpt2-medium": 355, "gpt2-large": 774, "gpt2-xl": 1558, "gpt3-175b": 174600,
    "bert-base": 110, "bert-large": 335,
    "llama-2-7b": 6738, "llama-2-13b": 13016, "llama-2-70b": 68977,
    "llama-3-8b": 8030, "llama-3-70b": 70554, "llama-3.1-8b": 8030, "llama-3.1-70b": 70554, "llama-3.1-405b": 405853,
    "llama-3.2-1b": 1236, "llama-3.2-3b": 3213, "llama-3.3-70b": 70554,
    "mistral-7b": 7242, "mixtral-8x7b": 46703, "mixtral-8x22b": 140621,
    "qwen2.5-0.5b": 494, "qwen2.5-1.5b": 1544, "qwen2.5-3b": 3086, "qwen2.5-7b": 7616, "qwen2.5-14b": 14770,
    "qwen2.5-32b": 32764, "qwen2.5-72b": 72706,
    "qwen3-0.6b": 596, "qwen3-1.7b": 1721, "qwen3-4b": 4022, "qwen3-8b": 8191, "qwen3-14b": 14768, "qwen3-32b": 32762,
    "qwen3-30b-a3b": 30532, "qwen3-235b-a22b": 235094,
    "deepseek-v2-lite": 15706, "deepseek-v3": 671026, "gpt-oss-20b": 20915, "gpt-oss-120b": 116829,
    "gemma-2-2b": 2614, "gemma-2-9b": 9242, "gemma-2-27b": 27227, "gemma-3-1b": 1000,
    "phi-2": 2780, "phi-3-mini": 3821, "phi-4": 14660,
    "olmo-2-1b": 1485, "olmo-2-7b": 7299, "olmo-2-13b": 13716, "olmo-2-32b": 32234,
    "vit-base": 86.6, "vit-large": 304, "vit-huge": 632,
    "resnet-18": 11.7, "resnet-50": 25.6, "resnet-101": 44.5,
    "whisper-small": 242, "whisper-medium": 764, "whisper-large-v3": 1543,
    "t5-small": 60.5, "t5-base": 223, "t5-large": 738, "t5-3b": 2852, "t5-11b": 11307,
    "sdxl-unet": 2567,
}  # fmt: skip


def test_named_models_have_the_published_parameters() -> None:
    counts = {name: model.parameters / 1e6 for name, model in catalogue().items()}
    assert counts == {name: pytest.approx(count, rel=0.005) for name, count in PUBLISHED.items()}


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in PUBLISHED if name != "sdxl-unet"])
def test_a_configuration_builds_a_model_of_as_many_parameters(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    row = catalogue()[name]
    with torch.device("meta"):
        model = getattr(transformers, row.kind)(row.configuration())
    assert sum(parameter.numel() for parameter in model.parameters()) == row.parameters


def test_the_unet_has_the_published_parameters() -> None:
    from zeromesh.apps.plan.cost.sdxl_unet import SdxlUnet

    with torch.device("meta"):
        model = SdxlUnet()
    assert sum(parameter.numel() for parameter in model.parameters()) == catalogue()["sdxl-unet"].parameters


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("Llama3.1 8B", "llama-3.1-8b"),
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("deepseek-r1", "deepseek-v3"),
        ("someone/Llama-3.1-8B", None),  # it may have another shape
        ("7b", None),
    ],
)
def test_names_are_read_forgivingly(text: str, name: str | None) -> None:
    model = find_model(text)
    assert (model and model.name) == name


def test_close_names_begin_with_what_was_written() -> None:
    assert close_names("qwen2.5")[0].startswith("qwen2.5-")
    assert "llama-3.1-8b" in close_names("lama3.1-8b")
