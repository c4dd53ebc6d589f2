"""A layer of experts with capacities, as DeepSpeed's ``MoE``: an ordinary module, whose experts ranks may share.

Routing follows Lepikhin et al., "GShard", 2020 (two experts of each token) and Fedus et al., "Switch Transformers",
2021 (one); the residual layer is of Rajbhandari et al., "DeepSpeed-MoE", 2022. Shapes: S tokens of width M, E experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POLICIES = (None, "None", "Jitter", "RSample")
JITTER = 1e-2  # inputs of the gate are multiplied by 1 - JITTER to 1 + JITTER


class Routing(NamedTuple):
    """Decision of a gate."""

    loss: Tensor  # auxiliary, that balances the experts
    weights: Tensor  # (S, E), 0 for experts that a token does not go to
    chosen: Tensor  # (S, E), bool: to which experts a token goes
    counts: Tensor  # (E,), int64: tokens that chose each expert, before any were dropped


class TopKGate(nn.Module):
    """The gate of ``MoE``, which has its arguments. Its arithmetic is in fp32, or wider.

    Its capacities, and the tokens it drops, are those of the tokens that it is called with.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        ep_group: Any = None,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if noisy_gate_policy not in POLICIES:
            raise ValueError(f"noisy_gate_policy is {noisy_gate_policy!r}; it must be one of {POLICIES}")
        if not 1 <= k <= num_experts:
            raise ValueError(f"k is {k}; a token goes to 1 to {num_experts} of {num_experts} experts")
        if drop_tokens and min(capacity_factor, eval_capacity_factor) <= 0:
            raise ValueError(
                f"capacity_factor is {capacity_factor} and eval_capacity_factor {eval_capacity_factor}; they must be "
                "above 0, or set drop_tokens=False"
            )
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k = k
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity, self.drop_tokens, self.use_rts = min_capacity, drop_tokens, use_rts
        self.noisy_gate_policy, self.top2_2nd_expert_sampling = noisy_gate_policy, top2_2nd_expert_sampling

    def forward(self, tokens: Tensor, used_token: Tensor | None = None) -> Routing:
        """Route tokens of shape (S, M); ``used_token``, shape (S,), has 0 for those that no expert gets."""
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        wide = tokens.to(dtype)
        if self.noisy_gate_policy == "Jitter" and self.training:
            wide = wide * torch.empty_like(wide).uniform_(1 - JITTER, 1 + JITTER)
        with torch.autocast(tokens.device.type, enabled=False):
            logits = F.linear(wide, self.wg.weight.to(dtype))
        gates = logits.softmax(1)
        rule: Callable[..., Routing] = {1: self._top_one, 2: self._top_two}.get(self.k, self._top_k)
        return rule(logits, gates, used_token)

    def _top_one(self, logits: Tensor, gates: Tensor, used_token: Tensor | None) -> Routing:
        noisy = self.noisy_gate_policy == "RSample" and self.training
        chosen = _one_hot((logits + _gumbel(logits) if noisy else gates).argmax(1), gates)
        if used_token is not None:
            chosen = chosen * used_token[:, None].to(chosen.dtype)
        counts, loss = chosen.sum(0), (gates.mean(0) * chosen.to(gates.dtype).mean(0)).sum() * gates.shape[1]
        if len(gates) < self.min_capacity:
            raise ValueError(
                f"a layer of experts was called with {len(gates)} tokens, fewer than its min_capacity "
                f"{self.min_capacity}; call it with more, or set min_capacity to 0"
            )
        # Without drops the capacity is that of the fullest expert, which all tokens fit in.
        capacity = min(self._capacity(gates, 1) if self.drop_tokens else int(counts.max()), len(gates))
        # Those of the largest random numbers are kept, which does not prefer the first ones of a batch.
        order = chosen * torch.rand(chosen.shape, device=chosen.device) if self.use_rts else chosen
        chosen = chosen * torch.zeros_like(chosen).scatter_(0, order.topk(capacity, dim=0).indices, 1)
        return Routing(loss, gates * chosen, chosen.bool(), counts.detach())

    def _top_two(self, logits: Tensor, gates: Tensor, used_token: Tensor | None) -> Routing:
        first = _one_hot(gates.argmax(1), gates)
        if self.top2_2nd_expert_sampling:
            logits = logits + _gumbel(logits)
        second = _one_hot(logits.masked_fill(first.bool(), -torch.inf).argmax(1), gates)
        counts = (first + second).sum(0)
        loss = (gates.mean(0) * first.to(gates.dtype).mean(0)).mean() * gates.shape[1] ** 2
        if self.drop_tokens:
            capacity, places = self._capacity(gates, 2), (first.cumsum(0) - 1, second.cumsum(0) - 1 + first.sum(0))
            first, second = (mask * (place < capacity) for mask, place in zip((first, second), places, strict=True))
        return Routing(loss, *_normalised(gates, first + second), counts)

    def _top_k(self, logits: Tensor, gates: Tensor, used_token: Tensor | None) -> Routing:
        best, index = gates.topk(self.k, 1)
        chosen = torch.zeros_like(gates, dtype=torch.int64).scatter_(1, index, 1)
        loss = (gates.mean(0) * chosen.to(gates.dtype).mean(0)).mean() * gates.shape[1] ** 2 / self.k
        counts = chosen.sum(0)
        if self.drop_tokens:  # those of the smallest probabilities
            capacity = min(self._capacity(gates, self.k), len(gates))
            scores = torch.zeros_like(gates).scatter(1, index, best)
            chosen = chosen * torch.zeros_like(chosen).scatter_(0, scores.topk(capacity, dim=0).indices, 1)
        return Routing(loss, *_normalised(gates, chosen), counts)

    def _capacity(self, gates: Tensor, choices: int) -> int:
        """Return the tokens that an expert takes."""
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        even = len(gates) / gates.shape[1]
        # In fp32, as DeepSpeed multiplies: in fp64 10 x 1.1 would be 12 tokens.
        capacity = (torch.tensor(factor * choices, dtype=torch.float32, device="cpu") * even).ceil()
        return max(int(capacity), self.min_capacity)


def _one_hot(index: Tensor, gates: Tensor) -> Tensor:
    return F.one_hot(index, gates.shape[1])


def _gumbel(logits: Tensor) -> Tensor:
    zero = torch.zeros((), device=logits.device)
    return torch.distributions.Gumbel(zero, zero + 1).rsample(logits.shape).to(logits.dtype)


def _normalised(gates: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    weights = gates * chosen
    return weights / weights.sum(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps), chosen.bool()


class ExpertList(nn.Module):
    """Copies of an expert, and the loop over them."""

    def __init__(self, expert: nn.Module, count: int, group_name: str) -> None:
        super().__init__()
        self.deepspeed_experts = nn.ModuleList(copy.deepcopy(expert) for _ in range(count))
        for parameter in self.parameters():  # by which programs tell the parameters of experts
            vars(parameter).update(allreduce=False, group_name=group_name)

    def forward(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Return the weighted sums of the results; shape (S, M)."""
        output = torch.zeros_like(tokens)
        for number, expert in enumerate(self.deepspeed_experts):
            index = chosen[:, number].nonzero().flatten()
            result = expert(tokens[index])  # also without tokens: its gradients are zero then
            result = result[0] if isinstance(result, tuple) else result  # Megatron's return a bias behind it
            output.index_add_(0, index, result.to(tokens.dtype) * weights[index, number, None].to(tokens.dtype))
        return output


class ExpertLayer(nn.Module):
    """A gate and its experts: tokens of any shape (..., M) -> the same."""

    def __init__(self, gate: TopKGate, experts: ExpertList) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.l_aux: Tensor = torch.zeros(())
        self.exp_counts: Tensor = torch.zeros((), dtype=torch.int64)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> Tensor:
        """Return the output; ``l_aux`` and ``exp_counts`` are those of this call."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing = self.gate(tokens, None if used_token is None else used_token.reshape(-1))
        self.l_aux, self.exp_counts = routing.loss, routing.counts
        output: Tensor = self.experts(tokens, routing.weights, routing.chosen)
        return output.view(hidden_states.shape)


class MoE(nn.Module):
    """A mixture of experts, with the arguments, names of parameters and results of DeepSpeed's.

    Args:
        hidden_size: width M of inputs and outputs.
        expert: of which each expert begins as a copy: (rows, M) -> (rows, M).
        num_experts: experts of the layer.
        ep_size: ranks that share them; ``mesh.expert`` of the configuration, if that does not say it.
        k: experts of each token.
        capacity_factor: an expert takes this times the tokens that it would get if all got as many, in training.
        eval_capacity_factor: in evaluation.
        min_capacity: an expert takes at least so many.
        use_residual: True to add ``expert`` itself for all tokens, by learned shares.
        noisy_gate_policy: None, "Jitter" (of the gate's inputs), or "RSample" (of the choice where k is 1).
        drop_tokens: False to let experts take any number.
        use_rts: where k is 1, drop random tokens of a full expert, not the last ones.
        use_tutel: without effect.
        enable_expert_tensor_parallelism: without effect: each expert is whole, and tensor ranks share the rows.
        top2_2nd_expert_sampling: draw the second expert of a token by chance where k is 2.

    Raises:
        ValueError: ``ep_size`` does not divide the experts, or an argument is out of its range.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if ep_size < 1 or num_experts % ep_size:
            fitting = [size for size in range(1, num_experts + 1) if num_experts % size == 0]
            raise ValueError(
                f"ep_size is {ep_size}, which does not divide {num_experts} experts; it may be one of {fitting}"
            )
        self.use_residual, self.num_experts, self.ep_size = use_residual, num_experts, ep_size
        self.num_local_experts, self.expert_group_name = num_experts // ep_size, f"ep_size_{ep_size}"
        self.enable_expert_tensor_parallelism = enable_expert_tensor_parallelism
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling=top2_2nd_expert_sampling,
        )
        self.deepspeed_moe = ExpertLayer(gate, ExpertList(expert, num_experts, self.expert_group_name))
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Accept the call: ``initialize`` makes the groups of ranks."""

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output, the auxiliary loss and the tokens that chose each expert.

        Args:
            hidden_states: shape (..., M).
            used_token: where k is 1, shape (...): 0 for tokens that no expert gets.
        """
        output: Tensor = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            residual = self.mlp(hidden_states)
            residual = residual[0] if isinstance(residual, tuple) else residual
            shares = self.coefficient(hidden_states).softmax(-1)
            output = output * shares[..., :1] + residual * shares[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


def wanted_ranks(model: nn.Module) -> int:
    """Return the number of ranks that the layers of a model want their experts shared by; 1 if none says it.

    Raises:
        ValueError: they say several numbers.
    """
    sizes = sorted({module.ep_size for module in model.modules() if isinstance(module, MoE)} - {1})
    if len(sizes) > 1:
        raise ValueError(
            f"the model's MoE layers have the ep_size {' and '.join(map(str, sizes))}, but the same ranks share all "
            "experts: give these layers one ep_size"
        )
    return sizes[0] if sizes else 1
