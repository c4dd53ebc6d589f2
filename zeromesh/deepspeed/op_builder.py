"""``deepspeed.ops.op_builder``: names of operators, which programs ask for before they use them."""

from __future__ import annotations

from typing import Any


class OpBuilder:
    """Stands for what compiles an operator in DeepSpeed; here all come with the package, and nothing is compiled."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return whether the operator can be used."""
        return bool(compatible_ops[self.NAME])

    def load(self, verbose: bool = True) -> Any:
        """Raise NotImplementedError: operators have no functions beside the optimizers that use them."""
        raise NotImplementedError(
            f"{type(self).__name__}().load() is not available: nothing is compiled at run time; use the classes of "
            "deepspeed.ops, such as FusedAdam"
        )


# Operators that there are, and others, which programs leave out; each is in the name of a class of DeepSpeed.
_THERE = {
    "FusedAdam": "fused_adam", "CPUAdam": "cpu_adam", "CPUAdagrad": "cpu_adagrad", "CPULion": "cpu_lion",
    "FusedLamb": "fused_lamb", "FusedLion": "fused_lion",
}  # fmt: skip
_LACKING = {
    "AsyncIO": "async_io", "GDS": "gds", "Utils": "utils", "Inference": "transformer_inference",
    "InferenceCutlass": "cutlass_ops", "InferenceCore": "inference_core_ops", "RaggedOps": "ragged_ops",
    "RaggedUtils": "ragged_device_ops", "Transformer": "transformer", "Quantizer": "quantizer",
    "FPQuantizer": "fp_quantizer", "SparseAttn": "sparse_attn", "RandomLTD": "random_ltd",
    "StochasticTransformer": "stochastic_transformer", "SpatialInference": "spatial_inference",
    "EvoformerAttn": "evoformer_attn", "DeepCompile": "dc", "PinMemory": "pin_memory",
}  # fmt: skip

compatible_ops = dict.fromkeys(_THERE.values(), True) | dict.fromkeys(_LACKING.values(), False)
"""Names of operators to whether they can be used."""

builders = {
    f"{name}Builder": type(f"{name}Builder", (OpBuilder,), {"NAME": operator})
    for name, operator in (_THERE | _LACKING).items()
}
"""Builders by the name of their class."""


def __getattr__(name: str) -> Any:
    if name in builders:
        return builders[name]
    raise AttributeError(f"deepspeed.ops.op_builder has no {name}; it has OpBuilder and {', '.join(builders)}")
