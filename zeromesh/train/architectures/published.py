"""The built-in decoders as models of transformers: the configuration, and the origin of each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from zeromesh.config.train import ModelShape
from zeromesh.train.architectures.decoder import Sizes


class Published(NamedTuple):
    """A tensor of a model of transformers."""

    name: str
    sources: tuple[str, ...]  # names in the Decoder; their tensors are concatenated along the last dim
    transposed: bool = False  # the sources, before that

    def make(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the tensor; ``read`` returns a parameter of the ``Decoder``."""
        parts = [read(source) for source in self.sources]
        return torch.cat([part.mT for part in parts] if self.transposed else parts, dim=-1).contiguous()


# GPT-2 has one matrix for queries, keys and values, and its matrices are transposed.
GPT_BLOCK: dict[str, Sequence[str]] = {
    "ln_1": ("attention_norm",),
    "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
    "attn.c_proj": ("attention.output",),
    "ln_2": ("mlp_norm",),
    "mlp.c_fc": ("mlp.up",),
    "mlp.c_proj": ("mlp.down",),
}
LLAMA_BLOCK: dict[str, Sequence[str]] = {
    "input_layernorm": ("attention_norm",),
    "self_attn.q_proj": ("attention.query",),
    "self_attn.k_proj": ("attention.key",),
    "self_attn.v_proj": ("attention.value",),
    "self_attn.o_proj": ("attention.output",),
    "post_attention_layernorm": ("mlp_norm",),
    "mlp.gate_proj": ("mlp.gate",),
    "mlp.up_proj": ("mlp.up",),
    "mlp.down_proj": ("mlp.down",),
}


def tensors(shape: ModelShape) -> Iterator[Published]:
    """Yield all tensors of the model of transformers."""
    sizes = Sizes.of(shape)
    gpt = shape.architecture == "gpt"
    kinds = ("weight", "bias") if gpt else ("weight",)
    if gpt:
        yield Published("transformer.wte.weight", ("embedding.weight",))
        yield Published("transformer.wpe.weight", ("positions.weight",))
    else:
        yield Published("model.embed_tokens.weight", ("embedding.weight",))
    for number in range(shape.layers):
        block = f"transformer.h.{number}" if gpt else f"model.layers.{number}"
        for name, sources in (GPT_BLOCK if gpt else LLAMA_BLOCK).items():
            for kind in kinds:
                parts = tuple(f"blocks.{number}.{source}.{kind}" for source in sources)
                transposed = gpt and kind == "weight" and not name.startswith("ln_")
                yield Published(f"{block}.{name}.{kind}", parts, transposed)
    norm = "transformer.ln_f" if gpt else "model.norm"
    yield from (Published(f"{norm}.{kind}", (f"norm.{kind}",)) for kind in kinds)
    if not sizes.tied:
        yield Published("lm_head.weight", ("head.weight",))


def configuration(shape: ModelShape, end: int) -> tuple[str, dict[str, Any]]:
    """Return the name of the class in transformers, and the arguments of its configuration; ``end`` ends a text."""
    sizes = Sizes.of(shape)
    common = {
        "vocab_size": sizes.vocabulary,
        "tie_word_embeddings": sizes.tied,
        "initializer_range": shape.initializer_range,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    if shape.architecture == "gpt":
        dropped = dict.fromkeys(("resid_pdrop", "embd_pdrop"), shape.dropout)
        return "GPT2LMHeadModel", common | dropped | {
            "n_positions": shape.sequence_length,
            "n_embd": shape.hidden_size,
            "n_layer": shape.layers,
            "n_head": shape.heads,
            "n_inner": sizes.mlp,
            "attn_pdrop": 0.0,
            "layer_norm_epsilon": shape.norm_eps,
            "activation_function": "gelu_new",
        }
    return "LlamaForCausalLM", common | {
        "hidden_size": shape.hidden_size,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_width,
        "max_position_embeddings": shape.sequence_length,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
    }
