"""Loading a checkpoint: everything is checked before the first value is taken."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from zeromesh.base.words import counted, nearest, some
from zeromesh.checkpoint.boxes import Reader
from zeromesh.checkpoint.checkpoint_folder import is_readable, latest, locate
from zeromesh.checkpoint.contents import (
    FROZEN_LEFT_OUT,
    RunState,
    buffers,
    extra_modules,
    held,
    model_fields,
    model_names,
    own_buffers,
    own_names,
    quantized_by,
    scheduler_name,
    tied,
)
from zeromesh.checkpoint.formats.detect_format import foreign
from zeromesh.checkpoint.manifest import ANOTHER, BY_PARAMETER, OF_STAGES, as_written, require_run
from zeromesh.checkpoint.optimizer_states import (
    load_optimizer,
    load_options,
    load_rows,
    read_held,
    require_held,
    require_same_optimizer,
    require_states,
    set_learning_rates,
)
from zeromesh.checkpoint.packing import is_like, unpack
from zeromesh.checkpoint.random_state import (
    derive_random_state,
    require_random_state,
    restore_random_state,
    share_random_state,
)
from zeromesh.checkpoint.whole import of_all_stages
from zeromesh.comm.agreement import agree_run, require_agreement, texts
from zeromesh.comm.collectives import Group
from zeromesh.comm.detect import may_restart
from zeromesh.config.batch_sizes import TRAIN
from zeromesh.shard.sharded import ShardedModel
from zeromesh.shard.store.window import StateWindow

_log = logging.getLogger(__name__)

Shapes = dict[str, tuple[int, ...]]

MOST_RANDOM = 16 * 1024**2  # bytes of a rank's states of generators

MOST_SHOWN = 20  # most tensors of each kind that an error names


@dataclass(frozen=True)
class Taken:
    """Parts of a checkpoint that are taken."""

    optimizer: bool = True
    scheduler: bool = True
    data_position: bool = True
    progress: bool = True  # counters, loss scale, random numbers
    strict: bool = True  # all parameters of the model are there, and no others
    load_model: Callable[..., Any] | None = None  # changes the model in the place of plain reading
    verify: bool = True  # False for a copy in memory, which has no hashes, and of which files are on other nodes

    def __str__(self) -> str:
        taken = f"optimizer: {self.optimizer}\nlr_scheduler: {self.scheduler}\nstrict: {self.strict}\n"
        return f"{taken}data: {self.data_position}\nprogress: {self.progress}\ncustom: {self.load_model is not None}"


def load(engine: RunState, folder: Path, tag: str | None, parts: Taken) -> tuple[str | None, dict[str, Any]]:
    """Continue from a checkpoint. Collective; see ``Engine.load_checkpoint``."""
    mesh, world = engine.mesh, engine.mesh.group("world")
    optimizer_states, scheduler_states = parts.optimizer, parts.scheduler
    require_agreement(world, "what load_checkpoint is to take", str(parts))
    chosen = agree_run(world, "find the latest checkpoint", lambda: _find(folder, tag))
    _require_same_tag(world, folder, chosen)
    if chosen is None:
        return None, {}
    optimizer = engine.optimizer if optimizer_states else None
    loader = engine.training_dataloader if parts.data_position else None
    sharded = engine.sharded
    shapes = {f"parameter/{s.name}": s.held.whole for flat in sharded.flats for s in flat.layout.segments}
    shapes |= {f"buffer/{name}": tuple(buffer.shape) for name, buffer in own_buffers(sharded)}
    shapes |= {f"extra/{name}": () for name in extra_modules(sharded)}
    wanted = {name: tuple(shape) for name, shape in of_all_stages(mesh, shapes).items()}
    other_names = of_all_stages(mesh, tied(sharded))
    extra: dict[str, Any] = {}

    def prepare() -> Reader:
        path, named = locate(folder, chosen), folder / chosen
        if path != named:
            _log.warning("%s is missing because a process ended while replacing it; the previous one is loaded", named)
        reader = Reader(path)
        _rename(sharded, reader, {*map(_bare, wanted), *other_names})
        require_run(path, reader.manifest)
        if "imported" in reader.manifest:
            # Other libraries keep buffers among the parameters, and tied ones under each of their names.
            buffer_names = {_bare(name) for name in wanted if name.startswith("buffer/")}
            reader.rename(own_names(reader.names, buffer_names, other_names))
        if parts.load_model is None:
            _require_same_model(engine, reader, wanted, parts.strict)
        _require_same_scales(sharded, reader)
        # Only after a restart by the launcher, with as many ranks as there are then: who changes their number by hand
        # may mean to change the batch.
        saved, now = reader.manifest.get("train_batch_size"), engine.train_batch_size()
        if may_restart() and saved not in (None, now):
            raise ValueError(
                f"the checkpoint was trained with updates of {counted(saved, 'sample')}, and "
                f"{counted(mesh.world_size, 'rank')} now take {now}; set {TRAIN} to {saved}, so that the "
                "number of ranks does not change it"
            )
        _require_values(sharded, reader, parts.load_model is None)
        if optimizer is not None:
            require_same_optimizer(sharded, optimizer, reader)
            require_states(sharded, reader)
        if scheduler_states:
            _require_same_scheduler(engine, reader)
        if loader is not None:
            loader.require_same_data(reader.manifest.get("data"))
        extra.update(unpack(reader.manifest.get("extra", {}), reader.tensor))
        return reader

    reader = agree_run(world, "open the checkpoint", as_written(folder / chosen)(prepare))
    # Ranks on different machines may see different folders under one path.
    seen = f"written {reader.manifest.get('written')}, SHA-256 {reader.digest}"
    require_agreement(world, f"the manifest of {chosen} in {folder}", seen)
    # All of it before the first value: a damaged file must not leave half of another run behind.
    needed = {name for name in reader.names if optimizer_states or not name.startswith("optimizer/")}
    if parts.verify:
        agree_run(world, "read the checkpoint", lambda: reader.verify(mesh.rank, mesh.world_size, needed))
    # What users' and torch's objects take is tried, and what is returned is read, before the first value too.
    with _scheduler_as_before(engine):
        attempt = as_written(folder / chosen)(partial(_try_values, engine, reader, parts))
        client = agree_run(world, "read the checkpoint", attempt)
    plainly = parts.load_model is None
    agree_run(world, "load the checkpoint", lambda: _load_tensors(sharded, optimizer, reader, plainly))
    if parts.load_model is not None:
        _load_by(parts.load_model, sharded, reader, extra)
    else:
        agree_run(world, "load the extra state of modules", lambda: _load_extra(sharded, extra))
    sharded.updated()
    if parts.progress:
        _load_progress(engine, reader, scheduler_states)
    if engine.optimizer is not None and engine.lr_scheduler is not None and scheduler_states and not optimizer_states:
        set_learning_rates(engine.optimizer, engine.lr_scheduler)
    if loader is not None:
        position = loader.go_to(reader.manifest.get("data"))
        engine.resume_data()
        if mesh.rank == 0:
            _log.info("training_data continues in pass %d, after %d of its samples", *position)
    return str(reader.folder), client


@contextmanager
def _scheduler_as_before(engine: RunState) -> Iterator[None]:
    """Give the scheduler its state, and the groups their options, after an error in this context."""
    scheduler, groups = engine.lr_scheduler, engine.optimizer.param_groups if engine.optimizer else []
    fields, state = (dict(vars(scheduler)), deepcopy(scheduler.state_dict())) if scheduler is not None else ({}, {})
    options = [{key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in group.items()} for group in groups]
    try:
        yield
    except BaseException:
        if scheduler is not None:
            vars(scheduler).clear()
            vars(scheduler).update(fields)
            scheduler.load_state_dict(state)
        for group, before in zip(groups, options, strict=True):
            for key, value in before.items():
                group[key] = group[key].copy_(value) if isinstance(value, torch.Tensor) else value
        raise


def _try_values(engine: RunState, reader: Reader, parts: Taken) -> dict[str, Any]:
    """Load the scheduler's state, check that of the generators, and return the client state."""
    name = f"random/{engine.mesh.rank}"
    name = name if name in reader.names else "random/0"
    if parts.progress and name in reader.names:
        if reader.dtype(name) is not torch.uint8 or prod(reader.shape(name)) > MOST_RANDOM:
            raise ValueError(f"{reader.folder} has {name}, which is not a state of generators; {ANOTHER}")
        require_random_state(reader.tensor(name), engine.sharded.model)
    scheduler, packed = engine.lr_scheduler, reader.manifest["scheduler"]
    if scheduler is not None and packed and parts.progress and parts.scheduler:
        state, present = unpack(packed), scheduler.state_dict()
        for key, value in state.items():
            # Torch's schedulers take any names, those of their optimizer and their methods too.
            if not (is_like(present[key], value) if key in present else not hasattr(scheduler, key)):
                raise ValueError(
                    f"{reader.folder} has {key} = {str(value)[:80]!r} in the scheduler's state, which is not what "
                    f"{scheduler_name(scheduler)} has written; {ANOTHER}, or pass load_lr_scheduler_states=False"
                )
        scheduler.load_state_dict(state)
    client: dict[str, Any] = unpack(reader.manifest["client_state"], reader.tensor)
    return client


def _find(folder: Path, tag: str | None) -> str | None:
    """Return the tag to load; None if there is no checkpoint. Raise ValueError for one of another library."""
    chosen = latest(folder) if tag is None else str(tag)
    # Trainers of transformers write their own files beside ours.
    ours = chosen is not None and is_readable(locate(folder, chosen))
    if not ours and (remedy := foreign(folder, None if tag is None else str(tag))):
        raise ValueError(remedy)
    return chosen


def _require_same_tag(world: Group, folder: Path, tag: str | None) -> None:
    """Raise ValueError on every rank unless all of them are to load the same checkpoint."""
    ranks: dict[str, list[int]] = {}
    for rank, name in enumerate(texts(world, tag or "")):
        ranks.setdefault(name, []).append(rank)
    if len(ranks) == 1:
        return
    seen = [f"{some(map(str, numbers), 'ranks', most=MOST_SHOWN)}: {name or 'none'}" for name, numbers in ranks.items()]
    raise ValueError(
        f"the ranks would load different checkpoints from {folder}: by rank, {'; '.join(seen)}; all ranks need the "
        "same: use a folder that all of them see, or pass the same tag"
    )


def _require_same_model(engine: RunState, reader: Reader, wanted: Shapes, strict: bool) -> None:
    """Raise ValueError unless the tensors of the checkpoint are the model's, which are ``wanted``."""
    saved = {name: reader.shape(name) for name in reader.names if name.startswith(("parameter/", "buffer/"))}
    if "extra" in reader.manifest:
        saved |= {f"extra/{name}": () for name in reader.manifest["extra"]}
    elif lacks := [name for name in wanted if name.startswith("extra/")]:
        _log.warning("%s, of another version or library, lacks %s, which stay as they are", reader.folder, some(lacks))
        wanted = {name: shape for name, shape in wanted.items() if name not in lacks}
    # Of a tensor without elements there is nothing to write.
    saved, wanted = ({name: shape for name, shape in shapes.items() if 0 not in shape} for shapes in (saved, wanted))
    missing = {name: shape for name, shape in wanted.items() if name not in saved}
    if reader.manifest.get(FROZEN_LEFT_OUT):
        trained = reader.manifest["parameters"]
        missing = {name: s for name, s in missing.items() if trained.get(_bare(name), {}).get("trainable", True)}
    extra = {name: saved[name] for name in sorted(saved) if name not in wanted}
    other = [
        f"{_bare(name)}: saved {saved[name]}, wanted {shape}"
        for name, shape in wanted.items()
        if saved.get(name, shape) != shape
    ]
    # Shapes must be equal anyway: a part of a tensor is not a value for it.
    if not strict and not other and (saved.keys() & wanted.keys() or not wanted):
        if (missing or extra) and engine.mesh.rank == 0:
            unchanged = some(map(_bare, missing), "tensors", most=MOST_SHOWN) or "none"
            ignored = some(map(_bare, extra), "tensors", most=MOST_SHOWN) or "none"
            _log.warning("not in %s, and left as they are: %s; only in it: %s", reader.folder, unchanged, ignored)
        return
    lacking = _unmatched(missing, extra, "not in the checkpoint")
    unknown = _unmatched(extra, missing, "not in the model")
    if other or lacking or unknown:
        hint = "" if other or not strict else "\nload_module_strict=False loads those that are in both"
        hint = hint if strict or other else "\nno tensor is in both, so that nothing would be loaded"
        text = "\n".join(some(lines, "like these", "\n", MOST_SHOWN) for lines in (other, lacking, unknown) if lines)
        fields = reader.manifest.get("model", {})
        differ = [
            f"{key} (saved {fields[key]!r}, wanted {value!r})"
            for key, value in model_fields(engine).items()
            if key in fields and fields[key] != value
        ]
        # Differing shapes follow from a few fields, which are what the user has to change.
        text += f"\nof the model's configuration, these differ: {some(differ, 'fields')}" if differ else ""
        raise ValueError(f"{reader.folder} is of another model:\n{text}{hint}")


def _require_values(sharded: ShardedModel, reader: Reader, plainly: bool) -> None:
    """Open the manifests of what this rank loads of parameters and buffers; raise ValueError for missing elements."""
    if not plainly:  # every rank reads whole tensors
        reader.open_all()
    for flat in sharded.flats:
        place = flat.own if flat.layout.trainable else flat.shard_range if flat.sharded else slice(0, flat.layout.size)
        for index, start, stop in flat.layout.owned(place.start, place.stop):
            segment = flat.layout.segments[index]
            name = f"parameter/{segment.name}"
            if name in reader.names:
                require_held(reader, name, segment.held, start - segment.start, stop - segment.start)
    for name in (f"buffer/{name}" for name, _ in buffers(sharded)):
        if name in reader.names:
            reader.require(name, 0, prod(reader.shape(name)))


def _require_same_scales(sharded: ShardedModel, reader: Reader) -> None:
    """Raise ValueError for saved weights that were quantized with other scales than the model has."""
    saved = reader.manifest.get("parameters", {})
    other = [name for name, text in quantized_by(sharded).items() if saved.get(name, {}).get("quantized", text) != text]
    if other:
        raise ValueError(
            f"{reader.folder}: {some(other)} was quantized otherwise, or of another base model; quantize the same base "
            "in the same way"
        )


def _bare(name: str) -> str:
    return name.split("/", 1)[1]


def _unmatched(names: Shapes, others: Shapes, what: str) -> list[str]:
    """Return one line per tensor that has no counterpart, with the nearest name of one that could be it."""
    lines = [f"{_bare(name)}: {what}" for name in names]
    for number, (name, shape) in enumerate(list(names.items())[:MOST_SHOWN]):  # comparing words takes long
        kind = name.removesuffix(_bare(name))
        similar = nearest(_bare(name), [_bare(o) for o in others if o.startswith(kind) and others[o] == shape])
        lines[number] += f"; did you mean {similar!r}?" if similar else ""
    return lines


def _require_same_scheduler(engine: RunState, reader: Reader) -> None:
    """Raise ValueError unless the state in a checkpoint is one of such a scheduler; warn where only one has any."""
    scheduler, state = engine.lr_scheduler, reader.manifest["scheduler"]
    name = scheduler_name(scheduler)
    saved = reader.manifest.get("scheduler_type", "a scheduler" if state else None)
    if scheduler is None or not state:
        if (scheduler is None) == bool(state) and engine.mesh.rank == 0:
            begins = f"{name} begins at its beginning" if name else "its learning rates stay as they were last"
            _log.warning("%s has %s, but this run has %s: %s", reader.folder, saved or "no scheduler", name, begins)
        return
    # Checkpoints of former versions do not name it.
    lacking = sorted(key for key in scheduler.state_dict() if key not in state and not key.startswith("_"))
    is_named = "scheduler_type" in reader.manifest
    if str(saved).lower() != str(name).lower() if is_named else lacking:
        lacks = "" if is_named else f" whose state lacks {', '.join(lacking)}"
        raise ValueError(
            f"{reader.folder} is of {saved}{lacks}, but this run has {name}; make the same scheduler, or pass "
            "load_lr_scheduler_states=False to begin this one where it is"
        )


def _rename(sharded: ShardedModel, reader: Reader, names: set[str]) -> None:
    """Give what the reader shows the model's names: one of the two may have modules with wrappers around them."""
    model_name = model_names(sharded.model, names)
    places = {
        name: name.rpartition("/") for name in reader.names if name.startswith(("param", "buffer/", "optimizer/"))
    }
    reader.rename(
        {name: f"{kind}/{model_name(bare)}" for name, (kind, _, bare) in places.items() if model_name(bare) != bare},
        model_name,
    )
    for key in BY_PARAMETER + OF_STAGES:
        if key in reader.manifest:
            part = {model_name(name): value for name, value in reader.manifest[key].items()}
            reader.manifest[key] = {n: model_name(owner) for n, owner in part.items()} if key == "tied" else part


def _load_extra(sharded: ShardedModel, extra: dict[str, Any]) -> None:
    for name, module in extra_modules(sharded).items():
        if name in extra:
            module.set_extra_state(extra[name])


def _load_by(function: Callable[..., Any], sharded: ShardedModel, reader: Reader, extra: dict[str, Any]) -> None:
    """Let a function of the user's change the model by the whole tensors of a checkpoint. Collective."""
    kinds = ("parameter/", "buffer/")
    source = {_bare(name): reader.tensor(name) for name in reader.names if name.startswith(kinds)}
    source |= {
        name: source[owner] for name, owner in reader.manifest.get("tied", {}).items() if owner in source
    } | extra
    with sharded.gathered(sharded.parts):
        agree_run(sharded.mesh.group("world"), "load by the user's function", lambda: _call(function, source, sharded))
        for flat in sharded.flats:
            for index in range(len(flat.parameters)):
                # From one rank: replicas have to be equal to the bit.
                sharded.take_value(flat, index, rank=0)


def _call(function: Callable[..., Any], source: dict[str, Any], sharded: ShardedModel) -> None:
    with torch.no_grad():
        function(src=source, dst=sharded.model)


def _load_tensors(sharded: ShardedModel, optimizer: Optimizer | None, reader: Reader, plainly: bool = True) -> None:
    if optimizer is not None:
        load_options(optimizer, reader)
    for flat in sharded.flats:
        if not plainly and (optimizer is None or not flat.keeps_states):
            continue
        assert flat.store is not None
        for window in flat.store.windows(flat, write=True):
            if plainly:
                _load_parameters(window, reader)
            if optimizer is not None and flat.keeps_states:
                load_rows(sharded, window, reader)
    if optimizer is not None:
        load_optimizer(sharded, optimizer, reader)
    for name, buffer in buffers(sharded) if plainly else ():
        if f"buffer/{name}" in reader.names:
            buffer.copy_(reader.tensor(f"buffer/{name}"))


def _load_parameters(window: StateWindow, reader: Reader) -> None:
    flat, (values, low) = window.flat, held(window)
    for index, start, stop in flat.layout.owned(low, low + values.numel()):
        segment = flat.layout.segments[index]
        name, out = f"parameter/{segment.name}", values[start - low : stop - low]
        if name in reader.names:
            read_held(reader, name, segment.held, start - segment.start, stop - segment.start, out)


def _load_progress(engine: RunState, reader: Reader, scheduler_states: bool) -> None:
    """Load counters, the loss scale, the scheduler's state, and the state of the random numbers."""
    mesh, state = engine.mesh, reader.manifest
    if f"random/{mesh.rank}" in reader.names:
        restore_random_state(reader.tensor(f"random/{mesh.rank}"), engine.sharded.model)
    elif "random/0" in reader.names:  # there are more ranks now, and each needs numbers of its own
        derive_random_state(reader.tensor("random/0"), mesh.rank, engine.sharded.model)
    share_random_state(mesh.group("tensor"))
    if state.get("mesh", {}).get("pipeline", 1) != mesh.sizes["pipeline"]:
        share_random_state(mesh.group("pipeline"))  # or they would draw different samples
    samples = state.get("global_samples", state["global_steps"] * engine.train_batch_size())
    engine.resume(state["global_steps"], samples, state["micro_steps"], state["skipped_steps"])
    engine.spikes.load(state.get("spikes", {}))
    if engine.loss_scaler is not None and state["loss_scaler"]:
        engine.loss_scaler.load_state_dict(state["loss_scaler"])
    if engine.lr_scheduler is not None and scheduler_states and state["scheduler"]:
        engine.lr_scheduler.load_state_dict(unpack(state["scheduler"]))
