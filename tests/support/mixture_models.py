"""Mixtures of transformers with tiny random configurations: one row of ``MIXTURES`` for each class of experts.

A row has what its configuration needs beside ``SIZES``, of which each configuration takes those that it has. All layers
have experts where the model lets one choose, and attention is full where a model mixes kinds of it.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from huggingface_models import SAMPLES, VOCABULARY, Batch, tokens, wide_loss, without_dropout

COUNT = 4
"""Number of experts."""

SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "shared_intermediate_size": 16,
    "max_position_embeddings": 32,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), COUNT),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 0),
    "mlp_layer_types": ["sparse", "sparse"],
    "layer_types": ["full_attention", "full_attention"],
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 4,
    "router_jitter_noise": 0.0,
}

# Attention of latent keys and values, whose head_dim is that of their positions.
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": None,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
INDEXED: Mapping[str, Any] = {**LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4}
LINEAR: Mapping[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@dataclass(frozen=True)
class Mixture:
    """One class of experts, and the smallest model that has it.

    Attributes:
        model: name of its class in transformers; those that are not language models get a head of ``TextMixture``.
        config: name of the configuration's class.
        options: over ``SIZES``; None leaves one of them out.
        folder: of the model in transformers, where its classes are not public.
        dtype: in which it is compared.
        tolerance: for |a - b| / (1 + |b|).
        per_share: its results depend on the samples beside one: it drops tokens, or has a balancing loss.
    """

    model: str
    config: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    folder: str = ""
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    per_share: bool = False

    def build(self, **options: Any) -> Any:
        """Return the model with random weights, without dropout, in its dtype; ``options`` are of the configuration."""
        kind = self._class(self.config or self.model.replace("ForCausalLM", "Config"), "configuration")
        names = {name for base in kind.__mro__ for name in vars(base).get("__annotations__", {})}
        names |= {*inspect.signature(kind.__init__).parameters, *getattr(kind, "attribute_map", {})}
        chosen = {name: value for name, value in SIZES.items() if name in names} | {**self.options, **options}
        config = kind(**{name: value for name, value in chosen.items() if value is not None})
        without_dropout(config)
        config.use_cache = False
        config._experts_implementation = "eager"  # the others have no products in float64
        model = self._class(self.model, "modeling")(config)
        with torch.no_grad():  # what a model begins with as zero, or not at all, would hide a wrong part of it
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape) * 0.2 + (parameter == 1))
        if "ForCausalLM" in self.model and self.dtype == torch.float64:
            model.loss_function = wide_loss
        return (model if "For" in self.model else TextMixture(model, config)).to(self.dtype)

    def _class(self, name: str, part: str) -> Any:
        import transformers

        if not self.folder:
            return getattr(transformers, name)
        return getattr(importlib.import_module(f"transformers.models.{self.folder}.{part}_{self.folder}"), name)


class TextMixture(nn.Module):
    """A text model with a head, which returns the loss."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        super().__init__()
        self.config, self.model = config, model
        self.lm_head = nn.Linear(config.hidden_size, VOCABULARY, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": input_ids}
        if hasattr(self.model, "codec_embedding"):  # a talker, which does not read it by itself
            inputs = {"inputs_embeds": self.model.codec_embedding(input_ids)}
        hidden = self.model(**inputs)[0]
        logits = self.lm_head(hidden)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def mixture_batch(seed: int, samples: int = SAMPLES) -> Batch:
    """Return texts with themselves as labels."""
    ids = tokens(torch.Generator().manual_seed(seed), samples, 8)
    return {"input_ids": ids, "labels": ids}


MIXTURES: Mapping[str, Mixture] = {
    "afmoe": Mixture("AfmoeForCausalLM"),
    "aria": Mixture("AriaTextForCausalLM", "AriaTextConfig"),
    "axk1": Mixture("AXK1ForCausalLM", options=LATENT),
    "axk2": Mixture("AXK2ForCausalLM", options=LATENT),
    "bailing_hybrid": Mixture("BailingHybridForCausalLM", options=LATENT),
    "beam": Mixture("BeamForCausalLM"),
    "cohere2_moe": Mixture("Cohere2MoeForCausalLM"),
    "dbrx": Mixture(
        "DbrxForCausalLM",
        options={
            "d_model": 32,
            "n_heads": 4,
            "n_layers": 2,
            "max_seq_len": 32,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 16, "hidden_size": 32, "moe_num_experts": COUNT, "moe_top_k": 2},
        },
    ),
    "deepseek_ocr2": Mixture("DeepseekOcr2TextModel", "DeepseekOcr2TextConfig", folder="deepseek_ocr2"),
    "deepseek_v2": Mixture("DeepseekV2ForCausalLM", options=LATENT),
    "deepseek_v3": Mixture("DeepseekV3ForCausalLM", options=LATENT),
    "deepseek_v32": Mixture("DeepseekV32ForCausalLM", options=INDEXED),
    "deepseek_v4": Mixture(
        "DeepseekV4ForCausalLM",
        options={
            "layer_types": ["sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["hash_moe", "moe"],
            "num_key_value_heads": 1,
            "q_lora_rank": 16,
            "o_groups": 2,
            "o_lora_rank": 8,
            "index_head_dim": 8,
        },
    ),
    "diffusion_gemma": Mixture("DiffusionGemmaEncoderTextModel", "DiffusionGemmaTextConfig", folder="diffusion_gemma"),
    "dots1": Mixture("Dots1ForCausalLM"),
    "dots3_note": Mixture("Dots3NoteForCausalLM", "Dots3NoteTextConfig", INDEXED),
    "ernie4_5_moe": Mixture("Ernie4_5_MoeForCausalLM", options={"moe_layer_start_index": 0}),
    "ernie4_5_vl_moe": Mixture(
        "Ernie4_5_VLMoeTextModel",
        "Ernie4_5_VLMoeTextConfig",
        {"moe_intermediate_size": [16, 8], "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}},
        "ernie4_5_vl_moe",
    ),
    "exaone_moe": Mixture("ExaoneMoeForCausalLM"),
    "flex_olmo": Mixture("FlexOlmoForCausalLM"),
    "flint": Mixture("FlintForCausalLM", options={"mlp_only_layers": []}),
    "gemma4": Mixture(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {"enable_moe_block": True, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY},
    ),
    "glm4_moe": Mixture("Glm4MoeForCausalLM"),
    "glm4_moe_lite": Mixture("Glm4MoeLiteForCausalLM", options=LATENT),
    "glm4v_moe": Mixture(
        "Glm4vMoeTextModel",
        "Glm4vMoeTextConfig",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0]}},
        "glm4v_moe",
    ),
    "glm5_next": Mixture(
        "Glm5NextTextModel", "Glm5NextTextConfig", {**INDEXED, "index_kpool": 2, "qk_rope_head_dim": 0}, "glm5_next"
    ),
    "glm_moe_dsa": Mixture("GlmMoeDsaForCausalLM", options=INDEXED),
    "gpt_oss": Mixture("GptOssForCausalLM"),
    "granitemoe": Mixture("GraniteMoeForCausalLM"),
    "granitemoe_swa": Mixture("GraniteMoeSWAForCausalLM"),
    "granitemoehybrid": Mixture("GraniteMoeHybridForCausalLM", options={"mamba_n_heads": 8}),
    "granitemoeshared": Mixture("GraniteMoeSharedForCausalLM"),
    "hunyuan_v1_moe": Mixture("HunYuanMoEV1ForCausalLM"),
    "hy_v3": Mixture("HYV3ForCausalLM"),
    "hy_v4": Mixture("HYV4ForCausalLM"),
    "inkling": Mixture("InklingForCausalLM", "InklingTextConfig"),
    "inkling2": Mixture("Inkling2ForCausalLM", "Inkling2TextConfig", dtype=torch.float32, tolerance=2e-5),
    "jamba": Mixture(
        "JambaForCausalLM",
        options={"attn_layer_period": 1, "attn_layer_offset": 0, "expert_layer_period": 1, "expert_layer_offset": 0},
    ),
    "jetmoe": Mixture("JetMoeForCausalLM"),
    "kimi_linear": Mixture("KimiLinearForCausalLM", options=LATENT),
    "kolibri1": Mixture("Kolibri1ForCausalLM"),
    "laguna": Mixture("LagunaForCausalLM"),
    "lfm2_moe": Mixture("Lfm2MoeForCausalLM"),
    "llama4": Mixture("Llama4ForCausalLM", "Llama4TextConfig"),
    "longcat_flash": Mixture(
        "LongcatFlashForCausalLM",
        options={
            **LATENT,
            "head_dim": 8,
            "num_layers": 2,
            "ffn_hidden_size": 16,
            "expert_ffn_hidden_size": 16,
            "zero_expert_num": 2,
        },
    ),
    "mellum": Mixture("MellumForCausalLM"),
    "mimo_v2_flash": Mixture("MiMoV2FlashForCausalLM"),
    "minimax": Mixture("MiniMaxForCausalLM"),
    "minimax_m2": Mixture("MiniMaxM2ForCausalLM"),
    "minimax_m3_vl": Mixture("MiniMaxM3VLForCausalLM", "MiniMaxM3VLTextConfig"),
    "mistral4": Mixture("Mistral4ForCausalLM", options=LATENT),
    "mistral_large4": Mixture("MistralLarge4TextModel", "MistralLarge4TextConfig", LATENT, "mistral_large4"),
    "mixtral": Mixture("MixtralForCausalLM"),
    "muse_spark": Mixture("MuseSparkTextModel", "MuseSparkTextConfig", {"moe_hidden_size": 16}, "muse_spark"),
    "nemotron_h": Mixture(
        "NemotronHForCausalLM",
        options={
            "layers_block_type": ["moe", "full_attention", "moe"],
            "layer_types": None,
            "num_hidden_layers": None,
            "moe_latent_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "nllb_moe": Mixture(
        "NllbMoeForConditionalGeneration",
        "NllbMoeConfig",
        {
            "d_model": 32,
            **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
            **dict.fromkeys(("encoder_sparse_step", "decoder_sparse_step"), 1),
            "expert_capacity": 8,
        },
        per_share=True,
    ),
    "olmoe": Mixture("OlmoeForCausalLM"),
    "openai_privacy_filter": Mixture(
        "OpenAIPrivacyFilterForTokenClassification",
        "OpenAIPrivacyFilterConfig",
        {"num_labels": VOCABULARY},
        dtype=torch.float32,  # its experts add to a sum in fp32, as inkling2's do
        tolerance=2e-5,
    ),
    "phimoe": Mixture("PhimoeForCausalLM"),
    "qwen2_moe": Mixture("Qwen2MoeForCausalLM"),
    "qwen3_5_moe": Mixture("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", LINEAR),
    "qwen3_moe": Mixture("Qwen3MoeForCausalLM"),
    "qwen3_next": Mixture("Qwen3NextForCausalLM", options=LINEAR),
    "qwen3_omni_talker": Mixture(
        "Qwen3OmniMoeTalkerModel",
        "Qwen3OmniMoeTalkerTextConfig",
        {"shared_expert_intermediate_size": 16},
        "qwen3_omni_moe",
    ),
    "qwen3_omni_thinker": Mixture("Qwen3OmniMoeThinkerTextModel", "Qwen3OmniMoeTextConfig", folder="qwen3_omni_moe"),
    "qwen3_vl_moe": Mixture("Qwen3VLMoeTextModel", "Qwen3VLMoeTextConfig", folder="qwen3_vl_moe"),
    "qwen4_exp": Mixture(
        "Qwen4ExpForCausalLM",
        "Qwen4ExpTextConfig",
        {
            **LINEAR,
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 8,
            "indexer_budget": 4,
            "indexer_compress_ratio": 2,
        },
    ),
    "solar_open": Mixture("SolarOpenForCausalLM"),
    "step3p7": Mixture("Step3p7TextModel", "Step3p7TextConfig", {"share_expert_dim": 16}, "step3p7"),
    "switch_transformers": Mixture(
        "SwitchTransformersForConditionalGeneration",
        "SwitchTransformersConfig",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 16,
            "num_heads": 4,
            **dict.fromkeys(("num_layers", "num_decoder_layers"), 2),
            **dict.fromkeys(("num_sparse_encoder_layers", "num_sparse_decoder_layers"), 2),
            "expert_capacity": 8,
            "decoder_start_token_id": 0,
        },
        per_share=True,
    ),
    "unlimited_ocr": Mixture("UnlimitedOcrTextModel", "UnlimitedOcrTextConfig", folder="unlimited_ocr"),
    "zaya": Mixture(
        "ZayaForCausalLM",
        options={"num_experts_per_tok": 1, "router_hidden_size": 16, "layer_types": ["hybrid", "hybrid"]},
    ),
}
"""By name, mostly of the folder in transformers."""
