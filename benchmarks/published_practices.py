"""Facts of published measurements that their rows do not repeat: habits, sizes of models, and fitted constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from zeromesh.apps.plan.machine.rates import Habits


class Constants(NamedTuple):
    """The fitted constants of a GPU in a source; None: that of the preset."""

    products: float | None = None  # share of the operations that large products reach
    links: float | None = None  # share of the bandwidth between nodes that collectives reach
    memory: float | None = None  # share of the memory's bandwidth that kernels reach
    host: float | None = None  # share of the preset's bandwidth of the host's memory that updates reach
    step: float | None = None  # seconds of a step beside kernels: data, launches of the update, reports
    block: float | None = None  # seconds beside kernels of a block with experts: launches, and numbers read by the host


DEFAULT = Habits()


@dataclass(frozen=True)
class Practice:
    """Facts of a source's framework that its rows do not repeat."""

    habits: Habits = DEFAULT
    fused_attention: bool = True
    wire: int = 2  # bytes of an element of a gradient that is sent
    row: int | None = None  # ZeRO number that its states behave as; None: as the row says
    sequence: bool = False  # sequence parallelism where the row does not say it
    keeps: bool = False  # gathered parameters and whole gradients stay on a pipeline's ranks until the update
    chunks: int = 1  # the most stages of a pipeline rank where the source interleaves without saying how many
    counts_recompute: bool = False  # operations that it reports are those that were executed
    causal: float = 1.0  # share of attention's products that it counts
    shape: Mapping[str, Any] = field(default_factory=dict)  # fields of the model's shape
    cluster: Mapping[str, Any] = field(default_factory=dict)  # arguments of presets.cluster for its machine
    fitted: tuple[str, str] = ("products", "links")  # constants of its GPUs that are fitted
    fitted_experts: tuple[str, str] = ("products", "block")  # of its mixtures
    own_kernels: bool = True  # it trains models of its own kernels, where ZeroMesh runs the modules of a PyTorch model
    why: str = ""


# Megatron's pipelines send in turn with computation, each tensor rank a part of the message; its loss over a divided
# vocabulary makes seven passes over fp32 logits (Narayanan et al., 2021, sections 4.1 and 5.8).
PIPELINE_OUTER = ("pipeline", "replicate", "data", "context", "tensor")  # order of the ranks of Megatron and torchtitan
MEGATRON = Habits(
    dtype="fp16", order=PIPELINE_OUTER, reduces_early=False, publishes_early=False, messages_block=True, messages_scattered=True,
    sums_once=True, loss=1.6,
)  # fmt: skip
# Of 2022 on: a gradient's sum over the tensor ranks goes on beside the product of a weight's gradient.
MEGATRON_2022 = replace(MEGATRON, joins_hidden_back=1.0)
CORE = Habits(order=PIPELINE_OUTER, joins_hidden=0.6, joins_hidden_back=1.0, sums_once=True, loss=1.6)
# DeepSpeed of 2021 and 2022: gathers of single parameters in one ring, and reductions that the backward waits for.
DEEPSPEED = Habits(dtype="fp16", rails=1, reduces_early=False)
# FlashAttention-2 reaches 0.35 of an H100's peak, and 0.6 of an A100's (Shah et al., FlashAttention-3, 2024).
HOPPER_FLASH_2 = 0.62
# Megatron's experts: a token is sent to each of its experts unless a row names another dispatcher; routing is forced to
# be even in its benchmarks, unless a row says that it is real.
EXPERTS = replace(CORE, joins_hidden=0.8, copies="expert", uneven=1.0)
DISPATCHERS = {"alltoall": "expert", "deepep": "node", "hybridep": "node"}
OVERLAPPED = 0.7  # share of the exchanges that goes on beside other micro-batches' computation where a row says so

# fmt: off
PRACTICES: dict[str, Practice] = {
    "megatron2021": Practice(MEGATRON, fused_attention=False, counts_recompute=True,
                             why="attention scores go through memory; gradients are reduced after the backward"),
    "megatron2021/sharded": Practice(DEEPSPEED, fused_attention=False, counts_recompute=True,
                                     why="DeepSpeed of 2021, which communicated over one link per node"),
    "megatron_a100_2020": Practice(MEGATRON, fused_attention=False),
    "korthikanti2022": Practice(MEGATRON_2022, fused_attention=False, fitted=("products", "memory"),
                                why="attention scores go through memory"),
    "megatron_h100": Practice(CORE, wire=4, chunks=24, sequence=True, fitted=("products", "step"),
                              why="stages and micro-batches are not published; assumed one block per stage"),
    "megascale2024": Practice(replace(MEGATRON_2022, dtype="bf16"), wire=4, row=1, sequence=True,
                              why="gradients are reduced after the backward"),
    "megascale2024/MegaScale": Practice(replace(CORE, joins_hidden=0.9, fusion=0.35), wire=4, row=1, sequence=True,
                                        why="all reductions overlap; blocks with one norm; fused kernels"),
    "llama3": Practice(CORE, row=1, chunks=8, causal=0.5, sequence=True, why="the number of stages is not published"),
    "torchtitan": Practice(Habits(order=PIPELINE_OUTER, selective=0.45, attention=HOPPER_FLASH_2), wire=4, sequence=True, keeps=True,
                           own_kernels=False,
                           why="FSDP2; every second matrix product is recomputed"),
    "mosaic": Practice(Habits(attention=HOPPER_FLASH_2), fitted=("products", "step"), shape={"dropout": False},
                       own_kernels=False,
                       why="FSDP1 with FlashAttention in Triton"),
    "simumax_b200": Practice(replace(CORE, joins_hidden=0.0), wire=4, fitted=("products", "memory")),
    "nemo": Practice(EXPERTS, sequence=True, fitted=("products", "memory")),
    "azure2022": Practice(DEEPSPEED, fused_attention=False, counts_recompute=True, own_kernels=False,
                          why="DeepSpeed, over one link per node"),
    "bigscience": Practice(MEGATRON, fused_attention=False, counts_recompute=True,
                           cluster={"gpus": 4, "between": "4 x edr"},
                           why="nodes of four V100 and four 100 Gbit/s links; layer sizes are guessed from the "
                               "number of parameters"),
    "stas00": Practice(Habits(host_traffic=1.76), causal=0.5, fitted=("products", "host"), own_kernels=False,
                       why="the host updates the optimizer states, and casts gradients and parameters apart"),
    "dgxc": Practice(EXPERTS, sequence=True, fitted=("products", "memory")),
    "dgxc/MaxText FSDP": Practice(replace(CORE, fusion=0.5), row=3, fitted=("products", "memory"), why="MaxText"),
    "kempner": Practice(Habits(attention=HOPPER_FLASH_2), sequence=True, own_kernels=False, why="FSDP2"),
    "torchao": Practice(Habits(selective=0.45, attention=HOPPER_FLASH_2), wire=4, own_kernels=False, why="FSDP2"),
    "automodel": Practice(Habits(order=PIPELINE_OUTER, copies="node", uneven=1.0, sums_once=True), wire=4, keeps=True,
                          why="FSDP2; gradients are reduced once for an update"),
    "moe_zoo": Practice(EXPERTS, wire=4, sequence=True, why="Megatron-LM"),
    "mcore_gb200": Practice(EXPERTS, wire=4, fitted=("products", "memory"), why="Megatron-LM"),
    "bridge_notes": Practice(EXPERTS, wire=4, sequence=True, why="Megatron-LM"),
    "primus": Practice(EXPERTS, wire=4, why="Megatron-LM"),
    "primus/sharded": Practice(Habits(uneven=1.0), wire=4, own_kernels=False, why="FSDP2"),
    "threads": Practice(Habits(), own_kernels=False, why="DeepSpeed"),
    "zeromesh": Practice(wire=2, own_kernels=False, fitted=("products", "memory")),
    "nanotron_bench": Practice(wire=4),
}
# fmt: on

# Sizes of models that sources name without them: layers, hidden, heads. MosaicML's configurations of MPT (2023).
NAMED: dict[str, tuple[int, int, int]] = {
    "mpt-125m": (12, 768, 12),
    "mpt-350m": (24, 1024, 16),
    "mpt-760m": (24, 1536, 12),
    "mpt-1b": (24, 2048, 16),
    "mpt-3b": (32, 2560, 20),
}
# Llama 3 under the names of other sources, by billions of parameters: layers, hidden, heads, width of the MLP.
LLAMA_3 = {"8b": (32, 4096, 32, 14336), "70b": (80, 8192, 64, 28672), "405b": (126, 16384, 128, 53248)}
WORDS = {"mpt": 50368, "gpt": 51200}  # vocabulary by a model's first word, padded as the frameworks do
ASPECT = 128  # width divided by layers of a GPT whose sizes nobody says (Kaplan et al., 2020: 30 to 200 cost little)

# By source and GPU, fitted on 2026-11-25 and 2026-11-28 by ``published_fit.py`` to the half of our rows that ``in_fit``
# chooses; the other half is predicted with them.
CONSTANTS: dict[tuple[str, str], Constants] = {
    ("megatron2021", "A100-80GB"): Constants(products=0.794, links=0.655),
    ("korthikanti2022", "A100-80GB"): Constants(products=0.924, memory=0.531),
    ("megascale2024", "A100"): Constants(products=0.752, links=0.37),
    ("megatron_h100", "H100-80GB"): Constants(products=0.642, step=0.0818),
    ("llama3", "H100-80GB"): Constants(products=0.724, links=0.701),
    ("torchtitan", "H100-96GB"): Constants(products=0.496, links=0.0798),
    ("torchtitan", "H200-141GB"): Constants(products=0.518, links=0.694),
    ("simumax_b200", "B200-180GB"): Constants(products=0.465, memory=0.752),
    ("mosaic", "H100-80GB"): Constants(products=0.525, step=0.0521),
    ("mosaic", "A100-80GB"): Constants(products=0.755, step=0.109),
    ("mosaic", "A100-40GB"): Constants(products=0.703, step=0.0436),
    ("nemo", "DGX-GB300"): Constants(products=0.775, memory=1),
    ("nemo", "DGX-H100"): Constants(products=0.807, memory=0.857),
    ("nemo", "DGX-GB200"): Constants(products=0.573, memory=1),
    ("nemo", "DGX-B200"): Constants(products=0.619, memory=0.767),
    ("bigscience", "V100-16GB"): Constants(products=0.906, links=0.0888),
    ("bigscience", "V100-32GB"): Constants(products=0.692, links=0.102),
    ("stas00", "H200-141GB"): Constants(products=0.903, host=0.462),
    ("stas00", "B200-180GB"): Constants(products=0.829, host=0.492),
    ("azure2022", "A100-80GB"): Constants(products=0.845, links=0.725),
    ("dgxc", "H100-80GB"): Constants(products=0.675, memory=1),
    ("dgxc", "GB200"): Constants(products=0.54, memory=0.809),
    ("kempner", "H200-141GB"): Constants(products=0.629, links=0.244),
    ("torchao", "H100-80GB"): Constants(products=0.328, links=0.7),
    ("torchao", "MI300X-192GB"): Constants(products=0.246, links=0.7),
    ("torchao", "B200-180GB"): Constants(products=0.241, links=0.7),
    ("zeromesh", "H200-141GB"): Constants(products=0.524, memory=0.726),
}
