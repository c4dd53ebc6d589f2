"""Models whose code is given parts of sequences that stand for the whole: any code, as in one process."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeromesh
from harness import run_ranks
from huggingface_models import MODELS
from test_context import fake
from token_programs import Twice as Doubled
from zeromesh import Mesh
from zeromesh.parallel.context.applied import SpreadSequences, Unsupported
from zeromesh.parallel.context.spread_batch import IGNORE_LABEL
from zeromesh.parallel.context.spread_model import apply

LENGTH, WIDTH, HEADS, VOCABULARY = 16, 32, 4, 96


class OwnBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Doubled.apply(x)


class Clamped(torch.autograd.Function):
    """A backward that is not linear: it must be given the gradients of one process."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-4, 1e-4) / gradient.norm()


class Seeding(Clamped):
    """Draw a seed, as the reversible layers of Reformer do in each forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.seed()
        return x.clone()


class Noisy(Clamped):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class Writing(Clamped):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Applying(nn.Module):
    """A function with a backward of its own, of parts, and no state that a call changes."""

    def __init__(self, kind: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return self.kind.apply(2 * x)


class OfWholes(nn.Module):
    """Backwards that are not linear, of a parameter, and of what a convolution makes of whole sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.scale = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return Clamped.apply(self.convolution(x.transpose(1, 2))).transpose(1, 2) * Clamped.apply(self.scale)


class Counting(nn.Module):
    """A state that each call changes once, before what needs whole activations."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))
        self.register_buffer("last", torch.zeros(2, LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        self.last.copy_(x.detach()).mul_(0.5)
        hooked = x * self.mean.clone() + self.last.clone()
        hooked.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        hooked.register_hook(lambda gradient: [gradient.clamp_(-5e-4, 5e-4), None][1])
        return Clamped.apply(hooked) + checkpoint(torch.cumsum, x, 1, use_reentrant=True)


class Twice(nn.Module):
    """Change an input, and then do what only a whole can do."""

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return torch.vmap(lambda row: row.cumsum(0))(x)


LAYERS: dict[str, Any] = {
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.0, batch_first=True), 2, enable_nested_tensor=False
    ),
    "multi-head attention": lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
    "recurrent": lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    "convolution": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "own backward": OwnBackward,
    "own backward that draws": lambda: Applying(Seeding),
    "own backward of wholes": OfWholes,
    "states and gradients": Counting,
}


class Sequences(nn.Module):
    """Embedding, something that mixes tokens, and a head; with a mask of tokens, and a loss of their own labels."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.layer = LAYERS.get(kind, nn.Identity)()
        self.projections, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        y = self.head(x + self.mixed(x, mask))
        return y if labels is None else F.cross_entropy(y.flatten(0, 1), labels.flatten())

    def mixed(self, x: Tensor, mask: Tensor | None) -> Tensor:
        hidden = None if mask is None else mask == 0
        q, k, v = self.projections(x).view(*x.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        match self.kind:
            case "encoder":
                return self.layer(x, src_key_padding_mask=hidden)
            case "multi-head attention":
                return self.layer(x, x, x, key_padding_mask=hidden)[0]
            case "recurrent":
                return self.layer(x)[0]
            case "convolution" | "batch norm":
                return self.layer(x.transpose(1, 2)).transpose(1, 2)
            case "over tokens":
                return x.roll(1, 1) + x.cumsum(1) / 8 + x.mean(1, keepdim=True) + x[:, :1]
            case "window" | "window by heads":
                places = torch.arange(x.shape[1])
                seen = (places[:, None] - places).abs() < 5
                seen = seen if hidden is None else seen & ~hidden[:, None, None]
                seen = seen if self.kind == "window" else seen & torch.ones(HEADS, 1, 1, dtype=torch.bool)
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            case "causal":
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            case "products":
                scores = q @ k.transpose(-1, -2)
                y = (scores if hidden is None else scores.masked_fill(hidden[:, None, None], -1e9)).softmax(-1) @ v
            case "letters":
                y = torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)
            case _:
                return self.layer(x)
        return y.transpose(1, 2).flatten(2)


KINDS = [*LAYERS, "over tokens", "window", "window by heads", "causal", "products", "letters"]


def data() -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    labels, mask = tokens.clone(), torch.ones_like(tokens)
    labels[0, 3:7], mask[0, :3], mask[1, 12:] = IGNORE_LABEL, 0, 0
    return tokens, mask, labels


def spread(model: nn.Module) -> SpreadSequences:
    return apply(model, "auto", Mesh({"context": dist.get_world_size()}, torch.device("cpu")).group("context"))


def train(kind: str, spreads: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Return the losses of the model, and of its output, with the gradients of their sum."""
    torch.manual_seed(0)
    model = Sequences(kind).double().train()
    applied = spread(model) if spreads else None
    tokens, mask, labels = data()
    losses = [model(tokens, mask, labels)]
    output, own = model(tokens), labels if applied is None else applied.part(labels)
    losses.append(F.cross_entropy(output.flatten(0, 1), own.flatten()))
    if applied is not None:
        losses[1] = applied.mean_loss(losses[1], own)
    sum(losses).backward()
    gradients = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
    return [loss.detach() for loss in losses], gradients


def require_equal(kinds: list[str]) -> None:
    for kind in kinds:
        losses, gradients = train(kind, False)
        found, means = train(kind, True)
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=0)
        assert means.keys() == gradients.keys()
        for name, want in gradients.items():
            dist.all_reduce(means[name])
            mean = means[name] / dist.get_world_size()
            torch.testing.assert_close(mean, want, rtol=1e-9, atol=1e-12, msg=f"{kind}: {name}")


def test_any_code_trains_as_in_one_process() -> None:
    run_ranks(require_equal, 2, KINDS)


@pytest.mark.full
def test_any_code_trains_as_in_one_process_on_four_ranks() -> None:
    run_ranks(require_equal, 4, KINDS)


def refused() -> None:
    tokens, mask, labels = data()
    for kind, said in ((Noisy, "draws numbers that differ between ranks"), (Writing, "writes to an activation")):
        model = Sequences("identity")
        model.layer = Applying(kind)
        spread(model)
        torch.manual_seed(dist.get_rank())
        with pytest.raises(Unsupported, match=f"{kind.__name__} cannot run .*a backward of its own, and {said}"):
            model(tokens, mask, labels)


def test_own_backwards_of_what_only_one_rank_computes_are_refused() -> None:
    run_ranks(refused, 2)


def kept(kind: str, spreads: bool) -> tuple[int, tuple[int, ...]]:
    """Return the bytes that are kept for the backward, and the shape of the output."""
    model, storages = Sequences(kind).double(), {}
    if spreads:
        spread(model)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = model(data()[0])
    return sum(size for place, size in storages.items() if place not in own), tuple(output.shape)


def test_a_rank_has_its_part_of_activations_and_of_outputs() -> None:
    (whole, shape), *_ = run_ranks(kept, 1, "products", False)
    assert shape == (2, LENGTH, VOCABULARY)
    for part, own_shape in run_ranks(kept, 2, "products", True):
        assert own_shape == (2, LENGTH // 2, VOCABULARY)
        assert part < 0.7 * whole  # it has all keys and values


SETTINGS = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "gradient_clipping": 0.5,
}


def train_engine(kind: str, ranks: int, settings: dict[str, Any]) -> list[float]:
    torch.manual_seed(0)
    model, (tokens, mask, labels) = Sequences(kind).double(), data()
    model.blocks = nn.ModuleList([model.layer])
    engine = zeromesh.initialize(model=model, config={**SETTINGS, **settings, "mesh": {"context": ranks}})[0]
    found = []
    for step in range(3):
        loss = engine(tokens, mask if step % 2 else None, labels)
        engine.backward(loss)
        engine.step()
        found += [float(loss), float(engine.get_global_grad_norm())]
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("encoder", {"zero_optimization": {"stage": 3}, "activation_checkpointing": {"enabled": True}}),
        pytest.param("convolution", {"zero_optimization": {"stage": 2}}, marks=pytest.mark.full),
        pytest.param(
            "encoder",
            {"activation_checkpointing": {"enabled": True, "cpu_checkpointing": True}},
            marks=pytest.mark.full,
        ),
    ],
)
def test_an_engine_trains_any_code_as_in_one_process(kind: str, settings: dict[str, Any]) -> None:
    (want,) = run_ranks(train_engine, 1, kind, 1, settings)
    for found in run_ranks(train_engine, 2, kind, 2, settings):
        assert found == pytest.approx(want, rel=1e-9)


def test_the_reason_is_told_and_what_does_not_work_together_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "zeromesh"):
        assert apply(Sequences("encoder"), "auto", fake(2)).consecutive
    assert "takes no position_ids or positions" in caplog.text
    assert "its code is given tokens of all ranks where it needs them" in caplog.text
    with pytest.raises(Unsupported, match="takes no position_ids") as refused:
        apply(Sequences("encoder"), "auto", fake(2), others=["mesh.tensor"])
    assert "do not work with mesh.tensor" in refused.value.__notes__[0]
    model = Sequences("encoder")
    apply(model, "auto", fake(2))
    with pytest.raises(ValueError, match="a sequence has 15 tokens, which cannot be cut into"):
        model(torch.zeros(2, 15, dtype=torch.long))


def test_layers_that_ranks_would_draw_differently_are_refused() -> None:
    model = Sequences("encoder")
    model.config = SimpleNamespace(layerdrop=0.1)
    with pytest.raises(Unsupported, match=r"layerdrop is 0\.1"):
        apply(model, "auto", fake(2))


class Later(nn.Module):
    """Causal attention at first, and something else from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.causal = nn.Embedding(VOCABULARY, 8), True

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        x = self.embedding(tokens)[:, None]
        y = F.scaled_dot_product_attention(x, x, x, is_causal=self.causal)
        return y[:, 0]


def orders() -> list[bool]:
    tokens, found = data()[0], []
    for first in (True, False):
        model = Later()
        applied, model.causal = spread(model), first
        model(tokens)
        found.append(applied.consecutive)
    model.causal = True
    model(tokens)
    later = Later()
    spread(later)
    later(tokens)
    later.causal = False
    with pytest.raises(Unsupported, match="its attention is not causal"):
        later(tokens)
    return found


def test_the_first_forward_says_which_tokens_ranks_have() -> None:
    assert run_ranks(orders, 2) == [[False, True]] * 2


class Pooled(nn.Module):
    """A model of transformers in code that mixes its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MODELS["llama"].build().model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        return self.inner(input_ids).last_hidden_state.mean(1).square().mean()


def weighted(logits: Tensor, labels: Tensor, vocab_size: int, shift_labels: Any = None, **_: Any) -> Tensor:
    """Compute no mean over tokens."""
    labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_LABEL) if shift_labels is None else shift_labels
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), torch.linspace(0.1, 2.0, vocab_size).to(logits))


def losses_of() -> list[bool]:
    found = []
    for name in ("pooled", "weighted"):
        torch.manual_seed(0)
        model = Pooled() if name == "pooled" else MODELS["llama"].build()
        if name == "weighted":
            model.loss_function = weighted
        tokens, _, labels = data()
        with torch.no_grad():
            want, applied = model(input_ids=tokens, labels=labels), spread(model)
            found_loss = model(input_ids=tokens, labels=labels)
        both = [x if isinstance(x, Tensor) else x.loss for x in (want, found_loss)]
        torch.testing.assert_close(both[0], both[1])
        found.append(applied.consecutive)
    return found


def test_code_around_a_model_and_losses_that_are_no_means_are_followed() -> None:
    assert run_ranks(losses_of, 2) == [[True, True]] * 2


def changes_twice() -> None:
    x = torch.ones(2, LENGTH, 4)
    model = nn.Sequential(Twice())
    spread(model)
    with pytest.raises(Unsupported, match="was given an activation of which each rank has a part"):
        model(x * 1)


def test_a_module_that_has_changed_something_is_not_called_again() -> None:
    run_ranks(changes_twice, 2)


class Shared(nn.Module):
    inner = nn.GELU()  # of all models, as transformers has some

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.act = nn.Embedding(VOCABULARY, 8), self.inner

    def forward(self, tokens: Tensor) -> Tensor:
        return self.act(self.embedding(tokens))


def share() -> None:
    tokens = data()[0]
    other, model = Shared(), Shared()
    before = other(tokens)
    spread(model)
    assert model(tokens).shape[1] == LENGTH // 2
    after = other(tokens)
    assert type(after) is Tensor
    assert torch.equal(after, before)


def test_another_model_that_shares_a_module_computes_as_before() -> None:
    run_ranks(share, 2)
