"""``deepspeed.elasticity``: the batch size, the numbers of GPUs, and the errors of DeepSpeed's last version with it."""

from typing import Any

import pytest
from torch import nn

from zeromesh import deepspeed

ds: Any = deepspeed
SECTION: dict[str, Any] = {
    "enabled": True, "max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32,
    "max_gpus": 1500, "version": 0.1,
}  # fmt: skip


def compute(world_size: int = 0, of: str = "0.19.8", return_microbatch: bool = False, **section: Any) -> Any:
    config = {"elasticity": {**SECTION, **section}}
    return ds.elasticity.compute_elastic_config(config, of, world_size, return_microbatch)


def test_the_batch_and_the_numbers_of_gpus_are_deepspeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, gpus = compute()
    assert (batch, len(gpus)) == (9792, 23)
    assert all(batch % number == 0 for number in gpus)
    assert compute(64)[2] == 17
    assert compute(4, max_train_batch_size=32, micro_batch_sizes=[1, 2, 3, 7], min_gpus=1)[2] == 3
    monkeypatch.setenv("WORLD_SIZE", "16")
    limits = {"max_train_batch_size": 64, "min_gpus": 16, "max_gpus": 16, "version": 0.2, "num_gpus_per_node": 8}
    for shared, micro, expected in ((1, [4, 8], 4), (2, [4, 8], 8), (4, [4, 8], 8), (2, [8], 8), (4, [8], 8)):
        found = compute(0, return_microbatch=True, model_parallel_size=shared, micro_batch_sizes=micro, **limits)
        assert found[2] == expected


@pytest.mark.parametrize(
    "given",
    [
        {"enabled": False}, {"version": 0.3}, {"micro_batch_sizes": [1, -1]}, {"micro_batch_sizes": 5},
        {"min_gpus": -1}, {"micro_batch_sizes": [2, 0.5]}, {"model_parallel_size": 4}, {"max_gpus": -1},
    ],
)  # fmt: skip
def test_wrong_sections_are_deepspeeds_errors(given: dict[str, Any]) -> None:
    with pytest.raises(ds.elasticity.config.ElasticityError):
        compute(**given)


def test_other_errors_are_deepspeeds() -> None:
    with pytest.raises(ds.elasticity.config.ElasticityIncompatibleWorldSize, match="128 ranks"):
        compute(128)
    with pytest.raises(ds.elasticity.ElasticityError, match="at least 0.3.8"):
        compute(of="0.2")
    config = {"train_batch_size": 2, "optimizer": {"type": "Adam"}, "elasticity": SECTION}
    with pytest.raises(ds.elasticity.ElasticityError, match="set the batch sizes directly"):
        ds.initialize(model=nn.Linear(2, 2), config=config)
