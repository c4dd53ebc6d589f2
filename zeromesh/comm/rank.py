"""Program of each rank: runs a script, a module, a program or a function. Imports no other file of the package.

It is run as a file: ``python rank.py script FILE ...``, ``python rank.py module NAME ...`` or
``python rank.py program NAME ...``. The processes of ``zeromesh.launch`` call ``run_function``. An uncaught exception
is written to ``FAILURES``, for whoever started the ranks, instead of to the terminal, where those of all ranks would
come at once.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
from types import ModuleType, TracebackType
from typing import Any

FAILURES = "ZEROMESH_FAILURES"
"""Variable with the folder that failures are written to."""

RANKS = ("RANK", "PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
"""Variables with the rank: torchrun's, MPICH's and Intel MPI's, PMIx', Open MPI's."""

OUTPUT = "ZEROMESH_OUTPUT"
"""Variable with the folder of the files that a forked rank writes its output to; unset where it keeps the terminal."""


def main() -> None:
    """Run what the command line names."""
    _prepare()
    kind, target, *arguments = sys.argv[1:]
    sys.excepthook = record
    try:
        {"script": run_script, "module": run_module, "program": run_program}[kind](target, arguments)
    except SystemExit as error:
        if error.code not in (None, 0):
            _exit_recorded(error)
        raise


def _prepare() -> None:
    _end_with_the_launcher()
    if _rank() not in (None, "0"):  # else the ranks take each other's lines
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Lines of several ranks must not be torn, with PYTHONUNBUFFERED neither unless somebody looks on.
            stream.reconfigure(line_buffering=True, write_through=stream.write_through and stream.isatty())


def _exit_recorded(error: SystemExit) -> None:
    """Record an exit with a failing status; end quietly if the launcher will show it once for all ranks."""
    status = error.code if isinstance(error.code, int) else 1
    details = "" if error.code == status else f"{error.code}\n"
    if write_failure(f"exited with status {status}", details, status):
        raise SystemExit(status) from None


def run_script(path: str, arguments: list[str]) -> None:
    """Run a file as ``python FILE`` does."""
    sys.argv = [path, *arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = _fresh_main()
    module.__file__ = os.path.abspath(path)
    with io.open_code(module.__file__) as file:
        code = compile(file.read(), module.__file__, "exec")
    exec(code, module.__dict__)


def run_module(name: str, arguments: list[str]) -> None:
    """Run a module as ``python -m NAME`` does."""
    sys.argv = [name, *arguments]
    sys.path[0] = os.getcwd()
    _fresh_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def run_program(name: str, arguments: list[str]) -> None:
    """Become any program; that it ends with the launcher stays."""
    os.execvp(name, [name, *arguments])


def run_function(call: Any) -> bytes:
    """Call a function as a rank of ``zeromesh.launch`` and return its pickled result.

    Args:
        call: ``(function, arguments)``, pickled if this process was not forked from the one that has them.
    """
    import pickle

    os.setsid()  # the launcher ends this rank, and what it leaves behind, as a process group
    # A rank that waits in a collective never gets to run Python's handler, so let Ctrl-C end it outright.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name, descriptor in (("stdout", 1), ("stderr", 2)) if OUTPUT in os.environ else ():
        stream = open(os.path.join(os.environ[OUTPUT], f"{name}.log"), "a", buffering=1)  # noqa: SIM115
        os.dup2(stream.fileno(), descriptor)
        setattr(sys, name, stream)
    _prepare()
    try:
        function, arguments = _loaded(call) if isinstance(call, bytes) else call
        if not isinstance(call, bytes):
            _use_one_thread()
        result = function(*arguments)
        _leave_group()
        try:
            return pickle.dumps(result)
        except Exception as error:
            raise TypeError(
                f"what {function.__qualname__} returned, a {type(result).__name__}, cannot be sent back ({error}); "
                "return numbers, texts, tensors or arrays"
            ) from None
    except SystemExit as error:
        if error.code in (None, 0):
            write_failure("the function ended the process with status 0; let it return instead of calling exit", "")
            raise SystemExit(1) from None
        _exit_recorded(error)
        raise
    except Exception as error:
        record(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


def _loaded(call: bytes) -> Any:
    import pickle

    try:
        return pickle.loads(call)
    except AttributeError as error:
        error.add_note("define it at the top level of a module or of the script, not under if __name__ == '__main__':")
        raise


def _use_one_thread() -> None:
    """Compute with one thread, as OpenMP's others do not survive a fork: the first parallel operation would hang."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _leave_group() -> None:
    """End the process group: this process stays until all ranks have returned, and others must not wait for it."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Record an uncaught exception; a hook for ``sys.excepthook``."""
    if issubclass(kind, KeyboardInterrupt):
        return  # whoever pressed Ctrl-C knows
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    details = "".join(traceback.format_exception(kind, error, trace))
    # Not what a SyntaxError quotes, which is indented, nor the notes, which come last.
    lines = traceback.format_exception_only(kind, error)
    summary = next((line for line in lines if not line.startswith(" ")), lines[-1]).strip()
    if not write_failure(summary, details):
        sys.stderr.write(details)


def write_failure(summary: str, details: str, status: int = 1, lingers: float = 0.0) -> bool:
    """Record this rank's failure and its time; return False if no launcher on this machine reads it.

    A failure with ``lingers``, in seconds, ends the whole run: later failures of other ranks are its consequence.
    """
    rank, folder = _rank(), os.environ.get(FAILURES)
    if rank is None or folder is None or not os.path.isdir(folder):
        return False
    final = os.path.join(folder, f"{rank}.failure")
    if os.path.exists(final):
        return True  # the first one is the cause
    with open(final + ".part", "w", encoding="utf-8") as file:
        words = {"at": time.time(), "summary": summary, "details": details, "status": status, "lingers": lingers}
        json.dump(words, file)
    os.replace(final + ".part", final)
    return True


def record_step(step: int) -> None:
    """Record the current update for the launcher, which shows it if this rank is killed."""
    rank, folder = _rank(), os.environ.get(FAILURES)
    if rank is None or folder is None:
        return
    try:
        with open(os.path.join(folder, f"{rank}.step"), "w", encoding="ascii") as file:
            file.write(str(step))
    except OSError:
        pass  # nobody on this machine waits for it


def _rank() -> str | None:
    return next((os.environ[name] for name in RANKS if name in os.environ), None)


def _fresh_main() -> ModuleType:
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    return module


def _end_with_the_launcher() -> None:
    """Ask the kernel to end this process when the one that started it is gone, however that ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    main()
