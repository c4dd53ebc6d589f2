"""The arithmetic of batch sizes and of the mesh."""

import itertools
from pathlib import Path

import pytest

from zeromesh import Settings
from zeromesh.config.batch_sizes import BatchSizes, solve_batch
from zeromesh.config.errors import ConfigError

CONFIGS = Path(__file__).parent / "configs"


@pytest.mark.parametrize(("micro", "accumulation", "data_size"), list(itertools.product((1, 3), (1, 4), (1, 2, 5))))
@pytest.mark.parametrize("given", list(itertools.product((False, True), repeat=3)), ids=str)
def test_any_consistent_subset_of_the_sizes_gives_all(micro, accumulation, data_size, given) -> None:
    train = micro * accumulation * data_size
    three = (train if given[0] else None, micro if given[1] else None, accumulation if given[2] else None)
    if given == (False, False, True):
        with pytest.raises(ConfigError, match="gradient_accumulation_steps = .* alone"):
            solve_batch(*three, data_size)
        return
    batch = solve_batch(*three, data_size)
    assert batch.train == batch.micro * batch.accumulation * data_size
    for solved, size in zip((batch.train, batch.micro, batch.accumulation), three, strict=True):
        assert size is None or solved == size
    if given in {(False, False, False), (False, True, False), (True, False, False)}:
        assert batch.accumulation == 1
    if given == (False, False, False):
        assert batch.micro == 1


@pytest.mark.parametrize(
    ("train", "micro", "accumulation", "data_size", "expected"),
    [
        (30, 4, None, 2, ["= 30", "4 x 2 = 8", "24 or 32"]),
        (30, None, 4, 2, ["= 30", "gradient_accumulation_steps x data-parallel ranks = 4 x 2 = 8", "24 or 32"]),
        (7, None, None, 2, ["= 7", "data-parallel ranks", "6 or 8"]),
        (1, None, None, 4, ["= 1", "work: 4"]),
        (32, 4, 2, 2, ["= 32", "4 x 2 x 2 = 16", "train_batch_size to 16", "steps to 4", "per_gpu to 8"]),
        (10, 4, 2, 2, ["= 10", "4 x 2 x 2 = 16", "set train_batch_size to 16"]),
        (None, None, 3, 2, ["gradient_accumulation_steps = 3", "train_micro_batch_size_per_gpu"]),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_arithmetic_and_what_would(
    train: int | None, micro: int | None, accumulation: int | None, data_size: int, expected: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        solve_batch(train, micro, accumulation, data_size)
    for part in expected:
        assert part in str(caught.value)


@pytest.mark.parametrize(("train", "micro", "data_size"), [(30, 4, 2), (7, 1, 3), (1, 2, 2), (100, 7, 3)])
def test_the_sizes_that_an_error_names_do_work(train: int, micro: int, data_size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        solve_batch(train, micro, None, data_size)
    named = [int(word) for word in str(caught.value).rpartition("work: ")[2].split(" or ")]
    assert named
    for size in named:
        assert solve_batch(size, micro, None, data_size).train == size
        assert abs(size - train) < micro * data_size


def test_resolving_fills_the_settings_and_leaves_the_old_ones() -> None:
    settings = Settings.load({"train_batch_size": 24, "gradient_accumulation_steps": 3})
    resolved = settings.resolve(4)
    assert BatchSizes(24, 2, 3) == BatchSizes(
        resolved.train_batch_size, resolved.train_micro_batch_size_per_gpu, resolved.gradient_accumulation_steps
    )
    assert resolved.data_size == 4
    assert settings.train_micro_batch_size_per_gpu is None


def test_resolved_settings_resolve_again_for_the_same_ranks_only() -> None:
    resolved = Settings.load({"train_batch_size": 8}).resolve(2)
    assert resolved.resolve(2) == resolved
    with pytest.raises(ConfigError, match="4 x 1 x 4 = 16"):
        resolved.resolve(4)


AXES = ("replicate", "data", "pipeline", "context", "tensor", "expert")


def sizes(replicate: int, data: int) -> dict[str, int]:
    return dict.fromkeys(AXES, 1) | {"replicate": replicate, "data": data}


@pytest.mark.parametrize(
    ("document", "world_size", "expected"),
    [
        ({}, 1, sizes(1, 1)),
        ({}, 6, sizes(1, 6)),
        ({"mesh": {"data": 4}}, 4, sizes(1, 4)),
        ({"mesh": {"replicate": 2}}, 8, sizes(2, 4)),
        ({"mesh": {"replicate": 2, "data": 3}}, 6, sizes(2, 3)),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, 8, sizes(4, 2)),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, 8, sizes(1, 8)),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}, "mesh": {"data": 2}}, 8, sizes(4, 2)),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}, "mesh": {"replicate": 4}}, 8, sizes(4, 2)),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}, 8, sizes(2, 4)),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 1}}, 8, sizes(1, 8)),
    ],
)
def test_the_mesh_fills_the_world(document: dict[str, object], world_size: int, expected: dict[str, int]) -> None:
    assert Settings.load(document).resolve_mesh(world_size) == expected


@pytest.mark.parametrize(
    ("document", "world_size", "expected"),
    [
        ({"mesh": {"data": 3}}, 4, "data = 3, but the run has 4 ranks"),
        ({"mesh": {"data": 2, "replicate": 3}}, 4, "replicate x data = 3 x 2 = 6, but the run has 4 ranks"),
        (
            {"mesh": {"replicate": 3}},
            4,
            "replicate = 3, which does not divide the 4 ranks.*one of 1, 2, 4; or start 3 or 6 ranks",
        ),
        ({"zero_optimization": {"mics_shard_size": 3}}, 4, "data = 3, which does not divide"),
        (
            {"zero_optimization": {"mics_shard_size": 2}, "mesh": {"data": 4}},
            4,
            "mics_shard_size = 2, but mesh.data = 4",
        ),
        (
            {"zero_optimization": {"mics_shard_size": 2}, "mesh": {"replicate": 3}},
            4,
            "3 x 2 = 6, but the run has 4 ranks",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_with_the_arithmetic(document, world_size, expected) -> None:
    with pytest.raises(ConfigError, match=expected):
        Settings.load(document).resolve_mesh(world_size)


@pytest.mark.parametrize(("name", "expected"), [("mics", sizes(4, 2)), ("hpz", sizes(2, 4))])
def test_the_resolved_mesh_is_part_of_the_resolved_settings(name: str, expected: dict[str, int]) -> None:
    settings = Settings.load(CONFIGS / f"{name}.json")
    mesh = settings.resolve_mesh(8)
    resolved = settings.resolve(mesh["replicate"] * mesh["data"], mesh)
    assert resolved.mesh.model_dump() == expected
    assert resolved.resolve_mesh(8) == expected
