"""Checks of the ranks' hardware between updates: products, memory and links; what has become slow, and since when.

A rank or link is slow if it is far below its own earlier checks, or below the others of its kind now. A wrong product
shows a processor that corrupts data silently; see Dixit et al., "Silent Data Corruptions at Scale", 2021.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from zeromesh.base.kernels.measure import best_seconds, copy_speed, synchronize
from zeromesh.comm.agreement import agree_run
from zeromesh.comm.mesh import Mesh
from zeromesh.comm.stragglers import medians_of_others

SLOW = 0.5  # of what is usual
LEAST_CHECKS = 3  # of a thing, from which on its own median counts
KEPT = 50  # checks whose values are kept
REPEATS = 4
AGAIN = 3  # measurements of all that a slow one begins
PAUSE = 0.5  # seconds between them
LEAST_OTHERS = 3  # of a kind, with which a thing is compared: of two, one may be as unusual
WIDTH = {"cpu": 384, "cuda": 2048}  # of the matrices that are multiplied
MEMORY_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}
LINK_BYTES = 1 << 20
TAG = 2  # of the messages
WHAT = "check the hardware"

FLOPS, BYTES = "FLOP/s", "B/s"

_log = logging.getLogger("zeromesh")


@dataclass(frozen=True)
class Slow:
    """A thing that is slow, or computes wrongly."""

    name: str
    since: int  # the update of the first check that showed it
    value: float  # per second
    usual: float
    unit: str = ""

    def __str__(self) -> str:
        if not self.unit:
            return f"{self.name} is wrong since update {self.since}: replace its processor, and do not trust the run"
        share = self.value / self.usual
        return (
            f"{self.name} has {self.value / 1e9:.3g} G{self.unit}, {share:.2f} of the usual {self.usual / 1e9:.3g}, "
            f"since update {self.since}"
        )


class Health:
    """History of the checks of one engine's ranks; each rank has the same."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._world, self._device = mesh, mesh.group("world"), mesh.device
        self._past: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._since: dict[str, int] = {}
        self._task: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None  # factor, vector, product of all
        self._strides = _strides(mesh.node_of)

    def check(self, step: int) -> dict[str, Any]:
        """Check all ranks, and log what has changed on the first one. Collective.

        Returns:
            See ``Engine.check_health``.
        """
        rows = self._measure()
        for _ in range(AGAIN):
            if not [*self._slow(step, rows)]:
                break
            time.sleep(PAUSE)
            # What another program has held up for a moment is fast now. All ranks have the same numbers.
            rows = [[max(pair) for pair in zip(*both, strict=True)] for both in zip(rows, self._measure(), strict=True)]
        findings = [*self._slow(step, rows), *self._wrong(step, [bool(row[1]) for row in rows])]
        self._remember(findings, rows)
        return {
            "products": [row[0] for row in rows],
            "memory": [row[2] for row in rows],
            "links": [[before, after, speed] for before, after, speed in self._by_link(rows)],
            "slow": [vars(finding) for finding in findings],
        }

    def _measure(self) -> list[list[float]]:
        """Return for each rank the speed of a product, whether it was wrong, and the speeds of memory and links."""
        kind = "cuda" if self._device.type == "cuda" else "cpu"
        self._meet()
        product = agree_run(self._world, WHAT, lambda: self._product(WIDTH[kind]))
        memory = agree_run(self._world, WHAT, lambda: copy_speed(self._device, MEMORY_BYTES[kind], REPEATS))
        speeds = [*product, memory, *map(self._link, self._strides)]
        rows: list[list[float]] = self._world.exchange(torch.tensor(speeds, dtype=torch.float64, device="cpu")).tolist()
        return rows

    def _meet(self) -> None:
        """Let all ranks go on together."""
        self._world.exchange(torch.zeros(1, device="cpu"))

    def _by_link(self, rows: list[list[float]]) -> Iterator[tuple[int, int, float]]:
        for number, stride in enumerate(self._strides):
            for rank, row in enumerate(rows):
                yield (rank - stride) % len(rows), rank, row[3 + number]

    def _product(self, width: int) -> tuple[float, float]:
        """Return the speed of a product, and 1 if it is wrong, else 0."""
        # Of whole numbers so small that no sum is rounded, in TF32 neither: then every order has the same bits.
        if self._task is None:
            draw = torch.Generator().manual_seed(0)
            factor = torch.randint(8, (width, width), generator=draw, dtype=torch.float32, device="cpu")
            vector = torch.randint(1, 8, (width, 1), generator=draw, dtype=torch.float64, device="cpu")
            # Freivalds' test, exact in fp64: each wrong element changes the result for a vector without zeros.
            self._task = factor, vector, factor.double() @ (factor.double() @ vector)
        factor, vector, right = self._task
        matrix = factor.to(self._device)
        product = torch.empty_like(matrix)
        best = best_seconds(lambda: torch.mm(matrix, matrix, out=product), self._device, REPEATS)
        return 2.0 * width**3 / best, float(not torch.equal(product.cpu().double() @ vector, right))

    def _link(self, stride: int) -> float:
        """Return the bytes per second from the rank ``stride`` before this one, while all ranks send to the next."""
        rank, size = self._mesh.rank, self._mesh.world_size
        sent = torch.ones(LINK_BYTES, dtype=torch.uint8, device=self._device)
        got = torch.empty_like(sent)
        to, source, times = (rank + stride) % size, (rank - stride) % size, []
        for _ in range(1 + REPEATS):
            self._meet()  # or a slow link would hold up those behind it
            synchronize(self._device)
            began = time.perf_counter()
            if self._device.type == "cuda":  # nccl sends and receives together
                self._world.send_and_receive({to: sent}, {source: got}, TAG, "check").wait()
                synchronize(self._device)
                times.append(time.perf_counter() - began)
                continue
            receiving = self._world.send_and_receive({}, {source: got}, TAG, "check")
            sending = self._world.send_and_receive({to: sent}, {}, TAG, "check")
            receiving.wait()
            times.append(time.perf_counter() - began)
            sending.wait()
        return LINK_BYTES / min(times[1:])

    def _things(self, rows: list[list[float]]) -> Iterator[tuple[str, dict[str, float]]]:
        """Yield the speeds of what is compared with each other, by name, with their unit."""
        yield FLOPS, {f"rank {rank}'s processor": row[0] for rank, row in enumerate(rows)}
        yield BYTES, {f"rank {rank}'s memory": row[2] for rank, row in enumerate(rows)}
        node_of = self._mesh.node_of
        even = len({*Counter(node_of).values()}) == 1
        near: dict[str, float] = {}
        far: defaultdict[int, dict[str, float]] = defaultdict(dict)
        for number, (before, after, speed) in enumerate(self._by_link(rows)):
            name = f"the link from rank {before} to rank {after}"
            if node_of[before] == node_of[after]:
                near[name] = speed
            else:  # as many messages share each node's port, or the links are not compared with each other
                far[number // len(rows) if even else -number][name] = speed
        yield BYTES, near
        yield from ((BYTES, links) for links in far.values())

    def _slow(self, step: int, rows: list[list[float]]) -> Iterator[Slow]:
        """Yield what is below a part of its own median so far, or of that of its kind now."""
        for unit, things in self._things(rows):
            compared = len(things) > LEAST_OTHERS
            medians = medians_of_others([*things.values()]) if compared else [0.0] * len(things)
            for (name, value), of_others in zip(things.items(), medians, strict=True):
                past = self._past[name]
                usual = max(median(past) if len(past) >= LEAST_CHECKS else 0.0, of_others)
                if value < SLOW * usual:
                    yield Slow(name, self._since.get(name, step), value, usual, unit)

    def _wrong(self, step: int, wrong: list[bool]) -> Iterator[Slow]:
        for rank in (rank for rank, is_wrong in enumerate(wrong) if is_wrong):
            name = f"a product on rank {rank}"
            yield Slow(name, self._since.get(name, step), 0.0, 0.0)

    def _remember(self, findings: list[Slow], rows: list[list[float]]) -> None:
        """Keep the speeds of what is not slow, and log on the first rank what is new, and what is over."""
        names = {finding.name: finding.since for finding in findings}
        for _, things in self._things(rows):
            for name, value in things.items():
                if name not in names:  # or slow values would become usual
                    self._past[name].append(value)
        if self._mesh.rank == 0:
            for finding in findings:
                _log.warning("%s", finding)
            for name in self._since.keys() - names.keys():
                _log.info("%s is as usual again; it was not since update %d", name, self._since[name])
        self._since = names


def _strides(node_of: list[int]) -> list[int]:
    """Return the distances of the ranks that exchange messages: neighbours, and the same place on the next node."""
    size = len(node_of)
    if size == 1:
        return []
    per_node = max(Counter(node_of).values())
    return [1] if per_node in (1, size) else [1, per_node]
