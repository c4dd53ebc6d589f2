"""Checkpoints that DeepSpeed writes: flat groups of fp32 values, cut into one range per rank; at stage 0 none are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.formats.form import Contents, StoredRange, group_options
from zeromesh.checkpoint.formats.lightning_checkpoints import IsTrained, add_numbered, shared_names
from zeromesh.checkpoint.formats.pickles import Inert, read_tensors

MODEL, OPTIMIZER = "model_states.pt", "optim_states.pt"

_OTHER_AXES = re.compile(r"mp_rank_(?!00)\d+|^layer_|expp?_rank|_expert_")

# Keys of DeepSpeed's own in the file of model states; all others are the user's client state.
_OWN = frozenset({
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "sparse_tensor_module_names",
    "skipped_steps", "global_steps", "global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version",
    "universal_checkpoint_info", "num_experts", "autoep_layers", "checkpoint_parallel_dimensions",
})  # fmt: skip


def read(folder: Path, is_trained: IsTrained = bool) -> Contents:
    """Return the contents of a checkpoint of any stage."""
    if strange := next((path.name for path in sorted(folder.glob("*.pt")) if _OTHER_AXES.search(path.name)), None):
        raise ValueError(
            f"{folder} has {strange}, of tensor, pipeline or expert parallelism: run DeepSpeed's ds_to_universal.py on "
            "it first, and convert what that writes"
        )
    if not any(folder.glob(f"*{OPTIMIZER}")):
        return _read_stage_0(by_rank(folder, MODEL)[0], is_trained)
    states = [read_tensors(path) for path in by_rank(folder, OPTIMIZER)]
    optimizer = [state["optimizer_state_dict"] for state in states]
    stage = int(optimizer[0].get("zero_stage", 0))
    models = [read_tensors(path) for path in by_rank(folder, MODEL)]
    _require_all(folder, optimizer, models)
    contents = Contents(f"a DeepSpeed ZeRO-{stage} checkpoint")
    read_model_states(contents, models[0], states[0].get("ds_config", {}))
    contents.loss_scale = loss_scale(optimizer[0].get("loss_scaler"))
    base = optimizer[0]["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    contents.groups = [group_options(group) for group in base["param_groups"]]
    if stage == 3:
        _read_stage_3(contents, models, optimizer)
    else:
        if "param_slice_mappings" not in optimizer[0] and (
            states[0].get("ds_config", {}).get("zero_optimization", {}).get("round_robin_gradients")
        ):
            raise ValueError(
                f"{folder} was written with round_robin_gradients and has no param_slice_mappings, so that nothing "
                "says where parameters lie; load it with a DeepSpeed that writes them, save it again, and convert that"
            )
        _read_stage_1(contents, models[0], optimizer)
    add_frozen(contents, models)
    return contents


def by_rank(folder: Path, ending: str) -> list[Path]:
    """Return the files of all ranks in their order."""
    paths = list(folder.glob(f"*{ending}"))
    if not paths:
        raise ValueError(f"{folder} has no file that ends in {ending}; copy the checkpoint again")
    return sorted(paths, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def _require_all(folder: Path, optimizer: list[Any], models: list[Any]) -> None:
    counts = optimizer[0]["partition_count"]
    wanted = max(counts) if isinstance(counts, list) else counts
    if len(optimizer) != wanted:
        raise ValueError(f"{folder} has {OPTIMIZER} of {len(optimizer)} of {wanted} ranks; copy the others, too")
    states = [state.get("base_optimizer_state") or state["optimizer_state_dict"] for state in optimizer]
    steps = [float(state["state"][0]["step"]) for state in states if "step" in state["state"].get(0, ())]
    for what, numbers in (("updates", [model["global_steps"] for model in models]), ("steps of the optimizer", steps)):
        if len(set(numbers)) > 1:
            raise ValueError(
                f"{folder} mixes files of several checkpoints: the {what} by rank are {', '.join(map(str, numbers))}; "
                "copy all files of one of them"
            )


def _read_stage_0(path: Path, is_trained: IsTrained) -> Contents:
    """Return the contents of the file of stage 0, whose optimizer is torch's own or one around it for 16 bits."""
    model, contents = read_tensors(path), Contents("a DeepSpeed checkpoint without ZeRO")
    model["module"] = contents.take_extra(model["module"])
    optimizer = model["optimizer"]
    if optimizer is None or "fp32_groups_flat" in optimizer:
        raise ValueError(
            f"{path} has {'no states of an optimizer' if optimizer is None else 'fp32_groups_flat, without names'}, "
            f"and no file beside it ends in {OPTIMIZER}; copy those, or load it in DeepSpeed and save it with ZeRO"
        )
    module, buffers = model["module"], model.get("buffer_names") or ()
    contents.take(tied=shared_names(module), loss_scale=loss_scale(optimizer))
    state = {name: value for name, value in module.items() if name not in {*buffers, *contents.tied}}
    masters = [value for group in optimizer.get("fp32_groups", ()) for value in group]
    values = add_numbered(contents, state, optimizer.get("optimizer_state_dict", optimizer), is_trained, masters)
    for name in contents.members:
        contents.add(f"parameter/{name}", values.get(name, state[name]))
    read_model_states(contents, model, model.get("ds_config") or {})
    add_frozen(contents, [model])
    return contents


def read_model_states(contents: Contents, model: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Take what all kinds of DeepSpeed's checkpoints keep beside the tensors that are sharded."""
    module: Mapping[str, torch.Tensor] = contents.take_extra(model["module"])
    # Stage 0 writes neither; there they are known already.
    tied = {name: owner for name, owner in (model.get("shared_params") or contents.tied).items() if name != owner}
    shapes = [contents.members] if model["param_shapes"] is None else model["param_shapes"]
    buffers = set(model.get("buffer_names") or ())
    for name in sorted(buffers & module.keys()):
        contents.add(f"buffer/{name}", module[name])
    trained = {name for names in shapes for name in names}
    frozen = set(module) - trained - buffers - tied.keys()
    contents.take(
        tied=tied,
        frozen=frozen,
        dtypes={name: value.dtype for name, value in module.items() if name in trained | frozen},
        progress={key: int(model.get(key) or 0) for key in ("global_steps", "global_samples", "skipped_steps")},
        client={key: value for key, value in model.items() if key not in _OWN},
    )
    if model.get("lr_scheduler"):
        contents.take(scheduler=(model["lr_scheduler"], (config.get("scheduler") or {}).get("type")))


def loss_scale(scaler: Any) -> dict[str, Any] | None:
    """Return the state of a dynamic loss scale; None for any other."""
    fields = scaler.fields if isinstance(scaler, Inert) else scaler
    if not isinstance(fields, dict) or not (fields.get("dynamic") or fields.get("dynamic_loss_scale")):
        return None
    good = fields["cur_iter"] - fields["last_overflow_iter"] - 1
    state = {"scale": fields["cur_scale"], "hysteresis": fields.get("cur_hysteresis", 1), "good_steps": max(0, good)}
    return state | {"window": fields["scale_window"], "minimum": fields.get("min_scale", 1)}


def _read_stage_1(contents: Contents, model: Mapping[str, Any], optimizer: list[Any]) -> None:
    """Take the groups of stages 1 and 2, each one buffer of whole parameters that is cut without regard to them."""
    for number, shapes in enumerate(model["param_shapes"]):
        done: dict[str, int] = dict.fromkeys(shapes, 0)
        for rank, state in enumerate(optimizer):
            # A fragment lies at its start within the rank's range, and in the parameter behind the ranks before.
            for name, start, count in _fragments(optimizer, rank, number, shapes):
                values = {
                    "parameter": state["single_partition_of_fp32_groups"][number],
                    **state["base_optimizer_state"]["state"][number],
                }
                _add_range(contents, name, shapes[name], done[name], count, values, start)
                done[name] += count
        contents.members.update(dict.fromkeys(shapes, number))


def _fragments(
    optimizer: list[Any], rank: int, number: int, shapes: Mapping[str, torch.Size]
) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the start and the number of elements of each piece of a parameter in a rank's range."""
    if "param_slice_mappings" in optimizer[rank]:
        for name, address in optimizer[rank]["param_slice_mappings"][number].items():
            yield name, address.fields["start"], address.fields["numel"]
        return
    # Older versions leave it to the reader: parameters in their order, in ranges as long as that of the first rank,
    # which alone is never padded unless it holds all.
    size, at = optimizer[0]["single_partition_of_fp32_groups"][number].numel(), 0
    for name, shape in shapes.items():
        low, high = max(at, rank * size), min(at + prod(shape), (rank + 1) * size)
        if low < high:
            yield name, low - rank * size, high - low
        at += prod(shape)


def _read_stage_3(contents: Contents, models: list[Any], optimizer: list[Any]) -> None:
    """Take the groups of stage 3, in which each parameter is cut into equal ranges, the last one padded."""
    ranks = len(optimizer)
    owners = {
        sub: number
        for number, group in enumerate(optimizer[0]["optimizer_state_dict"]["param_groups"])
        for sub in group["params"]
    }
    for rank, state in enumerate(optimizer):
        for number, shapes in enumerate(models[0]["param_shapes"]):
            at = 0
            for name, shape in shapes.items():
                start, count, padded = rank_range(shape, rank, ranks)
                values = {
                    "parameter": state["fp32_flat_groups"][number],
                    **state["optimizer_state_dict"]["state"][number],
                }
                _add_range(contents, name, shape, start, count, values, at)
                at += padded
                contents.members[name] = owners[number]


def add_frozen(contents: Contents, models: list[Any]) -> None:
    """Take the parameters that are not trained: whole ones of stages 1 and 2, and ranges of all ranks of stage 3."""
    for name in sorted(contents.frozen):
        fragments = [(model.get("frozen_param_fragments") or {}).get(name) for model in models]
        if models[0]["module"][name].numel() or fragments[0] is None:
            contents.add(f"parameter/{name}", models[0]["module"][name])
            continue
        shape = models[0]["frozen_param_shapes"][name]
        for rank, fragment in enumerate(fragments):
            start, count, _ = rank_range(shape, rank, len(models))
            _add_range(contents, name, shape, start, count, {"parameter": fragment}, 0)


def rank_range(shape: torch.Size, rank: int, ranks: int) -> tuple[int, int, int]:
    """Return the start and the number of a rank's elements of a parameter, and their number with padding."""
    size = prod(shape)
    padded = -(-size // ranks)
    start = min(rank * padded, size)
    return start, min(padded, size - start), padded


def _add_range(
    contents: Contents, name: str, shape: torch.Size, first: int, count: int, values: Mapping[str, Any], at: int
) -> None:
    """Add elements ``[first, first + count)`` of a parameter and its states, which lie at ``at`` in the values."""
    for key, value in values.items():
        if not isinstance(value, torch.Tensor) or value.ndim == 0:
            contents.add_state(name, key, value)
        elif count:
            full = f"parameter/{name}" if key == "parameter" else f"optimizer/{key}/{name}"
            if value.numel() < at + count:
                raise ValueError(f"{full} ends behind its group's {value.numel()} elements; copy the checkpoint again")
            data = value.narrow(0, at, count)
            contents.parts.append(StoredRange(full, tuple(shape), value.dtype, first, first + count, data.detach))
