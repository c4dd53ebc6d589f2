"""Comparison of a checkpoint's schedule with a run's: the state of another one means nothing to it."""

from __future__ import annotations

import logging
from typing import Any

from zeromesh.checkpoint.boxes import Reader
from zeromesh.checkpoint.contents import RunState
from zeromesh.optim.schedules import RateSchedule

_log = logging.getLogger(__name__)


def scheduler_name(scheduler: Any) -> str | None:
    """Return the class of a scheduler, with those that it is made of; None if there is none."""
    if scheduler is None:
        return None
    name = scheduler.name if isinstance(scheduler, RateSchedule) else type(scheduler).__name__
    parts = getattr(scheduler, "_schedulers", None)  # of torch's SequentialLR and ChainedScheduler
    return f"{name}({', '.join(str(scheduler_name(part)) for part in parts)})" if parts else name


def require_same_scheduler(engine: RunState, reader: Reader) -> None:
    """Raise ValueError unless the state in a checkpoint is one of such a scheduler.

    Where only one of them has a scheduler, that is a warning.
    """
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
    known = "scheduler_type" in reader.manifest
    if str(saved).lower() != str(name).lower() if known else lacking:
        lacks = "" if known else f" whose state lacks {', '.join(lacking)}"
        raise ValueError(
            f"{reader.folder} is of {saved}{lacks}, but this run has {name}; make the same scheduler, or pass "
            "load_lr_scheduler_states=False to begin this one where it is"
        )
