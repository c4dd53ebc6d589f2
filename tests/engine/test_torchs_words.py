"""Lines of plain torch around the engine do what they do in torch, or say what to write instead."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import on_ranks, run_ranks

STEPS = 3
LIMIT = 0.01
BITS = 1e-12
"""Relative, float64: sums over ranks are added in another order."""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(3))
        self.unused = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x


def make() -> Model:
    torch.manual_seed(3)
    return Model()


def batch(number: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * number + rank))


class Torch:
    def __init__(self, ranks: int, accumulation: int = 1) -> None:
        self.model = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.sharded = False
        self._ranks, self._accumulation = ranks, accumulation

    def backward(self, number: int, scale: float = 1.0) -> None:
        for rank in range(self._ranks):
            loss = self.model(batch(number, rank)).square().mean() * scale
            (loss / (self._ranks * self._accumulation)).backward()

    def clip(self) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), LIMIT)

    def update(self) -> None:
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def refused(self, match: str, action: Callable[[], object]) -> None:
        """On sharded gradients only."""


class Mesh(Torch):
    def __init__(self, row: int, accumulation: int = 1, config: dict[str, Any] | None = None) -> None:
        settings = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": accumulation,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
            "scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
            "zero_optimization": {"stage": row},
            **(config or {}),
        }
        self.model = make()
        self.engine, self.optimizer, _, self.schedule = zeromesh.initialize(model=self.model, config=settings)
        self.sharded = row > 0 and self.engine.mesh.world_size > 1

    def backward(self, number: int, scale: float = 1.0) -> None:
        self.engine.backward(self.engine(batch(number, self.engine.data_rank)).square().mean() * scale)

    def clip(self) -> torch.Tensor:
        if not self.sharded:
            return super().clip()
        with pytest.raises(RuntimeError, match=r"sharded over \d ranks.*zeromesh.clip_grad_norm_"):
            super().clip()
        return zeromesh.clip_grad_norm_(self.model.parameters(), LIMIT)

    def update(self) -> None:
        self.engine.step()

    def parameters(self) -> list[torch.Tensor]:
        with zeromesh.zero.GatheredParameters(list(self.model.parameters())):
            return super().parameters()

    def refused(self, match: str, action: Callable[[], object]) -> None:
        if self.sharded:
            with pytest.raises(RuntimeError, match=match):
                action()


class Plainly(Mesh):  # the engine, with a loop in which nothing but the forward is the engine's
    def backward(self, number: int, scale: float = 1.0) -> None:
        loss = self.engine(batch(number, self.engine.data_rank)).square().mean() * scale
        self.engine.scale(loss).backward()

    def update(self) -> None:
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()


def drops(t: Torch, drop: Callable[[Torch], None]) -> None:
    for step in range(STEPS):
        t.backward(2 * step, scale=100.0)
        drop(t)
        t.backward(2 * step + 1)
        t.update()


def drops_one(t: Torch) -> None:
    for step in range(STEPS):
        t.backward(2 * step, scale=100.0)
        t.model.blocks[1].weight.grad = None
        del t.model.blocks[0].bias.grad
        t.backward(2 * step + 1)
        t.model.blocks[2].bias.grad = None
        t.update()


def drops_what_is_not_finite(t: Torch) -> None:
    t.backward(0, scale=float("nan"))
    t.model.zero_grad()
    t.backward(1)
    t.update()


def clips(t: Torch, norms: list[float]) -> None:
    for step in range(STEPS):
        t.backward(step)
        norms.append(float(t.clip()))
        t.update()


def assigns(t: Torch) -> None:
    for step in range(STEPS):
        if step != 1:
            t.backward(step)
        generator = torch.Generator().manual_seed(step)
        for parameter in t.model.blocks[1:].parameters():
            parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)
        t.update()


def changes_in_place(t: Torch) -> None:
    for step in range(STEPS):
        t.backward(step)
        if t.sharded:
            gradient = t.model.blocks[0].weight.grad
            assert gradient.shape == (6, 6)
            t.refused(r"gradient of blocks.0.weight is sharded over \d ranks", partial(gradient.mul_, 2))
            t.refused("safe_get_full_grad", gradient.norm)
            for parameter in t.model.blocks.parameters():
                parameter.grad = 0.5 * zeromesh.zero.safe_get_full_grad(parameter)
        else:
            assert t.model.unused.grad is None
            for parameter in t.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        t.update()


def accumulates(t: Torch) -> None:
    for step in range(4):
        t.backward(step)
        if step % 2:
            t.update()


DROPS: dict[str, Callable[[Torch], None]] = {
    "optimizer": lambda t: t.optimizer.zero_grad(),
    "model": lambda t: t.model.zero_grad(),
    "model, to zero": lambda t: t.model.zero_grad(set_to_none=False),
    "none": lambda t: [setattr(parameter, "grad", None) for parameter in t.model.parameters()],
}
PROGRAMS: dict[str, Callable[[Torch], None]] = {
    **{f"drops, {name}": partial(drops, drop=drop) for name, drop in DROPS.items()},
    "drops one": drops_one,
    "drops what is not finite": drops_what_is_not_finite,
    "assigns": assigns,
    "changes in place": changes_in_place,
}


def run(row: int, config: dict[str, Any] | None = None) -> dict[str, list[torch.Tensor]]:
    found = {}
    kinds: list[type[Mesh]] = [Mesh, Plainly]
    for kind in kinds:
        for name, program in PROGRAMS.items():
            try:
                mesh = kind(row, config=config)
                program(mesh)
                found[f"{kind.__name__}, {name}"] = mesh.parameters()
            except BaseException as error:
                error.add_note(f"{kind.__name__}, {name}, row {row}")
                raise
        norms: list[float] = []
        mesh = kind(row, config=config)
        clips(mesh, norms)
        found[f"{kind.__name__}, clips"] = [*mesh.parameters(), torch.tensor(norms, dtype=torch.float64)]
    mesh = Plainly(row, accumulation=2, config=config)
    accumulates(mesh)
    found["Plainly, accumulates"] = mesh.parameters()
    return found


def wanted(ranks: int) -> dict[str, list[torch.Tensor]]:
    found = {}
    for name, program in PROGRAMS.items():
        plain = Torch(ranks)
        program(plain)
        found[name] = plain.parameters()
    plain, norms = Torch(ranks), list[float]()
    clips(plain, norms)
    found["clips"] = [*plain.parameters(), torch.tensor(norms, dtype=torch.float64)]
    plain = Torch(ranks, 2)
    accumulates(plain)
    found["accumulates"] = plain.parameters()
    return found


def check(ranks: int, row: int, config: dict[str, Any] | None = None) -> None:
    expected = wanted(ranks)
    for rank, results in enumerate(run_ranks(run, ranks, row, config, timeout=120)):
        for name, values in results.items():
            for got, want in zip(values, expected[name.partition(", ")[2]], strict=True):
                torch.testing.assert_close(got, want, rtol=BITS, atol=BITS, msg=f"{name}, rank {rank}")


@pytest.mark.parametrize("row", [0, 3])
def test_torchs_lines_between_backward_and_step_count(row: int) -> None:
    check(2, row)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "row"), [(2, 1), (2, 2), *((ranks, row) for ranks in (1, 3) for row in range(4))])
def test_torchs_lines_count_on_other_numbers_of_ranks(ranks: int, row: int) -> None:
    check(ranks, row)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_torchs_lines_count_where_updates_begin_during_the_backward(ranks: int) -> None:
    offload = {"device": "cpu", "update_during_backward": 1}
    check(ranks, 2, {"zero_optimization": {"stage": 2, "offload_optimizer": offload}})


@pytest.mark.parametrize("row", [0, 1])
@on_ranks(1)
def test_a_gradient_assigned_between_micro_batches_leaves_the_others(row: int) -> None:
    engine = Mesh(row, accumulation=2)
    found = []
    for t, count in ((Torch(1, accumulation=2), lambda: None), (engine, engine.engine.step)):
        t.backward(0)
        count()
        t.model.blocks[1].weight.grad = torch.ones(6, 6, dtype=torch.float64)
        t.backward(1)
        t.update()
        found.append(t.parameters())
    [expected, found] = found
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=BITS, atol=BITS)


def assert_same(mesh: Mesh, plain: Torch) -> None:
    for got, want in zip(mesh.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=BITS, atol=BITS)


@pytest.mark.parametrize("row", [0, 3])
@on_ranks(2)
def test_hooks_that_come_later_see_gradients(row: int) -> None:
    mesh, seen = Mesh(row, accumulation=2), []

    def halve(parameter: torch.Tensor) -> None:
        seen.append(parameter)
        parameter.grad.mul_(0.5)

    mesh.engine.set_gradient_accumulation_boundary(True)
    for parameter in mesh.model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    for step in range(STEPS):
        mesh.backward(step, scale=2.0)  # of two micro-batches, so that the loss is divided by 2
        mesh.update()
    assert len(seen) == STEPS * 6
    plain = Torch(2)
    for step in range(STEPS):
        plain.backward(step, scale=0.5)
        plain.update()
    assert_same(mesh, plain)
    mesh.backward(0)
    with pytest.raises(RuntimeError, match="would see the gradient of one micro-batch"):
        mesh.backward(1)


@pytest.mark.parametrize("row", [0, 1, 3])
@on_ranks(2)
def test_another_optimizer_of_the_users_updates_or_is_refused(row: int) -> None:
    mesh = Mesh(row)
    other = torch.optim.SGD(mesh.model.parameters(), lr=0.1)
    mesh.backward(0)
    if row:
        with pytest.raises(RuntimeError, match=r"leave out this one, and its step\(\)"):
            other.step()
    else:
        other.step()
        other.zero_grad()
        mesh.backward(1)
        mesh.update()
    plain = Torch(2)
    second = torch.optim.SGD(plain.model.parameters(), lr=0.1)
    plain.backward(0)
    second.step()
    second.zero_grad()
    plain.backward(1)
    plain.update()
    if row == 0:
        assert_same(mesh, plain)


@pytest.mark.parametrize(
    ("row", "plainly"),
    [(0, True), *(pytest.param(*one, marks=pytest.mark.full) for one in ((0, False), (2, True), (2, False)))],
)
@on_ranks(2)
def test_one_loss_trains_several_engines(row: int, plainly: bool) -> None:
    parts = [Mesh(row, accumulation=2), Mesh(row, accumulation=2), Mesh(3 - row)]
    for step in range(4):
        x = batch(step, parts[0].engine.data_rank)
        loss = parts[2].engine(parts[0].engine(x) * parts[1].engine(x)).square().mean()
        if plainly:
            loss.backward()
        else:
            parts[1].engine.backward(loss)
        for part in parts:
            part.engine.step()
    results = [part.parameters() for part in parts]
    parts = [Torch(2), Torch(2), Torch(2)]
    for step in range(4):
        for rank in range(2):
            x = batch(step, rank)
            loss = parts[2].model(parts[0].model(x) * parts[1].model(x)).square().mean()
            (loss / 2).backward()
        parts[2].update()
        for part in parts[:2] if step % 2 else ():
            for parameter in part.model.blocks.parameters():
                parameter.grad.mul_(0.5)
            part.update()
    for found, part in zip(results, parts, strict=True):
        for got, want in zip(found, part.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=BITS, atol=BITS)


@pytest.mark.parametrize("row", [0, 3])
@on_ranks(2)
def test_a_scaled_loss_gives_the_engines_own_gradients_in_fp16(row: int) -> None:
    config = {"fp16": {"enabled": True, "initial_scale_power": 8}, "gradient_clipping": 0.01}
    results = []
    for kind in (Mesh, Plainly):
        mesh = kind(row, config=config)
        for step in range(STEPS):
            with pytest.raises(RuntimeError, match=r"call engine.scale\(loss\).backward\(\)"):
                mesh.engine(batch(step, mesh.engine.data_rank)).sum().backward()
            mesh.backward(step)
            mesh.update()
        results.append(mesh.parameters())
        assert mesh.engine.skipped_steps == 0
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("row", [0, 3])
@on_ranks(2)
def test_training_goes_on_after_a_backward_of_the_users_that_raised(row: int) -> None:
    mesh = Mesh(row)

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError("in the middle of the backward")

    for step in range(STEPS):
        inner = mesh.model.blocks[1].register_forward_hook(lambda *call: call[2].register_hook(fail) and None)
        with pytest.raises(ZeroDivisionError):
            mesh.engine(batch(9, mesh.engine.data_rank)).sum().backward()
        inner.remove()
        assert mesh.model.blocks[2].weight.grad is None
        mesh.engine(batch(step, mesh.engine.data_rank)).square().mean().backward()
        mesh.update()
    plain = Torch(2)
    for step in range(STEPS):
        plain.backward(step)
        plain.update()
    assert_same(mesh, plain)
