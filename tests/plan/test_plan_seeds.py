"""The largest question of the guide, and the same node with two kinds of links."""

import pytest

from zeromesh.plan.presets import cluster
from zeromesh.plan.search import PlanCandidate, search
from zeromesh.plan.shape import TransformerCost, TransformerShape
from zeromesh.plan.space import ModelLimits, PlanRequest


def best(shape: TransformerShape, machine: object, batch: int, sequence: int) -> PlanCandidate:
    request = PlanRequest(TransformerCost(shape), machine, batch, sequence, ModelLimits(shape.heads))  # type: ignore[arg-type]
    found = search(request).best
    assert found is not None
    return found


def test_without_nvlink_a_node_sends_activations_instead_of_parameters() -> None:
    shape = TransformerShape(60, 6656, 52, 32000, width=17920, gated=True, biases=False, tied=False)  # 33 B
    fast, slow = (best(shape, cluster("a100-80gb", 8, inside=link), 8, 2048) for link in ("nvlink3", "pcie4-staged"))
    # Its states fill most of each card, whether they are sharded or cut into stages. Over NVLink two ranks share each
    # layer, and parameters are gathered beside so little computation; over PCIe neither would keep up.
    assert (fast.layout.stage, fast.layout.data, fast.layout.tensor) == (3, 4, 2)
    assert fast.time.waits["compute"] > 0.9 * fast.time.seconds
    assert (slow.layout.stage, slow.layout.data, slow.layout.pipeline) == (0, 1, 8)
    assert fast.time.seconds < slow.time.seconds


@pytest.mark.full
def test_a_trillion_parameters_on_1024_devices() -> None:
    # The model of Narayanan et al., 2021, table 1, which they trained with 8 tensor and 64 pipeline ranks on 3,072.
    found = best(TransformerShape(128, 25600, 160, 51200), cluster("a100-80gb", 8, 128), 3072, 2048)
    # Tensor ranks fill a node; a quarter of the models' 18 TB of states are in each of four replicas' stages.
    assert found.layout.tensor == 8
    assert found.layout.pipeline == 32
    assert found.fullest.device < 80 * 2**30
