"""What users do to the model behind the engine's back is taken, or refused with a reason; never lost in silence."""

import copy
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zeromesh
from harness import on_ranks, run_ranks
from run import Interruption, optimizer_of, start_engine, train_step
from zeromesh.shard.optim.bound import PartHook

RANKS = 2
WIDTH = 16
RATE = 0.1
Tensors = dict[str, torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def build(kind: type[nn.Module] = Net, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(3)
    return kind().to(dtype)


def start(row: int, model: nn.Module | None = None, **further: Any) -> zeromesh.Engine:
    return start_engine(
        build() if model is None else model, further, micro=1, stage=row, optimizer=optimizer_of("SGD", lr=RATE)
    )


def inputs(number: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank), dtype=torch.float64)


def train(engine: zeromesh.Engine, number: int) -> None:
    train_step(engine, engine(inputs(number, engine.data_rank)).square().mean())


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    for rank in range(RANKS):
        (model(inputs(number, rank)).square().mean() / RANKS).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)


def trained_plainly(updates: int, kind: type[nn.Module] = Net) -> Any:
    model = build(kind)
    optimizer = sgd(model)
    for number in range(updates):
        train_plain(model, optimizer, number)
    return model


def halve(model: nn.Module, how: str) -> None:
    for parameter in model.parameters():
        with torch.no_grad():
            if how == "in place":
                parameter.mul_(0.5)
            elif how == "new data":
                parameter.data = parameter.data * 0.5
            else:
                parameter.data.mul_(0.5)


@contextmanager
def whole(engine: zeromesh.Engine) -> Iterator[None]:
    members = list(engine.module.parameters())
    with zeromesh.zero.GatheredParameters(members, modifier_rank=0) if engine.sharded.sharded else nullcontext():
        yield


@pytest.mark.some(4)
@pytest.mark.parametrize("how", ["in place", "new data", "through data"])
@pytest.mark.parametrize("row", [0, 1, 2, 3])
@on_ranks(RANKS)
def test_writes_to_parameters_between_steps_are_trained_on(row: int, how: str) -> None:
    engine = start(row)
    found = []
    for number in range(4):
        train(engine, number)
        with whole(engine):
            halve(engine.module, how)
        found.append({name: value.clone() for name, value in engine.state_dict().items()})
    model = build()
    optimizer = sgd(model)
    for number in range(4):
        train_plain(model, optimizer, number)
        halve(model, how)
        assert_same(found[number], model.state_dict())


@pytest.mark.parametrize("row", [0, 1, 2])
@on_ranks(RANKS)
def test_writes_while_parameters_are_gathered_stay(row: int, tmp_path: Path) -> None:
    folder = str(tmp_path)
    engine = start(row)
    late = engine.optimizer.register_step_post_hook(lambda *rest: time.sleep(0.3 * engine.data_rank))
    train(engine, 0)  # the first rank is here long before the other sends it anything
    late.remove()
    named = dict(engine.module.named_parameters())
    for parameter in named.values():
        parameter.data = torch.full(parameter.shape, 0.25, dtype=parameter.dtype)
    masters = {name: zeromesh.zero.safe_get_full_fp32_param(p) for name, p in named.items()}
    engine.save_checkpoint(folder)
    with torch.no_grad():
        engine(inputs(1, 0))
        computed = {name: parameter.detach().clone() for name, parameter in named.items()}
    found = masters, computed
    for values in found:
        assert_same(values, {name: torch.full_like(value, 0.25) for name, value in build().state_dict().items()})


@pytest.mark.some(2)
@pytest.mark.parametrize("row", [0, 1, 2, 3])
@on_ranks(RANKS)
def test_masters_take_what_is_written_to_their_sixteen_bit_parameters(row: int) -> None:
    engine = start(row, build(dtype=torch.float32), bf16={"enabled": True})
    for how in ("in place", "new data"):
        before = engine.gathered_state_dict()
        with whole(engine):
            halve(engine.module, how)
        train_step(engine, engine(inputs(0, engine.data_rank)).sum() * 0)
        after = engine.gathered_state_dict()
        assert all(torch.equal(after[name], value / 2) for name, value in before.items())


@pytest.mark.some(2)
@pytest.mark.parametrize("row", [0, 1, 2, 3])
@on_ranks(RANKS)
def test_writing_what_was_there_leaves_the_masters_last_bits(row: int) -> None:
    """Every update moves the weight by less than 16 bits can tell, and then it is clamped, which changes nothing."""
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    nn.init.ones_(model.weight)
    engine = start(row, model, bf16={"enabled": True})
    for _ in range(8):
        train_step(engine, engine(torch.ones(1, WIDTH)).float().sum() * 1e-2)
        with whole(engine), torch.no_grad():
            engine.module.weight.clamp_(-2, 2)
    found = zeromesh.zero.safe_get_full_fp32_param(engine.module.weight).flatten().tolist()
    assert found == pytest.approx([1 - 8 * RATE * 1e-2] * WIDTH**2, abs=1e-5)


class Together(Net):
    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.ModuleList(copy.deepcopy(block).requires_grad_(False) for block in self.blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # All are asked for before the first is written to, so that most have left memory by then.
        moved, fast = ([p.data for p in part.parameters()] for part in (self.slow, self.blocks))
        torch._foreach_mul_(moved, 0.9)
        torch._foreach_add_(moved, fast, alpha=0.1)
        y = x
        for slow in self.slow:
            y = torch.tanh(slow(y))
        return super().forward(x) - y.mean(1, keepdim=True)


class Momentum(Net):
    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.ModuleList(copy.deepcopy(block).requires_grad_(False) for block in self.blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, (slow, block) in enumerate(zip(self.slow, self.blocks, strict=True)):
            for mine, other in zip(slow.parameters(), block.parameters(), strict=True):
                if index == 0:
                    mine.data = mine.data * 0.9 + other.data * 0.1
                elif index == 1:
                    mine.data.mul_(0.9).add_(other.data, alpha=0.1)
                else:
                    with torch.no_grad():
                        mine.mul_(0.9).add_(other, alpha=0.1)
        y = x
        for slow in self.slow:
            y = torch.tanh(slow(y))
        return super().forward(x) - y.mean(1, keepdim=True)


@pytest.mark.parametrize("kind", [Momentum, Together])
@pytest.mark.parametrize("row", [0, 1, 3])
@on_ranks(RANKS)
def test_frozen_parameters_that_a_forward_moves_keep_what_they_became(row: int, kind: type[Net]) -> None:
    engine = start(row, build(kind))
    for number in range(4):
        train(engine, number)
    found = engine.state_dict()
    model = build(kind)
    optimizer = sgd(model)
    for number in range(4):
        start_of_step = copy.deepcopy(model.slow.state_dict())
        for rank in range(RANKS):
            model.slow.load_state_dict(start_of_step)  # every rank moves its own, and by the same
            (model(inputs(number, rank)).square().mean() / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same(found, model.state_dict())


def copies(row: int, folder: str) -> list[Tensors]:
    engine = start(row)
    train(engine, 0)
    every = list(engine.module.parameters())
    with zeromesh.zero.GatheredParameters(every) if row == 3 else nullcontext():
        best = copy.deepcopy(engine.module)
        if engine.data_rank == 1:
            torch.save(engine.module, f"{folder}/model.pt")
    found = []
    if engine.data_rank == 1:  # on one rank alone: copies have nothing to do with the others
        read = torch.load(f"{folder}/model.pt", weights_only=False)
        for model in (best, read):
            model(inputs(1, 0)).square().mean().backward()
            sgd(model).step()
            found.append(copy.deepcopy(model.state_dict()))
            model.zero_grad()
    train(engine, 1)
    mean = start(row, best)  # another engine's
    train(mean, 2)
    return [*found, engine.gathered_state_dict(), mean.gathered_state_dict()]


@pytest.mark.some(2)
@pytest.mark.parametrize("row", [0, 1, 2, 3])
def test_copies_of_the_model_are_ordinary_models(row: int, tmp_path: Path) -> None:
    model = build()
    optimizer = sgd(model)
    train_plain(model, optimizer, 0)
    best = copy.deepcopy(model)
    train_plain(model, optimizer, 1)
    (first, mean), (second, third, *_) = run_ranks(copies, RANKS, row, str(tmp_path))
    assert_same(first, model.state_dict())
    before = copy.deepcopy(best)
    best(inputs(1, 0)).square().mean().backward()
    sgd(best).step()
    assert_same(second, best.state_dict())
    assert_same(third, best.state_dict())
    train_plain(before, sgd(before), 2)  # the first rank's copy
    assert_same(mean, before.state_dict())


class Seen(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen, self.flat = self.weight.detach(), self.weight.view(-1)
        return super().forward(x)


class Deep(nn.Module):
    """More blocks than there are slots; each keeps views of its weight, of which the model makes a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Seen(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x + sum(block.flat.square().mean() for block in self.blocks)


@pytest.mark.some(2)
@pytest.mark.parametrize("row", [0, 1, 2, 3])
@on_ranks(RANKS)
def test_views_of_parameters_that_a_model_keeps_are_good(row: int) -> None:
    engine = start(row, build(Deep))
    for number in range(3):
        train(engine, number)
    with torch.no_grad():
        engine(inputs(3, 0))
    model = trained_plainly(3, Deep)
    assert_same(engine.state_dict(), model.state_dict())
    for block, other in zip(engine.module.blocks, model.blocks, strict=True):
        torch.testing.assert_close(block.seen, other.weight.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("row", [0, 3])
@on_ranks(RANKS)
def test_saved_tensors_go_through_the_users_own_hooks(row: int) -> None:
    engine = start(row, build(Deep))
    count = 0

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return tensor.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = engine(inputs(0, engine.data_rank)).square().mean()
    train_step(engine, loss)
    assert_same(engine.state_dict(), trained_plainly(1, Deep).state_dict())
    assert count > 12


@pytest.mark.parametrize("row", [0, 1, 2])
@on_ranks(RANKS)
def test_changes_of_kind_are_refused_by_name(row: int) -> None:
    found = {}

    def widen(model: nn.Module) -> None:
        model.head.double()

    def replace(model: nn.Module) -> None:
        model.head.weight = nn.Parameter(torch.zeros(1, WIDTH))

    def unfreeze(model: nn.Module) -> None:
        model.head.weight.requires_grad_(True)

    def adapt(model: nn.Module) -> None:
        model.head.adapter = nn.Linear(WIDTH, 2)

    def group(model: nn.Module) -> None:
        engine.optimizer.add_param_group({"params": [model.head.weight]})

    for change in (widen, replace, unfreeze, adapt, group):
        model = build(dtype=torch.float32)
        model.head.weight.requires_grad_(change is not unfreeze)
        engine = start(row, model)
        with whole(engine) if change is widen and row == 3 else nullcontext():
            try:
                change(engine.module)
                train_step(engine, engine.module.blocks[0](torch.ones(1, WIDTH)).sum())
            except RuntimeError as error:
                found[change.__name__] = str(error)
                engine.zero_grad()
                if row == 3 and change is widen:
                    engine.module.head.float()
    assert "head.weight has become torch.float64" in found["widen"]
    assert "head.weight is no longer in the model" in found["replace"]
    assert "head.weight was frozen when initialize was called" in found["unfreeze"]
    assert "head.adapter.weight came into the model after initialize" in found["adapt"]
    assert "group 1 of the optimizer holds parameter head.weight of the model" in found["group"]


@pytest.mark.parametrize("row", [0, 1, 3])
@on_ranks(RANKS)
def test_gradients_from_before_initialize_do_not_count(row: int) -> None:
    model = build()
    (model(inputs(0, 0)).sum() * 100).backward()
    engine = start(row, model)
    train(engine, 0)
    model = build()
    for rank in range(RANKS):
        (model(inputs(0, rank)).square().mean() / RANKS).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert engine.get_global_grad_norm() == pytest.approx(expected, rel=1e-12)


@pytest.mark.some(3)
@pytest.mark.parametrize("bf16", [False, True], ids=["float64", "bf16"])
@pytest.mark.parametrize("row", [0, 1, 2, 3])
@on_ranks(RANKS)
def test_whole_states_are_taken_and_loaded_and_leave_nothing_behind(row: int, bf16: bool) -> None:
    dtype = torch.float32 if bf16 else torch.float64
    engine = start(row, build(dtype=dtype), bf16={"enabled": bf16})
    slots = sum(engine.memory_report()["slot"].values())
    with zeromesh.zero.GatheredParameters(list(engine.module.parameters())):
        views = {name: value.cpu() for name, value in engine.module.state_dict().items()}
    copies = {name: value.clone() for name, value in views.items()}
    state = engine.state_dict()
    train(engine, 0)
    kept = all(torch.equal(views[name], value) for name, value in copies.items()) if row == 3 else True
    same = state.keys() == copies.keys() and (row < 3 or all(torch.equal(state[n], v) for n, v in copies.items()))
    given = {name: torch.full_like(value, 1 / 3, dtype=dtype) for name, value in copies.items()}
    result = str(engine.load_state_dict(given))
    loaded = {name: value.clone() for name, value in engine.state_dict().items()}
    train_step(engine, engine(inputs(0, engine.data_rank)).sum() * 0)
    masters = [zeromesh.zero.safe_get_full_fp32_param(p) for p in engine.module.parameters()]
    found = {
        "views stay": kept,
        "state": same,
        "slots": sum(engine.memory_report()["slot"].values()) == slots,
        "result": result,
        "loaded": all(torch.equal(value, given[name].to(value.dtype)) for name, value in loaded.items()),
        "masters": all(bool((master == 1 / torch.tensor(3.0, dtype=dtype)).all()) for master in masters),
    }
    assert found.pop("result") == "<All keys matched successfully>"
    assert found == dict.fromkeys(found, True)


class Adapted(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(False)
        self.scale = nn.Parameter(torch.full((1,), 3.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale

    def first(self) -> torch.Tensor:
        return self.blocks[0].weight.t()


@on_ranks(RANKS)
def test_frozen_parameters_are_neither_lost_with_a_view_nor_kept_from_being_loaded(tmp_path: Path) -> None:
    folder = str(tmp_path)
    engine = start(3, build(Adapted))
    engine.save_checkpoint(folder, "before")
    start_state = engine.gathered_state_dict()
    with zeromesh.zero.GatheredParameters(list(engine.module.parameters())):
        kept = engine.module.state_dict()
    view = engine.first()
    again = view.clone()
    assert engine.get_parameter("head.bias") is engine.module.head.bias
    for value in kept.values():
        value.zero_()  # they are the caller's own by now
    train(engine, 0)
    state = engine.gathered_state_dict()
    frozen = [name for name in state if name.startswith("blocks") or name == "scale"]
    found = {"frozen values stay": all(torch.equal(state[name], start_state[name]) for name in frozen)}
    found["views of results stay"] = torch.equal(view, again)
    with zeromesh.zero.GatheredParameters(list(engine.module.parameters()), modifier_rank=0), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.fill_(7.0)
    engine(inputs(1, engine.data_rank))
    engine.load_checkpoint(folder, "before")
    state = engine.gathered_state_dict()
    found["all is loaded"] = all(torch.equal(state[name], value) for name, value in start_state.items())
    assert found == dict.fromkeys(found, True)


def raise_in_backward(engine: zeromesh.Engine) -> None:
    switch = torch.ones(1, requires_grad=True)

    def stop(gradient: torch.Tensor) -> None:
        raise Interruption

    switch.register_hook(stop)
    with pytest.raises(Interruption):
        engine.backward(engine(inputs(9, engine.data_rank)).square().mean() + (switch * 1).sum())


def accumulate(row: int, what: str) -> tuple[list[int], Tensors]:
    engine = start(row, gradient_accumulation_steps=1 if what == "size" else 2)
    updates = []

    def micro(number: int) -> None:
        train(engine, number)
        updates.append(engine.global_steps)

    if what in ("raises", "zero_grad"):
        micro(8)
        if what == "raises":
            raise_in_backward(engine)
        else:
            engine.zero_grad()
    elif what == "size":
        engine.set_train_batch_size(2 * RANKS)
        assert engine.config.gradient_accumulation_steps == 2
    elif what == "stops":
        with pytest.raises(StopIteration):
            engine.train_batch(iter([(inputs(8, engine.data_rank),)]))
    if what == "no_sync":
        with engine.no_sync():
            engine.backward(engine(inputs(0, engine.data_rank)).square().mean())
        micro(1)
    else:
        micro(0)
        micro(1)
    assert engine.micro_steps == len(updates) + (what == "no_sync")
    return updates, engine.gathered_state_dict()


@pytest.mark.some(4)
@pytest.mark.parametrize("what", ["raises", "zero_grad", "size", "stops", "no_sync"])
@pytest.mark.parametrize("row", [0, 3])
def test_accumulation_begins_anew_after_what_interrupts_it(row: int, what: str) -> None:
    model = build()
    optimizer = sgd(model)
    for number in (0, 1):
        for rank in range(RANKS):
            (model(inputs(number, rank)).square().mean() / RANKS / 2).backward()
    optimizer.step()
    updates, state = run_ranks(accumulate, RANKS, row, what)[0]
    assert updates[-1] == 1
    assert not any(updates[:-1])
    assert_same(state, model.state_dict())


@pytest.mark.parametrize("row", [0, 1, 2, 3])
@on_ranks(RANKS)
def test_gradients_of_an_update_that_the_optimizer_failed_are_not_in_the_next(row: int) -> None:
    engine = start(row)
    failures = [Interruption()]

    def fail(*rest: Any) -> None:
        if failures:
            raise failures.pop()

    engine.optimizer.register_step_pre_hook(fail)
    with pytest.raises(Interruption):
        train(engine, 9)
    train(engine, 0)
    found = engine.state_dict()
    model = trained_plainly(1)
    assert_same(found, model.state_dict())


class WithMethod(Net):
    def method(self, x: torch.Tensor) -> torch.Tensor:
        return self(x)


class Interrupted(nn.Linear):  # is interrupted, as by Ctrl-C, of which torch tells no hooks, when ``now`` is set
    now = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.now:
            raise KeyboardInterrupt
        return super().forward(x)


@pytest.mark.some(2)
@pytest.mark.parametrize("how", ["engine", "model", "method"])
@pytest.mark.parametrize("row", [0, 3])
@on_ranks(RANKS)
def test_an_interrupted_forward_leaves_no_traces(row: int, how: str) -> None:
    model = build(WithMethod)
    model.blocks[1].__class__ = Interrupted
    engine = start(row, model)
    train(engine, 0)
    steps = [len(engine.sharded.events.order.current.ended)]
    model.blocks[1].now = True
    compute = {"engine": engine, "model": model, "method": engine.method}[how]
    with pytest.raises(KeyboardInterrupt):
        compute(inputs(7, engine.data_rank))
    model.blocks[1].now = False
    for number in (1, 2):
        train(engine, number)
        steps.append(len(engine.sharded.events.order.current.ended))
    with pytest.raises(RuntimeError, match="not in memory outside the model's forward") if row == 3 else nullcontext():
        model.head.weight.sum()
    assert_same(engine.state_dict(), trained_plainly(3).state_dict())
    # What was called on the model itself is noticed in the next backward.
    assert len({*steps[1 + (how == "model") :], steps[0]}) == 1


@pytest.mark.parametrize("row", [0, 1, 2, 3])
@on_ranks(RANKS)
def test_all_ranks_compute_with_the_update_that_failed_late_on_one(row: int) -> None:
    engine = start(row)
    train(engine, 0)

    def fail(*rest: Any) -> None:
        if engine.data_rank == 1:
            raise Interruption

    hook = engine.optimizer.register_step_post_hook(fail)
    with pytest.raises(Interruption) if engine.data_rank == 1 else nullcontext():
        train(engine, 1)
    hook.remove()
    with torch.no_grad():
        found = engine(inputs(2, 0))
    model = trained_plainly(2)
    assert_same(engine.state_dict(), model.state_dict())
    torch.testing.assert_close(found, model(inputs(2, 0)).detach(), rtol=1e-12, atol=1e-12)


class Repeating(nn.Module):
    """Uses its blocks once or twice, with reentrant checkpoints: twice, gradients add up while others are reduced.

    It ends with the block that is registered first, and whose reduction is still under way then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        last, *repeated, before = self.blocks
        for _ in range(times):
            for block in repeated:
                x = checkpoint(block, x, use_reentrant=True)
        return last(before(x))


def sample(number: int, rank: int) -> torch.Tensor:  # its gradient is wanted, as else a reentrant checkpoint has none
    return inputs(number, rank).float().requires_grad_()


@pytest.mark.some(2)
@pytest.mark.parametrize("row", [0, 1, 2, 3])
@on_ranks(RANKS)
def test_narrow_gradients_that_are_added_up_in_one_backward_are_right(row: int) -> None:
    engine = start(row, build(Repeating, torch.float32), bf16={"enabled": True})
    engine.backward(engine(sample(0, engine.data_rank), 1).float().square().mean())
    engine.step()  # all ranks agree on the order of use, and nothing was added up so far
    engine.backward(engine(sample(1, engine.data_rank), 2).float().square().mean())
    found = {name: zeromesh.zero.safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
    model = build(Repeating, torch.float32)
    optimizer = sgd(model)
    for times in (1, 2):
        for rank in range(RANKS):
            (model(sample(times - 1, rank), times).square().mean() / RANKS).backward()
        if times == 1:
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert float((found[name] - parameter.grad).norm() / parameter.grad.norm()) < 0.02, name


class Skipping(Net):
    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            x = x if skip and index == 1 else torch.tanh(block(x))
        return self.head(x)


@pytest.mark.some(2)
@pytest.mark.parametrize("row", [0, 1, 2, 3])
@on_ranks(RANKS)
def test_ranks_may_differ_in_what_waits_for_its_reduction(row: int) -> None:
    engine = start(row, build(Skipping))
    engine.backward(engine(inputs(0, engine.data_rank)).square().mean())
    with engine.no_sync():
        engine.backward(engine(inputs(1, engine.data_rank), engine.data_rank == 1).square().mean())
    engine.step()
    found = engine.state_dict()
    model = build(Skipping)
    for rank in range(RANKS):
        (model(inputs(0, rank)).square().mean() / RANKS).backward()
        (model(inputs(1, rank), rank == 1).square().mean() / RANKS).backward()
    sgd(model).step()
    assert_same(found, model.state_dict())


@pytest.mark.parametrize("row", [0, 1, 2, 3])
@on_ranks(RANKS)
def test_the_loss_scale_is_taken_off_in_the_masters_dtype(row: int) -> None:
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    engine = start(row, model, fp16={"enabled": True}, data_types={"grad_accum_dtype": "fp16"})
    seen = []

    def look(optimizer: Any, *rest: Any) -> None:
        seen.extend(p.grad.abs().max().item() for group in optimizer.param_groups for p in group["params"])

    engine.optimizer.register_step_pre_hook(PartHook(look))
    train_step(engine, engine(torch.ones(1, WIDTH)).float().sum() * 3e-9)
    # A gradient is rounded to fp16 when it is computed, and when it is divided among the ranks or summed.
    assert max(seen) == pytest.approx(3e-9, rel=2 * 2**-11)
