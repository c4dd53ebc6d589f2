"""A folder of transformers as one file for llama.cpp, by the names of the package gguf, tensor by tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from zeromesh.base.files import read_text
from zeromesh.base.requirements import imported

FILE = "model.gguf"


FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Classes of transformers that are written, and the architecture in llama.cpp."""
INTERLEAVED = ("llama",)  # llama.cpp rotates neighbours of a head, and transformers the first half with the second

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    None: "gpt-2",  # that of the byte-level pre-tokenizer itself
    _CONTRACTIONS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _CONTRACTIONS + r"\p{N}" + _REST: "qwen2",
}
"""Names in llama.cpp of the patterns that divide a text into words; None is byte-level's own."""

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # types of tokens in the format


def require_gguf() -> Any:
    """Return the package; raise ValueError if it is not installed."""
    return imported("gguf", "--gguf needs the package gguf")


def write_gguf(folder: Path, target: Path) -> None:
    """Write the model and the tokenizer of a folder to a file; raise ValueError if the format cannot hold them."""
    gguf = require_gguf()
    config = json.loads(read_text(folder / "config.json"))
    family = _family(config)
    writer = gguf.GGUFWriter(str(target), family)
    try:
        _add_shape(gguf, writer, config)
        _add_tokenizer(writer, folder, config)
        _add_tensors(gguf, writer, folder, config, family)
    finally:
        writer.close()


def _family(config: dict[str, Any]) -> str:
    name = (config.get("architectures") or ["a model without a name"])[0]
    if name not in FAMILIES:
        raise ValueError(
            f"--gguf: {name} is not written as GGUF, only {', '.join(FAMILIES)}; export it without --gguf, and use "
            "convert_hf_to_gguf.py of llama.cpp on the folder"
        )
    rope = _rope(config).get("rope_type", "default")
    if rope not in ("default", "llama3"):
        raise ValueError(
            f"--gguf: positions of rope_type {rope!r} are not written, only 'default' and 'llama3'; export the model "
            "without --gguf, and use convert_hf_to_gguf.py of llama.cpp on the folder"
        )
    # The file would open, and answer otherwise.
    windowed = config.get("use_sliding_window", True) and config.get("sliding_window") is not None
    if windowed or config.get("hidden_act", "silu") != "silu":
        what = f"sliding_window = {config['sliding_window']}" if windowed else f"hidden_act = {config['hidden_act']!r}"
        raise ValueError(f"--gguf: {name} with {what} is not written as GGUF; export it without --gguf")
    return FAMILIES[name]


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = config.get("rope_parameters") or {}
    return rope


def _head_width(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_shape(gguf: Any, writer: Any, config: dict[str, Any]) -> None:
    width = _head_width(config)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config.get("num_key_value_heads") or config["num_attention_heads"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(float(_rope(config).get("rope_theta", config.get("rope_theta", 10000.0))))
    writer.add_rope_dimension_count(width)
    writer.add_vocab_size(config["vocab_size"])
    kinds = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16"}
    writer.add_file_type(gguf.LlamaFileType[kinds[config.get("dtype", "float32")]])


def _add_tokenizer(writer: Any, folder: Path, config: dict[str, Any]) -> None:
    """Add the vocabulary of a byte-level tokenizer, its merges, and the chat template."""
    if not (folder / "tokenizer.json").is_file():
        raise ValueError("--gguf: the run has no tokenizer.json, and llama.cpp needs the vocabulary; export without it")
    tokenizer = json.loads(read_text(folder / "tokenizer.json"))
    model = tokenizer["model"]
    pattern = _pattern(tokenizer.get("pre_tokenizer"))
    if model.get("type") != "BPE" or model.get("byte_fallback") or pattern not in PATTERNS:
        raise ValueError(
            f"--gguf: a tokenizer of the type {model.get('type')} that divides texts by {pattern!r} is not one whose "
            "name in llama.cpp is known here; export without --gguf, and use convert_hf_to_gguf.py of llama.cpp"
        )
    entries = {token_id: (text, NORMAL) for text, token_id in model["vocab"].items()}
    for token in tokenizer.get("added_tokens", ()):
        entries[token["id"]] = token["content"], CONTROL if token["special"] else USER_DEFINED
    # Models may have more entries than the tokenizer.
    tokens, types = zip(
        *(entries.get(number, (f"[PAD{number}]", USER_DEFINED)) for number in range(config["vocab_size"])), strict=True
    )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PATTERNS[pattern])
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    settings = {}
    if (folder / "tokenizer_config.json").is_file():
        settings = json.loads(read_text(folder / "tokenizer_config.json"))
    ids = {text: number for number, (text, _) in entries.items()}
    for kind in ("bos", "eos", "pad"):
        named = settings.get(f"{kind}_token")
        text = named.get("content") if isinstance(named, dict) else named
        fallback = config.get(f"{kind}_token_id")
        number = ids.get(text, fallback[0] if isinstance(fallback, list) else fallback)
        if number is not None:
            getattr(writer, f"add_{kind}_token_id")(number)
    writer.add_add_bos_token(_adds_begin(tokenizer))
    template = folder / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(read_text(template))


def _adds_begin(tokenizer: dict[str, Any]) -> bool:
    # A template of the tokenizers library that puts a special token before a text.
    steps = (tokenizer.get("post_processor") or {}).get("processors") or [tokenizer.get("post_processor") or {}]
    return any("SpecialToken" in part for step in steps for part in (step.get("single") or ())[:1])


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """Return the pattern that divides texts; None for that of the byte-level pre-tokenizer."""
    steps = (pre_tokenizer or {}).get("pretokenizers") or [pre_tokenizer or {}]
    is_byte_level = any(step.get("type") == "ByteLevel" and step.get("use_regex", True) for step in steps)
    patterns = [step["pattern"].get("Regex", "") for step in steps if step.get("type") == "Split"]
    if is_byte_level and len(steps) == 1:
        return None
    return (
        patterns[0]
        if len(patterns) == 1 and not is_byte_level
        else " then ".join(str(step.get("type")) for step in steps)
    )


def _add_tensors(gguf: Any, writer: Any, folder: Path, config: dict[str, Any], family: str) -> None:
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    sources: list[tuple[Path, str]] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            sources += [(path, name) for name in file.keys()]  # noqa: SIM118, it has no other iterator

    def written() -> Iterator[tuple[str, torch.Tensor]]:
        # In memory one tensor at a time. It comes twice: all shapes stand before the first value.
        if _rope(config).get("rope_type") == "llama3":
            yield "rope_freqs.weight", llama3_factors(_rope(config), _head_width(config))
        for path, name in sources:
            target = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if target is None:
                raise ValueError(f"--gguf: {family} of llama.cpp has no tensor for {name}; export without --gguf")
            with safe_open(path, "pt") as file:
                tensor = file.get_tensor(name)
            if family in INTERLEAVED and ".q_proj." in name:
                tensor = interleaved(tensor, config["num_attention_heads"])
            if family in INTERLEAVED and ".k_proj." in name:
                tensor = interleaved(tensor, config.get("num_key_value_heads") or config["num_attention_heads"])
            # llama.cpp computes with vectors in fp32.
            yield target, tensor.float() if tensor.dim() == 1 else tensor

    types = gguf.GGMLQuantizationType
    kinds = {torch.float32: types.F32, torch.float16: types.F16, torch.bfloat16: types.BF16}
    for name, tensor in written():
        values = _bytes(tensor)
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes, kinds[tensor.dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, tensor in written():
        writer.write_tensor_data(_bytes(tensor))


def _bytes(tensor: torch.Tensor) -> Any:
    return tensor.contiguous().view(torch.uint8).numpy()


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of queries or keys, ``(heads * width, ...)``, in the order in which llama.cpp rotates them."""
    halves: torch.Tensor = weight.unflatten(0, (heads, 2, -1))
    return halves.transpose(1, 2).reshape(weight.shape)


def llama3_factors(rope: dict[str, Any], width: int) -> torch.Tensor:
    """Return the divisors of the frequencies of Llama 3.1, fp32, shape ``(width / 2,)``."""
    frequencies: torch.Tensor = rope["rope_theta"] ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    waves = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)  # in the first context
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth: torch.Tensor = ((waves - low) / (high - low)).clamp(0, 1)
    factors: torch.Tensor = 1 / ((1 - smooth) / factor + smooth)
    return factors.float()
