"""Build and check what is released: ``python tools/wheels.py [FOLDER]``, by default ``dist``; nothing is downloaded.

It writes an sdist, and from that a wheel with the native kernels for this machine and one without. Each wheel is
installed into an environment of its own, which borrows torch and the other dependencies from the running one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_{}(sys.argv[1]))"
KINDS = {"native": "0", "pure": "1"}  # values of ZEROMESH_PURE

# The update on the host takes the kernels, or torch's updates where there are none.
CONFIG = {
    "train_batch_size": 2,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "model": {"hidden_size": 16, "layers": 1, "heads": 2, "sequence_length": 16},
    "data": {"train": "text.txt", "vocabulary_size": 260},
    "run": {"steps": 2, "output": "run"},
}


def build(kind: str, source: Path, target: Path, **variables: str) -> Path:
    """Build an sdist or a wheel from a folder of sources; return the file."""
    command = [sys.executable, "-c", BUILD.format(kind), str(target)]
    return target / run(command, source, **variables).splitlines()[-1]


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Run a command, and return its standard output; end with its errors if it fails."""
    done = subprocess.run(command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def check(kind: str, wheel: Path, folder: Path) -> str:
    """Install a wheel into a fresh environment, train with it, and return a line about it; end if it is wrong."""
    with zipfile.ZipFile(wheel) as files:
        libraries = [name for name in files.namelist() if name.endswith((".so", ".pyd"))]
    if bool(libraries) != (kind == "native"):
        sys.exit(f"{wheel.name} has {libraries or 'no native library'}; is there a C compiler?")
    run([sys.executable, "-m", "venv", "env"], folder)
    python = folder / "env" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    path = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], folder).strip()
    run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], folder)
    Path(path, "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "text.txt").write_text("a line of text to learn from\n" * 200)
    where = run([str(python), "-c", "import zeromesh; print(zeromesh.__file__)"], folder)
    if not Path(where.strip()).is_relative_to(Path(path).resolve()):
        sys.exit(f"{wheel.name} was not imported, but {where}")
    version = run([str(python), "-m", "zeromesh", "--version"], folder).strip()
    run([str(python), "-m", "zeromesh", "train", "config.json"], folder)
    found = run(
        [str(python), "-c", "from zeromesh.base.kernels.native import examine; print(examine()[0])"], folder
    ).strip()
    if kind == "pure" and found:
        sys.exit(f"{wheel.name} found native kernels: {found}")
    return f"{wheel.name}: {version}, kernels: {found or 'none'}, trains"


def main() -> None:
    """Build and check all."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist").resolve()
    target.mkdir(parents=True, exist_ok=True)
    archive = build("sdist", ROOT, target)
    with tempfile.TemporaryDirectory() as name, tarfile.open(archive) as files:
        names = [Path(one.name).parts[1:] for one in files.getmembers()]
        if unwanted := [parts for parts in names if parts[:1] in (("tests",), ("docs",), ("benchmarks",))]:
            sys.exit(f"{archive.name} has {len(unwanted)} files that are not released, such as {'/'.join(unwanted[0])}")
        # Wheels come from the sdist, so that a file that it lacks is noticed.
        files.extractall(name, filter="data")
        source = next(Path(name).iterdir())
        print(f"{archive.name}: {len(names)} files", flush=True)
        for kind, value in KINDS.items():
            wheel = build("wheel", source, target, ZEROMESH_PURE=value)
            folder = Path(name, kind)
            folder.mkdir()
            print(check(kind, wheel, folder), flush=True)


if __name__ == "__main__":
    main()
