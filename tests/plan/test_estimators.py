"""DeepSpeed's estimators: the formulas of the ZeRO paper where nothing is sharded further, and bad input."""

import pytest
from torch import nn

from zeromesh import zero

P = 2_851_000_000


@pytest.mark.parametrize(("gpus", "nodes"), [(1, 1), (8, 1), (8, 4)])
def test_zero_2_keeps_parameters_whole_and_shares_the_rest(gpus: int, nodes: int) -> None:
    ranks = gpus * nodes
    host, device = zero.estimate_zero2_model_states_mem_needs(P, gpus, nodes, False, 1.0)
    # bf16 parameters, a part of fp32 gradients, master and two moments.
    assert device == pytest.approx(2 * P + 16 * P / ranks, rel=1e-3)
    assert host == pytest.approx(4 * P * gpus, rel=1e-6)  # the model itself, before it is placed
    host, device = zero.estimate_zero2_model_states_mem_needs(P, gpus, nodes, True, 1.5)
    assert device == pytest.approx(2 * P, rel=1e-6)
    # One rank has nothing to sum, and keeps gradients as the backward makes them, in 16 bits.
    assert host == pytest.approx(1.5 * max(4 * P * gpus, (14 if ranks == 1 else 16) * P / nodes), rel=1e-3)


def test_zero_3_shares_all_but_two_gathered_layers() -> None:
    layer = 32_000_000
    host, device, largest = zero.estimate_zero3_model_states_mem_needs(P, layer, 8, 1, False, False, True, 1.0)
    assert device == pytest.approx(16 * P / 8 + 2 * 2 * layer, rel=1e-2)  # the master is the parameter
    assert host == 4 * layer * 8
    assert largest == 2 * layer
    host, device, _ = zero.estimate_zero3_model_states_mem_needs(P, layer, 8, 1, True, True, True, 1.0)
    assert device == pytest.approx(2 * 2 * layer, rel=1e-2)
    assert host == pytest.approx(18 * P, rel=1e-2)


def test_a_model_is_measured_and_all_options_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10))
    zero.estimate_zero3_model_states_mem_needs_all_live(model, 2)
    zero.estimate_zero2_model_states_mem_needs_all_live(model, 2)
    out = capsys.readouterr().out
    assert out.count("GiB |") == 2 * (6 + 2)
    assert "1 M parameters, 1 M in the largest layer" in out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((0,), "total_params"), ((10, 0), "num_gpus_per_node"), ((10, 1, 0), "num_nodes"),
     ((10, 1, 1, True, 0.5), "additional_buffer_factor")],
)  # fmt: skip
def test_impossible_sizes_are_refused(arguments: tuple[int, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        zero.estimate_zero2_model_states_mem_needs(*arguments)
    with pytest.raises(ValueError, match="largest_layer_params is 11"):
        zero.estimate_zero3_model_states_mem_needs(10, 11)
