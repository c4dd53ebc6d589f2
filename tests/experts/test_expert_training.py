"""``zeromesh train`` on a mixture of transformers: adapters of stacked experts, in 4 bits too, and their export."""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

import hf_training
import zeromesh
from commands import call, logged_losses, write_config
from harness import on_ranks, run_ranks
from test_expert_adapters import WEIGHTS, build, loaded, quantized
from zeromesh.apps.train import train_run as train
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.apps.verify.plain_training import Trial

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT = 240
STEPS = 3
LORA = {"r": 2, "target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
NF4 = {"library": "bitsandbytes", "bits": 4}


@pytest.fixture(scope="module")
def mixture(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny Mixtral and a tokenizer."""
    import transformers

    folder = tmp_path_factory.mktemp("mixture")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny)
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=512, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    transformers.MixtralForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def settings(source: Path, output: Path, **changes: Any) -> dict[str, Any]:
    huggingface = {"path": str(source), "sequence_length": 128, **changes.pop("huggingface", {})}
    return {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
        "huggingface": huggingface,
        "data": {"train": str(EXAMPLES / "chat.jsonl"), "validation_fraction": 0.1, "too_long": "drop"},
        "run": {"steps": STEPS, "output": str(output), "log_every": 1, "evaluate_every": 0},
        **changes,
    }


CASES = {"adapters": {"lora": LORA}, "in 4 bits": {"lora": LORA, "huggingface": {"quantization": NF4}}}


@pytest.mark.full
@pytest.mark.parametrize("mesh", [{}, {"expert": 2}], ids=["data", "expert"])
@pytest.mark.parametrize("kind", CASES)
def test_a_mixture_is_tuned_and_merged_by_commands(kind, mesh, mixture, tmp_path) -> None:
    for name, ranks, axes in (("one", 1, {}), ("two", 2, mesh)):
        (tmp_path / name).mkdir()
        path = write_config(tmp_path / name, settings(mixture, tmp_path / name / "run", mesh=axes, **CASES[kind]))
        run_ranks(train.train, ranks, path, [], resume=False, timeout=LIMIT)
        result = call("export", tmp_path / name / "run", tmp_path / name / "merged", "--merge")
        assert result.exit_code == 0, result.output
    losses = logged_losses(tmp_path / "two" / "run")
    assert losses == pytest.approx(logged_losses(tmp_path / "one" / "run"), rel=1e-4)
    assert losses[-1] < losses[0]
    base, tokens = loaded(mixture, torch.float32), torch.arange(20).view(2, 10)
    one, two = (loaded(tmp_path / name / "merged", torch.float32) for name in ("one", "two"))
    # The rest is the base, bit for bit.
    for name, value in one.state_dict().items():
        if ("q_proj" if kind == "adapters" else "_proj") not in name and not name.endswith(WEIGHTS):
            assert torch.equal(value, base.get_parameter(name)), name
    with torch.no_grad():
        torch.testing.assert_close(two(tokens).logits, one(tokens).logits, rtol=1e-2, atol=1e-2)
        assert not torch.allclose(base(tokens).logits, one(tokens).logits, rtol=1e-2, atol=1e-2)
    assert (
        sum("experts" in name for name in load_file(tmp_path / "one" / "run" / "model" / "adapter_model.safetensors"))
        == 8
    )


@pytest.mark.full
@pytest.mark.parametrize("kind", [*CASES, "with experts in 4 bits"])
def test_experts_that_rest_are_tuned_by_commands(kind, mixture, tmp_path) -> None:
    experts = {"rest": "nvme", "nvme_path": str(tmp_path / "files"), "slots": 2}
    losses = []
    for name, more in (("memory", {}), ("files", {"experts": experts})):
        (tmp_path / name).mkdir()
        section = CASES.get(kind) or {"lora": LORA, "huggingface": {"quantization": {**NF4, "experts": True}}}
        written = settings(mixture, tmp_path / name / "run", **section)
        written["experts"] = written.get("experts", {}) | more.get("experts", {})
        run_ranks(train.train, 1, write_config(tmp_path / name, written), [], resume=False, timeout=LIMIT)
        result = call("export", tmp_path / name / "run", tmp_path / name / "merged", "--merge")
        assert result.exit_code == 0, result.output
        losses.append(logged_losses(tmp_path / name / "run"))
    assert losses[0] == losses[1]
    files, memory = (loaded(tmp_path / name / "merged", torch.float32).state_dict() for name in ("files", "memory"))
    assert all(torch.equal(value, memory[name]) for name, value in files.items())


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@on_ranks(1)
def test_experts_are_quantized_as_they_are_read(tmp_path: Path) -> None:
    import transformers

    build("mixtral").save_pretrained(tmp_path)
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_quant_type="nf4"
    )
    model: Any = zeromesh.from_pretrained(tmp_path, quantization_config=config, quantize_experts=True)
    quantized(wanted := loaded(tmp_path, torch.float32))
    for parameter in (parameters := dict(model.named_parameters())).values():
        parameter.requires_grad_(False)
    norm = parameters["model.norm.weight"].requires_grad_()
    optimizer = torch.optim.SGD([norm], lr=0.1)
    zero = {"stage": 3}
    engine = zeromesh.initialize(
        model=model, optimizer=optimizer, config={"train_batch_size": 1, "zero_optimization": zero}
    )[0]
    with zeromesh.zero.GatheredParameters(model.parameters()):
        for path, module in wanted.named_modules():
            for name in WEIGHTS if path.endswith("experts") else ():
                assert torch.equal(getattr(model.get_submodule(path), name), getattr(module, name))
    engine.destroy()
    with pytest.raises(ValueError, match="quantize_experts needs quantization_config, with load_in_4bit=True"):
        zeromesh.from_pretrained(tmp_path, quantize_experts=True)
    with pytest.raises(ValueError, match="in 4 bits of bitsandbytes only: pass .*load_in_4bit=True"):
        zeromesh.from_pretrained(
            tmp_path, quantization_config=transformers.BitsAndBytesConfig(load_in_8bit=True), quantize_experts=True
        )


@pytest.mark.full
@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_folder_of_experts_in_4_bits_is_refused_with_the_remedy(tmp_path: Path) -> None:
    import transformers

    build("gpt_oss").save_pretrained(tmp_path / "plain")
    options = {"quantization_config": transformers.BitsAndBytesConfig(load_in_4bit=True), "quantize_experts": True}
    zeromesh.from_pretrained(tmp_path / "plain", deferred=False, **options).save_pretrained(tmp_path / "coded")
    with pytest.raises(ValueError, match="_proj was saved in 4 bits.* original weights, with .*quantize_experts=True"):
        zeromesh.from_pretrained(tmp_path / "coded")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lora": {**LORA, "use_dora": True}}, r"target_parameters = .* with use_dora: .*leave use_dora out"),
        ({"lora": {**LORA, "lora_dropout": 0.1}}, "with lora_dropout: .* without dropout"),
        (
            {"lora": LORA, "huggingface": {"quantization": {"bits": 8, "experts": True}}},
            "experts is for 4 bits of bitsandbytes",
        ),
    ],
)
def test_what_peft_has_not_for_experts_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings.load(settings(Path("models"), Path("runs"), **config))


def test_a_name_of_no_stacked_weight_is_refused(mixture: Path, tmp_path: Path) -> None:
    lora = LORA | {"target_parameters": ["experts.gate_proj"]}
    path = write_config(tmp_path, settings(mixture, tmp_path / "run", lora=lora))
    result = call("train", path)
    assert result.exit_code != 0
    assert "has no stacked weight of three dims whose name ends in 'experts.gate_proj'" in result.output
    assert "did you mean 'experts.gate_up_proj'?" in result.output


def small_mixture(width: int = 32) -> Any:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 2, "num_attention_heads": 4}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.MixtralConfig(
        vocab_size=hf_training.TOKENS, num_key_value_heads=2, num_local_experts=4, **sizes, **ends
    )
    return transformers.MixtralForCausalLM(config)


def train_in(library: str, folder: Path, config: dict[str, Any] | None) -> Any:
    with patch.object(hf_training, "model", small_mixture):
        return hf_training.train(library, folder, config)


@pytest.mark.full
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("library", ["transformers", "accelerate", "trl-sft"])
def test_trainers_of_other_libraries_share_experts(library: str, number: int, tmp_path: Path) -> None:
    if library == "trl-sft":
        pytest.importorskip("trl")
    config = hf_training.stage(number, mesh={"expert": 2})
    (found, *_) = run_ranks(train_in, 2, library, tmp_path / "shared", config, timeout=LIMIT)
    if library == "trl-sft":
        # TRL balances a mixture over the samples of each rank.
        wanted = run_ranks(train_in, 2, library, tmp_path / "apart", hf_training.stage(number), timeout=LIMIT)[0]
    else:
        wanted = train_in(library, tmp_path / "plain", None)
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(wanted[0]), rtol=1e-3, atol=1e-5)
    assert found[1].keys() == wanted[1].keys()
    torch.testing.assert_close(found[1], dict(wanted[1]), rtol=1e-3, atol=1e-4)


def test_a_model_that_verify_reads_from_its_file_returns_router_logits(tmp_path: Path) -> None:
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    torch.save(small_mixture(), tmp_path / "model.pt")
    with patch.dict(_CAN_RECORD_REGISTRY, clear=True):  # as in a process that has built no model
        model: Any = Trial.model(SimpleNamespace(dtype=None), tmp_path / "model.pt")  # type: ignore[arg-type]
        tokens = torch.arange(6)[None]
        assert model(input_ids=tokens, labels=tokens, output_router_logits=True).router_logits
