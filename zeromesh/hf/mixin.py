"""Mixin that gives transformers' and TRL's trainers a ZeroMesh configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeromesh.config.trainers import copies_in, for_trainer
from zeromesh.engine import Engine
from zeromesh.hf.late import activate
from zeromesh.zero import engine_of

if TYPE_CHECKING:
    from transformers import TrainingArguments


class TrainerMixin:
    """Adds ``zeromesh="config.json"`` to a trainer: ``class MySFT(zeromesh.hf.TrainerMixin, SFTTrainer)``.

    Args:
        args: positional arguments of the trainer; ``TrainingArguments`` are among them, or in ``kwargs``.
        zeromesh: the configuration: path of a JSON file, or a dict. None trains without ZeroMesh.
        kwargs: other arguments of the trainer.

    Raises:
        ConfigError: the configuration is wrong, or asks for what a trainer cannot do.
        TypeError: the trainer was given an engine, or no ``TrainingArguments``.
        ValueError: the model belongs to an engine, or an argument contradicts the configuration.
    """

    def __init__(self, *args: Any, zeromesh: str | Path | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._copies = 1
        if zeromesh is not None:
            _refuse_engines(kwargs.get("model", args[0] if args else None))
            activate()
            self._copies = _configure(_arguments_in(*args, *kwargs.values()), zeromesh)
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator; metrics count the batch of ranks that share it once."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if self._copies > 1:
            self.gather_function = self._gather

    def _gather(self, values: Any, use_gather_object: bool = False) -> Any:
        from accelerate.utils import recursively_apply

        accelerator = self.accelerator  # type: ignore[attr-defined]
        ranks, state = accelerator.num_processes, accelerator.gradient_state

        def once(gathered: torch.Tensor) -> torch.Tensor:
            each = gathered.reshape(ranks, -1, *gathered.shape[1:])[:: self._copies].flatten(0, 1)
            # The last batch was filled up with samples of the first one.
            return each[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else each

        return recursively_apply(once, accelerator.gather(values))


def _refuse_engines(model: object) -> None:
    if isinstance(model, Engine):
        raise TypeError("the trainer was given an engine; pass the model itself, from which the trainer makes one")
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    if any(engine_of(parameter) is not None for parameter in parameters):
        raise ValueError(
            "the model belongs to an engine already; pass it to the trainer before zeromesh.initialize, or call "
            "engine.destroy() first"
        )


def _arguments_in(*values: Any) -> TrainingArguments:
    from transformers import TrainingArguments

    found = [value for value in values if isinstance(value, TrainingArguments)]
    if not found:
        raise TypeError("zeromesh= needs TrainingArguments; pass args=, with the sizes of batches in it")
    return found[0]


def _configure(args: TrainingArguments, config: str | Path | Mapping[str, Any]) -> int:
    """Give the arguments a configuration as ``deepspeed=`` would; return the number of ranks that share a batch."""
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    if args.deepspeed:
        raise ValueError(f"the trainer was given two configurations: deepspeed={args.deepspeed!r} and zeromesh=; pass one")
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if args.world_size != ranks:
        raise ValueError(
            f"TrainingArguments see {args.world_size} rank, but the launcher started {ranks}: without an accelerator "
            "transformers trains on one rank unless it is told; pass use_cpu=True"
        )
    document = for_trainer(config, "transformers")
    args.deepspeed = document
    args.hf_deepspeed_config = HfTrainerDeepSpeedConfig(document)
    args.hf_deepspeed_config.trainer_config_process(args)
    args.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=args.hf_deepspeed_config)
    return copies_in(document)
