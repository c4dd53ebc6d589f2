"""The examples in folders, shortened, in float64: ZeroMesh's losses and results equal those of plain torch."""

import json
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from harness import ROOT, on_ranks, run_command, run_ranks
from with_torchvision import allow_torchvision

EXAMPLES = ROOT / "examples"
FOLDERS = sorted(path.parent.name for path in EXAMPLES.glob("*/train.py"))
CLOSE = 1e-8  # relative, in float64: sums over ranks are added in another order, and AdamW divides small gradients

SMALL = ["--files", "3", "--width", "16", "--layers", "1", "--steps", "3"]
SHORT: dict[str, list[str]] = {
    "vision": ["--size", "16", "--steps", "2"],
    "gpt": SMALL,
    "bert": [*SMALL, "--entries", "300", "--test", "64"],
    "clip": SMALL[2:],
    "speech": [*SMALL[2:], "--test", "8"],
    "t5": [*SMALL, "--files", "20"],
    "lora": ["--steps", "3"],
    "dpo": ["--steps", "3"],
    "dlrm": ["--steps", "3", "--rows", "100"],
}
SYNC = ["--sync"]
VISION = ["--size", "32", "--steps", "2", "--model"]


def narrow(make_model: Callable[..., Any], name: str, size: int) -> Any:
    """Return a network of torchvision; a VGG's classifier, of 120 M parameters, has one layer instead of three."""
    model = make_model(name, size)
    if name.startswith("vgg"):
        model.classifier = torch.nn.Linear(model.classifier[0].in_features, 10)
    return model


def run_example(name: str, options: list[str]) -> dict[str, Any]:
    """Run an example on this rank, with float64 as torch's default; return its result."""
    if name == "vision":
        allow_torchvision()
    torch.set_default_dtype(torch.float64)
    try:
        module = runpy.run_path(str(EXAMPLES / name / "train.py"))
        changed = {"make_model": partial(narrow, module["make_model"])} if name == "vision" else {}
        with patch.dict(module["train"].__globals__, changed):
            result: dict[str, Any] = module["train"](module["parse"](options))
    finally:
        torch.set_default_dtype(torch.float32)
    del result["seconds"]
    return result


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny model as the example gpt makes it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    GPT2LMHeadModel(GPT2Config(
        vocab_size=256, n_embd=16, n_layer=1, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )).double().save_pretrained(folder)  # fmt: skip
    return folder


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Compare the mean losses over ranks, and the results of rank 0 that are not memory."""
    rows = [[rank["loss"] for rank in ranks] for ranks in (found, expected)]
    losses = [torch.tensor(ranks, dtype=torch.float64).mean(0) for ranks in rows]
    torch.testing.assert_close(*losses, rtol=CLOSE, atol=0)
    assert losses[0][0] != losses[0][-1]  # something was learned, or unlearned
    for name, value in expected[0].items():
        if name != "loss" and "MB" not in name:
            assert found[0][name] == pytest.approx(value, rel=CLOSE), name


# By default vision is compared with one process alone, below: float64 convolutions take longest of all.
LONG = ("vision", "dpo")
ON_TWO = [pytest.param(name, marks=[pytest.mark.full] if name in LONG else []) for name in sorted({*SHORT} - {"lora"})]


@pytest.mark.parametrize("name", ON_TWO)
def test_an_example_equals_its_plain_form_on_two_ranks(name: str, base: Path) -> None:
    options = [*SHORT[name], *(["--base", str(base)] if name == "dpo" else [])]
    found = run_ranks(run_example, 2, name, options)
    assert_equal(found, run_ranks(run_example, 2, name, [*options, "--plain"]))


@pytest.mark.parametrize("name", ["clip", pytest.param("vision", marks=pytest.mark.full)])
def test_losses_of_the_joint_batch_equal_one_process(name: str) -> None:
    options = [*SHORT[name], *(SYNC if name == "vision" else [])]
    found = run_ranks(run_example, 2, name, options)
    assert_equal(found, run_ranks(run_example, 1, name, [*options, "--plain"]))


@pytest.mark.full
@pytest.mark.parametrize("model", ["resnet50", "vgg11_bn", "vit_b_16", "mobilenet_v3_small"])
def test_other_networks_of_torchvision_equal_their_plain_form(model: str) -> None:
    found = run_ranks(run_example, 2, "vision", [*VISION, model])
    assert_equal(found, run_ranks(run_example, 2, "vision", [*VISION, model, "--plain"]))


@pytest.mark.some(3)
@pytest.mark.parametrize("offload", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("method", ["full", "lora"])
def test_fine_tuning_equals_plain_torch_wherever_states_are(
    method: str, offload: str, base: Path, tmp_path: Path
) -> None:
    options = [*SHORT["lora"], "--base", str(base), "--method", method]
    found = run_ranks(run_example, 1, "lora", [*options, "--offload", offload, "--files", str(tmp_path)])
    assert_equal(found, run_ranks(run_example, 1, "lora", [*options, "--plain"]))
    tier = {"none": "device", "cpu": "host", "nvme": "nvme"}[offload]
    assert found[0][f"{tier}, MB"] > 0
    if tier != "device":  # AdamW's two moments, and master weights in files
        assert found[0][f"{tier}, MB"] >= 2 * found[0]["device, MB"] * (method == "full") / 3


@on_ranks(2)
def test_the_contrastive_loss_over_ranks_is_clips_own_over_the_joint_batch() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        module = runpy.run_path(str(EXAMPLES / "clip" / "train.py"))
        torch.manual_seed(0)
        model = module["GlobalContrast"](16, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    images, texts = torch.randn(8, 3, 16, 16).double(), torch.randint(12, (8, 6))
    joint = model.clip(pixel_values=images, input_ids=texts, return_loss=True).loss
    expected = torch.autograd.grad(joint, model.parameters())
    rank = dist.get_rank()
    loss, _, _ = model(images.chunk(2)[rank], texts.chunk(2)[rank])
    found = torch.autograd.grad(loss, model.parameters())
    for gradient in [total := loss.detach().clone(), *found]:
        dist.all_reduce(gradient)
    torch.testing.assert_close(total / 2, joint.detach(), rtol=1e-12, atol=0)
    for name, one, other in zip(dict(model.named_parameters()), found, expected, strict=True):
        torch.testing.assert_close(one / 2, other, rtol=1e-9, atol=1e-14, msg=name)


@pytest.mark.full
def test_every_example_runs_by_its_command_and_prints_its_figure(tmp_path: Path, base: Path) -> None:
    for name in FOLDERS:
        options = [*SHORT.get(name, ["--epochs", "1"]), *(["--base", str(base)] if name in ("lora", "dpo") else [])]
        script = [ROOT / "tests" / "support" / "with_torchvision.py", EXAMPLES / name / "train.py"]
        launch = ["-m", "torch.distributed.run", "--nproc-per-node", "1" if name == "lora" else "2", "--standalone"]
        finished = run_command([sys.executable, *launch, *script, *options], cwd=tmp_path)
        assert finished.returncode == 0, finished.stdout
        assert ("step 0: loss" if name in SHORT else "test loss") in finished.stdout


@pytest.mark.parametrize("name", FOLDERS)
def test_an_example_is_small_and_complete(name: str) -> None:
    folder = EXAMPLES / name
    assert len((folder / "train.py").read_text().splitlines()) < 120
    json.loads((folder / "config.json").read_text())
    page = (folder / "README.md").read_text()
    measured = (folder / "figures.json").exists()
    assert ("loss.svg" in page) == ("ms per step" in page) == measured
    assert not measured or (folder / "loss.svg").stat().st_size < 60_000
    assert f"examples/{name}/train.py" in page
    assert f"]({name}/README.md)" in (EXAMPLES / "README.md").read_text()
