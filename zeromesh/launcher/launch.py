"""Start the ranks of one machine from within Python: ``zeromesh.launch``."""

from __future__ import annotations

import logging
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zeromesh.comm import rank
from zeromesh.comm.detect import Environment, is_launched
from zeromesh.comm.failure import RankFailure
from zeromesh.comm.rank import CALL, PREPARING
from zeromesh.launcher.notebook import definitions_of, is_interactive

__all__ = ["RankFailure", "available_cores", "launch", "python_rank", "threads"]

_log = logging.getLogger("zeromesh")


def launch(function: Callable[..., Any], ranks: int | None = None, *args: Any) -> list[Any]:
    """Run ``function(*args)`` on ``ranks`` processes of this machine, and wait for them.

    Each is a new process with torchrun's variables, so that ``zeromesh.initialize`` finds its place; the rendezvous is
    on the loopback interface, and OMP_NUM_THREADS, unless it is set, shares out the machine's cores. What rank 0 prints
    appears as it is, what the others print as ``[RANK] line``.

    The function may be imported, defined at the top level of the script that runs (the call must then be under
    ``if __name__ == "__main__":``, since each rank imports the script), or defined in a cell of a notebook. In a
    notebook the ranks get the source of the function, and of the functions and classes of the notebook that it uses,
    the modules that these name, and copies of the values; nothing is forked, so it does not matter what the notebook
    has done with a GPU before.

    Where a launcher has started this process as one of several ranks already, it just calls the function; so it does
    where one rank is asked for.

    Args:
        function: what each rank calls. It trains on ``torch.accelerator``'s devices, or the CPU, as the engine does.
        ranks: number of processes; None is one for each accelerator, or one without any.
        args: what can be pickled, the same for every rank.

    Returns:
        What the function returned on each rank, by rank, pickled and sent back; of one process alone where it just
        called the function.

    Raises:
        ValueError: if ``ranks`` is below 1, the variables of a launcher are wrong, or the function or an argument
            cannot be sent to another process.
        RankFailure: if a rank raised or died; it shows the first failure, and the other ranks have been ended.
        RuntimeError: if a rank that imports the script comes upon this call again.
        KeyboardInterrupt: on Ctrl-C, once all ranks have ended.
    """
    if PREPARING in os.environ:
        raise RuntimeError(
            f"zeromesh.launch was called while a rank imported {os.environ[PREPARING]} to find the function; each rank "
            "does, so put what only the first process is to do under: if __name__ == '__main__':"
        )
    if ranks is None:
        ranks = default_ranks()
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}, but must be at least 1; name the number of processes to start")
    if is_launched():
        Environment.detect()
        return [function(*args)]
    if ranks == 1:
        return [function(*args)]
    from zeromesh.launcher.agent import LaunchPlan, run

    with tempfile.TemporaryDirectory(prefix="zeromesh-") as name:
        folder = Path(name)
        (folder / CALL).write_bytes(_call(function, args))
        run(python_rank("function", name), LaunchPlan(ranks, variables=threads(ranks)), folder, _log.warning)
        return [_result(folder, rank) for rank in range(ranks)]


def _call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Return the pickled call for a rank."""
    name = getattr(function, "__qualname__", repr(function))
    try:
        call = pickle.dumps((function, args))
    except Exception as error:
        raise ValueError(
            f"{name} and its arguments cannot be sent to the ranks ({error}); pass a function that is defined at the "
            "top level of a module, of the script or of a cell, and arguments that can be pickled; build models and "
            "open files inside the function"
        ) from None
    definitions = definitions_of((function, args)) if is_interactive() else []
    main = _main_data() if not definitions and b"__main__" in call else None
    return pickle.dumps({"function": call, "main": main, "definitions": definitions, "path": sys.path})


def _result(folder: Path, rank: int) -> Any:
    file = folder / f"{rank}.result"
    if not file.is_file():
        raise RankFailure(rank, "the function ended the process with status 0; let it return instead of calling exit")
    return pickle.loads(file.read_bytes())


def _main_data() -> dict[str, Any]:
    """Return multiprocessing's description of the script that runs, with which a rank imports it."""
    from multiprocessing import spawn

    data = spawn.get_preparation_data("zeromesh")
    source = str(data.get("init_main_from_name") or data.get("init_main_from_path"))
    if re.search(r"(^|[./])__main__(\.py)?$", source):
        raise ValueError(
            f"the ranks cannot import {source} without running it; move the function, and its arguments' classes, "
            "to another module, and import it from there"
        )
    return {key: data[key] for key in data if key.startswith(("sys_", "dir", "orig_dir", "init_main"))}


def python_rank(kind: str, target: str, arguments: Sequence[str] = ()) -> list[str]:
    """The command with which a rank runs a script, a module, a program or a function; see ``zeromesh.comm.rank``."""
    return [sys.executable, rank.__file__, kind, target, *arguments]


def default_ranks() -> int:
    """Return the number of accelerators of this machine; 1 if it has none."""
    import torch

    return max(1, torch.accelerator.device_count()) if torch.accelerator.is_available() else 1


def threads(ranks: int) -> dict[str, str]:
    """OMP_NUM_THREADS for each of so many ranks of this machine: their share of its cores; nothing where it is set."""
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, available_cores() // ranks))}


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
