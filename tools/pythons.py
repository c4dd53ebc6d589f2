"""Run what differs between versions of Python on each that is here: ``python tools/pythons.py [3.13 ...]``.

Each gets an environment of its own, ``.venv-3.13``, which is made once. Every file is compiled with warnings as
errors, every module is imported, and a quick part of the tests runs. Missing versions are named, and no failure.
"""

import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
FOLDERS = ("zeromesh", "tests", "tools", "examples", "benchmarks")

# Annotations, pickles, processes, signals, archives and threads are what new versions change.
TESTS = (
    "tests/config", "tests/model/test_containers.py", "tests/engine/test_import.py", "tests/engine/test_one_process.py",
    "tests/engine/test_signatures.py", "tests/engine/test_zero.py", "tests/checkpoint/test_saving_values.py",
    "tests/kernels", "tests/launcher/test_launch.py", "tests/train/test_decoder.py",
)  # fmt: skip

COMPILE = ["-W", "error", "-m", "compileall", "-q", "-f"]
IMPORT = """
import importlib, pkgutil, zeromesh
for module in pkgutil.walk_packages(zeromesh.__path__, "zeromesh."):
    if not module.name.endswith(("__main__", "._native")):
        importlib.import_module(module.name)
"""


def find(version):
    """Return an interpreter of a version, on PATH or of pyenv; None if there is none."""
    folders = pathlib.Path.home().glob(".pyenv/versions/" + version + "*/bin/python3")
    for path in [shutil.which("python" + version), *sorted(map(str, folders))]:
        # A shim of pyenv is there for versions that are not chosen, and fails.
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return None


def check(version, interpreter):
    """Return the first step that fails; None if none does."""
    # First, as it needs no environment.
    steps = [("compile", [interpreter, *COMPILE, *FOLDERS])]
    python = str(ROOT / (".venv-" + version) / "bin" / "python")
    steps.append(("install", [interpreter, "tools/setup.py", "test", ".venv-" + version]))
    steps.append(("import", [python, "-W", "error::DeprecationWarning:zeromesh", "-c", IMPORT]))
    steps.append(("test", [python, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", *TESTS]))
    for name, command in steps:
        if name == "install" and (ROOT / (".venv-" + version) / ".test.done").exists():
            continue
        print(version, name, flush=True)
        if subprocess.run(command, cwd=ROOT).returncode:
            return name
    return None


def main():
    """Check all versions, or those that the command line names."""
    wanted = sys.argv[1:] or VERSIONS
    results = {}
    for version in wanted:
        interpreter = find(version)
        failed = check(version, interpreter) if interpreter else ""
        results[version] = "missing on this machine" if failed == "" else f"fails: {failed}" if failed else "passes"
    for version, result in results.items():
        print("Python", version, result)
    sys.exit(any(result.startswith("fails") for result in results.values()))


if __name__ == "__main__":
    main()
