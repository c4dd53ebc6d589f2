"""Adapters on stacked experts, by PEFT's ``target_parameters``, train under every row as in plain PEFT."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zeromesh
from harness import run_ranks
from huggingface_models import MODELS, token_batches
from models import next_token_loss
from run import adamw, plain_step, sgd, start_engine, train_on_tokens, train_step

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")

LIMIT = 180
STEPS = 3
ADAPTERS = "adapter_model.safetensors"
WEIGHTS = ("gate_up_proj", "down_proj")
FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
"""Of which gpt_oss has transposed weights and biases, and deepseek_v3 has shared experts."""


def build(family: str) -> Any:
    """Return a tiny mixture whose experts compute in float64, too."""
    torch.manual_seed(3)
    model = MODELS[family].build()
    model.config.output_router_logits = False  # plain torch would balance over all samples, and each rank over its own
    return model


def saved_mixture(folder: Path) -> Path:
    """Save a tiny mixture to a folder, and return it."""
    build("mixtral").save_pretrained(folder)
    return folder


def loaded(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    import transformers

    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.utils.logging.disable_progress_bar()
    options = {"experts_implementation": "eager", "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)


def adapted(model: Any, **options: Any) -> Any:
    """Return the model with adapters on its experts, and on the attention's queries."""
    import peft

    torch.manual_seed(7)
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    chosen = {"target_modules": ["q_a_proj" if hasattr(model.config, "q_lora_rank") else "q_proj"]}
    chosen |= {"target_parameters": parameters, **options}
    dtype = next(model.parameters()).dtype
    return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=8, task_type="CAUSAL_LM", **chosen)).to(dtype)


@cache
def plain(folder: Path) -> tuple[list[float], Any]:
    model = adapted(loaded(folder))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    losses = [plain_step(optimizer, next_token_loss(model, tokens)) for tokens in token_batches(STEPS)]
    return losses, model


def train(folder: Path, output: Path, stage: int, mesh: Mapping[str, int]) -> list[float]:
    engine = start_engine(adapted(loaded(folder)), batch=4, optimizer=adamw(1e-2), stage=stage, mesh=dict(mesh))
    losses = [
        train_step(engine, next_token_loss(engine, tokens.chunk(engine.data_size)[engine.data_rank]))
        for tokens in token_batches(STEPS)
    ]
    engine.save_16bit_model(output / "adapters")
    engine.save_16bit_model(output / "merged", merge_adapters=True)
    return losses


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    paths = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    for family, path in paths.items():
        build(family).save_pretrained(path)
    # bitsandbytes misreads rows that end inside of a block of 64 on a CPU.
    wide = {"hidden_size": 64, "moe_intermediate_size": 64}
    model = replace(MODELS["qwen3_moe"], options=MODELS["qwen3_moe"].options | wide).build()
    model.save_pretrained(path := tmp_path_factory.mktemp("wide"))
    return paths | {"wide": path}


FULL = [(family, stage, mesh) for family in FAMILIES for mesh in ({}, {"expert": 2}) for stage in range(4)]
FULL += [("mixtral", stage, {"expert": 2, "tensor": 2}) for stage in (1, 3)]
FULL += [("qwen3_moe", stage, {"expert": 2, "data": 4}) for stage in (2, 3)]
FULL += [(family, 3, {"expert": 4, "data": 4}) for family in ("mixtral", "gpt_oss")]


@pytest.mark.parametrize(
    ("family", "stage", "mesh"),
    [("mixtral", 3, {"expert": 2}), *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)],
)
def test_adapters_of_stacked_experts_are_those_of_plain_peft(family, stage, mesh, folders, tmp_path) -> None:
    import peft

    folder = folders[family]
    expected_losses, expected = plain(folder)
    ranks = run_ranks(train, mesh.get("data", 2), folder, tmp_path, stage, mesh, timeout=LIMIT)
    losses = [sum(step) / len(ranks) for step in zip(*ranks, strict=True)]
    assert losses == pytest.approx(expected_losses, rel=1e-9)
    expected.save_pretrained(tmp_path / "plain")
    found, wanted = load_file(tmp_path / "adapters" / ADAPTERS), load_file(tmp_path / "plain" / ADAPTERS)
    assert found.keys() == wanted.keys()
    assert sum("experts" in name for name in wanted) >= 8
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)
    # What PEFT makes of the folder, and what is merged, compute the same.
    tokens = token_batches(STEPS)[0]
    read = peft.PeftModel.from_pretrained(loaded(folder), tmp_path / "adapters", autocast_adapter_dtype=False)
    merged = loaded(tmp_path / "merged")
    with torch.no_grad():
        logits = expected(input_ids=tokens).logits
        torch.testing.assert_close(read(input_ids=tokens).logits, logits, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(merged(input_ids=tokens).logits, logits, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(loaded(folder)(input_ids=tokens).logits, logits, rtol=1e-3, atol=1e-3)


def quantized(model: Any) -> list[str]:
    """Quantize the stacked weights of experts, as bitsandbytes does it, and return their names."""
    replace = import_module("bitsandbytes.nn.parametrize").replace_parameter_4bit
    modules = [(path, module) for path, module in model.named_modules() if path.endswith("experts")]
    for _, module in modules:
        for name in WEIGHTS:
            replace(module, name, compress_statistics=True, quant_type="nf4")
    return [f"{path}.{name}" for path, _ in modules for name in WEIGHTS]


def trained_parameters(model: Any) -> dict[str, torch.Tensor]:
    """Return the adapters by names that do not depend on the order in which PEFT nests those of one module."""
    found = {}
    for path, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            key = f"{path.replace('.base_layer', '')}.{getattr(layer, 'parameter_name', '')}"
            found |= {f"{key}.A": layer.lora_A["default"].weight, f"{key}.B": layer.lora_B["default"].weight}
    return dict(sorted(found.items()))


def drawn(model: Any, seed: int = 7) -> Any:
    """Give adapters values that depend on their names only."""
    generator = torch.Generator().manual_seed(seed)
    for value in trained_parameters(model).values():
        value.data.normal_(std=0.1, generator=generator)
    return model


@cache
def plain_quantized(folder: Path) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train on the values that the weights in 4 bits stand for; return losses, adapters and the merged model."""
    # Not on these weights: PEFT's adapters stay on parametrized weights after a forward, and are added again in the
    # next one.
    model = loaded(folder, torch.float32)
    quantized(coded := loaded(folder, torch.float32))
    with torch.no_grad():
        for path, module in coded.named_modules():
            if path.endswith("experts"):
                for name in WEIGHTS:
                    getattr(model.get_submodule(path), name).copy_(getattr(module, name))
    model = drawn(adapted(model))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = [plain_step(optimizer, model(input_ids=tokens, labels=tokens).loss) for tokens in token_batches(STEPS)]
    trained = {name: p.detach().clone() for name, p in trained_parameters(model).items()}
    return losses, trained, model.merge_and_unload().state_dict()


def train_quantized(folder: Path, output: Path, stage: int, mesh: Mapping[str, int], offload: str | None) -> Any:
    model = loaded(folder, torch.float32)
    model = drawn(adapted(model, target_parameters=quantized(model)))
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    sizes = (
        sum(parameter.nbytes for parameter in frozen),
        sum(parameter.nbytes for parameter in frozen if parameter.dtype is torch.uint8),
        sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad),
    )
    places = {} if offload is None else {"offload_optimizer": {"device": offload}, "offload_param": {"device": offload}}
    zero = {"stage": stage, **places}
    engine = start_engine(model, batch=4, optimizer=sgd(0.5), zero_optimization=zero, mesh=dict(mesh))
    losses = [train_on_tokens(engine, tokens) for tokens in token_batches(STEPS)]
    here = sum(engine.memory_report()["parameter"].values())
    engine.save_16bit_model(output / "merged", merge_adapters=True)
    with zeromesh.zero.GatheredParameters(model.parameters()):
        trained = {name: p.detach().clone() for name, p in trained_parameters(model).items()}
    return losses, trained, here, sizes


def alone(folder: Path, output: Path) -> Any:
    """Compare one process with plain PEFT in the same process, bit for bit; return plain PEFT's results."""
    losses, expected, merged = plain_quantized(folder)
    found, trained, _, _ = train_quantized(folder, output, 3, {}, None)
    assert found == losses
    assert [name for name, value in expected.items() if not torch.equal(trained[name], value)] == []
    written = loaded(output / "merged", torch.float32).state_dict()
    assert written.keys() == merged.keys()
    assert [name for name, value in merged.items() if not torch.equal(written[name], value)] == []
    return losses, expected


FOUR_BITS = [(stage, mesh, None) for mesh in ({}, {"expert": 2}) for stage in range(4)]
FOUR_BITS += [(3, {}, "cpu"), (3, {"expert": 2}, "cpu")]


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.full
@pytest.mark.parametrize(("stage", "mesh", "offload"), FOUR_BITS)
def test_adapters_of_experts_in_4_bits_are_those_of_their_values(stage, mesh, offload, folders, tmp_path) -> None:
    folder = folders["wide"]
    ((losses, expected),) = run_ranks(alone, 1, folder, tmp_path / "one", timeout=LIMIT)
    ranks = run_ranks(train_quantized, 2, folder, tmp_path / "two", stage, mesh, offload, timeout=LIMIT)
    assert [sum(step) / len(ranks) for step in zip(*(rank[0] for rank in ranks), strict=True)] == pytest.approx(
        losses, 1e-5
    )
    for name, value in expected.items():
        torch.testing.assert_close(ranks[0][1][name], value, rtol=1e-4, atol=1e-5)
    here, (frozen, packed, adapters) = ranks[0][2:]
    if stage == 3:
        assert here < 0.75 * (frozen + adapters)
    else:  # adapters and alignment are the rest
        least = frozen - packed // 2 if mesh else frozen
        assert least <= here <= least + 1.25 * adapters
