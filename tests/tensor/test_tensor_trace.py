"""Planning by a forward on tensors without memory leaves model and process as they were, and always ends."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness import on_ranks
from run import adamw, start_engine
from unknown_modules import THIRDS, Decoder, NanoMLP
from zeromesh.base.dry.model_copy import left_as_they_are
from zeromesh.parallel.tensor import traced_plan as trace
from zeromesh.parallel.tensor.derive import derive
from zeromesh.parallel.tensor.split_plan import PlanRule
from zeromesh.parallel.tensor.tensor_plan import parse

C, R, G = (PlanRule(name) for name in ("colwise_parts", "rowwise_parts", "colwise_gather_output"))
MASKS: dict[int, Tensor] = {}
CALLS: list[int] = []


def styles(mlp: Callable[[], nn.Module], blocks: int = 2) -> tuple[PlanRule | None, str]:
    plan, notes = derive(Decoder(mlp=mlp, blocks=blocks), 2)
    return plan.get("h.*.mlp.c_fc"), "\n".join(notes)


class Counting(NanoMLP):
    """An MLP that remembers its calls, and changes a buffer in each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.cache, self.norm = 0, [], nn.BatchNorm1d(32)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += x.shape[0]
        self.cache.append(x)
        return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_planning_leaves_the_model_and_the_random_numbers_as_they_are(device: str) -> None:
    with torch.device(device):
        model = Decoder(mlp=Counting)
    heard: list[Any] = []
    model.lm_head.register_forward_hook(lambda *_: heard.append(1))
    before = {} if device == "meta" else {name: value.clone() for name, value in model.state_dict().items()}
    state, forwards = torch.get_rng_state(), {name: m.forward for name, m in model.named_modules()}
    plan, notes = derive(model, 2)
    assert plan["h.*.mlp.c_fc"] == C
    assert plan["h.*.attn.c_attn"] == parse({"x": THIRDS})["x"]
    assert not notes
    assert torch.equal(state, torch.get_rng_state())
    assert [(block.mlp.calls, block.mlp.cache) for block in model.h] == [(0, [])] * 2
    assert not heard
    assert all(m.forward == forwards[name] for name, m in model.named_modules())
    for name, value in before.items():
        assert torch.equal(value, model.state_dict()[name]), name


class Caching(NanoMLP):
    """An MLP that keeps tensors in all places outside of the model."""

    scale: Any = None

    @staticmethod
    @lru_cache
    def ramp(length: int, device: torch.device) -> Tensor:
        return torch.ones(length, device=device)

    def forward(self, x: Tensor) -> Tensor:
        CALLS.append(1)
        kind = type(self)
        if kind.scale is None:
            kind.scale = torch.ones(1, device=x.device)
            kind.more = 1
        mask = MASKS.setdefault(x.shape[1], torch.ones(x.shape[1], 1, device=x.device))
        return super().forward(x * mask * kind.scale * self.ramp(x.shape[2], x.device))


def test_caches_outside_of_the_model_are_left_as_they_are() -> None:
    MASKS[3] = kept = torch.zeros(3, 1)
    assert styles(Caching)[0] == C
    assert list(MASKS) == [3]
    assert MASKS[3] is kept
    assert Caching.scale is None
    assert not hasattr(Caching, "more")
    assert not CALLS
    assert Caching.ramp.cache_info().currsize == 0
    Decoder(mlp=Caching)(torch.ones(2, 8, dtype=torch.long)).sum().backward()


def test_a_loop_that_guessed_values_never_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class Halving(NanoMLP):
        def forward(self, x: Tensor) -> Tensor:
            count = int((x > -100).sum())
            while count % 2 == 0:
                count //= 2
            return super().forward(x) * count

    monkeypatch.setattr(trace, "SECONDS", 0.5)
    rule, notes = styles(Halving)
    assert rule == G
    assert "its forward took more than 0.5 s on tensors without memory" in notes


def test_a_wrapped_forward_and_hooks_of_gradients_are_not_run() -> None:
    def wrapped() -> nn.Module:
        made = NanoMLP()
        forward = made.forward
        made.forward = lambda x: (made.__dict__.__setitem__("seen", x), forward(x))[1]
        return made

    def hooked() -> nn.Module:
        made = NanoMLP()
        made.gelu.register_full_backward_hook(lambda *_: None)
        return made

    for make in (wrapped, hooked):
        rule, notes = styles(make)
        assert rule == G
        assert "has another forward than its class, or hooks of its backward" in notes


def test_a_plan_depends_neither_on_seeds_nor_on_blocks_that_are_skipped() -> None:
    class Skipping(Decoder):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.wte(ids)
            for block in self.h:
                if random.random() + numpy.random.rand() + torch.rand(()) < 1.5:
                    x = block(x)
            return x

    state = torch.get_rng_state()
    for seed in range(3):
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        plan, _ = derive(Skipping(blocks=8), 2)
        assert plan["h.*.mlp.c_fc"] == C
        assert plan["h.*.mlp.c_proj"] == R
    torch.set_rng_state(state)


def test_layers_that_are_never_called_or_whose_weights_are_read_stay_as_they_were() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_fc, self.c_proj, self.spare = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 32)
            self.read = nn.Linear(32, 32)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.c_proj(F.relu(self.c_fc(x))), self.read.weight)

    plan, notes = derive(Decoder(mlp=Reading), 2)
    assert (plan["h.*.mlp.c_fc"], plan["h.*.mlp.c_proj"], plan["h.*.mlp.spare"]) == (C, R, G)
    assert "h.*.mlp.read" not in plan
    assert any("h.*.mlp.read (Linear) stays whole on all ranks, as its weight is read" in note for note in notes)


def test_what_cannot_be_copied_or_run_is_split_layer_by_layer_with_the_reason() -> None:
    class Locked(NanoMLP):
        def __init__(self) -> None:
            super().__init__()
            self.count = iter(lambda: 1, 2)

        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("cannot copy what others wait for")

    class Asking(NanoMLP):
        def forward(self, x: Tensor) -> Tensor:
            raise KeyError("no such thing")

    for make, reason in ((Locked, "TypeError: cannot copy what others wait for"), (Asking, "no such thing")):
        rule, notes = styles(make)
        assert rule == G
        assert reason in notes


def test_layers_that_share_a_weight_have_one_rule_that_of_the_one_that_is_called() -> None:
    class Sharing(NanoMLP):
        def __init__(self) -> None:
            super().__init__()
            self.spare = nn.Linear(32, 128)  # as of another block, where it is called
            self.spare.weight = self.c_fc.weight

    plan, _ = derive(Decoder(mlp=Sharing), 2)
    assert (plan["h.*.mlp.c_fc"], plan["h.*.mlp.spare"]) == (C, C)


def olmo2(**options: Any) -> Any:
    import transformers

    small = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    torch.manual_seed(0)
    return transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**small, vocab_size=64, pad_token_id=0, **options))


@on_ranks(2)
def test_activations_that_a_model_takes_out_of_its_blocks_are_whole() -> None:
    tokens = torch.arange(8).view(1, 8)
    with torch.no_grad():
        expected = olmo2(attn_implementation="eager")(tokens, output_attentions=True).attentions
    engine = start_engine(olmo2(attn_implementation="eager"), mesh={"tensor": 2}, optimizer=adamw(1e-3))
    found = engine(tokens, output_attentions=True).attentions
    assert {type(one) for one in found} == {Tensor}  # so that one rank alone may read them
    for one, want in zip(found, expected, strict=True):
        torch.testing.assert_close(one.detach(), want)
    engine.destroy()


def test_what_stays_split_by_itself_keeps_the_style_that_names_gave() -> None:
    import transformers

    small = {"hidden_size": 32, "num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 4, "num_hidden_layers": 1}
    plan, _ = derive(transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**small, vocab_size=64)), 2)
    assert plan["backbone.layers.*.mixer.out_proj"] == PlanRule("rowwise_split_input")


def test_in_classes_of_transformers_what_names_leave_or_gather_is_traced_too() -> None:
    import transformers

    # Its own plan gathers them, as queries and keys have a norm over all heads.
    plan, notes = derive(olmo2(), 2)
    block = "model.layers.*"
    assert {plan[f"{block}.self_attn.{name}_proj"] for name in "qkv"} == {C}
    assert plan[f"{block}.self_attn.o_proj"] == R
    assert plan[f"{block}.mlp.down_proj"] == PlanRule("rowwise")  # known by name: its block has no parts there
    assert not notes
    stages = {"depths": [1, 1], "hidden_sizes": [8, 16], "num_stages": 2, "image_size": 32}
    plan, _ = derive(transformers.ConvNextForImageClassification(transformers.ConvNextConfig(**stages)), 2)
    layers = "convnext.encoder.stages.*.layers.*"
    assert (plan[f"{layers}.pwconv1"], plan[f"{layers}.pwconv2"]) == (C, R)
    assert not any(name.startswith("classifier") for name in plan)  # outside of blocks nothing is traced


def test_files_that_helpers_of_a_model_import_are_left_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trace_cache.py").write_text("TABLE = None\n")
    (tmp_path / "trace_helper.py").write_text(
        "import trace_cache\n\ndef scaled(x):\n"
        "    trace_cache.TABLE = x.new_ones(1)\n    return x * trace_cache.TABLE\n"
    )
    (tmp_path / "trace_model.py").write_text(
        "from torch import nn\nfrom trace_helper import scaled\n\nclass Model(nn.Module):\n"
        "    def forward(self, x):\n        return scaled(x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    model = importlib.import_module("trace_model").Model()
    with left_as_they_are(model):
        model(torch.ones(2, device="meta"))
    assert importlib.import_module("trace_cache").TABLE is None
