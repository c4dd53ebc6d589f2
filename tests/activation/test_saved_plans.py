"""Plans of saved tensors: whatever is kept, computed again or moved, the bits are those of keeping everything."""

import copy
import gc
import logging
import random
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zeromesh
from harness import run_ranks
from huggingface_models import MODELS
from zeromesh.apps.train.architectures.decoder import Decoder
from zeromesh.apps.train.train_settings import ModelShape
from zeromesh.base.saved_tensors import BlockPlan, Saved
from zeromesh.engine.initialize import steps
from zeromesh.parallel.activation import selective
from zeromesh.parallel.activation.activation_store import ActivationStore
from zeromesh.parallel.activation.checkpoint import checkpoint_modules, compile_forward
from zeromesh.parallel.activation.choices import add_router
from zeromesh.shard.find_units import find_units

Plans = dict[str, BlockPlan]
FULL = -1  # in place of a seed: all is computed again


def tokens(seed: int) -> Tensor:
    return torch.randint(3, 90, (4, 8), generator=torch.Generator().manual_seed(seed))


def decoder() -> nn.Module:
    return Decoder(ModelShape(hidden_size=32, layers=2, heads=4, vocab_size=96, sequence_length=8))


def gpt2_with_dropout() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(**MODELS["gpt2"].options, attn_implementation="eager"))


def llama_with_adapters() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return get_peft_model(MODELS["llama"].build(), options)


KINDS = {
    "decoder": decoder,
    "llama": MODELS["llama"].build,
    "dropout": gpt2_with_dropout,
    "adapters": llama_with_adapters,
    "vit": MODELS["vit"].build,
    "conv net": MODELS["resnet"].build,
}


def built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = KINDS[kind]().train()
    if kind != "decoder":
        model.config.use_cache = False  # its copies of keys are contiguous, so that products add up in another order
    return model


def loss_of(model: nn.Module, kind: str, seed: int) -> Tensor:
    if kind in ("vit", "conv net"):
        pixels = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        return model(pixel_values=pixels, labels=torch.tensor([0, 1, 2, 0])).loss
    if kind == "decoder":
        return model(tokens(seed)).logsumexp(-1).mean()
    return model(input_ids=tokens(seed), labels=tokens(seed)).loss


class Recorder(TorchDispatchMode):
    """Counts operators, or the bytes of storages that they make, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.live = self.peak = 0
        self._keys: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.calls[func._schema.name] += 1
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self._keys:
                storage = tensor.untyped_storage()
                self._keys.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, key: int, size: int) -> None:
        self._keys.discard(key)
        self.live -= size


def random_plans(model: nn.Module, kind: str, seed: int) -> Plans:
    """Draw a fate for each operator of each block."""
    model, draw = copy.deepcopy(model), random.Random(seed)
    recorders: dict[str, Recorder] = {}
    for name, module in find_units(model):
        if next(module.children(), None) is not None:
            recorders[name] = Recorder()
            module.forward = partial(_recorded, module.forward, recorders[name])
    loss_of(model, kind, 0)
    return {
        name: BlockPlan(
            draw.choice([Saved.KEEP, Saved.MOVE]),
            {(op, n): draw.choice(list(Saved)) for op, count in recorder.calls.items() for n in range(count)},
        )
        for name, recorder in recorders.items()
    }


def _recorded(forward: Any, recorder: Recorder, *args: Any, **kwargs: Any) -> Any:
    with recorder:
        return forward(*args, **kwargs)


def train(model: nn.Module, kind: str) -> list[Tensor]:
    """One micro-batch after another, then two forwards before their backwards."""
    torch.manual_seed(1)
    losses = []
    for n in range(2):
        losses.append(loss_of(model, kind, n))
        losses[-1].backward()
    losses += [loss_of(model, kind, n) for n in (2, 3)]
    losses[2].backward()
    losses[3].backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*(loss.detach() for loss in losses), *gradients, *model.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize(
    ("kind", "seed"),
    [
        pytest.param(kind, seed, marks=[] if seed < (2 if kind in ("dropout", "conv net") else 1) else pytest.mark.full)
        for kind in KINDS
        for seed in range(6)
    ],
)
def test_bits_are_those_of_keeping_everything(kind: str, seed: int) -> None:
    model = built(kind)
    plans, plain = random_plans(model, kind, seed), copy.deepcopy(model)
    store = ActivationStore(torch.device("cpu"), host=True)
    store.least = 0
    for name, plan in plans.items():
        checkpoint_modules([model.get_submodule(name)], store, plan)
    assert len(plans) >= 2
    expected, found = train(plain, kind), train(model, kind)
    assert len(expected) == len(found)
    assert all(map(torch.equal, found, expected))
    gc.collect()
    assert store.pool is not None
    assert store.pool.peak > 0
    assert store.pool._lent == 0
    assert all(one() is None for one in store._prefetched)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ZeRO-0": (1, {"gradient_accumulation_steps": 2}),
    "ZeRO-3": (2, {"zero_optimization": {"stage": 3}, "gradient_accumulation_steps": 2}),
    "bf16": (2, {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}),
    "tensor ranks": (2, {"mesh": {"tensor": 2}}),
    "sequence parallelism": (2, {"mesh": {"tensor": 2}, "tensor_parallel": {"sequence": True}}),
    "context ranks": (2, {"mesh": {"context": 2}}),
    "pipeline": (2, {"mesh": {"pipeline": 2}, "gradient_accumulation_steps": 2}),
    "zero bubbles": (
        2,
        {"mesh": {"pipeline": 2}, "gradient_accumulation_steps": 2, "pipeline": {"schedule": "zb-h1"}},
    ),
}


@contextmanager
def planned(plans: Plans) -> Iterator[None]:
    """Let ``initialize`` execute these."""
    plan_run = steps.plan_run
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(steps, "plan_run", lambda *args: replace(plan_run(*args), saved=plans))
        yield


def steps_of(layout: dict[str, Any], seed: int | None) -> Any:
    model = built("llama" if "mesh" in layout else "dropout")
    settings = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "activation_checkpointing": {"enabled": seed is not None},
        **layout,
    }
    plans = {} if seed is None else random_plans(model, "llama", seed)
    if seed == FULL:
        plans = dict.fromkeys(plans, BlockPlan())
    with planned(plans):
        engine = zeromesh.initialize(model=model, config=settings)[0]
    assert seed in (None, FULL) or engine.activations is not None
    found = []
    torch.manual_seed(2)
    for step in range(2):
        batches = [{"input_ids": tokens(10 * step + n), "labels": tokens(10 * step + n)} for n in range(2)]
        if settings.get("mesh", {}).get("pipeline"):
            found.append(float(engine.train_batch(iter(batches))))
        else:
            for batch in batches[: settings.get("gradient_accumulation_steps", 1)]:
                loss = engine(**batch).loss
                engine.backward(loss)
                engine.step()
                found.append(float(loss))
        found.append(engine.get_global_grad_norm() or 0.0)
    held = 0 if engine.activations is None else engine.activations.pool._lent
    engine.destroy()
    return found, held


# test_planned_peaks.py has plans of an engine in every run.
@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_engines_train_to_the_same_bits(layout: str) -> None:
    ranks, settings = LAYOUTS[layout]
    # Stages without any checkpoint sum up some gradients in another order than those with one.
    expected = run_ranks(
        steps_of, ranks, settings, FULL if "mesh" in settings and "pipeline" in settings["mesh"] else None
    )
    for seed in range(2):
        found = run_ranks(steps_of, ranks, settings, seed)
        assert [losses for losses, _ in found] == [losses for losses, _ in expected]
        assert all(held == 0 for _, held in found)


def block() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def counted(plan: BlockPlan | None, retain: bool = False) -> tuple[Counter[str], list[Tensor]]:
    model, store = block(), ActivationStore(torch.device("cpu"), host=True)
    if plan is not None:
        checkpoint_modules([model], store, plan)
    with Recorder() as recorder:
        loss = model(torch.ones(4, 16)).square().sum()
        if retain:
            loss.backward(retain_graph=True)
            model.zero_grad()
        loss.backward()
    return recorder.calls, [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("fate", [Saved.KEEP, Saved.MOVE])
def test_what_is_kept_or_moved_is_computed_once(fate: Saved) -> None:
    first, gelu = ("aten::addmm", 0), ("aten::gelu", 0)
    _, expected = counted(None)
    for results, calls in ([], (3, 2)), ([first], (2, 2)), ([gelu], (3, 1)), ([first, gelu], (2, 1)):
        counter, gradients = counted(BlockPlan(results=dict.fromkeys(results, fate)))
        assert (counter["aten::addmm"], counter["aten::gelu"]) == calls
        assert all(map(torch.equal, gradients, expected))
        # Another backward of the same graph.
        assert all(map(torch.equal, counted(BlockPlan(results=dict.fromkeys(results, fate)), True)[1], expected))


def test_kept_bytes_live_until_the_backward_and_moved_ones_do_not() -> None:
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 256), nn.Linear(256, 32)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(torch.tanh(self.up(x)))

    # On the CPU, the host's buffers are among what is measured.
    held = {}
    for fate in Saved:
        model = nn.Sequential(*(Mlp() for _ in range(4)))
        store = ActivationStore(torch.device("cpu"), host=True)
        checkpoint_modules(model, store, BlockPlan(results={("aten::tanh", 0): fate}))
        x = torch.ones(64, 32, requires_grad=True)
        with Recorder() as recorder:
            loss = model(x).sum()
            assert store.pool is not None
            held[fate] = recorder.live - store.pool._lent
            assert store.pool._lent == (4 * 64 * 256 * 4 if fate is Saved.MOVE else 0)
            loss.backward()
        assert store.pool._lent == 0
    assert held[Saved.KEEP] == held[Saved.RECOMPUTE] + 4 * 64 * 256 * 4
    assert held[Saved.MOVE] == held[Saved.RECOMPUTE]


class Draws(nn.Module):
    """Operators that draw random numbers, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sin(self.linear(x) * torch.rand_like(x))
        return torch.cos(hidden + torch.randn_like(hidden)) * torch.rand_like(hidden)


@pytest.mark.parametrize("kept", ["aten::rand_like", "aten::randn_like"])
@pytest.mark.parametrize("number", [0, 1])
def test_random_numbers_behind_a_kept_result_are_those_of_the_forward(kept: str, number: int) -> None:
    def gradients(plan: BlockPlan | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Draws()
        if plan is not None:
            checkpoint_modules([model], None, plan)
        model(torch.ones(4, 16)).sum().backward()
        return [model.linear.weight.grad, torch.rand(3)]

    expected, found = gradients(None), gradients(BlockPlan(results={(kept, number): Saved.KEEP}))
    assert all(map(torch.equal, found, expected))


def test_a_recomputation_that_takes_another_way_computes_again() -> None:
    class Once(nn.Module):
        """Code that runs once, as a fetch that an earlier one has made needless."""

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.first = nn.Linear(16, 16), True

        def forward(self, x: Tensor) -> Tensor:
            if self.first:
                torch.sin(torch.ones(4, 16))
            self.first = False
            return torch.sin(torch.sin(self.linear(x)).square())

    def gradient(plan: BlockPlan | None) -> Tensor:
        torch.manual_seed(0)
        model = Once()
        if plan is not None:
            checkpoint_modules([model], None, plan)
        model(torch.ones(4, 16)).sum().backward()
        return model.linear.weight.grad

    for number in range(3):
        assert torch.equal(gradient(BlockPlan(results={("aten::sin", number): Saved.KEEP})), gradient(None))


def test_experts_that_a_plan_would_keep_are_the_first_choice() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.weights = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16))

        def forward(self, x: Tensor) -> Tensor:
            values, index = self.router(x).topk(1)
            return torch.einsum("bi,bij->bj", x, self.weights[index[:, 0]]) * values

    def gradients(plan: BlockPlan | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Routed()
        add_router(model)
        if plan is not None:
            checkpoint_modules([model], None, plan)
        model(torch.randn(8, 16)).square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    plan = BlockPlan(results={("aten::topk", 0): Saved.KEEP, ("aten::index", 0): Saved.KEEP})
    assert all(map(torch.equal, gradients(plan), gradients(None)))


def test_a_plan_for_another_model_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    selective._tell.cache_clear()
    _, expected = counted(None)
    with caplog.at_level(logging.WARNING, "zeromesh"):
        for _ in range(2):
            _, found = counted(BlockPlan(results={("aten::relu", 0): Saved.KEEP, ("aten::gelu", 0): Saved.KEEP}))
    assert all(map(torch.equal, found, expected))
    assert [record.getMessage() for record in caplog.records if "aten::relu" in record.getMessage()] != []
    assert len(caplog.records) == 1


class Changing(nn.Module):
    """Code that changes a result in place, as torch sees it or not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(8, 8), nn.Linear(8, 8), how

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.up(x))
        for tensor in hidden, self.up(x) if self.how == "product" else hidden[:, :4]:
            if self.how == "data":
                tensor.data.mul_(1.7)
            else:
                tensor.detach().numpy()[...] *= 1.7  # as kernels in other languages do
            hidden = hidden + tensor.mean()
        return self.down(hidden.exp())


@pytest.mark.parametrize("how", ["data", "numpy", "product"])
@pytest.mark.parametrize("row", ["selective", Saved.KEEP, Saved.MOVE])
def test_results_that_are_changed_behind_torch_are_computed_again(how: str, row: Any) -> None:
    results = {(f"aten::{name}", n): row for name in ("sigmoid", "addmm", "add", "exp") for n in range(3)}
    plan = selective.GRANULARITIES[row] if row == "selective" else BlockPlan(results=results)

    def gradients(plan: BlockPlan | None) -> list[Tensor]:
        torch.manual_seed(0)
        model, store = Changing(how), ActivationStore(torch.device("cpu"), host=True)
        if plan is not None:
            checkpoint_modules([model], store, plan)
        for size in (4, 4, 5):
            model(torch.randn(size, 8)).square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert all(map(torch.equal, gradients(plan), gradients(None)))


@pytest.mark.parametrize("plan", selective.GRANULARITIES.values())
def test_the_mode_of_a_recomputation_is_that_of_the_forward(plan: BlockPlan) -> None:
    def gradients(plan: BlockPlan | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Tanh())
        if plan is not None:
            checkpoint_modules([model], None, plan)
        loss = model(torch.ones(4, 8)).sum()
        model.eval()
        loss.backward()
        assert not model[1].training
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert all(map(torch.equal, gradients(plan), gradients(None)))


def test_averages_behind_a_kept_batch_norm_are_those_of_the_forward() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(self.norm(torch.tanh(self.norm(self.linear(x)))) * (1 + self.norm.running_mean))

    def gradients(plan: BlockPlan | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = Reads()
        if plan is not None:
            checkpoint_modules([model], None, plan)
        model(torch.randn(4, 8)).sum().backward()
        return [model.linear.weight.grad, model.norm.weight.grad, *model.buffers()]

    for number in range(2):
        plan = BlockPlan(results={("aten::native_batch_norm", number): Saved.KEEP})
        assert all(map(torch.equal, gradients(plan), gradients(None)))


@pytest.mark.full
def test_compiled_blocks_keep_what_the_plan_says() -> None:
    results = {("aten::addmm", 0): Saved.KEEP, ("aten::gelu", 0): Saved.RECOMPUTE}
    counts = []
    _, expected = counted(None)
    moves = dict.fromkeys(results, Saved.MOVE)
    for plan in BlockPlan(), BlockPlan(results=results), BlockPlan(results=moves):
        model = block()
        store = ActivationStore(torch.device("cpu"), host=True) if plan.moves else None
        checkpoint_modules([model], store, plan)
        compile_forward(model, backend="aot_eager")
        with Recorder() as recorder:
            model(torch.ones(4, 16)).square().sum().backward()
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        torch.testing.assert_close(found, expected)  # fused kernels may round in another order
        counts.append(recorder.calls["aten::addmm"])
    assert counts[:2] == [3, 2]
