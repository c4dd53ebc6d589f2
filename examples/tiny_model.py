"""Make a tiny Llama with a tokenizer and a chat template, to try fine-tuning without a download.

    python examples/tiny_model.py models/tiny
    python examples/tiny_model.py models/mixture --experts 8    # a mixture of experts, of the family Qwen3

Its weights are random, so it knows only what it learns from the example's chats.
"""

import argparse
import json
import sys
from pathlib import Path

try:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen3MoeConfig
except ImportError as error:
    sys.exit(f"{sys.executable} lacks {error.name}; activate the environment, or in the clone: pip install '.[hf]'")

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SPECIAL = ["<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"]


def main() -> None:
    """Create the tokenizer and the model, and write them to the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="folder to write")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=0, help="experts in each layer, two for each token")
    arguments = parser.parse_args()

    chats = Path(__file__).with_name("chat.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [message["content"] for chat in chats for message in json.loads(chat)["messages"]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>", additional_special_tokens=SPECIAL[2:]
    )
    fast.chat_template = TEMPLATE

    torch.manual_seed(0)
    shape = {
        "vocab_size": len(fast),
        "hidden_size": arguments.hidden_size,
        "intermediate_size": 3 * arguments.hidden_size,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": fast.eos_token_id,
        "pad_token_id": fast.pad_token_id,
    }
    if arguments.experts:
        size, heads = arguments.hidden_size, {"head_dim": arguments.hidden_size // 4}
        experts = {"num_experts": arguments.experts, "num_experts_per_tok": 2, "moe_intermediate_size": size}
        balance = {"norm_topk_prob": True, "output_router_logits": True, "router_aux_loss_coef": 0.01}
        config = Qwen3MoeConfig(**shape, **heads, **experts, **balance)
    else:
        config = LlamaConfig(**shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(arguments.folder)
    fast.save_pretrained(arguments.folder)
    print(f"{arguments.folder} holds a model with a vocabulary of {len(fast)} entries")


if __name__ == "__main__":
    main()
