"""Hugging Face checkpoints, read straight into each rank's shard; no rank holds a whole model."""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeromesh.base.files import LARGEST_TEXT, require_regular
from zeromesh.base.quantized_layers import is_quantized
from zeromesh.base.requirements import imported
from zeromesh.base.words import nearest, some
from zeromesh.checkpoint.weights.hub_models import MAIN as MAIN
from zeromesh.checkpoint.weights.hub_models import configured
from zeromesh.checkpoint.weights.hub_models import is_model_id as is_model_id
from zeromesh.checkpoint.weights.hub_models import model_folder as model_folder
from zeromesh.checkpoint.weights.hub_models import reason_of as reason_of
from zeromesh.checkpoint.weights.quantize_weights import quantize
from zeromesh.checkpoint.weights.weight_files import FileTensor, checkpoint_tensors
from zeromesh.shard.parameters.deferred import Source, read_from, recording, source_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_log = logging.getLogger(__name__)

GENERATION, ADAPTERS = "generation_config.json", "adapter_config.json"

HASHED = 64  # elements of each tensor by which ranks see whether they read the same checkpoint

COMPARED = 1 << 24  # elements of two tensors that are compared at a time

FLOATING = ("F64", "F32", "F16", "BF16")  # names of trainable dtypes in safetensors files


@dataclass(frozen=True)
class Converted:
    """A parameter that transformers makes of several tensors, or of a part of one."""

    # Names have changed between versions, and experts that are stored apart are one tensor in the model. The table of
    # these conversions in transformers makes whole models; here it is used for one parameter at a time.
    name: str
    converter: Any  # a ``WeightConverter`` of transformers
    parts: Mapping[str, tuple[FileTensor, ...]]  # by the pattern of the converter that their names fit
    model: PreTrainedModel  # whose configuration the conversion may ask

    def __str__(self) -> str:
        files = [part for parts in self.parts.values() for part in parts]
        return f"{files[0]} and {len(files) - 1} more" if len(files) > 1 else f"a part of {files[0]}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the result without reading; empty if the parts do not fit together."""
        try:
            # Meta tensors go through the same conversion without anything being read.
            return tuple(self._make(lambda part: torch.empty(part.shape, device="meta")).shape)
        except (RuntimeError, ValueError, IndexError):
            return ()

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return elements ``[start, stop)`` of the flattened parameter; all of its parts are read."""
        return self._make(FileTensor.whole).reshape(-1)[start:stop]

    def _make(self, read: Callable[[FileTensor], torch.Tensor]) -> torch.Tensor:
        # A converter collects what it is given, and this one is asked again for every range.
        converter = deepcopy(self.converter)
        for pattern, parts in self.parts.items():
            for part in parts:
                converter.add_tensor(self.name, part.key, pattern, partial(read, part))
        first = str(next(iter(converter.layer_targets)))
        converted = converter.convert(first, model=self.model, config=self.model.config)
        if self.name not in converted:
            raise ValueError(f"transformers made {', '.join(sorted(converted))} of {self}, but not {self.name}")
        value = converted[self.name]
        tensor: torch.Tensor = value[0] if isinstance(value, list) else value
        return tensor


@dataclass(frozen=True)
class Loaded:
    """Tensors of a checkpoint that did not fit."""

    missing: tuple[str, ...]  # parameters and persistent buffers that it lacks, which keep the values that they have
    unexpected: tuple[str, ...]  # its tensors that the model has no use for


def from_pretrained(
    folder: str | Path,
    model_class: Any = None,
    *,
    weights: bool = True,
    strict: bool = True,
    dtype: torch.dtype = torch.float32,
    quantization_config: Any = None,
    quantize_experts: bool = False,
    deferred: bool = True,
    revision: str = MAIN,
    **config: Any,
) -> PreTrainedModel:
    """Return a Hugging Face model without memory: ``initialize`` reads each rank's share.

    Args:
        folder: with config.json and, for ``weights``, safetensors; or a name on the Hub, such as ``org/model``.
        model_class: a class of transformers, also an automatic one; None is ``AutoModelForCausalLM``.
        weights: False gives the initial values that the configuration describes.
        strict: refuse a checkpoint that lacks a parameter or a persistent buffer; else these get initial values, as a
            new head does.
        dtype: of the parameters. Where the run's own configuration switches 16 bits on, fp32 is right, since it is what
            the masters are made of; no value of the checkpoint is rounded on its way into them.
        quantization_config: of transformers, for bitsandbytes or torchao: linear layers get frozen weights in 4 or 8
            bits. Each is read, quantized and cut into shards before the next one. Leave it out for a folder that was
            saved quantized by bitsandbytes: each rank reads its share of the bytes.
        quantize_experts: quantize stacked weights of experts, of shape (experts, out, in) or (experts, in, out), in
            the same way, in 4 bits of bitsandbytes. transformers leaves them as they are.
        deferred: False makes quantized weights now, whole on each rank; adapters that are made of them, such as DoRA's,
            need that.
        revision: branch, tag or commit of a model of the Hub.
        config: values that replace those of config.json, or arguments of the model's class.

    Raises:
        ValueError: there is no such model in the folder, or its weights are not those of the model.
    """
    path = _local(folder, weights, revision)
    model = build(path, model_class, dtype, draws=not (weights and strict), **config)
    saved = saved_quantization(model.config)
    if saved is not None:
        if quantization_config is not None or not weights:
            raise ValueError(
                f"{str(path)!r} is quantized already; leave quantization_config and weights=False out, or name the "
                "folder of the original weights"
            )
        files = quantize(model, saved, deferred, list(checkpoint_tensors(path)))
        _load(model, path, files, strict)
    elif weights:
        load_pretrained(model, path, strict=strict)
    if quantization_config is not None:
        quantize(model, quantization_config, deferred, experts=quantize_experts)
    elif quantize_experts:
        raise ValueError("quantize_experts needs quantization_config, with load_in_4bit=True; pass both or neither")
    return model


def saved_quantization(settings: PretrainedConfig) -> Any:
    """Return how the weights of a folder are quantized, by its configuration; None: they are not.

    Raises:
        ValueError: another library than bitsandbytes did it.
    """
    config = getattr(settings, "quantization_config", None)
    if config is None:
        return None
    kind = config.get("quant_method") if isinstance(config, dict) else type(config).__name__
    if kind not in ("bitsandbytes", "BitsAndBytesConfig"):
        raise ValueError(
            f"{settings.name_or_path!r} is quantized ({kind}), which cannot be trained; use the original weights, "
            "which quantization_config quantizes as they are read"
        )
    return require_transformers().BitsAndBytesConfig.from_dict(config) if isinstance(config, dict) else config


def build(path: Path, model_class: Any, dtype: torch.dtype, draws: bool, **config: Any) -> PreTrainedModel:
    """Return the model that a folder's config.json describes, without memory; see ``from_pretrained``."""
    settings, arguments = configuration(path, **config)
    make = model_class or require_transformers().AutoModelForCausalLM
    if hasattr(make, "from_config"):  # an automatic one, which would ask whether to run code that lies in the folder
        make, arguments = make.from_config, arguments | {"trust_remote_code": False}
    else:
        make = make._from_config
    # Drawing initial values that are not needed takes longer than reading those of the checkpoint.
    with (
        configured(path),
        recording(),
        nullcontext() if draws else require_transformers("initialization").no_init_weights(),
    ):
        model: PreTrainedModel = make(settings, dtype=dtype, **arguments)
    model.tie_weights()
    if model.can_generate() and (path / GENERATION).is_file():
        # The settings of generation that config.json holds are those of older checkpoints.
        try:
            require_regular(path / GENERATION, LARGEST_TEXT)
            model.generation_config = require_transformers().GenerationConfig.from_pretrained(path)
        except (ValueError, OSError, TypeError) as error:
            raise ValueError(f"{str(path / GENERATION)!r} cannot be read by transformers: {error}") from None
    return model


def configuration(path: Path, **config: Any) -> tuple[PretrainedConfig, dict[str, Any]]:
    """Return a folder's config.json with some values replaced, and the values that it has no place for.

    Raises:
        ValueError: there is none, it needs code of the folder's own, or is of weights that another library than
            bitsandbytes has quantized, or of adapters.
    """
    transformers = require_transformers()
    if config.pop("trust_remote_code", False):
        raise ValueError(
            f"trust_remote_code: no code in {str(path)!r} is run; use a model that transformers has itself"
        )
    if (path / ADAPTERS).is_file():
        raise ValueError(
            f"{str(path)!r} holds adapters of PEFT, which are not read from there; merge them into their model "
            "(zeromesh export RUN FOLDER --merge, or PEFT's merge_and_unload), or name the model without them"
        )
    _local(path)
    try:
        require_regular(path / "config.json", LARGEST_TEXT)
        with configured(path):
            settings, arguments = transformers.AutoConfig.from_pretrained(
                path, local_files_only=True, return_unused_kwargs=True, trust_remote_code=False, **config
            )
    except (ValueError, OSError, KeyError) as error:
        raise ValueError(f"{str(path)!r} holds no configuration that transformers can read: {error}") from None
    saved_quantization(settings)
    return settings, arguments


def load_pretrained(model: nn.Module, folder: str | Path, *, strict: bool = True) -> Loaded:
    """Give a model the weights of a Hugging Face checkpoint.

    Of parameters that are on the meta device, or were made in ``zero.Init``, nothing is read here: ``initialize`` reads
    the part that each rank keeps. Others are read now.

    Args:
        model: not yet given to ``initialize``.
        folder: with ``model.safetensors``, or with several files and their index; or a name on the Hub.
        strict: refuse a checkpoint that lacks a parameter or a persistent buffer. Else those keep their values.

    Raises:
        ValueError: there are no safetensors, a file is damaged, a shape differs, parameters that are to be one have
            different values, or, with ``strict``, a tensor is missing.
    """
    path = _local(folder)
    return _load(model, path, list(checkpoint_tensors(path)), strict)


def _load(model: nn.Module, path: Path, files: Sequence[FileTensor], strict: bool) -> Loaded:
    """Give a model the weights of files in a folder, but for those that are quantized; see ``load_pretrained``."""
    sources, unexpected, doubles = _sources(model, files)
    state = model.state_dict(keep_vars=True)
    targets: dict[str, torch.Tensor] = {n: p for n, p in model.named_parameters() if not is_quantized(p)}
    targets |= {n: buffer for n, buffer in model.named_buffers() if n in state}
    _require_shapes(path, targets, sources)
    _require_floats(path, targets, sources)
    for name, first, second in doubles:
        if not _is_equal(first, second):
            raise ValueError(
                f"{str(path)!r} has two values for {name}: {first} and {second} differ. If the model ties them, set "
                '"tie_word_embeddings" to false in its config.json, or pass tie_word_embeddings=False, to keep both; '
                "else take one of them out"
            )
    missing = tuple(name for name, target in targets.items() if name not in sources and _is_needed(model, name, target))
    if missing and strict:
        pairs = [(name, nearest(name, unexpected)) for name in missing[:3]]
        suggestions = [f"{other} for {name}" for name, other in pairs if other]
        hint = f" (it has {', '.join(suggestions)})" if suggestions else ""
        raise ValueError(
            f"{str(path)!r} lacks {some(missing)} of {type(model).__name__}{hint}; use "
            "the class that the checkpoint is of, or pass strict=False, which leaves them at their initial values"
        )
    if unexpected and not sources:
        raise ValueError(
            f"{str(path)!r} has nothing for {type(model).__name__}: it holds {some(unexpected)}; use the class that "
            "the checkpoint is of"
        )
    if unexpected:
        _log.info("%s: not used by the model: %s", path, some(unexpected))
    if missing:
        _log.warning("%s lacks %s, which keep their initial values", path, some(missing))
    with torch.no_grad():
        for name, target in targets.items():
            if (source := sources.get(name)) is None:
                continue
            # Without memory yet: each rank reads its share when the model is placed.
            if target.device.type == "meta":
                read_from(target, source)
            else:
                target.copy_(source.read(0, target.numel()).view(target.shape))
    return Loaded(missing, tuple(unexpected))


def describe_sources(model: nn.Module) -> str:
    """Return a line for each parameter that will be read from a checkpoint, with a hash of some of its elements."""
    # Ranks compare it, because each reads its own part: different copies of a checkpoint would be mixed.
    sources = ((name, source_of(parameter)) for name, parameter in model.named_parameters())
    return "\n".join(f"{name}: {_hash(source)} in {source}" for name, source in sources if source is not None)


def _hash(source: Source) -> str:
    """Return a hash of elements from the middle of one of the tensors that make up the values."""
    file = next(iter(_files_of(source)), source)
    size = math.prod(file.shape) if isinstance(file, FileTensor) else HASHED
    start = max(0, size // 2 - HASHED)
    some = file.read(start, min(start + HASHED, size)).contiguous().view(torch.uint8)
    return hashlib.sha256(some.numpy().tobytes()).hexdigest()[:16]


def _sources(
    model: nn.Module, files: Iterable[FileTensor]
) -> tuple[dict[str, Source], list[str], list[tuple[str, FileTensor, FileTensor]]]:
    """Return the source of each parameter and buffer, unused tensors, and pairs of which one is enough."""
    # As they are: a recording would take a detached one for what the values of a parameter become.
    names = dict(model.state_dict(keep_vars=True))
    first = first_names(model)
    rename, conversions = _renaming(model, names)
    converters = {
        pattern: entry for entry in conversions if hasattr(entry, "operations") for pattern in entry.source_patterns
    }
    # Tied parameters may be in a checkpoint under each of their names.
    sources: dict[str, Source] = {}
    doubles: list[tuple[str, FileTensor, FileTensor]] = []
    parts: dict[str, tuple[Any, dict[str, list[FileTensor]]]] = {}
    unexpected = []
    # Layer 10 after layer 9, because a converter stacks experts in the order in which it gets them.
    for file in sorted(files, key=lambda file: [(int(p), "") if p.isdigit() else (-1, p) for p in file.key.split(".")]):
        name, pattern = rename(file.key)
        if name not in names:
            unexpected.append(file.key)
        elif pattern is None:
            earlier = sources.setdefault(first.get(name, name), file)
            if isinstance(earlier, FileTensor) and earlier is not file:
                doubles.append((first.get(name, name), earlier, file))
        else:
            _, collected = parts.setdefault(name, (converters[pattern], {}))
            collected.setdefault(pattern, []).append(file)
    for name, (converter, collected) in parts.items():
        inputs = {pattern: tuple(entries) for pattern, entries in collected.items()}
        # One tensor may become several parameters, which are named like the converter's targets.
        for target in converter.target_patterns:
            parameter_name = name.replace(converter.target_patterns[0], target)
            if parameter_name in names:
                sources[first.get(parameter_name, parameter_name)] = Converted(parameter_name, converter, inputs, model)  # type: ignore[arg-type]
    if conversions:  # transformers turns those back that were of use when a model is saved
        model._weight_conversions = [entry for entry in conversions if entry.was_used()]  # type: ignore[assignment]
    return sources, unexpected, doubles


def _renaming(model: nn.Module, names: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """Return a function from a tensor's name to (parameter, pattern of a converter), and transformers' table."""
    if not hasattr(model, "base_model_prefix"):
        return lambda key: (key, None), []
    core = require_transformers("core_model_loading")
    mapping = require_transformers("conversion_mapping").get_model_conversion_mapping(model)
    converters = [entry for entry in mapping if isinstance(entry, core.WeightConverter)]
    renamings = [entry for entry in mapping if isinstance(entry, core.WeightRenaming)]
    prefix = partial(core.rename_source_key, base_model_prefix=model.base_model_prefix, meta_state_dict=names)

    def rename(key: str) -> tuple[str, str | None]:
        name, pattern = prefix(key, renamings, converters)
        # A rule must not rename what the model has under this very name.
        if name not in names and key in names:
            name, pattern = key, None
        return name, pattern

    return rename, mapping


def first_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each parameter that has several, by the other names."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in every if first[id(parameter)] != name}


def _require_shapes(folder: Path, targets: Mapping[str, torch.Tensor], sources: Mapping[str, Source]) -> None:
    wrong = []
    for name, target in targets.items():
        source = sources.get(name)
        if isinstance(source, FileTensor | Converted) and (shape := source.shape) != tuple(target.shape):
            origin = f"made of {source}, " if isinstance(source, Converted) else ""
            wrong.append(f"{name}, {origin}is {shape or 'incomplete'} there and {tuple(target.shape)} in the model")
    if wrong:
        raise ValueError(
            f"{str(folder)!r} holds another model, or not all of it: {some(wrong)}; use the config.json of it"
        )


def _require_floats(folder: Path, targets: Mapping[str, torch.Tensor], sources: Mapping[str, Source]) -> None:
    """Raise ValueError for quantized values of floating-point parameters."""
    wide = [sources[name] for name, target in targets.items() if name in sources and target.is_floating_point()]
    coded = [f"{file} ({file.kind})" for source in wide for file in _files_of(source) if file.kind not in FLOATING]
    if coded:
        raise ValueError(
            f"{str(folder)!r} holds quantized weights, {some(coded)}, which cannot be trained; use the original ones"
        )


def _files_of(source: Source) -> list[FileTensor]:
    if isinstance(source, Converted):
        return [file for files in source.parts.values() for file in files]
    return [source] if isinstance(source, FileTensor) else []


def _is_needed(model: nn.Module, name: str, target: torch.Tensor) -> bool:
    """Return False for a buffer that, by its class in transformers, older checkpoints lack."""
    patterns = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    return isinstance(target, nn.Parameter) or not any(re.search(pattern, name) for pattern in patterns)


def _is_equal(first: FileTensor, second: FileTensor) -> bool:
    size = math.prod(first.shape)
    # In parts: a head and an embedding of a large vocabulary are gigabytes.
    return first.shape == second.shape and all(
        bool((first.read(start, stop) == second.read(start, stop)).all())
        for start, stop in ((start, min(start + COMPARED, size)) for start in range(0, size, COMPARED))
    )


def _local(folder: str | Path, weights: bool = True, revision: str = MAIN) -> Path:
    path = model_folder(folder, weights, revision)
    if not path.is_dir():
        raise ValueError(
            f"{str(folder)!r} is not a folder; name a local one with config.json, or a model of the Hugging Face Hub, "
            "as in ORGANISATION/MODEL; python examples/tiny_model.py FOLDER makes a tiny one to try"
        )
    return path


def require_transformers(module: str = "") -> Any:
    """Import transformers, or a module of it; raise ValueError if it is not installed."""
    needs = "Hugging Face models need transformers, version 5 or newer"
    return imported(f"transformers.{module}".rstrip("."), needs)
