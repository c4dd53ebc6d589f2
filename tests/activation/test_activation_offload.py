"""Inputs of checkpointed blocks that wait for the backward in host memory, or in parts over the tensor axis."""

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zeromesh
from harness import RankFailure, run_ranks
from run import sgd, start_engine, train_on_tokens, train_step
from test_pipeline import CHUNKS, train
from test_tensor_rules import batch, config, gpt2, llama
from zeromesh.base import containers
from zeromesh.comm.collectives import Group
from zeromesh.parallel.activation.activation_store import ActivationStore, HostPool, KeptTensor
from zeromesh.parallel.activation.checkpoint import checkpoint_modules

LIMIT = 120
CPU = torch.device("cpu")
WIDTH, ROWS = 64, 32
INPUT = ROWS * WIDTH * 4
"""Bytes of what a block is given."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor, masks: Any = None, *, scale: Any = None) -> Tensor:
        inner = torch.tanh(self.up(x))
        if scale is not None:
            inner = inner * scale["by"] * scale["times"] + masks[0].to(x.dtype)[:, None]
        return x + self.dropout(self.down(inner))


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scale = {"by": torch.full((ROWS, 96), 1.5), "times": 2}
        for block in self.blocks:
            x = block(x, (torch.arange(ROWS), None), scale=scale)
        return x.square().mean()


def make(store: ActivationStore | None, blocks: int = 4) -> Net:
    torch.manual_seed(0)
    model = Net(blocks)
    checkpoint_modules(model.blocks, store)
    return model


def gradients(model: Net, x: Tensor, **options: Any) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(model(x), list(model.parameters()), **options))


def given(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def in_use(store: ActivationStore) -> int:
    return store.pool._lent


def test_gradients_are_the_same_bits_and_a_tensor_of_all_blocks_is_copied_once() -> None:
    store = ActivationStore(CPU, host=True)
    model, plain = make(store), make(None)
    torch.manual_seed(1)
    loss = model(given())
    assert in_use(store) == 4 * INPUT + ROWS * 96 * 4  # each block's input, and what all of them are given
    loss.backward()
    del loss
    assert in_use(store) == 0
    assert equal([p.grad for p in model.parameters()], gradients(plain, given()))  # type: ignore[misc]
    assert equal(gradients(model, given(1)), gradients(plain, given(1)))
    assert store.pool.peak == store.pool._held == 4 * INPUT + ROWS * 96 * 4


@pytest.mark.parametrize("host", [False, True])
def test_the_graph_holds_the_inputs_of_no_block(host: bool) -> None:
    model = make(ActivationStore(CPU, host=True) if host else None)
    storages: list[StorageWeakRef] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: storages.append(StorageWeakRef(args[0].untyped_storage())))
    loss = model(given())
    assert [storage.expired() for storage in storages] == [host] * 4
    loss.backward()


def test_the_next_blocks_inputs_are_under_way_while_a_block_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, int]] = []
    store = ActivationStore(CPU, host=True)
    forward = Block.forward
    noted = lambda *args, **kwargs: (events.append(("block", 0)), forward(*args, **kwargs))[1]  # noqa: E731
    monkeypatch.setattr(Block, "forward", noted)
    model = make(store, 5)
    names: dict[int, int] = {}
    start, fetch = KeptTensor.start, KeptTensor.fetch

    def name(kept: KeptTensor) -> int:
        return names.setdefault(id(kept), len(names))

    def started(kept: KeptTensor) -> None:
        if kept.prefetched is None:
            events.append(("start", name(kept)))
        start(kept)

    monkeypatch.setattr(KeptTensor, "start", started)

    def fetched(kept: KeptTensor) -> Tensor:
        events.append(("ahead" if kept.prefetched is not None else "fetch", name(kept)))
        return fetch(kept)

    monkeypatch.setattr(KeptTensor, "fetch", fetched)
    loss = model(given())
    events.clear()
    loss.backward()
    # The last block's two inputs begin to come when they are wanted, all others while the block behind is at work.
    assert [kind for kind, _ in events] == (
        ["start", "start"] + ["ahead", "ahead", "start", "start", "block"] * 4 + ["ahead", "ahead", "block"]
    )
    assert [name for kind, name in events if kind == "start"] == [name for kind, name in events if kind == "ahead"]
    assert all(kept is None for kept in (one() for one in store._prefetched))


def test_several_forwards_and_backwards_of_one_graph() -> None:
    store = ActivationStore(CPU, host=True)
    model, plain = make(store), make(None)
    losses = []
    for seed in range(3):
        torch.manual_seed(seed)
        losses.append(model(given(seed)))
    assert in_use(store) == 3 * (4 * INPUT + ROWS * 96 * 4)
    for seed in (1, 0, 2):
        for retain in (True, False):
            found = torch.autograd.grad(losses[seed], list(model.parameters()), retain_graph=retain)
            torch.manual_seed(seed)
            assert equal(list(found), list(torch.autograd.grad(plain(given(seed)), list(plain.parameters()))))
    peak = store.pool.peak
    del losses, found
    assert in_use(store) == 0
    gradients(model, given())
    assert store.pool.peak == peak == store.pool._held


def test_evaluation_keeps_nothing_and_a_forward_without_backward_gives_its_buffers_back() -> None:
    store = ActivationStore(CPU, host=True)
    model = make(store)
    with torch.no_grad():
        model(given())
    assert store.pool.peak == 0
    loss = model(given())
    assert in_use(store) > 0
    del loss
    gc.collect()
    assert in_use(store) == 0


def test_after_a_backward_that_raises_the_next_step_is_right() -> None:
    store = ActivationStore(CPU, host=True)
    model, plain = make(store), make(None)
    loss = model(given())

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    def listen(_: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(fail)

    hook = model.blocks[2].register_forward_hook(listen)
    bad = model(given())
    hook.remove()
    with pytest.raises(ZeroDivisionError):
        bad.backward()
    del bad
    for parameter in model.parameters():
        parameter.grad = None
    assert equal(gradients(model, given()), gradients(plain, given()))
    del loss
    gc.collect()
    assert in_use(store) == 0
    assert all(one() is None for one in store._prefetched)


class Changing(nn.Module):
    def __init__(self, inside: bool, rows: int) -> None:
        super().__init__()
        self.block, self.inside, self.rows = Block(), inside, rows

    def forward(self, x: Tensor, kept: bool = False) -> Tensor:
        y = x * 2
        z = self.block(y, (torch.arange(self.rows),), scale={"by": 1.0, "times": 1})
        y = y * 3 if kept else y.mul_(3)
        return (z + y).square().sum()


@pytest.mark.parametrize("rows", [2, ROWS])
def test_an_input_that_is_changed_in_place_is_right_or_refused(rows: int) -> None:
    torch.manual_seed(0)
    model = Changing(False, rows)
    plain = copy.deepcopy(model)
    checkpoint_modules([model.block], ActivationStore(CPU, host=True))
    x = given()[:rows].clone().requires_grad_()
    torch.manual_seed(1)
    loss = model(x)
    if rows * WIDTH * 4 < 4096:  # it stays where it is
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        return
    loss.backward()
    other = given()[:rows].clone().requires_grad_()
    torch.manual_seed(1)
    plain(other, kept=True).backward()
    torch.testing.assert_close(x.grad, other.grad)


class LateStream:
    """Stream whose copies run when somebody waits for them: the latest time that a device may choose."""

    def __init__(self) -> None:
        self.copies: list[Any] = []
        self.is_current = False

    def __enter__(self) -> None:
        self.is_current = True

    def __exit__(self, *error: Any) -> None:
        self.is_current = False

    def wait_stream(self, other: Any) -> None: ...

    def record_event(self) -> "LateStream":
        return self

    def synchronize(self) -> None:
        while self.copies:
            self.copies.pop(0)()

    def wait_event(self, other: "LateStream") -> None:
        other.synchronize()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> LateStream:
    stream, copy_, to = LateStream(), Tensor.copy_, Tensor.to

    def copy_late(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if not stream.is_current:
            return copy_(target, source)
        stream.copies.append(lambda: copy_(target, source))
        return target

    def to_late(source: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Tensor:
        return torch.zeros_like(source).copy_(source) if non_blocking else to(source, *args, **kwargs)

    monkeypatch.setattr(Tensor, "copy_", copy_late)
    monkeypatch.setattr(Tensor, "to", to_late)
    monkeypatch.setattr(Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: stream)
    return stream


def test_an_input_may_change_as_soon_as_the_block_has_returned(late: LateStream) -> None:
    torch.manual_seed(0)
    model = Changing(False, ROWS)
    plain = copy.deepcopy(model)
    store = ActivationStore(CPU, host=True)
    store.stream = late  # type: ignore[assignment]
    checkpoint_modules([model.block], store)
    results = []
    for each in (model, plain):
        x = given().requires_grad_()
        torch.manual_seed(1)
        each(x).backward() if each is model else each(x, kept=True).backward()
        results.append(x.grad)
    torch.testing.assert_close(*results)


def test_a_page_locked_batch_may_change_as_soon_as_it_has_been_moved(
    late: LateStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "is_pinned", lambda _: True)
    monkeypatch.setattr(containers, "_copy_stream", lambda _: late)
    batch = {"ids": torch.arange(4)}
    on_device = containers.moved(batch, torch.device("cuda", 0))
    batch["ids"].zero_()
    assert on_device["ids"].tolist() == [0, 1, 2, 3]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.copies = False
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shared = torch.ones(ROWS, 96)
        for block in self.blocks:
            x = block(x, (torch.arange(ROWS),), scale={"by": shared.clone() if self.copies else shared, "times": 1})
            shared.add_(1)
        return x.square().sum()


def test_a_shared_tensor_that_changes_between_blocks_is_two() -> None:
    torch.manual_seed(0)
    model = Twice()
    plain = copy.deepcopy(model)
    plain.copies = True
    checkpoint_modules(model.blocks, ActivationStore(CPU, host=True))
    for one in (model, plain):
        torch.manual_seed(1)
        one(given()).backward()
    assert equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])  # type: ignore[misc]


def test_strides_stay_and_what_is_not_dense_or_not_floating_stays_where_it_is() -> None:
    found: list[Any] = []

    class Look(nn.Module):
        def forward(self, *tensors: Any) -> Tensor:
            found.append([(t.data_ptr(), t.stride(), t.requires_grad, t.clone()) for t in tensors])
            return torch.stack([t.double().sin().sum() for t in tensors]).sum()

    look = Look()
    checkpoint_modules([look], ActivationStore(CPU, host=True))
    x = torch.randn(40, 30, 4, requires_grad=True)
    weight = nn.Parameter(torch.randn(64, 64))
    tensors = [
        (x * 2).permute(2, 0, 1),
        (x * 2)[3:],
        (x * 2).detach(),
        (x * 2)[:, 1:],
        torch.arange(2000),
        torch.ones(1, 40).expand(90, 40),
        weight,
    ]
    look(*tensors).backward()
    first, again = found
    moved = [one[0] != other[0] for one, other in zip(first, again, strict=True)]
    assert moved == [True, True, True, False, False, False, False]
    for one, other in zip(first, again, strict=True):
        assert one[1:3] == other[1:3]
        assert torch.equal(one[3], other[3])


def test_a_block_inside_of_a_block_keeps_nothing_of_its_own() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * 2).square().sum()

    torch.manual_seed(0)
    outer = Outer().eval()
    plain = copy.deepcopy(outer)
    store = ActivationStore(CPU, host=True)
    checkpoint_modules([outer.inner, outer], store)
    x, other = given().requires_grad_(), given().requires_grad_()
    loss = outer(x)
    assert in_use(store) == INPUT
    loss.backward()
    plain(other).backward()
    assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]


def test_copies_of_the_model_are_ordinary_ones() -> None:
    store = ActivationStore(CPU, host=True)
    model = make(store)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert equal(gradients(other, given()), gradients(model, given()))
        loss = other(given())
        assert in_use(store) == 0
        del loss


def test_gradients_of_gradients_and_autocast_are_the_same() -> None:
    found = []
    for store in (ActivationStore(CPU, host=True), None):
        model = make(store, 2)
        torch.manual_seed(1)
        x = given().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append([first, *torch.autograd.grad(first.square().sum(), list(model.parameters()), allow_unused=True)])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


def test_the_pool_holds_no_more_than_was_lent_at_once() -> None:
    pool = HostPool(pinned=False)
    for sizes in ([100, 100], [5000], [90, 110], [60, 60, 60], [1]):
        buffers = [pool.take(size) for size in sizes]
        assert all(buffer.nbytes >= size for buffer, size in zip(buffers, sizes, strict=True))
        for buffer in buffers:
            pool.give(buffer)
        assert pool._lent == 0
        assert pool._held <= pool.peak
    again = pool.take(1)
    assert pool.take(1).data_ptr() != again.data_ptr()


def steps(ranks_config: dict[str, Any], model: str = "llama") -> Any:
    engine = zeromesh.initialize(model=llama() if model == "llama" else gpt2(resid_pdrop=0.2), config=ranks_config)[0]
    if engine.activations is not None:
        engine.activations.least = 0
    losses = [train_on_tokens(engine, batch(n)) for n in range(2)]
    whole = engine.gathered_state_dict()
    report, traffic = engine.memory_report(), engine.traffic_report()
    return losses, whole, report["activation"], traffic.get("all_gather/tensor", {"calls": 0})["calls"]


def checkpointed(**keys: bool) -> dict[str, Any]:
    return {"activation_checkpointing": {"enabled": True, **keys}}


@pytest.mark.parametrize(
    ("keys", "row"),
    [
        ({"partition_activations": True, "cpu_checkpointing": True}, 3),
        pytest.param({"partition_activations": True}, 1, marks=pytest.mark.full),
        pytest.param({"cpu_checkpointing": True}, 2, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2", marks=pytest.mark.full)])
def test_over_the_tensor_axis_it_trains_to_the_same_bits(keys: dict[str, bool], row: int, model: str) -> None:
    expected = run_ranks(steps, 2, config(2, row, **checkpointed()), model, timeout=LIMIT)
    found = run_ranks(steps, 2, config(2, row, **checkpointed(**keys)), model, timeout=LIMIT)
    for (losses, whole, held, calls), (same, values, nothing, before) in zip(found, expected, strict=True):
        assert losses == same
        assert all(torch.equal(whole[name], value) for name, value in values.items())
        assert nothing == {}
        assert bool(held) == ("cpu_checkpointing" in keys)
        assert (calls > before) == ("partition_activations" in keys)


@pytest.mark.full
def test_partitioning_changes_nothing_if_the_sequence_is_split() -> None:
    further = {"tensor_parallel": {"sequence": True}}
    expected = run_ranks(steps, 2, config(2, **checkpointed(), **further), timeout=LIMIT)
    found = run_ranks(steps, 2, config(2, **checkpointed(partition_activations=True), **further), timeout=LIMIT)
    assert [one[0] for one in found] == [one[0] for one in expected]
    assert [one[3] for one in found] == [one[3] for one in expected]


def differing() -> None:
    targets = {"enabled": True, "partition_activations": True, "targets": ["*.down_proj"]}
    engine = zeromesh.initialize(model=llama(), config=config(2, activation_checkpointing=targets))[0]
    engine.activations.least = 0
    engine.backward(engine(input_ids=batch(0), labels=batch(0)).loss)


def test_inputs_that_differ_between_ranks_are_refused() -> None:
    with pytest.raises(RankFailure, match="name whole blocks in activation_checkpointing.targets") as failure:
        run_ranks(differing, 2, timeout=LIMIT)
    assert [outcome.kind for outcome in failure.value.outcomes] == ["raised", "raised"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("schedule", "layout", "keys"),
    [
        ("1f1b", {"pipeline": 2}, {"cpu_checkpointing": True}),
        pytest.param(
            "zb-h1", {"pipeline": 2, "tensor": 2}, {"cpu_checkpointing": True, "partition_activations": True},
            marks=pytest.mark.full,
        ),
        pytest.param(
            "interleaved-1f1b", {"pipeline": 2, "row": 2}, {"cpu_checkpointing": True}, marks=pytest.mark.full
        ),
    ],
)  # fmt: skip
def test_stages_of_a_pipeline(schedule: str, layout: dict[str, int], keys: dict[str, bool]) -> None:
    results = []
    for chosen in (checkpointed(), checkpointed(**keys)):
        pipeline = {"schedule": schedule, "chunks": CHUNKS.get(schedule)}
        further = {**chosen, "pipeline": pipeline}
        ranks = layout["pipeline"] * layout.get("tensor", 1)
        results.append(run_ranks(moved, ranks, schedule=schedule, further=further, timeout=LIMIT, **layout))
    for one, other in zip(*results, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(one[1][name], value) for name, value in other[1].items())


def moved(**options: Any) -> Any:
    make_store = ActivationStore.__init__

    def made(self: ActivationStore, device: torch.device, host: bool, group: Group | None = None) -> None:
        make_store(self, device, host, group)
        self.least = 0

    ActivationStore.__init__ = made  # type: ignore[method-assign]
    try:
        return train("tied", **options)
    finally:
        ActivationStore.__init__ = make_store  # type: ignore[method-assign]


def compiled(offload: bool) -> Any:
    torch.manual_seed(0)
    engine = start_engine(
        Net(2).eval(),
        batch=ROWS,
        optimizer=sgd(0.1),
        units=["Block"],
        stage=3,
        activation_checkpointing={"enabled": True, "cpu_checkpointing": offload},
    )
    engine.eval()
    engine.compile(backend="aot_eager")
    losses = [train_step(engine, engine(given(seed))) for seed in range(2)]
    return losses, engine.memory_report()["activation"]


@pytest.mark.full
def test_units_that_the_engine_compiles_keep_their_inputs_on_the_host() -> None:
    expected, nothing = run_ranks(compiled, 1, False, timeout=LIMIT)[0]
    losses, held = run_ranks(compiled, 1, True, timeout=LIMIT)[0]
    assert losses == pytest.approx(expected, rel=1e-6)
    assert nothing == {}
    assert held["host"] >= 2 * INPUT
