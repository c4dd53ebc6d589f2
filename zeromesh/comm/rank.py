"""Program of each rank: runs a script, a module, a program or a function. Imports no other file of the package.

It is run as a file, ``python rank.py script|module|program NAME ...``; ``zeromesh.launch`` calls ``run_function``.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import pickle
import runpy
import signal
import sys
import time
import traceback
from types import ModuleType, TracebackType
from typing import Any

FAILURES = "ZEROMESH_FAILURES"  # variable with the folder that failures are written to

# Variable with the folder of the files that a forked rank writes its output to; unset where it keeps the terminal.
OUTPUT = "ZEROMESH_OUTPUT"

# Files whose frames a traceback begins with, and which the user does not want to see.
_DROP_IN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "deepspeed", "__main__.py")
_RUNNERS = (__file__, runpy.__file__, "<frozen runpy>", _DROP_IN)


def main() -> None:
    """Run what the command line names."""
    _prepare()
    kind, target, *arguments = sys.argv[1:]
    try:
        if kind == "program":
            os.execvp(target, [target, *arguments])  # that it ends with the launcher stays
        _pass_local_rank()
        run(target, arguments, is_module=kind == "module")
    except SystemExit as error:
        if error.code not in (None, 0):
            _exit_recorded(error)
        raise


def run(target: str, arguments: list[str], is_module: bool) -> None:
    """Run a script or a module, with a traceback that begins in it."""
    # An uncaught exception goes to whoever started the ranks: on the terminal those of all ranks would come at once.
    sys.excepthook = record
    (run_module if is_module else run_script)(target, arguments)


def _pass_local_rank() -> None:
    """Let parsers of the command line that know ``--local_rank`` find it, as DeepSpeed's launcher passes it."""
    from argparse import ArgumentParser

    parse, names = ArgumentParser.parse_known_args, ("--local_rank", "--local-rank")

    def with_local_rank(parser: ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        name = next((name for name in names if name in parser._option_string_actions), None)
        words = sys.argv[1:] if args is None else [*args]
        # Not for a script that parses something else, and behind nothing that takes all arguments after it.
        if name and words == sys.argv[1:] and not any(word.startswith(names) for word in words):
            words = [f"{name}={os.environ['LOCAL_RANK']}", *words]
        return parse(parser, words, namespace)

    setattr(ArgumentParser, parse.__name__, with_local_rank)


def _prepare() -> None:
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG: the kernel ends this process when the one that started it is gone, however that ended.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
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
    sys.argv[:] = [path, *arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    module = _fresh_main()
    module.__file__ = os.path.abspath(path)
    with io.open_code(module.__file__) as file:
        code = compile(file.read(), module.__file__, "exec")
    exec(code, module.__dict__)


def run_module(name: str, arguments: list[str]) -> None:
    """Run a module as ``python -m NAME`` does."""
    sys.argv[:] = [name, *arguments]
    sys.path[0] = os.getcwd()
    _fresh_main()
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def run_function(call: Any) -> bytes:
    """Run ``call``, a function and its arguments, pickled in spawned ranks, and return the pickled result."""
    os.setsid()  # the launcher ends this rank, and what it leaves behind, as a process group
    # A rank that waits in a collective never gets to run Python's handler, so let Ctrl-C end it outright.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    for name, descriptor in (("stdout", 1), ("stderr", 2)) if OUTPUT in os.environ else ():
        stream = open(os.path.join(os.environ[OUTPUT], f"{name}.log"), "a", buffering=1)  # noqa: SIM115
        os.dup2(stream.fileno(), descriptor)
        setattr(sys, name, stream)
    _prepare()
    vars(sys).pop("last_value", None)  # a fork of a notebook's has that of a cell before
    torch: Any = sys.modules.get("torch")
    try:
        if isinstance(call, bytes):
            function, arguments = _loaded(call)
        else:
            function, arguments = call
            if torch is not None:
                # OpenMP's other threads do not survive a fork: the first parallel operation would hang.
                torch.set_num_threads(1)
        result = function(*arguments)
        torch = sys.modules.get("torch")
        if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            # This process stays until all ranks have returned, and others must not wait for it.
            if course := sys.modules.get("zeromesh.comm.course"):
                course.this_rank.leave()
            if local := sys.modules.get("zeromesh.comm.local"):
                local.close()
            torch.distributed.destroy_process_group()
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
    try:
        return pickle.loads(call)
    except AttributeError as error:
        error.add_note("define it at the top level of a module or of the script, not under if __name__ == '__main__':")
        raise


def record(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Record an uncaught exception; a hook for ``sys.excepthook``."""
    if issubclass(kind, KeyboardInterrupt):
        return  # whoever pressed Ctrl-C knows
    if getattr(error, "brief", False) and write_failure(str(error), "", waits=True):
        return
    while trace is not None and trace.tb_frame.f_code.co_filename in _RUNNERS:
        trace = trace.tb_next
    details = "".join(traceback.format_exception(kind, error, trace))
    # Not what a SyntaxError quotes, which is indented, nor the notes, which come last.
    lines = traceback.format_exception_only(kind, error)
    summary = next((line for line in lines if not line.startswith(" ")), lines[-1]).strip()
    if not write_failure(summary, details):
        sys.stderr.write(details)


def write_failure(summary: str, details: str, status: int = 1, lingers: float = 0.0, waits: bool = False) -> bool:
    """Record this rank's failure and its time; return False if no launcher on this machine reads it.

    After ``lingers`` seconds, unless 0, this rank ends the whole run; other ranks' failures are its consequence.
    ``waits`` says that it failed only because it waited for another one, which the summary names.
    """
    rank, folder = _rank(), os.environ.get(FAILURES)
    if rank is None or folder is None or not os.path.isdir(folder):
        return False
    final = os.path.join(folder, f"{rank}.failure")
    if os.path.exists(final):
        return True  # the first one is the cause
    with open(final + ".part", "w", encoding="utf-8") as file:
        words = {"at": time.time(), "summary": summary, "details": details, "status": status, "lingers": lingers}
        json.dump(words | {"waits": waits}, file)
    os.replace(final + ".part", final)  # the launcher may look at any time
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
    return os.environ.get("RANK")


def _fresh_main() -> ModuleType:
    # The script's names must not meet those of this file, and functions that it pickles belong to ``__main__``.
    module = ModuleType("__main__")
    module.__dict__["__builtins__"] = __builtins__
    sys.modules["__main__"] = module
    return module


if __name__ == "__main__":
    main()
