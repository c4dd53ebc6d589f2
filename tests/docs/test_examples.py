"""The scripts in ``examples/`` do what they say."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from harness import run_command

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone")


# What a file needs is made by the command that its error names.
MADE = {
    "bert.json": "python examples/bert_mlm.py --config examples/bert.json",
    "blend.json": "python examples/tiny_model.py chat-tokenizer",
    "chat.json": "python examples/tiny_model.py FOLDER",
    "mixture.json": "python examples/tiny_model.py FOLDER",
    "qlora.json": "python examples/tiny_model.py FOLDER",
}


@pytest.mark.full
@pytest.mark.parametrize("file", sorted(path.name for path in EXAMPLES.glob("*.json")))
def test_files_train_or_name_the_command_that_makes_what_they_need(file: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    train = [sys.executable, "-m", "zeromesh", "train", f"examples/{file}", "--set", "run.steps=2"]
    # A smaller data set, where it is the library of Python.
    sources = [{"source": "examples/tiny_model.py", "weight": 0.7}, {"source": "examples/chat.jsonl", "weight": 0.3}]
    less = {"blend.json": sources, "stdlib.json": ["examples/tiny_model.py", "examples/bert_mlm.py"]}
    if file in less:
        train += ["--set", f"data.train={json.dumps(less[file])}", "--set", "train_batch_size=2"]
        train += ["--set", "data.vocabulary_size=300"] if file == "stdlib.json" else []
    finished = run_command(train, cwd=tmp_path, timeout=200)
    if file in MADE:
        assert finished.returncode == 2, finished.stdout
        assert MADE[file] in " ".join(finished.stdout.split()), finished.stdout
        if file == "bert.json":
            return
        special = {"blend.json": ["chat-tokenizer"], "mixture.json": ["models/mixture", "--experts", "8"]}
        options = special.get(file, ["models/tiny"])
        made = run_command([sys.executable, "examples/tiny_model.py", *options], cwd=tmp_path, timeout=200)
        assert made.returncode == 0, made.stdout
        finished = run_command(train, cwd=tmp_path, timeout=200)
    assert finished.returncode == 0, finished.stdout


# In bf16, as it is published, it takes twice as long on a processor that has no instructions for it.
@pytest.mark.full
@pytest.mark.parametrize("bf16", [pytest.param(True, marks=pytest.mark.full), False])
def test_bert_learns_masked_tokens_and_opens_in_transformers(bf16: bool, tmp_path: Path) -> None:
    import transformers

    script, config = EXAMPLES / "bert_mlm.py", tmp_path / "bert.json"
    config.write_text(json.dumps(json.loads((EXAMPLES / "bert.json").read_text()) | {"bf16": {"enabled": bf16}}))
    options = ("--config", config, "--output", tmp_path / "bert", "--steps", "20", "--files", "4", "--length", "32")
    finished = run_command([*map(str, (*TORCHRUN, script, *options))], timeout=200)
    assert finished.returncode == 0, finished.stdout
    before, after = (float(value) for value in re.findall(r"validation loss ([\d.]+)", finished.stdout))
    assert after < before - 0.5
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "bert", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "bert")
    batch = tokenizer("import [MASK]", return_tensors="pt", return_token_type_ids=False)
    logits = model(**batch).logits
    assert logits.shape == (1, batch["input_ids"].shape[1], len(tokenizer))
    assert bool(logits.isfinite().all())
