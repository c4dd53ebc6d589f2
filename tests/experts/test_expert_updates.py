"""Updates of experts that ranks share: optimizers of whole parameters, precision, tiers, and what users read."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from compare import assert_close
from harness import run_ranks
from huggingface_models import token_batches
from run import adamw, configuration, optimizer_of, train_on_tokens
from test_expert_adapters import loaded, saved_mixture
from test_expert_checkpoints import mixture
from zeromesh.shard.optim.lamb import Lamb
from zeromesh.shard.optim.muon import orthogonalize

LIMIT = 240
STEPS = 3
EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"


class Mixed(nn.Module):
    """Experts in a list, which a loop calls with the tokens that have chosen each: (T, width) -> the same."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        mixed = x
        for number, expert in enumerate(self.experts):
            tokens, place = torch.where(chosen == number)
            mixed = mixed.index_add(0, tokens, expert(x[tokens]) * weights[tokens, place, None])
        return mixed


class Listed(nn.Module):
    """A mixture as users write it."""

    def __init__(self, width: int = 8, count: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, width)
        self.blocks = nn.ModuleList(Mixed(width, count) for _ in range(2))
        self.head = nn.Linear(width, 96)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.embed(input_ids).flatten(0, 1)
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(x), labels.flatten()))


class OwnMomentum(torch.optim.Optimizer):
    """An optimizer of a user's own, which updates each element by itself."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                    parameter.sub_(momentum.mul_(0.9).add_(parameter.grad), alpha=group["lr"])


class PlainMuon:
    """Muon in torch for matrices, each expert's by itself, and AdamW for the rest."""

    def __init__(self, model: nn.Module) -> None:
        hidden = [p for n, p in model.named_parameters() if p.ndim > 1 and "embed" not in n and "head" not in n]
        if not isinstance(model, Listed):
            hidden = [p for p in hidden if p.ndim == 2 or getattr(p, "use_muon", False)]
        self.momenta = {p: torch.zeros_like(p) for p in hidden}
        rest = [p for p in model.parameters() if p not in self.momenta]
        self.adamw = torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.0, foreach=False)

    def zero_grad(self) -> None:
        self.adamw.zero_grad()
        for parameter in self.momenta:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        for parameter, momentum in self.momenta.items():
            momentum.lerp_(parameter.grad, 1 - 0.95)
            direction = parameter.grad.lerp(momentum, 0.95)
            stack = direction if parameter.ndim == 3 else direction[None]
            update = torch.stack([orthogonalize(matrix, (3.4445, -4.7750, 2.0315), 5) for matrix in stack])
            factor = max(1.0, stack.shape[1] / stack.shape[2]) ** 0.5
            parameter.add_(update.view_as(parameter), alpha=-1e-2 * factor)


def with_muon(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if parameter.ndim == 3:
            parameter.use_muon = True
    return model


Make = Callable[[nn.Module], Any]

OPTIMIZERS: Mapping[str, tuple[Any, Make]] = {
    "lamb": (
        optimizer_of("Lamb", lr=1e-2, weight_decay=0.1),
        lambda m: Lamb(m.parameters(), lr=1e-2, weight_decay=0.1),
    ),
    "muon": (optimizer_of("Muon", lr=1e-2, weight_decay=0.0), PlainMuon),
    "adamw": (adamw(1e-2), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False)),
    "own": (None, lambda m: OwnMomentum(m.parameters())),
    "lamb of a user": (None, lambda m: Lamb(m.parameters(), lr=1e-2)),
}


def make(kind: str, folder: Path) -> nn.Module:
    torch.manual_seed(3)
    return with_muon(mixture(folder)) if kind == "stacked" else Listed().double()


def train(kind: str, folder: Path, name: str, stage: int, mesh: dict[str, int], **sections: Any) -> Any:
    model, (section, user) = make(kind, folder), OPTIMIZERS[name]
    config = configuration(batch=4, stage=stage, mesh=mesh, gradient_clipping=0.1, optimizer=section) | sections
    config["zero_allow_untested_optimizer"] = name == "own"
    optimizer = user(model) if section is None else None
    engine = zeromesh.initialize(model=model, optimizer=optimizer, config=config)[0]
    losses = [train_on_tokens(engine, tokens) for tokens in token_batches(STEPS)]
    return losses, engine.get_global_grad_norm(), engine.gathered_state_dict()


def plain(kind: str, folder: Path, name: str) -> Any:
    model = make(kind, folder)
    optimizer = OPTIMIZERS[name][1](model)
    losses = []
    for tokens in token_batches(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
        losses.append(loss.item())
    return losses, norm, model.state_dict()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_mixture(tmp_path_factory.mktemp("mixture"))


CASES = [(kind, name, stage) for kind in ("stacked", "listed") for name in OPTIMIZERS for stage in (0, 1, 3)]
MESHES = [{"expert": 2}, {"expert": 2, "data": 4}]


@pytest.mark.full
@pytest.mark.parametrize("mesh", MESHES, ids=["two", "two of four"])
@pytest.mark.parametrize(("kind", "name", "stage"), CASES)
def test_optimizers_update_shared_experts_as_whole_ones(kind, name, stage, mesh, folder) -> None:
    losses, norm, parameters = plain(kind, folder, name)
    ranks = run_ranks(train, mesh.get("data", 2), kind, folder, name, stage, mesh, timeout=LIMIT)
    assert [sum(step) / len(ranks) for step in zip(*(rank[0] for rank in ranks), strict=True)] == pytest.approx(
        losses, rel=1e-9
    )
    # Newton-Schulz in bf16 takes a last digit of the momentum for more.
    tolerance = 1e-3 if name == "muon" else 1e-9
    assert [rank[1] for rank in ranks] == [pytest.approx(norm, rel=tolerance)] * len(ranks)
    assert_close(ranks[0][2], parameters, tolerance)


PLACES: Mapping[str, dict[str, Any]] = {
    "host": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
    "files": {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}},
    "host, early": {"offload_optimizer": {"device": "cpu", "update_during_backward": 1.0}},
}


def train_away(kind: str, folder: Path, files: Path, place: str) -> Any:
    zero = {"stage": 3, **PLACES[place]}
    if place == "files":
        zero = {
            key: {**value, "nvme_path": str(files)} if isinstance(value, dict) else value for key, value in zero.items()
        }
    config = configuration(batch=4, mesh={"expert": 2}, optimizer=adamw(1e-2), zero_optimization=zero)
    if place != "host, early":
        config["gradient_clipping"] = 0.1
    engine = zeromesh.initialize(model=make(kind, folder), config=config)[0]
    losses = [train_on_tokens(engine, tokens) for tokens in token_batches(STEPS)]
    return losses, engine.gathered_state_dict(), engine.memory_report()


@pytest.mark.full
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ["stacked", "listed"])
def test_states_of_experts_rest_on_the_host_and_in_files(kind, place, folder, tmp_path) -> None:
    ranks = run_ranks(train_away, 2, kind, folder, tmp_path, place, timeout=LIMIT)
    sections = {} if place != "host, early" else {"gradient_clipping": 0.0}
    near = run_ranks(train, 2, kind, folder, "adamw", 3, {"expert": 2}, **sections, timeout=LIMIT)
    for (losses, parameters, report), (expected, _, state) in zip(ranks, near, strict=True):
        assert losses == pytest.approx(expected, rel=1e-12)
        assert_close(parameters, state, 1e-12)
        assert report["optimizer"]["nvme" if place == "files" else "host"] > 0


PRECISIONS: Mapping[str, dict[str, Any]] = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 14, "loss_scale_window": 1}},
}


def train_narrow(folder: Path, precision: str, mesh: dict[str, int], overflow: bool) -> Any:
    config = configuration(batch=4, stage=3, mesh=mesh, optimizer=adamw(1e-3)) | PRECISIONS[precision]
    model = loaded(folder, torch.float32)
    engine = zeromesh.initialize(model=model, config=config)[0]
    losses, skipped = [], []
    for step, tokens in enumerate(token_batches(4)):
        mine = tokens.chunk(engine.data_size)[engine.data_rank]
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss * float("inf") if overflow and step == 1 and engine.data_rank == 1 else loss)
        engine.step()
        losses.append(float(loss.detach()))
        skipped.append(engine.skipped_steps)
    with zeromesh.zero.GatheredParameters(model.parameters()):
        kinds = {parameter.dtype for parameter in model.parameters()}
    master = zeromesh.zero.safe_get_full_fp32_param(model.get_parameter(EXPERTS))
    return losses, skipped, kinds, master


@pytest.mark.full
@pytest.mark.parametrize("precision", PRECISIONS)
def test_in_16_bits_experts_have_masters_and_one_scale(precision, folder) -> None:
    overflow = precision == "fp16"
    ranks = run_ranks(train_narrow, 2, folder, precision, {"expert": 2}, overflow, timeout=LIMIT)
    wide = run_ranks(train_narrow, 2, folder, precision, {}, overflow, timeout=LIMIT)
    for (losses, skipped, kinds, master), (expected, expected_skips, _, whole) in zip(ranks, wide, strict=True):
        assert losses == pytest.approx(expected, rel=2e-2)
        assert skipped == expected_skips
        assert kinds == {torch.bfloat16 if precision == "bf16" else torch.float16}
        assert master.dtype is torch.float32
        torch.testing.assert_close(master, whole, rtol=1e-2, atol=2e-3)
    if overflow:
        assert ranks[0][1][-1] >= 1
    assert torch.equal(ranks[0][3], ranks[1][3])


def read_and_change(kind: str, folder: Path, stage: int, deferred: bool) -> None:
    """Compare what users read of experts with plain torch, and change it."""
    if deferred:
        with zeromesh.zero.Init():
            model = make(kind, folder)
    else:
        model = make(kind, folder)
    plain = make(kind, folder)
    names = [EXPERTS] if kind == "stacked" else [f"blocks.0.experts.{number}.0.weight" for number in range(4)]
    config = configuration(batch=4, stage=stage, mesh={"expert": 2}, optimizer=adamw(1e-2))
    groups = zeromesh.no_decay_groups(model, 0.01)
    engine = zeromesh.initialize(model=model, model_parameters=groups, config=config)[0]
    tokens = token_batches(1)[0]
    optimizer = torch.optim.AdamW(zeromesh.no_decay_groups(plain, 0.01), lr=1e-2, foreach=False)
    plain(input_ids=tokens, labels=tokens).loss.backward()
    mine = tokens.chunk(2)[engine.data_rank]
    engine.backward(engine(input_ids=mine, labels=mine).loss)
    for name in names:
        parameter, expected = model.get_parameter(name), plain.get_parameter(name)
        gradient = zeromesh.zero.safe_get_full_grad(parameter)
        torch.testing.assert_close(gradient, expected.grad, rtol=1e-9, atol=1e-12)
        zeromesh.zero.safe_set_full_grad(parameter, 2 * gradient)
        expected.grad *= 2
        torch.testing.assert_close(zeromesh.zero.safe_get_full_fp32_param(parameter), expected.detach())
    optimizer.step()
    engine.step()
    for name in names:
        parameter, expected = model.get_parameter(name), plain.get_parameter(name)
        state = zeromesh.zero.safe_get_full_optimizer_state(parameter, "exp_avg")
        torch.testing.assert_close(state, optimizer.state[expected]["exp_avg"], rtol=1e-9, atol=1e-12)
        zeromesh.zero.safe_set_full_optimizer_state(parameter, torch.full_like(state, 0.5), "exp_avg")
        assert bool((zeromesh.zero.safe_get_full_optimizer_state(parameter, "exp_avg") == 0.5).all())
        value = torch.arange(expected.numel(), dtype=torch.float64).view(expected.shape)
        zeromesh.zero.safe_set_full_fp32_param(parameter, value)
        with zeromesh.zero.GatheredParameters(parameter):
            assert torch.equal(parameter, value)
        with zeromesh.zero.GatheredParameters(parameter, modifier_rank=1):
            if engine.data_rank == 1:
                parameter.data.neg_()
        assert torch.equal(zeromesh.zero.safe_get_full_fp32_param(parameter), -value)


@pytest.mark.full
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", ["stacked", "listed"])
def test_users_read_and_change_whole_experts(kind, stage, deferred, folder) -> None:
    run_ranks(read_and_change, 2, kind, folder, stage, deferred, timeout=LIMIT)


def refused(folder: Path, optimizer: str, stage: int) -> str:
    try:
        config = configuration(batch=4, stage=stage, mesh={"expert": 2}, optimizer=optimizer_of(optimizer, lr=1e-2))
        zeromesh.initialize(model=make("stacked", folder), config=config)
    except ValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.full
def test_an_optimizer_of_whole_parameters_is_refused_also_without_zero(folder) -> None:
    for text in run_ranks(refused, 2, folder, "Adafactor", 0, timeout=LIMIT):
        assert "it averages over rows and columns" in text
        assert "mesh.expert" in text
