"""PEFT's adapters train under every row as in plain PEFT, and are written as PEFT writes them."""

import json
import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zeromesh
from harness import run_ranks
from huggingface_models import MODELS, token_batches
from models import next_token_loss
from run import adamw, configuration, plain_step, sgd, start_engine, train_step
from zeromesh.checkpoint.weights import export
from zeromesh.shard.parameters import deferred

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed"),
    pytest.mark.usefixtures("one_rank"),
]

LIMIT = 120
STEPS = 4
ADAPTERS = "adapter_model.safetensors"

KINDS: dict[str, dict[str, Any]] = {
    "attention": {"target_modules": ["q_proj", "v_proj"]},
    "all": {"target_modules": "all-linear", "use_rslora": True},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "lm_head"]},
    "head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


def adapted(model: nn.Module, kind: str, dtype: torch.dtype) -> Any:
    import peft

    torch.manual_seed(7)
    options = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **KINDS[kind])
    return peft.get_peft_model(model, options).to(dtype)


@cache
def plain(folder: Path, kind: str) -> tuple[list[float], Any]:
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    model = adapted(model, kind, torch.float64)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    losses = [plain_step(optimizer, next_token_loss(model, tokens)) for tokens in token_batches(STEPS)]
    return losses, model


def train(folder: Path, output: Path, kind: str, row: int, dtype: torch.dtype, deferring: bool, bf16: bool) -> Any:
    import transformers

    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.utils.logging.disable_progress_bar()
    with patch.object(deferred, "LARGE", 16):
        model: Any = zeromesh.from_pretrained(folder, dtype=dtype) if deferring else (
            transformers.LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
        )  # fmt: skip
        with zeromesh.zero.Init(enabled=deferring):
            model = adapted(model, kind, dtype)
    engine = start_engine(model, micro=2, optimizer=adamw(1e-2), stage=row, bf16=bf16)
    losses = [
        train_step(engine, next_token_loss(engine, tokens.chunk(engine.data_size)[engine.data_rank]))
        for tokens in token_batches(STEPS)
    ]
    engine.save_16bit_model(output / "adapters")
    engine.save_16bit_model(output / "merged", merge_adapters=True)
    state = engine.state_dict()
    return losses, {name: value for name, value in state.items() if not names_adapter(name)}


def adapter_config(folder: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    return {**values, "target_modules": sorted(values["target_modules"])}  # PEFT has them as a set


def names_adapter(name: str) -> bool:
    return "lora_" in name or "modules_to_save" in name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    path = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    MODELS["llama"].build().save_pretrained(path)
    return path


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("kind", "row", "deferring"),
    [("attention", 3, True), ("attention", 0, False), ("all", 1, True), ("all", 2, False), ("dora", 3, False)]
    + [("embedding", 3, True), ("head", 3, True)]
    + [pytest.param(k, row, d, marks=pytest.mark.full) for k in KINDS for row in range(4) for d in (False, True)],
)
def test_adapters_are_those_of_plain_peft(kind, row, deferring, folder, tmp_path, monkeypatch) -> None:
    import peft
    import transformers

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expected_losses, expected = plain(folder, kind)
    ranks = run_ranks(train, 2, folder, tmp_path, kind, row, torch.float64, deferring, False, timeout=LIMIT)
    losses = [sum(step) / 2 for step in zip(*(rank[0] for rank in ranks), strict=True)]
    assert losses == pytest.approx(expected_losses, rel=1e-9)
    # The adapters are PEFT's, in names, shapes and values; nothing is empty.
    expected.save_pretrained(tmp_path / "plain")
    found, wanted = load_file(tmp_path / "adapters" / ADAPTERS), load_file(tmp_path / "plain" / ADAPTERS)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].numel() > 0
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)
    assert adapter_config(tmp_path / "adapters") == adapter_config(tmp_path / "plain")
    # The base is what it was, bit for bit.
    untouched = {name: value for name, value in expected.state_dict().items() if not names_adapter(name)}
    for _, base in ranks:
        assert base.keys() == untouched.keys()
        assert [name for name, value in untouched.items() if not torch.equal(base[name], value)] == []
    # What PEFT makes of the folder, and what is merged, compute the same.
    tokens = token_batches(STEPS)[0]
    base = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapters", autocast_adapter_dtype=False)
    merged = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float64)
    with torch.no_grad():
        logits = expected(input_ids=tokens).logits
        # Rotary tables, norms and PEFT's DoRA go through fp32.
        torch.testing.assert_close(loaded(input_ids=tokens).logits, logits, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(merged(input_ids=tokens).logits, logits, rtol=1e-5, atol=1e-6)


def test_adapters_of_experts_are_merged(tmp_path: Path) -> None:
    """PEFT puts one around the other for the parameters of one module."""
    import peft
    import transformers

    MODELS["mixtral"].build().save_pretrained(tmp_path / "base")
    torch.manual_seed(7)
    model: Any = zeromesh.from_pretrained(tmp_path / "base")
    options = peft.LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    with zeromesh.zero.Init():
        model = peft.get_peft_model(model, options)
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 3}}
    engine = zeromesh.initialize(model=model, config=config)[0].eval()
    engine.save_16bit_model(tmp_path / "merged", merge_adapters=True)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    tokens = token_batches(STEPS)[0]
    with torch.no_grad():
        logits = engine(input_ids=tokens).logits
        torch.testing.assert_close(merged(tokens).logits, logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(base(tokens).logits, logits, rtol=1e-2, atol=1e-2)
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    assert weights.keys() == load_file(tmp_path / "base" / "model.safetensors").keys()


TIED: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["lm_head"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "trained embedding": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "trained both": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 2]},
    "neither": {"target_modules": ["q_proj"]},
}


def tied(output: Path) -> dict[str, torch.Tensor]:
    import peft
    import transformers

    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.utils.logging.disable_progress_bar()
    if torch.distributed.get_rank() == 0:
        MODELS["qwen3"].build().save_pretrained(output / "base")
    torch.distributed.barrier()
    tokens, logits = token_batches(STEPS)[0], {}
    config = configuration(micro=4, optimizer=adamw(1e-1), stage=3)
    for kind, options in TIED.items():
        torch.manual_seed(7)
        model: Any = zeromesh.from_pretrained(output / "base")
        with zeromesh.zero.Init():
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options))
        engine = zeromesh.initialize(model=model, config=config)[0]
        for _ in range(2):
            train_step(engine, next_token_loss(engine, tokens))
        engine.save_16bit_model(output / kind / "merged", merge_adapters=True)
        engine.save_16bit_model(output / kind / "adapters")
        engine.eval()
        with torch.no_grad():
            logits[kind] = engine(input_ids=tokens).logits
        engine.destroy()
    return logits


@pytest.mark.full
def test_a_tied_embedding_that_adapters_take_apart_is_written_apart(tmp_path: Path) -> None:
    import peft
    import transformers

    expected = run_ranks(tied, 2, tmp_path, timeout=LIMIT)[0]
    make, tokens = transformers.AutoModelForCausalLM.from_pretrained, token_batches(STEPS)[0]
    for kind, logits in expected.items():
        merged = make(tmp_path / kind / "merged", dtype=torch.float32)
        adapted = peft.PeftModel.from_pretrained(
            make(tmp_path / "base", dtype=torch.float32), tmp_path / kind / "adapters"
        )
        with torch.no_grad():
            torch.testing.assert_close(merged(tokens).logits, logits, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(adapted(tokens).logits, logits, rtol=1e-4, atol=1e-4)
        assert merged.config.tie_word_embeddings == (kind == "neither")


def test_in_16_bits_adapters_are_written_from_their_masters(folder: Path, tmp_path: Path) -> None:
    _, base = run_ranks(train, 2, folder, tmp_path, "attention", 3, torch.float32, True, True, timeout=LIMIT)[0]
    weights = load_file(folder / "model.safetensors")
    found = load_file(tmp_path / "adapters" / ADAPTERS)
    assert {value.dtype for value in found.values()} == {torch.float32}
    assert any(not torch.equal(value, value.bfloat16().float()) for value in found.values())
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(base[f"base_model.model.{name}"], weights[name].bfloat16())
    assert {value.dtype for value in load_file(tmp_path / "merged" / "model.safetensors").values()} == {torch.bfloat16}


def test_merging_needs_adapters(tmp_path: Path) -> None:
    engine = start_engine(nn.Linear(2, 2), optimizer=sgd(0.1))
    with pytest.raises(ValueError, match="Linear has no adapters of PEFT"):
        engine.save_16bit_model(tmp_path, merge_adapters=True)
    with pytest.raises(ValueError, match=r"save_filename = 'pytorch_model.bin' must end in .safetensors"):
        engine.save_16bit_model(tmp_path, "pytorch_model.bin")


@pytest.mark.some(1)
@pytest.mark.parametrize("merge", [True, False])
def test_prompts_are_written_by_peft_itself(merge: bool, folder: Path, tmp_path: Path) -> None:
    import peft

    model: Any = zeromesh.from_pretrained(folder)
    with zeromesh.zero.Init():
        model = peft.get_peft_model(model, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    engine = start_engine(model, optimizer=sgd(0.1), stage=3)
    with pytest.raises(
        ValueError, match="PROMPT_TUNING learns prompts.* inside zeromesh.zero.GatheredParameters.* writes them"
    ):
        engine.save_16bit_model(tmp_path, merge_adapters=merge)
    with zeromesh.zero.GatheredParameters(model.parameters()):
        model.save_pretrained(tmp_path)
    assert load_file(tmp_path / ADAPTERS)["prompt_embeddings"].shape == (4, 32)


def save_where_ranks_differ(folder: Path, output: Path) -> str:
    engine = start_engine(
        adapted(zeromesh.from_pretrained(folder), "attention", torch.float32), optimizer=sgd(0.1), stage=3
    )
    # Rank 1 does not see the base model's folder, and PEFT chooses otherwise there.
    choice = {"return_value": set()} if torch.distributed.get_rank() else {"wraps": export.adapter_names}
    with patch.object(export, "adapter_names", **choice):
        engine.save_16bit_model(output / "adapters")
    with patch.object(export, "_merged", side_effect=NotImplementedError("this layer cannot")):
        try:
            engine.save_16bit_model(output / "merged", merge_adapters=True)
        except (NotImplementedError, RuntimeError) as error:
            return str(error)
    return "nothing was wrong"


def test_ranks_that_differ_as_they_write_do_not_wait_for_each_other(folder: Path, tmp_path: Path) -> None:
    first, second = run_ranks(save_where_ranks_differ, 2, folder, tmp_path, timeout=LIMIT)
    assert first == "this layer cannot"
    assert second == "rank 0 could not write the model: this layer cannot"
    assert load_file(tmp_path / "adapters" / ADAPTERS)
    assert not list((tmp_path / "merged").iterdir())


def test_pefts_own_saving_of_sharded_adapters_says_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    model = adapted(zeromesh.from_pretrained(folder), "attention", torch.float32)
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 3}}
    zeromesh.initialize(model=model, config=config)
    with pytest.raises(RuntimeError, match="sharded over 1 ranks and not in memory"):
        model.save_pretrained(tmp_path)
