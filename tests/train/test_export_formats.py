"""``zeromesh export --gguf`` and ``--hub``: files that other programs read, and what is sent to the Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from commands import call, write_config
from zeromesh.apps.train.export_gguf import interleaved, llama3_factors, write_gguf

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.full]


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    settings = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "huggingface": {"path": str(tiny), "sequence_length": 160},
        "lora": {"r": 2, "target_modules": ["q_proj"]},
        "data": {"train": str(EXAMPLES / "chat.jsonl"), "validation_fraction": 0.1},
        "run": {"steps": 1, "output": str(folder / "run"), "evaluate_every": 0},
    }
    result = call("train", write_config(folder, settings))
    assert result.exit_code == 0, result.output
    return folder / "run"


def test_a_gguf_file_gives_the_logits_and_the_tokens_of_the_model(run: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    import transformers

    for arguments in (("gguf", "--gguf"), ("folder", "--merge")):
        result = call("export", run, tmp_path / arguments[0], arguments[1])
        assert result.exit_code == 0, result.output
    assert [path.name for path in (tmp_path / "gguf").iterdir()] == ["model.gguf"]
    model, expected = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, **options).eval()
        for name, options in (("gguf", {"gguf_file": "model.gguf"}), ("folder", {}))
    )
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits)
    reader = gguf.GGUFReader(tmp_path / "gguf" / "model.gguf")
    assert reader.fields["general.architecture"].contents() == "llama"
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "folder")
    assert reader.fields["tokenizer.chat_template"].contents() == theirs.chat_template
    ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "gguf", gguf_file="model.gguf")
    text = "Oslo has 1,440 minutes a day -- æøå!\n"
    assert ours(text).input_ids == theirs(text).input_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
def test_families_are_written_in_their_own_order(name: str, dtype: torch.dtype, tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    import transformers

    make = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    shape = {"vocab_size": 1024, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    if name == "Qwen3":
        shape["head_dim"] = 128  # the reader of transformers takes no other one
    model = make(make.config_class(**shape, num_attention_heads=4, num_key_value_heads=2)).to(dtype)
    model.save_pretrained(tmp_path / "model")
    transformers.AutoTokenizer.from_pretrained(tiny).save_pretrained(tmp_path / "model")
    write_gguf(tmp_path / "model", tmp_path / "model.gguf")
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(read.eval()(tokens).logits, expected.eval()(tokens).logits)


def test_an_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    with pytest.raises(ValueError, match="MambaForCausalLM is not written as GGUF, only LlamaForCausalLM"):
        write_gguf(tmp_path, tmp_path / "model.gguf")


def test_attention_in_windows_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    config = {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="MistralForCausalLM with sliding_window = 4096 is not written"):
        write_gguf(tmp_path, tmp_path / "model.gguf")


def test_rows_of_heads_are_put_beside_each_other() -> None:
    rows = torch.arange(8).view(8, 1)  # two heads of width 4
    assert interleaved(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_frequencies_of_llama_3_are_those_of_transformers() -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = transformers.LlamaConfig(hidden_size=128, num_attention_heads=1, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** (-torch.arange(0, 128, 2) / 128)
    torch.testing.assert_close(plain / llama3_factors(rope, 128), scaled, rtol=1e-5, atol=0)


class Hub:
    """Calls of the Hub's API, with the files that were sent."""

    token = "hf_of_a_test"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def create_repo(self, repo_id: str, private: bool, exist_ok: bool) -> str:
        self.calls.append({"repo": repo_id, "private": private})
        return f"https://huggingface.co/{repo_id}"

    def upload_folder(self, repo_id: str, folder_path: str, commit_message: str) -> None:
        files = sorted(path.name for path in Path(folder_path).iterdir())
        self.calls.append({"repo": repo_id, "files": files, "card": (Path(folder_path) / "README.md").read_text()})


def test_a_run_is_pushed_with_a_card_that_has_its_figures(run: Path, tmp_path: Path) -> None:
    hub = Hub()
    with patch("huggingface_hub.HfApi", lambda: hub):
        result = call("export", run, tmp_path / "out", "--hub", "me/oslo")
        assert result.exit_code == 0, result.output
        assert "uploaded to https://huggingface.co/me/oslo" in result.output
        public = call("export", run, tmp_path / "public", "--merge", "--hub", "me/oslo", "--public")
        assert public.exit_code == 0, public.output
    created, uploaded, created_public, _ = hub.calls
    assert created == {"repo": "me/oslo", "private": True}
    assert created_public["private"] is False
    assert "adapter_model.safetensors" in uploaded["files"]
    loss = json.loads((run / "report.json").read_text())["validation_loss"]
    assert f"| held-out loss, nats per token | {loss:.4f} |" in uploaded["card"]
    assert "library_name: peft" in uploaded["card"]


def test_a_refused_push_leaves_the_export(run: Path, tmp_path: Path) -> None:
    class Refusing(Hub):
        def create_repo(self, repo_id: str, private: bool, exist_ok: bool) -> str:
            raise OSError("no network")

    with patch("huggingface_hub.HfApi", Refusing):
        result = call("export", run, tmp_path / "out", "--hub", "me/oslo")
    assert result.exit_code == 2
    assert "hf upload me/oslo" in result.output
    assert "no network" in result.output
    assert (tmp_path / "out" / "adapter_config.json").is_file()
