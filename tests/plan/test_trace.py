"""Traced costs are those of plain torch on real tensors."""

import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from zeromesh.apps.plan.cost.cost import KernelWork, ModelCost, Recompute, WorkKind
from zeromesh.apps.plan.cost.cost_trace import BALANCED, InputsOf, TracedCost
from zeromesh.apps.plan.cost.estimate import estimate
from zeromesh.apps.plan.cost.passes import TokenTiles, TraceOptions
from zeromesh.apps.plan.cost.source import hugging_face_cost, token_inputs
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.train_settings import ModelShape
from zeromesh.base.operation_counts import Operations
from zeromesh.parallel.activation.checkpoint import checkpoint_modules
from zeromesh.parallel.activation.selective import GRANULARITIES

SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 101}
TINY = {**SIZES, "intermediate_size": 128}


def decoder(architecture: str = "gpt", **options: Any) -> Decoder:
    sizes = {"hidden_size": 64, "layers": 3, "heads": 4, "vocab_size": 101, "sequence_length": 32, **options}
    return Decoder(ModelShape(architecture=architecture, **sizes))


def gpt2(**options: Any) -> nn.Module:
    config = transformers.GPT2Config(n_embd=64, n_layer=3, n_head=4, vocab_size=101, n_positions=32, **options)
    return transformers.GPT2LMHeadModel(config)


def llama(**options: Any) -> nn.Module:
    config = transformers.LlamaConfig(**TINY, num_key_value_heads=2, use_cache=False, **options)
    return transformers.LlamaForCausalLM(config)


def images(micro_batch: int, _: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.empty(micro_batch, 3, 32, 32), "labels": torch.zeros(micro_batch, dtype=torch.long)}


def vit() -> nn.Module:
    config = transformers.ViTConfig(**TINY, image_size=32, patch_size=8, num_labels=10)
    return transformers.ViTForImageClassification(config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 2], num_labels=10)
    return transformers.ResNetForImageClassification(config)


TOKENS, IDS = token_inputs("tokens"), token_inputs()
MODELS: dict[str, tuple[Callable[[], nn.Module], InputsOf]] = {
    "gpt": (decoder, TOKENS),
    "gpt with dropout": (lambda: decoder(dropout=0.1), TOKENS),
    "gpt in bf16": (lambda: decoder().bfloat16(), TOKENS),
    "llama with a large head": (lambda: decoder("llama", kv_heads=2, vocab_size=3001), TOKENS),
    "frozen": (lambda: decoder("llama").requires_grad_(False), TOKENS),
    "GPT-2": (lambda: gpt2(use_cache=False), IDS),
    "Llama": (llama, IDS),
    "Llama, eager, bf16": (lambda: llama(attn_implementation="eager").bfloat16(), IDS),
    "BERT": (lambda: transformers.BertForMaskedLM(transformers.BertConfig(**TINY)), IDS),
    "ALBERT": (lambda: transformers.AlbertForMaskedLM(transformers.AlbertConfig(**TINY, embedding_size=32)), IDS),
    "ViT": (vit, images),
    "ResNet": (resnet, images),
}


def made(name: str) -> tuple[nn.Module, InputsOf]:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    model = make().train()
    if name == "frozen":  # all but the last block
        model.blocks[2].requires_grad_(True)
    return model, inputs


def real(inputs: InputsOf, micro_batch: int, sequence: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in inputs(micro_batch, sequence).items():
        zeros = torch.zeros(value.shape, dtype=value.dtype)
        found[name] = zeros if value.is_floating_point() else zeros + torch.arange(zeros.shape[-1]) % 7 + 3
    return found


def loss_of(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    output = model(**inputs)
    return output if isinstance(output, Tensor) else output.loss


def saved_on_cpu(model: nn.Module, inputs: dict[str, Tensor], blocks: list[str]) -> dict[str, int]:
    """Bytes that autograd keeps, by the block that keeps them first; "" has the rest."""
    own = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}
    inside, seen, found = [""], {}, dict.fromkeys(("", *blocks), 0)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own and storage.data_ptr() not in seen:
            seen[storage.data_ptr()] = storage  # held, so that its address is not given to another one
            found[inside[-1]] += storage.nbytes()
        return tensor

    modules = dict(model.named_modules())
    for name in blocks:
        modules[name].register_forward_pre_hook(lambda *_, name=name: inside.append(name))
        modules[name].register_forward_hook(lambda *_: inside.pop() and None)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = loss_of(model, inputs)
    del loss
    return found


def peak_on_cpu(model: nn.Module, inputs: dict[str, Tensor]) -> int:
    """Most bytes that torch's allocator gave out in a forward and backward."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))
    loss_of(model, inputs).backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss_of(model, inputs).backward()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    assert live == 0
    return peak


def on_cpu(model: nn.Module, inputs: InputsOf, **options: Any) -> TracedCost:
    return TracedCost(model, inputs, TraceOptions(kernels="cpu", **options))


def saved(cost: ModelCost, policy: Recompute = Recompute.NONE) -> float:
    return sum(unit.saved[policy].on() for unit in cost.units)


def highest(cost: ModelCost) -> float:
    """Return the most bytes of a forward and backward, with gradients until they are accumulated."""
    before, most = 0.0, 0.0
    for unit in cost.units:
        before += unit.saved[Recompute.NONE].on()
        most = max(most, before + max(peak.on() for peak in (unit.forward_peak, unit.early_peak, unit.gradient_peak)))
    return most


FAST = ("llama with a large head", "gpt in bf16", "Llama, eager, bf16", "ViT")
EACH = [name if name in FAST else pytest.param(name, marks=pytest.mark.full) for name in MODELS]


@pytest.mark.parametrize("name", EACH)
def test_saved_activations_peak_and_operations_are_those_of_plain_torch_on_the_cpu(name: str) -> None:
    model, inputs = made(name)
    cost, given = on_cpu(model, inputs).at(4, 32), real(inputs, 4, 32)
    assert cost.exact
    assert cost.parameters == sum(parameter.numel() for parameter in model.parameters())
    blocks = [unit.name for unit in cost.units if unit.block]
    expected = saved_on_cpu(model, given, blocks)
    assert saved(cost) == sum(expected.values())
    if name not in ("ALBERT", "ResNet"):  # a layer that is used many times, and stages that have layers beside blocks
        found = {unit.name: unit.saved[Recompute.NONE].on() for unit in cost.units if unit.block}
        assert found == {name: expected[name] for name in blocks}
    with Operations(model) as counted:
        loss_of(model, given).backward()
    assert cost.flops == counted.forward + counted.backward
    assert sum(w.flops.on() * w.count for unit in cost.units for w in unit.forward) == counted.forward
    # Convolutions have work space, and so has attention in bf16 on processors without instructions for it.
    if name not in ("ResNet", "gpt in bf16"):
        peak = peak_on_cpu(model, given) + sum(tensor.nbytes for tensor in given.values())
        # Numbers of one element, which kernels make inside, are not seen.
        assert highest(cost) == pytest.approx(peak, rel=2e-4)


@pytest.mark.parametrize(
    "name", ["gpt", *(pytest.param(n, marks=pytest.mark.full) for n in ("GPT-2", "ViT", "ResNet"))]
)
def test_autocast_saves_what_it_does_on_the_cpu(name: str) -> None:
    model, inputs = made(name)
    cost = on_cpu(model, inputs, autocast=torch.bfloat16).at(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = saved_on_cpu(model, real(inputs, 4, 32), [])
    assert cost.exact
    assert saved(cost) == expected[""]


@pytest.mark.parametrize("policy", [Recompute.BLOCKS, Recompute.PRODUCTS])
def test_checkpointed_blocks_keep_their_inputs_and_what_the_policy_says(policy: Recompute) -> None:
    model, inputs = made("gpt")
    cost, given = on_cpu(model, inputs).at(4, 32), real(inputs, 4, 32)
    blocks = [module for name, module in model.named_modules() if name in {u.name for u in cost.units if u.block}]
    checkpoint_modules(blocks, plan=GRANULARITIES["selective" if policy is Recompute.PRODUCTS else "full"])
    loss_of(model, given)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        loss = loss_of(model, given)
    live = sum(e.nbytes() for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]")
    # Beside, there are the loss and for each block the state of the random numbers.
    others = loss.nbytes + len(blocks) * torch.get_rng_state().nbytes
    assert live == saved(cost, policy) - sum(x.nbytes for x in given.values()) + others


@pytest.mark.parametrize("name", ["gpt", pytest.param("Llama", marks=pytest.mark.full)])
def test_a_batch_on_the_line_through_two_traces_costs_what_its_own_trace_says(name: str) -> None:
    model, inputs = made(name)
    line = on_cpu(model, inputs).at(5, 16)
    one = TracedCost(model, inputs, TraceOptions(kernels="cpu"))._traced((5,), 5, 16).at(5)
    assert line == one


def test_a_block_of_gpt_keeps_what_korthikanti_and_others_count() -> None:
    # "Reducing Activation Recomputation in Large Transformer Models", 2022, equations 1, 2 and 4: s b h (34 + 5 a s/h)
    # bytes, of which a tensor rank divides s b h (24 + 5 a s / h). They leave out the two numbers of a norm's row.
    config = transformers.GPT2Config(
        n_embd=64, n_layer=3, n_head=4, vocab_size=101, n_positions=32, activation_function="gelu", use_cache=False,
        attn_implementation="eager",
    )  # fmt: skip
    b, s, h, a = 4, 32, 64, 4
    cost = hugging_face_cost(config, TraceOptions(dtype=torch.float16)).at(b, s)
    block = cost.units[2]
    norms, scores = 2 * 2 * 4 * b * s, 5 * a * s * s * b
    assert block.name == "transformer.h.1"
    none, selective = block.saved[Recompute.NONE], block.saved[Recompute.SELECTIVE]
    assert none.on() == 34 * s * b * h + scores + norms
    # The engine keeps both inputs that are gathered from the parts of a sequence, which equation 4 gathers again.
    whole = 2 * 2 * s * b * h
    assert (none.split, none.tokens, none.whole) == (24 * s * b * h + scores, 10 * s * b * h + norms - whole, whole)
    assert selective.on() == 34 * s * b * h + norms
    assert block.saved[Recompute.BLOCKS].on() == 2 * s * b * h
    assert block.joins == 2 * 2 * s * b * h  # after the attention and after the MLP


def test_units_follow_the_forward_and_split_parameters_add_up() -> None:
    tied, untied = on_cpu(decoder(), TOKENS).at(2, 8), on_cpu(decoder("llama", vocab_size=999), TOKENS).at(2, 8)
    blocks = ["blocks.0", "blocks.1", "blocks.2"]
    assert [unit.name for unit in tied.units] == ["before blocks.0", *blocks, "after blocks.2"]
    assert [unit.name for unit in untied.units] == ["embedding", *blocks, "head"]
    assert [unit.block for unit in untied.units] == [False, True, True, True, False]
    # 101 tokens and 32 positions; the table of tokens is divided by its rows.
    assert (tied.units[0].parameters.split, tied.units[0].parameters.whole) == (101 * 64, 32 * 64)
    assert tied.units[0].resident == tied.units[0].parameters
    assert untied.units[-1].parameters.on() == 999 * 64 + 64
    assert untied.units[-1].resident.on() == 64
    # Attention 4 h^2 + 3 h and MLP 8 h^2 + 4 h are divided; two biases and two norms are not.
    h = 64
    assert tied.units[1].parameters[::2] == (12 * h * h + 7 * h, 6 * h)


def test_the_share_that_is_trained_and_its_work_follow_from_what_is_frozen() -> None:
    model, inputs = made("frozen")
    units = on_cpu(model, inputs).at(2, 8).units
    assert [unit.parameters.on() > 0 for unit in units if unit.block] == [False, False, True]
    assert not units[1].weight
    assert not units[1].input
    assert units[3].weight


def test_a_long_vocabulary_shows_in_the_temporaries_of_the_head() -> None:
    b, s, v = 2, 32, 5003
    head = TracedCost(decoder("llama", vocab_size=v), TOKENS, TraceOptions(dtype=torch.bfloat16)).at(b, s).units[-1]
    # The probabilities' logarithms in fp32 are kept. In the backward there are their gradient and its 16-bit copy, too.
    assert head.saved[Recompute.NONE].split == 4 * b * s * v + 4  # and the sum of the labels' weights
    assert head.backward_peak.on() >= 4 * b * s * v
    assert head.forward_peak.on() >= 2 * b * s * v


def test_context_ranks_share_a_sequence_but_attend_to_all_of_it() -> None:
    source = TracedCost(decoder("llama"), TOKENS)
    whole, part, plain = source.at(2, 32), source.at(2, 32, context=2), source.at(2, 16)
    assert saved(part) == saved(plain)
    assert part.context == 2
    assert part.sequence == 32

    def attention(cost: ModelCost) -> float:
        works = [work for unit in cost.units for work in unit.forward if work.kind is WorkKind.ATTENTION]
        return sum(work.flops.on() * work.count for work in works)

    assert attention(part) * 2 == attention(whole)
    assert attention(whole) > 0
    with pytest.raises(ValueError, match="context must divide"):
        source.at(2, 32, context=3)


def test_experts_get_equal_numbers_of_tokens() -> None:
    config = transformers.MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2, num_key_value_heads=2)
    cost = hugging_face_cost(config, TraceOptions(dtype=torch.bfloat16)).at(2, 16)
    assert cost.exact
    assert cost.note == BALANCED
    products = [w for w in cost.units[1].forward if w.kind is WorkKind.PRODUCT]
    b, s, h, f = 2, 16, 64, 128
    of_experts = 2 * (b * s * 2) * h * f * 3  # two experts a token, three matrices
    of_attention = 2 * b * s * (2 * h * h + 2 * h * h // 2)
    assert sum(w.flops.on() * w.count for w in products) == of_experts + of_attention + 2 * b * s * h * 4


def test_the_model_stays_as_it_is() -> None:
    model = decoder().eval()
    before = {name: (id(x), x.device, x.requires_grad) for name, x in model.named_parameters()}
    on_cpu(model, TOKENS).at(1, 8)
    assert before == {name: (id(x), x.device, x.requires_grad) for name, x in model.named_parameters()}
    assert not model.training
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


class Branching(nn.Module):
    """Reads a value of an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) if x.sum() > 0 else layer(-x)
        return x.sum()


def test_a_model_that_branches_on_activations_is_estimated_with_the_reason() -> None:
    cost = TracedCost(Branching(), {"x": torch.zeros(2, 8)}).at(2, 1)
    assert not cost.exact
    assert "item()" in cost.note
    assert "Branching" in cost.note
    assert cost.parameters == 3 * (64 + 8)
    assert saved(cost) > 0
    assert pickle.loads(pickle.dumps(cost)) == cost


def test_an_estimate_has_the_parameters_and_the_products_of_the_trace() -> None:
    model = decoder("llama", vocab_size=999)
    traced, estimated = TracedCost(model, TOKENS).at(2, 16), estimate(model, "llama", 2, 16, TraceOptions(), "untried")

    def products(cost: ModelCost) -> dict[str, float]:
        found = {}
        for unit in cost.units:
            works = [work for work in unit.forward if work.kind is WorkKind.PRODUCT]
            found[unit.name] = sum(work.flops.split * work.count for work in works)
        return {name: flops for name, flops in found.items() if flops}

    assert products(estimated) == products(traced)
    assert estimated.parameters == traced.parameters
    assert not estimated.exact
    assert estimated.note.endswith("untried")


def test_inputs_of_one_call_are_made_for_other_sizes() -> None:
    given = {"tokens": torch.zeros(2, 16, dtype=torch.long), "labels": torch.zeros(2, 16, dtype=torch.long)}
    model = decoder()
    assert on_cpu(model, given).at(4, 32) == on_cpu(model, TOKENS).at(4, 32)
    for bad in ((0, 8), (1, 0), (-1, 8)):
        with pytest.raises(ValueError, match="at least 1"):
            on_cpu(model, given).at(*bad)


def test_a_model_of_transformers_is_found_by_folder_and_file(tmp_path: Any) -> None:
    config = transformers.LlamaConfig(**TINY, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    for source in (config, tmp_path, tmp_path / "config.json"):
        assert hugging_face_cost(source).at(1, 8).parameters == hugging_face_cost(config).at(1, 8).parameters
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="no configuration of a model"):
        hugging_face_cost(tmp_path)


@pytest.mark.full
def test_adapters_keep_less_and_a_model_that_recomputes_by_itself_does() -> None:
    import peft  # not above: it imports compilers, in every process that collects tests

    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.0)
    model = peft.get_peft_model(llama(), adapters).train()
    cost, given = on_cpu(model, IDS).at(4, 32), real(IDS, 4, 32)
    assert saved(cost) == saved_on_cpu(model, given, [])[""]
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert round(sum(unit.parameters.on() for unit in cost.units)) == trained
    peak = peak_on_cpu(model, given) + sum(tensor.nbytes for tensor in given.values())
    assert highest(cost) == pytest.approx(peak, rel=2e-4)
    recomputing, plain = llama(), llama()
    recomputing.gradient_checkpointing_enable()  # type: ignore[operator]
    first, second = on_cpu(recomputing, IDS).at(4, 32), on_cpu(plain, IDS).at(4, 32)
    assert first.exact
    assert first.flops == second.flops
    assert saved(second, Recompute.BLOCKS) <= saved(first) < saved(second)


def test_tiles_keep_less_and_compute_again_what_their_backward_needs() -> None:
    tokens, inputs = 32, token_inputs()

    def traced(tiles: TokenTiles) -> ModelCost:
        cost = TracedCost(llama(), inputs, TraceOptions(kernels="cpu", tiles=tiles)).at(1, tokens)
        assert cost.exact
        return cost

    def products(works: Iterable[KernelWork]) -> float:
        return sum(work.flops.on() * work.count for work in works)

    plain, tiled, chunked = (traced(tiles) for tiles in (TokenTiles(), TokenTiles(8), TokenTiles(8, (), True)))
    width, inner = SIZES["hidden_size"], TINY["intermediate_size"]
    for without, block, both in zip(plain.units, tiled.units, chunked.units, strict=True):
        if not block.block:
            continue
        # The results of two products, of the activation, and their product, which the last product reads.
        inside = 4 * tokens * inner * 4
        assert without.saved[Recompute.NONE].on() - block.saved[Recompute.NONE].on() == inside
        assert products(block.again) == 2 * 2 * tokens * width * inner  # all but the last product
        assert products(block.forward) == products(without.forward)
        assert both.saved == block.saved
    head, in_chunks = tiled.units[-1], chunked.units[-1]
    assert products(in_chunks.forward) == 3 * products(head.forward)
    # The gradients of head and input take the place of the logits.
    gradients = 4 * width * (SIZES["vocab_size"] + tokens)
    assert in_chunks.saved[Recompute.NONE].on() >= gradients
    with pytest.raises(ValueError, match="cannot be computed in tiles"):
        traced(TokenTiles(8, ("LlamaAttention",)))
