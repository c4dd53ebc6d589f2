"""Adapters train on weights of bitsandbytes and torchao in 4 and 8 bits, under every row, as in plain PEFT."""

import json
import os
import sys
import weakref
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

import zeromesh
from harness import on_ranks, run_ranks
from huggingface_models import MODELS, token_batches
from run import configuration, plain_step, sgd, train_on_tokens
from zeromesh.base.quantized_layers import dense, layers, parts, states
from zeromesh.checkpoint.weights import quantize_weights as quantized
from zeromesh.checkpoint.weights.pretrained import HASHED
from zeromesh.checkpoint.weights.weight_files import FileTensor

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("peft", "bitsandbytes")), reason="peft or bitsandbytes is not installed"
)


@pytest.fixture(autouse=True)
def _torchao(request: pytest.FixtureRequest) -> None:
    cases = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if str(cases.get("kind")).startswith("torchao") and find_spec("torchao") is None:
        pytest.skip("torchao is not installed")


LIMIT = 120
STEPS = 3

KINDS = ("nf4", "nf4 double", "fp4", "fp4 double", "int8", "torchao 8", "torchao 4")

ADAPTERS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
}


def quantization(kind: str) -> Any:
    import transformers

    name, _, rest = kind.partition(" ")
    if name == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig
        from torchao.quantization.granularity import PerGroup

        four = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(16))
        return transformers.TorchAoConfig(Int8WeightOnlyConfig() if rest == "8" else four)
    if name == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=name, bnb_4bit_use_double_quant=rest == "double",
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip


def adapted(model: Any, adapters: str = "lora", **options: Any) -> Any:
    import peft

    torch.manual_seed(7)
    chosen = ADAPTERS[adapters] | options
    config = peft.LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], **chosen)
    return peft.get_peft_model(model, config).train()


def loaded(folder: Path, kind: str) -> Any:
    """Return the model as transformers loads and quantizes it."""
    import transformers

    os.environ["HF_HUB_OFFLINE"] = "1"
    transformers.utils.logging.disable_progress_bar()
    config = quantization(kind)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32)


@cache
def plain(folder: Path, kind: str, adapters: str = "lora") -> tuple[list[float], dict[str, torch.Tensor]]:
    model = adapted(loaded(folder, kind), adapters)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = [plain_step(optimizer, model(input_ids=tokens, labels=tokens).loss) for tokens in token_batches(STEPS)]
    return losses, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def settings(stage: int, offload: str | None = None) -> dict[str, Any]:
    places = {} if offload is None else {"offload_optimizer": {"device": offload}}
    if offload is not None and stage == 3:
        places["offload_param"] = {"device": offload}
    return configuration(batch=4, optimizer=sgd(0.5), zero={"stage": stage, **places})


def train(folder: Path, kind: str, adapters: str, stage: int, offload: str | None) -> Any:
    model = adapted(loaded(folder, kind), adapters)
    before = {name: (dense(layer), [one.clone() for one in states(layer)]) for name, layer in layers(model)}
    whole = sum(part.nbytes for p in model.parameters() for _, part in parts(p) if not p.requires_grad)
    engine = zeromesh.initialize(model=model, config=settings(stage, offload))[0]
    losses = [train_on_tokens(engine, tokens) for tokens in token_batches(STEPS)]
    report = engine.memory_report()["parameter"]
    with zeromesh.zero.GatheredParameters(model.parameters()):
        trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        for name, layer in layers(model):
            value, scales = before[name]
            assert torch.equal(dense(layer), value), name
            assert all(torch.equal(one, other) for one, other in zip(states(layer), scales, strict=True)), name
    return losses, trained, sum(report.values()), whole


def alone(folder: Path, kind: str, adapters: str, stage: int, offload: str | None) -> Any:
    """Compare one process with plain PEFT in the same process, bit for bit; return plain PEFT's results."""
    expected, weights = plain(folder, kind, adapters)
    losses, trained, _, _ = train(folder, kind, adapters, stage, offload)
    assert losses == expected
    assert [name for name, value in weights.items() if not torch.equal(trained[name], value)] == []
    return expected, weights


def build(path: Path) -> None:
    """Write the model on the first rank; all of them import what is needed, at once."""
    import_module("bitsandbytes")
    torch.manual_seed(3)
    model = MODELS["llama"].build()
    if torch.distributed.get_rank() == 0:
        model.save_pretrained(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    run_ranks(build, 2, path, timeout=LIMIT)
    return path


CASES = [("nf4 double", "lora", 3, None)]
FULL = [(kind, "lora", stage, None) for kind in KINDS for stage in range(4)]
FULL += [(kind, "lora", stage, "cpu") for kind in KINDS for stage in (2, 3)]
# Plain PEFT cannot train DoRA on 8 bits of bitsandbytes on a CPU: it loses the scales after the first forward.
FULL += [("nf4", "dora", 3, None), ("nf4", "rslora", 3, None), ("int8", "rslora", 3, None)]


@pytest.mark.parametrize(
    ("kind", "adapters", "stage", "offload"), [*CASES, *(pytest.param(*one, marks=pytest.mark.full) for one in FULL)]
)
def test_adapters_train_as_in_plain_peft(kind, adapters, stage, offload, folder) -> None:
    # On two ranks sums are added in another order.
    ranks = run_ranks(train, 2, folder, kind, adapters, stage, offload, timeout=LIMIT)
    # The reference is a rank's, too: settings that earlier tests leave in this process change the last digits.
    ((expected, weights),) = run_ranks(alone, 1, folder, kind, adapters, stage, offload, timeout=LIMIT)
    assert [sum(pair) / 2 for pair in zip(*(rank[0] for rank in ranks), strict=True)] == pytest.approx(expected, 1e-5)
    for name, value in weights.items():
        torch.testing.assert_close(ranks[0][1][name], value, rtol=1e-4, atol=1e-5)
    here, whole = ranks[0][2:]
    # Padding, scales that are small, and the adapters come on top of the halves.
    assert here < 0.75 * whole if stage == 3 else here >= whole


@pytest.mark.parametrize("kind", ["nf4 double", *(pytest.param(k, marks=pytest.mark.full) for k in KINDS)])
@on_ranks(1)
def test_weights_are_read_once_and_quantized_one_by_one(kind: str, folder: Path) -> None:
    wanted = {name: dense(layer) for name, layer in layers(loaded(folder, kind))}
    read: dict[str, int] = {}
    wide: list[Any] = []
    most = 0

    def count(file: FileTensor, start: int, stop: int) -> torch.Tensor:
        read[file.key] = read.get(file.key, 0) + stop - start
        return whole(file, start, stop)

    def watch(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal most
        value = replay(tensor)
        wide.append(weakref.ref(value.untyped_storage()))
        most = max(most, sum(one() is not None for one in wide))
        return value

    whole, replay = FileTensor.read, quantized.replayed
    with (
        patch.object(FileTensor, "read", count),
        patch.object(quantized, "replayed", watch),
        patch("zeromesh.shard.parameters.deferred.LARGE", 16),
    ):
        model: Any = zeromesh.from_pretrained(folder, quantization_config=quantization(kind))
        assert read == {}
        with zeromesh.zero.Init():
            model = adapted(model)
        engine = zeromesh.initialize(model=model, config=settings(3))[0]
    with zeromesh.zero.GatheredParameters(model.parameters()):
        found = {
            name.removeprefix("base_model.model.").replace(".base_layer", ""): dense(one) for name, one in layers(model)
        }
    engine.destroy()
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []
    # No weight is in memory in full precision beside another one.
    assert len(wide) == len(wanted)
    assert most == 1
    sizes = {name: value.numel() for name, value in load_file(folder / "model.safetensors").items()}
    assert {f"{name}.weight": read[f"{name}.weight"] for name in wanted} == {
        f"{name}.weight": sizes[f"{name}.weight"] for name in wanted
    }


def save_quantized(folder: Path, kind: str, path: Path) -> None:
    loaded(folder, kind).save_pretrained(path)


def train_saved(path: Path, stage: int, adapters: str = "lora") -> Any:
    """Train on a folder of quantized weights; return losses, and elements that this rank read by tensor."""
    read: dict[str, int] = {}

    def count(file: FileTensor, start: int, stop: int) -> torch.Tensor:
        read[file.key] = read.get(file.key, 0) + stop - start
        return whole(file, start, stop)

    whole = FileTensor.read
    with patch.object(FileTensor, "read", count):
        with zeromesh.zero.Init():
            model = adapted(zeromesh.from_pretrained(path, deferred=adapters != "dora"), adapters)
        engine = zeromesh.initialize(model=model, config=settings(stage))[0]
    losses = [train_on_tokens(engine, tokens) for tokens in token_batches(STEPS)]
    names = [f"{name}.weight".removeprefix("base_model.model.").replace(".base_layer", "") for name, _ in layers(model)]
    engine.destroy()
    return losses, [read[name] for name in names]


@pytest.mark.parametrize("kind", ["nf4 double", *(pytest.param(k, marks=pytest.mark.full) for k in KINDS)])
@on_ranks(1)
def test_no_layer_keeps_its_weight_in_memory_from_its_forward_to_its_backward(kind: str, folder: Path) -> None:
    engine = zeromesh.initialize(model=adapted(loaded(folder, kind)), config=settings(3))[0]
    units = [unit for unit in engine.sharded.units if unit is not engine.sharded.root]
    train_on_tokens(engine, token_batches(STEPS)[0])
    before = [unit.storage._cdata for unit in units]
    train_on_tokens(engine, token_batches(STEPS)[1])
    # A unit whose memory somebody holds as it is evicted gets another storage.
    assert [unit.storage._cdata for unit in units] == before


@pytest.mark.full
@pytest.mark.parametrize("kind", ["nf4 double", "int8"])
@on_ranks(1)
def test_transformers_reads_and_quantizes_inside_of_init(kind: str, folder: Path) -> None:
    with patch("zeromesh.shard.parameters.deferred.LARGE", 1), zeromesh.zero.Init():
        model = adapted(loaded(folder, kind))
    engine = zeromesh.initialize(model=model, config=settings(3))[0]
    assert [train_on_tokens(engine, tokens) for tokens in token_batches(STEPS)] == plain(folder, kind)[0]


SAVED = [(kind, stage) for kind in KINDS[:5] for stage in range(4)]


@pytest.mark.parametrize(
    ("kind", "stage"), [("nf4 double", 3), *(pytest.param(*one, marks=pytest.mark.full) for one in SAVED)]
)
def test_a_folder_that_was_saved_quantized_trains_like_the_original(kind, stage, folder, tmp_path) -> None:
    run_ranks(save_quantized, 1, folder, kind, tmp_path, timeout=LIMIT)
    sizes = {name: value.numel() for name, value in load_file(tmp_path / "model.safetensors").items()}
    ranks = run_ranks(train_saved, 2, tmp_path, stage, timeout=LIMIT)
    ((expected, _),) = run_ranks(plain, 1, folder, kind, timeout=LIMIT)
    ((losses, read),) = run_ranks(train_saved, 1, tmp_path, stage, timeout=LIMIT)
    assert losses == expected
    assert [sum(pair) / 2 for pair in zip(*(rank[0] for rank in ranks), strict=True)] == pytest.approx(expected, 1e-5)
    coded = sum(size for name, size in sizes.items() if f"{name}.quant_map" in sizes or f"{name[:-6]}SCB" in sizes)
    hashed = HASHED * len(read)  # elements by which ranks compare their copies of the files
    assert sum(read) == coded + hashed
    if stage == 3:
        # Each element is read by one rank, about half of them by each, as units have padding and other weights, too.
        by_rank = [sum(rank[1]) - hashed for rank in ranks]
        assert sum(by_rank) == coded
        assert max(by_rank) < 0.75 * coded, by_rank


MERGED = [("nf4", "dora"), ("fp4", "lora"), ("int8", "lora"), ("int8", "dora"), ("torchao 8", "lora")]


@pytest.mark.parametrize(
    ("kind", "adapters"), [("nf4 double", "lora"), *(pytest.param(*one, marks=pytest.mark.full) for one in MERGED)]
)
@on_ranks(1)
def test_merged_weights_are_those_of_peft_on_dequantized_ones(kind, adapters, folder, tmp_path) -> None:
    import peft
    import transformers

    model: Any = zeromesh.from_pretrained(folder, quantization_config=quantization(kind), deferred=adapters != "dora")
    with zeromesh.zero.Init():
        model = adapted(model, adapters, init_lora_weights=False)
    engine = zeromesh.initialize(model=model, config=settings(3))[0]
    train_on_tokens(engine, token_batches(STEPS)[0])
    engine.save_16bit_model(tmp_path / "merged", merge_adapters=True)
    engine.save_16bit_model(tmp_path / "adapters")
    values = {name: dense(layer) for name, layer in layers(loaded(folder, kind))}
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, value in values.items():
        base.get_submodule(name).weight.data.copy_(value)
    merged = peft.PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload()
    found, wanted = load_file(tmp_path / "merged" / "model.safetensors"), merged.state_dict()
    assert found.keys() == wanted.keys()
    assert [name for name, value in wanted.items() if not torch.equal(found[name], value)] == []
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert getattr(again.config, "quantization_config", None) is None


def resume(folder: Path, kind: str, stage: int, run: Path, save: bool) -> Any:
    engine = zeromesh.initialize(model=adapted(loaded(folder, kind)), config=settings(stage))[0]
    if save:
        losses = [train_on_tokens(engine, tokens) for tokens in token_batches(STEPS)[:-1]]
        engine.save_checkpoint(run)
    else:
        engine.load_checkpoint(run)
        losses = [train_on_tokens(engine, token_batches(STEPS)[-1])]
    return losses


@pytest.mark.full
@pytest.mark.parametrize("kind", ["nf4 double", "int8", "torchao 8"])
def test_a_checkpoint_goes_on_with_other_ranks_and_rows(kind: str, folder: Path, tmp_path: Path) -> None:
    ((expected, _),) = run_ranks(plain, 1, folder, kind, timeout=LIMIT)
    run_ranks(resume, 2, folder, kind, 3, tmp_path, True, timeout=LIMIT)
    (losses,) = run_ranks(resume, 1, folder, kind, 0, tmp_path, False, timeout=LIMIT)
    assert losses == pytest.approx(expected[-1:], rel=1e-5)


@on_ranks(1)
def test_weights_that_were_quantized_otherwise_are_no_continuation(folder: Path, tmp_path: Path) -> None:
    resume(folder, "nf4", 3, tmp_path, True)
    with pytest.raises(ValueError, match=r"q_proj.* was quantized otherwise"):
        resume(folder, "fp4", 3, tmp_path, False)


@on_ranks(1)
def test_what_cannot_be_trained_is_refused(folder: Path, tmp_path: Path) -> None:
    base = loaded(folder, "nf4")
    for parameter in base.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ValueError, match="weights are quantized .* nothing is trainable; add adapters"):
        zeromesh.initialize(model=base, config=settings(3))
    with patch.dict(sys.modules, {"bitsandbytes": None}), pytest.raises(ValueError, match="pip install bitsandbytes"):
        zeromesh.from_pretrained(folder, quantization_config=quantization("nf4"))
    save_quantized(folder, "nf4", saved := tmp_path / "saved")
    with pytest.raises(ValueError, match="quantized already; leave quantization_config"):
        zeromesh.from_pretrained(saved, quantization_config=quantization("nf4"))
    tensors = load_file(saved / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if not name.endswith("0.self_attn.q_proj.weight.absmax")}
    save_file(kept, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"0.self_attn.q_proj.weight is quantized .* lack the weight or its scales"):
        zeromesh.from_pretrained(saved)
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )
    with pytest.raises(ValueError, match=r"is quantized \(gptq\).*use the original weights"):
        zeromesh.from_pretrained(saved)
    dora = pytest.raises(RuntimeError, match=r"has no values yet; .* DoRA, works with .*deferred=False")
    with dora, zeromesh.zero.Init():
        adapted(zeromesh.from_pretrained(folder, quantization_config=quantization("nf4")), "dora")


@pytest.mark.parametrize("kind", ["torchao 8"])
@on_ranks(1)
def test_a_base_of_another_dtype_is_refused(kind: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=r"stands for torch.float32, and the run computes in torch.bfloat16; .*dtype="):
        zeromesh.initialize(model=adapted(loaded(folder, kind)), config=settings(3) | {"bf16": {"enabled": True}})


def train_in_stages(folder: Path, kind: str, stage: int, deferred: bool) -> Any:
    if deferred:
        with zeromesh.zero.Init():
            model = adapted(zeromesh.from_pretrained(folder, quantization_config=quantization(kind)))
    else:
        model = adapted(loaded(folder, kind))
    config = settings(stage) | {"mesh": {"pipeline": 2}, "train_micro_batch_size_per_gpu": 2}
    engine = zeromesh.initialize(model=model, config=config)[0]
    micro = [iter([{"input_ids": rows, "labels": rows} for rows in tokens.chunk(2)]) for tokens in token_batches(STEPS)]
    losses = [float(engine.train_batch(one)) for one in micro]
    return losses, sum(engine.memory_report()["parameter"].values())


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    ("kind", "deferred"), [("nf4 double", False), ("nf4 double", True), ("int8", True), ("torchao 8", True)]
)
def test_pipeline_stages_keep_their_own_quantized_layers(kind, deferred, stage, folder) -> None:
    ranks = run_ranks(train_in_stages, 2, folder, kind, stage, deferred, timeout=LIMIT)
    ((expected, _),) = run_ranks(plain, 1, folder, kind, timeout=LIMIT)
    for losses, _ in ranks:
        assert losses == pytest.approx(expected, 1e-5)
    ((_, _, whole, _),) = run_ranks(train, 1, folder, kind, "lora", 0, None, timeout=LIMIT)
    assert max(size for _, size in ranks) < 0.75 * whole


def along_the_tensor_axis(folder: Path) -> str:
    try:
        zeromesh.initialize(model=adapted(loaded(folder, "nf4")), config=settings(3) | {"mesh": {"tensor": 2}})
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.full
def test_quantized_blocks_are_not_split_along_the_tensor_axis(folder: Path) -> None:
    for text in run_ranks(along_the_tensor_axis, 2, folder, timeout=LIMIT):
        assert "is quantized, and its blocks cannot be split over the 2 ranks of mesh.tensor" in text
