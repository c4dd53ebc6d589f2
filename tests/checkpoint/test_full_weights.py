"""Whole weights for an inference engine: one unit at a time, as published, for no more bytes than a gather."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zeromesh
from compare import assert_same
from harness import on_ranks, run_ranks
from huggingface_models import GROUPED, MODELS, SPECIAL
from run import adamw, start_engine, train_step
from runs import config, start, train
from zeromesh.shard.parameters.unit import State

LAYERS = 3


def llama(tied: bool = True) -> Any:
    import transformers

    torch.manual_seed(0)
    options = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    options |= {"num_key_value_heads": 4, "head_dim": 8, "tie_word_embeddings": tied}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**GROUPED, **SPECIAL, **options}))


def handed_over(settings: dict[str, Any], dtype: torch.dtype | None) -> dict[str, Any]:
    more = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "train_micro_batch_size_per_gpu": 1}
    engine, *_ = zeromesh.initialize(model=llama(), config={**more, **settings})
    ids = torch.arange(8).view(1, 8)
    if engine.pipelined is None:
        train_step(engine, engine(input_ids=ids, labels=ids).loss)
    whole = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.traffic_report(reset=True)
    sharded, loaded = engine.sharded, 0
    found: dict[str, torch.Tensor] = {}
    for name, tensor in engine.full_weights(dtype):
        assert name not in found, "each weight comes once"
        found[name] = tensor
        loaded = max(loaded, sum(unit.state is State.FETCHED for unit in sharded.units))
    sent = sum(row["bytes"] for row in engine.traffic_report(reset=True).values())
    first = dict(engine.full_weights(dtype, only_first_rank=True))
    # What was handed over does not change with the model, and belongs to nobody else.
    kept = {name: tensor.clone() for name, tensor in found.items()}
    with zeromesh.zero.GatheredParameters(engine.module.parameters(), modifier_rank=engine.mesh.stage_ranks[0]):
        for parameter in engine.module.parameters():
            parameter.data.zero_()
    assert_same(found, kept)
    return {"whole": whole, "found": found, "sent": sent, "first": first, "loaded": loaded}


CASES = {
    "zero 0": (2, {"zero_optimization": {"stage": 0}}, None),
    "zero 3": (2, {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}, torch.float16),
    "zero 3, three ranks": (3, {"zero_optimization": {"stage": 3}}, None),
    "tensor": (2, {"mesh": {"tensor": 2}, "zero_optimization": {"stage": 3}}, None),
    "pipeline": (2, {"mesh": {"pipeline": 2}, "gradient_accumulation_steps": 2}, torch.bfloat16),
    "pipeline and data": (4, {"mesh": {"pipeline": 2}, "zero_optimization": {"stage": 1}}, None),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.full) if row[0] > 2 else case for case, row in CASES.items()]
)
def test_weights_are_those_of_the_state_for_the_bytes_of_a_gather(case: str) -> None:
    ranks, settings, dtype = CASES[case]
    results = run_ranks(handed_over, ranks, settings, dtype, timeout=120)
    published = set(llama().state_dict()) - {"lm_head.weight"}
    for rank, result in enumerate(results):
        expected = {name: result["whole"][name].to(dtype or result["whole"][name].dtype) for name in published}
        assert_same(result["found"], expected)
        assert_same(result["first"], expected if rank == 0 else {})
        # Without sharding, all units are there all the time.
        assert result["loaded"] <= 1 or settings.get("zero_optimization") != {"stage": 3}, "one unit at a time"
    nbytes = sum(tensor.nbytes for tensor in results[0]["found"].values())
    share = settings.get("mesh", {}).get("pipeline", ranks)
    # A rank sends its share to each other rank; headers of a pipeline, and padding, are the rest.
    bound = 0 if case == "zero 0" else 1.1 * nbytes * (share - 1)
    assert sum(result["sent"] for result in results) <= bound * (ranks // share) + 2**13 * ("mesh" in settings)


def of_noisy(row: int) -> dict[str, Any]:
    engine = start(1, config(row, "bf16"))
    train(engine, 2)
    return {"state": engine.state_dict(), "found": dict(engine.full_weights(torch.float16))}


def test_buffers_keep_their_dtype() -> None:
    result = run_ranks(of_noisy, 2, 3)[0]
    found, state = result["found"], result["state"]
    assert set(state) - set(found) == {"head.weight"}, "a tied weight comes once"
    assert found["norm.running_mean"].dtype == torch.float32
    assert found["norm.num_batches_tracked"].dtype == torch.int64
    assert found["blocks.0.weight"].dtype == torch.float16
    assert_same(found, {name: state[name].to(found[name].dtype) for name in found})


@pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")
@on_ranks(2, timeout=120)
def test_adapters_come_merged_into_their_layers() -> None:
    import peft

    torch.manual_seed(1)
    options = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(llama(tied=False), options)
    plain = {name: value.clone() for name, value in model.merge_and_unload().state_dict().items()}
    torch.manual_seed(1)
    again = peft.get_peft_model(llama(tied=False), options)
    settings = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    engine = start_engine(again, settings, micro=1)
    assert_same(dict(engine.full_weights()), plain)


def experts() -> Any:
    torch.manual_seed(0)
    return MODELS["mixtral"].build()


def of_experts() -> dict[str, torch.Tensor]:
    engine = start_engine(experts(), micro=1, stage=3, optimizer=adamw(1e-2))
    return dict(engine.full_weights())


def test_experts_come_apart_as_they_are_published(tmp_path: Path) -> None:
    found = run_ranks(of_experts, 2, timeout=120)[1]
    experts().save_pretrained(tmp_path)
    assert_same(found, load_file(tmp_path / "model.safetensors"))
