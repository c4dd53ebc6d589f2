"""``zeromesh export``: from a run's checkpoint to a folder that ``from_pretrained`` opens, one layer after the other."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zeromesh.architectures import published
from zeromesh.checkpoint.boxes import Reader, locate
from zeromesh.cli.folder import RunFolder
from zeromesh.cli.model import BuiltIn, Transformer, language_model
from zeromesh.cli.screen import make_console
from zeromesh.export import State, adapter_names, is_adapted, plain_model, plain_state, write_model
from zeromesh.shard.deferred import read_from
from zeromesh.shard.materialise import materialiser

FILE = "model.safetensors"


@dataclass(frozen=True)
class Saved:
    """A tensor in a checkpoint."""

    reader: Reader
    name: str

    def __str__(self) -> str:
        return f"{self.name} in {self.reader.folder}"

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements ``[start, stop)`` of the flattened tensor."""
        out = torch.empty(stop - start, dtype=self.reader.dtype(self.name))
        self.reader.read(self.name, start, stop, out)
        return out

    def whole(self) -> torch.Tensor:
        """All of it, in its shape."""
        shape = self.reader.shape(self.name)
        return self.read(0, math.prod(shape)).view(shape)


def export(run: Path, output: Path, tag: str | None, merge: bool) -> None:
    """Write the model of a run in the dtype that it computes in, with its tokenizer.

    Args:
        run: the folder of the run.
        output: the folder to write, which has nothing in it.
        tag: the checkpoint; None is the latest.
        merge: write adapters added to their model, instead of alone.

    Raises:
        ValueError: there is no such checkpoint, the output holds something, or there are no adapters to merge.
    """
    folder = RunFolder(run)
    reader = _reader(folder, tag)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{str(output)!r} is there already, and is not overwritten; choose another folder")
    settings = folder.settings()
    language = language_model(settings)
    dtype = settings.precision.compute or torch.float32
    if isinstance(language, BuiltIn):
        if merge:
            raise ValueError(f"--merge: the run in {str(run)!r} has no adapters; leave it out")
        _export_built_in(language, reader, folder, output, dtype)
    else:
        assert isinstance(language, Transformer)
        _export_transformer(language, reader, output, dtype, merge)
    folder.copy_tokenizer(output)
    make_console().print(f"{reader.folder} is written to {output}", soft_wrap=True)


def _reader(folder: RunFolder, tag: str | None) -> Reader:
    chosen = tag or folder.last_checkpoint
    if chosen is None:
        raise ValueError(f"{str(folder.path)!r} holds no checkpoint; name the folder that run.output named in training")
    reader = Reader(locate(folder.checkpoints, chosen))
    reader.verify()
    return reader


def _export_built_in(language: BuiltIn, reader: Reader, folder: RunFolder, output: Path, dtype: torch.dtype) -> None:
    import transformers

    name, arguments = published.configuration(language.shape, folder.end_of_text())
    make = getattr(transformers, name)
    with torch.device("meta"):
        model = make(make.config_class(**arguments)).to(dtype)

    def read(parameter: str) -> torch.Tensor:
        return Saved(reader, f"parameter/{parameter}").whole().to(dtype)

    states = ({tensor.name: tensor.make(read)} for tensor in published.tensors(language.shape))
    write_model(model, states, output, FILE)


def _export_transformer(language: Transformer, reader: Reader, output: Path, dtype: torch.dtype, merge: bool) -> None:
    model: Any = language.unfilled(dtype)
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in tensors:
            if (source := f"{kind}/{name}") in reader.names:
                saved = Saved(reader, source)
                if tensor.is_meta:
                    read_from(tensor, saved)
                else:
                    tensor.data.copy_(saved.whole())
    if merge and not is_adapted(model):
        raise ValueError("--merge: the run has no adapters; leave it out")
    if is_adapted(model) and not merge:
        wanted = adapter_names(model)
        model.save_pretrained(str(output), state_dict={n: Saved(reader, f"parameter/{n}").whole() for n in wanted})
    else:
        write_model(plain_model(model), _states(model), output, FILE)


def _states(model: nn.Module) -> Iterator[State]:
    """What the layers add to the plain model's state, one after the other; each is there only while it is copied."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    materialise = materialiser(model)
    for layer in _layers(model):
        members = {names[id(parameter)]: parameter for parameter in layer.parameters() if id(parameter) in names}
        for name, parameter in members.items():
            source = materialise(name, parameter)
            if source is not None:
                shape = model.get_parameter(name).shape
                parameter.data = source.read(0, shape.numel()).to(parameter.dtype).view(shape)
        yield plain_state(model, members)
        layer.to("meta")
    kept = frozenset(model.state_dict())
    yield plain_state(model, {name: buffer for name, buffer in model.named_buffers() if name in kept})
