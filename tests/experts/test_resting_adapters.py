"""Frozen experts that rest, in 16, 32 and 64 bits or packed in 4, train adapters with the bits of experts in memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_close, assert_same
from harness import run_ranks
from huggingface_models import MODELS
from mixtures import build_mixture, mixture_loss, token_rows
from run import adamw, configuration, start_engine, train_step
from zeromesh.engine.reports import planned_states
from zeromesh.shard import sizes

STEPS, EXPERTS = 4, 16
NUMBER = {"mixtral": "num_local_experts", "gpt_oss": "num_local_experts", "qwen3_moe": "num_experts"}
ROUTED = {"deepseek_v3": {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}}
WEIGHTS = ("gate_up_proj", "down_proj")
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
needs_bits = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


@dataclass(frozen=True)
class Case:
    """One training run of a mixture of transformers with adapters."""

    family: str = "qwen3_moe"
    rest: str = "cpu"
    on: tuple[str, ...] = WEIGHTS  # weights of experts that have adapters; the attention has some, too
    bits: int = 0  # 4: of the experts
    nested: bool = False  # scales of these are quantized, too
    stage: int = 3
    dtype: torch.dtype = torch.float32
    ranks: int = 1
    accumulation: int = 1
    recomputes: bool = False
    implementation: str = "eager"


def build(case: Case) -> Any:
    """Return a mixture that gives a token few of its experts, with adapters that are not zero."""
    import peft

    torch.manual_seed(3)
    options = {NUMBER[case.family]: EXPERTS} if case.family in NUMBER else ROUTED[case.family]
    # bitsandbytes misreads rows that end inside of a block of 64 on a CPU.
    wide = {"hidden_size": 64, "moe_intermediate_size": 64} if case.bits else {}
    made = MODELS[case.family]
    model = replace(made, options=made.options | options | wide).build().to(case.dtype)
    model.config._experts_implementation = case.implementation
    modules = [(path, module) for path, module in model.named_modules() if path.endswith("experts")]
    for _, module in modules if case.bits else ():
        for name in WEIGHTS:
            pack = import_module("bitsandbytes.nn.parametrize").replace_parameter_4bit
            pack(module, name, compress_statistics=case.nested, quant_type="nf4")
    torch.manual_seed(7)
    attention = "q_a_proj" if hasattr(model.config, "q_lora_rank") else "q_proj"
    parameters = (
        [f"{path}.{name}" for path, _ in modules for name in case.on]
        if case.bits
        else [f"mlp.experts.{name}" for name in case.on]
    )
    chosen = {"target_modules": [attention], "target_parameters": parameters or None}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=8, task_type="CAUSAL_LM", **chosen))
    generator = torch.Generator().manual_seed(11)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = torch.randn(parameter.shape, generator=generator).mul_(0.1).to(case.dtype)
    return adapted


def tokens(step: int) -> torch.Tensor:
    return torch.randint(0, 64, (1, 3), generator=torch.Generator().manual_seed(step))


def sections_of(case: Case, folder: str) -> dict[str, Any]:
    """Return the configuration."""
    sections: dict[str, Any] = {"gradient_accumulation_steps": case.accumulation, "train_micro_batch_size_per_gpu": 1}
    if case.rest != "none":
        sections["experts"] = {"rest": case.rest, "nvme_path": f"{folder}/files", "slots": 3}
    if case.recomputes:
        sections["activation_checkpointing"] = {"enabled": True}
    made: dict[str, Any] = configuration(adamw(1e-2), case.stage, **sections)
    return made


def trained(case: Case, folder: str) -> Any:
    """Train; return the losses and the adapters."""
    engine = start_engine(build(case), sections_of(case, folder))
    losses = []
    for step in range(STEPS * case.accumulation):
        part = tokens(step * case.ranks + engine.data_rank)
        losses.append(train_step(engine, engine(input_ids=part, labels=part).loss))
    if case.rest != "none":
        tables = [*engine.sharded.tables]
        assert tables
        assert not any(table.flat.layout.trainable for table in tables)
        report = engine.memory_report()
        tier = "host" if case.rest == "cpu" else "nvme"
        ours = sum(table.flat.master.nbytes for table in tables)
        assert report["parameter"][tier] == ours > 0
        assert tier not in report.get("optimizer", {})
    every = engine.gathered_state_dict()
    engine.destroy()
    adapters = {name: value for name, value in every.items() if "lora" in name}
    return losses, adapters, {name: value for name, value in every.items() if "experts" in name}


def plain(case: Case) -> Any:
    """Train in plain PEFT; the micro-batches of all ranks are those of one update."""
    model, parts = build(case), case.accumulation * case.ranks
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)
    losses = []
    for step in range(STEPS * parts):
        part = tokens(step)
        loss = model(input_ids=part, labels=part).loss
        (loss / parts).backward()
        losses.append(loss.item())
        if step % parts == parts - 1:
            optimizer.step()
            optimizer.zero_grad()
    return losses, {name: p.detach() for name, p in model.named_parameters() if "lora" in name}


FULL = [Case(rest="nvme")]
FULL += [
    Case(family=family, rest=rest, on=on)
    for family in ("mixtral", "gpt_oss", "deepseek_v3")
    for rest in ("cpu", "nvme")
    for on in (WEIGHTS, ())
]
FULL += [Case(stage=stage, accumulation=2) for stage in (0, 1, 2, 3)]
FULL += [
    Case(dtype=torch.bfloat16, rest="nvme"),
    Case(on=("down_proj",), recomputes=True),
    Case(implementation="grouped_mm"),
    Case(ranks=2, rest="nvme"),
    Case(ranks=2, stage=1, on=()),
]
PACKED = [
    Case(bits=4, rest=rest, nested=nested, on=on)
    for rest in ("cpu", "nvme")
    for nested in (False, True)
    for on in (WEIGHTS, ())
]
PACKED += [Case(bits=4, ranks=2), Case(bits=4, rest="nvme", nested=True, stage=0, accumulation=2, recomputes=True)]


def on_ranks(function: Any, case: Case, *more: Any) -> Any:
    return function(case, *more) if case.ranks == 1 else run_ranks(function, case.ranks, case, *more)[0]


@needs_peft
@pytest.mark.full
@pytest.mark.parametrize("case", FULL, ids=str)
def test_frozen_experts_that_rest_train_adapters_as_in_memory(case: Case, tmp_path: Path) -> None:
    found = on_ranks(trained, case, str(tmp_path))
    expected = on_ranks(trained, replace(case, rest="none"), str(tmp_path))
    assert found[0] == expected[0]
    for here, wanted in zip(found[1:], expected[1:], strict=True):
        assert_same(here, wanted)


@needs_peft
@needs_bits
@pytest.mark.parametrize(
    "case", [PACKED[-1], *(pytest.param(case, marks=pytest.mark.full) for case in PACKED[:-1])], ids=str
)
def test_packed_experts_that_rest_train_adapters_as_in_memory(case: Case, tmp_path: Path) -> None:
    test_frozen_experts_that_rest_train_adapters_as_in_memory(case, tmp_path)


@needs_peft
@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [Case(dtype=torch.float64), Case(dtype=torch.float64, rest="nvme", accumulation=2, family="gpt_oss")],
    ids=str,
)
def test_adapters_are_those_of_plain_peft(case: Case, tmp_path: Path) -> None:
    found, expected = trained(case, str(tmp_path)), plain(case)
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert_close(found[1], expected[1], 1e-12)


def save(case: Case, folder: str) -> None:
    engine = start_engine(build(case), sections_of(case, folder))
    train_step(engine, engine(input_ids=tokens(0), labels=tokens(0)).loss)
    engine.save_checkpoint(folder)
    engine.destroy()


def go_on(case: Case, folder: str) -> Any:
    model = build(case)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.flatten().flip(0).view(parameter.shape))  # all is to come from the checkpoint
    engine = start_engine(model, sections_of(case, folder))
    engine.load_checkpoint(folder)
    loss = train_step(engine, engine(input_ids=tokens(1), labels=tokens(1)).loss)
    assert engine.optimizer.state_dict()["state"]
    found = engine.gathered_state_dict()
    engine.destroy()
    return loss, found


@needs_peft
@needs_bits
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(Case(rest="nvme"), Case(rest="none"), marks=pytest.mark.full),
        pytest.param(Case(rest="none", stage=0), Case(rest="nvme"), marks=pytest.mark.full),
        pytest.param(Case(bits=4), Case(bits=4, rest="nvme"), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_checkpoint_has_frozen_experts_wherever_they_rest(before: Case, after: Case, tmp_path: Path) -> None:
    save(before, str(tmp_path))
    found, expected = go_on(after, str(tmp_path)), go_on(replace(before, rest="none"), str(tmp_path))
    assert found[0] == expected[0]
    assert_same(found[1], expected[1])


def half_frozen(dtype: torch.dtype) -> nn.Module:
    model = build_mixture(dtype, experts=EXPERTS)
    for block in model.blocks:
        block.experts.down_proj.requires_grad_(False)
    return model


@pytest.mark.parametrize("rest", ["cpu", pytest.param("nvme", marks=pytest.mark.full)])
def test_trained_and_frozen_weights_of_experts_rest_together(rest: str, tmp_path: Path) -> None:
    experts = {"rest": rest, "nvme_path": str(tmp_path), "slots": 2}
    engine = start_engine(
        half_frozen(torch.float64), configuration(adamw(1e-2), 2, train_batch_size=1, experts=experts)
    )
    model = half_frozen(torch.float64)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(STEPS):
        train_step(engine, mixture_loss(engine, token_rows(step, 1, 3)))
        mixture_loss(model, token_rows(step, 1, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_close(engine.gathered_state_dict(), model.state_dict(), 1e-12)
    numbers = [sum(p.numel() for n, p in model.named_parameters() if n.endswith(name)) for name in WEIGHTS]
    report, tier = engine.memory_report(), "host" if rest == "cpu" else rest
    layout = sizes.StateLayout(row=engine.sharded.row, widths=sizes.Widths(8, 8, 8, 0))
    planned = planned_states(engine.sharded, layout, sizes.TableLayout())
    assert planned["parameter", tier] == report["parameter"][tier] == 8 * sum(numbers)
    assert planned["optimizer", tier] == 2 * 8 * numbers[0]
    engine.destroy()
