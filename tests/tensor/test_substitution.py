"""Code of this library stands for layers that compute what torch's class computes, and for no others."""

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import zeromesh
from changed_layers import LAYERS
from harness import on_ranks, run_ranks
from huggingface_models import MODELS
from same_training import require_same_training
from tensor_models import token_pair
from test_tensor_rules import llama
from zeromesh.base.tiled import tile_linears
from zeromesh.parallel.pipeline.runtime.weight_gradients import postpone
from zeromesh.parallel.tensor.derive import derive, heads_over_vocabulary
from zeromesh.parallel.tensor.float8_layers import check_layers
from zeromesh.parallel.tensor.split_plan import PlanRule, kind_of
from zeromesh.parallel.tensor.tensor_plan import parse, resolve
from zeromesh.shard.tables.find_tables import find_tables

LIMIT = 120
WIDTH = 16

Make = Callable[[int, int], nn.Module]


def square(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs)


class Mlp(nn.Module):
    def __init__(self, up: Make = square, down: Make = square) -> None:
        super().__init__()
        self.fc1, self.fc2 = up(WIDTH, 2 * WIDTH), down(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(F.gelu(self.fc1(x)))


class Net(nn.Module):
    def __init__(self, tokens: nn.Module | None = None, tied: bool = False, logits: Any = None, **more: Make) -> None:
        super().__init__()
        self.tokens = tokens or nn.Embedding(24, WIDTH)
        head = more.pop("head", square)
        self.blocks = nn.ModuleList(Mlp(**more) for _ in range(2))
        pair = more.get("up", square)(WIDTH, WIDTH), nn.ReLU(), more.get("down", square)(WIDTH, WIDTH)
        self.pair = nn.Sequential(*pair)
        self.head, self.logits = head(WIDTH, 24), logits
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        x = x + self.pair(x)
        logits = self.head(x) if self.logits is None else self.logits(self, x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except ValueError:
        return True
    return False


def is_postponed(layer: nn.Module) -> bool:
    before = vars(layer).get("forward")
    postpone(nn.Sequential(layer))
    return vars(layer).get("forward") is not before


def by_hand(layer: nn.Module) -> bool:
    model, plan = nn.Sequential(layer, nn.Linear(WIDTH, WIDTH)), parse({"0": "colwise", "1": "rowwise"})
    return not refused(lambda: resolve(model, plan, {}, 0, 2))


class Tied(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(WIDTH, WIDTH), head


# Each place in which other code computes a linear layer -> whether it does so with a model of this layer.
PLACES: dict[str, Callable[[nn.Module], bool]] = {
    "split": lambda layer: kind_of(layer) == "linear",
    "plain parts": by_hand,
    "vocabulary": lambda layer: derive(Tied(layer), 2)[0].get("head") == PlanRule("vocabulary"),
    "chunked loss": lambda layer: not refused(lambda: heads_over_vocabulary(Tied(layer))),
    "float8": lambda layer: not refused(lambda: check_layers(nn.Sequential(layer), (), None)),
    "postponed gradients": is_postponed,
    "tiles": lambda layer: bool(tile_linears(nn.Sequential(layer), 8)),
}
AROUND = {"plain parts", "tiles"}  # hooks would not get what torch gives them


@pytest.mark.parametrize("place", PLACES)
def test_layers_that_compute_something_else_are_not_replaced(place: str) -> None:
    for change, layers in LAYERS.items():
        for name, make in layers.items():
            expected = name == "Quiet" or (change == "hooks" and place not in AROUND)
            assert PLACES[place](make(WIDTH, WIDTH)) == expected, (change, name)
    assert PLACES[place](nn.Linear(WIDTH, WIDTH))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, input: 2 * F.linear(input, self.weight, self.bias))
        assert not PLACES[place](nn.Linear(WIDTH, WIDTH))


class Centred(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight - self.weight.mean(0))


class Shifted(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward((input + 2) % 24)


def with_hooks() -> nn.Embedding:
    table = nn.Embedding(24, WIDTH)
    table.register_forward_pre_hook(lambda _, args: ((args[0] + 5) % 24,))
    table.register_forward_hook(lambda _, args, output: output - output.mean(1, keepdim=True))
    return table


TABLES: dict[str, Callable[[], nn.Module]] = {
    "Centred": lambda: Centred(24, WIDTH),
    "Shifted": lambda: Shifted(24, WIDTH),
    "weight norm": lambda: parametrizations.weight_norm(nn.Embedding(24, WIDTH)),
    "hooks": with_hooks,
}


@pytest.mark.parametrize("name", TABLES)
def test_embeddings_that_compute_something_else_are_no_tables(name: str) -> None:
    model = nn.ModuleDict({"tokens": TABLES[name]()})
    assert refused(lambda: find_tables(model, ["tokens"], {})) == (name != "hooks")
    assert (kind_of(model["tokens"]) == "embedding") == (name == "hooks")


def normed(net: Any, x: Tensor) -> Tensor:
    return 3 * F.linear(F.normalize(x, dim=-1), F.normalize(net.head.weight, dim=-1))


def through_the_table(net: Any, x: Tensor) -> Tensor:
    return x @ net.tokens.weight.T


# Models whose embeddings or heads are read by more than their own forward.
NETS: dict[str, Callable[[], nn.Module]] = {
    **{name: (lambda make=make: Net(make())) for name, make in TABLES.items()},
    "tied to a centred table": lambda: Net(Centred(24, WIDTH), tied=True),
    "hooks of a tied table": lambda: Net(with_hooks(), tied=True),
    "head read by other code": lambda: Net(logits=normed),
    "table read by other code": lambda: Net(logits=through_the_table),
}
ROLES = ("up", "down", "head")
EVERY = [(name, role, make) for layers in LAYERS.values() for name, make in layers.items() for role in ROLES]
SOME = {("Lora", "up"), ("Centred", "head"), ("a method", "down"), ("of the input", "down"), ("of the output", "up"),
    ("older weight norm", "up"), ("spectral norm", "down")}  # fmt: skip


def same_as_plain(settings: dict[str, Any], each: bool) -> Any:
    for name, role, make in EVERY:
        if each or (name, role) in SOME:

            def build(make: Make = make, role: str = role) -> nn.Module:
                torch.manual_seed(0)
                return Net(**{role: make})

            shapes = require_same_training(build, token_pair, {"train_batch_size": 4, **settings})
            assert role == "up" or shapes["blocks.0.fc1.weight"] == (WIDTH, WIDTH), (name, role)
    return True


@pytest.mark.parametrize(
    ("settings", "each"),
    [
        ({"mesh": {"tensor": 2}}, False),
        pytest.param({"mesh": {"tensor": 2}}, True, marks=pytest.mark.full),
        pytest.param({"mesh": {"tensor": 2}, "tensor_parallel": {"sequence": True}}, True, marks=pytest.mark.full),
        pytest.param({"mesh": {"tensor": 2}, "zero_optimization": {"stage": 3}}, True, marks=pytest.mark.full),
    ],
)
def test_models_of_changed_layers_train_as_in_one_process(settings: dict[str, Any], each: bool) -> None:
    assert all(run_ranks(same_as_plain, 2, settings, each, timeout=LIMIT))


def nets_as_plain(names: list[str]) -> Any:
    for name in names:

        def build(name: str = name) -> nn.Module:
            torch.manual_seed(0)
            return NETS[name]()

        require_same_training(build, token_pair, {"train_batch_size": 4, "mesh": {"tensor": 2}})
    return True


def test_weights_that_other_code_reads_are_whole() -> None:
    assert all(run_ranks(nets_as_plain, 2, list(NETS), timeout=LIMIT))


class Squashed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.norm(dim=-1, keepdim=True))


def replaced_mlp(block: Any) -> None:
    block.mlp.forward = types.MethodType(lambda self, x: self.down_proj(self.up_proj(x).softmax(-1)), block.mlp)


# A change in a block of transformers' Llama -> names of layers beside it that give, or take, whole activations then.
CHANGES: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "layer": (lambda block: parametrizations.weight_norm(block.self_attn.q_proj), "self_attn.k_proj", "q_proj"),
    "hook": (lambda block: block.self_attn.q_proj.register_forward_hook(lambda *_: None), "self_attn.q_proj", ""),
    "activation": (lambda block: setattr(block.mlp, "act_fn", Squashed()), "mlp.up_proj", ""),
    "forward": (replaced_mlp, "mlp.up_proj", ""),
    "last layer": (lambda block: parametrizations.weight_norm(block.mlp.down_proj), "mlp.up_proj", "down_proj"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_modules_of_transformers_get_no_parts(name: str) -> None:
    model: Any = llama(torch.float32)
    change, gathered, whole = CHANGES[name]
    assert derive(model, 2)[0][f"model.layers.*.{gathered}"].style == "colwise"
    for block in model.model.layers:
        change(block)
    plan, _ = derive(model, 2)
    assert plan[f"model.layers.*.{gathered}"].style in ("colwise_gather_output", "colwise_parts")
    assert not whole or not any(path.endswith(whole) for path in plan)
    resolve(model, {}, plan, 0, 2)


def test_a_plan_by_hand_for_a_changed_layer_names_the_reason_and_the_remedy() -> None:
    model = nn.Sequential(LAYERS["subclass"]["Lora"](WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ValueError, match=r"0 \(colwise\) is to compute what torch's Linear does, but Lora has forward"):
        resolve(model, parse({"0": "colwise", "1": "rowwise"}), {}, 0, 2)
    tied = nn.Sequential(nn.Linear(WIDTH, 24, bias=False), Centred(24, WIDTH))
    tied[0].weight = tied[1].weight
    with pytest.raises(ValueError, match=r"0.weight and 1.weight are one parameter, which 1 \(Centred\) reads whole"):
        resolve(tied, parse({"0": "vocabulary"}), {}, 0, 2)


# Files that look at the class of a layer, or replace a forward, and why none of them needs to ask more.
LOOKS = {
    "base/dry/model_inputs.py": "guesses inputs",
    "shard/optim/groups.py": "chooses parameters",
    "apps/plan/cost/estimate.py": "counts bytes",
    "apps/plan/cost/packed.py": "counts bytes",
    "apps/train/model.py": "names targets of adapters",
    "parallel/context/torch_attention.py": "refuses",
    "shard/tables/find_tables.py": "asks",
    "shard/tables/tables.py": "is given tables",
    "base/tiled.py": "asks",
    "parallel/tensor/float8_layers.py": "asks",
    "parallel/tensor/derive.py": "asks",
    "parallel/tensor/split_model.py": "is given a plan",
    "parallel/tensor/styles.py": "is given a plan",
    "parallel/tensor/split_plan.py": "asks",
    "parallel/tensor/tensor_plan.py": "asks",
    "base/substitution.py": "answers",
    "base/linear_arithmetic.py": "answers",
    "parallel/pipeline/runtime/weight_gradients.py": "asks",
    "parallel/follow/activation_parts.py": "runs the user's forward",
    "parallel/activation/checkpoint.py": "runs the user's forward",
    "parallel/activation/tiles.py": "runs the user's forward",
    "parallel/pipeline/runtime/stage.py": "runs the user's forward",
    "parallel/context/huggingface_decoders.py": "runs the user's forward",
    "parallel/context/followed_sequences.py": "runs the user's forward",
    "shard/tables/table.py": "is given tables",
    "parallel/tensor/traced_plan.py": "runs the user's forward",
    "parallel/tensor/published.py": "asks",
    "shard/parameters/use_order.py": "asks",
    "base/dtypes.py": "names layers",
    "shard/parameters/materialise.py": "refuses",
    "parallel/expert/router.py": "runs the user's forward",
    "parallel/expert/auxiliary_loss.py": "runs the user's forward",
    "parallel/expert/place.py": "runs the user's forward",
    "parallel/expert/stacked.py": "runs the user's forward",
    "parallel/expert/lists.py": "runs the user's forward",
}
CLASSES = "Linear|Embedding|EmbeddingBag|LayerNorm|RMSNorm|MultiheadAttention|TransformerEncoderLayer"
PATTERN = re.compile(
    rf"(isinstance\([^)]*|type\(\w+\) (is|in|==) .*)nn\.({CLASSES})\b"
    r"|(module|model|layer)\.forward = |change\(.*forward=|replace_forward\("
)


def test_every_place_that_looks_at_classes_of_layers_is_known() -> None:
    root = Path(zeromesh.__file__).parent
    found = {str(path.relative_to(root)) for path in root.rglob("*.py") if PATTERN.search(path.read_text())}
    assert found - LOOKS.keys() == set()  # a new place asks ``base/substitution.py``, and gets a row in PLACES


@on_ranks(2, timeout=LIMIT)
def test_hooks_that_are_registered_later_are_refused_where_they_would_get_parts() -> None:
    said = []
    for name, register in (("0", "register_forward_hook"), ("1", "register_forward_pre_hook")):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        config = {
            "train_batch_size": 4, "mesh": {"tensor": 2}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "tensor_parallel": {"plan": {"0": "colwise", "1": "rowwise"}},
        }  # fmt: skip
        engine = zeromesh.initialize(model=model, config=config)[0]
        engine(torch.ones(4, WIDTH))
        handle = getattr(engine.module.get_submodule(name), register)(lambda *_: None)
        with pytest.raises(ValueError, match=f"{name} .* has hooks, .* rank's part") as error:
            engine(torch.ones(4, WIDTH))
        handle.remove()
        engine(torch.ones(4, WIDTH))
        engine.destroy()
        said.append(str(error.value))
    assert all("register the hooks on the module around" in message for message in said)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.full)])
@on_ranks(2, timeout=LIMIT)
def test_code_that_changes_later_is_refused_where_it_would_get_parts(compiled: bool) -> None:
    model = MODELS["llama"].build()
    config = {"train_batch_size": 1, "mesh": {"tensor": 2}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    config["compile"] = {"enabled": compiled, "backend": "eager"}
    engine = zeromesh.initialize(model=model, config=config)[0]
    mlp = engine.module.model.layers[1].mlp
    ids, gelu, forward = torch.ones(1, 4, dtype=torch.int64), mlp.act_fn, mlp.up_proj.forward
    mlp.register_forward_hook(lambda *_: None)  # is given what plain torch gives it
    engine(input_ids=ids)
    handle = gelu.register_forward_hook(lambda _, args, output: output.softmax(-1))
    with pytest.raises(ValueError, match=r"inside of model.layers.1.mlp \(LlamaMLP\) have changed"):
        engine(input_ids=ids)
    handle.remove()
    mlp.act_fn = nn.Softmax(-1)
    with pytest.raises(ValueError, match=r"inside of model.layers.1.mlp \(LlamaMLP\) have changed"):
        engine(input_ids=ids)
    mlp.act_fn, mlp.up_proj.forward = gelu, lambda x: forward(x).softmax(-1)
    with pytest.raises(ValueError, match=r"inside of model.layers.1.mlp \(LlamaMLP\) have changed"):
        engine(input_ids=ids)
    mlp.up_proj.forward = forward
    mlp.forward, own = lambda x: mlp.down_proj(mlp.up_proj(x).softmax(-1)), mlp.__dict__.get("forward")
    with pytest.raises(ValueError, match=r"inside of model.layers.1.mlp \(LlamaMLP\) have changed"):
        engine(input_ids=ids)
    mlp.__dict__.pop("forward") if own is None else setattr(mlp, "forward", own)
    handle = mlp.register_forward_hook(lambda mlp, args, output: output * mlp.up_proj.weight.mean())
    with pytest.raises(ValueError, match=r"hook of model.layers.1.mlp \(LlamaMLP\) reads weights of its layers"):
        engine(input_ids=ids)
    handle.remove()
    mlp.register_forward_hook(lambda mlp, args, output: output * ids.weight if output is None else output)
    mlp.up_proj.compile(backend="eager")
    engine(input_ids=ids)
    engine.destroy()
