"""Hugging Face checkpoints are read into shards as they are, and what is written opens in transformers."""

import errno
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import zeromesh
from compare import assert_same
from harness import run_ranks
from huggingface_models import MODELS
from models import next_token_loss
from run import adamw, configuration, plain_step, train_step
from zeromesh.checkpoint.weights import pretrained, weight_files
from zeromesh.checkpoint.weights.weight_files import INDEX, SINGLE, FileTensor
from zeromesh.shard.parameters import deferred
from zeromesh.shard.parameters.deferred import source_of

LIMIT = 120
FAST = ("gpt2", "llama", "mixtral", "bert", "t5", "resnet")
"""Fused and separate projections, tied embeddings, experts that are stored apart, batch statistics."""


pytestmark = pytest.mark.usefixtures("one_rank")


def transformers() -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers


def build(name: str) -> Any:
    torch.manual_seed(3)
    return MODELS[name].build()


def config(row: int, **further: Any) -> dict[str, Any]:
    return configuration(micro=2, optimizer=adamw(1e-2), stage=row) | further


def start(model: nn.Module, row: int, **further: Any) -> Any:
    return zeromesh.initialize(model=model, config=config(row, **further))[0]


def read_and_write(name: str, folder: Path, output: Path, row: int, largest: int = 10**9) -> dict[str, Any]:
    cls = getattr(transformers(), MODELS[name].name)
    read: list[int] = []
    reading = FileTensor.read

    def counted(self: FileTensor, start: int, stop: int) -> torch.Tensor:
        read.append(stop - start)
        return reading(self, start, stop)

    with (
        patch.object(deferred, "LARGE", 64),
        patch.object(FileTensor, "read", counted),
        patch.object(pretrained, "HASHED", 0),
    ):
        model = zeromesh.from_pretrained(folder, cls)
        from_files = {name: p.numel() for name, p in model.named_parameters() if isinstance(source_of(p), FileTensor)}
        buffers = sum(b.numel() for b in model.buffers() if isinstance(source_of(b), FileTensor))
        read.clear()
        engine = start(model, row)
    with patch.object(weight_files, "LARGEST_FILE", largest):
        engine.save_16bit_model(output)
    return {"state": engine.state_dict(), "read": sum(read), "from_files": sum(from_files.values()), "buffers": buffers}


def saved(name: str, folder: Path, **options: Any) -> Path:
    build(name).save_pretrained(folder, **options)
    return folder


def keys(folder: Path) -> set[str]:
    return {key for file in folder.glob("*.safetensors") for key in safe_open(str(file), "pt").keys()}  # noqa: SIM118


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("name", "row"),
    [(name, 3) for name in FAST]
    + [("llama", row) for row in (0, 1, 2)]
    + [pytest.param(name, row, marks=pytest.mark.full) for name in MODELS for row in (0, 3)],
)
def test_a_checkpoint_comes_in_and_goes_out_bit_for_bit(name: str, row: int, tmp_path: Path) -> None:
    cls = getattr(transformers(), MODELS[name].name)
    folder = saved(name, tmp_path / "in")
    expected = cls.from_pretrained(folder, dtype=torch.float32).state_dict()
    results = run_ranks(read_and_write, 2, name, folder, tmp_path / "out", row, timeout=LIMIT)
    for result in results:
        assert_same(result["state"], expected)
    # Nothing is read twice where parameters are sharded, and nothing is sent to the other ranks elsewhere.
    read = sum(result["read"] for result in results)
    assert read == results[0]["from_files"] * (1 if row == 3 else 2) + results[0]["buffers"] * 2
    assert keys(tmp_path / "out") == keys(folder)
    assert_same(cls.from_pretrained(tmp_path / "out").state_dict(), expected)


def test_several_files_are_read_and_written_as_one(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "in", max_shard_size="30KB")
    assert (folder / INDEX).is_file()
    expected = build("llama").state_dict()
    out = tmp_path / "out"
    for largest, files in ((40_000, 2), (10**9, 1)):  # the second time over the first
        for result in run_ranks(read_and_write, 2, "llama", folder, out, 3, largest, timeout=LIMIT):
            assert_same(result["state"], expected)
        found = list(out.glob("*.safetensors"))
        assert len(found) >= files
        assert (len(found) == 1) == (files == 1) == (not (out / INDEX).exists())
        assert not list(out.glob("*.part"))
        assert_same(transformers().LlamaForCausalLM.from_pretrained(out).state_dict(), expected)


def test_an_export_replaces_an_earlier_one_and_no_other_files(tmp_path: Path) -> None:
    mine = {"adapter_notes.txt", "model-best-of-mine.safetensors", "model.safetensors.part", "notes.part"}
    older = {"adapter_config.json", "adapter_model.safetensors", f"{SINGLE}.00007.part"}
    older |= {"model-00001-of-00002.safetensors", INDEX}
    for name in mine | older:
        (tmp_path / name).write_text(name)
    start(build("llama"), 3).save_16bit_model(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == mine | {SINGLE, "config.json", "generation_config.json"}


def test_an_exported_folder_gives_the_same_logits(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "in")
    model = zeromesh.from_pretrained(folder)
    engine = start(model, 3, bf16={"enabled": True})
    tokens = torch.arange(16).view(2, 8)
    for _ in range(2):
        train_step(engine, engine(input_ids=tokens, labels=tokens).loss)
    engine.eval()
    with torch.no_grad():
        expected = engine(input_ids=tokens).logits
    engine.save_16bit_model(tmp_path / "out")
    again = transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert again.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(again(input_ids=tokens).logits, expected)


def test_settings_of_generation_travel_with_the_model(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "in")
    wanted = {
        "eos_token_id": [5, 6],
        "bos_token_id": 4,
        "do_sample": False,
        "temperature": 0.6,
    }  # as some are published
    (folder / "generation_config.json").write_text(json.dumps(wanted))
    start(zeromesh.from_pretrained(folder), 3).save_16bit_model(tmp_path / "out")
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert {key: found.get(key) for key in wanted} == wanted
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match="generation_config.json' cannot be read by transformers"):
        zeromesh.from_pretrained(folder)


def trained(folder: Path, row: int) -> list[float]:
    transformers()
    engine = start(zeromesh.from_pretrained(folder, dtype=torch.float64), row)
    tokens = torch.randint(0, 96, (4, 8), generator=torch.Generator().manual_seed(1))
    mine = tokens.chunk(engine.data_size)[engine.data_rank]
    return [train_step(engine, next_token_loss(engine, mine)) for _ in range(3)]


@pytest.mark.parametrize("row", [1, 3])
def test_a_loaded_model_trains_as_in_plain_torch(row: int, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    plain = transformers().LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)
    tokens = torch.randint(0, 96, (4, 8), generator=torch.Generator().manual_seed(1))
    expected = [plain_step(optimizer, next_token_loss(plain, tokens)) for _ in range(3)]
    losses = run_ranks(trained, 2, folder, row, timeout=LIMIT)
    assert [sum(step) / 2 for step in zip(*losses, strict=True)] == pytest.approx(expected, rel=1e-9)


def test_masters_are_made_of_what_the_file_holds(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    engine = start(zeromesh.from_pretrained(folder), 3, bf16={"enabled": True})
    weights = load_file(folder / SINGLE)
    for name, parameter in engine.module.named_parameters():
        assert torch.equal(zeromesh.zero.safe_get_full_fp32_param(parameter), weights[name])


def test_changes_to_a_loaded_model_before_it_is_placed_count(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    weights = load_file(folder / SINGLE)["model.embed_tokens.weight"]
    with patch.object(deferred, "LARGE", 64):
        model = zeromesh.from_pretrained(folder)
        with zeromesh.zero.Init(), torch.no_grad():  # another recording than that of the construction
            model.resize_token_embeddings(100, mean_resizing=False)
            model.model.layers[0].mlp.up_proj.weight.mul_(2)
    state = start(model, 3).state_dict()
    assert state["model.embed_tokens.weight"].shape == (100, 32)
    assert torch.equal(state["model.embed_tokens.weight"][:96], weights)
    doubled = load_file(folder / SINGLE)["model.layers.0.mlp.up_proj.weight"] * 2
    assert torch.equal(state["model.layers.0.mlp.up_proj.weight"], doubled)


def test_weights_go_into_a_model_that_is_there_already(tmp_path: Path) -> None:
    folder = saved("gpt2", tmp_path)
    torch.manual_seed(9)
    other = MODELS["gpt2"].build()
    loaded = zeromesh.load_pretrained(other, folder)
    assert loaded.missing == ()
    assert_same(dict(other.state_dict()), dict(build("gpt2").state_dict()))


def test_a_new_head_keeps_its_initial_values(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved("bert", tmp_path)
    cls = transformers().BertForSequenceClassification
    with pytest.raises(ValueError, match="lacks bert.pooler.dense.weight.*classifier.weight.*strict=False"):
        zeromesh.from_pretrained(folder, cls)
    with patch.object(deferred, "LARGE", 64):
        model = zeromesh.from_pretrained(folder, cls, strict=False)
    assert "classifier.weight" in caplog.text
    state = start(model, 3).state_dict()
    assert 0.01 < float(state["classifier.weight"].std()) < 0.04
    assert torch.equal(state["bert.embeddings.word_embeddings.weight"], load_file(folder / SINGLE)[
        "bert.embeddings.word_embeddings.weight"])  # fmt: skip


@pytest.mark.parametrize("name", ["resnet", "deepseek_v3"])
def test_buffers_that_a_checkpoint_lacks_are_named(name: str, tmp_path: Path) -> None:
    folder = saved(name, tmp_path)
    state, model = load_file(folder / SINGLE), build(name)
    cls = type(model)
    lacking = next(key for key in state if key in dict(model.named_buffers()))
    del state[lacking]
    save_file(state, folder / SINGLE, {"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks {lacking} of {cls.__name__}"):
        zeromesh.from_pretrained(folder, cls)
    assert zeromesh.load_pretrained(model, folder, strict=False).missing == (lacking,)
    with patch.object(cls, "_keys_to_ignore_on_load_missing", [lacking.rpartition(".")[2]]):
        zeromesh.from_pretrained(folder, cls)  # as transformers' classes say of what older checkpoints lack


def test_a_configuration_alone_gives_initial_values(tmp_path: Path) -> None:
    build("llama").config.save_pretrained(tmp_path)
    torch.manual_seed(4)
    expected = transformers().AutoModelForCausalLM.from_config(build("llama").config, dtype=torch.float32)
    with patch.object(deferred, "LARGE", 64):
        torch.manual_seed(4)
        expected = transformers().LlamaForCausalLM(expected.config)
        torch.manual_seed(4)
        model = zeromesh.from_pretrained(tmp_path, weights=False)
    assert_same(start(model, 3).state_dict(), dict(expected.state_dict()))


def with_two_heads(folder: Path, difference: float) -> None:
    saved("llama", folder)
    state = load_file(folder / SINGLE)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["lm_head.weight"][-1, -1] += difference
    save_file(state, folder / SINGLE, {"format": "pt"})
    configured(folder, tie_word_embeddings=True)


def test_a_head_that_differs_from_what_it_is_tied_to_is_refused(tmp_path: Path) -> None:
    with_two_heads(tmp_path / "same", 0)
    zeromesh.from_pretrained(tmp_path / "same")
    with_two_heads(tmp_path / "other", 1)
    with (
        patch.object(pretrained, "COMPARED", 100),  # it differs in the last part
        pytest.raises(ValueError, match="lm_head.weight in .* and model.embed_tokens.weight in .*tie_word_embeddings"),
    ):
        zeromesh.from_pretrained(tmp_path / "other")
    state = start(zeromesh.from_pretrained(tmp_path / "other", tie_word_embeddings=False), 3).state_dict()
    assert_same(state, load_file(tmp_path / "other" / SINGLE))


def truncated(folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[: len(data) // 2])


def without_a_file(folder: Path) -> None:
    build("llama").save_pretrained(folder, max_shard_size="30KB")
    sorted(folder.glob("model-*.safetensors"))[0].unlink()


def with_a_stale_index(folder: Path) -> None:
    single = (folder / SINGLE).read_bytes()
    build("llama").save_pretrained(folder, max_shard_size="30KB")
    (folder / SINGLE).write_bytes(single)


def configured(folder: Path, **values: Any) -> None:
    """Change the configuration of a checkpoint, beside which there is code that must not run."""
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, **values}))
    (folder / "mine.py").write_text("raise SystemExit('it was run')")


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    state = load_file(folder / SINGLE)
    change(state)
    save_file(state, folder / SINGLE, {"format": "pt"})


def in_codes(state: dict[str, torch.Tensor]) -> None:
    state["lm_head.weight"] = state["lm_head.weight"].to(torch.int8)
    state["model.norm.weight"] = state["model.norm.weight"].to(torch.float8_e4m3fn)


def of_another_name(state: dict[str, torch.Tensor]) -> None:
    state["model.normal.weight"] = state.pop("model.norm.weight")


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: rewritten(f, in_codes),
     r"quantized weights, model.norm.weight in .* \(F8_E4M3\), lm_head.weight in .* \(I8\)"),
    (lambda f: (f / SINGLE).rename(f / "model-00001-of-00002.safetensors"),
     "it has model-00001-of-00002.safetensors, and what is in which .* told by the index"),
    (with_a_stale_index, "holds both model.safetensors and model.safetensors.index.json of other files"),
    (lambda f: (f / "adapter_config.json").write_text("{}"),
     "holds adapters of PEFT, which are not read from there; merge them"),
    (lambda f: configured(f, model_type="mine", auto_map={"AutoConfig": "mine.Config"}),
     "holds no configuration that transformers can read: .* custom code"),
    (lambda f: configured(f, model_type="vit", auto_map={"AutoModelForCausalLM": "mine.Model"}), "custom code"),
    (truncated, "model.safetensors' is truncated or not a safetensors file"),
    (lambda f: configured(f, hidden_size=64, head_dim=16),
     r"model.embed_tokens.weight, is \(96, 32\) there and \(96, 64\) in the model"),
    (lambda f: rewritten(f, of_another_name),
     r"lacks model.norm.weight of LlamaForCausalLM \(it has model.normal.weight for model.norm"),
    (lambda f: (f / SINGLE).rename(f / "pytorch_model.bin"),
     "only pytorch_model.bin, which are pickles and may run any code; convert them"),
    (without_a_file, "lacks model-00001-of-.* with .*; copy it again"),
    (lambda f: (f / INDEX).write_text(json.dumps({"weight_map": {"model.norm.scale": SINGLE}})),
     "lacks model.norm.scale, which model.safetensors.index.json says it holds"),
    (lambda f: (f / INDEX).write_text('{"weight_map": {"model.no'), "is not an index of safetensors"),
    (lambda f: configured(f, quantization_config={"quant_method": "gptq"}),
     r"is quantized \(gptq\), which cannot be trained"),
    (lambda f: (f / "config.json").unlink(), "holds no configuration that transformers can read"),
    (lambda f: f.rename(f.with_name("elsewhere")), "is not a folder; name a local one"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_unreadable_checkpoints_are_refused_with_the_reason(damage, message, tmp_path, monkeypatch) -> None:
    folder = saved("llama", tmp_path / "in")
    damage(folder)
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers asks whether to run code that lies in a folder
    with pytest.raises(ValueError, match=message):
        zeromesh.from_pretrained(folder)


def read_where_one_rank_cannot(folder: Path, damage: str, row: int) -> str:
    """Rank 1 has a folder of its own, with a file that is damaged after it was opened."""
    rank = torch.distributed.get_rank()
    mine = folder / str(rank)
    with patch.object(deferred, "LARGE", 64):
        model = zeromesh.from_pretrained(mine)
        with zeromesh.zero.Init(), torch.no_grad():
            model.lm_head.weight.mul_(2)  # it is replayed whole
    if rank and damage == "removed":
        (mine / SINGLE).unlink()
    elif rank and damage == "truncated":
        truncated(mine)
    elif rank and damage == "other values":
        state = load_file(mine / SINGLE)
        save_file({key: value + 1 for key, value in state.items()}, mine / SINGLE, {"format": "pt"})
    elif rank and damage == "rewritten":
        save_file({"model.embed_tokens.weight": torch.ones(3)}, mine / SINGLE)
    elif rank:
        weight_files._handle.cache_clear()
    refused = PermissionError(errno.EACCES, "Permission denied") if rank and damage == "refused" else None
    reading = FileTensor.read

    def late(self: FileTensor, start: int, stop: int) -> torch.Tensor:
        if stop - start > pretrained.HASHED:
            raise ValueError(f"{self.key} in {str(self.file)!r} cannot be read: it is too late")
        return reading(self, start, stop)

    with (
        patch("safetensors.safe_open", side_effect=refused, wraps=safe_open),
        patch.object(FileTensor, "read", late if rank and damage == "late" else reading),
    ):
        try:
            start(model, row)
        except (ValueError, RuntimeError) as error:
            return f"{error}"
    return "nothing was wrong"


@pytest.mark.parametrize(
    ("damage", "row", "why"),
    [
        ("truncated", 3, "is truncated"),
        ("removed", 0, "No such file"),
        ("refused", 3, "Permission denied"),
        ("rewritten", 3, "(3,) now"),
        ("late", 3, "it is too late"),
    ],
)
def test_a_file_that_one_rank_cannot_read_is_named_on_all(damage: str, row: int, why: str, tmp_path: Path) -> None:
    shutil.copytree(saved("mixtral", tmp_path / "0"), tmp_path / "1")
    first, second = run_ranks(read_where_one_rank_cannot, 2, tmp_path, damage, row, timeout=LIMIT)
    assert "rank 1 could not read its part of the weights: " in first
    for message in (first, second):
        assert f"model.embed_tokens.weight in '{tmp_path}/1/{SINGLE}' cannot be read" in message
        assert why in message


def test_ranks_do_not_read_parts_of_different_checkpoints(tmp_path: Path) -> None:
    shutil.copytree(saved("mixtral", tmp_path / "0"), tmp_path / "1")
    for message in run_ranks(read_where_one_rank_cannot, 2, tmp_path, "other values", 3, timeout=LIMIT):
        assert "the checkpoint that is read differs between rank 0 (-) and rank 1 (+)" in message
        assert "-model.layers.0.mlp.experts.down_proj: " in message


@pytest.mark.parametrize(
    ("expert", "message"),
    [("experts.1.", r"gate_up_proj, made of .* is \(3, 128, 32\) there and \(4, 128, 32\) in the model"),
     ("experts.1.w3", "gate_up_proj, made of .* is incomplete there")],
)  # fmt: skip
def test_a_mixture_that_lacks_a_part_of_an_expert_is_refused(expert: str, message: str, tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path)
    state = load_file(folder / SINGLE)
    kept = {key: value for key, value in state.items() if not (key.startswith("model.layers.0.") and expert in key)}
    assert len(kept) < len(state)
    save_file(kept, folder / SINGLE, {"format": "pt"})
    with pytest.raises(ValueError, match=message):
        zeromesh.from_pretrained(folder)


def test_a_checkpoint_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    engine = start(zeromesh.from_pretrained(folder), 3)
    tokens = torch.arange(16).view(2, 8)
    train_step(engine, engine(input_ids=tokens, labels=tokens).loss)
    engine.save_16bit_model(folder)
    assert_same(start(zeromesh.from_pretrained(folder), 3).state_dict(), engine.state_dict())


def test_ranges_of_a_tensor_are_read_alone(tmp_path: Path) -> None:
    tensors = {"cube": torch.randn(5, 3, 2), "row": torch.randn(7), "one": torch.tensor(2.5), "none": torch.ones(0, 3)}
    save_file(tensors, tmp_path / SINGLE)
    for key, tensor in tensors.items():
        found = FileTensor(tmp_path / SINGLE, key, tuple(tensor.shape))
        size = math.prod(tensor.shape)
        for start in range(size + 1):
            for stop in range(start, size + 1):
                assert torch.equal(found.read(start, stop), tensor.reshape(-1)[start:stop])
