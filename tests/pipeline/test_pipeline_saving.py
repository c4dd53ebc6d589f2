"""What is saved, loaded or shown of a model that is cut into stages is the whole of it."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from compare import assert_same
from harness import on_ranks, run_ranks
from manifests import whole_manifest
from zeromesh.apps.train.architectures import decoder
from zeromesh.apps.train.train_settings import ModelShape
from zeromesh.checkpoint.boxes import Reader
from zeromesh.zero import (
    GatheredParameters,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
)

LAYERS, WORDS = 5, 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean += x.detach().mean((0, 1))
        return x + self.linear(self.norm(x)).relu()


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 8)
        self.first = Block()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last = Block()
        self.head = nn.Linear(8, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(self.last(x)).flatten(0, 1), labels.flatten())


def build_decoder() -> nn.Module:
    torch.manual_seed(0)
    return Decoder().double()


def build_hugging_face(kind: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":  # whose head is the embedding
        sizes = {"n_embd": 16, "n_layer": 4, "n_head": 2, "n_positions": 16}
        drops = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS, **sizes, **drops)).double()
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "max_position_embeddings": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **sizes, **heads)).double()


BUILD: dict[str, Callable[[], nn.Module]] = {
    "decoder": build_decoder,
    "gpt2": lambda: build_hugging_face("gpt2"),
    "llama": lambda: build_hugging_face("llama"),
}


def start(
    kind: str, row: int = 0, pipeline: int = 1, tensor: int = 1, schedule: dict[str, Any] | None = None
) -> zeromesh.Engine:
    settings = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "MultiStepLR", "params": {"milestones": [2, 4], "gamma": 0.5}},
        "zero_optimization": {"stage": row},
        "mesh": {"pipeline": pipeline, "tensor": tensor},
        "pipeline": schedule or {},
    }
    return zeromesh.initialize(model=BUILD[kind](), config=settings)[0]


def batches(engine: zeromesh.Engine, step: int) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(step)
    for _ in range(4):
        ids = torch.randint(0, WORDS, (2, 6), generator=generator).chunk(engine.data_size)[engine.data_rank]
        plain = isinstance(engine.module, Decoder)
        yield {"ids": ids, "labels": ids} if plain else {"input_ids": ids, "labels": ids}


def train(engine: zeromesh.Engine, updates: int) -> list[float]:
    return [float(engine.train_batch(batches(engine, engine.global_steps))) for _ in range(updates)]


def saved(folder: Path) -> dict[str, torch.Tensor]:
    reader = Reader(folder)
    reader.verify()
    return {name: reader.tensor(name) for name in reader.names if not name.startswith("random/")}


def begin(kind: str, folder: str) -> None:
    engine = start(kind)
    train(engine, 3)
    engine.save_checkpoint(folder, "first", client_state={"best": 0.5})


def load_and_save(kind: str, folder: str, tag: str, to: str, settings: dict[str, int]) -> Any:
    engine = start(kind, **settings)
    path, state = engine.load_checkpoint(folder, tag)
    assert path is not None
    assert state == {"best": 0.5}
    engine.save_checkpoint(folder, to, state)
    return engine.global_steps, engine.get_lr(), engine.gathered_state_dict()


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["decoder", "gpt2"])
def test_a_checkpoint_goes_from_any_number_of_stages_to_any_other(kind: str, tmp_path: Path) -> None:
    run_ranks(begin, 1, kind, str(tmp_path))
    expected, manifest = saved(tmp_path / "first"), whole_manifest(tmp_path / "first")
    assert any("exp_avg" in name for name in expected)
    assert bool(manifest["tied"]) == (kind == "gpt2")
    tag = "first"
    for number, settings in enumerate(
        [{"pipeline": 2}, {"pipeline": 4}, {"pipeline": 2, "row": 3}, {"pipeline": 2}, {}]
    ):
        ranks = 4 if number == 2 else settings.get("pipeline", 1)
        if number == 3:
            settings = {"pipeline": 2, "tensor": 2}
            ranks = 4
        to = f"number{number}"
        found = run_ranks(load_and_save, ranks, kind, str(tmp_path), tag, to, settings)
        assert_same(saved(tmp_path / to), expected)
        again = whole_manifest(tmp_path / to)
        for key in ("tied", "scalars", "parameters", "groups", "scheduler", "global_steps"):
            assert again[key] == manifest[key], key
        for steps, rates, _ in found:
            assert (steps, rates) == (3, [0.005])
        whole = found[0][2]
        assert all(torch.equal(whole[name], expected[f"parameter/{own}"]) for name, own in again["tied"].items())
        names = {name for name in expected if name.startswith(("parameter/", "buffer/"))}
        assert_same({name: whole[name.partition("/")[2]] for name in names}, {name: expected[name] for name in names})
        assert whole.keys() == BUILD[kind]().state_dict().keys()
        assert not any(state for _, _, state in found[1:])
        tag = to


@on_ranks(4)
def test_a_resumed_run_continues_bit_for_bit_with_each_ranks_random_state(tmp_path: Path) -> None:
    folder = str(tmp_path)
    engine = start("decoder", row=2, pipeline=2)
    train(engine, 2)
    torch.manual_seed(engine.mesh.rank)
    engine.save_checkpoint(folder)
    expected = [*train(engine, 2), float(torch.rand(()))]
    other = start("decoder", row=2, pipeline=2)
    torch.manual_seed(77)
    other.load_checkpoint(folder)
    assert [*train(other, 2), float(torch.rand(()))] == expected
    assert expected[-1] == float(torch.rand((), generator=torch.Generator().manual_seed(engine.mesh.rank)))


def continue_from(folder: str, pipeline: int, updates: int, save: bool) -> list[float]:
    engine = start("decoder", pipeline=pipeline)
    engine.load_checkpoint(folder)
    losses = train(engine, updates)
    if save:
        engine.save_checkpoint(folder)
    return [*losses, float(torch.rand(())), random.random()]


def test_losses_after_a_change_of_stages_are_those_of_the_undisturbed_run(tmp_path: Path) -> None:
    expected = run_ranks(undisturbed, 1)[0]
    run_ranks(continue_from, 2, str(tmp_path), 2, 2, True)
    found = run_ranks(continue_from, 1, str(tmp_path), 1, 2, False)[0]
    assert found[:2] == pytest.approx(expected[2:4], rel=1e-9)
    found = run_ranks(continue_from, 4, str(tmp_path), 4, 2, False)
    for losses in found:
        assert losses[:2] == pytest.approx(expected[2:4], rel=1e-9)
        assert losses[2:] == found[0][2:], "all ranks of a pipeline draw the same where there are other stages now"


def undisturbed() -> list[float]:
    return train(start("decoder"), 4)


def buffers_after(pipeline: int, chosen: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = start("decoder", pipeline=pipeline, schedule=chosen)
    train(engine, 2)
    return engine.gathered_state_dict()


@pytest.mark.parametrize("chosen", [{}, {"schedule": "interleaved-1f1b", "chunks": 2}], ids=["1f1b", "interleaved"])
def test_buffers_are_those_of_the_stage_that_computes_with_them(chosen: dict[str, Any]) -> None:
    expected, found = run_ranks(buffers_after, 1, 1, {})[0], run_ranks(buffers_after, 2, 2, chosen)[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        torch.testing.assert_close(found[name], value)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.linspace(0.5, 1.5, 8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.values


def share_buffers(folder: str, pipeline: int) -> Any:
    torch.manual_seed(0)
    model, scale = Decoder(), Scale()
    for number, layer in enumerate(model.layers):
        layer.norm = nn.Sequential(layer.norm, scale)
        layer.register_buffer("same", model.layers[0].same if number else torch.ones(8))
    config = {"train_batch_size": 8, "gradient_accumulation_steps": 4, "optimizer": {"type": "AdamW"}}
    model, config = model.double(), config | {"mesh": {"pipeline": pipeline}}
    engine = zeromesh.initialize(model=model, config=config)[0]
    losses = train(engine, 2)
    assert list(scale._buffers) == ["values", "calls"], "all stages compute with it"
    engine.save_checkpoint(folder, "shared")
    engine.load_checkpoint(folder, "shared")
    return losses, engine.gathered_state_dict(), engine.state_dict()


def test_a_buffer_that_blocks_of_several_stages_have_is_one(tmp_path: Path) -> None:
    (losses, expected, state), (first, second) = (
        run_ranks(share_buffers, 1, str(tmp_path / "1"), 1)[0],
        run_ranks(share_buffers, 2, str(tmp_path / "2"), 2),
    )
    assert saved(tmp_path / "2" / "shared").keys() == saved(tmp_path / "1" / "shared").keys()
    assert first[1].keys() == expected.keys()
    for found, _, shown in (first, second):
        assert found == pytest.approx(losses, rel=1e-9)
        assert shown.keys() == state.keys()
        # What blocks write is each stage's own, and that of the first stage with the buffer is shown under all names.
        calls = [float(value) for name, value in shown.items() if name.endswith("calls")]
        assert calls == [2 * 4 * 3.0] * LAYERS


def load_into_other(folder: str) -> list[str]:
    said = []
    for layers in (4, 6):
        torch.manual_seed(0)
        model = Decoder().double()
        model.layers = nn.ModuleList(Block().double() for _ in range(layers))
        engine = zeromesh.initialize(model=model, config={"mesh": {"pipeline": 2}, "optimizer": {"type": "AdamW"}})[0]
        with pytest.raises(ValueError, match="is of another model") as error:
            engine.load_checkpoint(folder, load_optimizer_states=False)
        said.append(str(error.value))
        engine.load_checkpoint(folder, load_optimizer_states=False, load_module_strict=False)
        assert torch.equal(engine.state_dict()["layers.3.linear.weight"], saved_in(folder, "layers.3.linear.weight"))
    return said


def saved_in(folder: str, name: str) -> torch.Tensor:
    return Reader(Path(folder) / "first").tensor(f"parameter/{name}")


def test_a_checkpoint_of_another_model_is_refused_by_the_names_of_all_stages(tmp_path: Path) -> None:
    run_ranks(begin, 1, "decoder", str(tmp_path))
    for fewer, more in run_ranks(load_into_other, 2, str(tmp_path)):
        assert fewer.count("not in the model") == 5, "four parameters and a buffer, and none of the other stage"
        assert more.count("not in the checkpoint") == 5
        assert "layers.5.mean" in more
        assert "layers.0." not in fewer + more


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    early = [*model.embed.parameters(), *model.first.parameters()]
    late = [*model.last.parameters(), *model.head.parameters()]
    rest = [*model.layers.parameters()]
    return [{"params": early, "lr": 0.1}, {"params": late, "weight_decay": 0.0}, {"params": rest}]


def resume_groups(folder: str, pipeline: int, load: str | None, save: str) -> tuple[list[int], list[dict[str, Any]]]:
    model = build_decoder()
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "MultiStepLR", "params": {"milestones": [1], "gamma": 0.5}},
        "mesh": {"pipeline": pipeline},
        "fp16": {"enabled": True, "initial_scale_power": 4},
    }
    engine = zeromesh.initialize(model=model.float(), config=config, model_parameters=groups_of(model))[0]
    if load is not None:
        engine.load_checkpoint(folder, load)
    else:
        train(engine, 2)
        engine.loss_scaler.update(True)
        engine.loss_scaler.update(True)
    engine.save_checkpoint(folder, save)
    groups = [{**group, "params": None} for group in engine.optimizer.param_groups]
    assert engine.loss_scale == 8.0
    return [len(group["params"]) for group in engine.optimizer.param_groups], groups


def test_groups_that_a_stage_has_nothing_of_stay_as_they_are(tmp_path: Path) -> None:
    first = run_ranks(resume_groups, 2, str(tmp_path), 2, None, "two")
    assert first[0][0][1] == 0
    assert first[1][0][0] == 0, "the test needs stages that have nothing of a group"
    for ranks, load, save in ((1, "two", "one"), (4, "one", "four")):
        for _, groups in run_ranks(resume_groups, ranks, str(tmp_path), ranks, load, save):
            assert groups == first[0][1]
        assert_same(saved(tmp_path / save), saved(tmp_path / "two"))
        assert whole_manifest(tmp_path / save)["scalars"] == whole_manifest(tmp_path / "two")["scalars"]
    assert first[0][1][0]["lr"] == 0.05


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.tensor([index % WORDS, 1, 2])
        return {"ids": ids, "labels": ids}


def read_data(folder: str, pipeline: int, load: bool) -> list[list[int]]:
    settings = {"train_batch_size": 4, "gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW"}}
    settings |= {"mesh": {"pipeline": pipeline}}
    engine, _, loader, _ = zeromesh.initialize(model=build_decoder(), config=settings, training_data=Numbers())
    if load:
        engine.load_checkpoint(folder)
    seen: list[list[int]] = []

    def noted() -> Iterator[Any]:
        for batch in loader:
            seen.append(batch["ids"][:, 0].tolist())
            yield batch

    source = noted()
    engine.train_batch(source)
    engine.train_batch(source)
    if not load:
        engine.save_checkpoint(folder)
        engine.train_batch(source)
        engine.train_batch(source)
    return seen[-4:]


def test_the_data_go_on_where_the_checkpoint_was_written(tmp_path: Path) -> None:
    first = run_ranks(read_data, 2, str(tmp_path), 2, False)
    assert first[0] == first[1]
    assert run_ranks(read_data, 2, str(tmp_path), 2, True) == first
    assert run_ranks(read_data, 1, str(tmp_path), 1, True)[0] == first[0]


def save_whole(kind: str, folder: str, settings: dict[str, int]) -> dict[str, torch.Tensor]:
    engine = start(kind, **settings)
    train(engine, 1)
    assert engine.save_16bit_model(folder)
    return engine.gathered_state_dict()


@pytest.mark.some(2)
@pytest.mark.parametrize("settings", [{"pipeline": 2, "row": 3}, {"pipeline": 4}, {"pipeline": 2, "tensor": 2}])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_opens_what_all_stages_wrote(kind: str, settings: dict[str, int], tmp_path: Path) -> None:
    import transformers

    expected = run_ranks(save_whole, 4, kind, str(tmp_path), settings)[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same(dict(model.state_dict()), expected)
    like = BUILD[kind]()
    like.load_state_dict(expected)
    ids = torch.arange(6)[None]
    # Not to the bit: weights in a file that is mapped lie at other addresses, and products may take another way.
    torch.testing.assert_close(model.eval()(ids).logits, like.eval()(ids).logits)


@on_ranks(2)
def test_all_stages_raise_if_the_first_rank_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    folder = str(tmp_path / "file")
    engine = start("llama", pipeline=2)
    with pytest.raises((OSError, RuntimeError)):
        engine.save_16bit_model(folder)
    engine.save_16bit_model(f"{folder}-other")


def look(row: int, tensor: int) -> None:
    engine = start("gpt2", row=row, pipeline=2, tensor=tensor)
    plain = build_hugging_face("gpt2")
    assert engine.sharded.count() == sum(p.numel() for p in plain.parameters())
    assert sum(p.numel() for p in engine.module.parameters()) < engine.sharded.count()
    found, expected = engine.state_dict(), plain.state_dict()
    assert found.keys() == expected.keys()
    assert_same({name: value.detach() for name, value in found.items()}, dict(expected))
    assert engine.state_dict(prefix="x.").keys() == {f"x.{name}" for name in expected}

    changed = {name: value + 1 if value.is_floating_point() else value for name, value in expected.items()}
    assert not engine.load_state_dict(changed).missing_keys
    assert_same({name: value.detach() for name, value in engine.state_dict().items()}, changed)
    block = "transformer.h.3.ln_1.weight"
    fewer = {name: value for name, value in changed.items() if name != block} | {"strange": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r"lacks transformer\.h\.3\.ln_1\.weight, and has strange that"):
        engine.load_state_dict(fewer)
    result = engine.load_state_dict(fewer, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == ([block], ["strange"])
    with pytest.raises(RuntimeError, match="size mismatch"):
        engine.load_state_dict(changed | {block: torch.zeros(3)})

    assert engine.memory_report()["total"] > 0
    engine.traffic_report(reset=True)
    train(engine, 1)
    assert any(key.endswith("/pipeline") for key in engine.traffic_report())


@pytest.mark.some(1)
@pytest.mark.parametrize("row", [0, 3])
def test_the_state_and_the_count_are_of_all_stages(row: int) -> None:
    run_ranks(look, 4, row, 1)


def test_the_state_of_stages_that_are_split_is_whole() -> None:
    run_ranks(look, 4, 0, 2)


def touch(row: int) -> tuple[list[int], dict[str, torch.Tensor]]:
    engine = start("decoder", row=row, pipeline=2)
    train(engine, 1)
    absent = []
    for number, layer in enumerate(engine.module.layers):
        weight = layer.linear.weight
        value, state = safe_get_full_fp32_param(weight), safe_get_full_optimizer_state(weight, "exp_avg")
        assert (value is None) == (state is None) == (not isinstance(weight, nn.Parameter))
        if value is None:
            absent.append(number)
        else:
            assert value.shape == state.shape == (8, 8)
        safe_set_full_fp32_param(weight, torch.full((8, 8), float(number)))
    own, first = list(engine.module.parameters()), engine.mesh.stage_ranks[0]
    with GatheredParameters([*own, engine.module.head.bias], modifier_rank=first), torch.no_grad():
        if engine.mesh.rank == first and isinstance(engine.module.head.bias, nn.Parameter):
            engine.module.head.bias.fill_(7)
    with GatheredParameters(engine.module.layers[0].norm.bias):
        pass  # of one stage only, on the other nothing
    if engine.mesh.group("pipeline").rank == 1:
        with pytest.raises(ValueError, match="modifier_rank is 0, but it is ranks 1, 3 that have these"):
            GatheredParameters(own, modifier_rank=0).__enter__()
    return absent, engine.gathered_state_dict()


@pytest.mark.parametrize("row", [0, 3])
def test_parameters_of_other_stages_are_none_and_stay(row: int) -> None:
    found = run_ranks(touch, 4, row)
    assert [absent for absent, _ in found] == [[3, 4], [0, 1, 2], [3, 4], [0, 1, 2]]
    whole = found[0][1]
    for number in range(LAYERS):
        assert bool((whole[f"layers.{number}.linear.weight"] == number).all())
    assert bool((whole["head.bias"] == 7).all())


def save_adapters(folder: str, pipeline: int) -> dict[str, torch.Tensor]:
    import peft

    torch.manual_seed(0)
    given = {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "init_lora_weights": False}
    model = peft.get_peft_model(build_hugging_face("llama"), peft.LoraConfig(task_type="CAUSAL_LM", **given)).double()
    settings = {"mesh": {"pipeline": pipeline}, "optimizer": {"type": "AdamW"}}
    engine = zeromesh.initialize(model=model, config=settings)[0]
    engine.save_16bit_model(f"{folder}/adapters{pipeline}")
    engine.save_16bit_model(f"{folder}/merged{pipeline}", merge_adapters=True)
    return engine.gathered_state_dict()


@pytest.mark.full
def test_adapters_of_all_stages_are_written_alone_or_merged(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    pytest.importorskip("peft")
    for pipeline in (1, 2):
        run_ranks(save_adapters, pipeline, str(tmp_path), pipeline)
    for kind, name in (("adapters", "adapter_model.safetensors"), ("merged", "model.safetensors")):
        one, two = (load_file(tmp_path / f"{kind}{pipeline}" / name) for pipeline in (1, 2))
        assert any("lm_head" in key for key in one)
        assert_same(two, one)


def own_optimizer(folder: str, pipeline: int, load: bool) -> list[float]:
    model = build_decoder()
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    settings = {"train_batch_size": 8, "gradient_accumulation_steps": 4, "mesh": {"pipeline": pipeline}}
    engine = zeromesh.initialize(model=model, optimizer=optimizer, config=settings)[0]
    if load:
        engine.load_checkpoint(folder)
    else:
        train(engine, 1)
        engine.save_checkpoint(folder)
    return train(engine, 2)


def test_an_optimizer_of_ones_own_is_saved_with_all_stages(tmp_path: Path) -> None:
    first = run_ranks(own_optimizer, 2, str(tmp_path), 2, False)
    second = run_ranks(own_optimizer, 1, str(tmp_path), 1, True)[0]
    assert first[0] == pytest.approx(second, rel=1e-9)


def halved(pipeline: int, partitions: list[Any], folder: str) -> tuple[list[float], list[Any]]:
    """Two updates with each partition, between which a checkpoint is written and read."""
    losses, cuts = [], []
    generator = torch.Generator().manual_seed(1)
    for number, partition in enumerate(partitions):
        torch.manual_seed(number)
        shape = ModelShape(architecture="llama", vocab_size=32, hidden_size=16, layers=3, heads=2, sequence_length=32)
        settings = {
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
            "mesh": {"pipeline": pipeline},
            "pipeline": {"partition": partition},
        }
        engine = zeromesh.initialize(model=decoder.Decoder(shape), config=settings)[0]
        if number:
            engine.load_checkpoint(folder)
        for _ in range(2):
            tokens = torch.randint(32, (4, 9), generator=generator)
            losses.append(float(engine.train_batch((row[:, :-1], row[:, 1:]) for row in tokens.split(1))))
        engine.save_checkpoint(folder)
        cuts.append((engine.pipelined.cut.blocks[2:3], engine.pipelined.schedules.of(4).splits) if pipeline > 1 else ())
    return losses, cuts


def test_a_model_that_is_cut_through_a_block_trains_alike_and_goes_on_with_any_other_cut(tmp_path: Path) -> None:
    partitions = ["best", [0, 2], "best"]
    expected, _ = run_ranks(halved, 1, 1, partitions, str(tmp_path / "one"))[0]
    for losses, cuts in run_ranks(halved, 2, 2, partitions, str(tmp_path / "two")):
        assert losses == expected
        inside = ("blocks.1.mlp_norm",), True
        assert cuts == [inside, (("blocks.2",), True), inside]
