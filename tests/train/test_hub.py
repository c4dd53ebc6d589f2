"""Names of the Hugging Face Hub stand for what is in its cache; without a network the rest is refused with a remedy."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from harness import ROOT, run_command

ZEROMESH = (sys.executable, "-m", "zeromesh")
COMMIT = "0" * 40


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with ``org/tiny``, as huggingface_hub lays it out, and a data set that was used before."""
    import datasets

    home = tmp_path_factory.mktemp("hub")
    made = run_command([ZEROMESH[0], ROOT / "examples" / "tiny_model.py", home / "tiny"])
    assert made.returncode == 0, made.stdout
    for name in ("tiny", "halved"):
        folder = home / "hub" / f"models--org--{name}"
        shutil.copytree(home / "tiny", folder / "snapshots" / COMMIT)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(COMMIT)
    (home / "hub" / "models--org--halved" / "snapshots" / COMMIT / "model.safetensors").unlink()
    texts = {"text": ["some text to learn from, and some more of it"] * 200}
    datasets.Dataset.from_dict(texts).save_to_disk(home / "datasets" / "zeromesh" / "org--texts--plain")
    return home


def call(hub: Path, folder: Path, model: str, data: str, *options: str) -> tuple[int, str]:
    config = json.loads((ROOT / "examples" / "chat.json").read_text())
    config |= {"huggingface": {"path": model, "sequence_length": 32}, "data": {"train": data}}
    config["run"] = {"steps": 2, "output": "run"}
    (folder / "config.json").write_text(json.dumps(config))
    places = {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"}
    done = run_command([*ZEROMESH, "train", "config.json", *options], cwd=folder, **places)
    return done.returncode, " ".join(done.stdout.split())


def test_cached_models_and_data_sets_work_without_a_network(hub: Path, tmp_path: Path) -> None:
    status, output = call(hub, tmp_path, "org/tiny", "org/texts:plain")
    assert status == 0, output
    assert json.loads((tmp_path / "run" / "config.json").read_text())["huggingface"]["path"] == "org/tiny"
    status, output = call(hub, tmp_path, "org/tiny", "org/texts:plain", "--resume", "--set", "run.steps=3")
    assert status == 0, output
    # Sizes of the plan are those of the cached configuration.
    sizes = ("--gpu", "a100", "--sequence", "32", "--batch", "8", "--json")
    places = {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1"}
    planned = run_command([*ZEROMESH, "plan", "org/tiny", *sizes], cwd=tmp_path, **places)
    assert planned.returncode == 0, planned.stdout
    assert json.loads((tmp_path / "plan" / "config.json").read_text())["huggingface"]["path"] == "org/tiny"


@pytest.mark.parametrize(
    ("model", "data", "expected"),
    [
        ("org/none", "org/texts:plain", ["huggingface.path", "'org/none' is no local folder", "hf download org/none"]),
        # Weights that are not there must not become a training from the beginning.
        ("org/halved", "org/texts:plain", ["'org/halved' is no local folder", "HF_HOME"]),
        ("./none", "org/texts:plain", ["'./none'", "is no folder", "examples/tiny_model.py"]),
        ("org/tiny", "org/none", ["'org/none' does not exist here", "HF_HUB_OFFLINE is set", "HF_HOME"]),
    ],
)
def test_what_is_not_in_the_cache_is_refused(
    model: str, data: str, expected: list[str], hub: Path, tmp_path: Path
) -> None:
    status, output = call(hub, tmp_path, model, data)
    assert status == 2, output
    for words in expected:
        assert words in output, output
