"""State dicts and files of the model under the names of DeepSpeed's engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from zeromesh.checkpoint.contents import plain_names
from zeromesh.checkpoint.whole import keys_of
from zeromesh.comm.agreement import agree_run, texts
from zeromesh.deepspeed.fp32_weights import leave_script
from zeromesh.engine.saving import Saves
from zeromesh.engine.state import EngineState
from zeromesh.zero import GatheredParameters

_log = logging.getLogger(__name__)

PREFIX = "module."  # of names of parameters in the engine, which is a module around the user's


class Weights(Saves):
    """Checkpoints and state dicts of an engine that is a module around the user's.

    Args:
        state: of the engine.
        same_tags: raise an error where ranks pass different tags.
    """

    def __init__(self, state: EngineState, same_tags: bool) -> None:
        super().__init__(state)
        self._same_tags = same_tags

    # With the signature, by which libraries find out what it can leave out.
    @wraps(Saves.save_checkpoint)
    def save_checkpoint(  # type: ignore[override]
        self, save_dir: str | Path, tag: Any = None, *args: Any, **kwargs: Any
    ) -> bool:
        """Write a checkpoint as ``zeromesh.Engine`` does, and return True. Collective.

        With ZeRO the folder of checkpoints gets the program ``zero_to_fp32.py``, too, as from DeepSpeed.

        Raises:
            AssertionError: ranks pass different tags, and ``checkpoint.tag_validation`` is ``Fail``.
        """
        tags = texts(self._state.mesh.group("world"), "" if tag is None else str(tag))
        if len(set(tags)) > 1:
            problem = f"save_checkpoint() with the tags {', '.join(sorted(set(tags)))}; pass one on all ranks"
            if self._same_tags:
                raise AssertionError(problem)
            # Whatever is configured: a checkpoint is one folder, which all ranks write to.
            _log.warning("%s; the first rank's is taken", problem)
        folder = super().save_checkpoint(save_dir, tags[0] or None, *args, **kwargs).parent
        if self._state.mesh.rank == 0 and self._state.config.zero_optimization.stage > 0:
            leave_script(folder)
        return True

    @wraps(Saves.load_checkpoint)
    def load_checkpoint(self, *args: Any, **kwargs: Any) -> tuple[str | None, dict[str, Any] | None]:  # type: ignore[override]
        """Load a checkpoint as ``zeromesh.Engine`` does; (None, None) if there is none. Collective.

        Raises:
            AssertionError: there is no checkpoint of this tag, or a file of it is missing.
            RuntimeError: it does not fit, or is not what was written.
        """
        try:
            path, client_state = super().load_checkpoint(*args, **kwargs)
        # The types that programs for DeepSpeed expect.
        except FileNotFoundError as error:
            raise AssertionError(str(error)) from error
        except ValueError as error:
            raise RuntimeError(str(error)) from error
        return path, None if path is None else client_state

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the engine's state dict, whose names begin with ``module.``; whole parameters. Collective."""
        return super().state_dict(*args, **{**kwargs, "prefix": kwargs.get("prefix", "") + PREFIX})

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state dict, with names of the engine or of the module. Collective."""
        if assign:
            raise ValueError("assign=True would replace parameters that are placed; leave it out, values are copied")
        if state_dict and all(name.startswith(PREFIX) for name in state_dict):
            state_dict = {name.removeprefix(PREFIX): value for name, value in state_dict.items()}
        return super().load_state_dict(state_dict, strict)

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the module's state dict with whole parameters, on every rank. Collective."""
        state = super().state_dict(prefix=prefix, keep_vars=keep_vars)
        state = {name: value for name, value in state.items() if name not in self._frozen(exclude_frozen_parameters)}
        if destination is None:
            return state
        destination.update(state)
        return destination  # type: ignore[no-any-return]

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
        fetch_z3_params: bool = False,
        z3_params_to_fetch: Any = None,
        allowed_missing_keys: Any = None,
    ) -> None:
        """Load ``checkpoint["module"]`` into the module. Collective, with the same values on all ranks.

        Args:
            checkpoint: has the module's state dict under ``module``.
            strict: the names must be the module's.
            custom_load_fn: loads ``src``, the state, into ``dst``, the module.
            fetch_z3_params: no effect: parameters are gathered where they have to be.
            z3_params_to_fetch: no effect, for the same reason.
            allowed_missing_keys: names that may be missing all the same.
        """
        state = checkpoint["module"]
        if custom_load_fn is not None:
            module, first = self._state.module, self._state.mesh.stage_ranks[0]
            with GatheredParameters(module.parameters(), modifier_rank=first), torch.no_grad():
                custom_load_fn(src=state, dst=module)
            return
        missing = set(allowed_missing_keys or ())
        result = super().load_state_dict(state, strict=strict and not missing)
        lacking = sorted(set(result.missing_keys) - missing)
        if strict and (lacking or result.unexpected_keys):
            raise RuntimeError(f"the state lacks {lacking}, and has {result.unexpected_keys} that the module does not")

    def _frozen(self, excluded: bool) -> set[str]:
        """Return the names of parameters that are not trained, if they are ``excluded``."""
        module = self._state.module
        keys = keys_of(module)[0] if excluded else {}
        return {key for p in module.parameters() if not p.requires_grad for key in keys.get(id(p), [])}

    def consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the module's whole state on the CPU of the first rank, in the dtype of the run; empty elsewhere."""
        # Not None, as in DeepSpeed: transformers' save_pretrained, which all ranks call with it, would then read the
        # module's own weights, which are in parts.
        frozen, state = self._frozen(exclude_frozen_parameters), self.gathered_state_dict()
        return {name: value for name, value in state.items() if name not in frozen}

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
        *,
        merge_adapters: bool = False,
    ) -> bool:
        """Write the model, in the dtype it computes in; a name that ends in ``.bin`` gives one file of torch.save.

        Other names are written as ``zeromesh.Engine`` does, in parts, with the configuration beside them. Collective.
        """
        if not save_filename.endswith((".bin", ".pt", ".pth")):
            more = {"merge_adapters": merge_adapters}
            return super().save_16bit_model(save_dir, save_filename, exclude_frozen_parameters, **more)
        if merge_adapters:
            raise ValueError("merge_adapters is for safetensors; give a save_filename that ends in .safetensors")
        plain, state = plain_names(self._state.module), self.consolidated_16bit_state_dict(exclude_frozen_parameters)
        state = {plain(name): value for name, value in state.items()}

        def write() -> None:
            if self._state.mesh.rank == 0:
                Path(save_dir).mkdir(parents=True, exist_ok=True)
                torch.save(state, Path(save_dir) / save_filename)

        agree_run(self._state.mesh.group("world"), "write the model", write)
        return True

    def save_fp16_model(self, save_dir: str | Path, save_filename: str = "pytorch_model.bin") -> bool:
        """Write the model; the older name of ``save_16bit_model``."""
        return self.save_16bit_model(save_dir, save_filename)
