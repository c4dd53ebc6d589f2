"""Mixin that gives transformers' and TRL's trainers a ZeroMesh configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zeromesh.base.containers import map_tensors
from zeromesh.config.trainers import copies_in, for_trainer, ranks_in
from zeromesh.engine.engine import Engine
from zeromesh.engine.owners import engine_of
from zeromesh.hf.late import activate
from zeromesh.hf.staged_trainer import StagedSteps, outputs_of, whole_sequences

if TYPE_CHECKING:
    from transformers import TrainingArguments


class TrainerMixin:
    """Adds ``zeromesh="config.json"`` to a trainer: ``class MySFT(zeromesh.hf.TrainerMixin, SFTTrainer)``.

    Args:
        args: positional arguments of the trainer; ``TrainingArguments`` are among them, or in ``kwargs``.
        zeromesh: the configuration: path of a JSON or YAML file, or a dict. None trains without ZeroMesh.
        kwargs: other arguments of the trainer.

    Raises:
        ConfigError: the configuration is wrong, or asks for what a trainer cannot do.
        TypeError: the trainer was given an engine, or no ``TrainingArguments``.
        ValueError: the model belongs to an engine, or an argument contradicts the configuration.
    """

    def __init__(self, *args: Any, zeromesh: str | Path | Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        self._copies, self._context = 1, 1
        self._stages: StagedSteps | None = None
        self._gathers: Any = None
        if zeromesh is not None:
            _refuse_engines(kwargs.get("model", args[0] if args else None))
            activate()
            chosen = _arguments_in(*args, *kwargs.values())
            document = _configure(chosen, zeromesh)
            self._copies, self._context = copies_in(document), ranks_in(document, "context")
            if ranks_in(document, "pipeline") > 1:
                _refuse_stages(type(self), chosen)
                self._stages = StagedSteps()
            if self._context > 1:
                named = signature(super().__init__).bind_partial(*args, **kwargs).arguments
                _refuse_losses(chosen, named.get("compute_loss_func", kwargs.get("compute_loss_func")))
        super().__init__(*args, **kwargs)
        self._users: tuple[Any, Any] = (None, None)
        if zeromesh is not None:
            # transformers forgets them where its arguments name a configuration.
            self._users = self.optimizer, self.lr_scheduler
            _refuse_two(document, *self._users)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Return the optimizer of ``optimizers=``, or make the one that the arguments name."""
        if self._users[0] is None:
            return super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        self.optimizer = self._users[0]
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Return the schedule of ``optimizers=``, or make the one that the arguments name."""
        if self._users[1] is None:
            return super().create_scheduler(*args, **kwargs)  # type: ignore[misc]
        self.lr_scheduler = self._users[1]
        return self.lr_scheduler

    @property
    def gather_function(self) -> Any:
        """Function that collects values of an evaluation from all ranks; a batch that ranks share counts once."""
        return self._gathers if self._copies == 1 else self._gather

    @gather_function.setter
    def gather_function(self, value: Any) -> None:
        self._gathers = value  # transformers sets it anew after each evaluation

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Compute gradients of a micro-batch; a model in stages does so for all of an update with its last one."""
        if self._stages is None:
            step: torch.Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
            return step
        inputs = self._prepare_inputs(inputs)  # type: ignore[attr-defined]
        return self._stages.step(self, model, inputs, num_items_in_batch)

    def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **kwargs: Any) -> Any:
        """Return loss, predictions and labels; a model in stages gives its outputs to all its ranks."""
        if self._stages is not None:
            # Trainer evaluates the model itself, not the engine.
            engine = self.model_wrapped  # type: ignore[attr-defined]
            # A loss of the trainer's own is computed of the other outputs.
            custom_loss = self.compute_loss_func is not None or type(self).compute_loss is not TrainerMixin.compute_loss  # type: ignore[attr-defined]
            model = partial(outputs_of, engine, ("loss",) if prediction_loss_only and not custom_loss else None)
        outputs = super().prediction_step(model, inputs, prediction_loss_only, *args, **kwargs)  # type: ignore[misc]
        if self._context == 1 or prediction_loss_only:
            return outputs
        spread = self.model_wrapped.context_parallel  # type: ignore[attr-defined]
        # Each rank has the predictions of its part, and all labels.
        return outputs[0], map_tensors(outputs[1], partial(whole_sequences, spread=spread)), outputs[2]

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        """Compute the loss as the trainer does; under context parallelism the model gives the mean over its labels."""
        labels = inputs.get("labels")
        if self._context == 1 or num_items_in_batch is None or labels is None:
            chosen = {"return_outputs": return_outputs, "num_items_in_batch": num_items_in_batch}
            return super().compute_loss(model, inputs, **chosen, **kwargs)  # type: ignore[misc]
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)  # type: ignore[misc]
        # Whole sequences are fed, so that the labels of the micro-batch can be counted here. The engine takes the mean
        # over the shares of the data.
        shares = self.accelerator.num_processes // self._copies  # type: ignore[attr-defined]
        loss = loss * (labels[..., 1:] != -100).sum() * shares / num_items_in_batch
        return (loss, outputs) if return_outputs else loss

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


def _refuse_two(document: Mapping[str, Any], optimizer: Any, schedule: Any) -> None:
    """Raise ValueError if ``optimizers=`` and the configuration name an optimizer or a schedule each."""
    for name, passed in (("optimizer", optimizer), ("scheduler", schedule)):
        if passed is not None and document.get(name) is not None:
            raise ValueError(
                f"the trainer was given optimizers= with a {type(passed).__name__}, and the configuration has a "
                f"section {name}: leave one of them out"
            )
    if schedule is not None and optimizer is None:
        raise ValueError(
            f"the trainer was given optimizers=(None, {type(schedule).__name__}), whose optimizer would not be "
            "stepped: pass that optimizer, too"
        )


def _refuse_stages(trainer: type, args: TrainingArguments) -> None:
    """Raise ValueError if losses need other ranks, which compute another stage meanwhile, or the model's class."""
    if args.label_smoothing_factor:
        raise ValueError(
            f"mesh.pipeline: label_smoothing_factor={args.label_smoothing_factor} asks for the model's class, which "
            "a stage does not have; set mesh.pipeline to 1, or pass compute_loss_func= with the smoothed loss"
        )
    owners = (kind for kind in trainer.__mro__ if kind.__module__.startswith("trl."))
    owner = next((kind for kind in owners if {"compute_loss", "training_step"} & vars(kind).keys()), None)
    if owner is not None:
        raise ValueError(
            f"mesh.pipeline: {owner.__name__} exchanges values between ranks in each loss, but ranks of a pipeline "
            "compute losses at different times; set mesh.pipeline to 1, or train with zeromesh.hf.Trainer"
        )


def _refuse_losses(args: TrainingArguments, loss: Any) -> None:
    """Raise ValueError if a loss is to be computed of logits, of which each context rank has a part."""
    factor = args.label_smoothing_factor
    option = f"label_smoothing_factor={factor}" if factor else "compute_loss_func="
    if factor or loss is not None:
        raise ValueError(
            f"mesh.context: {option} computes a loss of the logits of whole sequences, but the model gives each rank "
            "those of its part; leave it out, so that the model computes its own loss, or set mesh.context to 1"
        )


def _arguments_in(*values: Any) -> TrainingArguments:
    from transformers import TrainingArguments

    arguments = [value for value in values if isinstance(value, TrainingArguments)]
    if not arguments:
        raise TypeError("zeromesh= needs TrainingArguments; pass args=, with the sizes of batches in it")
    return arguments[0]


def _configure(args: TrainingArguments, config: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Give the arguments a configuration as ``deepspeed=`` would, and return it."""
    from accelerate.utils import DeepSpeedPlugin
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    if args.deepspeed:
        raise ValueError(
            f"the trainer was given two configurations: deepspeed={args.deepspeed!r} and zeromesh=; pass one"
        )
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if args.world_size != ranks:
        raise ValueError(
            f"TrainingArguments see {args.world_size} rank, but the launcher started {ranks}: without an accelerator "
            "transformers trains on one rank unless it is told; pass use_cpu=True"
        )
    document = for_trainer(config, "transformers")
    filled = HfTrainerDeepSpeedConfig(document)  # type: ignore[no-untyped-call]
    filled.trainer_config_process(args)  # type: ignore[no-untyped-call]
    # The three attributes that ``deepspeed=`` would have set, as the trainer itself sets them before each trial of a
    # search for hyperparameters.
    plugin = DeepSpeedPlugin(hf_ds_config=filled)
    vars(args).update(deepspeed=document, hf_deepspeed_config=filled, deepspeed_plugin=plugin)
    return document
