"""What becomes a unit of a model, and which unit owns each parameter."""

import itertools
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zeromesh.shard.find_units import assign, check_parameters, find_units


def names(model: nn.Module, *targets: str) -> list[str]:
    return [name for name, _ in find_units(model, targets)]


def share(model: nn.Module, unit: str) -> float:
    owned = assign(model, names(model))[unit]
    return sum(p.numel() for _, p in owned) / sum(p.numel() for p in model.parameters())


def block(width: int = 32) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 4, 4 * width)


def numbered(pattern: str, count: int) -> list[str]:
    return [pattern.replace("#", str(number)) for number in range(count)]


class Gpt(nn.Module):
    def __init__(self, vocabulary: int = 500, depth: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 32)
        self.positions = nn.Parameter(torch.zeros(16, 32))
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embedding.weight


def test_blocks_and_what_is_as_large_become_units_and_the_rest_stays_with_the_root() -> None:
    model = Gpt()
    assert names(model) == ["embedding", *numbered("blocks.#", 3), "head"]
    assert [name for name, _ in assign(model, names(model))[""]] == ["positions", "norm.weight", "norm.bias"]


def test_blocks_that_are_each_small_beside_an_embedding_stay_with_the_root_only_if_they_are_small_together() -> None:
    assert names(Gpt(vocabulary=20000, depth=5)) == ["embedding", "head"]
    assert names(Gpt(vocabulary=20000, depth=10)) == ["embedding", *numbered("blocks.#", 10), "head"]


def test_a_model_inside_a_model_is_cut_as_it_would_be_alone() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleDict({"first": Gpt(depth=5), "second": Gpt(depth=5)})

    inside = ["embedding", *numbered("blocks.#", 5), "head"]
    assert names(Wrapper()) == [f"inner.{which}.{name}" for which in ("first", "second") for name in inside]


def test_a_shared_parameter_belongs_to_the_nearest_unit_around_all_its_places() -> None:
    model = Gpt(tied=True)
    assert names(model) == numbered("blocks.#", 3)
    assert assign(model, names(model))[""][0] == ("positions", model.positions)
    assert ("embedding.weight", model.embedding.weight) in assign(model, names(model))[""]
    twins = nn.Sequential(block(), block(), block())
    twins[0].linear2.weight = twins[2].linear2.weight
    twins[1].norm1.weight = twins[1].norm2.weight
    owned = assign(twins, names(twins))
    assert [name for name, _ in owned[""]] == ["0.linear2.weight"]
    assert [name for name, _ in owned["1"] if "norm" in name] == ["1.norm1.weight", "1.norm1.bias", "1.norm2.bias"]


def test_a_module_that_stands_at_several_places_is_one_unit_only_where_one_place_holds_all_of_them() -> None:
    shared = block()
    model = nn.ModuleDict({"encoder": nn.ModuleList([shared, block()]), "decoder": nn.ModuleList([shared, block()])})
    owned = assign(model, names(model))
    assert names(model) == ["encoder.1", "decoder.1"]
    assert {name for name, _ in owned[""]} == {f"encoder.0.{name}" for name, _ in shared.named_parameters()}


def test_every_parameter_is_owned_once_under_any_units() -> None:
    for make in MODELS.values():
        model = make()
        for units in (names(model), names(model, "*") if list(model.children()) else []):
            owned = [parameter for members in assign(model, units).values() for _, parameter in members]
            assert Counter(map(id, owned)) == Counter(map(id, model.parameters()))


class Residual(nn.Module):
    def __init__(self, width: int, wider: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, wider, 3), nn.Conv2d(wider, wider, 3)
        self.bn1, self.bn2 = nn.BatchNorm2d(wider), nn.BatchNorm2d(wider)
        self.shortcut = nn.Sequential(nn.Conv2d(width, wider, 1), nn.BatchNorm2d(wider))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 7)
        self.layer1 = nn.Sequential(Residual(8, 16), Residual(16, 16))
        self.layer2 = nn.Sequential(Residual(16, 32), *(Residual(32, 32) for _ in range(4)))
        self.fc = nn.Linear(32, 10)


def vgg() -> nn.Module:
    widths = [3, 16, 32, 64, 64]
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Conv2d(a, b, 3), nn.ReLU(), nn.MaxPool2d(2)]
    head = nn.Sequential(nn.Linear(576, 128), nn.ReLU(), nn.Dropout(), nn.Linear(128, 10))
    return nn.Sequential(nn.Sequential(*layers), nn.Flatten(), head)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(Residual(16, 16) for _ in range(3))
        self.middle = Residual(16, 16)
        self.up = nn.ModuleList(Residual(32, 16) for _ in range(3))


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(40_000, 16), nn.Embedding(30_000, 16)
        self.tower = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4)
        self.router = nn.Linear(32, 8)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(8))


class Stages(nn.Module):
    class Stage(nn.Module):
        def __init__(self, width: int, depth: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(block(width) for _ in range(depth))
            self.downsample = nn.Linear(4 * width, 2 * width)

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4)
        self.stages = nn.ModuleList(self.Stage(width, depth) for width, depth in ((16, 2), (32, 6), (64, 4)))


class Activated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.activation = nn.Parameter(torch.zeros(4, 32, 32)), nn.ReLU()


class NoList(nn.Module):
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token = nn.Parameter(torch.zeros(32))
            self.attention, self.mlp = nn.MultiheadAttention(32, 4), Activated()

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = self.Half(), self.Half()
        self.gate = nn.Linear(32, 2)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT": Gpt,
    "tied GPT": lambda: Gpt(tied=True),
    "ResNet": ResNet,
    "VGG": vgg,
    "U-Net": UNet,
    "recommender": Recommender,
    "mixtures of experts": lambda: nn.ModuleDict({"blocks": nn.ModuleList(Mixture() for _ in range(5))}),
    "stages": Stages,
    "no list": NoList,
    "one layer": lambda: nn.Linear(4, 4),
}

UNITS = {
    "ResNet": [*numbered("layer1.#", 2), *numbered("layer2.#", 5)],
    # Layers with weights, in lists of layers; the second holds most of the parameters.
    "VGG": ["0.6", "0.9", "2.0"],
    "U-Net": [*numbered("down.#", 3), "middle.conv1", "middle.conv2", *numbered("up.#", 3)],
    "recommender": ["users", "items"],
    "mixtures of experts": numbered("blocks.#", 5),
    "stages": [
        "stages.0",
        *numbered("stages.1.blocks.#", 6),
        "stages.1.downsample",
        *numbered("stages.2.blocks.#", 4),
        "stages.2.downsample",
    ],
    "no list": ["encoder.attention", "encoder.mlp", "decoder.attention", "decoder.mlp"],
    "one layer": [],
}


@pytest.mark.parametrize("kind", UNITS)
def test_units_are_the_blocks_of_any_kind_of_model(kind: str) -> None:
    assert names(MODELS[kind]()) == UNITS[kind]


@pytest.mark.parametrize("kind", MODELS)
def test_no_unit_holds_another_and_none_is_without_parameters(kind: str) -> None:
    model = MODELS[kind]()
    found = names(model)
    assert not [(a, b) for a in found for b in found if b.startswith(a + ".")]
    assert all(share(model, name) > 0 for name in found)


REAL = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {}, {"transformer.h.#": 12}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {}, {"model.embed_tokens": 1, "model.layers.#": 32, "lm_head": 1}),
    "bert": ("BertForMaskedLM", "BertConfig", {}, {"bert.encoder.layer.#": 12}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {}, {"encoder.block.#": 6, "decoder.block.#": 6}),
    "mixtral": (
        "MixtralForCausalLM", "MixtralConfig", {"num_hidden_layers": 4},
        {"model.embed_tokens": 1, "model.layers.#": 4, "lm_head": 1},
    ),
    "vit": ("ViTForImageClassification", "ViTConfig", {}, {"vit.layers.#": 12}),
    "clip": ("CLIPModel", "CLIPConfig", {}, {
        "text_model.embeddings.token_embedding": 1, "text_model.encoder.layers.#": 12,
        "vision_model.encoder.layers.#": 12,
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_hugging_face_models_in_their_usual_sizes_are_cut_into_their_blocks(name: str) -> None:
    import transformers

    model_class, config_class, options, expected = REAL[name]
    with torch.device("meta"):
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options))
    assert Counter(re.sub(r"\d+", "#", unit) for unit in names(model)) == expected


def test_targets_are_class_names_or_patterns_of_names_and_then_exactly_these_become_units() -> None:
    model = Gpt()
    assert names(model, "TransformerEncoderLayer") == numbered("blocks.#", 3)
    assert names(model, "blocks.[02]", "head") == ["blocks.0", "blocks.2", "head"]
    assert names(model, "*.linear1") == numbered("blocks.#.linear1", 3)


def test_a_target_takes_subclasses_in() -> None:
    class Own(nn.Linear):
        pass

    assert names(nn.Sequential(Own(2, 2), nn.Linear(2, 2), nn.LayerNorm(2)), "Linear") == ["0", "1"]


def test_targets_may_enclose_one_another_and_the_innermost_owns_a_parameter() -> None:
    model = Gpt(depth=1)
    units = names(model, "TransformerEncoderLayer", "*.linear1")
    assert units == ["blocks.0", "blocks.0.linear1"]
    owned = assign(model, units)
    assert [name for name, _ in owned["blocks.0.linear1"]] == ["blocks.0.linear1.weight", "blocks.0.linear1.bias"]
    assert "blocks.0.linear2.weight" in [name for name, _ in owned["blocks.0"]]


@pytest.mark.parametrize("target", ["TransformerDecoderLayer", "block.*", "norm.elementwise", "Dropout"])
def test_a_target_that_matches_nothing_with_parameters_is_named_with_what_there_is(target: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(target))) as caught:
        names(Gpt(), "blocks.*", target)
    assert str(caught.value).endswith(
        "The classes in this model are Embedding, LayerNorm, Linear, ModuleList, MultiheadAttention, "
        "NonDynamicallyQuantizableLinear, TransformerEncoderLayer"
    )


def test_a_model_on_one_device_with_something_to_train_is_accepted() -> None:
    check_parameters(Gpt())
    with torch.device("meta"):
        check_parameters(Gpt())
    memory = torch.zeros(10)
    check_parameters(nn.ParameterList([nn.Parameter(memory[:6]), nn.Parameter(memory[6:])]))


def on_two_devices() -> nn.Module:
    model = Gpt()
    model.head.to("meta")
    return model


def overlapping() -> nn.Module:
    model = Gpt()
    model.head.weight = nn.Parameter(model.embedding.weight.detach())
    return model


def overlapping_in_part() -> nn.Module:
    memory = torch.zeros(10)
    return nn.ParameterList([nn.Parameter(memory[:6].view(2, 3).t()), nn.Parameter(memory[5:])])


def sparse() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(torch.eye(3).to_sparse())
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "two devices": (
        on_two_devices,
        "several devices.*on cpu.*head.weight on meta.*have no values: build the whole model under zero",
    ),
    "one memory": (overlapping, "embedding.weight and head.weight share memory.*tie them"),
    "memory that overlaps": (overlapping_in_part, "parameters 0 and 1 share memory"),
    "sparse": (sparse, "weight has layout torch.sparse_coo; only dense"),
    "lazy": (lambda: nn.LazyLinear(3), "weight is lazy.*run one batch"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_parameters_that_cannot_be_laid_out_are_refused_with_the_reason(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        check_parameters(make())
