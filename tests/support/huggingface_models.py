"""Hugging Face models with tiny random configurations, and batches for them: the rows of ``MODELS``.

    python tests/support/huggingface_models.py    # writes docs/huggingface.md

transformers is imported where it is used, so that this table can be read without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

SAMPLES = 4
"""In a global batch."""
LENGTH = 8
"""Of a text, in tokens."""
VOCABULARY = 96

Batch = dict[str, torch.Tensor]

USUAL = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 32,
}  # fmt: skip
GROUPED = {**USUAL, "num_key_value_heads": 2, "head_dim": 8}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DIM_MODEL = {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 2, **SPECIAL,
}  # fmt: skip
IMAGE = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 16,
    "patch_size": 8, "num_labels": 3,
}  # fmt: skip
"""Options that several configurations share."""

FP32_GRADIENT = "its norms or scans run in fp32, where the weight gradient is summed over the batch"
FP32_EXPERTS = "the grouped matrix product of its experts exists for fp32 and lower precision only"


def token_batches(steps: int) -> list[torch.Tensor]:
    """Return so many batches of four texts."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator) for _ in range(steps)]


@dataclass(frozen=True)
class Model:
    """One architecture.

    Attributes:
        name: of the class in transformers.
        config: name of the configuration's class.
        options: for the configuration.
        batch: from a generator to the global batch, whose tensors have the samples along dim 0.
        blocks: the units that hold its blocks, with # in place of numbers, and how many there are.
        dtype: in which it is compared.
        tolerance: for |a - b| / (1 + |b|).
        reason: why it is not compared in float64, or not to 1e-9.
        per_share: its loss is not a mean over the samples (batch statistics, a contrastive or balancing loss), so plain
            torch computes the ranks' shares apart, too.
        arguments: of every call, beside the batch.
    """

    name: str
    config: str
    options: dict[str, Any]
    batch: Callable[[torch.Generator], Batch]
    blocks: dict[str, int]
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    reason: str = ""
    per_share: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        """Return the model with random weights, without dropout."""
        import transformers

        config = getattr(transformers, self.config)(**self.options)
        without_dropout(config)
        return getattr(transformers, self.name)(config)


def without_dropout(config: Any) -> None:
    """Set whatever drops something out to zero, also in nested configurations."""
    for name, value in vars(config).items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
        elif hasattr(value, "to_dict"):
            without_dropout(value)


def wide_loss(logits: Any, labels: Any, vocab_size: int, shift_labels: Any = None, **kwargs: Any) -> torch.Tensor:
    """Return the loss of transformers, but in the dtype of the logits, and not in fp32."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten())


def tokens(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape or (SAMPLES, LENGTH), generator=generator)


def text(generator: torch.Generator) -> Batch:
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids}


def masked(generator: torch.Generator) -> Batch:
    """Text with padding at the end, of the same length in every sample, so that means of means are means."""
    ids, mask = tokens(generator), torch.ones(SAMPLES, LENGTH, dtype=torch.long)
    mask[:, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def pairs(generator: torch.Generator) -> Batch:
    return {"input_ids": tokens(generator), "labels": tokens(generator, SAMPLES, 6)}


def classes(generator: torch.Generator) -> Batch:
    return {"input_ids": tokens(generator), "labels": torch.randint(3, (SAMPLES,), generator=generator)}


def images(size: int = 16) -> Callable[[torch.Generator], Batch]:
    def batch(generator: torch.Generator) -> Batch:
        pixels = torch.randn(SAMPLES, 3, size, size, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.randint(3, (SAMPLES,), generator=generator)}

    return batch


def captions(generator: torch.Generator) -> Batch:
    pixels = torch.randn(SAMPLES, 3, 16, 16, generator=generator, dtype=torch.float64)
    return {"input_ids": tokens(generator), "pixel_values": pixels}


def speech(generator: torch.Generator) -> Batch:
    features = torch.randn(SAMPLES, 8, 32, generator=generator, dtype=torch.float64)
    return {"input_features": features, "labels": tokens(generator, SAMPLES, 6)}


EXPERTS = {**GROUPED, **SPECIAL, "num_experts_per_tok": 2}
LAYERS = {"model.layers.#": 3}
LATENT = {
    **USUAL, **SPECIAL, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, **SPECIAL}
T5 = {
    "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, **SPECIAL,
}  # fmt: skip
DISTILLED = {
    "vocab_size": VOCABULARY, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 32,
}  # fmt: skip
SPEECH = {**DIM_MODEL, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 16}
PYRAMID = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
    "num_attention_heads": [1, 2], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2], "num_labels": 3,
    "image_size": 32,
}  # fmt: skip
TOWERS = {
    "text_config": {**USUAL, **SPECIAL, "projection_dim": 16, "num_hidden_layers": 2},
    "vision_config": {**IMAGE, "projection_dim": 16, "num_hidden_layers": 2},
    "projection_dim": 16,
}

MODELS = {
    # Decoders; gpt2, qwen3, gemma, bloom, falcon and opt have tied embeddings.
    "gpt2": Model("GPT2LMHeadModel", "GPT2Config", GPT2, text, {"transformer.h.#": 3}),
    "llama": Model("LlamaForCausalLM", "LlamaConfig", {**GROUPED, **SPECIAL}, text, LAYERS),
    "qwen2": Model("Qwen2ForCausalLM", "Qwen2Config", {**GROUPED, **SPECIAL}, text, LAYERS),
    "qwen3": Model(
        "Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, **SPECIAL, "tie_word_embeddings": True}, text, LAYERS
    ),
    "gemma2": Model(
        "Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, **SPECIAL, "sliding_window": 4}, text, LAYERS,
        tolerance=1e-6, reason=FP32_GRADIENT,
    ),
    "gemma3": Model(
        "Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, **SPECIAL, "sliding_window": 4}, text, LAYERS,
        tolerance=1e-6, reason=FP32_GRADIENT,
    ),
    "gpt_neox": Model("GPTNeoXForCausalLM", "GPTNeoXConfig", {**USUAL, **SPECIAL}, text, {"gpt_neox.layers.#": 3}),
    "phi3": Model("Phi3ForCausalLM", "Phi3Config", {**USUAL, **SPECIAL, "num_key_value_heads": 2}, text, LAYERS),
    "bloom": Model(
        "BloomForCausalLM", "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4, **SPECIAL}, text,
        {"transformer.h.#": 3},
    ),
    "falcon": Model("FalconForCausalLM", "FalconConfig", {**USUAL, **SPECIAL}, text, {"transformer.h.#": 3}),
    "opt": Model(
        "OPTForCausalLM", "OPTConfig", {**USUAL, **SPECIAL, "ffn_dim": 64, "word_embed_proj_dim": 32}, text,
        {"model.decoder.layers.#": 3},
    ),
    "granite": Model(
        "GraniteForCausalLM", "GraniteConfig", {**USUAL, **SPECIAL, "num_key_value_heads": 2}, text, LAYERS
    ),
    "mamba": Model(
        "MambaForCausalLM", "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4, **SPECIAL}, text,
        {"backbone.layers.#": 3}, tolerance=1e-6, reason=FP32_GRADIENT,
    ),
    # Mixtures of experts.
    "mixtral": Model(
        "MixtralForCausalLM", "MixtralConfig", {**EXPERTS, "num_local_experts": 4, "output_router_logits": True}, text,
        LAYERS, torch.float32, 1e-5, FP32_EXPERTS, per_share=True,
    ),
    "qwen3_moe": Model(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32}, text,
        LAYERS, torch.float32, 1e-5, FP32_EXPERTS,
    ),
    "gpt_oss": Model(
        "GptOssForCausalLM", "GptOssConfig", {**EXPERTS, "num_local_experts": 4}, text, LAYERS, torch.float32, 1e-5,
        FP32_EXPERTS,
    ),
    "deepseek_v3": Model(
        "DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT, text, LAYERS, torch.float32, 1e-5, FP32_EXPERTS
    ),
    # Encoders; albert has one layer that it uses three times.
    "bert": Model("BertForMaskedLM", "BertConfig", USUAL, masked, {"bert.encoder.layer.#": 3}),
    "roberta": Model(
        "RobertaForSequenceClassification", "RobertaConfig", {**USUAL, "num_labels": 3}, classes,
        {"roberta.encoder.layer.#": 3},
    ),
    "albert": Model(
        "AlbertForMaskedLM", "AlbertConfig", {**USUAL, "embedding_size": 16}, masked,
        {"albert.encoder.albert_layer_groups.#": 1},
    ),
    "distilbert": Model(
        "DistilBertForMaskedLM", "DistilBertConfig", DISTILLED, masked, {"distilbert.transformer.layer.#": 3}
    ),
    "electra": Model(
        "ElectraForMaskedLM", "ElectraConfig", {**USUAL, "embedding_size": 16}, masked, {"electra.encoder.layer.#": 3}
    ),
    "deberta": Model(
        "DebertaV2ForMaskedLM", "DebertaV2Config",
        {**USUAL, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}, masked, {"deberta.encoder.layer.#": 3},
    ),
    # Encoders with decoders; the embeddings of t5 and bart stand at three places and more.
    "t5": Model("T5ForConditionalGeneration", "T5Config", T5, pairs, {"encoder.block.#": 2, "decoder.block.#": 2}),
    "bart": Model(
        "BartForConditionalGeneration", "BartConfig", {**DIM_MODEL, "max_position_embeddings": 32}, pairs,
        {"model.encoder.layers.#": 2, "model.decoder.layers.#": 2},
    ),
    "whisper": Model(
        "WhisperForConditionalGeneration", "WhisperConfig", SPEECH, speech,
        {"model.encoder.layers.#": 2, "model.decoder.layers.#": 2},
    ),
    # Images, and images with texts.
    "vit": Model("ViTForImageClassification", "ViTConfig", IMAGE, images(), {"vit.layers.#": 3}),
    "swin": Model(
        "SwinForImageClassification", "SwinConfig",
        {"image_size": 32, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "num_labels": 3},
        images(32), {"swin.encoder.layers.#.blocks.#": 4},
    ),
    "resnet": Model(
        "ResNetForImageClassification", "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16, 32], "depths": [1, 2, 4], "layer_type": "basic", "num_labels": 3},
        images(32), {"resnet.encoder.stages.#": 2, "resnet.encoder.stages.#.layers.#": 4}, per_share=True,
    ),
    "convnext": Model(
        "ConvNextForImageClassification", "ConvNextConfig",
        {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [2, 2], "image_size": 32, "num_labels": 3}, images(32),
        {"convnext.encoder.stages.#": 1, "convnext.encoder.stages.#.layers.#": 2},
    ),
    "segformer": Model(
        "SegformerForImageClassification", "SegformerConfig", PYRAMID, images(32), {"segformer.stages.#": 2}
    ),
    "clip": Model(
        "CLIPModel", "CLIPConfig", TOWERS, captions,
        {"text_model.encoder.layers.#": 2, "vision_model.encoder.layers.#": 2}, per_share=True,
        arguments={"return_loss": True},
    ),
}  # fmt: skip


PAGE = Path(__file__).parents[2] / "docs" / "huggingface.md"
INTRODUCTION = """# Tested Hugging Face models

This page lists the classes of transformers that the tests train without changes. Other classes usually work too: they
need no entry here.

The tests train each model for four steps of AdamW on two ranks, and compare losses, parameters and buffers with plain
torch in one process on the same global batch: `|a - b| <= tolerance x (1 + |b|)`. `make test` tests each class at ZeRO
stage 3. `make test-all` tests every stage, models built inside `zeromesh.zero.Init()`, and slots for all units.

Some of the classes are also tested with their own gradient checkpointing, with checkpointing by configuration, with
mostly frozen parameters, inside another module, in bf16, and with generation between training steps.

The second column shows the units that ZeroMesh finds in the model, `#` being a number.
"""


def page() -> str:
    """Return the table as a page of the documentation, in Markdown."""
    lines = ["| class | block units | compared in | tolerance | why the tolerance is larger |", "|---|---|---|---|---|"]
    for model in MODELS.values():
        units = ", ".join(f"`{kind}` x {count}" for kind, count in model.blocks.items())
        dtype = str(model.dtype).removeprefix("torch.")
        lines.append(f"| {model.name} | {units} | {dtype} | {model.tolerance:.0e} | {model.reason} |")
    return INTRODUCTION + "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
