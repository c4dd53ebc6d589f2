"""Building without holding, gathered parameters, and access to whole tensors of any row."""

from __future__ import annotations

import copy
import ctypes
import gc
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks
from huggingface_models import MODELS
from zeromesh.shard import deferred
from zeromesh.shard import flat as flat_module
from zeromesh.shard import sharded as sharded_module
from zeromesh.shard.deferred import Recording, is_deferred
from zeromesh.shard.materialise import materialiser

# Constructions.


class Applied(nn.Module):
    """Its weights are set again by a function that is applied to all modules, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(20, 8, padding_idx=3), nn.Linear(8, 30)
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("linear.weight"):
                nn.init.normal_(parameter, std=0.02 / 3)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=1.0, a=-1.0, b=1.5)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            module.weight.data.uniform_(-0.1, 0.1)


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        positions = torch.arange(50, dtype=torch.float32).unsqueeze(1)
        table = torch.zeros(50, 8)
        table[:, 0::2] = torch.sin(positions * torch.exp(torch.arange(0, 8, 2) * -0.3))
        table[:, 1::2] = torch.cos(positions * torch.exp(torch.arange(0, 8, 2) * -0.3))
        self.register_buffer("table", table)
        self.register_buffer("mask", torch.tril(torch.ones(12, 12, dtype=torch.bool)), persistent=False)
        self.weight = nn.Parameter(torch.randn(30, 10) * table.mean())
        self.norm = nn.BatchNorm1d(300)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(30, 10), nn.Linear(10, 30)
        self.head.weight = self.embedding.weight


class Pieces(nn.Module):
    """Weights that are made of others, and filled slice by slice."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        with torch.no_grad():
            self.qkv.weight[:16].normal_()
            self.qkv.weight[16:32] = torch.eye(16)
            self.qkv.weight[32:].mul_(0.5)
        scale = torch.linspace(0, 1, 300)
        self.scale = nn.Parameter(scale)
        self.both = nn.Parameter(torch.cat([torch.zeros(10, 4), torch.randn(10, 4)], 1).t().contiguous())
        self.twice = nn.Parameter(scale.clone().mul_(2), requires_grad=False)
        scale.add_(1)
        small, rows = torch.full((20,), 2.0), torch.zeros(20, 20)
        rows[3] = small
        small.zero_()
        self.rows = nn.Parameter(rows)
        self.narrow = nn.Parameter(torch.rand(20, 20).bfloat16())
        self.drawn = nn.Parameter(torch.bernoulli(torch.rand(200)) + torch.randperm(200) + torch.randint(5, (200,)))


class Looks(nn.Module):
    """Looks at values, and at where they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 20)
        assert self.linear.weight.device.type == "cpu"
        assert not self.linear.weight.is_meta
        largest = self.linear.weight.abs().max().item()
        self.scale = nn.Parameter(torch.full((300,), largest))
        self.register_buffer("first", self.linear.weight.detach().numpy()[0].tolist()[0] * torch.ones(300))
        self.steps = int((self.linear.weight > 0).sum())
        self.on_same_device = nn.Parameter(torch.ones(300, device=self.linear.weight.device).to("cpu").mul_(2))
        if bool((self.linear.weight > 0.1).any()):
            self.scale.data.mul_(2)
        self.linear.weight.data.to("cpu").add_(1)  # no copy, as it is there already


def orthogonal() -> nn.Module:
    linear, convolution, sparse = nn.Linear(20, 30), nn.Conv2d(8, 8, 3), nn.Linear(20, 20)
    nn.init.orthogonal_(linear.weight)
    nn.init.dirac_(convolution.weight)
    nn.init.sparse_(sparse.weight, 0.3)
    return nn.ModuleList([linear, convolution, sparse])


def own_generator() -> nn.Module:
    generator, linear = torch.Generator().manual_seed(3), nn.Linear(20, 20)
    with torch.no_grad():
        linear.weight.normal_(generator=generator)
        linear.bias.uniform_(generator=generator)
        linear.weight[0].normal_(generator=generator)
    return linear


def from_numpy() -> nn.Module:
    linear = nn.Linear(20, 20)
    linear.weight.data.copy_(torch.from_numpy(numpy.random.RandomState(0).randn(20, 20)))
    return linear


def from_a_state() -> nn.Module:
    first, second = nn.Linear(20, 20), nn.Linear(20, 20)
    second.load_state_dict(first.state_dict())
    return nn.Sequential(first, second.double())


def parametrised() -> nn.Module:
    made = nn.utils.parametrizations
    return nn.ModuleList(
        [made.weight_norm(nn.Linear(9, 9)), made.orthogonal(nn.Linear(9, 9)), made.spectral_norm(nn.Linear(9, 9))]
    )


def copied() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32)
    return nn.ModuleList([layer, copy.deepcopy(layer), copy.deepcopy(layer)])


CONSTRUCTIONS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(20, 30),
    "Embedding": lambda: nn.Embedding(30, 10, padding_idx=2),
    "Conv2d": lambda: nn.Conv2d(4, 8, 3),
    "MultiheadAttention": lambda: nn.MultiheadAttention(32, 4),
    "TransformerEncoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3),
    "LSTM": lambda: nn.LSTM(16, 16, 2),
    "apply": Applied,
    "buffers": Buffers,
    "tied": Tied,
    "pieces": Pieces,
    "looks": Looks,
    "orthogonal": orthogonal,
    "own generator": own_generator,
    "numpy": from_numpy,
    "state": from_a_state,
    "parametrised": parametrised,
    "copied": copied,
}
for _name in ("gpt2", "llama", "mamba", "bert", "t5", "vit", "resnet", "clip"):
    CONSTRUCTIONS[_name] = MODELS[_name].build


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(4)
    return build()


def state(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, whose names say what is tied."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def ties(model: nn.Module) -> set[frozenset[str]]:
    places: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), set()).add(name)
    return set(map(frozenset, places.values()))


def materialise_all(model: nn.Module, seed: int = 0) -> None:
    materialise = materialiser(model, seed)
    for name, parameter in reversed(list(model.named_parameters())):
        materialise(name, parameter)


@pytest.mark.parametrize("large", [1, 64])
@pytest.mark.parametrize("kind", CONSTRUCTIONS)
def test_deferred_construction_gives_the_very_weights_of_an_ordinary_one(kind: str, large: int) -> None:
    build = CONSTRUCTIONS[kind]
    seeded(build)  # some models warn, or load code, the first time
    ordinary = seeded(build)
    generator = torch.get_rng_state()
    with patch.object(deferred, "LARGE", large), Recording():
        model = seeded(build)
    assert torch.equal(torch.get_rng_state(), generator)
    assert any(is_deferred(parameter) for parameter in model.parameters())
    assert ties(model) == ties(ordinary)
    objects = list(model.parameters())
    materialise_all(model)
    assert all(a is b for a, b in zip(model.parameters(), objects, strict=True))
    assert torch.equal(torch.get_rng_state(), generator)
    for (name, found), (ordinary_name, expected) in zip(state(model), state(ordinary), strict=True):
        assert name == ordinary_name
        assert (found.dtype, found.requires_grad, found.device.type) == (expected.dtype, expected.requires_grad, "cpu")
        assert torch.equal(found, expected), name
    plain = [(n, v) for n, v in vars(ordinary).items() if isinstance(v, int | float)]
    assert plain == [(n, getattr(model, n)) for n, _ in plain]


def test_arrays_of_deferred_tensors_cannot_be_written_to() -> None:
    with patch.object(deferred, "LARGE", 1), Recording(), pytest.raises(ValueError, match="read-only"):
        nn.Linear(3, 3).weight.detach().numpy()[0] = 1


def test_what_fails_while_deferred_says_that_it_was() -> None:
    def broken() -> None:
        with zeromesh.zero.Init():
            raise TypeError("no such thing")

    with pytest.raises(TypeError, match="no such thing") as caught:
        broken()
    assert "zeromesh.zero.Init" in caught.value.__notes__[0]


def test_init_inside_of_init_gives_the_very_weights_too() -> None:
    torch.manual_seed(0)
    ordinary, after = nn.Linear(128, 128), torch.rand(())
    torch.manual_seed(0)
    context = zeromesh.zero.Init()
    with context, zeromesh.zero.Init(), context:
        model = nn.Linear(128, 128)
    assert torch.equal(torch.rand(()), after)
    assert model.weight.is_meta
    materialise_all(model)
    assert torch.equal(model.weight, ordinary.weight)


def test_init_of_a_model_that_exists_and_init_switched_off_do_nothing() -> None:
    for context in (zeromesh.zero.Init(enabled=False), zeromesh.zero.Init(module=nn.Linear(2, 2))):
        with context:
            assert not nn.Linear(200, 200).weight.is_meta


# Through initialize.

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
}


def start(model: nn.Module, row: int, **config: Any) -> Any:
    return zeromesh.initialize(model=model, config={**CONFIG, "zero_optimization": {"stage": row}, **config})[0]


def gathered(engine: Any) -> dict[str, torch.Tensor]:
    with zeromesh.zero.GatheredParameters(list(engine.module.parameters())):
        return {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}


class Blocks(nn.Module):
    """A stack whose head is tied to its embedding, with a bias of its own; what ``meta`` needs is there."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 12)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(12, 2, 24, 0.0, batch_first=True) for _ in range(4))
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 40)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        scores = self.head(self.norm(h.flatten(0, 1)))
        return nn.functional.cross_entropy(scores, x.flatten())


def build_in(how: str, row: int, large: int) -> dict[str, torch.Tensor]:
    """The weights of an engine whose model was built in some way, after two steps of training."""
    torch.manual_seed(4)
    with patch.object(deferred, "LARGE", large):
        if how == "meta":
            with torch.device("meta"):
                model = Blocks()
        else:
            with zeromesh.zero.Init(enabled=how == "deferred"):
                model = Blocks()
    engine = start(model, row, seed=7)
    found = gathered(engine)
    assert all(parameter.dtype == torch.float32 for parameter in found.values())
    for step in range(2):
        batch = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(2 * step + engine.data_rank))
        engine.backward(engine(batch))
        engine.step()
    found |= {f"trained/{name}": value for name, value in gathered(engine).items()}
    return found | {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.some(2)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("row", [0, 3])
def test_the_same_seed_gives_the_same_training_however_the_model_is_built(row: int, ranks: int) -> None:
    ordinary = run_ranks(build_in, ranks, "ordinary", row, 1)
    for large in (1, 200):
        for found, expected in zip(run_ranks(build_in, ranks, "deferred", row, large), ordinary, strict=True):
            assert same(found, expected)
    torch.manual_seed(4)
    model = Blocks()
    assert all(torch.equal(ordinary[0][name], parameter) for name, parameter in model.named_parameters())


def test_weights_from_initialisers_are_the_same_under_every_row_and_number_of_ranks() -> None:
    found = [run_ranks(build_in, ranks, "meta", row, 1)[0] for row, ranks in ((0, 1), (1, 2), (2, 2), (3, 2), (3, 3))]
    first = {name: value for name, value in found[0].items() if not name.startswith("trained/")}
    for other in found[1:]:
        assert all(torch.equal(other[name], value) for name, value in first.items() if "norm.running" not in name)
    assert bool((first["norm.weight"] == 1).all())
    assert 0.5 < float(first["embedding.weight"].std()) < 1.5, "the embedding's own, not the head's"
    bound = 12**-0.5
    assert float(first["head.bias"].abs().max()) <= bound
    assert float(first["blocks.0.linear1.weight"].abs().max()) <= bound
    assert not torch.equal(first["blocks.0.linear1.weight"], first["blocks.1.linear1.weight"])
    trained = found[0]["trained/blocks.0.linear1.weight"]
    assert not torch.equal(first["blocks.0.linear1.weight"], trained)


def test_weights_from_initialisers_depend_on_the_seed() -> None:
    with torch.device("meta"):
        models = [nn.Linear(9, 9) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        materialise_all(model, seed)
    assert torch.equal(models[0].weight, models[1].weight)
    assert not torch.equal(models[0].weight, models[2].weight)


class Plain(nn.Module):
    """Has no way to make its values again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.scale = nn.Parameter(torch.ones(4))


class Forgetful(nn.Linear):
    """Its initialiser leaves the bias out."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Table(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("table", torch.arange(5))


class Around(nn.Module):
    """Initialises what it knows, as Hugging Face models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(4, 4), Plain()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 5.0)


@pytest.mark.parametrize(
    ("build", "named"),
    [(Plain, "inner.scale"), (lambda: Forgetful(3, 3), "bias"), (Table, "table"), (Around, "part.inner.scale")],
)
def test_what_no_initialiser_gives_a_value_is_refused_by_name(build: Callable[[], nn.Module], named: str) -> None:
    with torch.device("meta"):
        model = build()
    with pytest.raises(ValueError, match=f"^{named} is on the meta device.*zero.Init"):
        materialise_all(model)


def test_a_model_around_a_module_has_the_last_word_on_its_values() -> None:
    with torch.device("meta"):
        model = Around()
    materialiser(model)("linear.weight", model.linear.weight)
    assert bool((model.linear.weight == 5).all())
    model = MODELS["gpt2"].build()
    with torch.device("meta"):
        unmade = MODELS["gpt2"].build()
    materialise_all(unmade)
    for (name, a), (_, b) in zip(model.named_parameters(), unmade.named_parameters(), strict=True):
        if "c_proj" not in name:  # which the whole model scales again
            assert float(a.detach().std()) == pytest.approx(float(b.detach().std()), rel=0.2, abs=1e-3), name


# Memory while building.

MIB = 1 << 20
BLOCKS = 12


def big(width: int) -> nn.Module:
    """Blocks of two matrices, and an embedding as large as a block: 4 MiB for a width of 512."""

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False))

    return nn.ModuleList([nn.Embedding(4 * width, width), *(block() for _ in range(BLOCKS))])


class Heap:
    """Bytes in malloc's blocks that are in use, and the most of them that was seen."""

    class Info(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_size_t)
            for name in ["arena", "ordblks", "smblks", "hblks", "hblkhd", "a", "b", "uordblks", "c", "d"]
        ]

    def __init__(self) -> None:
        self._ask = ctypes.CDLL(None).mallinfo2
        self._ask.restype = self.Info
        self.start = self.most = self.live()

    def live(self) -> int:
        info = self._ask()
        return int(info.hblkhd + info.uordblks)

    def look(self) -> None:
        self.most = max(self.most, self.live())


def building(how: str, precision: dict[str, Any], width: int = 512) -> tuple[float, float]:
    """MiB that the rank held at most while the model was built and placed, and when it was."""
    if width > 64:
        building(how, precision, 64)  # what is loaded, and kept, the first time
    gc.collect()
    heap, run, put, updates = Heap(), deferred.Tape._run, flat_module._put, sharded_module.EarlyUpdates
    placed = []

    def looking(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            heap.look()
            result = function(*args)
            heap.look()
            return result

        return wrapped

    def stop_when_placed(*args: Any) -> Any:
        for _ in range(8):
            torch.distributed.barrier()  # a thread of gloo's lets go of the tensor of one call when it gets another
        placed.append((heap.most - heap.start, heap.live() - heap.start))
        return updates(*args)

    with torch.device("meta") if how == "meta" else zeromesh.zero.Init():
        model = big(width)
        heap.look()
    with (
        patch.object(deferred.Tape, "_run", staticmethod(looking(run))),
        patch.object(flat_module, "_put", looking(put)),
        patch.object(sharded_module, "EarlyUpdates", stop_when_placed),
    ):
        start(model, 3, **precision)
    return placed[0][0] / MIB, placed[0][1] / MIB


@pytest.mark.full  # the process's heap, measured: another thread's arena now and then makes it larger
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the heap is measured through glibc")
@pytest.mark.parametrize("how", ["deferred", "meta"])
def test_building_never_holds_more_than_a_unit_beyond_the_rank_share(how: str) -> None:
    unit, whole = 4.0, 4.0 * (BLOCKS + 1)
    for options in ({}, {"bf16": {"enabled": True}}):
        run_ranks(building, 2, how, options)  # what the libraries allocate once is there from here on
    for most, after in run_ranks(building, 2, how, {}):
        assert after == pytest.approx(whole / 2, abs=0.5)
        assert most <= whole / 2 + unit + 0.5
    # In 16 bits the masters of the share, in which its parameters rest.
    for most, after in run_ranks(building, 2, how, {"bf16": {"enabled": True}}):
        assert after == pytest.approx(whole / 2, abs=0.5)
        assert most <= whole / 2 + unit + 0.5


# Gathered parameters.


def gather_and_change(row: int) -> dict[str, Any]:
    torch.manual_seed(0)
    engine = start(Blocks().double(), row)
    model, rank = engine.module, engine.data_rank
    first, last = model.blocks[0].linear1.weight, model.blocks[3].norm1.bias
    found: dict[str, Any] = {}
    with zeromesh.zero.GatheredParameters(first):
        found["read"] = first.detach().clone()
        with zeromesh.zero.GatheredParameters([last, nn.Parameter(torch.ones(2))]):
            found["inner"] = last.detach().clone()
    with zeromesh.zero.GatheredParameters([first, last], modifier_rank=engine.data_size - 1):
        with torch.no_grad():
            first.fill_(rank + 1.0)
        last.data[2:5] = rank + 5.0
    with zeromesh.zero.GatheredParameters([first, last]):
        found["changed"] = (first.detach().clone(), last.detach().clone())
    with zeromesh.zero.GatheredParameters(first, enabled=False):
        found["disabled"] = True
    for change in (lambda: first.detach().add_(1), lambda: first.data.mul_(2)):
        with pytest.raises(RuntimeError, match="modifier_rank"), zeromesh.zero.GatheredParameters(first):
            change()
    batch = torch.arange(10).view(2, 5)
    loss = engine(batch)
    engine.backward(loss)
    engine.step()
    found["loss"] = loss.item()
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_gathered_parameters_are_whole_and_one_ranks_changes_count(ranks: int) -> None:
    torch.manual_seed(0)
    model = Blocks().double()
    first, last = model.blocks[0].linear1.weight, model.blocks[3].norm1.bias
    read, inner = first.detach().clone(), last.detach().clone()
    first.data.fill_(ranks)
    last.data[2:5] = ranks + 4
    for found in run_ranks(gather_and_change, ranks, 3):
        assert torch.equal(found["read"], read)
        assert torch.equal(found["inner"], inner)
        assert torch.equal(found["changed"][0], first)
        assert torch.equal(found["changed"][1], last)
        assert found["loss"] == pytest.approx(model(torch.arange(10).view(2, 5)).item(), rel=1e-12)


def test_gathered_parameters_are_the_same_under_every_row() -> None:
    by_row = [run_ranks(gather_and_change, 2, row) for row in (0, 1, 2)]
    expected = run_ranks(gather_and_change, 2, 3)
    for found in by_row:
        for mine, other in zip(found, expected, strict=True):
            assert torch.equal(mine["read"], other["read"])
            assert torch.equal(mine["changed"][0], other["changed"][0])


def read_outside(ranks: int) -> str:
    torch.manual_seed(0)
    model = start(Blocks(), 3).module
    with pytest.raises(RuntimeError) as caught:
        model.blocks[0].linear1.weight.sum()
    assert model.blocks[0].linear1.weight.shape == (24, 12)
    return str(caught.value)


def test_reading_a_parameter_outside_says_how_to() -> None:
    for message in run_ranks(read_outside, 2, 2):
        assert "blocks.0.linear1.weight" in message
        assert "GatheredParameters" in message


# Access to whole tensors.


class Sparsely(nn.Module):
    """Has a frozen parameter, one that nothing uses, one that only odd ranks use, and a tie."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.blocks[1].bias.requires_grad_(False)
        self.blocks[2].weight = self.blocks[0].weight
        self.unused = nn.Parameter(torch.ones(5))
        self.odd = nn.Parameter(torch.ones(7))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) * self.scale
        return (x * self.odd if rank % 2 else x).square().sum()


Tensors = dict[str, torch.Tensor | None]
ADAM = {"lr": 1e-2, "weight_decay": 0.1}


def sample(step: int, micro_batch: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + rank)
    return torch.randn(3, 7, generator=generator, dtype=torch.float64)


def make_sparsely() -> Sparsely:
    torch.manual_seed(2)
    return Sparsely().double()


def kept(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else value.detach().clone()


def changed(value: torch.Tensor) -> torch.Tensor:
    """Every element another, and not the same everywhere."""
    return value * 0.5 + torch.arange(value.numel(), dtype=value.dtype).view(value.shape) / 100


CHANGED = ("blocks.0.weight", "blocks.0.bias", "scale", "odd")


def plain_access(ranks: int, accumulation: int) -> list[Tensors]:
    """What the functions are to return, in order, from plain torch."""
    model, found = make_sparsely(), []
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAM)

    def state(key: str) -> Tensors:
        return {name: kept(optimizer.state.get(p, {}).get(key)) for name, p in named.items()}

    def backward(step: int, micro_batch: int) -> None:
        for rank in range(ranks):
            (model(sample(step, micro_batch, rank), rank) / ranks / accumulation).backward()
        found.append({name: kept(p.grad) for name, p in named.items()})

    found.append(state("exp_avg"))
    for step in range(3):
        for micro_batch in range(accumulation):
            backward(step, micro_batch)
        if step == 1:
            for name in CHANGED:
                if named[name].grad is not None:
                    named[name].grad = changed(named[name].grad)
            model.unused.grad = torch.ones_like(model.unused)
        optimizer.step()
        optimizer.zero_grad()
        found += [state("exp_avg"), state("exp_avg_sq")]
        found.append({name: kept(p) if p.requires_grad else None for name, p in named.items()})
        if step == 0:
            for name in CHANGED:
                if named[name] in optimizer.state:
                    optimizer.state[named[name]]["exp_avg"] = changed(optimizer.state[named[name]]["exp_avg"])
                named[name].data = changed(named[name].data)
    found.append({name: kept(value) for name, value in model.state_dict().items()})
    return found


def engine_access(row: int, ranks: int, accumulation: int, mesh: dict[str, int]) -> list[Tensors]:
    zero = zeromesh.zero
    engine = zeromesh.initialize(
        model=make_sparsely(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "optimizer": {"type": "AdamW", "params": ADAM},
            "zero_optimization": {"stage": row},
            "mesh": mesh,
        },
    )[0]
    named, rank, found = dict(engine.module.named_parameters()), engine.data_rank, []

    def each(function: Callable[..., Any], *args: Any) -> Tensors:
        first = {name: kept(function(p, *args)) for name, p in named.items()}
        again = {name: function(p, *args) for name, p in named.items()}
        for name, value in first.items():
            assert (value is None and again[name] is None) or torch.equal(value, again[name]), f"{name}, read twice"
        return first

    with pytest.raises(RuntimeError, match="between backward and step"):
        zero.safe_set_full_grad(named["scale"], torch.tensor(1.0))
    assert set(each(zero.safe_get_full_grad).values()) == {None}
    found.append(each(zero.safe_get_full_optimizer_state, "exp_avg"))
    for step in range(3):
        for micro_batch in range(accumulation):
            engine.backward(engine(sample(step, micro_batch, rank), rank))
            found.append(each(zero.safe_get_full_grad))
            if micro_batch < accumulation - 1:
                engine.step()
        if step == 1:
            for name in CHANGED:
                if found[-1][name] is not None:
                    zero.safe_set_full_grad(named[name], changed(found[-1][name]))
            zero.safe_set_full_grad(named["unused"], torch.ones(5))
        engine.step()
        found += [each(zero.safe_get_full_optimizer_state, key) for key in ("exp_avg", "exp_avg_sq")]
        found.append(each(zero.safe_get_full_fp32_param))
        if step == 0:
            for name in CHANGED:
                state = found[-3][name]
                if state is not None:
                    zero.safe_set_full_optimizer_state(named[name], changed(state), "exp_avg")
                zero.safe_set_full_fp32_param(named[name], changed(found[-1][name]))
    with pytest.raises(ValueError, match=r"blocks.1.bias is frozen"):
        zero.safe_set_full_fp32_param(named["blocks.1.bias"], torch.zeros(7))
    with pytest.raises(ValueError, match=r"blocks.0.bias has shape \(7,\), the value given \(8,\)"):
        zero.safe_set_full_fp32_param(named["blocks.0.bias"], torch.zeros(8))
    with pytest.raises(ValueError, match="belongs to no engine"):
        zero.safe_get_full_grad(nn.Parameter(torch.zeros(2)))
    found.append(engine.gathered_state_dict())
    return found


def check_access(row: int, ranks: int, accumulation: int, mesh: dict[str, int]) -> None:
    expected = plain_access(ranks, accumulation)
    results = run_ranks(engine_access, ranks, row, ranks, accumulation, mesh)
    for rank, found in enumerate(results):
        *found, whole = found
        assert len(found) == len(expected) - 1
        for number, (mine, other) in enumerate(zip(found, expected, strict=False)):
            assert_close(mine, other, f"rank {rank}, read {number}")
        assert rank == 0 or whole == {}
    assert_close(results[0][-1], expected[-1], "the gathered state")


def assert_close(found: Tensors, expected: Tensors, where: str) -> None:
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        got = found[name]
        assert (got is None) == (want is None), f"{where}: {name} is {got}, not {want}"
        if got is not None and want is not None:
            assert got.shape == want.shape
            assert bool(((got - want).abs() <= 1e-9 * (1 + want.abs())).all()), f"{where}: {name}"


@pytest.mark.some(4)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("row", [0, 1, 2, 3])
def test_whole_tensors_are_what_plain_torch_has_and_changes_are_taken(row: int, ranks: int) -> None:
    for accumulation in (1, 2):
        check_access(row, ranks, accumulation, {})


@pytest.mark.full
@pytest.mark.parametrize("row", [0, 1, 3])
def test_whole_tensors_on_a_hybrid_mesh(row: int) -> None:
    check_access(row, 4, 2, {"replicate": 2, "data": 2})


def write(parameter: nn.Parameter, value: float, how: str) -> None:
    with torch.no_grad():
        if how == "in place":
            parameter.fill_(value)
        else:
            parameter.data = torch.full(parameter.shape, value, dtype=parameter.dtype)


def write_both_ways(row: int, bf16: bool, how: str) -> list[Tensors]:
    zero = zeromesh.zero
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": ADAM},
        "zero_optimization": {"stage": row},
        "bf16": {"enabled": bf16},
    }
    model = make_sparsely().to(torch.float32 if bf16 else torch.float64)
    engine = zeromesh.initialize(model=model, config=config)[0]
    engine.backward(engine(sample(0, 0, engine.data_rank), engine.data_rank))
    engine.step()
    named = dict(engine.module.named_parameters())
    first, other, last, third = (named[name] for name in ("blocks.0.weight", "blocks.0.bias", "odd", "blocks.2.bias"))
    for parameter in (first, other, third):
        write(parameter, 0.25, how)
    zero.safe_set_full_fp32_param(first, torch.full((7, 7), 1 / 3))
    zero.safe_set_full_fp32_param(last, torch.full((7,), 1 / 3))
    write(last, 0.5, how)
    write(named["scale"], 0.75, how)
    found = [{name: kept(value) for name, value in engine.state_dict().items()}]
    zero.safe_set_full_optimizer_state(first, torch.full((7, 7), 2.0), "exp_avg")
    engine.optimizer.param_groups[0]["lr"] = 0.0  # what was written is what is there after the updates
    for number in (1, 2):
        engine.backward(engine(sample(number, 0, engine.data_rank), engine.data_rank))
        if number == 2:
            write(third, 0.125, how)
            zero.safe_set_full_grad(first, torch.ones(7, 7))
        engine.step()
        found.append({name: zero.safe_get_full_fp32_param(p) for name, p in named.items()})
    return found


@pytest.mark.some(5)
@pytest.mark.parametrize("bf16", [False, True], ids=["float64", "bf16"])
@pytest.mark.parametrize(
    ("row", "how"), [*((row, "in place") for row in (0, 1, 2)), *((row, "new data") for row in (0, 1, 2, 3))]
)
def test_of_what_is_written_in_several_ways_the_last_counts_and_none_is_lost(row: int, bf16: bool, how: str) -> None:
    narrow = 2**-8 if bf16 else 1e-6
    for found in run_ranks(write_both_ways, 2, row, bf16, how):
        for number, (values, third) in enumerate(zip(found, (0.25, 0.25, 0.125), strict=True)):
            # What was set is not rounded. A master keeps its last bits where its parameter was what is written already.
            exact = 1e-6 if number > 0 else narrow
            expected = {"blocks.0.weight": (1 / 3, exact), "blocks.0.bias": (0.25, narrow), "odd": (0.5, narrow)}
            for name, (value, error) in {**expected, "scale": (0.75, narrow), "blocks.2.bias": (third, narrow)}.items():
                got = values[name].flatten().tolist()
                assert got == pytest.approx([value] * len(got), rel=error), (number, name)


def misuse_states() -> None:
    engine = start(Blocks(), 1)
    weight = engine.module.head.bias
    with pytest.raises(RuntimeError, match=r"head.bias has no such state yet"):
        zeromesh.zero.safe_set_full_optimizer_state(weight, torch.zeros(40), "exp_avg")
    engine.backward(engine(torch.arange(10).view(2, 5)))
    engine.step()
    with pytest.raises(ValueError, match=r"'step' of head.bias is .*1"):
        zeromesh.zero.safe_get_full_optimizer_state(weight, "step")


def test_states_that_are_not_there_or_are_no_tensors_are_refused() -> None:
    run_ranks(misuse_states, 1)
