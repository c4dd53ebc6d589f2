"""Code of a torch module is checked before sequences are spread: it must leave tokens apart outside of attention."""

from __future__ import annotations

import logging
import re
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import zeromesh
from harness import run_ranks
from test_context import fake
from token_programs import (
    APART,
    LENGTH,
    LOSSES,
    MIXES,
    NOISE,
    OTHER_ATTENTION,
    ROTARY,
    VOCABULARY,
    WIDTH,
    Decoder,
    batch,
    build,
)
from zeromesh.parallel.context import spread_batch as batches
from zeromesh.parallel.context.applied import SpreadSequences, Unsupported
from zeromesh.parallel.context.spread_model import TAG, apply
from zeromesh.parallel.context.torch_attention import followed
from zeromesh.parallel.follow.token_check import TokenCheck, alone

RANKS = 2
SPREAD = SpreadSequences("ring", fake(RANKS), TAG)
MODELS: dict[str, tuple[Any, ...]] = {
    **{f"code: {name}": (name,) for name in APART},
    **{f"rotary: {name}": ("nothing", name) for name in ROTARY},
    **{f"loss: {name}": ("nothing", "none", name) for name in LOSSES},
    "fused": ("nothing", "none", "flat", True),
}
"""Codes of ``APART``, and other options of a decoder."""


def require_apart(name: str, made: TokenCheck, part: dict[str, Any]) -> None:
    with followed(name, made, part, SPREAD):
        pass


def check(model: nn.Module, given: dict[str, Tensor], unchecked: str = "") -> None:
    made = TokenCheck(model, 2 * RANKS, True)
    if unchecked:
        made.replace(unchecked, alone)
    part = batches.split(given, fake(RANKS), "positions", shift=False)
    require_apart("Decoder", made, part)


@pytest.mark.parametrize("name", MIXES)
def test_code_that_computes_over_tokens_is_refused_with_its_line(name: str) -> None:
    code, said = MIXES[name]
    with pytest.raises(Unsupported, match=said) as error:
        check(build(code), batch())
    inside = r"in \S*token_programs\.py:\d+( \(blocks\.0\.inside\))?, "  # not where tensors are made for the length
    assert re.search(inside, str(error.value))
    remedy = (
        "; name the module in context_parallel.unchecked if it computes each token by itself, or set mesh.context to 1"
    )
    assert str(error.value).endswith(remedy)


@pytest.mark.parametrize("name", [*MODELS, *NOISE, "without labels"])
def test_code_that_leaves_tokens_apart_is_accepted(name: str, caplog: pytest.LogCaptureFixture) -> None:
    code, *options = MODELS.get(name, (name if name in NOISE else "nothing",))
    given = batch() if name != "without labels" else {"tokens": batch()["tokens"]}
    with caplog.at_level(logging.WARNING, "zeromesh"):
        check(build({**APART, **NOISE}[code], *options), given)
    assert not caplog.records


@pytest.mark.parametrize("name", OTHER_ATTENTION)
def test_attention_that_is_not_over_tokens_is_refused(name: str) -> None:
    with pytest.raises(Unsupported, match="scaled_dot_product_attention, in .*queries, keys and values of all tokens"):
        check(build(OTHER_ATTENTION[name]), batch())


def test_a_sequence_may_be_as_long_as_the_width() -> None:
    def code(module: Any, y: Tensor) -> Tensor:
        return y + y.new_zeros(y.shape) + torch.zeros(WIDTH, dtype=y.dtype) + torch.zeros(*y.shape[:2], 1)

    text = torch.randint(0, VOCABULARY, (WIDTH, WIDTH))
    for unchecked in ("", "blocks.0.inside"):
        check(build(code), {"tokens": text, "labels": text}, unchecked)


def test_each_state_of_a_model_and_each_way_to_call_it_is_checked() -> None:
    def code(module: Any, y: Tensor) -> Tensor:
        return y.cumsum(1) if module.training else y

    model = build(code).eval()
    made = TokenCheck(model, 2 * RANKS, True)
    part = batches.split(batch(), fake(RANKS), "positions", shift=False)
    require_apart("Decoder", made, part)
    model.train()
    for _ in range(2):  # an error that was caught is raised again
        with pytest.raises(Unsupported, match="cumsum"):
            require_apart("Decoder", made, part)
    model.eval()
    require_apart("Decoder", made, part)


def test_what_flags_switch_on_is_checked() -> None:
    class Smooth(Decoder):
        def forward(self, tokens: Tensor, smooth: bool = False, **more: Any) -> Tensor:  # type: ignore[override]
            self.blocks[0].inside.code = MIXES["mean"][0] if smooth else APART["nothing"]
            return super().forward(tokens, **more)

    model = Smooth(APART["nothing"]).double()
    made = TokenCheck(model, 2 * RANKS, True)
    part = batches.split(batch(), fake(RANKS), "positions", shift=False)
    require_apart("Smooth", made, part)
    with pytest.raises(Unsupported, match="sums over the tokens"):
        require_apart("Smooth", made, {**part, "smooth": True})


def test_code_behind_a_loss_is_checked() -> None:
    class Early(Decoder):
        def forward(self, tokens: Tensor, positions: Any = None, labels: Any = None) -> Tensor:
            x = self.tokens(tokens) + self.places(positions)
            x = self.blocks[0](x, positions)
            kept = labels != -100
            first = nn.functional.cross_entropy(self.head(x)[kept], labels[kept])
            x = self.blocks[1](x.cumsum(1), positions)
            return first + self.loss(self.head(x), labels)

    with pytest.raises(Unsupported, match="cumsum"):
        check(Early(APART["nothing"]).double(), batch())


def test_a_module_that_is_said_to_compute_each_token_by_itself_is_not_checked(caplog: pytest.LogCaptureFixture) -> None:
    def chosen(module: Any, y: Tensor) -> Tensor:  # experts that get their tokens only
        found = torch.zeros_like(y)
        for number, most in enumerate(module.gate(y).argmax(-1).unsqueeze(0) == torch.arange(4)[:, None, None]):
            found[most] = y[most] @ module.experts[number]
        return found

    with pytest.raises(Unsupported, match="__getitem__"):
        check(build(chosen), batch())
    model = build(chosen)
    made = TokenCheck(model, 2 * RANKS, True)
    for name in ("blocks.0.inside", "blocks.1.inside"):
        made.replace(name, alone)
    with caplog.at_level(logging.WARNING, "zeromesh"):
        require_apart("Decoder", made, batches.split(batch(), fake(RANKS), "positions", shift=False))
    assert not caplog.records
    with pytest.raises(
        ValueError, match=re.escape("context_parallel.unchecked has 'blocks.*.moe', which is not a module of Decoder")
    ):
        apply(model, "ring", fake(RANKS), unchecked=["blocks.*.moe"])


def test_what_cannot_be_checked_is_told(caplog: pytest.LogCaptureFixture) -> None:
    def strange(module: Any, y: Tensor) -> Tensor:
        raise KeyError("no such thing")

    with caplog.at_level(logging.WARNING, "zeromesh"):
        check(build(strange), batch())
    (told,) = [record.getMessage() for record in caplog.records]
    assert told.startswith("could not check whether the code of Decoder treats tokens separately (KeyErr")
    assert told.endswith("compare its first losses with those of one process, as zeromesh verify does")


def test_a_check_leaves_nothing_behind() -> None:
    class Counting(Decoder):
        calls = 0
        seen: ClassVar[list[int]] = []

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            type(self).seen.append(1)
            return super().forward(*args, **kwargs)

    torch.manual_seed(0)
    model = Counting(APART["nothing"])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    check(model, batch())
    assert (model.calls, Counting.seen) == (0, [])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def train(model: nn.Module, config: dict[str, Any] | None) -> list[float]:
    settings = {"train_batch_size": 4, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, **(config or {})}
    engine = None if config is None else zeromesh.initialize(model=model, config=settings)[0]
    optimizer = torch.optim.SGD(model.parameters(), 0.5) if engine is None else None
    losses = []
    for step in range(3):
        loss = (engine or model)(**batch(step))
        losses.append(float(loss.detach()))
        if engine is None:
            loss.backward()
            assert optimizer is not None
            optimizer.step()
            optimizer.zero_grad()
        else:
            engine.backward(loss)
            engine.step()
    if engine is not None:
        engine.destroy()
    return losses


def train_all(names: list[str], config: dict[str, Any]) -> list[list[float]]:
    return [train(build(APART[MODELS[name][0]], *MODELS[name][1:]), config) for name in names]


def require_equal(names: list[str], config: dict[str, Any]) -> None:
    by_rank = run_ranks(train_all, RANKS, names, config)
    for number, name in enumerate(names):
        want = train(build(APART[MODELS[name][0]], *MODELS[name][1:]), None)
        for found in by_rank:
            assert found[number] == pytest.approx(want, rel=2**-8 if name == "code: autocast" else 1e-9), name


CONTEXT = {"mesh": {"context": RANKS}, "context_parallel": {"strategy": "ring"}}
SEQUENCE = {"mesh": {"tensor": RANKS}, "tensor_parallel": {"sequence": True}}
FEW = ["code: experts", "code: written", "rotary: outer", "loss: chosen", "fused"]


def test_code_that_is_accepted_trains_as_in_one_process() -> None:
    require_equal(FEW, CONTEXT)


@pytest.mark.full
@pytest.mark.parametrize("config", [CONTEXT, SEQUENCE, {**CONTEXT, "zero_optimization": {"stage": 3}}])
def test_all_code_that_is_accepted_trains_as_in_one_process(config: dict[str, Any]) -> None:
    require_equal([*MODELS], config)


def refused(names: list[str], config: dict[str, Any]) -> list[str]:
    said = []
    for name in names:
        try:
            train(build(MIXES[name][0]), config)
        except ValueError as error:
            said.append(str(error))
        else:
            said.append("")
    return said


@pytest.mark.parametrize("config", [CONTEXT, {**CONTEXT, "compile": {"enabled": True, "backend": "eager"}}])
def test_an_engine_refuses_code_that_computes_over_tokens(config: dict[str, Any]) -> None:
    names = ["mean", "length", "own function"]
    for said in run_ranks(refused, RANKS, names, config):
        for name, message in zip(names, said, strict=True):
            assert re.search(f"Decoder cannot run under context parallelism: .*{MIXES[name][1]}", message), message


def test_the_length_of_a_check_is_that_of_the_batch() -> None:
    def limited(module: Any, y: Tensor) -> Tensor:
        assert y.shape[1] == LENGTH, "the code is told of whole sequences"
        return y

    check(build(limited), batch())
