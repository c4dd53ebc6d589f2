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
