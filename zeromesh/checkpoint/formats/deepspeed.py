"""Checkpoints that DeepSpeed's ZeRO stages write: flat groups of fp32 values, cut into one range per rank."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.formats.form import Contents, StoredRange, group_options
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


def read(folder: Path) -> Contents:
    """Return the contents of a ZeRO-1, 2 or 3 checkpoint."""
    if strange := next((path.name for path in sorted(folder.glob("*.pt")) if _OTHER_AXES.search(path.name)), None):
        raise ValueError(
            f"{folder} has {strange}, of tensor, pipeline or expert parallelism: run DeepSpeed's ds_to_universal.py on "
            "it first, and convert what that writes"
        )
    states = [read_tensors(path) for path in by_rank(folder, OPTIMIZER)]
    optimizer = [state["optimizer_state_dict"] for state in states]
    stage = int(optimizer[0].get("zero_stage", 0))
    _require_all(folder, optimizer)
    models = [read_tensors(path) for path in by_rank(folder, MODEL)]
    contents = Contents(f"a DeepSpeed ZeRO-{stage} checkpoint")
    read_model_states(contents, models[0], states[0].get("ds_config", {}))
    contents.loss_scale = _loss_scale(optimizer[0].get("loss_scaler"))
    base = optimizer[0]["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    contents.groups = [group_options(group) for group in base["param_groups"]]
    if stage == 3:
        _read_stage_3(contents, models, optimizer)
    else:
        _read_stage_1(contents, models[0], optimizer)
    add_frozen(contents, models)
    return contents


def by_rank(folder: Path, ending: str) -> list[Path]:
    """Return the files of all ranks in their order."""
    paths = list(folder.glob(f"*{ending}"))
    if not paths:
        raise ValueError(f"{folder} has no file that ends in {ending}; copy the checkpoint again")
    return sorted(paths, key=lambda path: [int(number) for number in re.findall(r"\d+", path.name)])


def _require_all(folder: Path, optimizer: list[Any]) -> None:
    counts = optimizer[0]["partition_count"]
    wanted = max(counts) if isinstance(counts, list) else counts
    if len(optimizer) != wanted:
        raise ValueError(f"{folder} has {OPTIMIZER} of {len(optimizer)} of {wanted} ranks; copy the others, too")


def read_model_states(contents: Contents, model: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Take what all kinds of DeepSpeed's checkpoints keep beside the tensors that are sharded."""
    module: Mapping[str, torch.Tensor] = model["module"]
    tied = {name: own for name, own in (model.get("shared_params") or {}).items() if name != own}
    buffers = set(model.get("buffer_names") or ())
    for name in sorted(buffers & module.keys()):
        contents.add(f"buffer/{name}", module[name])
    trained = {name for shapes in model["param_shapes"] for name in shapes}
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


def _loss_scale(scaler: Any) -> dict[str, Any] | None:
    fields = scaler.fields if isinstance(scaler, Inert) else {}
    if not isinstance(fields, dict) or not fields.get("dynamic"):
        return None
    good = fields["cur_iter"] - fields["last_overflow_iter"] - 1
    return {"scale": fields["cur_scale"], "hysteresis": fields.get("cur_hysteresis", 1), "good_steps": max(0, good)}


def _read_stage_1(contents: Contents, model: Mapping[str, Any], optimizer: list[Any]) -> None:
    """Take the groups of stages 1 and 2, each one buffer of whole parameters that is cut without regard to them."""
    if any("param_slice_mappings" not in state for state in optimizer):
        raise ValueError(
            "the optimizer's files have no param_slice_mappings, so that nothing says where parameters lie; load "
            "the checkpoint with a DeepSpeed that writes them, save it again, and convert that"
        )
    for number, shapes in enumerate(model["param_shapes"]):
        done: dict[str, int] = dict.fromkeys(shapes, 0)
        for state in optimizer:
            # A fragment lies at its start within the rank's range, and in the parameter behind the ranks before.
            for name, address in state["param_slice_mappings"][number].items():
                fields = address.fields if isinstance(address, Inert) else {}
                start, count = fields["start"], fields["numel"]
                values = {
                    "parameter": state["single_partition_of_fp32_groups"][number],
                    **state["base_optimizer_state"]["state"][number],
                }
                _add_range(contents, name, shapes[name], done[name], count, values, start)
                done[name] += count
        contents.members.update(dict.fromkeys(shapes, number))


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
                start, count, padded = _range(shape, rank, ranks)
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
            start, count, _ = _range(shape, rank, len(models))
            _add_range(contents, name, shape, start, count, {"parameter": fragment}, 0)


def _range(shape: torch.Size, rank: int, ranks: int) -> tuple[int, int, int]:
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
