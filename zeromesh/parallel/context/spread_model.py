"""Change of a model so that its sequences are spread over the ranks of the context axis."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from zeromesh.comm.collectives import Group
from zeromesh.parallel.context import followed_sequences as followed
from zeromesh.parallel.context import huggingface_decoders as huggingface
from zeromesh.parallel.context import torch_attention as plain
from zeromesh.parallel.context.applied import SpreadSequences, Unsupported, refuse
from zeromesh.parallel.context.spread_attention import AUTO, STRATEGIES, degree_of

TAG = 8  # first of three on the context axis that nothing else uses


def apply(
    model: nn.Module,
    strategy: str,
    group: Group,
    tag: int = TAG,
    unchecked: Sequence[str] = (),
    others: Sequence[str] = (),
    degree: int = 0,
    tensor: int = 1,
) -> SpreadSequences:
    """Change a model in place: it is called as before, with whole sequences, and each rank computes its part.

    Given labels, its loss is the mean over the whole sequences, equal on all ranks; the mean of gradients over the
    ranks is the loss's gradient. All else that it returns is of this rank's tokens, in the order of
    ``sequence_order.py``.

    The model is a causal decoder of transformers with the attention sdpa, or one inside of other modules; or a torch
    module that calls ``F.scaled_dot_product_attention(is_causal=True)``, takes the positions of its tokens, and whose
    labels are those of the next tokens. Raise Unsupported for others, some only in a forward. Code that is not of
    transformers is checked, but for modules whose names fit a pattern in ``unchecked``: they compute each token by
    itself. ``degree`` is the number of ranks that share heads, which ``tensor`` ranks divide among them; 0: as many as
    the strategy takes.
    """
    if strategy not in (*STRATEGIES, AUTO):
        raise ValueError(f"the strategy is {strategy!r}, but it must be one of {', '.join((*STRATEGIES, AUTO))}")
    # To import transformers takes seconds, and a model of it cannot be there without.
    utils = sys.modules.get("transformers.modeling_utils")
    models = [module for module in model.modules() if utils is not None and isinstance(module, utils.PreTrainedModel)]
    target: Any = models[0] if models else model
    heads = getattr(target.config, "num_attention_heads", None) if models else None
    sharing = degree_of(strategy, group.size, (heads // tensor or heads) if isinstance(heads, int) else None, degree)
    applied = SpreadSequences(strategy, group, tag, sharing, 1 if strategy == AUTO and not degree else sharing)
    applied.others = others
    if group.size == 1:
        return applied
    inside = {*target.modules()}
    outside = [
        type(module)
        for module in model.modules()
        if module not in inside and type(module).__module__.partition(".")[0] not in huggingface.KNOWN
    ]
    try:
        if models:
            config = target.config
            if strategy == AUTO and outside:
                reason = f"code of {outside[0].__name__} would be given what it returns of this rank's tokens alone"
                raise refuse(type(target).__name__, reason, "take ring or ulysses if that treats tokens apart")
            if strategy == AUTO and config.get_text_config(decoder=True) is not config:
                raise refuse(type(target).__name__, "its sequences may have images or sounds, with masks of their own")
            huggingface.install(target, applied, unchecked)
        else:
            plain.install(target, applied, unchecked)
    except Unsupported as error:
        if strategy != AUTO:
            raise
        applied.follow_code(error)
    if strategy == AUTO:
        followed.install(model if outside else target, applied)
    return applied
