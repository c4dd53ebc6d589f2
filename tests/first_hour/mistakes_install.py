"""Mistakes at the command line and in an installation, before anything trains."""

from __future__ import annotations

import json

from mistakes import Mistake

SETTINGS = {"train_batch_size": 8, "optimizer": {"type": "AdamW"}}

# As where a package is not installed: the module is there and cannot be imported.
WITHOUT_MATPLOTLIB = (
    "import sys; sys.modules['matplotlib'] = None; sys.modules['matplotlib.figure'] = None; "
    "from zeromesh.apps.cli.main import main; sys.argv = ['zeromesh', 'verify', 'config.json', '--picture', 'a.png']; "
    "main()"
)

MISTAKES = [
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
        ("folder: is a folder; give the path of a JSON file",),
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
        ("config.json: is not JSON", "line 3, column 1"),
        {"config.json": '{\n  "train_batch_size": 8,\n}\n'},
    ),
    Mistake(
        "a configuration for a script",
        "zeromesh launch config.json",
        ("'config.json' is a configuration; start it with: zeromesh train config.json",),
        {"config.json": json.dumps(SETTINGS)},
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
