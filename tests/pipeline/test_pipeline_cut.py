"""Where models are cut into stages: their blocks, which stage needs which parameter, and what blocks cost.

That a parameter is where it is needed is seen by running the stages, each on a copy of the model that has its own
parameters only: losses and gradients are those of the whole model.
"""

import copy
import itertools
import logging
import random
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zeromesh
from huggingface_models import MODELS, Model
from zeromesh.base.dry.model_inputs import ModelInput
from zeromesh.base.precision import Precision
from zeromesh.engine.batches import loss_of
from zeromesh.parallel.pipeline.runtime.cut import examine, take_away
from zeromesh.parallel.pipeline.runtime.stage import Handed, Header, Stages
from zeromesh.parallel.pipeline.schedule.partition import Blocks, Cut, partition, starts_of

Call = Callable[[Any], Tensor]
"""From a model to its loss."""


def run_stages(model: nn.Module, cut: Cut, call: Call) -> tuple[Tensor, dict[str, Tensor], set[tuple[str, int]]]:
    """Return the loss, the gradients, and which parameters had one on which stage."""
    copies, handed, taken = [], [], [None]
    for stage in range(len(cut.starts)):
        one = copy.deepcopy(model)
        take_away(one, cut, [stage])
        copies.append(one)
        result = Stages(one, cut.blocks, cut.starts).run(stage, lambda one=one: call(one), taken[-1])
        if stage < len(cut.starts) - 1:
            handed.append(result)
            forms = result.header.forms
            tensors = [t.detach().requires_grad_(f.differentiable) for t, f in zip(result.tensors, forms, strict=True)]
            taken.append(Handed(tuple(tensors), Header.from_json(result.header.to_json())))
    result.backward()
    for sent, received in reversed(list(zip(handed, taken[1:], strict=True))):
        pairs = [(a, b.grad) for a, b in zip(sent.tensors, received.tensors, strict=True) if a.requires_grad]
        pairs = [(a, torch.zeros_like(a) if gradient is None else gradient) for a, gradient in pairs]
        torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
    gradients: dict[str, Tensor] = {}
    used = set()
    for stage, one in enumerate(copies):
        for name, parameter in one.named_parameters():
            if parameter.grad is not None:
                gradients[name] = gradients.get(name, 0) + parameter.grad
                used.add((name, stage))
    return result.detach(), gradients, used


def check(
    model: nn.Module,
    blocks: Blocks,
    stages: int,
    call: Call,
    tolerance: float = 1e-9,
    starts: Sequence[int] | None = None,
) -> None:
    """Stages compute what the whole model does, and none has a parameter that it does not use."""
    whole = copy.deepcopy(model)
    loss = call(whole)
    loss.backward()
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    cut = blocks.cut(starts_of("uniform", blocks, stages) if starts is None else starts)
    ours, gradients, used = run_stages(model, cut, call)
    torch.testing.assert_close(ours, loss.detach(), rtol=tolerance, atol=tolerance)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=tolerance, atol=tolerance, msg=lambda m: name + m)  # noqa: B023
    assert used == {(name, stage) for name in expected for stage in cut.stages[name]}


ROUTED = replace(MODELS["mixtral"], options={**MODELS["mixtral"].options, "output_router_logits": False})
WIDTH, VOCABULARY = 8, 20
HUGGINGFACE = {**{name: model for name, model in MODELS.items() if name not in ("albert", "clip")}, "mixtral": ROUTED}


def made(case: Model) -> tuple[nn.Module, Call]:
    torch.manual_seed(0)
    model = case.build().to(case.dtype).train()
    batch = case.batch(torch.Generator().manual_seed(0))
    batch = {k: v.to(case.dtype) if v.is_floating_point() else v for k, v in batch.items()}
    return model, lambda one: one(**batch, **case.arguments).loss


def names_of(case: Model) -> list[str]:
    outer = {
        kind: n for kind, n in case.blocks.items() if not any(kind.startswith(f"{other}.") for other in case.blocks)
    }
    return [kind.replace("#", str(number)) for kind, count in outer.items() for number in range(count)]


OTHERWISE = {
    "swin": [f"swin.encoder.layers.{n}" for n in range(2)],
    "resnet": [*(f"resnet.encoder.stages.{n}" for n in range(3)), "classifier.0", "classifier.1"],
    "convnext": [f"convnext.encoder.stages.{n}" for n in range(2)],
}
"""Blocks of models of which units are other parts."""


@pytest.mark.some(5)
@pytest.mark.parametrize("name", HUGGINGFACE)
def test_stages_of_one_block_compute_what_the_model_does(name: str) -> None:
    case = HUGGINGFACE[name]
    model, call = made(case)
    blocks = examine(model)
    assert blocks.operations is not None  # it was traced
    assert list(blocks.names) == OTHERWISE.get(name, names_of(case))
    check(model, blocks, len(blocks.names), call, case.tolerance)


@pytest.mark.full
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", HUGGINGFACE)
def test_stages_of_several_blocks_compute_what_the_model_does(name: str, stages: int) -> None:
    case = HUGGINGFACE[name]
    model, call = made(case)
    blocks = examine(model)
    check(model, blocks, min(stages, len(blocks.names)), call, case.tolerance)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "bert", *(n for n in HUGGINGFACE if n not in ("llama", "gpt2", "bert"))]
)
def test_stages_may_begin_inside_of_blocks(name: str) -> None:
    """With the same numbers, bit for bit, wherever a trace shows that it can be done."""
    case = HUGGINGFACE[name]
    model, call = made(case)
    blocks = examine(model, parts=True)
    assert [blocks.names[number] for number in blocks.outer] == list(examine(model).names)
    # Gradients of what all decoder blocks are given are summed in another order, as between whole blocks.
    exact = len(blocks.names) > len(blocks.outer) and name not in ("bart", "whisper")
    check(model, blocks, 0, call, 0.0 if exact else case.tolerance, range(len(blocks.names)))
    if name == "llama":
        layers = [f"model.layers.{layer}" for layer in range(3)]
        assert blocks.names == tuple(n for layer in layers for n in (layer, f"{layer}.post_attention_layernorm"))
        assert blocks.uses["model.layers.0.mlp.up_proj.weight"] == (1,)
        cut = blocks.cut(starts_of("best", blocks, 2))
        assert (cut.blocks, cut.starts) == ((*layers[:2], blocks.names[3], layers[2]), (0, 2))
        assert starts_of([0, 1], blocks, 2) == [0, 2]
        assert starts_of("type:Layer", blocks, 2) == [0, 4]


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class Shifted(nn.Linear):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return super().forward(x) + shift


class Halves(nn.Module):
    """A block of two modules, with the second of which a stage may begin unless ``kind`` says otherwise."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if kind == "written":
            self.second = Shift()
        if kind == "parameter":
            self.second, self.shift = Shifted(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        if kind == "buffer":
            self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "argument":
            x.data.mul_(1)
        early, x = x.tanh(), x + self.first(x)
        view = x.flatten(0, 1) if self.kind == "view" else None
        with torch.enable_grad() if self.kind == "context" else nullcontext():
            result = self.second(x, self.shift) if self.kind == "parameter" else self.second(x)
        if self.kind == "written":
            x += result
            return x
        if self.kind == "view":
            assert view is not None
            return view.view_as(x) + result
        return (early if self.kind == "early" else x) + result


@pytest.mark.parametrize("kind", ["", "early", "view", "written", "argument", "parameter", "context", "buffer"])
def test_stages_begin_inside_of_blocks_only_where_all_that_is_read_later_is_an_argument_there(kind: str) -> None:
    model = Decoder().double()
    for half in model.halves.values():
        for index in range(2):
            half[index] = Halves(kind).double()
    blocks = examine(model, parts=True)
    assert [name for name in blocks.names if "second" in name] == ([] if kind else list(blocks.names[1::2]))
    check(model, blocks, 0, of_tokens, 1e-12, range(len(blocks.names)))


class InPlace(nn.Module):
    """Writes to what a module of its own returned, which is this block's own memory."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.relu_(self.up(x)))
        return x + self.last(self.norm(x))


class Reconstructing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InPlace() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        target = x
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, target)


def test_a_stage_that_begins_inside_of_a_block_does_not_write_to_the_inputs() -> None:
    """Stand-ins for what other stages compute have the shape of the inputs, and the block writes to them."""
    model, x = Reconstructing().double(), torch.randn(3, WIDTH, dtype=torch.float64)
    before = x.clone()
    blocks = examine(model, sample=ModelInput((x,), lambda batch, model: model(*batch)), parts=True)
    assert "layers.1.norm" in blocks.names
    check(model, blocks, 0, lambda model: model(x), 1e-12, range(len(blocks.names)))
    assert torch.equal(x, before)


def test_blocks_that_are_recomputed_are_not_cut_through() -> None:
    model = MODELS["gpt2"].build()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    assert examine(model, parts=True).names == examine(model).names


def test_the_tower_that_is_called_first_is_cut() -> None:
    """What it ends with is not among what the blocks of the other are called with."""
    model, call = made(MODELS["clip"])
    blocks = examine(model)
    assert blocks.names == ("vision_model.encoder.layers.0", "vision_model.encoder.layers.1")
    assert blocks.uses["text_model.embeddings.token_embedding.weight"] == (1,)
    check(model, blocks, 2, call)


@pytest.mark.full
def test_blocks_that_are_called_several_times_or_read_by_the_loss_are_refused() -> None:
    with pytest.raises(ValueError, match=r"albert_layer_groups.0 is called 3 times .* pipeline.blocks"):
        examine(MODELS["albert"].build())
    with pytest.raises(
        ValueError, match=r"MixtralForCausalLM reads, after its call of model.layers.2 .*layers.1; .* pipeline.blocks"
    ):
        examine(MODELS["mixtral"].build())


class Known(nn.Module):
    main_input_name = "input_ids"

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(max_position_embeddings=16)


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Decoder(Known):
    """The norm is registered before the blocks, which are registered in another order than they are called in."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.halves = nn.ModuleDict({"last": self.some(2), "first": self.some(2)})
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def some(self, count: int) -> nn.ModuleList:
        return nn.ModuleList(Block() for _ in range(count))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.halves["first"]:
            x = block(x)
        x = Scaled.apply(x, self.scale)
        for block in self.halves["last"]:
            x = block(x)
        return self.head(self.norm(x))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, scale: Tensor) -> Tensor:
        context.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = context.saved_tensors
        return gradient * scale, (gradient * x).flatten(0, -2).sum(0)


def of_tokens(model: Any) -> Tensor:
    ids = torch.arange(12).reshape(2, 6)
    return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def test_parameters_are_where_a_forward_uses_them() -> None:
    model = Decoder().double()
    blocks = examine(model)
    assert blocks.names == ("halves.first.0", "halves.first.1", "halves.last.0", "halves.last.1")
    outside = {name: numbers for name, numbers in blocks.uses.items() if "halves" not in name and "unused" not in name}
    assert outside == {"embedding.weight": (0, 3), "norm.weight": (3,), "norm.bias": (3,), "scale": (1,)}
    for stages in (2, 3, 4):
        check(model, blocks, stages, of_tokens)


class Adding(Decoder):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in (*self.halves["first"], *self.halves["last"]):
            x = x + block(x)
        return self.head(self.norm(x))


class Skipping(Decoder):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        a, b, c, d = (*self.halves["first"], *self.halves["last"])
        x = a(x)
        return self.head(self.norm(d(c(b(x)) + x * self.scale)))


class Stacking(Decoder):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        kept = x.new_empty(4, *x.shape)
        for index, block in enumerate((*self.halves["first"], *self.halves["last"])):
            x = block(x)
            kept[index] = x
        return self.head(self.norm(kept.mean(0)))


class Twice(Decoder):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in (*self.halves["first"], *self.halves["first"]):
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            Adding,
            r"Adding reads, after its call of halves.first.0 .* before its call of halves.first.0; .*pipeline.blocks",
        ),
        (Stacking, r"Stacking reads, after its call of halves.first.1 .* before its call of halves.first.1"),
        (Twice, r"halves.first.0 is called 2 times in a forward of Twice"),
    ],
)
def test_values_that_would_not_pass_from_stage_to_stage_are_refused(kind: type[Decoder], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        examine(kind())


def test_blocks_between_which_more_passes_stay_together() -> None:
    model = Skipping().double()
    blocks = examine(model)
    assert blocks.names == ("halves.first.0", "halves.last.1")
    assert blocks.uses["scale"] == (0,)
    check(model, blocks, 2, of_tokens)


def test_a_parameter_that_a_stage_needs_and_does_not_have_is_told() -> None:
    """As where a forward cannot be traced, and uses in another order than that of registration."""
    model = Decoder().double()
    cut = examine(model).cut([0, 2])
    wrong = replace(cut, stages={**cut.stages, "norm.weight": (0,)})
    with pytest.raises(RuntimeError, match=r"norm.weight is needed on a stage of the pipeline that does not have it"):
        run_stages(model, wrong, of_tokens)


def test_stand_ins_have_the_device_and_dtype_of_their_parameters() -> None:
    model = Decoder()
    cut = examine(model).cut([0, 2])
    take_away(model, cut, [0], Precision(compute=torch.bfloat16), torch.device("meta"))
    stand_in: Any = model.norm.weight
    assert (stand_in.device.type, stand_in.dtype, stand_in.shape) == ("meta", torch.bfloat16, (WIDTH,))


class Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(before, after, 3, padding=1)
        self.norm = nn.BatchNorm2d(after)
        self.down = nn.Conv2d(before, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolution(x)) + self.down(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, 8), Residual(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer2(self.layer1(F.relu(self.norm(self.stem(x)))))
        return self.head(x.mean((2, 3)))


class Vgg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3), nn.ReLU())
        self.classifier = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.0), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


def of_images(model: Any) -> Tensor:
    images = torch.randn(4, 3, 10, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return F.cross_entropy(model(images), torch.tensor([0, 1, 2, 0]))


RELU = nn.ReLU()
PLAIN = {
    "resnet": (ResNet, of_images, ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]),
    "vgg": (Vgg, of_images, [f"features.{n}" for n in range(5)] + [f"classifier.{n}" for n in range(4)]),
    "sequential": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 10), RELU, nn.Flatten(), nn.Linear(4, 4), RELU, nn.Linear(4, 3)),
        of_images, ["0", "1", "2", "3", "5"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLAIN)
def test_models_whose_inputs_are_not_known_count_as_used_in_the_order_of_registration(name: str) -> None:
    build, call, names = PLAIN[name]
    model = build().double()
    blocks = examine(model)
    assert (list(blocks.names), blocks.operations) == (names, None)
    for stages in (2, 3, len(names)):
        check(model, blocks, stages, call)


class Looking(Decoder):
    """What it does depends on values, as where layers are dropped at random, or on the kinds of blocks."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for index, block in enumerate((*self.halves["first"], *self.halves["last"])):
            assert isinstance(block, Block)
            if not torch.rand([]) < -1.0 * index:
                x = block(x)
        assert sum(isinstance(module, nn.Linear) for module in self.modules()) == 6
        return self.head(self.norm(x))


def test_a_forward_may_look_at_values_and_at_its_blocks() -> None:
    model = Looking().double()
    blocks = examine(model)
    assert len(blocks.names) == 4
    assert blocks.operations is not None
    check(model, blocks, 4, of_tokens)


def test_why_a_forward_was_not_traced_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Decoder):
        def forward(self, input_ids: Tensor) -> Tensor:
            raise RuntimeError("the sun is too bright")

    with caplog.at_level(logging.DEBUG, "zeromesh.parallel.pipeline"):
        blocks = examine(Broken())
    assert (len(blocks.names), blocks.operations) == (4, None)
    assert "Broken is not traced" in caplog.text
    assert "RuntimeError: the sun is too bright" in caplog.text


def test_a_trace_leaves_everything_as_it_was() -> None:
    class Changing(Decoder):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.normal, self.cache = nn.BatchNorm1d(WIDTH), {}
            self.dropout = nn.Dropout(0.5)

        def forward(self, input_ids: Tensor) -> Tensor:
            self.calls += 1
            self.cache["ids"] = input_ids
            random.random(), numpy.random.rand(), torch.rand(3)
            x = self.dropout(super().forward(input_ids))
            self.normal(x[..., :WIDTH].flatten(0, 1))
            return x

    def everything() -> list[Any]:
        return [
            torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state()), seen, model.calls,
            dict(model.cache), {k: v.tolist() for k, v in model.state_dict().items()},
            [(name, id(m), m.training, {k: id(v) for k, v in vars(m).items() if k not in ("training", "calls")})
             for name, m in model.named_modules()],
            [(name, id(p), p.requires_grad, p.grad, p._version) for name, p in model.named_parameters()],
            [(name, id(b), b._version) for name, b in model.named_buffers()],
        ]  # fmt: skip

    model, seen = Changing().train(), []
    model.normal.eval()
    model.norm.weight.requires_grad_(False)
    model.embedding.register_forward_hook(lambda *given: seen.append(given))
    before = everything()
    assert examine(model).operations is not None
    assert everything() == before


def test_a_model_that_is_not_there_yet_is_examined_as_it_will_be() -> None:
    case = replace(MODELS["opt"], options={**MODELS["opt"].options, "vocab_size": 1000})
    expected = examine(case.build())
    with zeromesh.zero.Init():
        model = case.build()
    devices = [parameter.device.type for parameter in model.parameters()]
    assert "meta" in devices
    assert examine(model) == expected
    assert [parameter.device.type for parameter in model.parameters()] == devices


class Plain(Decoder):
    main_input_name = config = None  # type: ignore[assignment]

    def forward(self, numbers: Tensor, weights: Tensor | None = None) -> Tensor:
        return super().forward(numbers)


class PlainAdding(Adding):
    main_input_name = config = None  # type: ignore[assignment]

    def forward(self, numbers: Tensor, weights: Tensor | None = None) -> Tensor:
        return super().forward(numbers)


def build(kind: type[Decoder]) -> Decoder:
    model = kind()
    vars(model).pop("config")
    return model


IDS = torch.arange(12).reshape(2, 6)


def loss_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def mean_of(batch: Any, model: Any) -> Tensor:
    return loss_of(batch, lambda *args, **kwargs: model(*args, **kwargs).mean())


BATCHES = {
    "inputs and labels": ModelInput((IDS, IDS), partial(loss_of, loss_fn=loss_of_logits)),
    "several inputs and labels": ModelInput(((IDS, torch.ones(2, 6)), IDS), partial(loss_of, loss_fn=loss_of_logits)),
    "a mapping": ModelInput({"numbers": IDS, "weights": torch.ones(2, 6)}, mean_of),
    "a tuple": ModelInput((IDS, torch.ones(2, 6)), mean_of),
    "a tensor": ModelInput(IDS, mean_of),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_with_a_sample_any_model_is_traced(kind: str) -> None:
    model = build(Plain).double()
    assert examine(model).operations is None
    blocks = examine(model, sample=BATCHES[kind])
    assert blocks.names == ("halves.first.0", "halves.first.1", "halves.last.0", "halves.last.1")
    assert blocks.uses["norm.weight"] == (3,)
    block = 2.0 * 12 * WIDTH * WIDTH
    assert blocks.operations == (block, block, block, block + 2 * 12 * WIDTH * VOCABULARY)
    check(model, blocks, 4, of_tokens)
    with pytest.raises(ValueError, match="PlainAdding reads, after its call of halves.first.0"):
        examine(build(PlainAdding), sample=BATCHES[kind])


def test_the_loss_counts_for_the_last_block_if_it_can_be_traced() -> None:
    model = build(Plain)
    weight = torch.ones(VOCABULARY, 3)
    without = examine(model, sample=BATCHES["inputs and labels"])

    def project(logits: Tensor, labels: Tensor) -> Tensor:
        return (logits @ weight).mean() + (logits @ model.embedding.weight).mean() + (WIDTH * model.scale).mean()

    blocks = examine(model, sample=ModelInput((IDS, IDS), partial(loss_of, loss_fn=project)))
    more = 2.0 * 12 * VOCABULARY * (3 + WIDTH)
    assert blocks.operations == (*without.operations[:-1], without.operations[-1] + more)
    assert blocks.uses["scale"] == (1, 3)

    def refuse(logits: Tensor, labels: Tensor) -> Tensor:
        raise RuntimeError("this loss needs values")

    assert examine(model, sample=ModelInput((IDS, IDS), partial(loss_of, loss_fn=refuse))) == without


def test_a_sample_that_the_model_does_not_take_is_not_all_that_is_tried() -> None:
    wrong = ModelInput({"images": IDS}, loss_of)
    guessed = examine(Decoder(), sample=wrong)
    assert (guessed, guessed.operations is None) == (examine(Decoder()), False)
    assert examine(build(Plain), sample=wrong) == examine(build(Plain))


def texts(length: int) -> ModelInput:
    return ModelInput({"input_ids": torch.ones(2, length, dtype=torch.long)}, lambda batch, model: model(**batch))


def test_operations_are_those_of_products_with_what_is_around_a_block() -> None:
    options = {
        **MODELS["llama"].options,
        "hidden_size": 64,
        "head_dim": 16,
        "intermediate_size": 100,
        "vocab_size": 500,
    }
    blocks = examine(replace(MODELS["llama"], options=options).build(), sample=texts(8))
    projections = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 100
    attention = 2 * 8 * 64  # scores, and sums of values, for each token
    layer = 2 * 8 * 2.0 * (projections + attention)
    assert blocks.operations == (layer, layer, layer + 2 * 8 * 2 * 64 * 500)
    assert blocks.parameters[0] - blocks.parameters[1] == 64 * 500


def test_texts_are_as_long_as_a_model_takes_unless_it_loops_through_them() -> None:
    for kind, length in ((Long, 100), (Longer, 1024), (Looping, 16)):
        blocks = examine(kind())
        assert blocks.operations[0] == 2.0 * 2 * length * WIDTH * WIDTH


class Long(Decoder):
    positions = 100

    def __init__(self) -> None:
        super().__init__()
        self.config.max_position_embeddings = self.positions


class Longer(Long):
    positions = 5000


class Looping(Longer):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(torch.stack([one + 0 for one in input_ids.unbind(1)], 1))


def described(**changes: Any) -> Blocks:
    names = tuple(f"layers.{n}" for n in range(6))
    types = ("Stem", "MyLayer", "MyLayer", "Pool", "MyLayer", "MyLayer")
    base = Blocks(names, types, {}, (9.0, 1.0, 1.0, 1.0, 1.0, 9.0), (0.0, 2.0, 2.0, 2.0, 2.0, 4.0))
    return replace(base, **changes)


@pytest.mark.parametrize(
    ("how", "starts"),
    [
        ("best", [0, 4]),
        ("parameters", [0, 3]),
        ("uniform", [0, 3]),
        ("type:layer", [0, 4]),
        ("type:^stem|pool", [0, 3]),
        ([0, 5], [0, 5]),
    ],
)
def test_blocks_are_dealt_to_stages_as_the_configuration_says(how: str | Sequence[int], starts: list[int]) -> None:
    assert starts_of(how, described(), 2) == starts


@pytest.mark.parametrize("values", [(1.0,), (0.0, 1.0, 3.0), (0.1, 0.3, 0.7)])
def test_the_dearest_stage_is_as_cheap_as_in_the_best_of_all_cuts(values: tuple[float, ...]) -> None:
    chance = random.Random(0)
    for _ in range(60):
        costs = [chance.choice(values) for _ in range(chance.randint(1, 9))]
        stages = chance.randint(1, len(costs))
        sums = [0.0, *itertools.accumulate(costs)]
        cuts = [(0, *rest) for rest in itertools.combinations(range(1, len(costs)), stages - 1)]

        def dearest(cut: Sequence[int], sums: Sequence[float] = sums) -> list[float]:
            """Return the dearest stage of the whole, and of what is before the last stage, and so on."""
            sizes = [sums[b] - sums[a] for a, b in itertools.pairwise((*cut, len(sums) - 1))]
            return [max(sizes[:end]) for end in range(len(sizes), 0, -1)]

        # Of equal cuts, the one whose last stages are the shortest.
        best = min(cuts, key=lambda cut: (dearest(cut)[0], *(-start for start in reversed(cut))))
        found = partition(costs, stages)
        assert dearest(found)[0] == dearest(best)[0]
        assert found[-1] == best[-1]


def test_without_operations_parameters_count() -> None:
    uneven = (1.0, 1.0, 1.0, 1.0, 1.0, 9.0)
    assert starts_of("best", described(operations=None, parameters=uneven), 2) == [0, 5]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("bets", "'bets'; use one of best, parameters, uniform, type:REGEX"),
        ("type:transformer", "matches none of the blocks, whose classes are MyLayer, Pool, Stem"),
        ("type:(", "is not a regular expression"),
        ([0], "as a list it has the number of the first block of each of the 2 stages"),
        ([1, 2], "ascending from 0"),
        ([0, 6], "there are 6 blocks"),
    ],
)
def test_a_partition_that_says_nothing_known_is_refused(how: str | Sequence[int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        starts_of(how, described(), 2)


def test_smaller_blocks_are_named_where_there_are_too_few() -> None:
    model = nn.Sequential(*(nn.ModuleDict({"parts": nn.Sequential(nn.Linear(2, 2), nn.Tanh())}) for _ in range(2)))
    blocks = examine(model)
    assert blocks.finer == ("*.parts.*",)
    with pytest.raises(ValueError, match=re.escape('name smaller blocks in pipeline.blocks, as ["*.parts.*"]')):
        starts_of("best", blocks, 3)
    assert starts_of("best", examine(model, blocks.finer), 3) == [0, 2, 3]


def test_patterns_name_blocks_in_place_of_those_found() -> None:
    model = Decoder()
    assert examine(model, ["halves.*.1"]).names == ("halves.first.1", "halves.last.1")
    with pytest.raises(ValueError, match="pipeline.blocks: 'layers.\\*' matches no module"):
        examine(model, ["layers.*"])


class PassesOn(nn.Module):
    """Blocks pass on what the model made of its inputs, and compute with the second of two such tensors."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ScaledBySecond(in_place) for _ in range(3))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        given = x, counts.float() if self.layers[0].in_place else counts, counts * 10
        for layer in self.layers:
            given = layer(given)
        return given[0].square().mean()


class ScaledBySecond(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear, self.in_place = nn.Linear(4, 4), in_place

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        x, first, second = given
        if self.in_place:
            second.add_(1)
        return self.linear(x) * second.clone()[..., None], first, second


@pytest.mark.parametrize("in_place", [False, True])
def test_tensors_that_blocks_pass_on_are_not_mistaken_for_others_of_their_form(in_place: bool) -> None:
    torch.manual_seed(0)
    model = PassesOn(in_place).double()
    counts = torch.tensor([1, 2])
    check(model, examine(model), 3, lambda one: one(torch.ones(2, 4, dtype=torch.float64), counts))
