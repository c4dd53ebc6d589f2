"""Sequence parallelism is for blocks that are called one after the other and leave tokens apart; others are refused."""

import re
import traceback
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zeromesh
from harness import on_ranks, run_ranks
from run import train_step
from same_training import require_same_training, train_on_engine
from token_programs import APART, MIXES, NOISE, OTHER_ATTENTION, Code, Inside
from zeromesh.parallel.follow.token_check import TokenCheck
from zeromesh.parallel.tensor.derive import derive
from zeromesh.parallel.tensor.sequence import find_stacks
from zeromesh.parallel.tensor.spread_sequence import Followed, _entered, check_of, followed
from zeromesh.parallel.tensor.tensor_plan import parse, resolve

WIDTH, LENGTH = 32, 8


class Block(nn.Module):
    def __init__(self, inside: str) -> None:
        super().__init__()
        self.inside, self.calls = inside, 0
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        if "positions" in inside:
            self.positions = nn.Embedding(LENGTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        match self.inside:
            case "later":
                self.calls += 1
                y = y.cumsum(1) if self.calls > 2 else y
            case "apart later":
                self.calls += 1
                y = y.cumsum(2) if self.calls > 2 else y.roll(1, 2)
            case "mean of tokens":
                y = y - y.mean(1, keepdim=True)
            case "shift of tokens":
                y = y + y.roll(1, 1)
            case "softmax of tokens":
                y = y.softmax(-2)
            case "previous tokens":
                y = torch.cat([torch.zeros_like(y[:, :1]), y[:, :-1]], 1)
            case "apart":  # a softmax and a mean over the width, a mean over samples, and other shapes
                y = y.softmax(-1) + y.mean(-1, keepdim=True) + y.mean(0) + y.unsqueeze(1).squeeze(1)
                y = y.transpose(1, 2).transpose(-1, -2)
            case "positions of all tokens":
                y = y + self.positions(torch.arange(LENGTH))
            case "positions of a sample":  # parts of it could be taken for samples
                y = y + self.positions(torch.arange(LENGTH)[None])
        return x + self.down(self.up(y).relu())


class Mixer(nn.Module):  # an MLP over tokens (Tolstikhin et al., "MLP-Mixer", 2021)
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(LENGTH, 2 * LENGTH), nn.Linear(2 * LENGTH, LENGTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x.transpose(1, 2)).relu()).transpose(1, 2)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList(Mixer() if kind == "mixer" else Block(kind) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        match self.kind:
            case "branches":
                x = first(x) + second(x) + third(x)
            case "backwards":
                x = third(second(first(x)) + first(x)) if not self.training else first(third(second(x)))
            case "without the first":
                x = third(second(x))
            case "without the last":
                x = second(first(x)).square()
            case "sum between":
                x = third(second(first(x).cumsum(1)))
            case "residual outside":
                x = x + second(first(x))
            case "without the second":
                x = third(first(x))
            case "twice":
                x = third(second(first(third(second(first(x))))))
            case "recomputed":
                x = checkpoint(first, x, use_reentrant=False)
                x = checkpoint(lambda y: third(second(y)), x, use_reentrant=False)
            case "recomputed, reentrant":
                x = checkpoint(first, x, use_reentrant=True)
                x = checkpoint(lambda y: third(second(y)), x, use_reentrant=True)
            case _:
                x = third(second(first(x)))
        return x.square().mean()


def build(kind: str) -> Model:
    torch.manual_seed(0)
    return Model(kind)


def sequences(step: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (torch.randn(4, LENGTH, WIDTH, generator=generator, dtype=torch.float64).requires_grad_(),)


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
SETTINGS = {
    "train_batch_size": 4, "mesh": {"tensor": 2}, "tensor_parallel": {"sequence": True, "plan": PLAN},
}  # fmt: skip


RIGHT = (
    "usual", "apart", "positions of all tokens", "positions of a sample", "without the second", "twice", "recomputed",
    "recomputed, reentrant", "apart later",
)  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.parametrize("kind", RIGHT)
@on_ranks(2)
def test_blocks_that_are_called_one_after_the_other_compute_what_one_rank_does(kind: str) -> None:
    require_same_training(lambda: build(kind), sequences, SETTINGS)


TOKENS = "an entry for each of the 8 tokens of a sequence, of which a rank has a part"
WRONG = {
    "branches": f"add, in .*, is given a tensor with {TOKENS}",
    "backwards": "mean, in .*, needs the tokens of all ranks",
    "without the first": "blocks.1 was called before the first",
    "without the last": "mean, in .*, needs the tokens of all ranks",
    "sum between": "cumsum, in .*, needs the tokens of all ranks",
    "residual outside": f"add, in .*, is given a tensor with {TOKENS}",
    "later": "cumsum, in .*, needs the tokens of all ranks",
    "mean of tokens": "mean, in .*, sums over the tokens",
    "shift of tokens": "roll, in .*, needs the tokens of all ranks",
    "softmax of tokens": "softmax, in .*, needs the tokens of all ranks",
    "previous tokens": "__getitem__, in .*, needs the tokens of all ranks",
    "mixer": "add, in .*, needs the tokens of all ranks",
}


def refused(kind: str, tensor: int) -> str:  # what a rank says; ranks that fail would have to be started again
    try:
        train_on_engine(build(kind).double(), sequences, SETTINGS)
    except Exception as error:
        return "".join(traceback.format_exception_only(error))
    return "nothing"


@pytest.mark.some(5)
@pytest.mark.parametrize("kind", WRONG)
def test_blocks_that_need_tokens_of_other_ranks_are_refused(kind: str) -> None:
    said = run_ranks(refused, 2, kind, 2)
    assert any(re.search(WRONG[kind], one) for one in said), said
    assert all("set tensor_parallel.sequence to false" in one for one in said), said


class Coded(nn.Module):
    def __init__(self, code: Code) -> None:
        super().__init__()
        self.norm, self.inside = nn.LayerNorm(WIDTH), Inside(code)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inside.code(self.inside, self.norm(x))  # the block's own, as modules inside have the whole sequence
        return x + self.down(self.up(y).relu())


class Stacked(nn.Module):
    def __init__(self, code: Code) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Coded(code) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.cumsum(1).mean()  # behind the blocks, where the sequence is whole


def checked(code: Code) -> None:
    model = Stacked(code).double()
    plan = resolve(model, parse(PLAN), {}, 0, 2)
    with followed(check_of(model, plan, find_stacks(model, plan), 2), sequences(0), {}):
        pass


@pytest.mark.parametrize("name", MIXES)
def test_code_that_computes_over_tokens_is_refused_with_its_line(name: str) -> None:
    code, said = MIXES[name]
    with pytest.raises(ValueError, match=rf"(?s){said}.*; set tensor_parallel.sequence to false$"):
        checked(code)


@pytest.mark.parametrize("name", [*APART, *NOISE, "keys of a table", "over samples", "over heads"])
def test_code_that_leaves_tokens_apart_is_accepted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "zeromesh"):
        checked({**APART, **NOISE, **OTHER_ATTENTION}[name])
    assert not caplog.records


def windows(width: int, y: Tensor) -> Tensor:
    return y.unflatten(1, (-1, width)).softmax(2).flatten(1, 2)


class Last(nn.Module):
    """Norm that a hook may watch, with code after it, of the number of calls of all such modules."""

    calls = 0

    def __init__(self, code: Code) -> None:
        super().__init__()
        self.norm, self.code = nn.LayerNorm(WIDTH), code

    def forward(self, x: Tensor) -> Tensor:
        Last.calls += 1
        return self.code(Last.calls, self.norm(x))


# Code, a hook of the norm, and what is said of it, if it is refused.
FOLLOWED: dict[str, tuple[Code, Any, str]] = {
    "windows of a part": (lambda n, y: windows(4, y), None, ""),
    "at times": (lambda n, y: windows(4, y).cumsum(1 if n % 5 == 0 else 2), None, "cumsum"),
    "at times, apart": (lambda n, y: windows(2, y).cumsum(2) if n % 3 == 0 else y.relu(), None, ""),
    "told": (lambda n, y: y, lambda module, args, output: print(float(output.mean(1).norm())), ""),
    "changed": (lambda n, y: y, lambda module, args, output: output * 2, ""),
    "mean": (
        lambda n, y: y,
        lambda module, args, output: output - output.mean(1, keepdim=True),
        "sums over the tokens",
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_ways_and_hooks_of_blocks_are_followed(name: str) -> None:
    code, hook, said = FOLLOWED[name]
    blocks = nn.ModuleList(Last(code) for _ in range(2))
    if hook is not None:
        blocks[0].norm.register_forward_hook(hook)

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Blocks()
    check = TokenCheck(model, 2, False)
    for block in ("blocks.0", "blocks.1"):
        check.replace(block, _entered)
    hooks, x = Followed(check), torch.randn(2, 8, WIDTH)
    part = x[:, :4]
    with nullcontext() if not said else pytest.raises(ValueError, match=said):
        for _ in range(8):
            hooks.before(model, (x,), {})
            blocks[1](blocks[0](part))
            hooks.after(model, None, None)


def watched_bert() -> Any:
    """Return a BERT whose linear layers have hooks, so that none of them gives, or takes, plain parts."""
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = BertConfig(**sizes, intermediate_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForMaskedLM(config).double()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda module, args, output: None)
    return model


def test_every_part_that_a_module_is_given_is_joined_where_it_has_whole_sequences() -> None:
    model, ids = watched_bert(), torch.arange(16).view(2, 8)
    plan = resolve(model, {}, derive(model, 2)[0], 0, 2)
    check = check_of(model, plan, find_stacks(model, plan), 2)
    with followed(check, (ids,), {"labels": ids}):
        pass
    residual = {name: places for name, places in check.also_spread.items() if places}
    assert residual == {f"bert.encoder.layer.0.{name}": {1} for name in ("attention.output", "output")}


def bert_losses(tensor: int) -> list[float]:
    config: dict[str, Any] = {"train_batch_size": 2, "mesh": {"tensor": tensor}, "optimizer": {"type": "SGD"}}
    if tensor > 1:
        config["tensor_parallel"] = {"sequence": True}
    engine = zeromesh.initialize(model=watched_bert(), config=config)[0]
    losses = []
    for step in range(2):
        ids = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(step))
        losses.append(train_step(engine, engine(input_ids=ids, labels=ids).loss))
    return losses


@pytest.mark.full
def test_a_bert_with_hooks_on_all_layers_trains_as_in_one_process() -> None:
    (want,) = run_ranks(bert_losses, 1, 1)
    assert all(losses == pytest.approx(want, rel=1e-9) for losses in run_ranks(bert_losses, 2, 2))
