"""Train every causal model of transformers, tiny, split over two ranks and in one process, and compare.

    python tools/causal_models.py            # all of them; writes docs/tensor-models.md
    python tools/causal_models.py llama mpt  # prints the rows of these

Of each configuration the class says how the model is made small: options are tried by what its attributes are called.
"""

from __future__ import annotations

import math
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import zeromesh
import zeromesh.parallel.head.logits  # it knows torch's functions by what they are now: before they are replaced here
from zeromesh.base.split import Held
from zeromesh.parallel.follow.split_activation import RULES
from zeromesh.parallel.tensor.derive import GATHERING, derive, published
from zeromesh.parallel.tensor.split_plan import Plan, kind_of, matches, pattern_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from harness import RankFailure, close_pools, run_ranks  # noqa: E402
from huggingface_models import without_dropout  # noqa: E402

IN_BLOCK = re.compile(r"(^|\.)\d+\.")
UNLABELLED = ("git", "musicgen", "musicgen_melody")
"""Models that compute a loss from something else than a text; of them it is computed here."""
PAGE = ROOT / "docs" / "tensor-models.md"
RANKS = 2
STEPS = 3
SAMPLES, LENGTH, VOCABULARY = 2, 8, 96
OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-4}
LARGEST = 1_000_000
LIMIT = 60
"""Seconds for a model."""
TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4}
"""Of |a - b| / (1 + |b|)."""

OPTIONS: dict[str, Any] = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "bigram_vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "lru_width", "dim_model"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("attention_head_size", "d_kv", "kv_channels"), 8),
    **dict.fromkeys(("head_dim", "swa_head_dim", "swa_v_head_dim", "qk_rope_head_dim", "index_head_dim"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "d_head", "dim_head"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "global_head_dim", "o_lora_rank", "v_head_dim"), 16),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("dff", "d_inner", "dim_ff", "feed_forward_size", "ffn_hidden_size", "block_ff_dim"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "num_experts_per_token"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "intermediate_size_mlp"), 32),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("rotary_dim", "hidden_size_per_layer_input", "laurel_rank", "linear_key_head_dim"), 8),
    **dict.fromkeys(("linear_value_head_dim", "linear_head_dim", "mamba_head_dim", "mamba_d_head"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 4),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "index_topk"), 4),
    **dict.fromkeys(("linear_num_key_heads", "num_global_key_value_heads", "mamba_n_groups", "index_n_heads"), 2),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 8),
    **dict.fromkeys(("mlp_dim", "ext_pw_out_channel", "depthwise_separable_out_channel"), 64),
    **dict.fromkeys(("output_channels", "mm_embed_dim", "output_proj_dims", "mm_posemb_size", "audio_embed_dim"), 32),
    **dict.fromkeys(("position_embedding_size", "nemo_conv_channels", "hidden_size_global", "adapter_in_dim"), 32),
    **dict.fromkeys(("adapter_out_dim", "adapter_input_size", "downsample_hidden_size"), 32),
    "encoder_hash_byte_group_vocab": VOCABULARY, "num_blocks": 3, "image_size": 32, "patch_size": 8,
    "num_kv_shared_layers": 0, "sliding_window": 4, "chunk_size": 8, "mamba_chunk_size": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
"""Name of an attribute -> value. Of lists that have an entry for each layer, one of each kind is taken."""

SLIDING = {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 16, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
}  # fmt: skip

SPECIAL: dict[str, dict[str, Any]] = {
    "blt": {
        "global_config": {"hidden_size": 64}, "encoder_config": {"hidden_size_global": 64, "head_dim": 8},
        "decoder_config": {"hidden_size_global": 64, "head_dim": 8}, "patcher_config": {"head_dim": 8},
        "patch_in_forward": False,
    },
    "big_bird": {"attention_type": "original_full"},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
            for kind in ("sliding_attention", "full_attention")
        },
    },
    "canine": {"num_hash_buckets": 64},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "dots3_note": {"text_config": SLIDING}, "dots3_note_text": SLIDING,
    "esmc": {"num_key_value_heads": 4, "head_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 3,
            "num_hidden_layers": 3,
        },
        "backbone_hidden_size": 32,
    },
    "gpt_neo": {"attention_types": [[["global", "local", "local"], 1]]},
    "helium": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48},
    "longcat_flash": {"zero_expert_num": 2},
    "luke": {"entity_vocab_size": VOCABULARY, "entity_emb_size": 32},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2},
    "markuplm": {"max_depth": 4, "xpath_unit_hidden_size": 8, "max_xpath_tag_unit_embeddings": 220},
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "moshi": {"audio_vocab_size": VOCABULARY},
    "reformer": {
        "is_decoder": True, "attn_layers": ["local", "lsh", "local"], "axial_pos_embds_dim": [16, 16],
        "axial_pos_shape": [2, 4], "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "hash_seed": 1,
    },
    "roc_bert": {
        "shape_embed_dim": 16, "shape_vocab_size": VOCABULARY, "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": VOCABULARY,
    },
    "qwen4_exp": {
        "text_config": {
            "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4,
            "indexer_compress_ratio": 2, "hc_lowrank": 8,
        },
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 4,
        "indexer_compress_ratio": 2, "hc_lowrank": 8,
    },
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip
"""By type of the model: options that it needs beside; of a nested configuration, a dict."""

IMPOSSIBLE: dict[str, str] = {
    "gemma3n": "its images need the package timm; gemma3n_text is the same without",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"), "all of its layers read keys and values of another model"
    ),
}
"""By type of the model: why it cannot be trained here."""


def names() -> list[str]:
    """Types of all causal models in the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _tiny(kind: Any, special: dict[str, Any]) -> Any:
    """A configuration."""
    try:
        default = kind()
    except Exception:  # needs to be told more
        default = kind(**special)
    parts = {key: type(part) for key, part in vars(default).items() if hasattr(part, "to_dict")}
    names = set(vars(default)) | set(getattr(kind, "attribute_map", {}))
    options = {key: value for key, value in OPTIONS.items() if key in names}
    layers = vars(default).get("num_hidden_layers")
    for key, value in vars(default).items():
        if key not in (
            "layer_types",
            "layers_block_type",
            "mlp_layer_types",
            "indexer_types",
            "num_attention_heads_per_layer",
        ):
            continue
        if isinstance(value, (list, tuple)) and len(value) == layers:
            distinct = list(dict.fromkeys(value))
            options[key] = [*distinct, *[distinct[-1]] * 3][: max(3, len(distinct))]
            if len(distinct) > 3:
                options["num_hidden_layers"] = len(distinct)
    for key, part in parts.items():
        options[key] = _tiny(part, special.get(key, {})).to_dict()
    if options.get("kv_lora_rank"):
        options["num_key_value_heads"] = options["num_attention_heads"]
    return kind(
        **{key: value for key, value in (options | {k: v for k, v in special.items() if k not in parts}).items()}
    )


def configuration(name: str, kind: Any = None) -> Any:
    """A tiny one for a type of models, and one class of them; None: the causal one."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = _tiny(transformers.CONFIG_MAPPING[name], SPECIAL.get(name, {}))
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]) if kind is None else kind
    wanted = kind.config_class
    return config if wanted is None or isinstance(config, wanted) else config.get_text_config(decoder=True)


def build(name: str, dtype: torch.dtype) -> Any:
    """The model with random weights; none of them zero or one, where errors would not show."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name])
    config = configuration(name)
    without_dropout(config)
    return drawn(kind, config, dtype)


def drawn(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    """Return a model of random weights, none of them zero; raise ValueError if it is too large."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} parameters are too many; give the options that are large in SPECIAL")
    torch.manual_seed(0)
    model = kind(config).to(dtype).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn(parameter.shape, dtype=torch.float64).to(parameter.dtype), alpha=0.05)
    return model


def batches() -> list[dict[str, Tensor]]:
    """The same on all ranks."""
    generator = torch.Generator().manual_seed(5)
    ids = [torch.randint(3, VOCABULARY, (SAMPLES, LENGTH), generator=generator) for _ in range(STEPS)]
    return [{"input_ids": one, "labels": one} for one in ids]


def loss_of(model: Any, name: str, batch: dict[str, Tensor]) -> Tensor:
    """That of the model, or the usual one of what it gives."""
    given = {"input_ids": batch["input_ids"]} if name in UNLABELLED else batch
    output = model(**given, use_cache=False)
    if getattr(output, "loss", None) is not None:
        return output.loss
    return nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


@contextmanager
def throughout(dtype: torch.dtype) -> Iterator[None]:
    """In float64, models stay in it: many compute norms and softmaxes in fp32, whose rounding would hide errors."""
    to, to_float, to_type = torch.Tensor.to, torch.Tensor.float, torch.Tensor.type
    softmax = nn.functional.softmax

    def stays(x: Any, *args: Any, **options: Any) -> Tensor:
        wanted = [*args, options.get("dtype")]
        return x if x.dtype is torch.float64 and torch.float32 in wanted else to(x, *args, **options)

    def same(x: Tensor, *args: Any, **options: Any) -> Tensor:
        narrower = x.dtype is torch.float64 and options.get("dtype") is torch.float32
        return softmax(x, *args, **(options | {"dtype": None} if narrower else options))

    def stays_typed(x: Tensor, *args: Any, **options: Any) -> Any:
        return x if x.dtype is torch.float64 and torch.float32 in args else to_type(x, *args, **options)

    def stays_double(x: Tensor) -> Tensor:
        return stays(x, torch.float32)

    if dtype is not torch.float64:
        yield
        return
    same.__name__ = "softmax"  # by which rules know it
    replaced = {stays_typed: to_type, stays: to, stays_double: to_float, same: softmax}
    with (
        patch.object(torch.Tensor, "type", stays_typed),
        patch.object(torch.Tensor, "to", stays),
        patch.object(torch.Tensor, "float", stays_double),
        patch.object(nn.functional, "softmax", same),
        # Or activations of which each rank has a part would be gathered for functions that nobody knows.
        patch.dict(RULES, {new: RULES[old] for new, old in replaced.items() if old in RULES}),
    ):
        yield


def plain(name: str) -> Result:
    """Plain torch in one process, in float64 where the model computes in it."""
    for dtype in (torch.float64, torch.float32):
        try:
            with throughout(dtype):
                return _plain(name, dtype)
        except RuntimeError as error:
            if dtype is torch.float32:
                raise
            last = error
    raise last


def _plain(name: str, dtype: torch.dtype) -> Result:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as ranks have: what LAPACK gives for an orthogonal start depends on it
    try:
        model = build(name, dtype)
    finally:
        torch.set_num_threads(threads)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    losses = []
    for batch in batches():
        loss = loss_of(model, name, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Result(dtype, losses, {key: value.detach() for key, value in model.state_dict().items()})


@dataclass
class Result:
    """Of a training: losses by step, and parameters and buffers at the end."""

    dtype: torch.dtype
    losses: list[float]
    state: dict[str, Tensor]


@dataclass
class Row:
    """What came out for a model."""

    name: str
    by: str = "whole"
    layers: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    bytes: tuple[int, int, int] = (0, 0, 0)
    dtype: str = ""
    error: float = math.inf
    failure: str = ""


def on_rank(name: str, dtype: torch.dtype, ranks: int) -> tuple[Row, Result] | str:
    """Train on ranks that split the model; what has been split, and what came out; or what failed."""
    try:
        with throughout(dtype):
            return _on_rank(name, dtype, ranks)
    except Exception:
        return traceback.format_exc()


def _on_rank(name: str, dtype: torch.dtype, ranks: int) -> tuple[Row, Result]:
    model = build(name, dtype)
    own, found = set(published(model)), derive(model, ranks)[0]
    config = {
        "mesh": {"tensor": ranks},
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "AdamW", "params": OPTIMIZER},
    }
    linear = {f"{path}.weight" for path, module in model.named_modules() if kind_of(module) == "linear"}
    engine = zeromesh.initialize(model=model, config=config)[0]
    losses = []
    for batch in batches():
        loss = loss_of(engine, name, batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with zeromesh.zero.GatheredParameters(list(engine.module.parameters())):
        state = {key: value.detach().clone() for key, value in engine.module.state_dict().items()}
    segments = {segment.name: segment.held for flat in engine.sharded.flats for segment in flat.layout.segments}
    engine.destroy()
    return _row(name, own, found, segments, linear, dtype), Result(dtype, losses, state)


def _row(
    name: str, own: Collection[str], found: Plan, segments: Mapping[str, Held], linear: set[str], dtype: torch.dtype
) -> Row:
    row, kinds = Row(name, dtype=str(dtype).removeprefix("torch.")), set()
    layers, whole = {}, {}
    for path, held in segments.items():
        module = path.rpartition(".")[0]
        rules = [pattern for pattern in found if matches(path, pattern) or matches(module, pattern)]
        if held.split is not None and IN_BLOCK.search(path):
            kinds.add(path in own or module in own)
            if any(found[pattern].style in GATHERING for pattern in rules):
                layers[_brief(module)] = None
        elif held.split is None and (path in linear or len(held.whole) == 3):
            whole[_brief(module if path in linear else path)] = None
    width = dtype.itemsize
    split = [held for held in segments.values() if held.split is not None]
    row.by = {(): "whole", (True,): "by its plan", (False,): "automatically"}.get(tuple(kinds), "both")
    row.layers, row.whole = tuple(layers), tuple(whole)
    row.bytes = (
        sum(math.prod(held.whole) for held in segments.values()) * width,
        sum(math.prod(held.whole) for held in split) * width,
        sum(math.prod(held.shape) for held in split) * width,
    )
    return row


def _brief(name: str) -> str:
    """What it is called in its block."""
    return pattern_of(name).rpartition("*.")[2]


def row(name: str, ranks: int = RANKS) -> Row:
    """Train a model both ways, and compare."""
    if name in IMPOSSIBLE:
        return Row(name, failure=IMPOSSIBLE[name])
    try:
        expected = plain(name)
    except Exception as error:
        return Row(name, failure=f"not built: {_short(str(error))}")
    try:
        found = run_ranks(on_rank, ranks, name, expected.dtype, ranks, timeout=LIMIT)
    except RankFailure as error:
        return Row(name, failure=f"ranks failed: {_short(str(error))}")
    for one in found:
        if isinstance(one, str):
            return Row(name, failure=f"not split: {_short(one)}")
    row = found[0][0]
    row.error = max(_error(expected, result) for _, result in found)
    return row


def _short(text: str) -> str:
    """The last line of a traceback, or what fits of it."""
    return " ".join(text.strip().splitlines()[-1].split())[:200].replace("|", "/")


def _error(expected: Result, found: Result) -> float:
    """The largest |a - b| / (1 + |b|) of losses and parameters."""
    assert found.state.keys() == expected.state.keys()
    errors = [abs(a - b) / (1 + abs(b)) for a, b in zip(found.losses, expected.losses, strict=True)]
    for key, value in expected.state.items():
        if value.is_floating_point() and value.numel():
            errors.append(float(((found.state[key] - value).abs() / (1 + value.abs())).max()))
    return math.nan if any(math.isnan(error) for error in errors) else max(errors)


# The page.

INTRODUCTION = """# Causal models of transformers on a tensor axis

Every causal model of transformers {version}, tiny and with random weights, is trained for {steps} steps on two
tensor-parallel ranks and by plain torch in one process; losses and parameters are compared. `python
tools/causal_models.py` writes this page, and the tests train some of the rows in every run and all of them in
`make test-all`.

- *split*: by the plan that transformers has for the model, automatically (found by looking at its modules), both, or
  not at all (whole: the embedding and the output layer are split even then).
- *bytes*: of all parameters; *are split*: of those that are split; *per rank*: what a rank has of these.
- *one by one*: layers whose results, or inputs, are gathered, as what lies between them needs all of it.
- *whole*: linear layers and stacks of matrices that all ranks have; `*` stands for a number.
- *error*: the largest |a - b| / (1 + |b|). Equal is up to {double:.0e} in float64, in which norms and softmaxes are
  kept here that models compute in fp32 otherwise, and up to {single:.0e} in float32, the most that the experts of
  mixtures and some scans work in.

{counts}
"""

HEADER = "| model | split | bytes | are split | per rank | one by one | whole | compared in | error | equal |"


def is_equal(row: Row) -> bool:
    """Whether both trainings came to the same."""
    return bool(row.dtype) and row.error <= TOLERANCES[getattr(torch, row.dtype)]


def line(row: Row) -> str:
    """A row of the table."""
    if row.failure:
        return f"| {row.name} | {row.failure} | | | | | | | | |"
    layers, whole = (", ".join(f"`{name}`" for name in names) for names in (row.layers, row.whole))
    cells = [row.name, row.by, *map(str, row.bytes), layers, whole, row.dtype, f"{row.error:.0e}"]
    return f"| {' | '.join(cells)} | {'yes' if is_equal(row) else 'NO'} |"


def page(rows: Sequence[Row]) -> str:
    """The whole page, in Markdown."""
    import transformers

    done = [row for row in rows if not row.failure]
    kinds = Counter(row.by for row in done)
    equal = sum(map(is_equal, done))
    counts = (
        f"Of {len(rows)} models {len(done)} are trained, and {equal} of them are equal: {kinds['by its plan']} are "
        f"split by their plan, {kinds['automatically']} automatically, {kinds['both']} by both, and the blocks of "
        f"{kinds['whole']} are whole."
    )
    introduction = INTRODUCTION.format(
        version=transformers.__version__, steps=STEPS, double=TOLERANCES[torch.float64],
        single=TOLERANCES[torch.float32], counts=counts,
    )  # fmt: skip
    return "\n".join([introduction, HEADER, "|---" * 10 + "|", *map(line, rows)]) + "\n"


def main(arguments: list[str]) -> None:
    """Print the rows of some models, or write the page; a number is that of the ranks."""
    chosen = [name for name in arguments if not name.isdigit()]
    ranks = next((int(name) for name in arguments if name.isdigit()), RANKS)
    rows = []
    for name in chosen or names():
        began = time.monotonic()
        rows.append(row(name, ranks))
        print(f"{'ok' if is_equal(rows[-1]) else 'FAIL'} {time.monotonic() - began:.1f} s {line(rows[-1])}", flush=True)
    close_pools()
    if not chosen and ranks == RANKS:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    import causal_models  # the ranks find its functions under this name

    causal_models.main(sys.argv[1:])
