"""``zeromesh train`` on models of transformers: all of their weights, or adapters; and ``zeromesh export``."""

import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

import zeromesh
from commands import call, logged_losses, write_config
from harness import run_ranks
from huggingface_models import MODELS, VOCABULARY
from zeromesh.apps.train import check
from zeromesh.apps.train import export_run as export
from zeromesh.apps.train import train_run as train
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.data.ordered_loader import Batch
from zeromesh.apps.train.data.tokenizer import load_tokenizer
from zeromesh.apps.train.model import Transformer, language_model
from zeromesh.apps.train.run_loss import require_causal, require_document_attention
from zeromesh.apps.train.sample import TextWriter
from zeromesh.apps.train.train_settings import HuggingFace, ModelShape, TrainSettings

EXAMPLES = Path(__file__).parents[2] / "examples"
LIMIT = 200
STEPS = 4


pytestmark = pytest.mark.usefixtures("one_rank")


def settings(source: Path, output: Path, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
        "huggingface": {"path": str(source), "sequence_length": 192},
        "data": {"train": str(EXAMPLES / "chat.jsonl"), "validation_fraction": 0.1},
        "run": {"steps": STEPS, "output": str(output), "save_every": 2, "log_every": 1, "evaluate_every": 0},
    }
    for section, change in changes.items():
        values[section] = values.get(section, {}) | change if isinstance(change, dict) else change
    return {section: value for section, value in values.items() if value is not None}


@pytest.fixture(scope="module")
def tuned(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    sample = {"prompts": ["What is rain?"], "length": 5, "chat": True}
    path = write_config(folder, settings(tiny, folder / "run", run={"sample": sample}))
    run_ranks(train.train, 2, path, [], resume=False, timeout=LIMIT)
    return folder / "run"


@pytest.fixture(scope="module")
def adapted(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    lora = {"r": 4, "target_modules": ["q_proj", "down_proj", "lm_head"]}  # which is the embedding, too
    path = write_config(folder, settings(tiny, folder / "run", lora=lora, bf16={"enabled": True}))
    run_ranks(train.train, 2, path, [], resume=False, timeout=LIMIT)
    return folder / "run"


def test_the_model_learns_what_the_assistant_says(tiny: Path, tuned: Path) -> None:
    """The same steps in plain torch: every learned token of the global batch counts the same, wherever it is."""
    import transformers

    from zeromesh.apps.train.check import prepare_text
    from zeromesh.apps.train.data.ordered_loader import Share, training_batches

    values = settings(tiny, tuned.parent / "plain")
    job = check.check(TrainSettings.load(values))
    batches = training_batches(prepare_text(job, may_write=True), 192, Share(0, 1, 4, 1), job.settings.seed, 0)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = []
    for _ in range(STEPS):
        batch = next(batches)
        assert batch.positions is not None  # records are packed, and keep to themselves
        assert 0 < float((batch.labels != -100).float().mean()) < 0.9
        logits = model(input_ids=batch.tokens, position_ids=batch.positions, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert logged_losses(tuned) == pytest.approx(expected, rel=2e-4)
    assert expected[-1] < expected[0] - 0.2


@pytest.mark.full
@pytest.mark.parametrize(("strategy", "pipeline"), [("ring", 1), ("ulysses", 1), ("ring", 2)])
def test_packed_records_train_the_same_with_their_sequences_spread(
    strategy: str, pipeline: int, tiny: Path, tuned: Path, tmp_path: Path
) -> None:
    # Under the ring, records are placed whole over the ranks.
    mesh = {"context": 2, "pipeline": pipeline}
    zero = {"stage": 3 if pipeline == 1 else 1}
    values = settings(
        tiny, tmp_path / "run", mesh=mesh, zero_optimization=zero, context_parallel={"strategy": strategy}
    )
    run_ranks(train.train, 2 * pipeline, write_config(tmp_path, values), [], resume=False, timeout=LIMIT)
    assert logged_losses(tmp_path / "run") == pytest.approx(logged_losses(tuned), rel=2e-4)


def test_a_tuned_model_opens_with_its_tokenizer(tuned: Path, tmp_path: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tuned / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tuned / "model")
    assert "<|assistant|>" in tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False,
                                                            add_generation_prompt=True)  # fmt: skip
    result = call("export", tuned, tmp_path / "out")
    assert result.exit_code == 0, result.output
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(20).view(2, 10)
    with torch.no_grad():
        assert torch.equal(exported(tokens).logits, model(tokens).logits)
    assert (exported.generation_config.top_k, model.generation_config.top_k) == (7, 7)
    before = call("export", tuned, tmp_path / "before", "--tag", "global_step2")
    assert before.exit_code == 0, before.output
    earlier = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "before")
    assert not torch.equal(earlier(tokens).logits, model(tokens).logits)


def test_a_tuned_model_answers(tuned: Path) -> None:
    outputs = [call("sample", tuned, "What is rain?", "--chat", "--tokens", "8", "--seed", "3") for _ in range(2)]
    assert all(output.exit_code == 0 for output in outputs)
    assert outputs[0].output == outputs[1].output
    assert outputs[0].output.startswith("What is rain?\n")
    assert json.loads((tuned / "report.json").read_text())["samples"][0].startswith("What is rain?\n")


@pytest.mark.parametrize("begin", [None, 7])
def test_a_prompt_begins_as_a_text_does_in_training(tiny: Path, begin: int | None) -> None:
    tokenizer = replace(load_tokenizer(tiny), begin=begin)
    seen: list[list[int]] = []

    def following(ids: Sequence[int]) -> torch.Tensor:
        seen.append(list(ids))
        return torch.zeros(tokenizer.size)

    writer = TextWriter(lambda: following, frozenset({tokenizer.end}), tokenizer)
    list(writer.pieces("What is rain?", 1, 0.0, 0))
    assert seen[0] == [tokenizer.end if begin is None else begin, *tokenizer.encode(["What is rain?"])[0]]


@pytest.mark.full
def test_a_tuned_run_goes_on_as_if_it_had_not_been_stopped(tiny: Path, tuned: Path, tmp_path: Path) -> None:
    shutil.copytree(tuned, tmp_path / "run", ignore=shutil.ignore_patterns("global_step4", "latest", "model"))
    (tmp_path / "run" / "checkpoints" / "latest").write_text("global_step2")
    sample = {"prompts": ["What is rain?"], "length": 5, "chat": True}
    path = write_config(tmp_path, settings(tiny, tmp_path / "run", run={"sample": sample}))
    result = call("train", path, "--resume")
    assert result.exit_code == 0, result.output
    assert logged_losses(tmp_path / "run") == pytest.approx(logged_losses(tuned), rel=1e-4)
    found, expected = (load_file(run / "model" / "model.safetensors") for run in (tmp_path / "run", tuned))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)


def test_adapters_are_written_for_peft_and_merged_on_request(tiny: Path, adapted: Path, tmp_path: Path) -> None:
    import peft
    import transformers

    for folder, options in (("alone", []), ("merged", ["--merge"])):
        result = call("export", adapted, tmp_path / folder, *options)
        assert result.exit_code == 0, result.output
    alone, model = (
        load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "alone", adapted / "model")
    )
    assert alone.keys() == model.keys()
    assert all(torch.equal(alone[name], value) and value.numel() for name, value in model.items())
    assert any(float(value.abs().max()) > 0 for name, value in model.items() if "lora_B" in name)
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)
    tokens = torch.arange(20).view(2, 10)
    plain = base(tokens).logits
    expected = peft.PeftModel.from_pretrained(base, tmp_path / "alone")(tokens).logits
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(tokens).logits
    # On the way to a logit each of the 16 merged weights is rounded once, by the unit roundoff of bf16.
    limit = 16 * 2**-8 * float(expected.abs().max())
    assert float((found - expected).abs().max()) < limit < 0.5 * float((plain - expected).abs().max())
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


def test_an_export_leaves_all_or_nothing(tuned: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with patch.object(export, "write_model", side_effect=OSError("no space")):
        assert "no space" in call("export", tuned, out).output
    assert not out.exists()
    draft = out / export.DRAFT
    draft.mkdir(parents=True)  # as an export that was killed leaves it
    (draft / "model.safetensors.00000.part").write_text("half")
    (out / "mine.txt").write_text("mine")
    result = call("export", tuned, out)
    assert result.exit_code == 2
    assert f"it holds mine.txt, beside {export.DRAFT} of an export that was interrupted" in result.output
    assert (out / "mine.txt").read_text() == "mine"
    (out / "mine.txt").unlink()
    result = call("export", tuned, out)
    assert result.exit_code == 0, result.output
    assert {path.name for path in out.iterdir()} > {"config.json", "model.safetensors", "tokenizer.json"}
    assert not draft.exists()
    assert not list(out.glob("*.part"))


@pytest.mark.parametrize("architecture", ["gpt", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_built_in_decoders_are_models_of_transformers(architecture: Any, tied: bool) -> None:
    import transformers

    grouped = {"kv_heads": 2} if architecture == "llama" else {}
    shape = ModelShape(
        architecture=architecture, vocab_size=50, hidden_size=32, layers=2, heads=4, sequence_length=16,
        tie_embeddings=tied, **grouped,
    )  # fmt: skip
    decoder = Decoder(shape).double().eval()
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    name, arguments = export.published_configuration(shape, 7)
    make = getattr(transformers, name)
    model = make(make.config_class(**arguments)).double().eval()
    state = {
        tensor.name: tensor.make(dict(decoder.state_dict()).__getitem__) for tensor in export.published_tensors(shape)
    }
    result = model.load_state_dict(state, strict=False)
    assert not result.unexpected_keys
    assert result.missing_keys == (["lm_head.weight"] if tied else [])
    tokens = torch.randint(0, 50, (2, 16))
    with torch.no_grad():  # transformers' rotary tables are fp32, and so are ours
        torch.testing.assert_close(model(tokens).logits, decoder(tokens), rtol=1e-6, atol=1e-6)


@pytest.mark.full
def test_a_run_of_a_built_in_decoder_is_exported(tmp_path: Path) -> None:
    import transformers

    (tmp_path / "text").mkdir()
    for number in range(6):
        lines = [f"def function_{n}(value):\n    return value + {n * number}\n" for n in range(20)]
        (tmp_path / "text" / f"{number}.py").write_text("\n".join(lines))
    values = settings(
        tmp_path, tmp_path / "run", huggingface=None, bf16={"enabled": True},
        model={"hidden_size": 16, "layers": 2, "heads": 2, "sequence_length": 32},
        data={"train": str(tmp_path / "text"), "validation_fraction": 0.3, "vocabulary_size": 270},
    )  # fmt: skip
    result = call("train", write_config(tmp_path, values))
    assert result.exit_code == 0, result.output
    result = call("export", tmp_path / "run", tmp_path / "out")
    assert result.exit_code == 0, result.output
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("def f(x):")["input_ids"]) == "def f(x):"
    shape = TrainSettings.load(json.loads((tmp_path / "run" / "config.json").read_text())).model
    assert shape is not None
    decoder = Decoder(shape).eval()
    state = load_file(tmp_path / "run" / "model" / "model.safetensors")
    decoder.load_state_dict({"head.weight": state["embedding.weight"]} | state)
    tokens = torch.randint(0, 270, (2, 32))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, decoder(tokens).float(), rtol=1e-4, atol=1e-4)
    again = call("export", tmp_path / "run", tmp_path / "out")
    assert again.exit_code == 2
    assert "is there already, and is not overwritten" in again.output
    merged = call("export", tmp_path / "run", tmp_path / "merged", "--merge")
    assert merged.exit_code == 2
    assert "has no adapters" in merged.output
    assert not (tmp_path / "merged").exists()


def prepared(name: str, folder: Path) -> tuple[Any, Transformer]:
    torch.manual_seed(3)
    MODELS[name].build().save_pretrained(folder)
    language = Transformer(HuggingFace(path=str(folder), sequence_length=16))
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 3}}
    return zeromesh.initialize(language.build(), config=config)[0], language


@pytest.mark.parametrize("name", ["gpt2", "llama", pytest.param("qwen3", marks=pytest.mark.full), "gemma3", "gpt_neox"])
def test_documents_in_a_row_are_as_documents_alone(name: str, tmp_path: Path) -> None:
    engine, language = prepared(name, tmp_path)
    engine.eval()
    require_document_attention(engine, language, VOCABULARY)
    engine.eval()
    lengths = (3, 1, 5, 4)
    parts = [torch.randint(0, VOCABULARY, (1, length)) for length in lengths]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    with torch.no_grad():
        tokens = torch.cat(parts, dim=1)
        together = language.logits(engine, Batch(tokens, tokens, positions, documents))
        alone = torch.cat([language.logits(engine, Batch(part, part)) for part in parts], dim=1)
    assert float((together - alone).abs().max()) == pytest.approx(0, abs=1e-5)


LOOKS_ACROSS = "attends across documents whatever positions it is given; set it to false"


@pytest.mark.parametrize(
    ("name", "require", "message"),
    [
        ("bloom", require_document_attention, LOOKS_ACROSS),
        ("mamba", require_document_attention, LOOKS_ACROSS),
        ("bert", require_causal, "is not a causal model"),
        ("llama", require_causal, None),
        ("mamba", require_causal, None),
    ],
)
def test_models_that_look_ahead_or_across_documents_are_refused(name, require, message, tmp_path) -> None:
    engine, language = prepared(name, tmp_path)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        require(engine, language, VOCABULARY)


SHAPE = {"hidden_size": 8, "layers": 1, "heads": 1, "sequence_length": 8}


@pytest.mark.some(6)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"huggingface": {"sequence_length": 1024}}, "huggingface.sequence_length = 1024 is longer than the 512"),
        ({"huggingface": {"path": "nowhere"}}, "huggingface.path = 'nowhere': '"),
        ({"huggingface": {"path": "nowhere"}, "lora": {"r": 2}}, "huggingface.path = 'nowhere': '"),
        ({"huggingface": {"attention": "none"}}, "with huggingface.attention = 'none': Specified"),
        ({"huggingface": {"attention": "flash_attention_2"}}, "huggingface.attention = 'flash_attention_2': "),
        ({"lora": {"target_modules": "norm"}}, "lora.target_modules: LlamaForCausalLM has no linear layer named "
         "'norm'; it has o_proj, down_proj, "),
        ({"lora": {"target_modules": "mlp"}}, "has no linear layer named 'mlp'; it has "),
        ({"lora": {"target_modules": "c_attn"}}, "has no module whose name ends in 'c_attn'; it has "),
        ({"lora": {"target_modules": "q_prj"}}, "lora.target_modules: LlamaForCausalLM has no module "
         "whose name ends in 'q_prj'; did you mean 'q_proj'? It has q_proj, "),
        ({"lora": {"target_modules": "q_proj", "modules_to_save": "nope"}}, "lora.modules_to_save: LlamaForCausalL"),
        ({"lora": {"target_modules": "q_proj"}, "huggingface": None, "model": SHAPE}, "lora needs a model of transfor"),
        ({"model": SHAPE}, "keep one of them"),
        ({"lora": {"r": 2}, "huggingface": {"weights": False}}, "lora adapts the weights of a model"),
        ({"huggingface": None}, "needs a section 'model', or 'huggingface'"),
        ({"huggingface": {"sequence_length": 16}}, "sequence_length = 16 holds 17 with its last label"),
        ({"train_batch_size": 4096}, "samples of huggingface.sequence_length = 192 tokens, fewer than the 4096"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_trained_are_refused(
    tiny: Path, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    result = call("train", write_config(tmp_path, settings(tiny, tmp_path / "run", **changes)))
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_tokenizer_that_the_model_has_no_entries_for_is_refused(tiny: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    MODELS["llama"].build().save_pretrained(tmp_path / "model")
    changes = {"huggingface": {"path": str(tmp_path / "model"), "sequence_length": 32}, "data": {"tokenizer": str(tiny),
               "too_long": "truncate"}}  # fmt: skip
    result = call("train", write_config(tmp_path, settings(tiny, tmp_path / "run", **changes)))
    assert result.exit_code == 2
    assert "vocabulary has 96 entries" in result.output
    assert "name a model with a larger vocabulary in huggingface.path" in " ".join(result.output.split())


def test_weights_are_not_trained_with_another_tokenizer(tiny: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny, bare, ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    (tmp_path / "text.txt").write_text("a b c d e f g h\n" * 400)
    data = {"train": str(tmp_path / "text.txt"), "vocabulary_size": 260}
    options = {"huggingface": {"path": str(bare), "sequence_length": 16}, "data": data}
    result = call("train", write_config(tmp_path, settings(tiny, tmp_path / "run", **options)))
    assert result.exit_code == 2
    assert "know the ids of their own tokenizer" in result.output
    own = {"path": str(tiny), "sequence_length": 16}
    other = tmp_path / "run" / "text" / "tokenizer"
    options = {"huggingface": own, "data": {"train": str(tmp_path / "text.txt"), "tokenizer": str(other)}}
    result = call("train", write_config(tmp_path, settings(tiny, tmp_path / "other", **options)))
    assert result.exit_code == 2
    assert "has 260 entries, and the model's own in" in result.output


def test_an_unknown_role_is_named_with_its_line(tiny: Path, tmp_path: Path) -> None:
    lines = (EXAMPLES / "chat.jsonl").read_text().splitlines()
    lines[4] = json.dumps({"messages": [{"role": "robot", "content": "beep"}, {"role": "assistant", "content": "a"}]})
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    values = settings(tiny, tmp_path / "run", data={"train": str(tmp_path / "chat.jsonl")})
    result = call("train", write_config(tmp_path, values))
    assert result.exit_code == 2
    assert "robot" in result.output
    assert "chat.jsonl" in result.output
    assert "5" in result.output


@pytest.mark.full
def test_a_base_model_that_is_gone_is_named_with_the_way_back(tiny, tuned, adapted, tmp_path, monkeypatch) -> None:
    for run, needed in ((tuned, "export"), (adapted, "sample")):
        name = run.parent.name
        shutil.copytree(run, tmp_path / name, ignore=shutil.ignore_patterns("*.png"))
        config = tmp_path / name / "config.json"
        values = json.loads(config.read_text())
        values["huggingface"]["path"] = values["data"]["tokenizer"] = "base"  # seen from where the run was started
        config.write_text(json.dumps(values))
        monkeypatch.chdir(tmp_path)
        mine = settings(Path("base"), Path(name), run={"resume": True}, lora=values["lora"])
        commands = [(needed, name, tmp_path / "out"), ("train", write_config(tmp_path / f"{name}-again", mine))]
        for command in commands:
            result = call(*command)
            assert result.exit_code == 2
            message = " ".join(result.output.split())
            assert f"huggingface.path = 'base' in '{name}/config.json' is not a folder any more" in message
            assert f"the model in '{tmp_path}/base'; put it back there, or a link to where it is now" in message
        (tmp_path / "base").symlink_to(tiny)
        result = call("sample", name, "Hello", "--tokens", "1")
        assert result.exit_code == 0, result.output
        (tmp_path / "base").unlink()
    base = json.loads((adapted / "model" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(tiny)


def test_a_folder_without_runs_is_not_exported(tmp_path: Path) -> None:
    result = call("export", tmp_path, tmp_path / "out")
    assert result.exit_code == 2
    assert "holds no checkpoint" in result.output


def build_where_one_rank_cannot(folder: Path) -> str:
    values = settings(folder / str(torch.distributed.get_rank()), folder / "run")
    try:
        train.engine_of(check.Job.of(TrainSettings.load(values)))
    except (ValueError, RuntimeError) as error:
        return str(error)
    return "nothing was wrong"


def test_a_model_that_one_rank_cannot_build_is_told_to_all(tiny: Path, tmp_path: Path) -> None:
    for rank in ("0", "1"):
        shutil.copytree(tiny, tmp_path / rank)
    (tmp_path / "1" / "model.safetensors").write_bytes(b"")
    first, second = run_ranks(build_where_one_rank_cannot, 2, tmp_path)
    assert "1/model.safetensors' is truncated" in second
    assert first == f"rank 1 could not build the model: {second}"


def test_the_settings_describe_one_model() -> None:
    with pytest.raises(ValueError, match="needs a section 'model'"):
        language_model(TrainSettings.load({}))


def test_the_cost_of_a_model_of_transformers_is_counted(tiny: Path) -> None:
    language = Transformer(HuggingFace(path=str(tiny), sequence_length=64))
    model = language.build()
    multiplied = sum(parameter.numel() for parameter in model.parameters())  # tied: the embedding is the output layer
    assert language.cost(model) == pytest.approx(6 * multiplied + 12 * 2 * 32 * 64, rel=0.05)
