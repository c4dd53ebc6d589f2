"""A model as a list of layers, which trains whole or cut into stages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import nn

from zeromesh.base.chain import Chain, Function, Shared
from zeromesh.parallel.activation.checkpoint import checkpoint
from zeromesh.parallel.pipeline.schedule.partition import WAYS
from zeromesh.shard.parameters.deferred import is_deferred, recording

if TYPE_CHECKING:
    from zeromesh.comm.mesh import Mesh
    from zeromesh.config.settings import Settings


class LayerSpec:
    """A layer that is yet to be built.

    Args:
        typename: class of the layer, of torch.nn.Module.
        module_args: positional arguments of the class.
        module_kwargs: named arguments of the class.

    Raises:
        ValueError: ``typename`` is not a class of modules.
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
            raise ValueError(
                f"typename is {typename!r}; a LayerSpec is given a class of torch.nn.Module and its arguments. Put "
                "functions, and modules that are built already, into the list of layers as they are"
            )
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def __repr__(self) -> str:
        options = (f"{name}={value!r}" for name, value in self.module_kwargs.items())
        return f"{self.typename.__name__}({', '.join([*map(repr, self.module_args), *options])})"

    def build(self, log: bool = False) -> nn.Module:
        """Return the module; ``log`` is accepted for DeepSpeed's sake."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that computes with one module together with all others of its key.

    Args:
        key: name of the module.
        typename: class of the module.
        module_args: positional arguments of the class.
        forward_fn: from the module and the inputs to the outputs; None calls the module.
        tied_weight_attr: accepted for DeepSpeed's sake: all parameters of the module are shared.
        module_kwargs: named arguments of the class.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[Any, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        if not isinstance(key, str) or not key or "." in key or hasattr(nn.ModuleDict(), key):
            raise ValueError(
                f"key is {key!r}; it becomes a part of parameters' names: give a word without a dot that is not a "
                "method of torch.nn.ModuleDict"
            )
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, tied_weight_attr


class PipelineModule(Chain):
    """A list of layers as a model: each is given, as one argument, what the one before returned.

    Parameters are named as DeepSpeed names them: ``3.weight`` by the number of the layer, ``tied_modules.KEY.weight``.

    Args:
        layers: LayerSpecs, which are built without memory, modules, or functions.
        num_stages: ranks that share the layers; None: the configuration's.
        topology: in its place, an object with ``get_dim``, as DeepSpeed's are, that knows the axis ``pipe``.
        loss_fn: from the outputs and the labels to the loss, unless ``initialize`` is given another; None: the last
            layer returns the loss.
        seed_layers: seed the random numbers before each layer is built, and before it computes.
        seed_fn: takes each seed, in place of ``torch.manual_seed`` and those of numpy and Python.
        base_seed: the first seed.
        partition_method: distribution of layers over stages, unless ``pipeline.partition`` is set: ``parameters``,
            ``uniform``, ``type:REGEX``, or the number of the first layer of each stage.
        activation_checkpoint_interval: layers of one stage that are recomputed together; 0 keeps all activations.
        activation_checkpoint_func: function that recomputes; takes a function and its arguments.
        checkpointable_layers: names of classes that are recomputed; None: those with parameters.
        dynamic_shape: accepted for DeepSpeed's sake; shapes may always change.

    Raises:
        ValueError: a layer, or an option, that cannot be.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str | Sequence[int] = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: Sequence[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__()
        self.num_stages = _stages(num_stages, topology)
        self.tensor_ranks = _axis(topology, "model")
        self.loss_fn = loss_fn
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.partition_method = _method(partition_method)
        self.activation_checkpoint_func = activation_checkpoint_func
        if isinstance(checkpointable_layers, str):
            raise ValueError(
                f"checkpointable_layers is {checkpointable_layers!r}; give a list of names of classes, such as "
                f"[{checkpointable_layers!r}]"
            )
        self.checkpointable_layers = checkpointable_layers
        self.set_checkpoint_interval(activation_checkpoint_interval)
        self._forwards = 0
        self._tied: dict[str, LayerSpec] = {}
        for number, layer in enumerate(layers):
            if seed_layers:
                self._seed(base_seed + number)
            # Layers are built without memory, as no rank holds the whole model; their values are made where a stage has
            # them.
            with recording():
                built, kind = self._build(number, layer)
            self.add_layer(built, kind)
        if not self.layers:
            raise ValueError("layers is empty; a PipelineModule is given one layer at least")
        self._note_versions()

    def _build(self, number: int, layer: Any) -> tuple[nn.Module, str]:
        """Return the module for a layer, and the name of its class or function."""
        if isinstance(layer, PipelineModule):
            raise ValueError(f"layer {number} is a PipelineModule; put its layers into the list in its place")
        if isinstance(layer, TiedLayerSpec):
            first = self._tied.setdefault(layer.key, layer)
            if layer.typename is not first.typename:
                raise ValueError(
                    f"layer {number} is a {layer.typename.__name__} with the key {layer.key!r}, which is that of a "
                    f"{first.typename.__name__}: layers of one key share one module. Name that class, and pass "
                    "forward_fn, which is given the module and the inputs"
                )
            if first is layer:
                self.tied_modules[layer.key] = layer.build()
            return Shared(self.tied_modules, layer.key, layer.forward_fn), layer.typename.__name__
        if isinstance(layer, LayerSpec):
            return layer.build(), layer.typename.__name__
        if isinstance(layer, nn.Module):
            return layer, type(layer).__name__
        if not callable(layer):
            raise ValueError(
                f"layer {number} is {layer!r}; layers are LayerSpecs, modules, or functions of one argument"
            )
        return Function(layer), getattr(layer, "__name__", type(layer).__name__)

    def _seed(self, seed: int) -> None:
        if self.seed_fn is not None:
            self.seed_fn(seed)
        else:
            random.seed(seed)
            numpy.random.seed(seed % 2**32)
            torch.manual_seed(seed)

    def apply(self, fn: Callable[[nn.Module], None]) -> PipelineModule:
        """See ``torch.nn.Module.apply``."""
        with recording():  # as the construction is, so that the owner of a layer repeats it
            super().apply(fn)
        self._note_versions()
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PipelineModule:
        with recording():
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._note_versions()
        return self

    def _note_versions(self) -> None:
        # A later write is seen by the version, since a parameter without memory keeps no values.
        self._versions = {name: parameter._version for name, parameter in self.named_parameters()}

    def require_recorded(self) -> None:
        """Raise ValueError if something was written to parameters that have no memory yet: it is lost."""
        for name, parameter in self.named_parameters():
            if is_deferred(parameter) and parameter._version != self._versions.get(name):
                raise ValueError(
                    f"parameter {name} was written to after its layer was made, and has no memory to keep that yet, as "
                    "no rank holds a whole PipelineModule; do so in the layer's constructor, in model.apply(...), or "
                    "inside `with zeromesh.zero.Init():`"
                )

    def forward(self, inputs: Any) -> Any:
        """Return the output of the last layer."""
        self._forwards += 1
        interval, run = self.activation_checkpoint_interval, partial(self._run_seeded, self._forwards)
        if not interval:
            return run(0, len(self.layers), inputs)
        for first, stop in self.groups(interval):
            if not self._is_checkpointable(first, stop):
                inputs = run(first, stop, inputs)
                continue
            # Where the stage begins in this group, what came from the stage before must be kept, not the zeros of the
            # way here.
            arrive = getattr(self._modules[self.layers[first]], "arrive_at_gate", None)
            inputs = inputs if arrive is None else arrive(inputs)
            # Checkpointing looks for tensors among the arguments, not inside of a tuple.
            many = isinstance(inputs, tuple)
            group = partial(_call, partial(run, first, stop), many)
            inputs = self.activation_checkpoint_func(group, *(inputs if many else (inputs,)))
        return inputs

    def _run_seeded(self, forward: int, first: int, stop: int, inputs: Any) -> Any:
        if not self.seed_layers:
            return self.run(first, stop, inputs)
        # Layers draw the same numbers on whatever rank they are, and when they are computed again.
        for number in range(first, stop):
            self._seed(self.base_seed * (forward + 1) + number)
            inputs = self.run(number, number + 1, inputs)
        return inputs

    def _is_checkpointable(self, first: int, stop: int) -> bool:
        if self.checkpointable_layers is not None:
            return all(kind in self.checkpointable_layers for kind in self.kinds[first:stop])
        return any(next(self.computes_with(n).parameters(), None) is not None for n in range(first, stop))

    def set_checkpoint_interval(self, interval: int) -> None:
        """Change ``activation_checkpoint_interval``."""
        if not isinstance(interval, int) or interval < 0:
            raise ValueError(
                f"activation_checkpoint_interval is {interval!r}; it is a number of layers, and 0 for no checkpointing"
            )
        self.activation_checkpoint_interval = interval

    def num_pipeline_stages(self) -> int | None:
        """Return ``num_stages``, or the topology's number."""
        return self.num_stages


def _call(function: Callable[[Any], Any], many: bool, *inputs: Any) -> Any:
    return function(inputs if many else inputs[0])


def _axis(topology: Any, axis: str) -> int:
    """Return the size of an axis of a topology; 1 where there is none."""
    if topology is None:
        return 1
    if not callable(getattr(topology, "get_dim", None)):
        raise ValueError(
            f"topology is {topology!r}; pass an object whose get_dim('pipe') is the number of stages, as DeepSpeed's "
            "topologies are, or num_stages in its place"
        )
    return int(topology.get_dim(axis) or 1)


def _stages(num_stages: int | None, topology: Any) -> int | None:
    axis_size = _axis(topology, "pipe")
    if num_stages is not None and (not isinstance(num_stages, int) or isinstance(num_stages, bool) or num_stages < 1):
        raise ValueError(
            f"num_stages is {num_stages!r}; it is a number of ranks, 1 or more, or None for the configuration's"
        )
    if topology is not None and num_stages not in (None, axis_size):
        raise ValueError(
            f"num_stages is {num_stages}, and the axis 'pipe' of topology has {axis_size}; leave num_stages out"
        )
    return num_stages if topology is None else axis_size


def _method(partition_method: str | Sequence[int]) -> str | list[int]:
    if not isinstance(partition_method, str):
        return list(partition_method)
    # A regular expression keeps its case.
    method = partition_method.lower() if partition_method.lower() in WAYS else partition_method
    if method not in WAYS and not method.lower().startswith("type:"):
        raise ValueError(
            f"partition_method is {partition_method!r}; use one of {', '.join(sorted(WAYS))}, type:REGEX, or a "
            "list of the number of the first layer of each stage"
        )
    return method


def settings_of(model: nn.Module, settings: Settings, mesh: Mesh | None) -> Settings:
    """Return the configuration, completed by a PipelineModule's arguments. Raise ValueError if they contradict it."""
    if not isinstance(model, PipelineModule):
        return settings
    model.require_recorded()
    sizes = settings.model_sizes if mesh is None else mesh.sizes
    is_said = mesh is not None or "pipeline" in settings.mesh.model_fields_set or settings.pipeline.stages is not None
    said, stages = sizes["pipeline"] if is_said else None, model.num_stages
    if stages is not None and said not in (None, stages):
        raise ValueError(
            f"the PipelineModule has {stages} stages (num_stages, or the axis 'pipe' of its topology), and the "
            f"{'configuration' if mesh is None else 'mesh'} {said} (mesh.pipeline); leave one of them out"
        )
    if model.tensor_ranks not in (1, sizes["tensor"]):
        raise ValueError(
            f"the axis 'model' of the PipelineModule's topology has {model.tensor_ranks} ranks, and mesh.tensor "
            f"{sizes['tensor']}: set mesh.tensor to {model.tensor_ranks}, and build the layers whole"
        )
    if interval := settings.pipeline.activation_checkpoint_interval:
        model.set_checkpoint_interval(interval)
    update: dict[str, Any] = {}
    if stages is not None and said is None:
        update["mesh"] = settings.mesh.model_copy(update={"pipeline": stages})
    if "partition" not in settings.pipeline.model_fields_set:
        update["pipeline"] = settings.pipeline.model_copy(update={"partition": model.partition_method})
    return settings.model_copy(update=update)
