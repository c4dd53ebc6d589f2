"""Inputs that a model takes: the user's own, or guessed ones, of which the shapes count."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zeromesh.base.containers import map_tensors
from zeromesh.base.dry.meta_values import META, give, invented, on_meta, value_of
from zeromesh.base.lengths import option, positions

Inputs = dict[str, Any]

_log = logging.getLogger(__name__)

SAMPLES = 2  # batch norms need several
LENGTH = 16  # tokens; some models go through a text in a loop of Python
LONGEST = 1024  # tokens; models that take longer texts are rarely trained with their longest
MOST_GUESSES = 100
SIZES = (32, 224, 64, 28, 16)  # widths and heights of images to try


class InputSizes(NamedTuple):
    """Sizes of the inputs of a model, as far as its configuration leaves them open."""

    samples: int = SAMPLES
    length: int = LENGTH  # tokens
    image: int = 64  # width and height
    frames: int = 8 * LENGTH  # of a spectrum
    sound: int = 16000  # numbers


@dataclass(frozen=True)
class ModelInput:
    """Arguments of a model: a batch, and a function that calls the model with it and returns a loss."""

    batch: Any
    call: Callable[[Any, Callable[..., Any]], Any]

    def run_dry(self, model: Callable[..., Any], dtype: torch.dtype, context: AbstractContextManager[Any]) -> None:
        """Call a model without memory, with fractions in its dtype, and a loss, whose own errors do not count."""
        batch, has_ended = inputs_without_memory(self.batch, dtype), False

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_ended
            output = model(*args, **kwargs)
            has_ended = True
            return output

        try:
            with context:
                self.call(batch, forward)
        except Exception:
            if not has_ended:
                raise
            _log.debug("the loss of a model cannot be traced", exc_info=True)


def _by_name(batch: Any, model: Callable[..., Any]) -> Any:
    output = model(**batch)
    loss = getattr(output, "loss", None)
    return output if loss is None else loss


def inputs_without_memory(batch: Any, dtype: torch.dtype | None) -> Any:
    """Return inputs without memory, with fractions in a dtype if there is one; what has no values gets some."""

    def taken(x: Tensor, name: str = "") -> Tensor:
        meta_tensor = on_meta(x, dtype, valued=True)
        return give(meta_tensor, invented(x, name)) if x.is_meta and value_of(x) is None else meta_tensor

    if isinstance(batch, dict):
        return {name: map_tensors(value, partial(taken, name=name)) for name, value in batch.items()}
    return map_tensors(batch, taken)


def samples_of(model: nn.Module, length: int = LENGTH) -> Iterator[ModelInput]:
    """Yield samples to try one after the other, the most complete first; none if the inputs are unknown."""
    # Models of transformers tell by their configuration and by the arguments of their forward, others by the latter.
    accepted = inspect.signature(model.forward).parameters
    first = next(iter(accepted), "")
    main, config = getattr(model, "main_input_name", first), getattr(model, "config", None)
    if main not in accepted or (config is None and main not in _INPUTS):
        return
    length = min(length, positions(config) or length)
    sizes = InputSizes(length=length, frames=8 * length)
    inputs: Inputs = {name: make(config, sizes) for name, make in _INPUTS.items() if name in accepted and name != main}
    inputs |= {name: value for name, value in _OPTIONS.items() if name in accepted}
    if not getattr(config, "is_encoder_decoder", False) or main not in _INPUTS:
        inputs = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    if _INPUTS.get(main, _tokens) is not _tokens:
        inputs.pop("attention_mask", None)
    inputs[main] = _INPUTS.get(main, _tokens)(config, sizes)
    # Labels are per token, or of classes; which ones a model takes only a trial shows.
    labels = _labels(type(model), sizes) if "labels" in accepted else []
    tried = [{**inputs, "labels": label} for label in labels] + [inputs]
    # Of models of several kinds of inputs, perhaps only the main one.
    fewer = [{name: x for name, x in sample.items() if name in (main, "labels", *_OPTIONS)} for sample in tried]
    tried += [sample for sample, full in zip(fewer, tried, strict=True) if len(full) > 2]
    yield from (ModelInput(sample, _by_name) for sample in tried)


def guesses_of(model: nn.Module) -> Iterator[ModelInput]:
    """Yield inputs of the kinds that layers of the model read, for a model of whose arguments nothing is known."""
    required = [
        p
        for p in inspect.signature(model.forward).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    values = list(_tensors_for(model))
    # All alike first, as ids and labels.
    alike = [(value,) * len(required) for value in values]
    for chosen in islice((*alike, *product(values, repeat=len(required))), MOST_GUESSES):
        yield ModelInput([value.clone() for value in chosen], lambda batch, model: model(*batch))


def _tensors_for(model: nn.Module) -> Iterator[Tensor]:
    modules = list(model.modules())
    widths = list(dict.fromkeys(m.in_features for m in modules if isinstance(m, nn.Linear)))[:3]
    shapes: list[tuple[int, ...]] = []
    for channels in [m.in_channels for m in modules if isinstance(m, nn.Conv2d)][:1]:
        shapes += [(SAMPLES, channels, size, size) for size in SIZES]
    shapes += [(SAMPLES, LENGTH, width) for width in widths] + [(SAMPLES, width) for width in widths]
    if any(isinstance(m, nn.Embedding) for m in modules):
        yield _ids(SAMPLES, LENGTH)
    yield from (torch.empty(shape, device=META) for shape in shapes)
    yield _ids(SAMPLES)


def inputs_of(kind: type[nn.Module], config: Any, sizes: InputSizes) -> Inputs:
    """Return the main input of a class of transformers, and its labels or what stands for them, on the meta device.

    Raises:
        ValueError: its main input is of an unknown kind.
    """
    accepted = inspect.signature(kind.forward).parameters
    main = getattr(kind, "main_input_name", "input_ids")
    if main not in _INPUTS:
        raise ValueError(f"inputs called {main!r} are not known; pass the module with its inputs to TracedCost")
    inputs: Inputs = {main: _INPUTS[main](config, sizes)}
    if "labels" in accepted:
        inputs["labels"] = _labels(kind, sizes)[0]
    elif all(name in accepted for name in _POSITIONS):
        inputs |= {name: _ids(sizes.samples) for name in _POSITIONS}
    elif "decoder_input_ids" in accepted:
        inputs["decoder_input_ids"] = _ids(sizes.samples, sizes.length)
    return inputs


def _labels(kind: type[nn.Module], sizes: InputSizes) -> list[Tensor]:
    """Return labels of tokens and of samples; those first that the name of a class says."""
    labels = [_ids(sizes.samples, sizes.length), _ids(sizes.samples)]
    return labels[::-1] if kind.__name__.endswith(_LABEL_OF_SAMPLE) else labels


def _ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.long, device=META)


def _tokens(config: Any, sizes: InputSizes) -> Tensor:
    return _ids(sizes.samples, sizes.length)


def _images(config: Any, sizes: InputSizes) -> Tensor:
    size = option(config, "image_size") or sizes.image
    if isinstance(size, Mapping):
        size = size["height"], size["width"]
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.empty(sizes.samples, option(config, "num_channels") or 3, height, width, device=META)


def _spectra(config: Any, sizes: InputSizes) -> Tensor:
    # Whisper halves the length, and wants just as many as it has positions for.
    frames = 2 * option(config, "max_source_positions") or sizes.frames
    return torch.empty(sizes.samples, option(config, "num_mel_bins") or 80, frames, device=META)


# Value of each argument, by name.
_INPUTS: dict[str, Callable[[Any, InputSizes], Tensor]] = {
    "input_ids": _tokens,
    "tokens": _tokens,
    "idx": _tokens,
    "attention_mask": _tokens,
    "pixel_values": _images,
    "input_features": _spectra,
    "input_values": lambda config, sizes: torch.empty(sizes.samples, sizes.sound, device=META),
    "decoder_input_ids": _tokens,
}
_OPTIONS: Inputs = {"return_loss": True, "use_cache": False}
_POSITIONS = ("start_positions", "end_positions")
# Ends of names of classes whose labels are one for each sample.
_LABEL_OF_SAMPLE = ("ForSequenceClassification", "ForImageClassification", "ForAudioClassification")
