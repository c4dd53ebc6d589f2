"""``deepspeed.checkpointing``: recomputation of activations by the user's own calls, as ``configure`` says."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from zeromesh.deepspeed.device_interface import get_accelerator
from zeromesh.engine.owners import newest_engine
from zeromesh.parallel.activation.checkpoint import checkpoint_with

if TYPE_CHECKING:
    from zeromesh.comm.collectives import Group
    from zeromesh.parallel.activation.activation_store import ActivationStore

_log = logging.getLogger("zeromesh")

MODEL_PARALLEL = "model-parallel-rng"  # name of the random state that differs between tensor-parallel ranks
TENSOR_SEED = 2718  # added to the seed of that state, as Megatron-LM does

_configured: dict[str, bool] = {}  # of ``configure``; empty before
_stores: dict[tuple[bool, Group | None], ActivationStore] = {}  # by host memory, and the ranks that share inputs
_states: dict[str, torch.Tensor] = {}


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say where ``checkpoint`` keeps its inputs until the backward.

    With ``partition_activations`` each tensor-parallel rank keeps a part of them, with ``checkpoint_in_cpu`` they wait
    in host memory; one that is None is taken from the section of ``deepspeed_config``. The other arguments have no
    effect: the mesh of the newest engine says which ranks have the same inputs, and buffers are used again.
    """
    if synchronize or profile:
        _log.warning(
            "checkpointing.configure: synchronize and profile have no effect; set %s", '"profile": {"enabled": true}'
        )
    if deepspeed_config is not None:
        from zeromesh.config.settings import Settings

        section = Settings.load(deepspeed_config, tells=False).activation_checkpointing
        if partition_activations is None:
            partition_activations = section.partition_activations
        if checkpoint_in_cpu is None:
            checkpoint_in_cpu = section.cpu_checkpointing
    _configured.update({"partition": bool(partition_activations), "host": bool(checkpoint_in_cpu)})
    _stores.clear()


def is_configured() -> bool:
    """Return whether ``configure`` has been called."""
    return bool(_configured)


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Set ``partition_activations`` of ``configure``."""
    _configured.update({"host": False, **_configured, "partition": partition_activation})
    _stores.clear()


def set_num_layers(nlayers: int) -> None:
    """Accept the number of layers, for which DeepSpeed sizes a buffer; there is none here."""


def reset() -> None:
    """Drop the buffers that inputs have waited in."""
    _stores.clear()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function and keep only its inputs until the backward, where ``configure`` says."""
    return checkpoint_with(_store(), function, *args, **kwargs)


def _store() -> ActivationStore | None:
    engine, partition, host = newest_engine(), _configured.get("partition", False), _configured.get("host", False)
    group = None if engine is None or not partition else engine.mesh.group("tensor")
    if group is not None and group.size == 1:
        group = None  # nobody has the same inputs
    if not host and group is None:
        return None
    if (host, group) not in _stores:
        from zeromesh.parallel.activation.activation_store import ActivationStore

        device = torch.device(get_accelerator().current_device_name())
        _stores[host, group] = ActivationStore(device, host, group)
    return _stores[host, group]


class CudaRNGStatesTracker:
    """Random states of the device by name, one of which is used inside of ``fork``."""

    def reset(self) -> None:
        """Forget all states."""
        _states.clear()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of the states by name."""
        return dict(_states)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Replace all states."""
        self.reset()
        _states.update(states)

    def add(self, name: str, seed: int) -> None:
        """Add the state of a seed; raise ValueError for a name that there is already."""
        if name in _states:
            raise ValueError(f"there is a random state {name!r} already; choose another name, or reset() first")
        _states[name] = torch.Generator(get_accelerator().current_device_name()).manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw random numbers from a state of this name in this context; it goes on where it stopped."""
        if name not in _states:
            raise ValueError(f"there is no random state {name!r}; call model_parallel_cuda_manual_seed or add() first")
        device = get_accelerator()
        before = device.get_rng_state()
        device.set_rng_state(_states[name])
        try:
            yield
        finally:
            _states[name] = device.get_rng_state()
            device.set_rng_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the tracker of this process."""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device alike on tensor-parallel ranks, and the state that ``fork`` uses differently on each."""
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    engine = newest_engine()
    rank = 0 if engine is None else engine.mesh.group("tensor").rank
    _tracker.add(MODEL_PARALLEL, seed + TENSOR_SEED + rank)
