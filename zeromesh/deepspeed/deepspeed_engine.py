"""DeepSpeedEngine: ZeroMesh's engine with the names of DeepSpeed's, as a ``torch.nn.Module``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from zeromesh.base.signatures import refuse
from zeromesh.config.engine_answers import Asked, answer
from zeromesh.deepspeed.engine_weights import Weights
from zeromesh.deepspeed.names import ENGINE_REFUSED
from zeromesh.deepspeed.parameters import ParameterOffload
from zeromesh.deepspeed.questions import ATTRIBUTES, AnsweredConfig, CallableScale, Throughput, data_seed, methods
from zeromesh.deepspeed.wrappers import attributes
from zeromesh.engine.batches import check_loss
from zeromesh.engine.delegation import of_part
from zeromesh.engine.engine import Engine
from zeromesh.engine.initialize.optimizer_setup import build_loader
from zeromesh.engine.state import EngineState
from zeromesh.shard.optim.bound import name_values
from zeromesh.shard.store import aside

OffloadDeviceEnum = StrEnum("OffloadDeviceEnum", ["none", "cpu", "nvme"])
"""Memory that states are moved to."""

OffloadStateTypeEnum = StrEnum(
    "OffloadStateTypeEnum", ["optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer"]
)
"""Kinds of states that can be moved."""

_KINDS = {
    OffloadStateTypeEnum.optim_states: aside.OPTIMIZER,
    OffloadStateTypeEnum.hp_params: aside.MASTER,
    OffloadStateTypeEnum.lp_params: aside.PARAMETERS,
}
"""Kinds of states that rest between updates; gradients have no memory then that could be moved."""


class DeepSpeedEngine(Engine, nn.Module):
    """An engine that is a module around the user's, as DeepSpeed's is: parameters are called ``module.NAME``.

    Tables in ``questions.py`` have its names that need no method here.
    """

    def __init__(
        self,
        state: EngineState,
        document: Mapping[str, Any],
        mpu: Any = None,
        users_optimizer: bool = False,
        plateau: ReduceLROnPlateau | None = None,
    ) -> None:
        nn.Module.__init__(self)
        self._document = dict(document)
        self._config_view = AnsweredConfig(document, state.config)
        Engine.__init__(self, state)
        self.module = state.module
        if plateau is not None:
            self.lr_scheduler = plateau
        self.saves = Weights(state, answer("checkpoint_tag_validation_fail", self.asked))
        self.mpu = mpu
        self.tput_timer = Throughput(self)
        self.is_compiled = state.config.compile.enabled
        self._applied = False
        self._batch_fn: Callable[[Any], Any] | None = None
        self._update.skip_losses()
        if self.loss_scaler is not None and self.config.zero_optimization.stage == 0:
            self.loss_scaler.follow_at_once()
        if self.optimizer is not None:
            offload = {"parameter_offload": ParameterOffload(self.sharded)} if self.sharded.sharded else {}
            name_values(self.optimizer, **offload, **attributes(self, users_optimizer))

    state_dict = of_part("saves", Weights.state_dict)  # type: ignore[assignment]
    load_state_dict = of_part("saves", Weights.load_state_dict)
    module_state_dict = of_part("saves", Weights.module_state_dict)
    load_module_state_dict = of_part("saves", Weights.load_module_state_dict)
    save_16bit_model = of_part("saves", Weights.save_16bit_model)
    save_fp16_model = of_part("saves", Weights.save_fp16_model)
    _consolidated_16bit_state_dict = of_part("saves", Weights.consolidated_16bit_state_dict)
    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    # The module.

    # With the hooks that a user registers on the engine.
    __call__ = nn.Module.__call__
    forward = Engine.__call__
    train = nn.Module.train
    eval = nn.Module.eval

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "module":
            self._modules[name] = value
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in ENGINE_REFUSED:
            raise AttributeError(f"{type(self).__name__}.{name} cannot be honoured: {ENGINE_REFUSED[name]}")
        try:
            return nn.Module.__getattr__(self, name)  # a module or a parameter that a user has put on the engine
        except AttributeError:
            return Engine.__getattr__(self, name)

    def __dir__(self) -> list[str]:
        return sorted({*nn.Module.__dir__(self), *dir(self.module)})

    @property
    def training(self) -> bool:
        """True if the module is in training mode."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        # ``train`` sets it on the engine, and then on the module.
        pass

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> DeepSpeedEngine:
        """Accept a conversion, as ``engine.to(device)``, that changes nothing; initialize has placed the parameters."""
        for parameter in self.module.parameters():
            like = torch.empty(0, dtype=parameter.dtype, device=self.device)
            converted = fn(like)
            if (converted.dtype, converted.device) != (like.dtype, like.device):
                raise ValueError(
                    f"the engine's parameters are {like.dtype} on {like.device}, and cannot become {converted.dtype} "
                    f"on {converted.device}: initialize has placed them; convert the model before it, or set the "
                    "precision in the configuration"
                )
        return self

    # The configuration.

    @property
    def config(self) -> Any:  # type: ignore[override]
        """The configuration as it was written, as a dict, with the resolved settings as attributes."""
        if self._config_view.settings is not self._state.config:  # sizes of batches have changed
            self._config_view = AnsweredConfig(self._document, self._state.config)
        return self._config_view

    @property
    def asked(self) -> Any:  # type: ignore[override]
        """Values that the answers about the configuration follow from."""
        return Asked(self._document, self._state.config)

    @property
    def loss_scale(self) -> CallableScale:  # type: ignore[override]
        """Current loss scale, 1 where the loss is not scaled; called, it returns the configured one."""
        return CallableScale(self._update.loss_scale, self._state.config.fp16.loss_scale)

    # Training.

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Compute gradients; see ``Engine.backward``. A loss that is not a scalar with a graph is an AssertionError."""
        _require_optimizer(self, "backward")
        return super().backward(_require_loss(loss), retain_graph, scale_wrt_gas)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the loss scale; see ``Engine.scale``. Errors are as those of ``backward``."""
        return super().scale(_require_loss(loss))

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Update the parameters at the accumulation boundary; see ``Engine.step``."""
        if not self._accumulation.syncs:
            raise AssertionError("step() inside no_sync(): leave the context first, the update needs all gradients")
        _require_optimizer(self, "step")
        before, self._applied = self.global_steps - self.skipped_steps, False
        super().step(lr_kwargs)
        self._applied = self.global_steps - self.skipped_steps > before

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the current micro-batch is the last one; see ``Engine.set_gradient_accumulation_boundary``."""
        _require_managed(self, "set_gradient_accumulation_boundary", "call step() at the boundary")
        super().set_gradient_accumulation_boundary(is_boundary)

    def was_step_applied(self) -> bool:
        """Return whether the last ``step()`` changed the parameters."""
        return self._applied

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients on their rank in this context; see ``Engine.no_sync``, which any stage may use."""
        # Programs expect DeepSpeed's limits, and some try them to find out about the stage.
        if self.zero_optimization_partition_gradients():
            raise AssertionError(
                f"no_sync() with gradients in parts, at ZeRO stage {self.zero_optimization_stage()}: use "
                "coalesce_grad_reduction(), or let the configuration accumulate"
            )
        if not self._accumulation.syncs:
            raise AssertionError("no_sync() inside no_sync(): leave out the inner one")
        with super().no_sync():
            yield
        # DeepSpeed counts calls of ``step``, and none of these backwards.
        self._accumulation.join()

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Add up the gradients of several backwards in this context, for the ``step()`` after it."""
        _require_managed(self, "coalesce_grad_reduction", "leave the context out, backwards add up without it")
        if not self.zero_optimization():
            raise NotImplementedError("coalesce_grad_reduction() without ZeRO: use no_sync()")
        if not self._accumulation.syncs:
            raise AssertionError("coalesce_grad_reduction() inside no_sync(): leave that context, this one includes it")
        with super().no_sync():
            yield
        self._accumulation.join()

    def compile(
        self,
        backend: Any = "inductor",
        compile_kwargs: dict[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
        **options: Any,
    ) -> None:
        """Compile each unit's forward; see ``Engine.compile``."""
        refuse("compile", "schedule", schedule, "the order of fetches follows from the run; leave it out")
        name = "compiled_autograd_enabled"
        refuse("compile", name, compiled_autograd_enabled, "gradients are reduced by hooks; leave it out", False)
        super().compile(backend, compile_kwargs, **options)
        self.is_compiled = True

    # Data.

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Change the samples of a micro-batch, which the caller feeds; as many are accumulated as before."""
        if self.training_dataloader is not None:
            raise ValueError(
                "set_train_micro_batch_size() with a loader of training_data, whose batches have their size; make the "
                "loader yourself with engine.deepspeed_io(data, micro_batch_size), or initialize anew"
            )
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {micro_batch_size}; it must be at least 1")
        train_size = micro_batch_size * self.gradient_accumulation_steps() * self.mesh.data_size
        sizes = {"train_micro_batch_size_per_gpu": micro_batch_size, "train_batch_size": train_size}
        self._state.change_sizes(sizes)

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> Any:
        """Return a loader that gives each rank its share of a data set.

        Args:
            dataset: one with a length.
            batch_size: samples of a micro-batch; None: the configured ones.
            route: ``train`` shuffles; other routes keep the data set's order.
            pin_memory: no effect.
            data_sampler: chooses the samples in place of ours.
            collate_fn: as in torch's loader.
            num_local_io_workers: worker processes, where ``data_sampler`` is given.
        """
        batch = batch_size or self.train_micro_batch_size_per_gpu()
        drop = self.config.dataloader_drop_last
        if data_sampler is not None:
            workers = num_local_io_workers or 0
            options: Any = {"collate_fn": collate_fn, "num_workers": workers, "drop_last": drop}
            return torch.utils.data.DataLoader(dataset, batch, sampler=data_sampler, **options)
        return build_loader(dataset, collate_fn, self.config, self.mesh, route == "train", data_seed(self.asked), batch)

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """Let ``train_batch()`` without an iterator take the micro-batches of a loader or iterator, for one pass."""
        self._passes = iter(loader)

    set_dataiterator = set_dataloader

    def set_batch_fn(self, fn: Callable[[Any], Any]) -> None:
        """Let ``train_batch`` and ``eval_batch`` take what a function makes of each micro-batch."""
        self._batch_fn = fn

    def _batches(self, data_iter: Iterator[Any] | None) -> Iterator[Any]:
        batches = super()._batches(data_iter)
        return batches if self._batch_fn is None else map(self._batch_fn, batches)

    # States.

    def offload_states(
        self,
        include: Collection[Any] | None = None,
        device: Any = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory until ``reload_states``; None: all kinds; device ``none``: nothing.

        See ``Engine.offload_states``.
        """
        device = OffloadDeviceEnum(device)
        if device is OffloadDeviceEnum.none:
            return
        if device is not OffloadDeviceEnum.cpu:
            raise ValueError(f"offload_states: device = {device} cannot be honoured; states go to the host, cpu")
        how = {"pin_memory": pin_memory, "non_blocking": non_blocking}
        chosen = [OffloadStateTypeEnum(kind) for kind in (OffloadStateTypeEnum if include is None else include)]
        super().offload_states([_KINDS[kind] for kind in chosen if kind in _KINDS], **how)


def _require_managed(engine: DeepSpeedEngine, name: str, remedy: str) -> None:
    if not engine.config.managed_gradient_accumulation:
        raise AssertionError(f"{name}() with managed_gradient_accumulation false: every step() updates; {remedy}")


def _require_optimizer(engine: DeepSpeedEngine, name: str) -> None:
    if engine.optimizer is None:
        raise AssertionError(f"{name}() needs an optimizer: pass optimizer= to initialize, or name one in config=")


def _require_loss(loss: Any) -> torch.Tensor:
    try:
        return check_loss(loss)
    except ValueError as error:
        raise AssertionError(error) from None


for _name, _method in methods().items():
    setattr(DeepSpeedEngine, _name, _method)
for _name, _read in ATTRIBUTES.items():
    setattr(DeepSpeedEngine, _name, property(_read))
