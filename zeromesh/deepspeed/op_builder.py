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


# Name of a builder's class without "Builder", and of its operator. Programs leave out what needs the missing ones.
_THERE = """
    FusedAdam=fused_adam CPUAdam=cpu_adam CPUAdagrad=cpu_adagrad CPULion=cpu_lion FusedLamb=fused_lamb
    FusedLion=fused_lion
"""
_MISSING = """
    AsyncIO=async_io GDS=gds Utils=utils Inference=transformer_inference InferenceCutlass=cutlass_ops
    InferenceCore=inference_core_ops RaggedOps=ragged_ops RaggedUtils=ragged_device_ops Transformer=transformer
    FPQuantizer=fp_quantizer SparseAttn=sparse_attn RandomLTD=random_ltd StochasticTransformer=stochastic_transformer
    Quantizer=quantizer SpatialInference=spatial_inference EvoformerAttn=evoformer_attn DeepCompile=dc
"""
_NAMES = dict(one.split("=") for one in f"{_THERE} {_MISSING}".split())

compatible_ops = {operator: f"={operator}" in _THERE for operator in _NAMES.values()}
"""Names of operators to whether they can be used."""

builders = {
    f"{name}Builder": type(f"{name}Builder", (OpBuilder,), {"NAME": operator}) for name, operator in _NAMES.items()
}
"""Builders by the name of their class."""


def __getattr__(name: str) -> Any:
    if name in builders:
        return builders[name]
    raise AttributeError(f"deepspeed.ops.op_builder has no {name}; it has OpBuilder and {', '.join(builders)}")
