"""Losses without all of the logits, where each rank has all of the head: as plain torch, in less memory."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zeromesh
from compare import assert_close
from harness import on_ranks, run_ranks
from heap import Heap
from huggingface_models import GPT2, GROUPED, SPECIAL
from run import plain_step, sgd, start_engine, train_step
from zeromesh.parallel.head.linear_cross_entropy import CHUNK_BYTES

STEPS = 3


def build(name: str, **options: Any) -> Any:
    import transformers

    torch.manual_seed(0)
    if name == "gpt2":
        rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, **rates, **options})).train()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**GROUPED, **SPECIAL, **options})).train()


def batch(step: int) -> torch.Tensor:
    return torch.randint(3, 96, (4, 8), generator=torch.Generator().manual_seed(step))


def loss_of(model: Any, ids: torch.Tensor, own: str) -> torch.Tensor:
    if own == "of the model":
        return model(input_ids=ids, labels=ids).loss
    logits = model(input_ids=ids).logits[:, :-1]
    if own == "of values":
        return -(logits.softmax(-1).square().sum(-1).log() + logits[..., 5]).mean()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.1)


def trained(name: str, settings: dict[str, Any], own: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = start_engine(build(name).double(), settings, batch=4, optimizer=sgd(0.1, momentum=0.9), chunked_loss=True)
    losses = []
    for step in range(STEPS):
        mine = batch(step).chunk(engine.data_size)[engine.data_rank]
        train_step(engine, loss_of(engine, mine, own))
        losses.append(engine.get_mean_loss())
    with zeromesh.zero.GatheredParameters(list(engine.module.parameters())):
        return losses, {key: value.detach().clone() for key, value in engine.module.state_dict().items()}


@pytest.mark.some(3)
@pytest.mark.parametrize("own", ["of the model", "of the user", "of values"])
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gpt2", {}),
        ("llama", {"zero_optimization": {"stage": 3}}),
        ("llama", {"mesh": {"tensor": 2}}),
        ("llama", {"mesh": {"tensor": 2}, "zero_optimization": {"stage": 3}}),
    ],
    ids=["gpt2", "llama, sharded", "llama, split", "llama, split and sharded"],
)
def test_losses_in_chunks_train_as_plain_torch(name: str, settings: dict[str, Any], own: str) -> None:
    model = build(name).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = [plain_step(optimizer, loss_of(model, batch(step), own)) for step in range(STEPS)]
    for found, state in run_ranks(trained, 4 if len(settings) > 1 else 2, name, settings, own):
        assert found == pytest.approx(losses, rel=1e-6)  # transformers takes them in fp32
        assert_close(state, model.state_dict())


def peak(chunked: bool) -> int:  # bytes that were live at most in a step, above what rested
    heap = Heap(smallest=1 << 20)
    engine = start_engine(
        build("llama", vocab_size=32000, max_position_embeddings=2048, num_hidden_layers=1),
        batch=1,
        optimizer=sgd(0.1),
        chunked_loss=chunked,
    )
    ids = torch.randint(3, 32000, (1, 2048))
    for _ in range(2):
        before = heap.live()
        with heap.watch() as found:
            train_step(engine, engine(input_ids=ids, labels=ids).loss)
    return found.bytes - before


def test_logits_are_never_all_there() -> None:
    whole = 2048 * 32000 * 4
    (plain,), (chunked,) = (run_ranks(peak, 1, chunked) for chunked in (False, True))
    assert plain > 2 * whole
    assert chunked < 3.5 * CHUNK_BYTES < whole


@on_ranks(1)
def test_a_model_without_a_vocabulary_is_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    with pytest.raises(ValueError, match="chunked_loss") as failure:
        zeromesh.initialize(
            model=model, config={"train_batch_size": 1, "optimizer": {"type": "SGD"}, "chunked_loss": True}
        )
    model(torch.ones(1, 4)).sum().backward()
    said = str(failure.value)
    assert "Sequential has no linear layer over the entries of an embedding; leave it out" in said
