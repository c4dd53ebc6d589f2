"""Names that layers, attributes and arguments have in known families of models: data for what looks for them."""

from __future__ import annotations

import re

# Attributes of attention modules and of configurations: numbers of heads, and widths.
QUERIES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_attn_heads", "attention_heads", "heads")
KEYS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "kv_heads", "num_k_heads", "num_kv")
WIDTHS = (  # of one head
    "head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_per_head", "attn_head_size", "dim_head",
    "width",
)  # fmt: skip
# The width of all heads together.
TOTALS = ("all_head_size", "embed_dim", "inner_dim", "hidden_size", "split_size", "dim", "attn_dim", "q_size")
KEY_TOTALS = ("kv_dim", "kv_size", "num_key_value_size")
MODEL_WIDTHS = ("hidden_size", "d_model", "n_embd")
GROUPS = ("num_key_value_groups", "n_rep", "num_queries_per_kv", "num_groups")  # query heads for each key head
ROTARY_WIDTH = "qk_rope_head_dim"
EXPERT_WIDTH = "ffn_hidden_size"  # rows of one expert in the weight of all experts

# Layers that are split by rows.
OUTPUTS = re.compile(
    r"^(o|wo|w2|o_proj|out_proj|c_proj|dense|out_lin|out|proj|proj_out|attn_out|dense_4h_to_h|down_proj|fc2|fc_out|"
    r"fc_proj|lin2|Wo|attention_out|ffn_output|linear2|linear_2|ff2|output|output_linear|c_out|proj_2|layer_2|"
    r"conv_shortcut|dense_2|fc_2|down)$"
)
# Modules with columns -> the layer, beside them in the same parent, that is split by rows.
PAIRS = (
    (re.compile(r"(^|\.)attention\.(self|attention|attn)$"), "output.dense"),
    (re.compile(r"(^|\.)intermediate$"), "output.dense"),
    (re.compile(r"(^|\.)w_in$"), "w_out"),
)
# Layers that make heads of queries, and of keys or of values.
OF_QUERIES = re.compile(r"^(q|query|to_q|q_b)(_proj|_lin|_linear)?$")
OF_KEYS = re.compile(r"^(k|v|key|value|to_k|to_v)(_proj|_lin|_linear)?$")
INTERLEAVED = "query_key_value"  # fused layers in which queries, keys and values of a head or a group lie together
# Layers of attention with keys and values from a narrow activation.
LATENT = "kv_b_proj"
LATENT_COLUMNS = ("q_proj", "q_b_proj", LATENT, "g_proj")
LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")

# Classes of attention whose forward counts on all heads: in fused weights cut for eight TPUs, or in shapes.
ALL_HEADS = re.compile(r"^(CodeGen|TrOCR)Attention")
# Classes of embeddings whose rows are scaled, or normed, each by itself.
BY_ROWS = re.compile("(ScaledWord|Normed)Embedding$")

# Arguments of attention that are added to its scores, and differ per head; and parts of names of those that may.
BIASES = ("alibi", "position_bias")
OF_SCORES = re.compile("mask|bias|alibi|relative_pos")
