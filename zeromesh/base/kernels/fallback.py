"""Kernels by torch and numpy, where there is no native library: several passes over memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from zeromesh.base.kernels.update_rules import Group


@torch.no_grad()
def update(
    rule: str, group: Group, number: int, gradient: torch.Tensor, factor: float, master: torch.Tensor,
    states: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    """Take one step in place; shapes and dtypes as in ``UpdatePiece``, or all in float64."""
    g = gradient.to(torch.promote_types(gradient.dtype, master.dtype)) * factor
    lr, decay, maximize = float(group["lr"]), float(group["weight_decay"]), bool(group.get("maximize"))
    steps = [torch.tensor(number - 1.0)]  # torch counts on
    if rule in ("adam", "adamw"):
        beta1, beta2 = map(float, group["betas"])
        adam(
            [master], [g], [states[0]], [states[1]], [], steps, fused=True, amsgrad=False, beta1=beta1, beta2=beta2,
            lr=lr, weight_decay=decay, eps=float(group["eps"]), maximize=maximize,
            decoupled_weight_decay=rule == "adamw",
        )  # fmt: skip
    elif rule == "adagrad":
        adagrad(
            [master], [g], [states[0]], steps, fused=True, lr=lr, weight_decay=decay, eps=float(group["eps"]),
            lr_decay=float(group["lr_decay"]), maximize=maximize,
        )  # fmt: skip
    elif rule == "sgd":
        buffers = [states[0] if states and number > 1 else None]
        sgd(
            [master], [g], buffers, foreach=False, lr=lr, weight_decay=decay, momentum=float(group["momentum"]),
            dampening=float(group["dampening"]), nesterov=bool(group["nesterov"]), maximize=maximize,
        )  # fmt: skip
        if states and number == 1 and buffers[0] is not None:
            states[0].copy_(buffers[0])  # torch has made the momentum of the first step itself
    else:
        assert rule == "lion", rule
        if maximize:
            g.neg_()
        weight, momentum_beta = map(float, group["betas"])
        direction = torch.lerp(g, states[0], weight).sign_()
        master.mul_(1 - lr * decay).add_(direction, alpha=-lr)
        states[0].lerp_(g, 1 - momentum_beta)


Numbers = np.ndarray[Any, np.dtype[np.uint64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_BLOCK, _PRIME, _LEFT = 1 << 20, np.uint64(0x9E3779B97F4A7C15), np.uint64(29)


def _mix(sums: Numbers, words: Numbers) -> Numbers:
    product: Numbers = (sums ^ words) * _PRIME
    return (product << _LEFT) | (product >> np.uint64(64 - 29))


def checksums(data: Bytes) -> Numbers:
    """Return the checksum of each MiB, as ``zeromesh_checksum`` in native.c computes it."""
    end = len(data) // _BLOCK * _BLOCK
    blocks = (data[:end].reshape(-1, _BLOCK), data[None, end:])
    results = [np.empty(0, np.uint64)]
    for block in blocks:
        if not block.size:
            continue
        count, size = block.shape
        lanes = np.arange(9, dtype=np.uint64)
        seeds = _mix(np.full(9, size, dtype=np.uint64), lanes)
        sums = np.repeat(seeds[None, 1:], count, 0)
        padded = np.pad(block, ((0, 0), (0, -size % 64))).view(np.uint64).reshape(count, -1, 8)
        for words in padded.transpose(1, 0, 2):
            sums = _mix(sums, words)
        total = np.full(count, seeds[0])
        for lane in range(8):
            total = _mix(total, sums[:, lane])
        results.append(_mix(total, total >> np.uint64(32)))
    return np.concatenate(results)
