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


_BUILDERS = {
    "FusedAdamBuilder": ("fused_adam", True),
    "CPUAdamBuilder": ("cpu_adam", True),
    "CPUAdagradBuilder": ("cpu_adagrad", True),
    "CPULionBuilder": ("cpu_lion", True),
    "FusedLambBuilder": ("fused_lamb", True),
    "FusedLionBuilder": ("fused_lion", True),
    # Programs leave out what needs these.
    **{
        f"{name}Builder": (operator, False)
        for name, operator in (
            ("AsyncIO", "async_io"), ("GDS", "gds"), ("Utils", "utils"), ("Inference", "transformer_inference"),
            ("InferenceCutlass", "cutlass_ops"), ("InferenceCore", "inference_core_ops"), ("RaggedOps", "ragged_ops"),
            ("RaggedUtils", "ragged_device_ops"), ("Transformer", "transformer"), ("Quantizer", "quantizer"),
            ("FPQuantizer", "fp_quantizer"), ("SparseAttn", "sparse_attn"), ("RandomLTD", "random_ltd"),
            ("StochasticTransformer", "stochastic_transformer"), ("SpatialInference", "spatial_inference"),
            ("EvoformerAttn", "evoformer_attn"), ("DeepCompile", "dc"),
        )
    },
}  # fmt: skip
"""Classes of DeepSpeed, with the operator of each, and whether there is one."""

compatible_ops = {operator: there for operator, there in _BUILDERS.values()}
"""Names of operators to whether they can be used."""

builders = {name: type(name, (OpBuilder,), {"NAME": operator}) for name, (operator, _) in _BUILDERS.items()}
"""Builders by the name of their class."""


def __getattr__(name: str) -> Any:
    if name in builders:
        return builders[name]
    raise AttributeError(f"deepspeed.ops.op_builder has no {name}; it has OpBuilder and {', '.join(builders)}")
