"""Masks of transformers' models that are not plainly causal, by each strategy."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import run_ranks
from huggingface_models import GROUPED, SPECIAL, USUAL, VOCABULARY, without_dropout
from test_context import fake
from test_context_models import LENGTH, Found, spread, train
from zeromesh.parallel.activation.checkpoint import checkpoint_modules
from zeromesh.parallel.context.applied import Unsupported
from zeromesh.parallel.context.spread_batch import IGNORE_LABEL
from zeromesh.parallel.context.spread_model import apply
from zeromesh.parallel.context.whole_masks import Whole

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))
from causal_models import throughout

WINDOW = {"sliding_window": 4}
SOME = {**USUAL, **SPECIAL}
FEW = {**GROUPED, **SPECIAL}
SIX = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", FEW),
    "mistral": ("MistralForCausalLM", {**FEW, **WINDOW}),
    "mistral, three heads": (
        "MistralForCausalLM",
        {**FEW, **WINDOW, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "mistral, six heads": ("MistralForCausalLM", {**FEW, **WINDOW, **SIX}),
    "gpt_oss, six heads": ("GptOssForCausalLM", {**FEW, **WINDOW, **SIX, "num_local_experts": 4}),
    "gemma2": ("Gemma2ForCausalLM", {**FEW, **WINDOW, "head_dim": 8, "attn_logit_softcapping": 0.5}),
    "gemma3": ("Gemma3ForCausalLM", {**FEW, **WINDOW, "head_dim": 8}),
    "cohere2": ("Cohere2ForCausalLM", {**FEW, **WINDOW}),
    "gpt_oss": ("GptOssForCausalLM", {**FEW, **WINDOW, "head_dim": 8, "num_local_experts": 4}),
    "llama4": (
        "Llama4ForCausalLM",
        {**FEW, "head_dim": 8, "attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 64},
    ),
    "bert": ("BertForMaskedLM", SOME),
    "bert, tokens": ("BertForTokenClassification", SOME),
    "roberta": ("RobertaForMaskedLM", {**SOME, "pad_token_id": 1}),
    "modernbert": ("ModernBertForMaskedLM", {**SOME, "local_attention": 8, "global_attn_every_n_layers": 2}),
    # Without the option its head drops out a tenth, other entries on each rank.
    "llama, tokens": ("LlamaForTokenClassification", {**FEW, "classifier_dropout": 0.0}),
}  # fmt: skip
PACKED = torch.tensor([[*range(5), *range(3), *range(8)], [*range(10), *range(6)]])
LEFT = torch.tensor([[0] * 3 + [1] * 13, [0] * 7 + [1] * 9])
RIGHT = LEFT.flip(1)


def build(name: str) -> Any:
    import transformers

    kind, options = MODELS[name]
    maker = getattr(transformers, kind)
    config = maker.config_class(**options)
    without_dropout(config)
    config._experts_implementation = "eager"  # others take no float64
    torch.manual_seed(3)
    model = maker(config).double().train()
    with torch.no_grad():
        for parameter in model.parameters():  # sinks and biases begin at zero, where errors would not show
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def data(name: str, given: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(12))
    labels = ids % 2 if "tokens" in name else ids.clone()
    labels[0, 5:9] = IGNORE_LABEL
    batch = {"input_ids": ids, "labels": labels}
    if given in ("left", "right"):
        batch["attention_mask"] = {"left": LEFT, "right": RIGHT}[given]
        labels[batch["attention_mask"] == 0] = IGNORE_LABEL
    if given == "packed":
        # With a cache, transformers does not look for documents, not even in one process.
        batch |= {"position_ids": PACKED, "use_cache": False}
    return batch


def train_spread(name: str, givens: tuple[str, ...], strategies: tuple[str, ...]) -> dict[Any, Found]:
    found = {}
    with throughout(torch.float64):
        for strategy in strategies:
            model = build(name)
            spread(model, strategy)
            for given in givens:
                # Eager attention gives tokens that see none the mean of all values, which the ring cannot.
                refused = (name, strategy, given) == ("gemma2", "ring", "left")
                with pytest.raises(Unsupported, match="see all tokens alike") if refused else nullcontext():
                    found[strategy, given] = train(model, data(name, given))
    return found


def compare(
    name: str, ranks: int, givens: tuple[str, ...], strategies: tuple[str, ...] = ("ulysses", "auto", "ring")
) -> None:
    by_rank = run_ranks(train_spread, ranks, name, givens, strategies)
    for given in givens:
        with throughout(torch.float64):
            loss, gradients = train(build(name), data(name, given))
        for strategy in (strategy for strategy in strategies if (strategy, given) in by_rank[0]):
            results = [found[strategy, given] for found in by_rank]
            for own, _ in results:
                torch.testing.assert_close(own, loss, rtol=1e-9, atol=0)
            for key, want in gradients.items():
                mean = torch.stack([gradients[key] for _, gradients in results]).mean(0)
                torch.testing.assert_close(mean, want, rtol=1e-9, atol=1e-9, msg=f"{name}, {strategy}, {given}: {key}")


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [name for name, (kind, _) in MODELS.items() if kind.endswith("ForCausalLM")])
def test_a_decoder_with_any_mask_trains_as_in_one_process(name: str, ranks: int) -> None:
    # gpt-oss gives no positions to its masks: in one process its documents see each other.
    givens = ("whole", "left", "right") if "gpt_oss" in name else ("whole", "left", "right", "packed")
    # Ranks that do not divide the heads pass keys on: all of three heads, and two pairs of ranks of six.
    compare(name, ranks, givens, ("auto", "ring") if "heads" in name else ("ulysses", "auto", "ring"))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [name for name, (kind, _) in MODELS.items() if not kind.endswith("ForCausalLM")])
def test_losses_of_a_tokens_own_labels_are_those_of_one_process(name: str, ranks: int) -> None:
    compare(name, ranks, ("whole", "left", "right"))


def test_packed_documents_that_cannot_be_cut_are_refused() -> None:
    model = build("mistral")
    apply(model, "ring", fake(2))
    batch = {name: x[:, :13] for name, x in data("mistral", "packed").items() if isinstance(x, torch.Tensor)}
    with pytest.raises(ValueError, match="a sequence has 13 tokens, which cannot be cut into 2 x 2 context-parallel"):
        model(**batch)


def train_checkpointed(given: str) -> Found:
    with throughout(torch.float64):
        model = build("gemma3")
        spread(model, "ring")
        checkpoint_modules(model.model.layers)
        return train(model, data("gemma3", given))


@pytest.mark.full
@pytest.mark.parametrize("given", ["left", "packed"])
def test_blocks_that_are_computed_again_see_the_same(given: str) -> None:
    with throughout(torch.float64):
        loss, gradients = train(build("gemma3"), data("gemma3", given))
    results = run_ranks(train_checkpointed, 2, given)
    torch.testing.assert_close(results[0][0], loss, rtol=1e-9, atol=0)
    for key, want in gradients.items():
        mean = torch.stack([found[key] for _, found in results]).mean(0)
        torch.testing.assert_close(mean, want, rtol=1e-9, atol=1e-9, msg=f"{given}: {key}")


@pytest.mark.parametrize(("name", "given"), [("mistral", "packed"), ("bert", "left")])
def test_masks_are_those_of_one_process(name: str, given: str) -> None:
    compare(name, 2, (given,), ("auto", "ring"))


def model_of(kind: str, **options: Any) -> Any:
    import transformers

    maker = getattr(transformers, kind)
    config = maker.config_class(**{**SOME, **options})
    without_dropout(config)
    return maker(config)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("BertModel", {}, "pooler cannot .* reads the first token, .* add_pooling_layer=False"),
        ("BertForSequenceClassification", {}, "pooler cannot|takes no shift_labels"),
        ("T5ForConditionalGeneration", {"num_layers": 1}, "an encoder with a decoder"),
        ("Qwen3NextForCausalLM", {}, "linear_attention|stateful|state-space|convolution"),
    ],
)
def test_what_mixes_tokens_otherwise_is_refused(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        apply(model_of(kind, **options), "ulysses", fake(2))


def test_masks_that_cannot_be_made_exactly_are_refused() -> None:
    from transformers.masking_utils import create_causal_mask

    model = build("mistral")
    apply(model, "ulysses", fake(2))
    ids = data("mistral", "whole")["input_ids"]
    with pytest.raises(ValueError, match=r"attention_mask has shape \(2, 1, 16, 16\), .* give one of tokens"):
        model(ids, attention_mask=torch.ones(2, 1, 16, 16))
    arguments = {"config": model.config, "inputs_embeds": torch.zeros(2, 8, 4), "attention_mask": None}
    arguments |= {"past_key_values": None, "position_ids": torch.arange(8).expand(2, -1)}
    with pytest.raises(Unsupported, match="a mask of its own"):
        create_causal_mask(**arguments, or_mask_function=lambda *index: True)
    with pytest.raises(Unsupported, match="a mask of its own, by blockwise_overlay"):
        create_causal_mask(**arguments, block_sequence_ids=torch.zeros(2, 8, dtype=torch.long))

    def sliding_window_overlay(*index: Any) -> bool:  # of another file than transformers'
        return True

    sliding_window_overlay.__qualname__ = "sliding_window_overlay"
    with pytest.raises(Unsupported, match="a mask of its own, by sliding_window_overlay"):
        Whole((2, 8)).rules("a model", {"mask_function": sliding_window_overlay, "device": torch.device("cpu")})
    opt = model_of("OPTForCausalLM", ffn_dim=64, word_embed_proj_dim=32)
    apply(opt, "ulysses", fake(2))
    with pytest.raises(ValueError, match="counts positions by attention_mask, .* pad at the end"):
        opt(ids, attention_mask=LEFT)
