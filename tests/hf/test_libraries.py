"""Trainings by other libraries on two ranks equal those by the same libraries alone."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from hf_training import BATCH, Result, model, quantized, samples, stage, train

pytest.importorskip("accelerate")

RANKS = 2
TOLERANCE = 1e-5
"""Losses are computed in fp32; sums over ranks have another order than those of one process."""
LIMIT = 300
NEEDS = {"trl-sft": "trl", "trl-dpo": "trl", "trl-grpo": "trl", "peft": "peft"}
NEEDS |= {"lightning": "lightning", "lightning-sgd": "lightning"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("libraries")


@cache
def alone(library: str, folder: Path) -> Result:
    """Train by the library itself: in this process, or on as many ranks where it draws random numbers."""
    if library == "trl-grpo":
        return run_ranks(train, RANKS, library, folder / library / "plain", None, timeout=LIMIT, use_cpu=True)[0]
    return train(library, folder / library / "plain", None)


def assert_equal(found: Result, wanted: Result) -> None:
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(wanted[0]), rtol=TOLERANCE, atol=TOLERANCE)
    assert found[1].keys() == wanted[1].keys()
    torch.testing.assert_close(found[1], dict(wanted[1]), rtol=TOLERANCE, atol=TOLERANCE)  # it names what differs


def assert_trains_alike(library: str, number: int, folder: Path, **more: Any) -> None:
    wanted = alone(library, folder)
    config = stage(number, **more)
    (found, *_) = run_ranks(train, RANKS, library, folder / library / str(number), config, timeout=LIMIT)
    assert_equal(found, wanted)


@pytest.mark.parametrize(("library", "number"), [("transformers", 3), ("accelerate", 2)])
def test_a_trainer_and_a_loop_equal_the_plain_ones(library: str, number: int, folders: Path) -> None:
    assert_trains_alike(library, number, folders)


@pytest.mark.full
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize(
    "library",
    [
        "transformers",
        "transformers-epochs",
        "accelerate",
        "peft",
        "trl-sft",
        "trl-dpo",
        "trl-grpo",
        "lightning",
        "lightning-sgd",
    ],
)
def test_every_library_trains_as_it_does_alone(library: str, number: int, folders: Path) -> None:
    if library in NEEDS:
        pytest.importorskip(NEEDS[library])
    assert_trains_alike(library, number, folders)


@pytest.mark.full
@pytest.mark.parametrize("library", ["trl-sft", "trl-dpo", "trl-grpo"])
def test_trainers_of_trl_take_the_mixin(library: str, folders: Path) -> None:
    pytest.importorskip("trl")
    wanted = alone(library, folders)
    folder = folders / library / "mixin"
    (found, *_) = run_ranks(train, RANKS, library, folder, stage(3), timeout=LIMIT, mixin=True)
    assert_equal(found, wanted)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "number"), [(2, 3), (1, 2)])
def test_a_run_of_lightning_goes_on(ranks: int, number: int, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    losses, weights = train("lightning", tmp_path / "plain", None, epochs=2)
    # The schedule and accumulation of the whole run, of which the first half was made before.
    (begun, *_) = run_ranks(train, RANKS, "lightning", tmp_path / "begun", stage(3), timeout=LIMIT)
    rest = {"epochs": 2, "resume": tmp_path / "begun" / "checkpoint"}
    (found, *_) = run_ranks(train, ranks, "lightning", tmp_path / "rest", stage(number), timeout=LIMIT, **rest)
    # Each ends with the value of its last validation.
    assert_equal(([*begun[0][:-1], *found[0]], found[1]), (losses, weights))


@pytest.mark.full
def test_a_run_goes_on_with_fewer_ranks_and_another_stage(tmp_path: Path) -> None:
    wanted = train("transformers", tmp_path / "plain", None)
    run_ranks(train, RANKS, "transformers", tmp_path / "begun", stage(3), timeout=LIMIT)
    rest = {"resume": tmp_path / "begun" / "checkpoint-2"}
    (found,) = run_ranks(train, 1, "transformers", tmp_path / "resumed", stage(2), timeout=LIMIT, **rest)
    assert_equal(found, wanted)


QUANTIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "trainer": ("bitsandbytes", {}),
    "trainer, base before": ("bitsandbytes", {"way": "early"}),
    "trainer with the mixin": ("bitsandbytes", {"way": "mixin"}),
    "trl": ("bitsandbytes-sft", {}),
    "trl with the mixin": ("bitsandbytes-sft", {"mixin": True}),
    "accelerate": ("accelerate", {"quantize": True}),
}
"""Trainings of adapters on 4 bits of bitsandbytes, and options that they have."""


@pytest.fixture(scope="module")
def plain_adapters(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Result]]:
    """Return the folder of a base beside the runs, and training there without ZeroMesh."""
    for needed in ("peft", "bitsandbytes"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("quantized")
    model(64).save_pretrained(folder)  # layers have at least one block of 64 elements

    @cache
    def train_alone(library: str, **more: Any) -> tuple[Path, Result]:
        (result,) = run_ranks(train_plain, 1, library, folder / f"{library} {more}", timeout=LIMIT, **more)
        return folder, result

    return train_alone


def train_plain(library: str, folder: Path, **more: Any) -> Result:
    """Train in a process of its own, so that no setting of earlier tests changes the last digits."""
    torch.distributed.destroy_process_group()
    return train(library, folder, None, **more)


def reload_adapters(folder: Path) -> float:
    """Return the loss of the samples for evaluation with adapters that a run saved.

    Runs in a process of its own, so that no setting of earlier tests changes the last digits.
    """
    from peft import PeftModel

    net = PeftModel.from_pretrained(quantized(folder.parent), folder / "final").eval()
    batches = samples(8, 2)
    with torch.no_grad():
        return sum(float(net(**{k: v[None] for k, v in row.items()}).loss) for row in batches) / len(batches)


@pytest.mark.full
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("name", QUANTIZED)
def test_adapters_on_a_quantized_base_train_as_they_do_alone(name: str, number: int, plain_adapters: Any) -> None:
    library, more = QUANTIZED[name]
    if library == "bitsandbytes-sft":
        pytest.importorskip("trl")
    folder, wanted = plain_adapters(library, **{key: more[key] for key in more.keys() & {"quantize"}})
    run = folder / f"{name} {number}"
    (found, *_) = run_ranks(train, RANKS, library, run, stage(number), timeout=LIMIT, **more)
    assert_equal(found, wanted)
    if library != "accelerate":
        (loss,) = run_ranks(reload_adapters, 1, run, timeout=LIMIT)
        assert loss == pytest.approx(found[0][-1], rel=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("number", [2, 3])
def test_adapters_that_trl_rounds_to_bf16_are_the_plain_ones(number: int, plain_adapters: Any) -> None:
    pytest.importorskip("trl")
    folder, wanted = plain_adapters("bitsandbytes-sft", wide=False)
    run = folder / f"rounded {number}"
    (found,) = run_ranks(train, 1, "bitsandbytes-sft", run, stage(number), timeout=LIMIT, wide=False)
    # Norms between the losses are the engine's in fp32, and torch's in bf16.
    assert found[0][::2] == wanted[0][::2]
    assert all(torch.equal(found[1][key], value) for key, value in wanted[1].items())


MESHES = {
    "data": (2, {}, BATCH // 2),
    "tensor": (2, {"mesh": {"tensor": 2}}, BATCH),
    "tensor and data": (4, {"mesh": {"tensor": 2}}, BATCH // 2),
    "context": (2, {"mesh": {"context": 2}}, BATCH),
    "pipeline": (2, {"mesh": {"pipeline": 2}}, BATCH),
    "pipeline and data": (4, {"mesh": {"pipeline": 2}}, BATCH // 2),
    "context and tensor": (4, {"mesh": {"context": 2, "tensor": 2}}, BATCH),
}
"""Ranks, what the configuration says of them, and samples for each share of the data."""


@pytest.mark.full
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("name", MESHES)
def test_our_trainer_trains_on_every_mesh(name: str, number: int, folders: Path) -> None:
    ranks, mesh, batch = MESHES[name]
    config = {"zero_optimization": {"stage": number}, **mesh}
    folder = folders / f"{name}-{number}"
    (found, *_) = run_ranks(train, ranks, "own", folder, config, timeout=LIMIT, batch=batch)
    assert_equal(found, alone("own", folders))


@pytest.mark.full
def test_stages_take_a_loss_of_the_trainers_own(folders: Path) -> None:
    (wanted,) = run_ranks(train, 1, "own", folders / "own loss", None, timeout=LIMIT, own_loss=True)
    config = {"zero_optimization": {"stage": 1}, "mesh": {"pipeline": 2}}
    (found, *_) = run_ranks(train, 2, "own", folders / "staged loss", config, timeout=LIMIT, own_loss=True)
    assert_equal(found, wanted)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, RANKS])
@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("library", ["own", "lightning", "lightning-sgd"])
def test_our_trainers_take_optimizers_of_torch_with_states_on_the_host(
    library: str, number: int, ranks: int, folders: Path
) -> None:
    pytest.importorskip(NEEDS.get(library, "transformers"))
    zero = {"stage": number, "offload_optimizer": {"device": "cpu"}}
    more: dict[str, Any] = {"batch": BATCH // ranks} if library == "own" else {}
    folder = folders / f"{library}-host-{number}-{ranks}"
    (found, *_) = run_ranks(train, ranks, library, folder, {"zero_optimization": zero}, timeout=LIMIT, **more)
    assert_equal(found, alone(library, folders))
