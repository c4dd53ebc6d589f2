"""Tiles over tokens: modules that treat tokens apart compute a few at a time, and the numbers are those of torch."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import zeromesh
from harness import run_ranks
from huggingface_models import MODELS
from zeromesh.config.settings import Settings
from zeromesh.parallel.activation.activation_store import ActivationStore
from zeromesh.parallel.activation.checkpoint import checkpoint_modules
from zeromesh.parallel.activation.selective import GRANULARITIES
from zeromesh.parallel.activation.tiles import find_tiled, tile_modules

TOKENS = 6  # of a tile: 3 of each of two samples, which do not divide their 8
TILED = (
    *("bloom", "clip", "deepseek_v3", "distilbert", "falcon", "gemma2", "gemma3", "gpt2", "gpt_neox", "granite"),
    *("llama", "phi3", "qwen2", "qwen3", "swin", "t5", "vit"),
)
LEFT_ALONE = sorted({*MODELS} - {*TILED})  # MLPs that are no module of their own, experts, convolutions


class Mlp(nn.Module):
    """Two layers: (batch, tokens, width) -> the same."""

    def __init__(self, width: int = 8, mixes: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.mixes = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), mixes

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        return self.down(hidden - hidden.mean(1, keepdim=True) if self.mixes else hidden)


def gradients(model: nn.Module, batch: dict[str, Any]) -> list[Tensor]:
    loss = model(**batch).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.some(3)
@pytest.mark.parametrize("name", sorted({*TILED} - {"clip", "swin", "deepseek_v3"}))  # no loss, windows, no float64
def test_losses_and_gradients_are_those_of_torch(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name].build().double().train()
    if name == "vit":
        batch = {"pixel_values": torch.randn(2, 3, 16, 16).double(), "labels": torch.tensor([0, 1])}
    else:
        ids = torch.randint(3, 90, (2, 8))
        batch = {"input_ids": ids, "labels": ids}
    tiled = copy.deepcopy(model)
    lengths: list[int] = []
    found = find_tiled(model)
    for path in found:
        inner = next(part for part in tiled.get_submodule(path).modules() if hasattr(part, "weight"))
        inner.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    tile_modules(tiled, found, TOKENS)
    expected = gradients(model, batch)
    for actual, wanted in zip(gradients(tiled, batch), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-14)  # sums over tokens have another order
    assert lengths
    assert max(lengths) == TOKENS // 2


@pytest.mark.full
@pytest.mark.parametrize("name", LEFT_ALONE)
def test_other_models_have_nothing_to_tile(name: str) -> None:
    with pytest.raises(ValueError, match=r"no module of \w+ is known to compute each token by itself"):
        find_tiled(MODELS[name].build())


def test_modules_that_are_not_proven_are_refused_with_the_reason() -> None:
    model = nn.ModuleDict({"apart": Mlp(), "mixes": Mlp(mixes=True)})
    assert [*find_tiled(model)] == ["apart"]
    with pytest.raises(ValueError, match=r"tiling.modules has mixes \(Mlp\).*mean, in \S*test_tiles.py:\d+"):
        find_tiled(model, [("mixes", model["mixes"])])
    mixture = MODELS["mixtral"].build()
    name, block = next((n, m) for n, m in mixture.named_modules() if type(m).__name__ == "MixtralSparseMoeBlock")
    with pytest.raises(ValueError, match="it chooses experts"):
        find_tiled(mixture, [(name, block)])


def test_a_call_that_was_not_checked_is_refused() -> None:
    model = nn.Sequential(Mlp())
    tile_modules(model, find_tiled(model), 2)
    with pytest.raises(ValueError, match="0 \\(Mlp\\) is called with other arguments"):
        model[0](torch.zeros(8))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tiling": {"modules": ["mlp"]}}, "tiling.mlp does not say"),
        ({"tiling": {"mlp": "width"}, "compile": True}, "compile.enabled is true"),
        ({"tiling": {"mlp": 8}, "tensor_parallel": {"sequence": True}}, "tensor_parallel.sequence is true"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings.load({"train_batch_size": 1} | settings)


def mean_off(_: Any, args: Any, output: Tensor) -> Tensor:
    return output - output.mean(1, keepdim=True)


def test_what_changes_inside_of_a_tiled_module_later_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Mlp(), With(of_third_dim), Mlp())
    plain = copy.deepcopy(model)
    tile_modules(model, find_tiled(model), 2)
    x = torch.randn(1, 5, 8)
    lengths: list[int] = []

    def compare() -> None:
        lengths.clear()
        torch.testing.assert_close(model(x), plain(x))
        assert lengths == [5, 5]

    for both in (model, plain):
        both[2].up.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    compare()
    for both in (model, plain):
        both[1].function = of_mode
        both[0].up.register_forward_hook(mean_off)
    compare()
    assert [text.partition(" have ")[0] for text in caplog.messages] == [
        "hooks or attributes of 2.up", "hooks or attributes of 0.up", "hooks or attributes of 1"
    ]  # fmt: skip
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(x), plain(x))


def test_a_hook_in_the_place_of_another_or_in_a_copy_is_seen() -> None:
    model = Mlp()
    handle = model.up.register_forward_hook(lambda *_: None)
    tiled = nn.Sequential(model)
    tile_modules(tiled, find_tiled(tiled, [("0", model)]), 2)
    copied, plain, x = copy.deepcopy(tiled), Mlp(), torch.randn(1, 5, 8)
    plain.load_state_dict(model.state_dict())
    handle.remove()
    for hooked in (model, copied[0], plain):
        hooked.up._forward_hooks.clear()
        hooked.up.register_forward_hook(mean_off)
    torch.testing.assert_close(tiled(x), plain(x))
    torch.testing.assert_close(copied(x), plain(x))


class PreNorm(nn.Module):
    """A block that ends with its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


@pytest.mark.some(2)
@pytest.mark.parametrize("around", ["torch", "ours", "host", "selective", "nothing"])
def test_a_recomputed_block_computes_its_tiles_twice(around: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(PreNorm(), PreNorm()).double()
    lengths: list[int] = []
    for block in model:
        block.mlp[0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    plain = copy.deepcopy(model)
    tile_modules(plain, find_tiled(plain, plain.named_children()), 3)  # dropout draws in the same order
    tile_modules(model, find_tiled(model), 3)
    if around in ("ours", "host", "selective"):
        store = ActivationStore(torch.device("cpu"), host=True) if around == "host" else None
        plan = GRANULARITIES["selective"] if around == "selective" else None
        checkpoint_modules(model, store, plan)
    x = torch.randn(1, 8, 8).double()

    def gradients_of(model: Any, again: bool) -> list[Tensor]:
        torch.manual_seed(3)
        lengths.clear()
        output = x
        for block in model:
            output = torch_checkpoint(block, output, use_reentrant=False) if again else block(output)
        output = output.square().sum()
        inputs = list(model.parameters())
        gradients = torch.autograd.grad(output, inputs, retain_graph=True)
        second = torch.autograd.grad(output, inputs)
        torch.testing.assert_close(gradients, second, rtol=0, atol=0)
        return [output.detach(), *gradients]

    actual = gradients_of(model, around == "torch")
    assert lengths == [3, 3, 2, 3, 3, 2, *[2, 3, 3] * 4]
    torch.testing.assert_close(actual, gradients_of(plain, False), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("way", ["hook", "dropout", "compile", "vmap", "jvp"])
def test_what_has_no_say_in_tokens_leaves_tiles_as_they_are(way: str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 8))).double().eval()
    plain, lengths, x = copy.deepcopy(model), list[int](), torch.randn(2, 1, 8, 8).double()
    if way != "compile":  # which takes no hook that changes something
        model[0][0].register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    tile_modules(model, find_tiled(model), 3)

    def changed(both: Any) -> Any:
        if way == "hook":
            both[0].register_forward_hook(lambda _, args, output: output - args[0].mean(1, keepdim=True))
        if way == "dropout":
            both[0][1].p = 0.1
        if way == "vmap":
            return torch.func.vmap(both)
        if way == "jvp":
            return lambda x: torch.func.jvp(both, (x,), (x.cos(),))[1]
        return torch.compile(both, backend="eager", fullgraph=True) if way == "compile" else both

    call = changed(model)
    lengths.clear()
    x = x if way == "vmap" else x[0]
    output = call(x)
    assert lengths == ([] if way == "compile" else [3, 3, 2])
    expected = changed(plain)(x)
    torch.testing.assert_close(output, expected)
    actual, wanted = (
        torch.autograd.grad(result.square().sum(), list(part.parameters()), materialize_grads=True)
        for result, part in ((output, model), (expected, plain))
    )
    torch.testing.assert_close(actual, wanted)


def test_dropout_is_drawn_alike_in_the_recomputation() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 8)))
    tile_modules(model, find_tiled(model), 3)
    x = torch.randn(1, 8, 8)
    torch.manual_seed(3)
    output = model(x)
    weight = torch.randn(8)
    (output * weight).sum().backward()
    # The gradient of the last weight is made of what dropout has left, and the output is that times the weight.
    last = model.get_submodule("0.2")
    assert isinstance(last, nn.Linear)
    assert last.weight.grad is not None
    product = (last.weight * last.weight.grad).sum()
    torch.testing.assert_close(product, ((output - last.bias) * weight).sum())


def losses(name: str, settings: dict[str, Any], tiling: dict[str, Any] | None) -> list[float]:
    torch.manual_seed(0)
    model = MODELS[name].build().double().train()
    if settings.get("lora"):
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    chosen = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        **{key: value for key, value in settings.items() if key != "lora"},
    }
    engine = zeromesh.initialize(model=model, config=chosen | ({"tiling": tiling} if tiling else {}))[0]
    found = []
    for step in range(2):
        parts = []
        for part in range(2):
            ids = torch.randint(3, 90, (4, 8), generator=torch.Generator().manual_seed(2 * step + part))
            ids = ids.chunk(engine.data_size)[engine.data_rank]
            parts.append({"input_ids": ids, "labels": ids})
        found += [float(engine.train_batch(iter(parts))), engine.get_global_grad_norm() or 0.0]
    engine.destroy()
    return found


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO-0": (1, {}),
    "ZeRO-1": (2, {"zero_optimization": {"stage": 1}}),
    "ZeRO-2": (2, {"zero_optimization": {"stage": 2}}),
    "ZeRO-3": (2, {"zero_optimization": {"stage": 3}}),
    "recomputed": (2, {"zero_optimization": {"stage": 3}, "activation_checkpointing": {"enabled": True}}),
    "selective": (1, {"activation_checkpointing": {"enabled": True, "granularity": "selective"}}),
    "tensor ranks": (2, {"mesh": {"tensor": 2}}),
    "context ranks": (2, {"mesh": {"context": 2}}),
    "stages": (2, {"mesh": {"pipeline": 2}}),
    "adapters": (1, {"lora": True}),
    "adapters, ZeRO-3": (2, {"lora": True, "zero_optimization": {"stage": 3}}),
}


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_is_that_without_tiles(layout: str) -> None:
    ranks, settings = LAYOUTS[layout]
    plain = run_ranks(losses, ranks, "llama", settings, None)
    # Sums over tokens are added up in another order.
    for tiled, expected in zip(
        run_ranks(losses, ranks, "llama", settings, {"mlp": 3, "loss": True}), plain, strict=True
    ):
        assert tiled == pytest.approx(expected, rel=1e-9)


@pytest.mark.some(1)
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize(
    ("precision", "bound"),
    [
        ({"bf16": {"enabled": True}}, 2**-6),
        ({"fp16": {"enabled": True, "loss_scale": 128.0}}, 2**-9),
        ({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, 2**-6),
    ],
)
def test_tiles_in_16_bits_differ_by_their_roundoff(precision: dict[str, Any], bound: float, recomputed: bool) -> None:
    def train(tiling: dict[str, Any] | None) -> list[float]:
        torch.manual_seed(0)
        again = {"activation_checkpointing": {"enabled": True}} if recomputed else {}
        chosen = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **precision, **again}
        chosen |= {"tiling": tiling} if tiling else {}
        engine = zeromesh.initialize(model=MODELS["llama"].build(), config=chosen)[0]
        ids = torch.randint(3, 90, (2, 8), generator=torch.Generator().manual_seed(0))
        found = [float(engine.train_batch(iter([{"input_ids": ids, "labels": ids}]))) for _ in range(3)]
        engine.destroy()
        return found

    plain = train(None)
    # Gradients of weights are rounded once more for each tile: a few units of the dtype's roundoff.
    assert train({"mlp": 3, "loss": True}) == pytest.approx(plain, rel=bound)
    assert plain[2] < plain[0]


def of_mode(hidden: Tensor, module: nn.Module) -> Tensor:
    return hidden - hidden.mean(1, keepdim=True) if module.training else hidden


def of_length(hidden: Tensor, _: nn.Module) -> Tensor:
    return hidden * 2 if hidden.shape[-2] > 200 else hidden


def of_first_dim(hidden: Tensor, _: nn.Module) -> Tensor:
    return hidden - hidden.mean(0, keepdim=True)


def of_third_dim(hidden: Tensor, _: nn.Module) -> Tensor:
    return hidden - hidden.mean(2, keepdim=True) if hidden.ndim == 4 else hidden


def of_three_dims(hidden: Tensor, _: nn.Module) -> Tensor:
    samples, tokens, width = hidden.shape
    return hidden.view(samples * tokens, width).view(samples, tokens, width)


def of_large_batch(hidden: Tensor, _: nn.Module) -> Tensor:
    return hidden - hidden.mean(1, keepdim=True) if len(hidden) > 1 else hidden


def with_count(hidden: Tensor, module: Any) -> Tensor:
    module.calls = getattr(module, "calls", 0) + 1
    return hidden * module.calls


def with_average(hidden: Tensor, module: Any) -> Tensor:
    return hidden * module.average.mul_(0.9)


def with_new_average(hidden: Tensor, module: Any) -> Tensor:
    module.average = module.average * 0.9
    return hidden * module.average


class With(Mlp):
    """Layers with a function between them."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("average", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x), self))


@pytest.mark.parametrize("trains", [True, False])
def test_code_that_mixes_tokens_in_one_mode_or_at_some_sizes_is_refused(trains: bool) -> None:
    functions = {"mode": of_mode, "length": of_length, "batch": of_large_batch}
    model = nn.ModuleDict({name: With(function) for name, function in functions.items()}).train(trains)
    model["frozen"] = With(of_mode).eval()
    for name, module in model.named_children():
        with pytest.raises(ValueError, match=rf"has {name} \(With\), which cannot be computed in tiles"):
            find_tiled(model, [(name, module)])
    assert [model[name].training for name in model] == [trains, trains, trains, False]


class InPlace(Mlp):
    """Changes its argument."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


def test_code_that_would_change_something_in_each_tile_is_refused() -> None:
    average = "its buffer average"
    changes = [(average, With(with_average)), (average, With(with_new_average))]
    for changed, module in [*changes, ("an attribute", With(with_count)), ("its argument", InPlace())]:
        with pytest.raises(ValueError, match=f"it changes {changed}, which it would in each tile"):
            find_tiled(nn.Sequential(module), [("0", module)])


def test_numbers_of_dims_that_were_not_proven_are_refused() -> None:
    model = nn.ModuleList([With(of_first_dim), With(of_third_dim), With(of_three_dims)])
    found = find_tiled(model)
    assert [sorted(tiled.dims) for tiled in found.values()] == [[3, 4], [2, 3], [3]]
    x = torch.randn(1, 5, 8)
    expected = model[0](x)
    tile_modules(model, found, 2)
    torch.testing.assert_close(model[0](x), expected)
    with pytest.raises(ValueError, match="with 3 or 4 dims"):
        model[0](x[0])


def test_a_proof_is_for_modules_with_the_same_functions_and_hooks() -> None:
    model = nn.ModuleList(With(function) for function in (of_third_dim, of_length, of_third_dim, of_third_dim))
    model[2].up.register_forward_hook(lambda _, args, output: output - output.mean(1, keepdim=True))
    assert [*find_tiled(model)] == ["0", "3"]
