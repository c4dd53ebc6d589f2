"""Blocks of transformers that are computed again do not add their keys and values to a cache twice."""

from typing import Any

import pytest
import torch

from harness import run_ranks
from huggingface_models import MODELS
from matrices import few
from run import sgd, start_engine, train_step


def losses(name: str, checkpointing: bool) -> Any:
    torch.manual_seed(0)
    model = MODELS[name].build().train()
    engine = start_engine(model, batch=2, optimizer=sgd(0.1), activation_checkpointing={"enabled": checkpointing})
    found = []
    for step in range(2):
        ids = torch.randint(3, 90, (2, 8), generator=torch.Generator().manual_seed(step))
        mask = torch.ones_like(ids)
        mask[:, -1] = 0
        loss = engine(input_ids=ids, attention_mask=mask, labels=ids).loss
        train_step(engine, loss)
        found += [float(loss), engine.get_global_grad_norm()]
    return found


@pytest.mark.parametrize("name", few(["gpt2", "llama", "t5"], "llama"))
def test_recomputed_blocks_train_to_the_same_numbers(name: str) -> None:
    expected = run_ranks(losses, 1, name, False)[0]
    assert run_ranks(losses, 1, name, True)[0] == pytest.approx(expected, rel=1e-6)
