"""Adapters of PEFT: silent errors of other systems, and that ours train and are saved as in one process."""

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import zeromesh
from harness import run_ranks
from huggingface_models import MODELS, VOCABULARY, without_dropout
from museum import Weights, gap, require, start
from run import train_step

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")

LR, RANK, ALPHA = 2.0, 4, 8
LAYERS = ["q_proj", "o_proj", "up_proj"]
SEED = 7


def adapted(seed: int = SEED, whole: bool = True) -> Any:
    """Return a model with adapters and, if whole, a head that is trained as well."""
    import peft
    import transformers

    row = MODELS["llama"]
    config = transformers.LlamaConfig(**{**row.options, "num_hidden_layers": 2})
    without_dropout(config)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    torch.manual_seed(seed)
    options = peft.LoraConfig(
        r=RANK, lora_alpha=ALPHA, use_rslora=True, task_type="CAUSAL_LM", target_modules=LAYERS,
        modules_to_save=["lm_head"] if whole else None,
    )  # fmt: skip
    return peft.get_peft_model(model, options).double().train()


def ids(step: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, tokens: Tensor) -> Tensor:  # not the model's own, which is computed in fp32
    logits = model(input_ids=tokens).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


STEPS = 2


def train(folder: str) -> Weights:
    """Train adapters that each rank begins with numbers of its own, in blocks that are computed again."""
    model = adapted(SEED + int(os.environ["RANK"]))
    further = {"zero_optimization": {"stage": 3}, "activation_checkpointing": {"enabled": True}}
    engine = start(model, lr=LR, **further)
    for step in range(STEPS):
        train_step(engine, loss_of(engine, ids(step).chunk(2)[engine.data_rank]))
    engine.save_16bit_model(f"{folder}/adapters")
    engine.save_16bit_model(f"{folder}/merged", merge_adapters=True)
    return engine.state_dict()


def train_split() -> Weights:
    """Train adapters of layers that are split over the ranks, as their sequences are."""
    settings = {"mesh": {"tensor": 2}, "tensor_parallel": {"sequence": True}, "train_batch_size": 4}
    optimizer = {"type": "SGD", "params": {"lr": LR}}
    engine = zeromesh.initialize(model=adapted(whole=False), config={**settings, "optimizer": optimizer})[0]
    for step in range(STEPS):
        train_step(engine, loss_of(engine, ids(step)))
    return engine.state_dict()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Weights]]:
    folder = tmp_path_factory.mktemp("adapters")
    return folder, run_ranks(train, 2, str(folder))


@pytest.fixture(scope="module")
def split() -> list[Weights]:
    return run_ranks(train_split, 2)


@cache
def plain(whole: bool = True, head: bool = True, share: str = "", steps: int = STEPS) -> Weights:
    """Train in one process; without the gradients of the head, or with a part of the tokens for some adapters'."""
    model = adapted(whole=whole)
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.SGD(named.values(), lr=LR)
    for step in range(steps):
        loss_of(model, ids(step)).backward()
        for name, parameter in named.items():
            if not head and "lm_head" in name:
                parameter.grad = None
            elif share and share in name:
                parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def only(state: Weights, part: str) -> Weights:
    return {name: value for name, value in state.items() if part in name}


@pytest.mark.full
def test_adapters_in_blocks_that_are_computed_again_are_trained(trained: Any) -> None:
    # None of them got a gradient, and one of their factors stayed zero.
    right = plain()
    assert all(float(value.abs().max()) > 0 for value in only(right, "lora_B").values())
    for found in trained[1]:
        require(only(found, "lora_B"), only(right, "lora_B"), only(plain(steps=0), "lora_B"))
        require(found, right, plain(steps=0))


def test_all_ranks_train_the_adapters_of_the_first(trained: Any) -> None:
    first, second = (adapted(SEED + rank).state_dict() for rank in range(2))
    assert gap(only(first, "lora_A"), only(second, "lora_A")) >= 1e-3
    for found in trained[1]:
        require(found, plain(), found | only(second, "lora_A"))


def test_a_head_that_is_trained_beside_adapters_is_saved_as_it_was_trained(trained: Any) -> None:
    saved = load_file(trained[0] / "adapters" / "adapter_model.safetensors")
    right = plain()
    names = {name: name.replace(".weight", ".default.weight") for name in saved if "lora_" in name}
    names["base_model.model.lm_head.weight"] = "base_model.model.lm_head.modules_to_save.default.weight"
    assert saved.keys() == names.keys()
    wrong = plain(head=False)
    require(saved, {name: right[own] for name, own in names.items()}, {name: wrong[own] for name, own in names.items()})


def test_merged_weights_have_the_adapters_in_their_scale(trained: Any) -> None:
    merged, right = load_file(trained[0] / "merged" / "model.safetensors"), plain()
    layers = [name.removesuffix(".lora_A.default.weight") for name in right if name.endswith("lora_A.default.weight")]
    assert layers
    for layer in layers:
        base, product = right[f"{layer}.base_layer.weight"], adapter_of(right, layer)
        found = merged[f"{layer.removeprefix('base_model.model.')}.weight"]
        for scale in (0, 1, ALPHA / RANK):  # Not merged, not scaled, and not as rsLoRA scales
            require(found, base + ALPHA / RANK**0.5 * product, base + scale * product)


def adapter_of(state: Weights, layer: str) -> Tensor:
    return state[f"{layer}.lora_B.default.weight"] @ state[f"{layer}.lora_A.default.weight"]


@pytest.mark.full
def test_factors_that_all_ranks_hold_get_the_gradient_of_all_tokens(split: list[Weights]) -> None:
    for found in split:
        require(found, plain(whole=False), plain(whole=False, share="up_proj.lora_B"))
        require(found, plain(whole=False), plain(whole=False, share="o_proj.lora_B"))


@pytest.mark.full
def test_adapters_begin_with_the_same_numbers_on_any_number_of_ranks(split: list[Weights]) -> None:
    # The range of the first factor's numbers was that of a rank's part of it.
    right = plain(whole=False)
    first = {name: 2**0.5 * value for name, value in only(right, "o_proj.lora_A").items()}
    for found in split:
        require(found, right, right | first)
