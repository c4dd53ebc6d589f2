"""Saving and loading of an engine: checkpoints, state dicts, and models for other programs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint import load, save, whole
from zeromesh.checkpoint.contents import model_names
from zeromesh.checkpoint.copies.memory_files import discard
from zeromesh.checkpoint.weights import export
from zeromesh.comm.agreement import agree_run
from zeromesh.engine.replicas import require_equal_replicas
from zeromesh.engine.state import EngineState
from zeromesh.shard.optim.bound import answer

_log = logging.getLogger("zeromesh")


class Saves:
    """Checkpoints and state dicts of an engine, whose methods the engine has, too."""

    def __init__(self, state: EngineState) -> None:
        self._state = state

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Path:
        """Write all that a resumed run needs to ``save_dir/tag``; each rank writes its shards. Collective.

        The checkpoint appears whole or not at all; an earlier one of this tag stays until then. Older ones go away
        afterwards with ``checkpoint.keep_last``. With ``checkpoint.asynchronous`` it is written while training goes on,
        after the earlier one is complete; see ``wait_for_checkpoint`` and docs/checkpoints.md.

        Args:
            save_dir: a folder of checkpoints that all ranks see.
            tag: its name; None is ``global_step`` and the number of updates.
            client_state: what else to keep: numbers, strings, bytes, dates, paths, tensors, arrays, and lists, tuples,
                sets, namespaces and dicts of them. The first rank's is kept.
            save_latest: whether ``load_checkpoint`` without a tag is to find this one.
            exclude_frozen_parameters: leave out parameters that are not trained; a model that loads it keeps its own.

        Returns:
            Its folder.

        Raises:
            OSError: it could not be written, or there is too little space, or too little memory for the copy of an
                asynchronous save. If that fails afterwards, it is logged, and raised by ``wait_for_checkpoint``, by
                ``destroy`` and, if ``checkpoint.on_failure`` is "stop", by the next step or save.
            TypeError: a value of the client state cannot be kept; the message says which.
            ValueError: there is no folder, the tag is one of the names that the folder itself needs, or an argument
                cannot be honoured.
            ReplicaMismatch: ranks have different values of what updates keep equal; see ``replica_check``.
        """
        if save_dir is None or str(save_dir) == "":
            raise ValueError(f"save_dir is {save_dir!r}; pass the folder that checkpoints are to be in")
        self._warn_of_gradients("save_checkpoint")
        run = self._state
        with run.observer.phase("checkpoint"):
            run.background.finish(raises=run.config.checkpoint.on_failure == "stop")
            self._take_up_changes()
            if run.config.replica_check.at_saves:
                require_equal_replicas(run.sharded, f"after update {run.global_steps}")
            saved = save.save(
                run,
                Path(save_dir),
                tag,
                client_state or {},
                save_latest=save_latest,
                exclude_frozen=exclude_frozen_parameters,
                background=run.background if run.config.checkpoint.asynchronous else None,
            )
            if run.mesh.rank == 0 and (run.copies is None or not run.copies.holds(Path(save_dir))):
                discard(Path(save_dir))  # copies of an earlier run, which this one did not go on from
            return saved

    def save_to_memory(self, save_dir: str | Path, client_state: dict[str, Any] | None = None) -> None:
        """Keep all that a resumed run needs in host memory, from where ``load_checkpoint(save_dir)`` takes it.

        With ``checkpoint.peer_copies``. It outlives this process, and, sent to the next nodes while training goes on,
        this node. The copy before stays until this one is complete on all nodes. ``destroy`` deletes the copies, unless
        an exception is being handled. Collective. See docs/checkpoints.md.

        Args:
            save_dir: the folder that checkpoints are saved to, and loaded from.
            client_state: as in ``save_checkpoint``.

        Raises:
            OSError: there is too little memory.
            TypeError: a value of the client state cannot be kept.
            ValueError: ``checkpoint.peer_copies`` is 0.
            RuntimeError: the copy before could not be sent to another node.
        """
        if self._state.copies is None:
            raise ValueError("save_to_memory() needs checkpoint.peer_copies in the configuration; set it to 1")
        self._warn_of_gradients("save_to_memory")
        with self._state.observer.phase("checkpoint"):
            self._take_up_changes()
            self._state.copies.save(self._state, Path(save_dir), client_state or {})

    def _warn_of_gradients(self, call: str) -> None:
        """Warn if gradients wait for their update: a checkpoint is of the last one, with its place in the data."""
        if self._state.accumulation.begun and self._state.mesh.rank == 0:
            _log.warning(
                "%s() between a backward and its update saves the state of update %d; a resumed run repeats the "
                "micro-batches since then",
                call,
                self._state.global_steps,
            )

    def _take_up_changes(self) -> None:
        # The user may have written to parameters since the last update; masters, which are saved, take that up first.
        self._state.sharded.tables.lookups.finish()
        agree_run(self._state.mesh.group("world"), "save the checkpoint", self._state.sharded.take_changes)

    def wait_for_checkpoint(self) -> Path | None:
        """Wait until the last asynchronous save is complete on the disk, and return its folder. Collective.

        Returns:
            None if there was no asynchronous save.

        Raises:
            OSError: it could not be written; RuntimeError on ranks that did write their part.
        """
        return self._state.background.wait()

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        *,
        load_data_position: bool = True,
    ) -> tuple[str | None, dict[str, Any]]:
        """Continue from a checkpoint of any number of ranks and any ZeRO stage. Collective. See docs/checkpoints.md.

        Args:
            load_dir: where it was saved.
            tag: which one; None is the latest, also of ``save_to_memory``.
            load_module_strict: False leaves parameters that the checkpoint lacks as they are.
            load_optimizer_states: False keeps the optimizer's present state.
            load_lr_scheduler_states: False keeps the scheduler's present state.
            load_module_only: take parameters and buffers alone: no counters, loss scale, random state or position in
                the data, nor states of the optimizer or scheduler.
            custom_load_fn: is called with ``src``, the checkpoint's parameters and buffers by name, whole, and ``dst``,
                the model; it changes the model, and the first rank's values count. None: each rank reads its parts.
            load_data_position: whether the next iterator of ``training_dataloader`` goes on where the checkpoint was
                written; False leaves the loader where it is.

        Returns:
            Its path and the client state; (None, {}) if there is no checkpoint.

        Raises:
            FileNotFoundError: a file of it is missing.
            ValueError: it does not fit, or is not what was written. Nothing has been loaded then.
        """
        run, copies = self._state, self._state.copies
        run.background.finish(raises=run.config.checkpoint.on_failure == "stop")
        # Changes are taken up and then overwritten; later they would overwrite what was loaded.
        run.sharded.tables.lookups.finish()
        run.sharded.take_changes()
        run.sharded.rest()
        states = load_optimizer_states and not load_module_only, load_lr_scheduler_states and not load_module_only
        position = load_data_position and not load_module_only
        parts = load.Taken(*states, position, not load_module_only, load_module_strict, custom_load_fn)
        place: tuple[Path, str | None] = (Path(load_dir), tag)
        # A model alone may be taken from the folder of another run, whose copies are not this run's.
        from_disk = tag is not None or load_module_only or custom_load_fn is not None
        if copies is not None and not from_disk and (memory_copy := copies.find(place[0], run)) is not None:
            place = memory_copy.parent, memory_copy.name
            parts = replace(parts, verify=False)
        loaded = load.load(run, *place, parts)
        if copies is not None and from_disk:
            copies.forget()  # of a state that is not this one any more
        run.forget_batches()
        answer(run.optimizer, run.update.loss_scale, overflow=False)
        if loaded[0] is not None:
            run.observer.rewind(run.global_samples)
        return loaded

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the model's state dict with whole parameters. Collective.

        Parameters that are sharded, split or of other stages of a pipeline are in it as whole copies: every rank has
        all of the model then. ``gathered_state_dict`` gives it to the first rank alone.
        """
        run, sharded = self._state, self._state.sharded
        if not (sharded.sharded or sharded.is_split or run.pipelined or len(sharded.tables)):
            state: dict[str, Any] = run.module.state_dict(*args, **kwargs)
            return state
        # With the parameters themselves, so that those that are sharded can be found by identity.
        state = run.module.state_dict(*args, **{**kwargs, "keep_vars": True})
        copies = whole.parameter_copies(sharded)
        state = {key: copies.get(id(value), value) for key, value in state.items()}
        return whole.add_stages(sharded, state, kwargs.get("prefix", ""))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load a state dict into the model and the masters. Collective, with the same values on all ranks.

        The state of a model in pipeline stages holds all stages, as ``state_dict`` returns it.
        """
        sharded = self._state.sharded
        keys = whole.keys_of(self._state.module)[0]
        model_name = model_names(self._state.module, self._state.module.state_dict(keep_vars=True))
        state_dict = {model_name(name): value for name, value in state_dict.items()}
        with sharded.gathered(sharded.parts):
            result = whole.load_here(sharded, state_dict, strict)
            for flat in sharded.flats:
                for index, segment in enumerate(flat.layout.segments):
                    # From one rank: replicas have to be equal to the bit even if the given states differ.
                    sharded.take_value(flat, index, rank=0)
                    value = state_dict.get(keys.get(id(flat.parameters[index]), [segment.name])[0])
                    now = flat.parameters[index].detach()
                    if value is not None and flat.master.dtype != now.dtype and torch.equal(value.to(now), now):
                        part = segment.held.cut(value.to(self._state.device))
                        flat.put(segment, part.reshape(-1))  # not rounded to 16 bits
        self._state.sharded.publish()
        return result

    def gathered_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the model's whole state as CPU tensors on rank 0, an empty dict elsewhere. Collective."""
        return whole.gathered_state_dict(self._state.sharded)

    def full_weights(
        self, dtype: torch.dtype | None = None, *, only_first_rank: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator of the model's whole weights, for an inference engine. Collective.

        All ranks iterate to the end. Each unit is gathered once, and its memory is freed when nobody holds its tensors.
        Updates do not reach these tensors; do not write to them, which may change the model. Names are those of
        published checkpoints of transformers: a tied weight comes once, and adapters are merged.
        See docs/finetuning.md.

        Args:
            dtype: of the parameters; None is the dtype that the model computes in. Buffers keep theirs.
            only_first_rank: other ranks take part, and their iterators are empty.

        Raises:
            ValueError: the model has prompts of PEFT, which are no part of a layer.
        """
        return export.full_weights(self._state.sharded, dtype, only_first_rank)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
        *,
        merge_adapters: bool = False,
    ) -> bool:
        """Write the model, in the dtype it computes in, as a folder that ``from_pretrained`` opens. Collective.

        A model of transformers gets its configuration beside the weights; of one with PEFT's adapters, these are
        written alone, as PEFT reads them. The first rank holds one unit and one file's tensors, at most 4 GB, at once.

        Args:
            save_dir: the folder.
            save_filename: of the weights; where one file would be too large, they are numbered and there is an index.
            exclude_frozen_parameters: leave out parameters with ``requires_grad`` False; buffers are written.
            merge_adapters: write the whole model with the adapters added to it.

        Raises:
            OSError: the first rank could not write; RuntimeError on the others.
            ValueError: there are no adapters to merge, or frozen parameters would be left out of what is merged.
        """
        taken = () if self._state.pipelined is None else self._state.pipelined.taken
        chosen = {"merge_adapters": merge_adapters, "exclude_frozen": exclude_frozen_parameters}
        export.save_model(self._state.sharded, Path(save_dir), save_filename, taken, **chosen)
        return True
