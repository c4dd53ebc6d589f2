"""Mistakes at the command line and in an installation, before anything trains."""

from __future__ import annotations

import json
from pathlib import Path

from mistakes import Mistake

SETTINGS = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}}

# As where a package is not installed: the module is there and cannot be imported.
WITHOUT_MATPLOTLIB = (
    "import sys; sys.modules['matplotlib'] = None; sys.modules['matplotlib.figure'] = None; "
    "from zeromesh.apps.cli.main import main; sys.argv = ['zeromesh', 'verify', 'config.json', '--picture', 'a.png']; "
    "main()"
)

SETUP = Path(__file__).parents[2] / "tools" / "setup.py"
OLD_PYTHON = (
    "import runpy, sys; sys.version_info = (3, 9, 2); sys.argv = ['setup.py', 'hf']; "
    f"runpy.run_path('{SETUP}', run_name='__main__')"
)

MISTAKES = [
    Mistake(
        "make with a Python that is too old",
        f'python -c "{OLD_PYTHON}"',
        ("ZeroMesh needs Python 3.11 or newer", "is 3.9.2", "make train PYTHON=python3.12"),
        status=1,
    ),
    Mistake("a command with a typo", "zeromesh trian config.json", ("No such command 'trian'. Did you mean 'train'?",)),
    Mistake(
        "an option with a typo",
        "zeromesh train config.json --resum",
        ("No such option: --resum", "--resume"),
    ),
    Mistake("a command without its file", "zeromesh train", ("Missing argument", "train --help' for help")),
    Mistake(
        "a folder for a configuration",
        "zeromesh train folder",
        ("'folder' is the folder of a model; name the data, too: zeromesh train folder DATA",),
        {"folder/config.json": json.dumps(SETTINGS)},
    ),
    Mistake(
        "a script for a configuration",
        "zeromesh train train.py",
        ("train.py: is a Python script; start it with: zeromesh launch train.py",),
        {"train.py": "import zeromesh\nprint('training')\n"},
    ),
    Mistake(
        "a configuration that is not JSON",
        "zeromesh train config.json",
        ("config.json: is not JSON: Expecting ',' delimiter at line 3, column 3",),
        {"config.json": '{\n  "train_batch_size": 8\n  "optimizer": {}\n}\n'},
    ),
    Mistake(
        "a configuration for a script",
        "zeromesh launch config.json",
        ("'config.json' is a configuration; start it with: zeromesh train config.json",),
        {"config.json": json.dumps(SETTINGS)},
    ),
    Mistake(
        "a notebook for a script",
        "zeromesh launch train.ipynb",
        ("'train.ipynb' is a notebook; start ranks in one of its cells, with zeromesh.launch(function, 2)",),
        {"train.ipynb": "{}"},
    ),
    Mistake(
        "a script that is not there",
        "zeromesh launch trian.py",
        ("'trian.py' is no file; did you mean train.py?",),
        {"train.py": "print('training')\n"},
    ),
    Mistake(
        "a configuration that is not there",
        "zeromesh train confg.json",
        ("confg.json: there is no such file; did you mean config.json?",),
        {"config.json": json.dumps(SETTINGS)},
    ),
    Mistake(
        "a key of --set with a typo",
        "zeromesh train config.json --set zero_optimisation.stage=2",
        ("zero_optimisation is not a known key; did you mean zero_optimization?",),
        {"config.json": json.dumps(SETTINGS)},
    ),
    Mistake(
        "a picture without matplotlib",
        f'python -c "{WITHOUT_MATPLOTLIB}"',
        ("a picture needs matplotlib", "pip install matplotlib"),
        {"config.json": json.dumps(SETTINGS)},
    ),
    Mistake(
        "--set without a value",
        "zeromesh train config.json --set run.steps",
        ('--set: "run.steps" must be of the form path=value',),
        {"config.json": json.dumps(SETTINGS)},
    ),
]
