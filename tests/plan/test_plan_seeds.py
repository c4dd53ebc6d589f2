"""One model on the same node with two kinds of links."""

import pytest

from zeromesh.apps.plan.choose.search import PlanCandidate, search
from zeromesh.apps.plan.choose.space import ModelLimits, PlanRequest
from zeromesh.apps.plan.cost.shape import TransformerCost, TransformerShape
from zeromesh.apps.plan.machine.presets import cluster


def best(shape: TransformerShape, machine: object, batch: int, sequence: int) -> PlanCandidate:
    request = PlanRequest(TransformerCost(shape), machine, batch, sequence, ModelLimits(shape.heads))  # type: ignore[arg-type]
    found = search(request).best
    assert found is not None
    return found


@pytest.mark.full
def test_without_nvlink_a_node_sends_activations_instead_of_parameters() -> None:
    shape = TransformerShape(60, 6656, 52, 32000, width=17920, gated=True, biases=False, tied=False)  # 33 B
    fast, slow = (best(shape, cluster("a100-80gb", 8, inside=link), 8, 2048) for link in ("nvlink3", "pcie4-staged"))
    # Its states fill most of each card, whether they are sharded or cut into stages. Over NVLink parameters are
    # gathered beside the computation; over PCIe they would not keep up.
    assert (fast.layout.stage, fast.layout.pipeline) == (3, 1)
    assert fast.time.waits["compute"] > 0.9 * fast.time.seconds
    assert slow.layout.pipeline > 1
    assert fast.time.seconds < slow.time.seconds
    assert not fast.tight
    assert not slow.tight
