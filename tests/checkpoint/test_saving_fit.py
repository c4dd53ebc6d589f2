"""Checkpoints of another model."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks
from runs import config


class Parts(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for number, name in enumerate(names):
            layer = nn.Linear(4, {"head": 2, "unused": 5}.get(name, 4), bias=False)
            nn.init.constant_(layer.weight, float(number))
            self.add_module(name, layer)
            self.register_buffer(f"{name}_mean", torch.full((layer.out_features,), float(number)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x.sum()


def load_part(folder: str, row: int) -> tuple[list[str], list[str], dict[str, float], int]:
    def begin(*names: str) -> zeromesh.Engine:
        settings = config(row, optimizer="adagrad") | {"scheduler": None}
        return zeromesh.initialize(model=Parts(*names).double(), config=settings)[0]

    engine = begin("unused", "encoder", "deco")
    engine.save_checkpoint(folder)
    again = begin("encoder", "decoder", "head")
    with pytest.raises(ValueError, match="is of another model") as caught:
        again.load_checkpoint(folder)
    refused = str(caught.value).splitlines()[1:]
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeromesh").addHandler(handler)
    path, _ = again.load_checkpoint(folder, load_module_strict=False)
    logging.getLogger("zeromesh").removeHandler(handler)
    assert path == f"{folder}/global_step0"
    values = {name: value.mean().item() for name, value in again.gathered_state_dict().items()}
    again.backward(again(torch.ones(1, 4, dtype=torch.float64)))
    again.step()
    return refused, messages, values, again.global_steps


@pytest.mark.parametrize("row", [0, 3])
def test_a_checkpoint_of_another_model_is_refused_or_what_is_in_both_is_taken(row: int, tmp_path: Path) -> None:
    (refused, messages, values, steps), (other, silent, _, _) = run_ranks(load_part, 2, str(tmp_path), row)
    assert refused == other
    assert refused == [
        "decoder.weight: not in the checkpoint; did you mean 'deco.weight'?",
        "head.weight: not in the checkpoint",
        "decoder_mean: not in the checkpoint; did you mean 'deco_mean'?",
        "head_mean: not in the checkpoint",
        "deco_mean: not in the model; did you mean 'decoder_mean'?",
        "unused_mean: not in the model",
        "deco.weight: not in the model; did you mean 'decoder.weight'?",
        "unused.weight: not in the model",
        "load_module_strict=False loads those that are in both",
    ]
    loaded = {"encoder.weight": 1.0, "encoder_mean": 1.0}
    kept = {"decoder.weight": 1.0, "decoder_mean": 1.0, "head.weight": 2.0, "head_mean": 2.0}
    assert values == loaded | kept
    assert steps == 1
    assert not silent
    assert len(messages) == 1
    assert "left as they are: decoder.weight, head.weight, decoder_mean, head_mean; only in it: deco" in messages[0]


class Configured(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(width=width, layers=layers, rate=0.5 / width, _private=width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def load_other_shapes(folder: str) -> list[str]:
    def begin(width: int, layers: int) -> zeromesh.Engine:
        settings = config(3) | {"scheduler": None}
        return zeromesh.initialize(model=Configured(width, layers).double(), config=settings)[0]

    begin(4, 2).save_checkpoint(folder)
    found = []
    for width, layers in ((6, 2), (4, 3), (5, 1)):
        engine = begin(width, layers)
        before = engine.gathered_state_dict()
        for strict in (True, False):
            if (width, strict) == (4, False):
                continue
            with pytest.raises(ValueError, match="is of another model") as caught:
                engine.load_checkpoint(folder, load_module_strict=strict)
        found.append(str(caught.value))
        after = engine.gathered_state_dict()
        assert all(torch.equal(value, after[name]) for name, value in before.items())
    return found


def test_other_shapes_are_listed_with_the_fields_of_the_configuration_that_differ(tmp_path: Path) -> None:
    (wide, deep, both), _ = run_ranks(load_other_shapes, 2, str(tmp_path))
    assert wide.splitlines()[1:] == [
        "layers.0.weight: saved (4, 4), wanted (6, 6)",
        "layers.0.bias: saved (4,), wanted (6,)",
        "layers.1.weight: saved (4, 4), wanted (6, 6)",
        "layers.1.bias: saved (4,), wanted (6,)",
        "of the model's configuration, these differ: width (saved 4, wanted 6)",
    ]
    assert "layers.2.weight: not in the checkpoint" in deep
    assert "these differ: layers (saved 2, wanted 3)" in deep
    assert "width (saved 4, wanted 5), layers (saved 2, wanted 1)" in both
