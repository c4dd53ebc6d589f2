"""Inputs with which a model's forward can be traced: the user's own, or guessed ones, of which the shapes count."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn

from zeromesh.base.containers import map_tensors
from zeromesh.base.dry.meta_values import on_meta
from zeromesh.base.lengths import option, positions

Inputs = dict[str, Any]

_log = logging.getLogger(__name__)

SAMPLES = 2  # batch norms need several
LENGTH = 16  # tokens; some models go through a text in a loop of Python
LONGEST = 1024  # tokens; models that take longer texts are rarely trained with their longest
MOST_GUESSES = 100
SIZES = (32, 224, 64, 28, 16)  # widths and heights of images to try
IMAGE = 64  # width and height of images if the configuration has none


@dataclass(frozen=True)
class ModelInput:
    """Arguments of a model: a batch, and a function that calls the model with it and returns a loss."""

    batch: Any
    call: Callable[[Any, Callable[..., Any]], Any]

    def run_dry(self, model: Callable[..., Any], dtype: torch.dtype, context: AbstractContextManager[Any]) -> None:
        """Call a model without memory, with fractions in its dtype, and a loss, whose own errors do not count."""
        batch, has_ended = map_tensors(self.batch, partial(on_meta, dtype=dtype, valued=True)), False

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


def samples_of(model: nn.Module, length: int = LENGTH) -> Iterator[ModelInput]:
    """Yield samples to try one after the other, the most complete first; none if the inputs are unknown."""
    # Models of transformers tell by their configuration and by the arguments of their forward, others by the latter.
    return (ModelInput(inputs, _by_name) for inputs in _inputs_of(model, length))


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
        yield ModelInput([value.clone() for value in chosen], _by_place)


def _by_place(batch: Any, model: Callable[..., Any]) -> Any:
    return model(*batch)


def _tensors_for(model: nn.Module) -> Iterator[Tensor]:
    modules = list(model.modules())
    widths = list(dict.fromkeys(m.in_features for m in modules if isinstance(m, nn.Linear)))[:3]
    shapes: list[tuple[int, ...]] = []
    for channels in [m.in_channels for m in modules if isinstance(m, nn.Conv2d)][:1]:
        shapes += [(SAMPLES, channels, size, size) for size in SIZES]
    shapes += [(SAMPLES, LENGTH, width) for width in widths] + [(SAMPLES, width) for width in widths]
    if any(isinstance(m, nn.Embedding) for m in modules):
        yield torch.ones(SAMPLES, LENGTH, dtype=torch.long)
    yield from (torch.zeros(shape) for shape in shapes)
    yield torch.zeros(SAMPLES, dtype=torch.long)


def _inputs_of(model: nn.Module, length: int) -> Iterator[Inputs]:
    accepted = inspect.signature(model.forward).parameters
    first = next(iter(accepted), "")
    main, config = getattr(model, "main_input_name", first), getattr(model, "config", None)
    if main not in accepted or (config is None and main not in _INPUTS):
        return
    longest = positions(config) or length
    texts = SAMPLES, min(length, longest)
    inputs: Inputs = {name: make(config, texts) for name, make in _INPUTS.items() if name in accepted and name != main}
    inputs |= {name: value for name, value in _OPTIONS.items() if name in accepted}
    if not getattr(config, "is_encoder_decoder", False) or main not in _INPUTS:
        inputs = {name: value for name, value in inputs.items() if not name.startswith("decoder_")}
    if _INPUTS.get(main, _tokens) is not _tokens:
        inputs.pop("attention_mask", None)
    inputs[main] = _INPUTS.get(main, _INPUTS["input_ids"])(config, texts)
    # Labels are per token, or of classes; which ones a model takes only a trial shows.
    labels = [_tokens(config, texts), torch.zeros(SAMPLES, dtype=torch.long)] if "labels" in accepted else []
    if "Classification" in type(model).__name__:
        labels.reverse()
    tried = [{**inputs, "labels": label} for label in labels] + [inputs]
    yield from tried
    for sample in tried:  # of models of several kinds of inputs, perhaps only the main one
        if len(sample) > 2:
            yield {name: value for name, value in sample.items() if name in (main, "labels", *_OPTIONS)}


def _tokens(config: Any, texts: tuple[int, int]) -> Tensor:
    return torch.ones(texts, dtype=torch.long)


def _images(config: Any, texts: tuple[int, int]) -> Tensor:
    size = option(config, "image_size") or IMAGE
    if isinstance(size, Mapping):
        size = size["height"], size["width"]
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.zeros(SAMPLES, option(config, "num_channels") or 3, height, width)


def _spectra(config: Any, texts: tuple[int, int]) -> Tensor:
    bins, places = option(config, "num_mel_bins") or 80, option(config, "max_source_positions")
    if "Whisper" in type(config).__name__:  # it halves the length, and wants just as many as it has positions for
        return torch.zeros(SAMPLES, bins, 2 * places)
    return torch.zeros(SAMPLES, 8 * texts[1], bins)


# Value of each argument, by name.
_INPUTS: dict[str, Callable[[Any, tuple[int, int]], Tensor]] = {
    "input_ids": _tokens,
    "tokens": _tokens,
    "idx": _tokens,
    "attention_mask": _tokens,
    "pixel_values": _images,
    "input_features": _spectra,
    "input_values": lambda config, texts: torch.zeros(SAMPLES, 16000),
    "decoder_input_ids": _tokens,
}
_OPTIONS: Inputs = {"return_loss": True, "use_cache": False}
