"""What is easy to get silently wrong where models are split: each rule has a test that fails when it is broken."""

import copy
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zeromesh
from compare import assert_close
from harness import on_ranks, run_ranks
from huggingface_models import GPT2, GROUPED, SPECIAL, USUAL
from run import configuration, train_on_tokens, train_step, whole_state
from zeromesh import Settings, no_decay_groups
from zeromesh.engine.initialize import model_layout as layout
from zeromesh.parallel.follow.token_check import TokenCheck
from zeromesh.shard.parameters import deferred

LIMIT = 120
STEPS = 3
ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-4}}


def llama(dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**GROUPED, **SPECIAL, "num_hidden_layers": 2, **options})
    return transformers.LlamaForCausalLM(config).to(dtype).train()


def gpt2(**options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        **{**GPT2, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **options}
    )
    return transformers.GPT2LMHeadModel(config).double().train()


def batch(step: int, vocabulary: int = 96) -> torch.Tensor:
    return torch.randint(3, vocabulary, (4, 8), generator=torch.Generator().manual_seed(step))


def config(tensor: int, row: int = 0, **further: Any) -> dict[str, Any]:
    return configuration(batch=4, optimizer=ADAMW, stage=row, mesh={"tensor": tensor}) | further


def trained(model: Any, settings: dict[str, Any], vocabulary: int = 96, **arguments: Any) -> tuple[list[float], Any]:
    engine = zeromesh.initialize(model=model, config=settings, **arguments)[0]
    losses = [train_on_tokens(engine, batch(number, vocabulary)) for number in range(STEPS)]
    state = whole_state(engine.module)
    engine.destroy()
    return losses, state


def odd_vocabulary(tensor: int, tied: bool, row: int = 0) -> Any:
    model = llama(vocab_size=97, tie_word_embeddings=tied)
    return trained(model, config(tensor, row), 97)


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.full), True])
def test_padding_of_the_vocabulary_is_seen_nowhere(tied: bool) -> None:
    expected = run_ranks(odd_vocabulary, 1, 1, tied, timeout=LIMIT)[0]
    for ranks, row in ((2, 0), (4, 3)):
        for losses, state in run_ranks(odd_vocabulary, ranks, ranks, tied, row, timeout=LIMIT):
            assert losses == pytest.approx(expected[0], rel=1e-6)
            assert_close(state, expected[1])
            assert state["model.embed_tokens.weight"].shape == (97, 32)


@on_ranks(2, timeout=LIMIT)
def test_an_id_that_is_in_no_part_of_the_vocabulary_is_refused() -> None:
    engine = zeromesh.initialize(model=llama(), config=config(2))[0]
    with pytest.raises(IndexError) as caught:
        engine(input_ids=torch.full((4, 8), 96))
    message = str(caught.value)
    assert message == "the id 96 is not in the vocabulary of 96 entries: ids are 0 to 95"


def with_optimizer(tensor: int, row: int, optimizer: str, groups: bool) -> Any:
    model = llama()
    settings = config(tensor, row, optimizer={"type": optimizer, "params": {"lr": 1e-2, "weight_decay": 0.5}})
    arguments = {"model_parameters": no_decay_groups(model, 0.5)} if groups else {}
    return trained(model, settings, **arguments)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("optimizer", "ranks", "row", "groups"),
    [
        ("AdamW", 2, 0, True),
        ("Lamb", 4, 3, True),
        pytest.param("Lamb", 2, 0, False, marks=pytest.mark.full),
        ("Muon", 4, 2, False),
        pytest.param("Lion", 4, 1, True, marks=pytest.mark.full),
    ],
)
def test_groups_and_optimizers_of_whole_parameters_see_the_same(optimizer, ranks, row, groups) -> None:
    expected = run_ranks(with_optimizer, 1, 1, 0, optimizer, groups, timeout=LIMIT)[0]
    # Muon's directions, of entries up to 1, are products in bf16, three in each of five iterations: a sum in another
    # order may round one of them the other way, in every update.
    tolerance = STEPS * 1e-2 * 5 * 3 * 2**-8 if optimizer == "Muon" else 1e-9
    runs = run_ranks(with_optimizer, ranks, 2, row, optimizer, groups, timeout=LIMIT)
    losses = [sum(of_step) / ranks for of_step in zip(*(losses for losses, _ in runs), strict=True)]
    assert losses == pytest.approx(expected[0], rel=max(tolerance, 1e-6))
    for _, state in runs:
        assert_close(state, expected[1], tolerance)


@on_ranks(2, timeout=LIMIT)
def test_an_overflow_of_one_ranks_part_skips_the_update_on_all() -> None:
    settings = config(2, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    engine = zeromesh.initialize(model=llama(torch.float32), config=settings)[0]
    before = whole_state(engine.module)
    parameter = engine.module.model.layers[0].mlp.down_proj.weight
    infinite = torch.zeros_like(parameter).index_fill_(0, torch.tensor(0), float("inf"))
    if engine.mesh.rank == 1:
        parameter.register_hook(lambda gradient: gradient + infinite)
    train_on_tokens(engine, batch(0))
    same = all(torch.equal(value, before[name]) for name, value in whole_state(engine.module).items())
    assert (engine.skipped_steps, engine.loss_scale, same) == (1, 8.0, True)


def masks(sequence: bool) -> list[tuple[int, torch.Tensor]]:
    import transformers

    torch.manual_seed(0)
    options = {**USUAL, "num_hidden_layers": 1, "hidden_dropout_prob": 0.5, "attention_probs_dropout_prob": 0.5}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**options, attn_implementation="eager")).train()
    torch.manual_seed(torch.distributed.get_rank())  # what the ranks had before does not matter
    engine = zeromesh.initialize(model=model, config=config(2, tensor_parallel={"sequence": sequence}))[0]
    engine(input_ids=batch(0), labels=batch(0))  # code is checked in the first pass, in which more is called
    found = []

    def recording(x: torch.Tensor, p: float, training: bool, inplace: bool = False) -> torch.Tensor:
        y = torch.dropout(x, p, training)
        found.append((x.ndim, (y == 0) & (x != 0)))
        return y

    # The function in its place is no code of the model, which would be checked again.
    with patch.object(nn.functional, "dropout", recording), patch.object(TokenCheck, "end"):
        engine(input_ids=batch(0), labels=batch(0))
    found.append((0, torch.rand(3)))
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_dropout_is_the_same_where_ranks_compute_the_same_and_differs_where_they_do_not(sequence: bool) -> None:
    one, other = run_ranks(masks, 2, sequence, timeout=LIMIT)
    assert len(one) == 5
    assert [dims for dims, _ in one] == [3, 4, 3, 3, 0]  # embeddings, attention, output of both halves, afterwards
    equal = [torch.equal(first, second) for (_, first), (_, second) in zip(one, other, strict=True)]
    assert equal == [True, False, not sequence, not sequence, True]


def dropped(checkpointing: str, sequence: bool) -> Any:
    model = gpt2(resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)
    if checkpointing == "transformers":
        model.gradient_checkpointing_enable()
    settings = config(
        2, tensor_parallel={"sequence": sequence}, activation_checkpointing={"enabled": checkpointing == "zeromesh"}
    )
    return trained(model, settings)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("checkpointing", "sequence"),
    [
        ("zeromesh", True),
        ("transformers", False),
        pytest.param("zeromesh", False, marks=pytest.mark.full),
        pytest.param("transformers", True, marks=pytest.mark.full),
    ],
)
def test_recomputation_draws_the_same_numbers(checkpointing: str, sequence: bool) -> None:
    expected = run_ranks(dropped, 2, "", sequence, timeout=LIMIT)
    assert run_ranks(dropped, 2, checkpointing, sequence, timeout=LIMIT)[0][0] == expected[0][0]
    assert_close(run_ranks(dropped, 2, checkpointing, sequence, timeout=LIMIT)[1][1], expected[1][1], 1e-12)


@pytest.mark.parametrize(("update", "length"), [(0, 0), (0, 2), (1, 0)])
@on_ranks(2, timeout=LIMIT)
def test_ranks_that_share_a_batch_and_are_given_other_samples_are_told(update: int, length: int) -> None:
    """The message where the ranks' inputs differ, of the whole numbers of which nothing else tells."""
    engine = zeromesh.initialize(model=llama(), config=config(2))[0]
    for _ in range(update):
        train_on_tokens(engine, batch(0))
    ids = batch(engine.mesh.rank)
    with pytest.raises(ValueError, match="share one batch") as caught:
        train_on_tokens(engine, ids[:, : ids.shape[1] - length * engine.mesh.rank])
    message = str(caught.value)
    assert "ranks 0 and 1 share one batch, but their models were given different inputs" in message
    assert "rank=engine.data_rank" in message


@on_ranks(2, timeout=LIMIT)
def test_ranks_that_share_a_batch_and_compute_other_losses_are_told() -> None:
    engine = zeromesh.initialize(model=llama(), config=config(2))[0]
    loss = engine(input_ids=batch(0), labels=batch(0)).loss
    engine.backward(loss * (1 + 1e-4 * engine.mesh.rank))
    with pytest.raises(RuntimeError) as caught:
        engine.step()
    message = str(caught.value)
    assert "have different losses: " in message
    assert "give them the same samples" in message
    assert "are parts" in message


def without_gradients(_: int) -> float:
    ids = batch(0)
    expected = llama()(input_ids=ids).logits.detach()
    engine = zeromesh.initialize(model=llama(), config=config(2))[0]
    with torch.inference_mode():
        return (engine(input_ids=ids).logits - expected).abs().max().item()


def test_inference_mode_computes_what_one_process_does() -> None:
    assert max(run_ranks(without_gradients, 2, 0, timeout=LIMIT)) <= 1e-6


def parametrized() -> torch.nn.Module:
    torch.manual_seed(0)
    norm = torch.nn.utils.parametrizations.weight_norm
    layers = [norm(torch.nn.Linear(16, 32)), torch.nn.ReLU(), torch.nn.Linear(32, 16), torch.nn.Linear(16, 5)]
    return torch.nn.Sequential(*layers).double()


def differ_when_parametrized() -> float:
    x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    one, engine = parametrized(), zeromesh.initialize(model=parametrized(), config=config(2))[0]
    assert engine.module[2].weight.shape == (8, 32)
    train_step(engine, engine(x).square().mean())
    optimizer = torch.optim.AdamW(one.parameters(), **ADAMW["params"])
    one(x).square().mean().backward()
    optimizer.step()
    state = engine.state_dict()
    return max((state[name] - value).abs().max().item() for name, value in one.state_dict().items())


def test_layers_whose_weight_is_computed_stay_whole() -> None:
    assert max(run_ranks(differ_when_parametrized, 2, timeout=LIMIT)) <= 1e-12


@on_ranks(2, timeout=LIMIT)
def test_columns_after_columns_are_told() -> None:
    plan = {"0": "colwise", "2": "colwise"}
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
    engine = zeromesh.initialize(model=model, config=config(2, tensor_parallel={"plan": plan}))[0]
    with pytest.raises(ValueError, match="plan splits") as caught:
        engine(torch.ones(4, 16))
    message = str(caught.value)
    assert "2 (Linear), which tensor_parallel.plan splits, has 32 entries of its input on this rank" in message
    assert "colwise_gather_output" in message


def initial(tensor: int, row: int) -> dict[str, torch.Tensor]:
    import transformers

    options = {**GROUPED, **SPECIAL, "num_hidden_layers": 2}
    torch.manual_seed(7)
    with patch.object(deferred, "LARGE", 64), zeromesh.zero.Init():
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**options))
    engine = zeromesh.initialize(model=model, config=config(tensor, row))[0]
    return whole_state(engine.module)


def test_initial_weights_do_not_depend_on_how_the_model_is_split() -> None:
    expected = run_ranks(initial, 1, 1, 0, timeout=LIMIT)[0]
    for ranks, tensor, row in ((2, 2, 0), (4, 2, 3), (4, 4, 1)):
        for state in run_ranks(initial, ranks, tensor, row, timeout=LIMIT):
            assert all(torch.equal(value, expected[name]) for name, value in state.items())


PRECISIONS = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
}
ROUNDOFF = {"bf16": 2**-8, "fp16": 2**-11, "autocast": 2**-8}
"""As a part of the loss, how far two runs that round differently may be apart.

The loss is six times the largest logit or more. A logit has some 27 roundings on its way, which are of either sign and
add up to five or six. An element whose update is turned around has a gradient within its rounding: it moves the loss by
less than that part of what an update does.
"""


def narrow(tensor: int, precision: str, sequence: bool) -> Any:
    settings = config(tensor, 2, **PRECISIONS[precision], tensor_parallel={"sequence": sequence})
    return trained(llama(torch.float32), settings)


@pytest.mark.some(1)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_16_bits_train_as_on_one_rank_up_to_their_rounding(precision: str) -> None:
    expected = run_ranks(narrow, 1, 1, precision, False, timeout=LIMIT)[0][0]
    for sequence in (False, True):
        for losses, _ in run_ranks(narrow, 2, 2, precision, sequence, timeout=LIMIT):
            assert losses == pytest.approx(expected, rel=ROUNDOFF[precision])
            assert abs(losses[-1] - losses[0]) > 0.03  # more than the rounding


def begin(tensor: int, row: int, folder: str) -> None:
    engine = zeromesh.initialize(model=llama(vocab_size=97), config=config(tensor, row))[0]
    for number in range(2):
        train_on_tokens(engine, batch(number))
    engine.save_checkpoint(folder)
    engine.destroy()


def resume(tensor: int, row: int, folder: str) -> Any:
    engine = zeromesh.initialize(model=llama(vocab_size=97, initializer_range=0.5), config=config(tensor, row))[0]
    engine.load_checkpoint(folder)
    losses = [train_on_tokens(engine, batch(number)) for number in range(2, 4)]
    return losses, whole_state(engine.module)


def uninterrupted() -> Any:
    engine = zeromesh.initialize(model=llama(vocab_size=97), config=config(1))[0]
    losses = [train_on_tokens(engine, batch(number)) for number in range(4)]
    return losses[2:], whole_state(engine.module)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 2, 0), (4, 4, 3)),
        ((4, 2, 3), (1, 1, 0)),
        pytest.param((1, 1, 0), (4, 2, 2), marks=pytest.mark.full),
        pytest.param((4, 4, 1), (2, 2, 3), marks=pytest.mark.full),
    ],
)  # fmt: skip
def test_a_checkpoint_goes_on_under_another_tensor_size(before: Any, after: Any, tmp_path: Path) -> None:
    """Each is (ranks, tensor size, row)."""
    ranks, *layout = before
    run_ranks(begin, ranks, *layout, str(tmp_path), timeout=LIMIT)
    ranks, *layout = after
    expected = run_ranks(uninterrupted, 1, timeout=LIMIT)[0]
    results = run_ranks(resume, ranks, *layout, str(tmp_path), timeout=LIMIT)
    for _, state in results:
        assert_close(state, expected[1])
    data = len(results) // layout[0]
    if data == 1:
        assert results[0][0] == pytest.approx(expected[0], rel=1e-6)


def export(folder: str) -> None:
    engine = zeromesh.initialize(model=llama(torch.float32, vocab_size=97), config=config(2, 3))[0]
    train_on_tokens(engine, batch(0))
    engine.save_16bit_model(folder)
    expected = engine.gathered_state_dict()
    if engine.mesh.rank == 0:
        import transformers

        loaded = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())


def load(folder: str, tensor: int, row: int) -> dict[str, torch.Tensor]:
    with patch.object(deferred, "LARGE", 64):
        model = zeromesh.from_pretrained(folder)
    assert all(parameter.is_meta for parameter in model.parameters() if parameter.ndim > 1)
    engine = zeromesh.initialize(model=model, config=config(tensor, row))[0]
    return whole_state(engine.module)


def test_a_split_model_is_written_for_transformers_and_read_into_its_parts(tmp_path: Path) -> None:
    import transformers

    run_ranks(export, 4, str(tmp_path), timeout=LIMIT)
    expected = transformers.LlamaForCausalLM.from_pretrained(tmp_path).state_dict()
    for ranks, tensor, row in ((2, 2, 0), (4, 2, 3)):
        for state in run_ranks(load, ranks, str(tmp_path), tensor, row, timeout=LIMIT):
            assert all(torch.equal(state[name], value) for name, value in expected.items())


def change() -> Any:
    engine = zeromesh.initialize(model=llama(), config=config(2, 3))[0]
    weight = engine.module.model.layers[0].mlp.down_proj.weight
    other = torch.arange(32.0 * 64, dtype=torch.float64).view(32, 64)
    with zeromesh.zero.GatheredParameters([weight], modifier_rank=1):
        assert weight.shape == (32, 64)
        if engine.mesh.rank == 1:
            with torch.no_grad():
                weight.copy_(other)
    first = torch.equal(zeromesh.zero.safe_get_full_fp32_param(weight), other)
    zeromesh.zero.safe_set_full_fp32_param(weight, -other)
    second = torch.equal(whole_state(engine.module)["model.layers.0.mlp.down_proj.weight"], -other)
    ids = batch(0).chunk(engine.data_size)[engine.data_rank]
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    gradient = zeromesh.zero.safe_get_full_grad(weight)
    state = {name: value + 1 for name, value in engine.state_dict().items()}
    engine.load_state_dict(state)
    third = all(torch.equal(value, state[name]) for name, value in engine.state_dict().items())
    with pytest.raises(ValueError, match=r"has shape \(32, 64\), the value given \(32, 32\)"):
        zeromesh.zero.safe_set_full_fp32_param(weight, other[:, :32])
    return first, second, third, gradient.shape == (32, 64), float(gradient.norm())


def test_whole_tensors_of_split_parameters_are_read_and_changed() -> None:
    results = run_ranks(change, 4, timeout=LIMIT)
    assert all(result[:4] == (True, True, True, True) for result in results)
    assert len({result[4] for result in results}) == 1


def adapted(tensor: int, targets: list[str], sequence: bool = False) -> Any:
    import peft

    model = llama()
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)).double()
    return trained(model, config(tensor, 3, tensor_parallel={"sequence": sequence}))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("targets", [["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"], ["up_proj"]])
def test_adapters_are_split_with_what_they_adapt(targets: list[str], sequence: bool) -> None:
    pytest.importorskip("peft")
    expected = run_ranks(adapted, 1, 1, targets, timeout=LIMIT)[0]
    for losses, state in run_ranks(adapted, 2, 2, targets, sequence, timeout=LIMIT):
        assert losses == pytest.approx(expected[0], rel=1e-6)
        assert_close(state, expected[1])


def compiled(tensor: int, sequence: bool) -> Any:
    model = llama(torch.float32, num_hidden_layers=1)
    settings = config(tensor, 1, tensor_parallel={"sequence": sequence})
    engine = zeromesh.initialize(model=model, config=settings)[0]
    engine.compile(backend="eager")
    losses = [train_on_tokens(engine, batch(number)) for number in range(STEPS)]
    return losses


@pytest.mark.full
@pytest.mark.parametrize("sequence", [False, True])
def test_blocks_may_be_compiled(sequence: bool) -> None:
    expected = run_ranks(compiled, 1, 1, False, timeout=LIMIT)[0]
    for losses in run_ranks(compiled, 2, 2, sequence, timeout=LIMIT):
        assert losses == pytest.approx(expected, rel=1e-5)


@on_ranks(2, timeout=LIMIT)
def test_logits_that_are_asked_for_after_the_update_are_refused() -> None:
    engine = zeromesh.initialize(model=llama(torch.float32), config=config(2))[0]
    output = engine(input_ids=batch(0), labels=batch(0))
    train_step(engine, output.loss)
    with pytest.raises(RuntimeError) as caught:
        output.logits.argmax(-1)
    message = str(caught.value)
    assert "was changed after its logits were made, as by step" in message


def start(settings: dict[str, Any], options: dict[str, Any]) -> str:
    model = llama(**options)
    try:
        zeromesh.initialize(model=model, config=settings)
    except ValueError as error:
        model(input_ids=batch(0), labels=batch(0)).loss.backward()
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("ranks", "plan", "options", "match"),
    [
        (3, {}, {}, r"layers\.0\.self_attn\.o_proj \(rowwise\): 4 heads of width 8 cannot be split over 3 ranks: "
                    r"4 / 3 = 1\.333; tensor sizes near it that work are 2 and 4"),
        (4, {}, {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 96},
         r"k_proj \(colwise\): 24 = 3 blocks of 8 entries cannot be split over 4 ranks: 3 / 4 = 0.75"),
        (2, {}, {"intermediate_size": 63}, r"mlp\.down_proj \(rowwise\): a width of 63 cannot be split over 2 ranks"),
        (2, {"model.layers.*.mlp.upproj": "colwise"}, {}, r"'model\.layers\.\*\.mlp\.upproj' matches no module"),
        (2, {"model.layers.*.mlp.up_proj": "columns"}, {}, r"the style 'columns'; styles are colwise, rowwise"),
        (2, {"**.up_proj": "colwise", "**.mlp.*_proj": "rowwise"}, {},
         r"up_proj is matched by '\*\*\.up_proj' \(colwise\) and by '\*\*\.mlp\.\*_proj' \(rowwise\)"),
        (2, {"model.norm": "colwise"}, {}, r"model\.norm is a LlamaRMSNorm, which the style colwise does not fit"),
        (2, {"lm_head": "rowwise_split_input"}, {"tie_word_embeddings": True},
         r"are one parameter, but would be cut in two ways: dim 0 into 2 parts of 48, and dim 1 into 2 parts of 16"),
        (2, {"model.layers.*.mlp.up_proj": {"style": "packed_colwise", "sections": [32, 16]}}, {},
         r"the sections \[32, 16\] make 48 entries, and there are 64"),
    ],
)  # fmt: skip
def test_sizes_that_cannot_be_split_are_refused_with_the_arithmetic(ranks, plan, options, match) -> None:
    for message in run_ranks(start, ranks, config(ranks, tensor_parallel={"plan": plan}), options, timeout=LIMIT):
        assert re.search(match, message), message


def replicated(plan: dict[str, Any]) -> Any:
    engine = zeromesh.initialize(model=llama(), config=config(2, tensor_parallel={"plan": plan}))[0]
    shapes = {name: tuple(parameter.shape) for name, parameter in engine.module.named_parameters()}
    return shapes, [train_on_tokens(engine, batch(number)) for number in range(STEPS)]


def test_a_users_plan_comes_before_what_is_found() -> None:
    plan = {"model.layers.0.mlp.*_proj": "replicate", "lm_head": "replicate"}
    expected = run_ranks(odd_losses, 1, timeout=LIMIT)[0]
    shapes, losses = run_ranks(replicated, 2, plan, timeout=LIMIT)[0]
    assert shapes["model.layers.0.mlp.up_proj.weight"] == (64, 32)
    assert shapes["model.layers.1.mlp.up_proj.weight"] == (32, 32)
    assert shapes["lm_head.weight"] == (96, 32)
    assert losses == pytest.approx(expected, rel=1e-6)


def odd_losses() -> list[float]:
    return trained(llama(), config(1))[0]


def test_deepspeeds_keys_set_the_tensor_size() -> None:
    for section in ({"autotp_size": 2}, {"tensor_parallel": {"tp_size": 2}}):
        assert Settings.load({"tensor_parallel": section}).resolve_mesh(4)["tensor"] == 2
    with pytest.raises(ValueError, match=r"mesh.tensor = 4, tensor_parallel.autotp_size = 2; they mean the same"):
        Settings.load({"mesh": {"tensor": 4}, "tensor_parallel": {"autotp_size": 2}}).resolve_mesh(4)


def test_a_config_is_not_changed_by_splitting() -> None:
    settings = config(2)
    before = copy.deepcopy(settings)
    assert run_ranks(start, 2, settings, {}, timeout=LIMIT) == ["", ""]
    assert settings == before


@on_ranks(2, timeout=LIMIT)
def test_a_state_dict_of_parts_is_refused() -> None:
    engine = zeromesh.initialize(model=llama(torch.float32), config=config(2))[0]
    said = []
    for module in (engine.module, engine.module.model.layers[0].mlp):
        with pytest.raises(RuntimeError, match=r"state_dict\(\) would have a part") as caught:
            module.state_dict()
        said.append(str(caught.value))
    engine.module.model.norm.state_dict()
    with zeromesh.zero.GatheredParameters(list(engine.module.parameters())):
        assert engine.module.state_dict()["lm_head.weight"].shape == (96, 32)
    first, second = said
    assert "model.embed_tokens.weight: shape (48, 32) of (96, 32)" in first
    assert "a part of gate_proj.weight" in second


@on_ranks(1, timeout=LIMIT)
def test_a_plan_is_checked_where_there_is_nothing_to_split() -> None:
    plan = {"model.layers.*.mpl.*": "colwise"}
    with pytest.raises(ValueError, match="tensor-parallel") as caught:
        zeromesh.initialize(model=llama(torch.float32), config=config(1, tensor_parallel={"plan": plan}))
    said = str(caught.value)
    assert "'model.layers.*.mpl.*' matches no module or parameter" in said


@on_ranks(2, timeout=LIMIT)
def test_a_copy_of_a_split_model_is_split_and_its_own() -> None:
    engine = zeromesh.initialize(model=llama(), config=config(2))[0]
    other = copy.deepcopy(engine.module)
    losses = [float(one(input_ids=batch(0), labels=batch(0)).loss.detach()) for one in (engine, other)]
    train_on_tokens(engine, batch(0))
    losses += [float(one(input_ids=batch(0), labels=batch(0)).loss.detach()) for one in (engine, other)]
    (first, same, later, still), shapes = losses, [tuple(one.lm_head.weight.shape) for one in (engine.module, other)]
    assert first == same == still != later
    assert shapes == [(48, 32)] * 2


def said_of_the_share() -> list[str]:
    said: list[str] = []
    with patch.object(layout._log, "info", lambda text, *values: said.append(text % values)):
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 2, bias=False))
        plan = {"0": "colwise", "1": "rowwise", "2": "replicate"}
        settings = {"mesh": {"tensor": 2}, "tensor_parallel": {"plan": plan}}
        zeromesh.initialize(model=model, config=settings | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    return said


def test_the_share_of_bytes_that_is_split_is_told() -> None:
    first, second = run_ranks(said_of_the_share, 2, timeout=LIMIT)
    assert (
        "the tensor axis splits 88.9 % of the bytes of the parameters; each of its 2 ranks has 55.6 % of all" in first
    )
    assert second == []
