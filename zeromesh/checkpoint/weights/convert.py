"""Conversion of checkpoints: of other libraries into ours, from which any layout loads, and of ours into theirs."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeromesh.base.buffer_memory import plain_name
from zeromesh.base.progress import ReadingBar
from zeromesh.base.requirements import user_function
from zeromesh.base.words import nearest, some
from zeromesh.checkpoint.contents import own_names
from zeromesh.checkpoint.formats.detect_format import FORMATS, require_format
from zeromesh.checkpoint.formats.form import Contents
from zeromesh.checkpoint.formats.huggingface_weights import states
from zeromesh.checkpoint.manifest import as_written
from zeromesh.checkpoint.weights.export import write_model
from zeromesh.checkpoint.weights.pretrained import build, first_names
from zeromesh.checkpoint.weights.weight_files import SINGLE

if TYPE_CHECKING:
    from rich.console import Console

_log = logging.getLogger(__name__)

TARGETS = ("zeromesh", "hf", "dcp", "deepspeed-universal")

DRAFT = ".draft"


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    to: str = "zeromesh",
    *,
    tag: str | None = None,
    model: nn.Module | str | Path | None = None,
    strip: str = "",
    weights_only: bool = False,
    ranks: int = 0,
    console: Console | None = None,
) -> Path:
    """Write a checkpoint of any known format in another format, by one process, about one tensor at a time.

    Args:
        source: a checkpoint, or a folder of checkpoints with a file that names the latest.
        target: the folder to write. For ``zeromesh`` a folder of checkpoints; for other formats it must not exist, or
            be empty.
        to: ``zeromesh``, ``hf``, ``dcp`` or ``deepspeed-universal``.
        tag: the checkpoint in the folder; None is the latest.
        model: the model that the checkpoint is of, ``package.module:function`` that makes it, or a folder with a
            config.json of transformers. It tells parameters from buffers, and names are compared with it.
        strip: beginning of all names that the model does not have, such as ``model.`` of a Lightning module.
        weights_only: leave out the states of the optimizer and the scheduler, and the counters.
        ranks: ranks of the DeepSpeed run that will load a ``deepspeed-universal`` checkpoint at stage 3; 0 leaves out
            their files, without which it loads at stages 1 and 2.
        console: shows progress; None shows none.

    Returns:
        The checkpoint that was written.

    Raises:
        ValueError: no known checkpoint is there, a file is damaged or holds code, or what is there does not fit.
        FileExistsError: the target is there already.
    """
    if to not in TARGETS:
        raise ValueError(f"the target format {to!r} is none of {', '.join(TARGETS)}; choose one of them")
    path = Path(target)
    if to != "zeromesh" and path.exists() and (path.is_file() or any(path.iterdir())):
        raise FileExistsError(f"{str(path)!r} is there already, and is not overwritten; choose another folder")
    if ranks < 0 or (ranks and to != "deepspeed-universal"):
        raise ValueError(f"ranks = {ranks} is not for {to}: only deepspeed-universal has files of ranks; leave it out")
    kind, place = require_format(Path(source), tag)
    built_model = _model(model)

    def rename(name: str) -> str:
        return plain_name(name).removeprefix(strip)

    read = getattr(import_module(f"zeromesh.checkpoint.formats.{kind.module}"), kind.reader)
    more = []
    if built_model is not None and kind.numbers:
        trained = {name: parameter.requires_grad for name, parameter in built_model.named_parameters()}
        more = [lambda name: trained.get(rename(name))]
    with as_written(place):
        contents: Contents = read(place, *more)
        if weights_only:
            contents.without_states()
        contents.require_sound(place)
    contents.renamed(rename)
    if built_model is not None:
        _fit(contents, built_model)
    others = [
        name for name, value in contents.extra.items() if built_model is not None or not isinstance(value, torch.Tensor)
    ]
    if to == "hf" and others:
        contents.left.append(f"{some(others)}: extra state of modules has no place in a folder of safetensors")
    for sentence in contents.left:
        _log.warning("not converted: %s", sentence)
    total = sum((part.stop - part.start) * part.dtype.itemsize for part in contents.parts)
    _log.info(
        "%s is %s: %d tensors, %s bytes", place, contents.source, len({p.name for p in contents.parts}), f"{total:,}"
    )
    with ReadingBar(console, f"writing {path.name}", total) as bar:
        written = _write(contents, path, to, built_model, bar.advance, {"ranks": ranks} if ranks else {})
    _log.info("written: %s", written)
    return written


def _write(
    contents: Contents,
    path: Path,
    to: str,
    model: nn.Module | None,
    advance: Callable[[int], None],
    more: Mapping[str, int],
) -> Path:
    module = next(row.module for row in FORMATS if row.name == to)
    write = import_module(f"zeromesh.checkpoint.formats.{module}").write
    if to == "zeromesh":  # which has drafts of its own
        return Path(write(contents, path, advance))
    draft = path.with_name(path.name + DRAFT)
    shutil.rmtree(draft, ignore_errors=True)  # of a conversion that was interrupted
    try:
        draft.mkdir(parents=True)
        if to == "hf" and model is not None:
            # Under the names under which transformers publishes it, and with its configuration.
            write_model(model, states(contents, advance), draft, SINGLE)
        else:
            write(contents, draft, advance, **more)
        draft.replace(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return path


def _model(model: nn.Module | str | Path | None) -> nn.Module | None:
    """Return the model that is named, without memory for its values."""
    if model is None or isinstance(model, nn.Module):
        return model
    if Path(model).is_dir():
        return build(Path(model), None, torch.float32, draws=False)
    if ":" not in str(model):
        raise ValueError(
            f"model {str(model)!r} is not a folder; name one with a config.json, or package.module:function"
        )
    make = user_function(str(model))
    with torch.device("meta"):
        built: nn.Module = make()
    return built


def _fit(contents: Contents, model: nn.Module) -> None:
    """Name tensors as the model has them, and report those that only one of the two has."""
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    tied = first_names(model)
    changes = own_names({part.name for part in contents.parts}, buffers, tied)
    contents.rename_tensors(changes)
    contents.take(tied=tied)
    wanted: Mapping[str, Any] = dict(model.named_parameters()) | buffers
    shapes = {p.name.split("/", 1)[1]: p.shape for p in contents.parts if not p.name.startswith("optimizer/")}
    if other := [
        f"{n}: {shape}, wanted {tuple(wanted[n].shape)}"
        for n, shape in shapes.items()
        if n in wanted and tuple(wanted[n].shape) != shape
    ]:
        raise ValueError(f"the checkpoint is of another model; these shapes differ: {some(other, 'tensors')}")
    missing = [name for name in wanted if name not in shapes]
    for name in (extra := [name for name in shapes if name not in wanted])[:1]:
        similar = nearest(name, missing)
        hint = f"; did you mean {similar!r} by {name!r}, and --strip?" if similar else ""
        _log.warning("not in the model: %s%s", some(extra, "tensors"), hint)
    if missing:
        _log.warning("only in the model: %s", some(missing, "tensors"))
