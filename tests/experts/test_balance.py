"""Load of experts, the selection bias, z-loss and the auxiliary loss of the global batch, beside one plain process."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compare import assert_close
from harness import on_ranks
from run import sgd, start_engine, whole_parameters
from zeromesh.comm.mesh import Mesh
from zeromesh.parallel.expert.auxiliary_loss import LOSS, GlobalAuxiliaryLoss
from zeromesh.parallel.expert.router import Listener

EXPERTS, TOP_K, LAYERS, RATE = 4, 2, 2, 0.01

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "n_routed_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "afmoe": {"num_dense_layers": 0, "num_shared_experts": 1, "layer_types": ["full_attention"] * LAYERS},
    "deepseek_v3": {
        "n_group": 2,
        "topk_group": 2,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}


def mixture(family: str, dtype: torch.dtype = torch.float64, **more: Any) -> Any:
    """Return a tiny model of a family whose routers have an uneven selection bias, if they have one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **SIZES | OF_FAMILY.get(family, {}) | more)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").to(dtype)
    for number, bias in enumerate(biases_of(model).values()):
        with torch.no_grad():
            bias.copy_(torch.arange(EXPERTS) * 0.001 * (-1) ** number)
    return model


def biases_of(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = (*model.named_buffers(), *model.named_parameters())
    return {name: tensor for name, tensor in tensors if name.endswith(("correction_bias", "expert_bias"))}


def micro_batch(number: int, rows: int = 2, padding: int = 3) -> dict[str, torch.Tensor]:
    """Return a micro-batch whose first row begins with padding."""
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(1, 64, (rows, 8), generator=generator)
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def without_mask(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: value for key, value in batch.items() if key != "attention_mask"}


class Plain:
    """One process in plain torch: its choices are counted, and its biases moved as the paper says."""

    def __init__(self, model: Any) -> None:
        self.model, self.optimizer = model, torch.optim.SGD(model.parameters(), lr=0.1)
        self.mask = torch.ones(0)
        self.counts: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                self.counts[name] = torch.zeros(EXPERTS, dtype=torch.float64)
                module.register_forward_pre_hook(lambda module, args, name=name: self.count(name, args[1]))

    def count(self, name: str, chosen: torch.Tensor) -> None:
        present = chosen[self.mask.view(-1) != 0]
        self.counts[name] += torch.bincount(present.view(-1), minlength=EXPERTS)

    def update(self, batches: list[dict[str, torch.Tensor]]) -> float:
        losses = []
        for batch in batches:
            self.mask = batch["attention_mask"]
            loss = self.model(**batch).loss
            (loss / len(batches)).backward()
            losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        for counts, bias in zip(self.counts.values(), biases_of(self.model).values(), strict=True):
            change = RATE * torch.sign(counts.mean() - counts)
            with torch.no_grad():
                bias += (change - change.mean()).to(bias.dtype)
            counts.zero_()
        return sum(losses) / len(losses)


def engine_of(model: Any, stage: int = 0, **rest: Any) -> Any:
    sections = {"micro": 2, "stage": stage, "optimizer": sgd(0.1), "experts": {"bias_update_rate": RATE}}
    return start_engine(model, **sections | rest)


def train(engine: Any, batches: list[dict[str, torch.Tensor]]) -> float:
    for batch in batches:
        engine.backward(engine(**batch).loss)
        engine.step()
    return float(engine.get_mean_loss())


def compare(family: str, stage: int, **rest: Any) -> None:
    """Compare three updates of engines on two ranks with those of one process."""
    plain, engine = Plain(mixture(family)), engine_of(mixture(family), stage, accumulation=2, **rest)
    rank = engine.data_rank
    for step in range(3):
        each = [[micro_batch(100 * step + 10 * r + m) for m in range(2)] for r in range(engine.data_size)]
        expected = plain.update([batch for batches in each for batch in batches])
        assert train(engine, each[rank]) == pytest.approx(expected, abs=1e-9)
        engine.eval()
        with torch.no_grad():
            engine(**micro_batch(999 + rank))  # is not counted
        engine.train()
    assert_close(whole_parameters(engine.module), dict(plain.model.named_parameters()), 1e-9, 1e-9)
    expected = biases_of(plain.model)
    found = {**whole_parameters(engine.module), **dict(engine.module.named_buffers())}
    for name, bias in expected.items():
        torch.testing.assert_close(found[name], bias, rtol=0, atol=1e-9)
        assert bias.abs().max() > RATE  # it has moved


@on_ranks(2)
def test_a_bias_in_a_buffer_moves_as_in_one_process() -> None:
    compare("minimax_m2", 0)
    compare("minimax_m2", 3, activation_checkpointing={"enabled": True})


@on_ranks(2)
def test_a_bias_in_a_frozen_parameter_moves_as_in_one_process() -> None:
    compare("afmoe", 1)
    compare("afmoe", 3)


@pytest.mark.parametrize(
    "sections",
    [
        {"mesh": {"tensor": 2}},
        pytest.param({"mesh": {"tensor": 2}, "tensor_parallel": {"sequence": True}}, marks=pytest.mark.full),
        {"mesh": {"expert": 2}, "zero_optimization": {"stage": 3}},
        pytest.param({"mesh": {"context": 2}}, marks=pytest.mark.full),
        pytest.param({"mesh": {"tensor": 2, "expert": 2}}, marks=pytest.mark.full),
        pytest.param({"mesh": {"pipeline": 2}, "pipeline": {"recompute": True}}, marks=pytest.mark.full),
        pytest.param({"mesh": {"replicate": 2, "data": 1}, "zero_optimization": {"stage": 3}}, marks=pytest.mark.full),
    ],
    ids=str,
)
@on_ranks(2)
def test_a_bias_moves_alike_on_the_ranks_of_any_axis(sections: dict[str, Any]) -> None:
    plain, engine = Plain(mixture("minimax_m2")), engine_of(mixture("minimax_m2"), accumulation=2, **sections)
    padding = 0 if "context" in sections["mesh"] else 3
    for step in range(2):
        each = [[micro_batch(100 * step + 10 * r + m, 2, padding) for m in range(2)] for r in range(engine.data_size)]
        plain.update([batch for batches in each for batch in batches])
        batches = each[engine.data_rank]
        engine.train_batch(iter(batches if padding else map(without_mask, batches)))
    found = dict(engine.module.named_buffers())
    names = [name for name in biases_of(plain.model) if name in found]  # those of this rank's stages
    assert len(names) == LAYERS // engine.mesh.sizes["pipeline"]
    for name in names:
        torch.testing.assert_close(found[name], biases_of(plain.model)[name], rtol=0, atol=1e-9)
    assert len(engine.expert_report()) == LAYERS


def values_of(model: Any) -> list[list[float]]:
    return [bias.tolist() for bias in biases_of(getattr(model, "module", model)).values()]


def test_a_bias_stays_where_an_update_is_skipped() -> None:
    engine = engine_of(mixture("minimax_m2"))
    before = values_of(engine)
    handle = engine.module.lm_head.weight.register_hook(lambda gradient: gradient * float("inf"))
    train(engine, [micro_batch(0)])
    assert engine.skipped_steps == 1
    assert values_of(engine) == before
    handle.remove()
    train(engine, [micro_batch(0)])
    assert values_of(engine) != before


def test_a_dropped_micro_batch_is_not_counted() -> None:
    engine, other = engine_of(mixture("minimax_m2")), engine_of(mixture("minimax_m2"))
    engine.backward(engine(**micro_batch(1)).loss)
    engine.zero_grad()
    for each in (engine, other):
        train(each, [micro_batch(0)])
    assert values_of(engine) == values_of(other)
    assert engine.expert_report() == other.expert_report()


@pytest.mark.parametrize(("family", "stage"), [("minimax_m2", 0), ("afmoe", 3)])
def test_a_resumed_run_goes_on_with_the_bias(family: str, stage: int, tmp_path: Path) -> None:
    engine = engine_of(mixture(family), stage)
    train(engine, [micro_batch(0)])
    engine.save_checkpoint(tmp_path)
    resumed = engine_of(mixture(family), stage)
    resumed.load_checkpoint(tmp_path)
    for number in range(2):
        with engine.sharded.gathered(engine.sharded.parts), resumed.sharded.gathered(resumed.sharded.parts):
            assert values_of(resumed) == values_of(engine)
            assert number or values_of(engine) != values_of(mixture(family))
        for each in (engine, resumed):
            train(each, [micro_batch(1)])


def test_a_model_stays_as_it_is_where_nothing_is_asked() -> None:
    engine = start_engine(mixture("minimax_m2"), micro=2, stage=0, optimizer=sgd(0.1))
    before = values_of(engine)
    train(engine, [micro_batch(0)])
    assert values_of(engine) == before
    assert engine.expert_report() == {}


@pytest.mark.parametrize(
    ("family", "experts", "sections", "words"),
    [
        ("llama", {"bias_update_rate": 0.1}, {}, "experts.bias_update_rate is set, but no module"),
        ("qwen3_moe", {"bias_update_rate": 0.1}, {}, "no router has a selection bias"),
        ("qwen3_moe", {"auxiliary_loss": "global"}, {}, "output_router_logits = True"),
        ("minimax_m2", {"bias_update_rate": -1}, {}, "bias_update_rate"),
        ("deepseek_v3", {"auxiliary_loss": "global"}, {}, "no forward of"),
        ("qwen3_moe", {"auxiliary_loss": "global"}, {"mesh": {"pipeline": 2}}, "of its own layers only"),
        ("afmoe", {"bias_update_rate": 0.1}, {"bf16": True}, "keep_in_fp32_modules"),
    ],
)
def test_what_a_model_does_not_have_is_refused(
    family: str, experts: dict[str, Any], sections: dict[str, Any], words: str
) -> None:
    model = mixture(family, torch.float32)
    with pytest.raises(ValueError, match=words):
        start_engine(model, micro=2, stage=0, optimizer=sgd(0.1), experts=experts, **sections)


def test_a_copy_of_a_model_computes_by_itself_and_is_not_counted() -> None:
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    experts = {"bias_update_rate": RATE, "z_loss": 0.1, "auxiliary_loss": "global"}
    engine = engine_of(mixture("minimax_m2", **options), experts=experts)
    twin = copy.deepcopy(engine.module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    loss = twin(**micro_batch(0)).loss
    loss.backward()
    assert loss.item() == pytest.approx(mixture("minimax_m2", **options).apply(zero)(**micro_batch(0)).loss.item())
    assert all(p.grad is None for p in engine.module.parameters())
    engine.backward(engine(**micro_batch(0)).loss)
    engine.step()
    assert all(sum(layer.load) == pytest.approx(EXPERTS) for layer in engine.expert_report().values())


def zero(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters(recurse=False):
            parameter.zero_()


class ListedLayer(nn.Module):
    """A list of experts behind a linear router, in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, EXPERTS, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.gate(x).softmax(-1).topk(TOP_K)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(index == number)
            total = total.index_add(0, rows, expert(x[rows]) * weights[rows, places, None])
        return x + total


@pytest.mark.parametrize("checkpointed", [False, True])
@on_ranks(2)
def test_rows_of_listed_experts_are_counted_once(checkpointed: bool) -> None:
    """Where the block runs twice and its experts compute for the other rank, too."""
    loads = []
    for size in (1, 2):
        torch.manual_seed(0)
        model = nn.Sequential(*(ListedLayer() for _ in range(LAYERS)))
        options = {"activation_checkpointing": {"enabled": True, "targets": ["ListedLayer"]}} if checkpointed else {}
        engine = engine_of(model, experts={"report_load": True}, mesh={"expert": size}, **options)
        rows = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(engine.data_rank))
        for each in rows.unbind():
            engine.backward(engine(each).square().mean())
            engine.step()
        assert engine._state.balance._agreed.sum(1).tolist() == [2 * 6 * TOP_K] * LAYERS
        loads.append(engine.expert_report())
    assert loads[0] == loads[1]


class Masked(nn.Sequential):
    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return super().forward(x)


def test_padding_that_nobody_tells_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(Masked(ListedLayer()), experts={"report_load": True})
    with caplog.at_level("WARNING", logger="zeromesh"):
        for _ in range(2):
            engine(torch.randn(2, 8), attention_mask=torch.ones(2, 1))
    assert caplog.text.count("padding counts as tokens") == 1


# Losses.

Z_LOSS = 0.05


def with_z_loss(model: Any) -> Any:
    """Return a function of a batch: the model's loss, plus the z-loss of ST-MoE of each router, in plain torch."""
    logits: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            module.register_forward_hook(lambda module, args, output: logits.append(output[0]))

    def loss(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits.clear()
        total = model(**batch).loss
        present = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).view(-1).bool()
        return total + sum(Z_LOSS * each[present].logsumexp(-1).square().mean() for each in logits)

    return loss


def plain_step(model: Any, loss_of: Any, batches: list[dict[str, torch.Tensor]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        (loss_of(batch) / len(batches)).backward()
    optimizer.step()


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        (1, {"accumulation": 2}),
        (2, {"stage": 3, "accumulation": 2, "activation_checkpointing": {"enabled": True}}),
        pytest.param(2, {"mesh": {"tensor": 2}, "accumulation": 2}, marks=pytest.mark.full),
        pytest.param(2, {"mesh": {"expert": 2}, "stage": 3, "accumulation": 2}, marks=pytest.mark.full),
        pytest.param(2, {"mesh": {"context": 2}, "accumulation": 2}, marks=pytest.mark.full),
        pytest.param(2, {"mesh": {"pipeline": 2}, "accumulation": 2}, marks=pytest.mark.full),
        pytest.param(
            2, {"mesh": {"pipeline": 2}, "accumulation": 2, "pipeline": {"recompute": True}}, marks=pytest.mark.full
        ),
    ],
)
@on_ranks("ranks")
def test_z_loss_changes_gradients_as_if_it_were_a_part_of_the_loss(ranks: int, sections: dict[str, Any]) -> None:
    plain = mixture("minimax_m2")
    engine = engine_of(mixture("minimax_m2"), **{"experts": {"z_loss": Z_LOSS, "report_load": True}} | sections)
    batches = [[micro_batch(10 * r + m, padding=m + 1) for m in range(2)] for r in range(engine.data_size)]
    if engine.mesh.sizes["context"] > 1:
        batches = [[without_mask(micro_batch(m, padding=0)) for m in range(2)]]
    before = {name: value.clone() for name, value in plain.named_parameters()}
    plain_step(plain, with_z_loss(plain), [batch for each in batches for batch in each])
    if engine.pipelined is not None:
        engine.train_batch(iter(batches[engine.data_rank]))
    else:
        train(engine, batches[engine.data_rank])
    tolerance = 1e-7 if engine.mesh.sizes["tensor"] > 1 else 1e-9  # the model's router rounds to fp32 what was summed
    if engine.pipelined is None:
        result, expected = whole_parameters(engine.module), dict(plain.named_parameters())
    else:
        result, expected = engine.gathered_state_dict(), plain.state_dict()
    assert_close(result, {name: expected[name] for name in result}, tolerance, tolerance)
    assert all(load.z_loss is not None for load in engine.expert_report().values())
    gate = "model.layers.0.mlp.gate.weight"
    assert not torch.equal(before[gate], dict(plain.named_parameters())[gate])


@on_ranks(2)
def test_the_models_auxiliary_loss_is_the_mean_over_micro_batches() -> None:
    plain = mixture("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5)
    engine = engine_of(mixture("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.5), 3, experts={})
    batches = [micro_batch(rank) for rank in range(2)]
    plain_step(plain, lambda batch: plain(**batch).loss, batches)
    train(engine, [batches[engine.data_rank]])
    assert_close(whole_parameters(engine.module), dict(plain.named_parameters()), 1e-9, 1e-9)


def joined(batches: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


@pytest.mark.parametrize(
    "sections",
    [
        {"stage": 0},
        {"stage": 3, "activation_checkpointing": {"enabled": True}},
        pytest.param({"mesh": {"context": 2}}, marks=pytest.mark.full),
        pytest.param({"mesh": {"tensor": 2}}, marks=pytest.mark.full),
        pytest.param({"mesh": {"expert": 2}, "stage": 3}, marks=pytest.mark.full),
    ],
    ids=str,
)
@on_ranks(2)
def test_the_global_auxiliary_loss_is_that_of_one_process(sections: dict[str, Any]) -> None:
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    plain = mixture("qwen3_moe", torch.float32, **options)
    engine = engine_of(
        mixture("qwen3_moe", torch.float32, **options), **{"experts": {"auxiliary_loss": "global"}} | sections
    )
    # As many labels on each rank, so that the mean over ranks is that over tokens.
    batches = [micro_batch(rank, padding=3) for rank in range(engine.data_size)]
    if engine.mesh.sizes["context"] > 1:
        batches = [without_mask(micro_batch(0, padding=0))]
    expected = mixture("qwen3_moe", torch.float32, **options)(**joined(batches)).loss.item()
    plain_step(plain, lambda batch: plain(**batch).loss, [joined(batches)])
    assert train(engine, [batches[engine.data_rank]]) == pytest.approx(expected, rel=1e-6)
    assert_close(whole_parameters(engine.module), dict(plain.named_parameters()), 2e-6, 2e-6)
    engine.eval()
    if engine.data_rank == 0 and engine.config.zero_optimization.stage == 0 and engine.data_size == 2:
        with torch.no_grad():  # one rank alone may evaluate
            engine(**batches[0])


@on_ranks(2)
def test_fractions_of_tokens_are_those_of_the_micro_batches_so_far() -> None:
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import load_balancing_loss_func

    mesh = Mesh({"data": 2}, torch.device("cpu"))
    group = mesh.group("world")
    loss = GlobalAuxiliaryLoss(group, mesh.group("context"), Listener([], print, print, 0.0, float))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 2, 2, 6, EXPERTS, generator=generator, dtype=torch.float64)  # micro-batch, rank, layer
    counts = torch.zeros(EXPERTS, dtype=torch.float64)
    for number, each in enumerate(logits):
        mine = loss.loss(load_balancing_loss_func, True, count(), tuple(each[group.rank]), EXPERTS, TOP_K)
        mean = group.exchange(mine.view(1)).mean()
        probabilities = each.softmax(-1).view(-1, EXPERTS)
        counts += torch.bincount(probabilities.topk(TOP_K).indices.view(-1), minlength=EXPERTS)
        fractions = counts / (len(probabilities) * (number + 1))
        torch.testing.assert_close(mean, EXPERTS * (fractions * probabilities.mean(0)).sum(), rtol=1e-12, atol=0)
        if number == 0:  # one micro-batch: the model's own function, of all tokens
            whole = load_balancing_loss_func(tuple(torch.cat(list(each), 1)), EXPERTS, TOP_K)
            torch.testing.assert_close(mean, whole.double(), rtol=1e-6, atol=0)  # which rounds to fp32


def test_the_global_loss_leaves_the_module_of_the_model_as_it_is() -> None:
    """Another model of the class, in this forward or in another thread, computes its own loss."""
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    options = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    engine = engine_of(mixture("qwen3_moe", torch.float32, **options), experts={"auxiliary_loss": "global"})
    other, before, found = mixture("qwen3_moe", torch.float32, **options), getattr(modeling_qwen3_moe, LOSS), []
    expected = other(**micro_batch(0)).loss.item()

    def look(*_: Any) -> None:
        found.append((getattr(modeling_qwen3_moe, LOSS), other(**micro_batch(0)).loss.item()))

    engine.module.model.layers[0].register_forward_hook(look)
    engine(**micro_batch(1))
    assert engine._state.balance.auxiliary._sums
    assert found == [(before, expected)]


def test_a_replaced_forward_has_no_global_loss() -> None:
    model = mixture("qwen3_moe", torch.float32, output_router_logits=True)
    model.forward = partial(type(model).forward, model)
    with pytest.raises(ValueError, match="was replaced by another function"):
        engine_of(model, experts={"auxiliary_loss": "global"})


@pytest.mark.full
def test_two_auxiliary_losses_of_a_forward_are_apart() -> None:
    """An encoder and its decoder have a loss each, as in one process."""
    from transformers import AutoConfig, AutoModelForSeq2SeqLM

    sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
    sizes |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"d_model": 16, "vocab_size": 64, "num_experts": EXPERTS, "expert_capacity": 64, "dropout": 0.0}
    rates = dict.fromkeys(("attention_dropout", "activation_dropout", "moe_token_dropout"), 0.0)
    rates |= {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0, "router_aux_loss_coef": 0.5}
    config = AutoConfig.for_model("nllb-moe", output_router_logits=True, **sizes, **rates)
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(config)
    tokens = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": tokens, "labels": tokens[:, :4].contiguous()}
    expected = copy.deepcopy(model).train()(**batch).loss.item()
    engine = engine_of(model, experts={"auxiliary_loss": "global"})
    assert engine(**batch).loss.item() == pytest.approx(expected, rel=1e-6)
    assert len(engine._state.balance.auxiliary._sums) == 2


def test_a_part_of_the_model_is_counted_as_it_is_called() -> None:
    """Evaluation that does not call the whole model is not counted, training is."""
    engine = engine_of(mixture("minimax_m2"))
    train(engine, [micro_batch(0)])
    inner, batch = engine.module.model, micro_batch(1)
    tokens = batch["input_ids"]
    engine.eval()
    inner(input_ids=tokens)
    engine.train()
    with torch.no_grad():
        inner(input_ids=tokens)
    assert not engine._state.balance._sums.any()
    engine.backward(engine.module.lm_head(inner(input_ids=tokens).last_hidden_state).square().mean())
    assert (engine._state.balance._sums.sum(1) == tokens.numel() * TOP_K).all()


def test_a_router_that_returns_probabilities_is_refused() -> None:
    options = {"output_router_logits": True}
    engine = engine_of(mixture("qwen3_moe", torch.float32, **options), experts={"auxiliary_loss": "global"})
    assert "position_ids" in inspect.signature(engine.module.forward).parameters  # libraries ask for it

    def soften(module: nn.Module, args: Any, output: Any) -> Any:
        return output[0].softmax(-1), *output[1:]

    for layer in engine.module.model.layers:
        layer.mlp.gate.register_forward_hook(soften, prepend=True)
    with pytest.raises(RuntimeError, match="are probabilities"):
        engine(**micro_batch(0))


def by_engine(engine: Any, loss: torch.Tensor) -> None:
    engine.backward(loss)


def divided_by_the_caller(engine: Any, loss: torch.Tensor) -> None:
    engine.backward(loss / 2, scale_wrt_gas=False)


def by_torch(engine: Any, loss: torch.Tensor) -> None:
    loss.backward()


def scaled(engine: Any, loss: torch.Tensor) -> None:
    engine.scale(loss).backward()


def test_the_z_loss_is_scaled_as_the_loss_whoever_calls_the_backward() -> None:
    found = []
    for backward in (by_engine, divided_by_the_caller, by_torch, scaled):
        engine = engine_of(mixture("minimax_m2"), accumulation=2, experts={"z_loss": Z_LOSS})
        for number in range(2):
            backward(engine, engine(**micro_batch(number)).loss)
            engine.step()
        found.append(whole_parameters(engine.module))
    for other in found[1:]:
        assert_close(other, found[0], 1e-12, 1e-12)
