"""DeepSpeed's layer of experts: its routing, its parameters, and its training on ranks that share the experts."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from zeromesh.deepspeed.moe import layer, utils
from zeromesh.deepspeed.utils import groups

import run
import zeromesh.deepspeed as deepspeed
from harness import on_ranks
from zeromesh.config.errors import ConfigError

WIDTH, EXPERTS, TOKENS = 8, 4, 12


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))


def mixture(**arguments: Any) -> Any:
    torch.manual_seed(1)
    arguments = {"num_experts": EXPERTS, "use_rts": False, "top2_2nd_expert_sampling": False} | arguments
    moe = layer.MoE(WIDTH, expert(), **arguments)
    for parameter in moe.parameters():
        nn.init.normal_(parameter, std=0.5)
    return moe.double()


def by_hand(moe: Any, x: Tensor, k: int, factor: float, minimum: int, drop: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the layer should, token by token."""
    gates = (x @ moe.deepspeed_moe.gate.wg.weight.T).softmax(1)
    ranking = gates.argsort(1, descending=True)[:, :k]
    capacity = max(math.ceil(len(x) / EXPERTS * factor * k - 1e-6), minimum) if drop else len(x)
    taken = {number: [] for number in range(EXPERTS)}
    counts = torch.bincount(ranking.flatten(), minlength=EXPERTS)
    for choice in range(k):
        for token in range(len(x)):
            taken[int(ranking[token, choice])].append(token)
    if k > 2:  # the largest probabilities stay
        taken = {number: sorted(tokens, key=lambda t: -gates[t, number].item()) for number, tokens in taken.items()}
    kept = torch.zeros_like(gates)
    for number, tokens in taken.items():
        kept[tokens[:capacity], number] = 1
    weights = gates * kept
    if k > 1:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-30)
    outputs = torch.stack([one(x) for one in moe.deepspeed_moe.experts.deepspeed_experts], 1)
    first = torch.zeros_like(gates).scatter_(1, ranking if k > 2 else ranking[:, :1], 1)
    loss = (gates.mean(0) * first.mean(0)).sum() * EXPERTS / (k if k > 2 else 1)
    return (weights[..., None] * outputs).sum(1), loss, counts


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize(
    ("factor", "minimum", "drop"), [(1.0, 1, True), (0.5, 2, True), (4.0, 0, True), (1.0, 0, False)]
)
def test_routing_drops_and_losses_are_those_of_the_rule(k: int, factor: float, minimum: int, drop: bool) -> None:
    moe = mixture(k=k, capacity_factor=factor, eval_capacity_factor=9.0, min_capacity=minimum, drop_tokens=drop)
    x = torch.randn(3, TOKENS // 3, WIDTH, dtype=torch.float64)
    output, loss, counts = moe(x)
    wanted = by_hand(moe, x.flatten(0, 1), k, factor, minimum, drop)
    if drop and k == 1 and factor < 4:
        # Which tokens of a full expert are dropped without random selection, torch's topk decides among equals.
        lost = (output.flatten(0, 1) == 0).all(1)
        capacity = max(math.ceil(TOKENS / EXPERTS * factor), minimum)
        assert int(lost.sum()) == int((counts - capacity).clamp(min=0).sum())
        torch.testing.assert_close(output.flatten(0, 1)[~lost], by_hand(moe, x.flatten(0, 1), k, 9, 0, False)[0][~lost])
    else:
        torch.testing.assert_close(output.flatten(0, 1), wanted[0])
    torch.testing.assert_close(loss, wanted[1])
    assert torch.equal(counts, wanted[2])
    # In evaluation nothing is dropped with this factor.
    torch.testing.assert_close(moe.eval()(x)[0].flatten(0, 1), by_hand(moe, x.flatten(0, 1), k, 9.0, 0, False)[0])


def test_random_selection_noise_and_unused_tokens() -> None:
    x = torch.randn(64, WIDTH, dtype=torch.float64)
    random = mixture(use_rts=True, capacity_factor=0.5)
    lost = [(random(x)[0] == 0).all(1) for _ in range(2)]
    assert lost[0].sum() == lost[1].sum()
    assert not torch.equal(*lost)
    for arguments in (
        {"noisy_gate_policy": "Jitter"},
        {"noisy_gate_policy": "RSample"},
        {"k": 2, "top2_2nd_expert_sampling": True},
    ):
        noisy = mixture(drop_tokens=False, **arguments)
        assert not torch.equal(noisy(x)[0], noisy(x)[0])
    noisy = mixture(drop_tokens=False, noisy_gate_policy="RSample").eval()
    torch.testing.assert_close(noisy(x)[0], noisy(x)[0])
    moe, used = mixture(drop_tokens=False), torch.arange(64) % 2
    output, _, counts = moe(x, used)
    assert (output[used == 0] == 0).all()
    assert int(counts.sum()) == 32


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"ep_size": 3}, r"does not divide 4 experts; it may be one of \[1, 2, 4\]"),
        ({"k": 5}, "a token goes to 1 to 4 of 4 experts"),
        ({"capacity_factor": 0.0}, "above 0, or set drop_tokens=False"),
        ({"noisy_gate_policy": "Gauss"}, "must be one of"),
    ],
)
def test_bad_arguments_say_what_is_right(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        mixture(**arguments)
    with pytest.raises(ValueError, match="3 tokens, fewer than its min_capacity 4"):
        mixture()(torch.randn(3, WIDTH, dtype=torch.float64))


def test_parameters_of_experts_get_groups_of_their_own() -> None:
    moe = mixture(ep_size=2, use_residual=True)
    assert utils.has_moe_layers(nn.Sequential(moe)) == (True, EXPERTS)
    assert utils.has_moe_layers(expert()) == (False, 0)
    shared, experts = utils.split_params_into_shared_and_expert_params(moe.parameters())
    assert len(experts) == 4 * EXPERTS
    assert all(map(utils.is_moe_param, experts))
    assert not any(map(utils.is_moe_param, shared))
    group = {"params": list(moe.parameters()), "name": "all", "lr": 0.1}
    first, *others = utils.split_params_into_different_moe_groups_for_optimizer(group, max_group_size=300)
    assert list(map(id, first["params"])) == list(map(id, shared))
    assert [id(p) for g in others for p in g["params"]] == list(map(id, experts))
    assert {(g["name"], g["moe"], g["lr"]) for g in others} == {("ep_size_2", True, 0.1)}
    assert max(sum(p.numel() for p in g["params"]) for g in others) <= 300
    assert utils.is_moe_param_group(others[0])
    assert utils.configure_moe_param_groups([first, *others]) == [first, *others]


class Model(nn.Module):
    def __init__(self, ep_size: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            layer.MoE(WIDTH, expert(), EXPERTS, ep_size, k, use_residual=k == 2, drop_tokens=k < 3) for k in (1, 2, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x, auxiliary = self.first(x), torch.zeros((), dtype=x.dtype)
        for moe in self.layers:
            y, loss, _ = moe(x)
            x, auxiliary = x + y, auxiliary + loss
        return x.square().mean() + 0.01 * auxiliary


def built(ep_size: int = 1) -> Model:
    torch.manual_seed(2)
    model = Model(ep_size)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double()


def batch(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, 6, WIDTH, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in (1, 2)), 3])
@on_ranks(2)
def test_training_with_ep_size_is_that_of_one_process(stage: int) -> None:
    plain, model = built(), built(ep_size=2)
    parameters = utils.split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "all"}
    )
    config = run.configuration(run.adamw(0.01, weight_decay=0.01), stage, micro=2, clipping=0.5)
    engine = deepspeed.initialize(model=model, model_parameters=parameters, config=config)[0]
    assert engine.mesh.sizes["expert"] == 2
    assert engine.has_moe_layers
    assert engine.num_experts == [EXPERTS] * 3
    assert groups._get_expert_parallel_world_size("ep_size_2") == groups._get_max_expert_size() == 2
    assert groups._get_expert_parallel_rank("ep_size_2") == dist.get_rank()
    assert (
        groups._get_expert_data_parallel_world_size("ep_size_2") == groups._get_expert_model_parallel_world_size() == 1
    )
    assert list(groups._get_expert_parallel_group_dict()) == [groups._get_max_expert_size_name()] == ["ep_size_2"]
    with pytest.raises(ValueError, match="there are no groups 'ep_size_4' of experts, but 'ep_size_2'"):
        groups._get_expert_parallel_group("ep_size_4")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.01)
    losses, expected = [], []
    for step in range(3):
        torch.manual_seed(step)
        losses.append(run.train_step(engine, engine(batch(step, dist.get_rank()))))
        optimizer.zero_grad()
        for rank in range(2):
            torch.manual_seed(step)
            loss = plain(batch(step, rank))
            (loss / 2).backward()
            expected += [loss.item()] if rank == dist.get_rank() else []
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(run.whole_parameters(model), dict(plain.named_parameters()), rtol=1e-9, atol=1e-9)


@on_ranks(2)
def test_sizes_that_contradict_each_other_are_refused() -> None:
    config = run.configuration(run.adamw(0.01), 0, micro=2)
    with pytest.raises(ValueError, match="have ep_size 2, and mesh.expert is 1; leave one of them out"):
        deepspeed.initialize(model=built(2), config=config | {"mesh": {"expert": 1}})
    model = nn.Sequential(built(2), built(4))
    with pytest.raises(ValueError, match="have the ep_size 2 and 4"):
        deepspeed.initialize(model=model, config=config)
    with pytest.raises(ConfigError, match="mesh.expert is 4, which does not divide the 2 ranks"):
        deepspeed.initialize(model=built(4), config=config)
