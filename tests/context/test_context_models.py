"""Models whose sequences are spread over ranks: what they compute, and which are refused."""

import copy
import gc
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from harness import run_ranks
from huggingface_models import (
    GROUPED,
    LAYERS,
    MODELS,
    SPECIAL,
    USUAL,
    VOCABULARY,
    Model,
    text,
    wide_loss,
    without_dropout,
)
from test_context import fake
from zeromesh import Mesh
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.train_settings import ModelShape
from zeromesh.parallel.activation.checkpoint import checkpoint_modules
from zeromesh.parallel.context.applied import SpreadSequences, Unsupported
from zeromesh.parallel.context.sequence_order import keep
from zeromesh.parallel.context.spread_attention import STRATEGIES
from zeromesh.parallel.context.spread_batch import IGNORE_LABEL
from zeromesh.parallel.context.spread_model import apply

LENGTH = 16
OTHERS = ("gpt2", "olmo2", "phi3", "granite", "opt", "deepseek_v3", "qwen3_moe")
DECODERS = {name: MODELS[name] for name in ("llama", "qwen3", "gpt_neox", *OTHERS) if name in MODELS} | {
    "mistral": Model(
        "MistralForCausalLM", "MistralConfig", {**GROUPED, **SPECIAL, "sliding_window": None}, text, LAYERS
    ),
    "starcoder2": Model("Starcoder2ForCausalLM", "Starcoder2Config", {**GROUPED, **SPECIAL}, text, LAYERS),
    "olmo2": Model("Olmo2ForCausalLM", "Olmo2Config", {**GROUPED, **SPECIAL}, text, LAYERS),
}  # fmt: skip
BERT = {**USUAL, **SPECIAL, "pad_token_id": 1, "is_decoder": True}
COUNTING = ("Roberta", "RobertaPreLayerNorm", "XLMRoberta", "XLMRobertaXL", "Camembert", "Data2VecText", "Xmod")
DECODERS |= {name: Model(f"{name}ForCausalLM", f"{name}Config", {**BERT}, text, LAYERS) for name in COUNTING}
DECODERS["Xmod"].options["default_language"] = "en_XX"
PLAIN = {
    "gpt": ModelShape(
        architecture="gpt", vocab_size=VOCABULARY, hidden_size=32, layers=2, heads=4, sequence_length=LENGTH
    ),
    "llama-style": ModelShape(
        architecture="llama", vocab_size=VOCABULARY, hidden_size=32, layers=2, heads=4, kv_heads=2,
        sequence_length=LENGTH,
    ),
}  # fmt: skip

Found = tuple[torch.Tensor, dict[str, torch.Tensor]]


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(11)
    model: Any = Decoder(PLAIN[name]) if name in PLAIN else DECODERS[name].build()
    if name in DECODERS and dtype == torch.float64:
        model.loss_function = wide_loss
    return model.to(dtype).train()


def data(name: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(12))
    labels = ids.clone()
    labels[0, :9] = IGNORE_LABEL
    labels[1, 13] = IGNORE_LABEL
    if name in COUNTING:  # positions of padding are not counted
        ids[:, [3, 14, 15]] = 1
        labels[:, 14:] = IGNORE_LABEL
    if name not in PLAIN:
        return {"input_ids": ids, "labels": labels}
    return {"tokens": ids, "labels": F.pad(labels[:, 1:], (0, 1), value=IGNORE_LABEL)}


def train(model: Any, batch: dict[str, Any]) -> Found:
    model.zero_grad()
    output = model(**batch)
    loss = output if isinstance(output, torch.Tensor) else output.loss
    loss.backward()
    return loss.detach(), {name: one.grad.clone() for name, one in model.named_parameters()}


def spread(model: Any, strategy: str) -> SpreadSequences:
    group = Mesh({"context": dist.get_world_size()}, torch.device("cpu")).group("context")
    return apply(model, strategy, group)


def train_spread(name: str, dtype: torch.dtype, prepare: Callable[[Any], None] | None) -> dict[str, Found]:
    found = {}
    for strategy in STRATEGIES:
        model = build(name, dtype)
        spread(model, strategy)
        if prepare is not None:
            prepare(model)
        found[strategy] = train(model, data(name))
    return found


def compare(
    name: str, ranks: int, tolerance: float = 1e-9, dtype: torch.dtype = torch.float64, prepare: Any = None
) -> None:
    loss, gradients = train(build(name, dtype), data(name))
    by_rank = run_ranks(train_spread, ranks, name, dtype, prepare)
    for strategy in STRATEGIES:
        for own, _ in (found[strategy] for found in by_rank):
            torch.testing.assert_close(own, loss, rtol=tolerance, atol=0)
        for key, want in gradients.items():
            mean = torch.stack([found[strategy][1][key] for found in by_rank]).mean(0)
            gap = ((mean - want).abs() / (1 + want.abs())).max()
            assert gap <= tolerance, f"{name}, {strategy}: {key} is off by {float(gap)}"


@pytest.mark.some(5)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gpt_neox", "starcoder2", *PLAIN])
def test_a_decoder_trains_as_in_one_process(name: str, ranks: int) -> None:
    compare(name, ranks)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [*OTHERS, *COUNTING])
def test_other_decoders_train_as_in_one_process(name: str, ranks: int) -> None:
    model = DECODERS[name]
    compare(name, ranks, model.tolerance, model.dtype)


def without_messages(applied: SpreadSequences) -> None:
    applied.attend = lambda q, k, v, scale: [setattr(applied, "_attentions", 1), q][1]  # type: ignore[method-assign]


@pytest.mark.parametrize("name", COUNTING)
@pytest.mark.parametrize("given", ["input_ids", "inputs_embeds"])
def test_positions_are_those_that_a_model_counts_of_whole_sequences(name: str, given: str) -> None:
    seen = []
    batch = data(name)
    for rank in (None, 0, 1):
        model = build(name)
        (embedding,) = (one for path, one in model.named_modules() if path.endswith("position_embeddings"))
        embedding.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        if given == "inputs_embeds":
            batch = {given: torch.randn(2, LENGTH, 32, dtype=torch.float64)}
        if rank is not None:
            without_messages(apply(model, "ring", fake(2, rank)))
            batch.pop("labels", None)
        model(**batch)
    whole, *parts = seen
    assert whole.min() >= 1
    assert not torch.equal(whole[0], torch.arange(LENGTH))
    for rank, part in enumerate(parts):
        assert torch.equal(part.expand(2, -1), keep(whole.expand(2, -1), rank, 2, 1))


def test_the_loss_function_of_transformers_gets_labels_that_are_shifted() -> None:
    compare("llama", 2, 1e-6, torch.float32)


def checkpointed(model: Any) -> None:
    if isinstance(model, Decoder):
        checkpoint_modules(model.blocks)
    else:
        model.gradient_checkpointing_enable()


@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_a_decoder_with_checkpointed_blocks_trains_the_same(name: str) -> None:
    compare(name, 2, prepare=checkpointed)


def compiled(model: Any) -> None:
    for block in model.blocks if isinstance(model, Decoder) else model.model.layers:
        block.compile(backend="eager")


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt", pytest.param("llama", marks=pytest.mark.full)])
def test_a_decoder_with_compiled_blocks_trains_the_same(name: str) -> None:
    compare(name, 2, prepare=compiled)


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.forward(*args, **kwargs)


def parts(strategy: str) -> dict[str, Any]:
    model = build("llama")
    applied = spread(Wrapper(model), strategy)
    ids, mask = data("llama")["input_ids"], torch.ones(2, LENGTH)
    with torch.no_grad():
        logits = Wrapper(model)(ids, mask).logits
        with applied.paused():
            whole = model(ids, mask).logits
            text = model.generate(ids[:, :4], max_new_tokens=3, do_sample=False)
        with pytest.raises(
            Unsupported, match=re.escape("called with a cache, as in generation; generate within paused()")
        ):
            model.generate(ids[:, :4], max_new_tokens=3)
    copied = copy.deepcopy(model)
    assert torch.equal(copied(ids, mask).logits, logits)
    mask[0, :3] = 0
    padded = copied(ids, mask).logits  # before the model that it is a copy of has seen the mask
    assert not torch.equal(padded, logits)
    assert torch.equal(padded, model(ids, mask).logits)
    return {"logits": logits, "whole": whole, "text": text, "config": model.config.to_json_string()}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_outputs_are_of_this_ranks_tokens_and_whole_ones_while_paused(strategy: str) -> None:
    model, ids = build("llama"), data("llama")["input_ids"]
    whole = model(ids).logits.detach()
    text = model.generate(ids[:, :4], max_new_tokens=3, do_sample=False)
    for rank, found in enumerate(run_ranks(parts, 2, strategy)):
        chunks = whole.chunk(4, 1)
        want = torch.cat([chunks[rank], chunks[3 - rank]], 1)
        torch.testing.assert_close(found["logits"], want, rtol=1e-9, atol=1e-9)
        assert torch.equal(found["whole"], whole)
        assert torch.equal(found["text"], text)
        assert "zeromesh" not in found["config"]


def test_nothing_is_done_on_one_rank_and_an_unknown_strategy_is_refused() -> None:
    model = build("gpt2")
    before = dict(vars(model))
    apply(model, "ring", fake(1))
    assert vars(model) == before
    with pytest.raises(ValueError, match="'striped', but it must be one of ring, ulysses"):
        apply(model, "striped", fake(2))


def test_a_model_that_was_spread_is_freed_and_its_names_with_it() -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = build("llama")
    gc.collect()  # models of other tests
    before = set(ALL_ATTENTION_FUNCTIONS)
    apply(model, "ring", fake(2))
    assert len(set(ALL_ATTENTION_FUNCTIONS) - before) == 1
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert set(ALL_ATTENTION_FUNCTIONS) == before


def of(name: str, **options: Any) -> Any:
    import transformers

    kind = {**MODELS, **DECODERS}[name]
    config = getattr(transformers, kind.config)(**{**kind.options, **options})
    if not any("drop" in option for option in options):
        without_dropout(config)
    return getattr(transformers, kind.name)(config)


def classifier() -> Any:
    import transformers

    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**GROUPED, **SPECIAL))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "encoder with decoder": (lambda: of("t5"), "T5ForConditionalGeneration cannot .* an encoder with a decoder"),
    "state space": (lambda: of("mamba"), "MambaForCausalLM cannot .* state-space"),
    "ALiBi": (lambda: of("bloom"), r"BloomForCausalLM cannot .* computes attention itself \(with ALiBi, say\)"),
    "ALiBi by option": (lambda: of("falcon", alibi=True), "FalconForCausalLM cannot .* adds biases .*ALiBi"),
    "its own attention": (lambda: of("falcon"), "FalconForCausalLM cannot .* computes attention itself"),
    "dropout": (lambda: of("gpt2", attn_pdrop=0.1), "attn_pdrop is 0.1, .*; set attn_pdrop to 0"),
    "layers dropped": (lambda: of("opt", layerdrop=0.2, dropout=0.0), "layerdrop is 0.2"),
    "rotary": (
        lambda: of("llama", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
        r"rotary positions \(dynamic\) follow the longest",
    ),
    "classifier": (classifier, "LlamaForSequenceClassification cannot .* ForSequenceClassificationLoss, takes no"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_of_transformers_that_cannot_be_spread_are_refused(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(Unsupported, match=message):
        apply(make(), "ring", fake(2))


class Changed(Wrapper):
    calls = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        y = super().forward(*args, **kwargs)
        match self.change:
            case "later":
                return y.cumsum(1) if self.calls > 2 else y
            case "length":
                return y * y.shape[1]
        return y.softmax(-1)


@pytest.mark.parametrize("name", ["later", "length", "apart"])
def test_code_of_others_in_a_model_of_transformers_is_checked(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = of("llama")
    layer = model.model.layers[0]
    layer.mlp = Changed(layer.mlp)
    layer.mlp.change = name
    without_messages(apply(model, "ring", fake(2)))
    refused = nullcontext() if name == "apart" else pytest.raises(Unsupported, match="name the module in")
    with caplog.at_level("WARNING", "zeromesh"), refused:
        for _ in range(4):
            model(torch.arange(LENGTH)[None] % VOCABULARY)
    assert not caplog.records


def test_heads_are_checked_before_anything_runs() -> None:
    with pytest.raises(ValueError, match="3 ranks do not divide 4 heads"):
        apply(of("llama"), "ulysses", fake(3))


class Tiny(nn.Module):
    def __init__(self, inner: nn.Module | None = None, **options: Any) -> None:
        super().__init__()
        self.embedding, self.inner, self.options = nn.Embedding(8, 8), inner, options

    def forward(self, tokens: Any, positions: Any = None, labels: Any = None) -> Any:
        x = self.embedding(tokens).unsqueeze(1)
        if self.options:
            x = F.scaled_dot_product_attention(x, x[:, :, : self.options.pop("keys", None)], x, **self.options)
        return x


class WithoutPositions(Tiny):
    def forward(self, tokens: Any) -> Any:  # type: ignore[override]
        return tokens


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (WithoutPositions(), "WithoutPositions cannot .* takes no position_ids or positions"),
        (Tiny(nn.TransformerEncoderLayer(8, 1)), r"inner\.self_attn \(MultiheadAttention\) cannot"),
        (Tiny(nn.LSTM(8, 8)), r"inner \(LSTM\) cannot .* recurrent"),
        (Tiny(nn.Conv1d(8, 8, 4)), r"inner \(Conv1d\) cannot .* reads tokens that other ranks have"),
    ],
)
def test_torch_models_that_cannot_be_spread_are_refused(model: nn.Module, message: str) -> None:
    with pytest.raises(Unsupported, match=message + ".*mesh.context to 1"):
        apply(model, "ring", fake(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "ended without a call of the attention"),
        ({"is_causal": False}, "is not causal"),
        ({"attn_mask": torch.ones(4, 4), "is_causal": False}, r"has a mask, of shape \(4, 4\)"),
        ({"is_causal": True, "dropout_p": 0.5}, "has dropout 0.5"),
        (
            {"is_causal": True, "keys": 2},
            r"__getitem__, in \S*test_context_models.py:\d+, needs the tokens of all ranks",
        ),
    ],
)
def test_calls_of_attention_that_cannot_be_spread_are_refused(options: dict[str, Any], message: str) -> None:
    model = Tiny(**options)
    apply(model, "ring", fake(2))
    with pytest.raises(Unsupported, match="^Tiny cannot .*" + message):
        model(torch.zeros(2, 8, dtype=torch.long))


def test_a_plain_model_that_is_given_labels_must_return_its_loss() -> None:
    model = Tiny(is_causal=True)
    without_messages(apply(model, "ring", fake(2)))
    tokens = torch.zeros(2, 8, dtype=torch.long)
    assert model(tokens).shape == (2, 1, 4, 8)
    with pytest.raises(Unsupported, match="something else than its mean loss"):
        model(tokens, labels=tokens)


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"softcap": 30.0}, "sdpa does not cap .* at 30.*build it with eager"),
        ({"position_bias": torch.ones(2)}, "adds a bias"),
        ({"dropout": 0.1}, "has dropout 0.1"),
    ],
)
def test_unsupported_arguments_of_attention_are_refused_with_the_modules_name(extras: Any, message: str) -> None:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = of("llama")
    apply(model, "ring", fake(2))
    attention = ALL_ATTENTION_FUNCTIONS[model.config._attn_implementation]
    x = torch.zeros(1, 4, 8, 8)
    with pytest.raises(Unsupported, match=r"^model\.layers\.1\.self_attn \(LlamaAttention\) cannot .*" + message):
        attention(model.model.layers[1].self_attn, x, x, x, None, **extras)


@pytest.mark.parametrize("name", ["llama", "starcoder2"])
def test_a_mask_of_a_models_own_and_counts_of_labels_are_refused(name: str) -> None:
    from transformers.masking_utils import create_causal_mask

    model = of(name)
    without_messages(apply(model, "ring", fake(2)))
    ids = data(name)["input_ids"]
    model(ids)
    with pytest.raises(Unsupported, match="num_items_in_batch counts labels, .*; leave it out"):
        model(ids, labels=ids, num_items_in_batch=3)
    arguments = {"config": model.config, "inputs_embeds": torch.zeros(2, LENGTH // 2, 4), "attention_mask": None}
    arguments |= {"past_key_values": None, "position_ids": torch.tensor([[0, 1, 2, 3, 12, 13, 14, 15]] * 2)}
    assert create_causal_mask(**arguments) is None
    with pytest.raises(Unsupported, match="a mask of its own"):
        create_causal_mask(**arguments, or_mask_function=lambda *index: True)
