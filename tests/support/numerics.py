"""The numerics matrix: one training run described by a ``Case``, on the engine and by two references in one process.

``plain`` is torch on the whole global batch. ``rounded`` computes what each rank would, share by share, and rounds
where the engine says it does; it is compared bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
from torch import nn

import zeromesh
from run import train_step
from zeromesh.base.kernels import halves
from zeromesh.base.kernels.update_pass import StepInput
from zeromesh.base.placement import Tier
from zeromesh.shard.optim.host import HostSteps
from zeromesh.shard.optim.lamb import Lamb
from zeromesh.shard.optim.lion import Lion

STEPS = 10
BATCH = 36
"""Samples per update: divisible by every number of ranks times every accumulation of the matrix."""
CLIP = 0.25
"""Below the gradient's norm in every step of every run."""

Shape = tuple[int | None, int | None]
POLICIES: dict[str, tuple[int, Shape]] = {
    "row 0": (0, (None, None)),
    "row 1": (1, (None, None)),
    "row 1, 3 gradient slots": (1, (None, 3)),
    "row 2": (2, (None, None)),
    "row 2, 5 gradient slots": (2, (None, 5)),
    "row 3": (3, (None, None)),
    "row 3, 4 parameter slots": (3, (4, None)),
    "row 3, 3 + 3 slots": (3, (3, 3)),
    "row 3, all slots": (3, (99, 99)),
    "row 1, host": (1, (None, None)),
    "row 2, host": (2, (None, None)),
    "row 3, host": (3, (None, None)),
    "row 3, half on host": (3, (None, None)),
    "row 3, parameters on host": (3, (None, None)),
    "row 3, all on host": (3, (None, None)),
    "row 1, nvme": (1, (None, None)),
    "row 2, nvme": (2, (None, None)),
    "row 3, nvme": (3, (None, None)),
    "row 3, nvme and host": (3, (None, None)),
    "row 1, host, early": (1, (None, None)),
    "row 3, all on host, early": (3, (None, None)),
    "row 3, nvme, early": (3, (None, None)),
    "row 3, all on host, split": (3, (None, None)),
    "row 3, all in files, split": (3, (None, None)),
    "row 3, parameters in files": (3, (None, None)),
    "row 3, host and files": (3, (3, None)),
    "row 3, all in files": (3, (None, None)),
}
"""By name: the row of the placement table, and the budgets of parameter and gradient slots (None: the row's own)."""

_EARLY = {"update_during_backward": 1.0}
_SPLIT = {"split_master": True}
_HOST = {"device": "cpu"}
_NVME = {"device": "nvme", "nvme_path": tempfile.gettempdir(), "buffer_count": 2}
OFFLOADED: dict[str, dict[str, Any]] = {
    **{f"row {row}, host": {"offload_optimizer": _HOST} for row in (1, 2, 3)},
    "row 3, half on host": {"offload_optimizer": {**_HOST, "ratio": 0.5}},
    "row 3, parameters on host": {"offload_param": _HOST},
    "row 3, all on host": {"offload_optimizer": _HOST, "offload_param": _HOST},
    **{f"row {row}, nvme": {"offload_optimizer": _NVME} for row in (1, 2, 3)},
    "row 3, nvme and host": {"offload_optimizer": {**_NVME, "ratio": 0.7}, "offload_param": _HOST},
    "row 1, host, early": {"offload_optimizer": {**_HOST, "update_during_backward": 0.6}},
    "row 3, all on host, early": {"offload_optimizer": {**_HOST, **_EARLY}, "offload_param": _HOST},
    "row 3, nvme, early": {"offload_optimizer": {**_NVME, **_EARLY}},
    "row 3, all on host, split": {"offload_optimizer": {**_HOST, **_SPLIT}, "offload_param": _HOST},
    "row 3, all in files, split": {
        "offload_optimizer": {**_NVME, **_SPLIT},
        "offload_param": {**_NVME, "buffer_count": 2},
    },
    "row 3, parameters in files": {"offload_param": _NVME},
    "row 3, host and files": {"offload_optimizer": _HOST, "offload_param": {**_NVME, "buffer_count": 1}},
    "row 3, all in files": {"offload_optimizer": _NVME, "offload_param": {**_NVME, "buffer_count": 3}},
}
"""By policy: which states rest off the device."""

MESHES: dict[str, dict[str, int]] = {
    "1": {"data": 1},
    "2": {"data": 2},
    "3": {"data": 3},
    "4": {"data": 4},
    "2x2": {"replicate": 2, "data": 2},
    "3x1": {"replicate": 3, "data": 1},
    "2+2": {"data": 4},
}
NODES = {"2+2": 2}
"""Ranks per node where there are several: what goes from node to node is summed inside them first."""

PRECISIONS: dict[str, dict[str, Any]] = {
    "float64": {},
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    # The scale starts where gradients overflow, and grows until they do again.
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 3}},
    "autocast bf16": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "autocast fp16": {
        "torch_autocast": {"enabled": True, "dtype": "float16"},
        "fp16": {"initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 3},
    },
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-2, "weight_decay": 0.1},
    "sgd": {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01},
    "lion": {"lr": 1e-3, "betas": [0.9, 0.99], "weight_decay": 0.1},
    "lamb": {"lr": 1e-2, "weight_decay": 0.1},
    "muon": {"lr": 1e-2, "weight_decay": 0.1},
    "adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.01},
}
NARROW = {
    "adamw": ("exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
    "adagrad": ("sum",),
}
"""States that can be bf16, by optimizer."""
GAMMA = 0.9
"""The learning rate's factor from update to update."""


@dataclass(frozen=True)
class Case:
    """One training run."""

    precision: str = "fp32"
    policy: str = "row 0"
    mesh: str = "1"
    accumulation: int = 1
    clip: bool = False
    checkpointing: bool = False
    offload: bool = False
    optimizer: str = "adamw"
    predivide: str = "none"
    accumulate: str = "default"
    wire: str = "default"
    states: str = "fp32"

    def __str__(self) -> str:
        parts = [self.policy, self.precision, f"{self.mesh} ranks", self.optimizer]
        parts += [f"accumulation {self.accumulation}"] if self.accumulation > 1 else []
        parts += ["clipping"] if self.clip else []
        parts += ["checkpointing"] if self.checkpointing else []
        parts += ["inputs on the host"] if self.offload else []
        parts += [f"predivide {self.predivide}"] if self.predivide != "none" else []
        parts += [f"summed in {self.accumulate}"] if self.accumulate != "default" else []
        parts += [f"sent in {self.wire}"] if self.wire != "default" else []
        parts += ["states in bf16"] if self.narrow else []
        return ", ".join(parts)

    @property
    def offloaded(self) -> dict[str, Any]:
        """Which states rest off the device; on the host where the optimizer is one that is not updated from files."""
        chosen = OFFLOADED.get(self.policy, {})
        if self.optimizer in ("lamb", "muon") and "offload_optimizer" in chosen:
            chosen = {**chosen, "offload_optimizer": {**chosen["offload_optimizer"], "device": "cpu"}}
        if self.precision != "bf16" and "split" in self.policy:
            rest = {key: value for key, value in chosen["offload_optimizer"].items() if key not in _SPLIT}
            chosen = {**chosen, "offload_optimizer": rest}
        return chosen

    def computed(self, master: torch.Tensor) -> torch.Tensor:
        """Return a parameter as it is computed with."""
        if self.precision == "bf16" and "split" in self.policy:
            return halves.split(master)[0]
        return master.to(self.compute)

    @property
    def narrow(self) -> tuple[str, ...]:
        """Names of the optimizer's states that are bf16."""
        keeps = self.states == "bf16" and self.precision != "float64"
        return NARROW.get(self.optimizer, ()) if keeps else ()

    @property
    def row(self) -> int:
        return int(self.policy[4])

    @property
    def shards(self) -> int:
        return MESHES[self.mesh]["data"]

    @property
    def near(self) -> int:
        """Ranks of a shard group that share a node."""
        return NODES.get(self.mesh, self.shards)

    @property
    def replicas(self) -> int:
        return MESHES[self.mesh].get("replicate", 1)

    @property
    def ranks(self) -> int:
        return self.shards * self.replicas

    @property
    def micro(self) -> int:
        """Samples of one rank's micro-batch."""
        return BATCH // (self.ranks * self.accumulation)

    @property
    def compute(self) -> torch.dtype:
        return DTYPES.get(self.precision, torch.float64 if self.precision == "float64" else torch.float32)

    @property
    def master(self) -> torch.dtype:
        return torch.float32 if self.compute.itemsize == 2 else self.compute

    @property
    def home(self) -> torch.dtype:
        """Dtype in which gradients are summed."""
        return DTYPES.get(self.accumulate, self.master)

    @property
    def sent(self) -> torch.dtype:
        """Dtype of gradients on the wire."""
        return DTYPES.get(self.wire, self.compute)

    @property
    def divisor(self) -> float:
        return {"none": 1.0, "factor 3": 3.0, "ranks": float(self.ranks)}[self.predivide]

    @property
    def config(self) -> dict[str, Any]:
        parameter, gradient = POLICIES[self.policy][1]
        return {
            "train_batch_size": BATCH,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": CLIP if self.clip else 0.0,
            "zero_optimization": {"stage": self.row, **self.offloaded},
            "mesh": MESHES[self.mesh],
            "communication": {"ranks_per_node": NODES.get(self.mesh)},
            "slots": {"parameter": parameter, "gradient": gradient},
            "activation_checkpointing": {"enabled": self.checkpointing, "cpu_checkpointing": self.offload},
            "optimizer": {"type": self.optimizer, "params": dict(OPTIMIZERS[self.optimizer])},
            "scheduler": {"type": "ExponentialLR", "params": {"gamma": GAMMA}},
            "communication_data_type": None if self.wire == "default" else self.wire,
            "optimizer_state_dtype": dict.fromkeys(self.narrow, "bf16") or None,
            "data_types": {"grad_accum_dtype": None if self.accumulate == "default" else self.accumulate},
            **({"prescale_gradients": True} if self.predivide == "ranks" else {}),
            **({"gradient_predivide_factor": 3.0} if self.predivide == "factor 3" else {}),
            **PRECISIONS[self.precision],
        }


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks of several sizes, none of which divides well; a frozen parameter; one of no dims; a block that idles.

    And one, ``wide``, that divides well in every dtype and mesh: its gradient stays where autograd leaves it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 10)
        self.mix = nn.Linear(3, 10, bias=False)
        self.wide = nn.Linear(3, 128, bias=False)
        self.blocks = nn.ModuleList(Block(10, inner) for inner in (14, 23, 9, 14))
        self.detour = Block(10, 6)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 10), requires_grad=False)
        self.temperature = nn.Parameter(torch.tensor(1.25))
        self.head = nn.Linear(10, 13)

    def forward(
        self, features: torch.Tensor, tokens: torch.Tensor, targets: torch.Tensor, detour: bool
    ) -> torch.Tensor:
        x = self.embed(tokens) + self.mix(features)
        x = x + torch.tanh(self.wide(features))[..., :120].unflatten(-1, (12, 10)).mean(-2)
        for block in self.blocks:
            x = block(x)
        x = self.detour(x) if detour else x
        logits = self.head(x * self.scale) * self.temperature
        logits = logits if logits.dtype == torch.float64 else logits.float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_net(dtype: torch.dtype) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return Net().double().to(dtype)


def has_detour(step: int) -> bool:
    return step % 4 in (1, 2)


def batch(step: int, dtype: torch.dtype, rows: slice = slice(None)) -> tuple[Any, ...]:
    """Rows of the global batch of an update; floating-point inputs in ``dtype``."""
    generator = torch.Generator().manual_seed(100 + step)
    features = torch.randn(BATCH, 4, 3, generator=generator).to(dtype)
    tokens = torch.randint(0, 13, (BATCH, 4), generator=generator)
    targets = (tokens * 5 + 3 + (torch.rand(BATCH, 4, generator=generator) < 0.2)) % 13
    return features[rows], tokens[rows], targets[rows], has_detour(step)


def share(case: Case, micro_batch: int, rank: int) -> slice:
    """Which rows of the global batch a rank feeds in a micro-batch."""
    start = (micro_batch * case.ranks + rank) * case.micro
    return slice(start, start + case.micro)


@dataclass
class Run:
    """What came of a run. In the engine's, ``losses`` are this rank's, one per micro-batch."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    pieces: list[tuple[str, int, int]] = field(default_factory=list)
    on_host: list[str] = field(default_factory=list)
    masters: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)
    states: dict[tuple[str, int, int, str], torch.Tensor] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)
    state: dict[str, torch.Tensor] = field(default_factory=dict)


def train_cases(cases: Sequence[Case], further: Mapping[str, Any] | None = None) -> list[Run]:
    """On every rank: one run after the other, with ``further`` keys in every configuration."""
    return [_train(case, further or {}) for case in cases]


def _train(case: Case, further: Mapping[str, Any]) -> Run:
    print(case, flush=True)
    model = build_net(torch.float64 if case.precision == "float64" else torch.float32)
    engine, optimizer, _, _ = zeromesh.initialize(model=model, config={**case.config, **further})
    if engine.activations is not None:
        engine.activations.least = 0
    run = Run()
    for step in range(STEPS):
        for micro_batch in range(case.accumulation):
            rows = share(case, micro_batch, engine.data_rank)
            run.losses.append(train_step(engine, engine(*batch(step, case.master, rows))))
        run.norms.append(engine.get_global_grad_norm())
        run.scales.append(engine.loss_scale)
        run.rates.append(engine.get_lr()[0])
    flats = engine.sharded.flats
    hosted = [f for f in flats if f.gradient and f.optimizer_tier is not Tier.DEVICE]
    run.on_host = [s.name for f in hosted for s in f.layout.segments]
    for flat in flats:
        flat.load_states()
        for _, _, piece in flat.pieces:
            key = (piece.name, piece.start, piece.stop)
            run.pieces.append(key)
            run.masters[key] = piece.parameter.detach().flatten().clone()
            state = optimizer.state.get(piece.parameter, {})
            run.states |= {(*key, name): state[name].flatten().clone() for name in case.narrow if name in state}
            run.counts[piece.name] = float(state.get("step", 0))
    run.state = engine.gathered_state_dict()
    moved = engine.memory_report()["activation"].get("host", 0)
    assert bool(moved) == (case.checkpointing and case.offload), case
    engine.destroy()
    return run


def assemble(runs: Sequence[Run], trained: nn.Module) -> dict[str, torch.Tensor]:
    """Whole masters from all ranks' pieces. Every element is there; ranks that hold the same have the same."""
    whole = {}
    for name, parameter in trained.named_parameters():
        if not parameter.requires_grad:
            continue
        dtype = next(iter(runs[0].masters.values())).dtype
        flat, known = torch.zeros(parameter.numel(), dtype=dtype), torch.zeros(parameter.numel(), dtype=torch.bool)
        for run in runs:
            for (owner, start, stop), values in run.masters.items():
                if owner == name:
                    again = known[start:stop]
                    assert torch.equal(flat[start:stop][again], values[again]), f"ranks differ in {name}"
                    flat[start:stop], known[start:stop] = values, True
        assert bool(known.all()), f"no rank updates all of {name}"
        whole[name] = flat.view(parameter.shape)
    return whole


class Alone:
    """What Lamb asks of the other ranks, where there are none."""

    def __init__(self, names: Sequence[str]) -> None:
        self.buckets = [list(names)]

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        return vector

    def gather(self, bucket: int, pieces: Any, parts: Any = ()) -> dict[str, torch.Tensor]:
        raise AssertionError("only Muon gathers, and the reference is torch's")


def make_optimizers(name: str, parameters: dict[str, nn.Parameter], cut: Sequence[tuple[str, int, int]] = ()) -> Any:
    """Return the optimizers of a reference over whole parameters.

    With ``cut``, those that work element by element get the pieces of it, each a parameter of its own, since torch's
    fused kernels round the elements at the end of a tensor, which do not fill a vector register, differently.
    """
    options = dict(OPTIMIZERS[name])
    views = {
        (owner, start, stop): nn.Parameter(parameters[owner].data.view(-1)[start:stop])
        for owner, start, stop in cut or [(n, 0, p.numel()) for n, p in parameters.items()]
    }
    matrices = {n for n, p in parameters.items() if p.ndim == 2 and not n.startswith(("embed", "head"))}
    rest = [view for (owner, _, _), view in views.items() if owner not in matrices]
    fused = {"fused": True} if cut else {}
    match name:
        case "adamw":
            return views, [torch.optim.AdamW(views.values(), **options, **fused)]
        case "sgd":
            return views, [torch.optim.SGD(views.values(), **options)]
        case "adagrad":
            return views, [torch.optim.Adagrad(views.values(), **options, **fused)]
        case "lion":
            return views, [Lion(views.values(), **options)]
    whole = {
        (n, 0, p.numel()): nn.Parameter(p.data.view(p.shape if name == "muon" else -1)) for n, p in parameters.items()
    }
    if name == "lamb":
        from zeromesh.base.piece import Piece
        from zeromesh.base.split import Held

        pieces = [Piece(n, Held(tuple(parameters[n].shape)), a, b, p) for (n, a, b), p in whole.items()]
        return whole, [Lamb([{"params": list(whole.values())}], pieces, Alone(list(parameters)), **options)]
    chosen = {key: view for key, view in whole.items() if key[0] in matrices}
    others = {key: view for key, view in views.items() if key[0] not in matrices}
    return chosen | others, [torch.optim.Muon(chosen.values(), **options), torch.optim.AdamW(rest, **options, **fused)]


def apply(
    views: dict[Any, nn.Parameter],
    optimizers: Any,
    gradients: dict[str, torch.Tensor | None],
    native: Any = (),
    narrow: Sequence[str] = (),
) -> None:
    """One step; of the parameters named in ``native`` by the native kernel, where it can, with ``narrow`` states."""
    for (name, start, stop), view in views.items():
        gradient = gradients[name]
        view.grad = None if gradient is None else gradient.flatten()[start:stop].view(view.shape).clone()
    for optimizer in optimizers:
        steps, ours = HostSteps(optimizer, 1.0, narrow), []
        for (name, _, _), view in views.items():
            if name in native and view.grad is not None and steps.takes(view, view.grad):
                ours.append(StepInput(view, view.grad.view(-1)))
                view.grad = None
        steps.step(ours)
        optimizer.step()


def counts(views: dict[Any, nn.Parameter], optimizers: Any) -> dict[str, float]:
    """Return the updates of each parameter, as its optimizer counts them."""
    states = {view: state for optimizer in optimizers for view, state in optimizer.state.items()}
    return {name: float(states.get(view, {}).get("step", 0)) for (name, _, _), view in views.items()}


@functools.cache
def plain(precision: str, clip: bool, optimizer: str) -> tuple[Run, dict[str, torch.Tensor]]:
    """Torch on the whole global batch in one process; the run, and the parameters at the end."""
    dtype = torch.float64 if precision == "float64" else torch.float32
    model = build_net(dtype)
    computed = {name: p for name, p in model.named_parameters() if p.requires_grad}
    trained = {name: nn.Parameter(p.detach().clone()) for name, p in computed.items()}
    views, optimizers = make_optimizers(optimizer, trained)
    run = Run()
    for step in range(STEPS):
        model.zero_grad()
        loss = model(*batch(step, dtype))
        loss.backward()
        limit = CLIP if clip else float("inf")
        run.norms.append(nn.utils.clip_grad_norm_(computed.values(), limit).item())
        apply(views, optimizers, {name: p.grad for name, p in computed.items()})
        with torch.no_grad():
            for name, p in computed.items():
                p.copy_(trained[name])
        for one in optimizers:
            for group in one.param_groups:
                group["lr"] *= GAMMA
        run.losses.append(loss.item())
        run.rates.append(optimizers[0].param_groups[0]["lr"])
    run.counts = counts(views, optimizers)
    return run, {name: p.detach() for name, p in trained.items()}


def rounded(case: Case, runs: Sequence[Run]) -> tuple[Run, dict[str, torch.Tensor]]:
    """One process that computes every rank's share in turn; the run and the masters.

    Of the engine's ``runs``, by rank, it takes two things. The pieces of parameters that each rank updates say how the
    reference's optimizer is cut. The norms that were reported are compared with the gradient's own, and then used for
    clipping, because their last bits depend on the order of a sum over shards.
    """
    cut = sorted({piece for run in runs for piece in run.pieces})
    policy = "row 0" if case.row == 0 else "row 1" if case.row == 1 and case.accumulation > 1 else "row 3"
    policy += ", split" * ("split" in case.policy)
    native = () if case.optimizer in ("lamb", "muon") else tuple(runs[0].on_host)
    native = tuple(name for name, _ in build_net(torch.float32).named_parameters()) if case.narrow else native
    return _rounded(replace(case, policy=policy, checkpointing=False), tuple(runs[0].norms), tuple(cut), native)


@functools.lru_cache(maxsize=8)
def _rounded(
    case: Case, norms: tuple[float, ...], cut: tuple[tuple[str, int, int], ...], native: tuple[str, ...]
) -> tuple[Run, Any]:  # fmt: skip
    model = build_net(torch.float32 if case.precision != "float64" else torch.float64)
    masters = {name: p.detach().to(case.master, copy=True) for name, p in model.named_parameters() if p.requires_grad}
    model.to(case.compute)
    views, optimizers = make_optimizers(case.optimizer, {name: nn.Parameter(m) for name, m in masters.items()}, cut)
    scaler = Scale() if "fp16" in case.precision else None
    run = Run()
    for step in range(STEPS):
        scale = scaler.value if scaler else 1.0
        found = {(rank, m): _gradients(case, model, step, m, rank, scale, run)
                 for m in range(case.accumulation) for rank in range(case.ranks)}  # fmt: skip
        sums = {name: _summed(case, {key: value[name] for key, value in found.items()}) for name in masters}
        factor = case.divisor / (case.ranks * scale)
        here = [total.double().square().sum() for total in sums.values() if total is not None]
        norm = float(torch.stack(here).sum().sqrt()) * factor
        run.norms.append(norm)
        if scaler:
            scaler.update(isfinite(norm))
        if isfinite(norm):
            assert abs(norms[step] - norm) <= 1e-6 * norm, f"update {step}: norm {norms[step]}, but {norm} expected"
            clip = min(1.0, CLIP / (norms[step] + 1e-6)) if case.clip else 1.0
            means = {name: None if t is None else t.to(case.master).mul_(factor * clip) for name, t in sums.items()}
            apply(views, optimizers, means, native, case.narrow)
            for one in optimizers:
                for group in one.param_groups:
                    group["lr"] *= GAMMA
            with torch.no_grad():
                for name, master in masters.items():
                    model.get_parameter(name).copy_(case.computed(master))
        run.scales.append(scaler.value if scaler else 1.0)
        run.rates.append(optimizers[0].param_groups[0]["lr"])
    run.counts = counts(views, optimizers)
    states = {(*key, name): optimizers[0].state[view].get(name) for key, view in views.items() for name in case.narrow}
    run.states = {key: value.flatten() for key, value in states.items() if value is not None}
    skipped = sum(not isfinite(norm) for norm in run.norms)
    assert 0 < skipped <= STEPS // 2 if scaler else skipped == 0, f"{case}: {skipped} updates are skipped"
    clipped = sum(norm > CLIP for norm in run.norms)
    assert not case.clip or clipped > STEPS // 2, f"{case}: {clipped} of {STEPS} gradients are clipped"
    return run, masters


class Scale:
    """The dynamic loss scale of ``PRECISIONS``: half after each overflow, double after three good updates."""

    def __init__(self) -> None:
        self.value = 2.0**18
        self._good = 0

    def update(self, finite: bool) -> None:
        if not finite:
            self.value, self._good = self.value / 2, 0
            return
        if self._good and self._good % 3 == 0:
            self.value *= 2
        self._good += 1


def _gradients(
    case: Case, model: nn.Module, step: int, micro_batch: int, rank: int, scale: float, run: Run
) -> dict[str, torch.Tensor | None]:
    """Return a rank's gradients of its share of a micro-batch, in the parameters' dtype, on its own."""
    model.zero_grad()
    inputs = batch(step, case.compute, share(case, micro_batch, rank))
    kind = {"autocast bf16": torch.bfloat16, "autocast fp16": torch.float16}.get(case.precision)
    with torch.autocast("cpu", dtype=kind, cache_enabled=False) if kind else contextlib.nullcontext():
        loss = model(*inputs)
    run.losses.append(loss.item())
    loss = loss / case.accumulation if case.accumulation > 1 else loss
    (loss * scale if scale != 1.0 else loss).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _summed(case: Case, gradients: dict[tuple[int, int], torch.Tensor | None]) -> torch.Tensor | None:
    """Return the sum of one parameter's gradients, which are given by rank and micro-batch; in the home dtype."""
    if all(gradient is None for gradient in gradients.values()):
        return None
    like = next(g for g in gradients.values() if g is not None)
    parts = {key: torch.zeros_like(like) if g is None else g for key, g in gradients.items()}
    groups = [
        _summed_in_group(case, [[parts[rank, m] for m in range(case.accumulation)] for rank in ranks])
        for ranks in (range(first, first + case.shards) for first in range(0, case.ranks, case.shards))
    ]
    if len(groups) == 1:
        return groups[0]
    # Replicas sum in the dtype on the wire, 16 bits in fp32, and send the sum, which is rounded again.
    wide = torch.promote_types(case.sent, torch.float32)
    return _add([group.to(case.sent) for group in groups], wide).to(case.sent).to(case.home)


def _summed_in_group(case: Case, parts: list[list[torch.Tensor]]) -> torch.Tensor:
    """Return the sum over one shard group; ``parts`` by rank and micro-batch."""
    if case.row >= 2 or (case.row == 1 and case.accumulation == 1):
        # Rounded for the wire at once, and summed over the ranks after every micro-batch.
        wires = [[_divided(case, part, case.sent) for part in own] for own in parts]
        by_micro_batch = [_by_node(case, [own[m] for own in wires]) for m in range(case.accumulation)]
        return _add([of[0] if len(of) == 1 else _add(of, case.home) for of in by_micro_batch], case.home)
    # Every rank sums its own micro-batches, and only that is sent.
    totals = [_divided(case, own[0], case.home) for own in parts]
    for total, own in zip(totals, parts, strict=True):
        for part in own[1:]:
            total.add_(part, alpha=1 / case.divisor)
    if case.shards == 1:
        return totals[0]
    total = _add(_by_node(case, [own.to(case.sent) for own in totals]), case.home)
    # Where every rank needs the whole sum, it is sent a second time.
    return total.to(case.sent).to(case.home) if case.row == 0 else total


def _by_node(case: Case, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what is added up to the sum over the ranks: their parts, or the sum of each node, rounded for the wire."""
    if case.near == case.shards:
        return parts
    wide = torch.promote_types(case.sent, torch.float32)
    nodes = range(0, case.shards, case.near)
    return [_add(parts[first : first + case.near], wide).to(case.sent) for first in nodes]


def _divided(case: Case, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Divide in the wider of the two dtypes. A division by the number of ranks that is not asked for is exact."""
    wide = torch.promote_types(part.dtype, dtype)
    return part.to(wide).mul(1 / case.divisor).to(dtype)


def _add(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """First to last, in ``dtype``."""
    total = parts[0].to(dtype, copy=True)
    for part in parts[1:]:
        total.add_(part)
    return total
