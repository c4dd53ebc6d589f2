"""Start the ranks of one machine from within Python: ``zeromesh.launch``."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from zeromesh.comm import rank
from zeromesh.comm.detect import Environment
from zeromesh.comm.failure import RankFailure

__all__ = ["RankFailure", "available_cores", "launch", "python_rank", "threads"]

_log = logging.getLogger("zeromesh")


def launch(function: Callable[..., Any], ranks: int | None = None, *args: Any) -> list[Any]:
    """Run ``function(*args)`` on ``ranks`` processes of this machine, and wait for them.

    Each has torchrun's variables, which ``zeromesh.initialize`` reads. The rendezvous is on the loopback interface.
    OMP_NUM_THREADS, unless it is set, shares out the machine's cores. What rank 0 prints appears as it is, what the
    others print as ``[RANK] line``.

    From a script, each rank is a new Python process that imports the script: the function must be importable, or at
    the top level of the script, and the call under ``if __name__ == "__main__":``. From a notebook or a prompt, each
    rank is a fork that has everything the notebook has. Neither CUDA nor a process group may have been initialised
    there, and a rank computes on the CPU with one thread, as OpenMP's others do not survive a fork.

    Where a launcher has started this process as one of several ranks already, it just calls the function; so it does
    where one rank is asked for.

    Args:
        function: what each rank calls. It trains on ``torch.accelerator``'s devices, or the CPU, as the engine does.
        ranks: number of processes; None is one for each accelerator, or one without any.
        args: the same for every rank; they must be picklable in a script.

    Returns:
        What the function returned on each rank, by rank, pickled and sent back; of one process alone where it just
        called the function.

    Raises:
        ValueError: if ``ranks`` is below 1, the variables of a launcher are wrong, or the function or an argument
            cannot be sent to another process.
        RankFailure: if a rank raised or died; it shows the first failure, and the other ranks have been ended.
        RuntimeError: if a rank that imports the script comes upon this call again, or a notebook has initialised CUDA
            or a process group.
        KeyboardInterrupt: on Ctrl-C, once all ranks have ended.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # else each rank would start ranks, and so on
        raise RuntimeError(
            f"zeromesh.launch was called while a rank imported {sys.argv[0]} to find the function; each rank does, so "
            "put what only the first process is to do under: if __name__ == '__main__':"
        )
    if ranks is None:
        ranks = default_ranks()
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}, but must be at least 1; name the number of processes to start")
    # Raises where the variables of a launcher are wrong.
    if Environment.detect().launcher != Environment().launcher or ranks == 1:
        return [function(*args)]
    # torch's elastic library takes a second to import, which a single process need not wait for.
    from zeromesh.apps.launch.agent import LaunchPlan, run

    forks = _is_interactive()
    if forks:
        _require_forkable()
        call: Any = (function, args)
    else:
        try:
            call = pickle.dumps((function, args))
        except Exception as error:
            raise ValueError(
                f"{getattr(function, '__qualname__', repr(function))} and its arguments cannot be sent to the ranks "
                f"({error}); pass a function that is defined at the top level of a module or of the script, and "
                "arguments that can be pickled; build models and open files inside the function"
            ) from None
    plan = LaunchPlan(ranks, variables=threads(ranks), start_method="fork" if forks else "spawn")
    with tempfile.TemporaryDirectory(prefix="zeromesh-") as name:
        results = run([rank.run_function, call], plan, Path(name), _log.warning)
    return [pickle.loads(results[number]) for number in range(ranks)]


def _is_interactive() -> bool:
    """Return whether ``__main__`` is interactive or came through a pipe, so that no file can be imported."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is None and not os.path.isfile(getattr(main, "__file__", None) or "")


def _require_forkable() -> None:
    """Raise RuntimeError if this process has state that forks cannot use: CUDA, or a process group with its threads."""
    import torch

    if torch.cuda.is_initialized():
        raise RuntimeError(
            "this notebook has initialised CUDA, which processes that are forked from it cannot use; restart its "
            "kernel, and use the GPU only inside the function that is passed to zeromesh.launch"
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        # A fork inherits the group without its threads, and would wait for ever in its first collective.
        raise RuntimeError(
            "this notebook has a process group, which zeromesh.initialize has started, for example; ranks that are "
            "forked from it cannot use it: call torch.distributed.destroy_process_group() first, or train inside the "
            "function that is passed to zeromesh.launch"
        )


def python_rank(kind: str, target: str, arguments: Sequence[str] = ()) -> list[str]:
    """Return the command with which a rank runs a script, a module or a program; see ``zeromesh.comm.rank``."""
    return [sys.executable, rank.__file__, kind, target, *arguments]


def default_ranks() -> int:
    """Return the number of accelerators of this machine; 1 if it has none."""
    import torch

    return max(1, torch.accelerator.device_count())  # is_available would initialise CUDA, which forks cannot use then


def threads(ranks: int) -> dict[str, str]:
    """Return OMP_NUM_THREADS for each of ``ranks`` ranks of this machine, as a variable; nothing if it is set."""
    # Without it each rank would start a thread for every core, and the ranks would take turns.
    return {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max(1, available_cores() // ranks))}


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
