import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from zeromesh.apps.train.architectures.decoder import VARIANTS, Decoder, rotary_table, rotate
from zeromesh.apps.train.architectures.flops import multiplied_parameters, parameters, training_flops_per_token
from zeromesh.apps.train.train_settings import ModelShape

SIZES: dict[str, Any] = {"vocab_size": 96, "hidden_size": 48, "layers": 2, "heads": 4, "sequence_length": 24}


def shape(architecture: str = "llama", **changes: Any) -> ModelShape:
    return ModelShape.model_validate({"architecture": architecture} | SIZES | changes)


def decoder(wanted: ModelShape, seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(wanted).double()


def ids(rows: int = 2, length: int = 24) -> torch.Tensor:
    return torch.randint(96, (rows, length), generator=torch.Generator().manual_seed(1))


def test_llama_computes_what_transformers_computes() -> None:
    transformers = pytest.importorskip("transformers")
    model = decoder(shape(kv_heads=2, mlp_size=80, rope_theta=500.0, norm_eps=1e-3))
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=80, max_position_embeddings=24, rms_norm_eps=1e-3, rope_theta=500.0,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, tie_word_embeddings=False,
    )  # fmt: skip
    reference = transformers.LlamaForCausalLM(config).double().eval()
    renamed = {
        "embedding": "model.embed_tokens", "blocks": "model.layers", "attention_norm": "input_layernorm",
        "mlp_norm": "post_attention_layernorm", "attention.query": "self_attn.q_proj",
        "attention.key": "self_attn.k_proj", "attention.value": "self_attn.v_proj",
        "attention.output": "self_attn.o_proj", "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj", "head": "lm_head",
    }  # fmt: skip
    state = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in renamed.items():
            name = name.replace(ours + ".", theirs + ".")
        state["model.norm.weight" if name == "norm.weight" else name] = tensor
    reference.load_state_dict(state)
    torch.testing.assert_close(model(ids()), reference(ids()).logits, rtol=0, atol=1e-6)  # its rotation is in fp32


def test_gpt_computes_what_transformers_computes() -> None:
    transformers = pytest.importorskip("transformers")
    model = decoder(shape("gpt"))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    config = transformers.GPT2Config(vocab_size=96, n_positions=24, n_embd=48, n_layer=2, n_head=4)
    reference = transformers.GPT2LMHeadModel(config).double().eval()
    own = model.state_dict()
    state = {"wte.weight": own["embedding.weight"], "wpe.weight": own["positions.weight"]}
    for end in ("weight", "bias"):
        state[f"ln_f.{end}"] = own[f"norm.{end}"]
        for n in range(2):
            ours, theirs = f"blocks.{n}", f"h.{n}"
            joined = torch.cat([own[f"{ours}.attention.{part}.{end}"] for part in ("query", "key", "value")])
            state[f"{theirs}.attn.c_attn.{end}"] = joined.t() if end == "weight" else joined
            for mine, other in (
                ("attention.output", "attn.c_proj"),
                ("mlp.up", "mlp.c_fc"),
                ("mlp.down", "mlp.c_proj"),
            ):
                tensor = own[f"{ours}.{mine}.{end}"]
                state[f"{theirs}.{other}.{end}"] = tensor.t() if end == "weight" else tensor
            state[f"{theirs}.ln_1.{end}"] = own[f"{ours}.attention_norm.{end}"]
            state[f"{theirs}.ln_2.{end}"] = own[f"{ours}.mlp_norm.{end}"]
    reference.transformer.load_state_dict(state)
    torch.testing.assert_close(model(ids()), reference(ids()).logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("architecture", sorted(VARIANTS))
def test_other_processes_can_be_given_the_model(architecture: str) -> None:
    model = decoder(shape(architecture))
    tokens = ids()
    assert torch.equal(pickle.loads(pickle.dumps(model))(tokens), model(tokens))


@pytest.mark.parametrize("architecture", sorted(VARIANTS))
def test_a_token_does_not_see_later_ones(architecture: str) -> None:
    model, tokens = decoder(shape(architecture)), ids()
    changed = tokens.clone()
    changed[:, 10:] = 5
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :10], after[:, :10], rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@pytest.mark.parametrize("architecture", sorted(VARIANTS))
def test_the_loss_is_the_mean_over_tokens_that_have_a_label(architecture: str) -> None:
    model, tokens = decoder(shape(architecture)), ids(length=25)
    inputs, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[0, 3:9] = -100
    kept = labels != -100
    expected = F.cross_entropy(model(inputs)[kept], labels[kept])
    torch.testing.assert_close(model(inputs, labels), expected)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)
    table = rotary_table(torch.arange(16), 8, 100.0)
    turned = [rotate(x.expand(1, 1, 16, 8), (table[0].double(), table[1].double())) for x in (query, key)]
    scores = turned[0] @ turned[1].mT
    for distance in range(1, 16):
        values = scores[0, 0].diagonal(-distance)
        torch.testing.assert_close(values, values[:1].expand_as(values), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("architecture", sorted(VARIANTS))
@pytest.mark.parametrize("tied", [None, True, False])
def test_the_formulas_count_the_parameters_and_the_products(architecture: str, tied: bool | None) -> None:
    wanted = shape(architecture, tie_embeddings=tied, kv_heads=2 if architecture == "llama" else None)
    model, tokens = Decoder(wanted), ids(rows=3)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters(wanted)
    with FlopCounterMode(display=False) as counter:
        model(tokens, tokens).backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(count for name, count in counted.items() if "attention" not in str(name) and "bmm" not in str(name))
    assert products == 6 * multiplied_parameters_in_matrices(wanted) * tokens.numel()
    attention = 6 * wanted.layers * wanted.hidden_size * wanted.sequence_length
    assert training_flops_per_token(wanted) == 6 * multiplied_parameters(wanted) + attention


def multiplied_parameters_in_matrices(wanted: ModelShape) -> int:
    vectors = sum(parameter.numel() for parameter in Decoder(wanted).parameters() if parameter.dim() == 1)
    return multiplied_parameters(wanted) - vectors


def test_initial_weights_have_the_spread_that_is_asked_for() -> None:
    model = decoder(shape(hidden_size=128, initializer_range=0.05, tie_embeddings=True))
    assert model.head.weight is model.embedding.weight
    block = model.blocks[0]
    spreads = {name: parameter.std().item() for name, parameter in block.named_parameters() if parameter.dim() == 2}
    for name, spread in spreads.items():
        wanted = 0.05 / 2 if name in ("attention.output.weight", "mlp.down.weight") else 0.05
        assert spread == pytest.approx(wanted, rel=0.05), name
    assert torch.equal(block.attention_norm.weight, torch.ones(128))


def test_dropout_acts_in_training_alone() -> None:
    model, tokens = decoder(shape(dropout=0.5)), ids()
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="25 tokens is longer than the model's 24"):
        decoder(shape())(ids(length=25))
    with pytest.raises(ValueError, match=r"hidden_size / model\.heads = 3 must be even"):
        Decoder(shape(hidden_size=12))
    with pytest.raises(ValueError, match="vocab_size is open"):
        Decoder(shape(vocab_size=None))


@pytest.mark.parametrize("architecture", sorted(VARIANTS))
def test_packed_documents_give_the_logits_of_each_alone(architecture: str) -> None:
    model, tokens = decoder(shape(architecture, kv_heads=2 if architecture == "llama" else None)), ids()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    sizes = [[7, 1, 12, 4], [24]]
    positions = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in sizes])
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in sizes])
    together = model(tokens, positions=positions, documents=documents)
    for row, lengths in enumerate(sizes):
        alone = [model(document[None])[0] for document in tokens[row].split(lengths)]
        torch.testing.assert_close(together[row], torch.cat(alone), rtol=0, atol=1e-9)
    assert not torch.allclose(together[0], model(tokens)[0])
