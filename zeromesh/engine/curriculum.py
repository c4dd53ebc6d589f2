"""Curriculum over the length of sequences (Li, Zhang, He, "The Stability-Efficiency Dilemma", 2022)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from zeromesh.base.containers import map_tensors, tensors_of
from zeromesh.config.curriculum_section import Curriculum

ARGUMENT = "curriculum_seqlen"
"""Argument by which a model asks for the length, to cut its samples itself; DeepSpeed passes it to every model."""


def length_at(settings: Curriculum, update: int) -> int:
    """Return the length of samples in an update, counted from 1."""
    course = settings.schedule_config
    if settings.schedule_type == "fixed_discrete":
        lengths, ends = course.difficulty or [], course.max_step or []
        return lengths[sum(update > end for end in ends)]
    least, most, total = settings.min_difficulty, settings.max_difficulty, course.total_curriculum_step
    assert most is not None  # the settings are complete
    assert total is not None
    share = update / total
    if settings.schedule_type == "fixed_root":
        share = share ** (1.0 / (course.root_degree or 1))
    length = int(share * (most - least) + least)
    length -= length % course.difficulty_step
    return min(length if length >= least else length + course.difficulty_step, most)


class LengthCurriculum:
    """Cuts the samples of a model to the length of the present update."""

    def __init__(self, settings: Curriculum, model: nn.Module) -> None:
        self._settings = settings
        self._model_cuts = ARGUMENT in inspect.signature(model.forward).parameters
        self._update = 1

    def begin(self, update: int) -> None:
        """Begin an update, counted from 1."""
        self._update = update

    def get_current_difficulty(self) -> int:
        """Return the present length."""
        return length_at(self._settings, self._update)

    def get_difficulty(self, global_steps: int) -> int:
        """Return the length in an update, counted from 1."""
        return length_at(self._settings, global_steps)

    def for_model(self, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return arguments of a model's forward: cut, or with the length for a model that cuts itself."""
        if self._model_cuts:
            return args, {**kwargs, ARGUMENT: self.get_current_difficulty()}
        cut: tuple[Any, dict[str, Any]] = self.cut((args, dict(kwargs)))
        return cut

    def cut(self, batch: Any) -> Any:
        """Return nested tensors with sequences of the present length, unless the model cuts them."""
        full_length = next((tensor.shape[1] for tensor in tensors_of(batch) if tensor.dim() > 1), 0)
        length = self.get_current_difficulty()
        if self._model_cuts or full_length <= length:
            return batch
        return map_tensors(batch, partial(_cut, full_length=full_length, length=length))


def _cut(tensor: torch.Tensor, full_length: int, length: int) -> torch.Tensor:
    """Return a tensor of shape (samples, tokens, ...), or an attention mask (samples, ..., tokens, tokens), cut."""
    dims = (1,) if tensor.dim() < 4 else (tensor.dim() - 2, tensor.dim() - 1)
    for dim in dims:
        # What is as long as samples are no sequences of the batch, such as one label each, is left whole.
        if tensor.dim() > dim and tensor.shape[dim] == full_length:
            tensor = tensor.narrow(dim, 0, length)
    return tensor.contiguous()
