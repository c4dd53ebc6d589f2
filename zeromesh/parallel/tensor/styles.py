"""Ways in which a module can be split over the tensor axis: one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Style:
    """Treatment of a module's parameters, and of activations that enter and leave it."""

    # Dim of the weight that is cut: ``outputs`` or ``inputs`` of a product, ``rows`` or ``width`` of an embedding;
    # None: none.
    cut: str | None = None
    sections: int = 1  # parts of that dim that are each cut on their own, as gate and up of a fused weight
    padded: bool = False  # true if any size will do, the last rank having less
    # For the input: ``enter`` (its gradient is summed), ``split`` (each rank takes its part of the last dim), ``part``
    # (it is one already, or a part is taken), ``mask``
    # (of ids, each rank looks up its own), ``copy`` (as enter, of an expert's input and weights), ``share`` (divided by
    # the number of ranks), ``divide`` (so is the parameter).
    before: str | None = None
    # For the output: ``leave`` (summed, then the bias is added), ``join`` (gathered along the last dim), ``part``
    # (gathered once something needs the whole, see ``parallel/follow/split_activation.py``), ``sum``,
    # ``sum_rotary`` (of the part for rotary embeddings, the gradient is summed), ``logits`` (a loss is computed without
    # gathering them, see ``parallel/head/logits.py``).
    after: str | None = None
    partial: bool = False  # true if ranks have shares of the gradients of its parameters, which are not cut
    kinds: tuple[str, ...] = ("linear",)  # kinds of modules that it fits


LINEAR = ("linear", "parameter")
ANY = ("linear", "embedding", "bag", "attention", "parameter", "module")

# Names are those of transformers' base_model_tp_plan, and mean the same, so that published plans can be read. Ours are
# colwise_parts and rowwise_parts, right whatever is between them; vocabulary, of a head; heads, of torch's own
# attention; moe_shared_bias, for what experts add after the layer split by rows; and moe_colwise to
# moe_rowwise_split_input, of modules that hold one layer of all experts.
STYLES: Mapping[str, Style] = {
    "colwise": Style("outputs", before="enter", kinds=("linear", "embedding", "parameter")),
    "rowwise": Style("inputs", after="leave", kinds=LINEAR),
    "packed_colwise": Style("outputs", 2, before="enter", kinds=LINEAR),
    "packed_rowwise": Style("inputs", 2, after="leave", kinds=LINEAR),
    "colwise_gather_output": Style("outputs", padded=True, before="enter", after="join"),
    "rowwise_split_input": Style("inputs", padded=True, before="split", after="leave"),
    "colwise_parts": Style("outputs", padded=True, before="enter", after="part"),
    "rowwise_parts": Style("inputs", padded=True, before="part", after="leave"),
    "embedding_rowwise": Style("rows", padded=True, before="mask", after="sum", kinds=("embedding",)),
    "embedding_colwise": Style("width", after="join", kinds=("embedding", "bag")),
    "heads": Style(before="enter", after="leave", kinds=("attention",)),
    "vocabulary": Style("outputs", padded=True, after="logits"),
    "replicated_with_grad_allreduce": Style(partial=True, kinds=ANY),
    "mla_kv_a_proj": Style(after="sum_rotary"),
    "moe_tp_experts": Style(before="copy", after="sum", kinds=("module",)),
    "moe_colwise": Style(before="copy", kinds=("module",)),
    "moe_rowwise": Style(after="sum", kinds=("module",)),
    "moe_colwise_gather_output": Style(before="copy", after="join", kinds=("module",)),
    "moe_rowwise_split_input": Style(before="split", after="sum", kinds=("module",)),
    "moe_identity_expert": Style(before="share", kinds=("module",)),
    "moe_shared_bias": Style(before="divide", partial=True, kinds=("parameter",)),
    "all_reduce": Style(before="copy", after="sum", kinds=("module",)),
    "local_params": Style(kinds=ANY),
    "replicate": Style(kinds=ANY),
}

# Names of styles in older versions of transformers.
OTHER_NAMES = {"colwise_rep": "colwise_gather_output", "rowwise_rep": "rowwise_split_input"}
