"""Shapes by name, size and list; wrong ones are refused with the remedy."""

import re

import pytest

from zeromesh.apps.plan.cost.models import MODELS, limits_of, shape_named


def parameters(text: str) -> float:
    """Parameters by hand: matrices of blocks, and embeddings; biases and norms are less than 0.2 %."""
    shape = shape_named(text)
    assert shape is not None
    heads = (shape.heads + 2 * (shape.kv_heads or shape.heads)) / shape.heads + 1
    block = heads * shape.hidden**2 + (3 if shape.gated else 2) * shape.hidden * (shape.width or 4 * shape.hidden)
    words = (1 if shape.tied else 2) * shape.vocabulary + shape.positions
    return shape.layers * block + words * shape.hidden


@pytest.mark.parametrize(
    ("name", "published"),
    # As the papers and model cards print them, in millions.
    [("gpt2-xl", 1558), ("bert-large", 335), ("llama-2-7b", 6738), ("llama-3-8b", 8030), ("llama-3-70b", 70554),
     ("llama-3-405b", 405853), ("gpt3-175b", 174600), ("mistral-7b", 7242)],
)  # fmt: skip
def test_named_shapes_have_the_published_parameters(name: str, published: float) -> None:
    assert parameters(name) / 1e6 == pytest.approx(published, rel=0.004)


@pytest.mark.parametrize("text", ["350m", "1.3b", "7b", "13b", "40b", "175B", "1t"])
def test_a_size_gives_about_so_many_parameters(text: str) -> None:
    wanted = float(text[:-1]) * {"m": 1e6, "b": 1e9, "t": 1e12}[text[-1].lower()]
    assert parameters(text) == pytest.approx(wanted, rel=0.08)


def test_listed_sizes() -> None:
    text = "llama:layers=32,hidden=4096,heads=32,kv_heads=8,width=14336,vocabulary=128256"
    shape = shape_named(text)
    assert shape is not None
    assert parameters(text) == pytest.approx(8.03e9, rel=0.003)
    assert limits_of(shape) == limits_of(MODELS["llama-3-8b"])
    assert shape_named("models/tiny") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lama:layers=1,hidden=64,heads=1", "take one of gpt, llama, bert"),
        ("llama:layers=1,hiden=64,heads=1", "did you mean hidden?"),
        ("llama:layers=1,hidden=64", "lacks heads"),
        ("llama:layers=0,hidden=64,heads=1", "layers is '0'; it must be a whole number from 1"),
        ("llama:layers=1,hidden=-64,heads=1", "hidden is '-64'"),
        ("llama:layers=1,hidden=100,heads=3", "hidden = 100 must be a multiple of heads = 3"),
        ("llama:layers=1,hidden=64,heads=4,kv_heads=3", "kv_heads = 3 must divide heads = 4"),
        ("1m", "no room for a block"),
    ],
)
def test_wrong_sizes_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        shape_named(text)
