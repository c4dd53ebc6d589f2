"""Create an environment and install the project in it: ``python3 tools/setup.py EXTRA [FOLDER]``, by default ``.venv``.

It runs on the machine's own python3, which may be old, so it keeps to what every Python 3 understands.
"""

import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
VENV = ROOT / (sys.argv[2] if len(sys.argv) > 2 else ".venv")


def require_python():
    """Leave with a remedy where this Python cannot carry the project."""
    if sys.version_info < (3, 11):
        found = ".".join(str(part) for part in sys.version_info[:3])
        sys.exit(
            f"ZeroMesh needs Python 3.11 or newer, and {sys.executable} is {found}.\n"
            "Install a newer one and name it: make train PYTHON=python3.12"
        )
    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError as error:
        sys.exit(
            f"{sys.executable} lacks the module {error.name!r}, which makes virtual environments.\n"
            "On Debian and Ubuntu it is a package of its own: apt install python3-venv"
        )


def create():
    """Make the virtual environment, also over a half-made one."""
    python = VENV / "bin" / "python"
    probe = [str(python), "-m", "pip", "--version"]
    if not python.exists() or subprocess.run(probe, capture_output=True).returncode:
        print("creating", VENV.name, "with", sys.executable, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    return python


def install(python, extra):
    """Install the project with an extra at the pinned versions, one short line per package."""
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    # By a path, not setuptools' finder, which comes after a folder named zeromesh beside a user's script.
    command += ["--config-settings", "editable_mode=compat"]
    command += ["--constraint", "constraints.txt", "--editable", f".[{extra}]"]
    pip = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log = []
    for line in pip.stdout:
        log.append(line)
        words = line.split()
        if words[:1] == ["Collecting"]:
            print("  " + words[1], flush=True)
        elif words[:2] == ["Installing", "collected"]:
            print(f"installing {len(words) - 3} packages", flush=True)
    if pip.wait():
        sys.exit("".join(log[-40:]) + "\nthe installation failed; these were its last lines: " + " ".join(command))


def install_torchvision(python):
    """Install torchvision in a folder of its own, where ``tests/support/with_torchvision.py`` finds it."""
    # transformers imports it wherever it is, and fails where its wheel does not match the build of torch.
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    pin = [line for line in pins if line.startswith("torchvision==")]
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps", "--upgrade"]
    subprocess.run([*command, "--target", str(VENV / "torchvision"), *pin], check=True)


def main():
    """Set up the environment and leave the stamp that make looks at."""
    extra = sys.argv[1]
    require_python()
    started = time.monotonic()
    python = create()
    print(f"installing zeromesh[{extra}] and what it needs into {VENV.name} (once, some minutes)", flush=True)
    install(python, extra)
    if extra == "test":
        install_torchvision(python)
    (VENV / f".{extra}.done").touch()
    print(f"{VENV.name} is ready, after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
