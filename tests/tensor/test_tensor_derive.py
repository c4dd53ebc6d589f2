"""What plans are derived for modules of many shapes, and where their weights are cut."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zeromesh.base.substitution import KNOWN
from zeromesh.parallel.tensor import split_model as apply
from zeromesh.parallel.tensor.derive import derive
from zeromesh.parallel.tensor.split_plan import PlanRule
from zeromesh.parallel.tensor.tensor_plan import parse, resolve

WIDTH, HEADS, KEYS, HEAD = 32, 4, 2, 16
QUERIES = HEADS * HEAD


class Layers(nn.Module):
    def __init__(self, layers: dict[str, tuple[int, int] | nn.Module], **attributes: Any) -> None:
        super().__init__()
        for name, one in layers.items():
            self.add_module(name, one if isinstance(one, nn.Module) else nn.Linear(*one))
        for name, value in attributes.items():
            setattr(self, name, value)


class Model(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeromesh.base.substitution.KNOWN", (*KNOWN, __name__))


def attention(**more: Any) -> Layers:
    layers = {"q_proj": (WIDTH, QUERIES), "k_proj": (WIDTH, KEYS * HEAD), "v_proj": (WIDTH, KEYS * HEAD)}
    return Layers(
        {**layers, "o_proj": (QUERIES, WIDTH), **more}, num_heads=HEADS, num_key_value_heads=KEYS, head_dim=HEAD
    )


def styles(*blocks: nn.Module, ranks: int = 1) -> dict[str, str]:
    return {name: rule.style for name, rule in derive(Model(*blocks), ranks)[0].items()}


APART = {"q_proj", "k_proj", "v_proj"}


def test_attention_is_split_by_heads() -> None:
    found = styles(attention(), attention())
    assert found == {**{f"blocks.*.{name}": "colwise" for name in APART}, "blocks.*.o_proj": "rowwise"}


@pytest.mark.parametrize("odd", ["norm of all heads", "few heads", "queries with gates"])
def test_attention_that_needs_all_heads_is_split_layer_by_layer(odd: str) -> None:
    more: dict[str, Any] = {"norm of all heads": {"q_norm": nn.LayerNorm(QUERIES)}}.get(odd, {})
    # As many as queries, keys and values together: no fused weight, since keys are apart.
    more |= {"q_proj": (WIDTH, 2 * QUERIES)} if odd == "queries with gates" else {}
    found = styles(attention(**more), ranks=8 if odd == "few heads" else 2)
    gathered = {f"blocks.0.{name}": "colwise_gather_output" for name in APART}
    assert found == {name.replace(".0.", ".*."): style for name, style in gathered.items()} | {
        "blocks.*.o_proj": "rowwise_split_input"
    }


def test_blocks_of_several_kinds_have_rules_of_their_own() -> None:
    found = styles(attention(), attention(q_norm=nn.LayerNorm(QUERIES)), attention())
    assert found["blocks.0.o_proj"] == found["blocks.2.o_proj"] == "rowwise"
    assert found["blocks.1.o_proj"] == "rowwise_split_input"
    assert "blocks.*.o_proj" not in found


def test_latent_attention() -> None:
    rotary, latent = 8, 24
    layers: dict[str, Any] = {
        "q_a_proj": (WIDTH, 12), "q_a_layernorm": nn.LayerNorm(12), "q_b_proj": (12, HEADS * 20),
        "kv_a_proj_with_mqa": (WIDTH, latent + rotary), "kv_a_layernorm": nn.LayerNorm(latent),
        "kv_b_proj": (latent, HEADS * 28), "o_proj": (HEADS * 16, WIDTH),
    }  # fmt: skip
    block = Layers(layers, num_heads=HEADS, head_dim=99, qk_rope_head_dim=rotary)
    assert derive(Model(block))[0] == {
        "blocks.*.q_b_proj": PlanRule("colwise", block=20),
        "blocks.*.kv_a_proj_with_mqa": PlanRule("mla_kv_a_proj"),
        "blocks.*.kv_b_proj": PlanRule("colwise", block=28),
        "blocks.*.o_proj": PlanRule("rowwise", block=16),
    }
    block.add_module("indexer", nn.Linear(WIDTH, 4))
    assert styles(block)["blocks.*.o_proj"] == "rowwise_split_input"


def test_a_sequence_of_layers_is_split_as_an_mlp_if_what_lies_between_works_on_each_entry() -> None:
    def mlp(between: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 80), between, nn.Dropout(), nn.Linear(80, WIDTH))

    assert styles(mlp(nn.GELU())) == {"blocks.*.0": "colwise", "blocks.*.3": "rowwise"}
    assert styles(mlp(nn.Softmax(-1))) == styles(mlp(nn.LayerNorm(80))) == {}


def test_gated_queries_of_a_plan_are_cut_by_heads() -> None:
    model = Model(attention(q_proj=(WIDTH, 2 * QUERIES)))
    plan = parse({**{f"blocks.*.{name}": "colwise" for name in APART}, "blocks.*.o_proj": "rowwise"})
    split = resolve(model, plan, {}, 0, 4).held["blocks.0.q_proj.weight"].split
    assert split.intervals == tuple(((start, start + 2 * HEAD),) for start in range(0, 2 * QUERIES, 2 * HEAD))


def test_only_masks_and_biases_of_attention_are_cut_by_heads_and_nothing_is_lost() -> None:
    class Attention(nn.Module):
        def forward(self, x: Any, attention_mask: Any, *more: Any, **others: Any) -> None: ...

    def cut(*given: torch.Tensor, **named: torch.Tensor) -> Any:
        return apply._cut_arguments(module, given, named, ["x", "attention_mask"], HEADS, group)

    module, group = Attention(), SimpleNamespace(rank=1, size=2)
    mask, images = torch.randn(2, HEADS, 3, 3), torch.randn(2, HEADS, 5, 5)
    args, kwargs = cut(images, mask, images, mask, position_bias=mask, images=images)
    assert [list(one.shape[:2]) for one in args] == [[2, HEADS], [2, HEADS // 2], [2, HEADS], [2, HEADS]]
    assert torch.equal(args[1], mask[:, HEADS // 2 :])
    assert torch.equal(kwargs["position_bias"], args[1])
    assert kwargs["images"] is images
    assert cut()[0] == ()
    assert len(cut(images)[0]) == 1


def test_a_sum_of_gradients_that_are_whole_is_refused() -> None:
    norm = nn.LayerNorm(HEAD)
    model = Model(Layers({"attention": attention(q_norm=norm), "norm": nn.LayerNorm(WIDTH)}))
    found = derive(model, 2)[0]
    shared = "replicated_with_grad_allreduce"
    resolve(model, parse({"blocks.*.attention.q_norm": shared}), found, 0, 2)
    with pytest.raises(ValueError, match=r"blocks.0.norm \(replicated_with_grad_allreduce\): no layer beside it"):
        resolve(model, parse({"blocks.*.norm": shared}), found, 0, 2)
