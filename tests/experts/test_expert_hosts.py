"""Experts over two hosts with a slow link: the numbers of one process, and the bytes that the choices of tokens say."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from hosts import session_hosts
from mixtures import CHOICES, EXPERTS, TARGETS, WIDTH, build_mixture, mixture_loss, token_rows
from run import sgd, start_engine, whole_parameters

RANKS, STEPS = 4, 3
LINK = "2mbit"
DOUBLE, NUMBER = 8, 4
"""Bytes of a value, and of an expert's number."""


def rows_of(step: int) -> Tensor:
    """Return the batch of a step, of which some ranks' tokens are all alike: experts of some ranks get none."""
    ids = token_rows(step, rows=2 * RANKS)
    return torch.where(torch.arange(2 * RANKS)[:, None] < 2 * step, ids[:1, :1], ids)


def train(expert: int) -> dict[str, Any]:
    engine = start_engine(
        build_mixture(), micro=2, optimizer=sgd(0.5), stage=1, mesh={"expert": expert}, experts={"targets": TARGETS}
    )
    losses, norms, sent = [], [], []
    for step in range(STEPS):
        engine.traffic_report(reset=True)
        loss = mixture_loss(engine, rows_of(step).chunk(RANKS)[engine.data_rank])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
        sent.append(engine.traffic_report()["all_to_all/expert"])
    found = {"losses": losses, "norms": norms, "sent": sent, "weights": whole_parameters(engine.module)}
    engine.destroy()
    return found


@cache
def plain() -> tuple[list[list[float]], list[float], dict[str, Tensor], list[list[Tensor]]]:
    """Train in one process; return losses by rank, norms, weights, and the choices of each layer, by step."""
    model = build_mixture()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    choices: list[list[Tensor]] = []
    for block in model.blocks:
        block.gate.register_forward_hook(lambda _, __, output: choices[-1].append(output[2]))
    losses, norms = [], []
    for step in range(STEPS):
        choices.append([])
        mixture_loss(model, rows_of(step)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), torch.inf)))
        with torch.no_grad():
            kept, choices[-1] = choices[-1], []
            losses.append([mixture_loss(model, ids).item() for ids in rows_of(step).chunk(RANKS)])
            choices[-1] = kept
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: value.detach() for name, value in model.named_parameters()}, choices


def bytes_of(choices: list[Tensor], expert: int, rank: int) -> tuple[int, int]:
    """Return the bytes of a step that a rank sends to all others, and to those of the other host."""
    total = across = 0
    first = rank - rank % expert
    group = range(first, first + expert)
    for index in choices:
        parts = index.chunk(RANKS)
        for peer in group:
            if peer == rank:
                continue
            places = [(peer - first, rank), (rank - first, peer)]
            # Tokens of this rank with an expert at the peer, and of the peer with one here
            out, come = (int((parts[home] // (EXPERTS // expert) == owner).any(dim=1).sum()) for owner, home in places)
            values = out * (2 * WIDTH + CHOICES) + come * (2 * WIDTH + CHOICES)
            sent = values * DOUBLE + out * CHOICES * NUMBER
            total += sent
            across += sent if peer // 2 != rank // 2 else 0
    return total, across


@pytest.mark.full
@pytest.mark.parametrize("expert", [2, 4])
def test_experts_on_two_hosts_give_the_numbers_of_one_process(expert: int) -> None:
    hosts = session_hosts()
    hosts.set_rate(LINK)
    try:
        by_rank = hosts.run(train, expert, timeout=120)
    finally:
        hosts.set_rate(None)
    losses, norms, weights, choices = plain()
    for rank, found in enumerate(by_rank):
        assert found["losses"] == pytest.approx([step[rank] for step in losses], abs=1e-9)
        assert found["norms"] == pytest.approx(norms, abs=1e-9)
        for name, value in found["weights"].items():
            assert float((value - weights[name]).abs().max()) <= 1e-9, name
        for step in range(STEPS):
            told = found["sent"][step]
            assert (told["bytes"], told["across_nodes"]) == bytes_of(choices[step], expert, rank)
    # Neighbours share the experts, so two ranks of a host send nothing over the link.
    assert (sum(found["sent"][0]["across_nodes"] for found in by_rank) > 0) == (expert == 4)
