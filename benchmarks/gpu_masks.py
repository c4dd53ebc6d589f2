"""Step of ``gpu_steps.py`` on attention that is spread over ranks: each mask beside torch's attention, and its time."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_train import Figures, Options
from zeromesh.base.kernels.measure import synchronize
from zeromesh.comm.mesh import Mesh
from zeromesh.parallel.context.document_order import order_of
from zeromesh.parallel.context.pair_rules import PairRule, RulePairs
from zeromesh.parallel.context.sequence_order import keep, reordered
from zeromesh.parallel.context.spread_attention import ring

# Largest difference of a result or a gradient, relative to 1 + the value that torch computes in fp32 with a mask of all
# pairs. In 16 bits the result, the probability and its gradient are rounded (2**-9 each), and the gradient of a key is
# a sum over the queries of several heads, whose errors have either sign.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 24 * 2**-8}
TAG = 8
WARMUP = 2
CAUSAL = "causal"  # for which torch has a kernel that needs no mask
SHARES = (
    0.3,
    0.05,
    0.22,
    0.02,
    0.13,
    0.08,
    0.15,
)  # lengths of packed documents over the sequence; the last has what is left


def rules_of(length: int, device: torch.device) -> dict[str, list[PairRule]]:
    """Return the rules of each mask, by name, for one sequence of so many tokens."""
    index = torch.arange(length, device=device)[None]
    ends = (torch.tensor(SHARES).cumsum(0) * length).long().to(device)
    document = torch.searchsorted(ends, index, right=True)
    padding = (index >= length * 3 // 4).long()
    causal = PairRule("causal", index, index, 0)
    return {
        CAUSAL: [causal],
        "window of 1/16": [causal, PairRule("window", index, index, high=length // 16 - 1)],
        "documents": [causal, PairRule("document", document, document, 0, 0)],
        "prefix of 1/4": [PairRule("causal", index, index * (index >= length // 4), 0)],
        "both directions, 1/4 padding": [PairRule("padding", 0 * padding, padding, 0, 0)],
    }


def masks(options: Options, job: Options) -> Figures:
    """Compare ring attention under each mask with torch's, which gets a mask of all pairs, and measure both.

    Options are ``length`` of the one sequence, ``heads``, ``key_heads``, ``width`` of a head and ``repeats`` of what is
    timed, in bf16. With one rank, the ring is the computation of blocks alone.
    """
    device, ranks, length = torch.device(job["device"]), job["ranks"], options["length"]
    group = Mesh({"context": ranks}, device).group("context")
    generator = torch.Generator().manual_seed(0)
    heads = [options[key] for key in ("heads", "key_heads", "key_heads", "heads")]
    operands = [torch.randn(1, count, length, options["width"], generator=generator).bfloat16() for count in heads]
    rows, wrong = [], []
    for name, rules in rules_of(length, device).items():
        documents = next((rule.of_queries for rule in rules if rule.name == "document"), None)
        order = order_of(documents, ranks) if ranks > 1 and documents is not None else None
        began = time.perf_counter()
        pairs = RulePairs(rules, ranks, length, order)
        synchronize(device)
        row: Figures = {"mask": name, "prepared": time.perf_counter() - began, "differences": {}}
        seen = torch.ones(1, 1, length, length, dtype=torch.bool, device=device)
        for rule in rules:
            seen &= rule.sees(rule.of_queries, rule.of_keys)[:, None]
        row["pairs"] = float(seen.double().mean())

        def part(x: Tensor, order: Tensor | None = order) -> Tensor:
            whole = x if order is None else reordered(x.transpose(1, 2), order).transpose(1, 2)
            return keep(whole, group.rank, ranks, 2)

        def spread(q: Tensor, k: Tensor, v: Tensor, pairs: RulePairs = pairs) -> Tensor:
            return ring(q, k, v, group, TAG, pairs=pairs)

        mask = None if name == CAUSAL else seen

        def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = mask) -> Tensor:
            # No kernel of CUDA takes both a mask and fewer key heads, and plain products would need all scores.
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)

        for dtype, tolerance in TOLERANCES.items():
            own = [x.to(device, dtype) for x in operands]
            expected = results(plain, [x.float() for x in own])
            difference = max(
                float(((mine.float() - part(whole)).abs() / (1 + part(whole).abs())).max())
                for mine, whole in zip(results(spread, [part(x) for x in own]), expected, strict=True)
            )
            row["differences"][str(dtype).removeprefix("torch.")] = [difference, tolerance]
            if not difference <= tolerance:
                wrong.append(f"{name} in {dtype}: {difference:.2g}, at most {tolerance:g}")
            del expected
        row["seconds"] = timed(spread, [part(x) for x in own], options["repeats"], device)
        row["whole"] = timed(plain, own, options["repeats"], device) if ranks == 1 else None
        rows.append(row)
    return {"rows": rows, "wrong": wrong}


def results(attend: Callable[[Tensor, Tensor, Tensor], Tensor], operands: list[Tensor]) -> list[Tensor]:
    """Return the result of attention and the gradients of queries, keys and values.

    Args:
        attend: attention of queries to keys and values.
        operands: these, and the gradient of the result.
    """
    *inputs, upstream = operands
    q, k, v = (x.detach().requires_grad_() for x in inputs)
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), upstream)]


def timed(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], operands: list[Tensor], repeats: int, device: torch.device
) -> float:
    """Return the median of the seconds of a forward and backward."""
    seconds = []
    for _ in range(WARMUP + repeats):
        synchronize(device)
        start = time.perf_counter()
        results(attend, operands)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return median(seconds[WARMUP:])
