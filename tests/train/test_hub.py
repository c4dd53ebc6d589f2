"""Names of the Hugging Face Hub stand for what is in its cache; without a network the rest is refused with a remedy."""

import json
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from harness import ROOT
from test_train_cli import call, refused
from zeromesh.apps.train.data.hub_datasets import dataset_folder
from zeromesh.checkpoint.weights.pretrained import model_folder

COMMIT, OTHER = "0" * 40, "a" * 40
SIZES = ("--gpu", "a100", "--sequence", "32", "--batch", "8", "--json")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache with ``org/tiny`` as huggingface_hub lays it out, and a data set that was used before."""
    import datasets

    home = tmp_path_factory.mktemp("hub")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["tiny_model.py", str(home / "tiny")])
        runpy.run_path(str(ROOT / "examples" / "tiny_model.py"), run_name="__main__")
    for name in ("tiny", "halved"):
        folder = home / "hub" / f"models--org--{name}"
        shutil.copytree(home / "tiny", folder / "snapshots" / COMMIT)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(COMMIT)
    shutil.copytree(home / "tiny", home / "hub" / "models--org--tiny" / "snapshots" / OTHER)
    (home / "hub" / "models--org--halved" / "snapshots" / COMMIT / "model.safetensors").unlink()
    texts = {"text": ["some text to learn from, and some more of it"] * 200}
    for name in ("org--texts--plain", "org--texts--plain@v2"):
        datasets.Dataset.from_dict(texts).save_to_disk(home / "datasets" / "zeromesh" / name)
    return home


@pytest.fixture
def place(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the present folder of a process whose cache this is, and which has no network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(cache / "datasets"))
    monkeypatch.chdir(tmp_path)
    model_folder.cache_clear()
    dataset_folder.cache_clear()
    return tmp_path


def train(place: Path, model: str, data: str, *options: str) -> Result:
    config = json.loads((ROOT / "examples" / "chat.json").read_text())
    config |= {"huggingface": {"path": model, "sequence_length": 32}, "data": {"train": data}}
    config["run"] = {"steps": 2, "output": "run"}
    (place / "config.json").write_text(json.dumps(config))
    return call("train", "config.json", *options)


@pytest.mark.usefixtures("one_rank")
def test_cached_models_and_data_sets_work_without_a_network(place: Path) -> None:
    result = train(place, "org/tiny", "org/texts:plain")
    assert result.exit_code == 0, result.output
    assert json.loads((place / "run" / "config.json").read_text())["huggingface"]["path"] == "org/tiny"
    result = train(place, "org/tiny", "org/texts:plain", "--resume", "--set", "run.steps=3")
    assert result.exit_code == 0, result.output
    assert origins(place) == {"model": f"org/tiny@{COMMIT}", "data": ["org/texts:plain@main"]}
    pins = ("--set", f"huggingface.revision={OTHER}", "--set", "data.revision=v2", "--set", "run.output=pinned")
    result = train(place, "org/tiny", "org/texts:plain", *pins)
    assert result.exit_code == 0, result.output
    assert origins(place, "pinned") == {"model": f"org/tiny@{OTHER}", "data": ["org/texts:plain@v2"]}


def origins(place: Path, run: str = "run") -> dict[str, Any]:
    """Return what the last checkpoint of a run says of where its model and its text come from."""
    return json.loads(max((place / run).glob("checkpoints/*/manifest.json")).read_text())["client_state"]["origins"]


def test_a_revision_of_what_is_not_of_the_hub_is_refused(place: Path, cache: Path) -> None:
    pin = ("--set", "huggingface.revision=v1")
    refused(train(place, "org/tiny", "org/texts:plain", *pin), "hf download org/tiny --revision v1")
    refused(train(place, str(cache / "tiny"), "org/texts:plain", *pin), "local folder, which has no revision 'v1'")
    (place / "text.txt").write_text("some text")
    refused(train(place, "org/tiny", "text.txt", "--set", "data.revision=v1"), "no source is a data set of the Hub")


@pytest.mark.full
def test_a_plan_takes_the_sizes_of_a_cached_configuration(place: Path) -> None:
    result = call("plan", "org/tiny", *SIZES, "--out", place / "plan")
    assert result.exit_code == 0, result.output
    written = next((place / "plan").glob("*.json"))
    assert json.loads(written.read_text())["huggingface"]["path"] == "org/tiny"
    refused(call("plan", "org/none", *SIZES), "'org/none' is not a local folder", "hf download org/none")


@pytest.mark.parametrize(
    ("model", "data", "expected"),
    [
        (
            "org/none",
            "org/texts:plain",
            ["huggingface.path", "'org/none' is not a local folder", "hf download org/none"],
        ),
        # Weights that are not there must not become a training from the beginning.
        ("org/halved", "org/texts:plain", ["'org/halved' is not a local folder", "HF_HOME"]),
        ("./none", "org/texts:plain", ["'./none'", "is not a folder", "examples/tiny_model.py"]),
        ("org/tiny", "org/none", ["'org/none' does not exist here", "HF_HUB_OFFLINE is set", "HF_HOME"]),
    ],
)
def test_what_is_not_in_the_cache_is_refused(model: str, data: str, expected: list[str], place: Path) -> None:
    refused(train(place, model, data), *expected)
