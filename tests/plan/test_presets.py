import statistics
from dataclasses import replace

import pytest

from zeromesh.apps.plan.machine.cluster import Machine
from zeromesh.apps.plan.machine.presets import CARDS, LINKS, NODES, USUAL, cluster, find_device, find_link
from zeromesh.base.devices import ACCELERATORS, find_accelerator

# As torch.cuda.get_device_name gives them, and as people write them; dense 16-bit operations of the data sheets.
NAMES = {
    "Tesla V100-SXM2-16GB": ("v100-16gb", 125e12),
    "Tesla V100-SXM3-32GB": ("v100-32gb", 125e12),
    "Tesla V100-PCIE-32GB": ("v100-pcie-32gb", 112e12),
    "NVIDIA A100-SXM4-40GB": ("a100-40gb", 312e12),
    "NVIDIA A100 80GB PCIe": ("a100-pcie-80gb", 312e12),
    "A100-80GB": ("a100-80gb", 312e12),
    "a100 40 GB": ("a100-40gb", 312e12),
    "NVIDIA H100 80GB HBM3": ("h100", 989.5e12),
    "NVIDIA H100 PCIe": ("h100-pcie", 756.5e12),
    "h100": ("h100", 989.5e12),
    "DGX-B200": ("b200", 2250e12),
    "NVIDIA GB200": ("gb200", 2500e12),
    "AMD Instinct MI300X": ("mi300x", 1307.4e12),
    "4090": ("rtx-4090", 165.2e12),
    "RTX4090": ("rtx-4090", 165.2e12),
    "NVIDIA L4": ("l4", 121e12),
    "NVIDIA L40S": ("l40s", 362e12),
    "NVIDIA A10G": ("a10g", 70e12),
    "Tesla T4": ("t4", 65e12),
}


@pytest.mark.parametrize("name", NAMES)
def test_devices_are_found_by_torch_names_and_short_ones(name: str) -> None:
    short, flops = NAMES[name]
    device = find_device(name)
    assert device == find_device(short)
    assert device.flops[device.half] == flops
    assert device.source


def test_every_row_is_found_by_its_own_names_and_has_possible_figures() -> None:
    for row in ACCELERATORS:
        assert find_accelerator(row.name) is row
        assert find_accelerator(row.short) is row
        assert row.fp32 <= row.fp16 <= 32 * row.fp32
        assert row.fp8 in (0, pytest.approx(2 * row.fp16, rel=0.03))
        assert row.source


@pytest.mark.parametrize("name", ["NVIDIA L40", "H20", "80gb", "RTX 4090 Laptop GPU", "A100 MIG 1g.10gb", ""])
def test_other_devices_are_not_taken_for_similar_ones(name: str) -> None:
    assert find_accelerator(name) is None
    with pytest.raises(ValueError, match=r"no known GPU.*Known are v100-32gb.*zeromesh doctor --save machine.json"):
        find_device(name)


def test_an_unknown_device_gets_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean h100-pcie"):
        find_device("h100-pice")


def test_every_node_and_device_makes_a_machine_that_its_file_can_hold() -> None:
    for name, row in NODES.items():
        machine = cluster("" if row.device else "rtx-4090", node=name, nodes=3)
        assert Machine.from_dict(machine.as_dict()) == machine
        assert machine.devices == 3 * row.devices
    for row in ACCELERATORS:
        assert cluster(row.short).nodes[0][0].device.name == row.name


def test_the_tables_name_only_what_there_is() -> None:
    shorts = {row.short for row in ACCELERATORS}
    assert {row.device for row in NODES.values()} <= shorts | {""}
    assert {*CARDS, *USUAL} <= shorts
    assert {name for _, names in CARDS.values() for name in names} <= set(NODES)
    assert {name for names in USUAL.values() for name in names} <= set(NODES)


def test_a_command_line_gives_the_usual_node_of_a_device() -> None:
    machine = cluster("h100", gpus=8, nodes=2)
    [(node, count)] = machine.nodes
    assert (count, node.name, node.devices, node.cores) == (2, "dgx-h100", 8, 112)
    assert (node.inside.bandwidth, machine.between.bandwidth, machine.between.shared) == (450e9, 50e9, 1)
    assert node.host_memory == 2048 * 2**30
    assert any("usual" in note for note in machine.notes)
    assert cluster("v100", gpus=16).nodes[0][0].name == "dgx-2"
    names = [cluster("4090", gpus=count).nodes[0][0].name for count in (1, 2, 3, 5)]
    assert names == ["workstation-1", "workstation-2", "workstation-4", "pcie-server-8"]


def test_some_devices_of_a_node_get_their_part_of_its_host() -> None:
    [(node, _)] = cluster("a100-80gb", gpus=2).nodes
    assert (node.devices, node.cores, node.host_memory) == (2, 32, 512 * 2**30)
    assert any("2 of the 8 devices" in note for note in cluster("a100-80gb", gpus=2).notes)
    [(node, _)] = cluster("v100", gpus=1, host_memory=1.5e12).nodes
    assert (node.host_memory, node.host.shared) == (1.5e12, 1)


@pytest.mark.parametrize(
    ("text", "devices", "bandwidth", "shared"),
    [
        ("nvlink4", 8, 450e9, 1),
        ("8 x ndr", 8, 50e9, 1),
        ("4 x pcie4", 8, 31.5e9, 2),
        ("32 x efa-100", 8, 50e9, 1),  # 3,200 Gbit for 8 devices
        ("3 x ndr", 8, 150e9, 8),  # no device has one of its own
        ("1xInfiniBand-NDR", 8, 50e9, 8),
        ("1 x 10 Gbit", 4, 1.25e9, 4),
        ("100 Mbit", 1, 12.5e6, 1),
        ("12.5 GB/s", 1, 12.5e9, 1),
        ("12.5 Gb/s", 1, 1.5625e9, 1),
    ],
)
def test_links_are_shared_by_the_devices_of_a_node(text: str, devices: int, bandwidth: float, shared: int) -> None:
    link = find_link(text, devices)
    assert (link.bandwidth, link.shared) == (pytest.approx(bandwidth), shared)


def test_networks_have_the_adapters_of_the_node_and_ethernet_one() -> None:
    assert cluster("h100", between="hdr").between == find_link("8 x hdr", 8)
    assert cluster("h100", between="10 Gbit").between == find_link("1 x 10 Gbit", 8)
    assert cluster("h100", between="2 x ndr").between == find_link("2 x ndr", 8)
    assert cluster("a100", inside="pcie4").nodes[0][0].inside.bandwidth == LINKS["pcie4"].bandwidth * 1e9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "give a GPU"),
        ({"gpu": "h1000"}, "did you mean h100"),
        ({"gpu": "h100", "gpus": 0}, "gpus is 0"),
        ({"gpu": "h100", "gpus": -1}, "gpus is -1"),
        ({"gpu": "h100", "gpus": 2.0}, "gpus is 2.0"),
        ({"gpu": "h100", "nodes": 0}, "nodes is 0"),
        ({"gpu": "h100", "gpus": 16}, "16 devices in a node are more than the 8 of dgx-h100; take more nodes"),
        ({"node": "dgx-h10"}, "did you mean dgx-h100"),
        ({"node": "workstation-2"}, "name the GPU too"),
        ({"gpu": "h100", "inside": "nvlink9"}, "did you mean nvlink"),
        ({"gpu": "h100", "between": "0 Gbit"}, "above 0"),
        ({"gpu": "h100", "between": "0 x ndr"}, "above 0"),
        ({"gpu": "h100", "between": "-5 Gbit"}, "no known link"),
        ({"gpu": "h100", "price": float("nan")}, "price is nan"),
        ({"gpu": "h100", "host_memory": -1.0}, "host_memory is -1.0"),
    ],
)
def test_impossible_command_lines_are_refused(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cluster(**arguments)


# Rows, columns and sums, and 10^12 operations per second in bf16 on an H100 SXM: OpenXLA, 2025, the table of its cost
# model (matmul_interpolator_data.h), one product at a time.
MEASURED = [
    ((1024, 2048, 256), 139.52), ((256, 2048, 256), 41.84), ((4096, 512, 512), 238.82), ((512, 256, 512), 21.79),
    ((256, 2048, 4096), 285.87), ((4096, 1024, 512), 343.71), ((2048, 2048, 2048), 631.98), ((256, 512, 4096), 91.68),
    ((256, 1024, 256), 22.67), ((4096, 4096, 256), 392.16), ((2048, 512, 2048), 347.71), ((4096, 4096, 4096), 783.33),
    ((512, 4096, 1024), 373.35), ((512, 256, 4096), 91.06), ((256, 1024, 4096), 172.29), ((4096, 2048, 512), 447.02),
    ((2048, 256, 1024), 135.85), ((2048, 1024, 2048), 523.27), ((512, 256, 256), 11.46), ((1024, 256, 1024), 68.34),
    ((4096, 256, 2048), 304.69), ((1024, 1024, 2048), 349.98), ((256, 4096, 2048), 324.59),
    ((1024, 512, 2048), 220.03), ((512, 2048, 1024), 232.61), ((4096, 512, 1024), 370.77),
    ((1024, 2048, 2048), 524.29),
]  # fmt: skip


def test_products_of_a_preset_take_as_long_as_published_ones() -> None:
    times = {shape: 2e-12 * shape[0] * shape[1] * shape[2] / speed for shape, speed in MEASURED}
    device = replace(find_device("h100"), launch=0.0)
    # The smallest product is nearly all launch, which depends on the software that measured.
    smallest = min(times, key=lambda shape: times[shape])
    device = replace(device, launch=times[smallest] - device.product_seconds(*smallest, "bf16"))
    errors = [abs(device.product_seconds(*shape, "bf16") / seconds - 1) for shape, seconds in times.items()]
    assert statistics.fmean(errors) < 0.07  # as the page says
    # Without what thin and small products lose, the formula is farther off.
    plain = replace(device, product_padding=0.0, product_fill=0.0)
    without = [abs(plain.product_seconds(*shape, "bf16") / seconds - 1) for shape, seconds in times.items()]
    assert statistics.fmean(without) > 1.5 * statistics.fmean(errors)
