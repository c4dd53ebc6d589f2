"""Building without holding, gathered parameters, and access to whole tensors of any row."""

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
from harness import Pool, on_ranks, run_ranks
from heap import Heap
from huggingface_models import MODELS
from run import adamw, configuration, train_step, whole_parameters
from zeromesh.shard import sharded as sharded_module
from zeromesh.shard.parameters import deferred, materialise
from zeromesh.shard.parameters import flat as flat_module
from zeromesh.shard.parameters.deferred import Recording, is_deferred
from zeromesh.shard.parameters.materialise import materialiser

# Constructions.


class Applied(nn.Module):
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
    yield from model.named_parameters()
    yield from model.named_buffers()


def ties(model: nn.Module) -> set[frozenset[str]]:
    places: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(id(parameter), set()).add(name)
    return set(map(frozenset, places.values()))


def materialise_all(model: nn.Module, seed: int = 0) -> None:
    fill = materialiser(model, seed)
    for name, parameter in reversed(list(model.named_parameters())):
        fill(name, parameter)


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


def test_errors_under_init_say_that_construction_was_deferred() -> None:
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


CONFIG = configuration(micro=2, optimizer=adamw(1e-2, weight_decay=0.1))


def start(model: nn.Module, row: int, **config: Any) -> Any:
    return zeromesh.initialize(model=model, config={**CONFIG, "zero_optimization": {"stage": row}, **config})[0]


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
    torch.manual_seed(4)
    with patch.object(deferred, "LARGE", large):
        if how == "meta":
            with torch.device("meta"):
                model = Blocks()
        else:
            with zeromesh.zero.Init(enabled=how == "deferred"):
                model = Blocks()
    with patch.object(materialise, "_is_of_transformers", return_value=True):  # ``Blocks`` sets no values of its own
        engine = start(model, row, seed=7)
    found = whole_parameters(engine.module)
    assert all(parameter.dtype == torch.float32 for parameter in found.values())
    for step in range(2):
        batch = torch.randint(40, (2, 5), generator=torch.Generator().manual_seed(2 * step + engine.data_rank))
        train_step(engine, engine(batch))
    found |= {f"trained/{name}": value for name, value in whole_parameters(engine.module).items()}
    return found | {name: buffer.clone() for name, buffer in engine.module.named_buffers()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.some(1)
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
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.scale = nn.Parameter(torch.ones(4))


class Forgetful(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Table(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("table", torch.arange(5))


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(4, 4), Plain()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 5.0)


class Scaled(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(100, 64))
        nn.init.normal_(self[0].weight, 0, 0.02)


def attention() -> nn.Module:
    return nn.MultiheadAttention(4, 2)  # whose constructor sets the bias of its last layer to 0


def edited() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    nn.init.zeros_(model[0].bias)
    return model


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (edited, "0.bias"),
        (Plain, "inner.scale"),
        (lambda: Forgetful(3, 3), "bias"),
        (Table, "table"),
        (Around, "part.inner.scale"),
        (Scaled, "0.weight"),
        (attention, "out_proj.bias"),
    ],
)
def test_parameters_without_an_initialiser_are_refused_by_name(build: Callable[[], nn.Module], named: str) -> None:
    with torch.device("meta"):
        model = build()
    with pytest.raises(ValueError, match=f"^{named} is on the meta device.*zero.Init"):
        materialise_all(model)


def test_a_model_of_transformers_has_the_last_word_on_its_values() -> None:
    model = MODELS["gpt2"].build()
    with torch.device("meta"):
        unmade = MODELS["gpt2"].build()
    materialise_all(unmade)
    for (name, a), (_, b) in zip(model.named_parameters(), unmade.named_parameters(), strict=True):
        assert float(a.detach().std()) == pytest.approx(float(b.detach().std()), rel=0.2, abs=1e-3), name


BLOCKS = 12


def big(width: int) -> nn.Module:  # blocks of two matrices, and an embedding as large as a block: 4 MiB for 512
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False))

    return nn.ModuleList([nn.Embedding(4 * width, width), *(block() for _ in range(BLOCKS))])


def building(how: str, precision: dict[str, Any], width: int = 512) -> tuple[float, float]:
    """MiB that the rank held at most while the model was built and placed, and when it was."""
    if width > 64:
        building(how, precision, 64)  # what is loaded, and kept, the first time
    gc.collect()
    heap, run, put, updates = Heap(), deferred.Tape._run, flat_module._put, sharded_module.EarlyUpdates
    before, found, after = heap.live(), [], []

    # At the moments in which the most is there: a thread that samples sees what others hold for an instant, too.
    def looking(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            found.append(heap.live())
            result = function(*args)
            found.append(heap.live())
            return result

        return wrapped

    def look_when_placed(*args: Any) -> Any:
        for _ in range(8):
            torch.distributed.barrier()  # a thread of gloo's lets go of the tensor of one call when it gets another
        after.append(heap.live())
        return updates(*args)

    with torch.device("meta") if how == "meta" else zeromesh.zero.Init():
        model = big(width)
        found.append(heap.live())
    with (
        patch.object(deferred.Tape, "_run", staticmethod(looking(run))),
        patch.object(flat_module, "_put", looking(put)),
        patch.object(sharded_module, "EarlyUpdates", look_when_placed),
    ):
        start(model, 3, **precision)
    return (max(found) - before) / 2**20, (after[0] - before) / 2**20


@pytest.mark.full  # the process's heap, measured: another thread's arena now and then makes it larger
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="the heap is measured through glibc")
@pytest.mark.parametrize("how", ["deferred", "meta"])
def test_building_never_holds_more_than_a_unit_beyond_the_rank_share(how: str) -> None:
    unit, whole = 4.0, 4.0 * (BLOCKS + 1)
    kinds = ({}, {"bf16": {"enabled": True}})  # in 16 bits the masters of the share, in which its parameters rest
    with Pool() as fresh:  # in workers that have run nothing else: what that left would be let go of meanwhile
        for options in kinds:
            fresh.run(building, 2, (how, options))  # what the libraries allocate once is there from here on
        found = [outcome.value for options in kinds for outcome in fresh.run(building, 2, (how, options))]
    for most, after in found:
        assert after == pytest.approx(whole / 2, abs=0.5)
        assert most <= whole / 2 + unit + 0.5


@pytest.mark.parametrize(("row", "ranks"), [(3, 1), (0, 2), (1, 2), (2, 2), (3, 2)])
@on_ranks("ranks")
def test_gathered_parameters_are_whole_and_one_ranks_changes_count(row: int, ranks: int) -> None:
    torch.manual_seed(0)
    engine, gather = start(Blocks().double(), row), zeromesh.zero.GatheredParameters
    model, rank = engine.module, engine.data_rank
    first, last = model.blocks[0].linear1.weight, model.blocks[3].norm1.bias
    found: dict[str, Any] = {}
    with gather(first):
        found["read"] = first.detach().clone()
        with gather([last, nn.Parameter(torch.ones(2))]):
            found["inner"] = last.detach().clone()
    with gather([first, last], modifier_rank=engine.data_size - 1):
        with torch.no_grad():
            first.fill_(rank + 1.0)
        last.data[2:5] = rank + 5.0
    with gather([first, last]):
        found["changed"] = (first.detach().clone(), last.detach().clone())
    with gather(first, enabled=False):
        pass
    for change in (lambda: first.detach().add_(1), lambda: first.data.mul_(2)):
        with pytest.raises(RuntimeError, match="modifier_rank"), gather(first):
            change()
    batch = torch.arange(10).view(2, 5)
    loss = engine(batch)
    train_step(engine, loss)
    found["loss"] = loss.item()
    torch.manual_seed(0)
    model = Blocks().double()
    first, last = model.blocks[0].linear1.weight, model.blocks[3].norm1.bias
    read, inner = first.detach().clone(), last.detach().clone()
    first.data.fill_(ranks)
    last.data[2:5] = ranks + 4
    assert torch.equal(found["read"], read)
    assert torch.equal(found["inner"], inner)
    assert torch.equal(found["changed"][0], first)
    assert torch.equal(found["changed"][1], last)
    assert found["loss"] == pytest.approx(model(torch.arange(10).view(2, 5)).item(), rel=1e-12)


@on_ranks(2)
def test_reading_a_parameter_outside_says_how_to() -> None:
    model = start(Blocks(), 3).module
    with pytest.raises(RuntimeError, match="blocks.0.linear1.weight.*GatheredParameters"):
        model.blocks[0].linear1.weight.sum()
    assert model.blocks[0].linear1.weight.shape == (24, 12)


@on_ranks(1)
def test_states_that_are_not_there_or_are_no_tensors_are_refused() -> None:
    engine = start(Blocks(), 1)
    weight = engine.module.head.bias
    with pytest.raises(RuntimeError, match=r"head.bias has no such state yet"):
        zeromesh.zero.safe_set_full_optimizer_state(weight, torch.zeros(40), "exp_avg")
    train_step(engine, engine(torch.arange(10).view(2, 5)))
    with pytest.raises(ValueError, match=r"'step' of head.bias is .*1"):
        zeromesh.zero.safe_get_full_optimizer_state(weight, "step")
