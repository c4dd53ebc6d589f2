"""The native update computes what torch's optimizers do, whatever the types, sizes, threads and instructions."""

import logging
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from zeromesh.base.kernels import halves, native
from zeromesh.base.kernels import update_pass as update
from zeromesh.base.kernels.native import Library, library
from zeromesh.base.kernels.update_pass import UpdatePiece, UpdateStep
from zeromesh.base.kernels.update_rules import RULES, rule_of
from zeromesh.shard.optim.lion import Lion

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], str, dict[str, Any]]] = {
    "adam": (torch.optim.Adam, "adam", {"lr": 1e-2, "weight_decay": 0.1}),
    "adam, maximized": (torch.optim.Adam, "adam", {"lr": 1e-2, "maximize": True, "betas": (0.4, 0.7)}),
    "adam, decoupled": (torch.optim.Adam, "adamw", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adam, tensors": (torch.optim.Adam, "adam", {"lr": torch.tensor(0.01)}),
    "adamw": (torch.optim.AdamW, "adamw", {"lr": 1e-2, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, "sgd", {"lr": 0.1, "weight_decay": 0.1}),
    "momentum": (torch.optim.SGD, "sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "nesterov": (torch.optim.SGD, "sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "lion": (Lion, "lion", {"lr": 1e-2, "weight_decay": 0.1}),
    "lion, light": (Lion, "lion", {"lr": 1e-2, "betas": (0.3, 0.2)}),
    "adagrad": (torch.optim.Adagrad, "adagrad", {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}),
    "adagrad, maximized": (torch.optim.Adagrad, "adagrad", {"lr": 0.1, "maximize": True}),
}
TYPES = list(native.TYPES)
PAIRS = [(given, wanted) for given in TYPES for wanted in (None, *TYPES)]
"""Types of gradients, and of weights that are computed with."""
USUAL = [*zip(TYPES, TYPES, strict=True), (torch.bfloat16, None), (torch.float32, torch.bfloat16)]
EPSILON = torch.finfo(torch.float32).eps
FACTOR = 0.37


@pytest.fixture(autouse=True)
def built() -> Library:
    found = library()
    if found is None:
        if shutil.which("cc") is None:
            pytest.skip("no C compiler, no native kernels")
        pytest.fail("the native kernels are not built; install the project again")
    return found


@pytest.fixture
def missing(built: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    library.cache_clear()
    yield
    library.cache_clear()


class Reference:
    def __init__(self, name: str, values: torch.Tensor) -> None:
        kind, self.rule, options = OPTIMIZERS[name]
        plain = {} if kind is Lion else {"foreach": False}
        self.parameter = torch.nn.Parameter(values.clone())
        self.optimizer = kind([self.parameter], **options, **plain)  # type: ignore[call-arg]
        self.group = self.optimizer.param_groups[0]
        self.names = RULES[self.rule].states(self.group)

    def step(self, gradient: torch.Tensor) -> None:
        self.parameter.grad = gradient.float() * FACTOR
        self.optimizer.step()

    def states(self) -> tuple[torch.Tensor, ...]:
        return tuple(self.optimizer.state[self.parameter][name] for name in self.names)


def unaligned(elements: int, dtype: torch.dtype, offset: int) -> torch.Tensor:
    return torch.randn(elements + offset).to(dtype)[offset:]


def assert_close(found: torch.Tensor, expected: torch.Tensor, *seen: torch.Tensor, ulps: float = 4) -> None:
    """Within some units in the last place of the largest number that went into the result."""
    scale = torch.stack([expected.detach().abs(), *(tensor.abs() for tensor in seen)]).amax(0)
    finite = scale.isfinite() & expected.isfinite()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found[~finite].nan_to_num(), expected[~finite].nan_to_num())
    difference = (found - expected)[finite].abs()
    assert (difference <= ulps * EPSILON * scale[finite] + 1e-42).all(), difference.max()


def same_bits(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Also of NaNs, as far as they are there."""
    return all(torch.equal(a.nan_to_num(nan=123.0), b.nan_to_num(nan=123.0)) for a, b in zip(one, other, strict=True))


def compare(name: str, elements: int, given: torch.dtype, wanted: torch.dtype | None, offset: int, steps: int) -> None:
    torch.manual_seed(elements + offset)
    master = unaligned(elements, torch.float32, offset)
    reference = Reference(name, master)
    assert rule_of(type(reference.optimizer), reference.group) == reference.rule
    states: tuple[torch.Tensor, ...] = tuple(torch.zeros(elements + offset)[offset:] for _ in reference.names)
    output = None if wanted is None else unaligned(elements, wanted, offset)
    for number in range(1, steps + 1):
        gradient = unaligned(elements, given, offset)
        old = [master.clone(), *(state.clone() for state in states)]
        update.update(
            [UpdatePiece(UpdateStep(reference.rule, reference.group, number), gradient, master, states, output)], FACTOR
        )
        reference.step(gradient)
        assert_close(master, reference.parameter.detach(), old[0])
        for state, expected, before in zip(states, reference.states(), old[1:], strict=True):
            assert_close(state, expected, before, gradient.float(), gradient.float().square())
        if output is not None:
            assert torch.equal(output, master.to(output.dtype))
        with torch.no_grad():  # the next step from the same state, so that only its own roundings are compared
            reference.parameter.copy_(master)
            for state, expected in zip(states, reference.states(), strict=True):
                expected.copy_(state)


@pytest.mark.parametrize("pairs", [USUAL, pytest.param(PAIRS, marks=pytest.mark.full)], ids=["usual", "all"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_torchs(name: str, pairs: Sequence[tuple[torch.dtype, torch.dtype | None]]) -> None:
    for given, wanted in pairs:
        compare(name, 1003, given, wanted, 0, 3)


@pytest.mark.parametrize("elements", [0, 1, 3, 7, 8, 15, 16, 17, 31, 65536, 65537])
def test_sizes_and_offsets(elements: int) -> None:
    for name in ("adamw", "nesterov"):
        for offset in (0, 1, 3):
            compare(name, elements, torch.bfloat16, torch.bfloat16, offset, 2)
            compare(name, elements, torch.float32, torch.float16, offset, 2)


@pytest.mark.parametrize("name", ["adamw", "nesterov", "adagrad"])
def test_many_steps_stay_with_torchs(name: str) -> None:
    torch.manual_seed(0)
    master = torch.randn(257)
    reference = Reference(name, master)
    states = tuple(torch.zeros(257) for _ in reference.names)
    for number in range(1, 301):
        gradient = torch.randn(257).bfloat16()
        update.update(
            [UpdatePiece(UpdateStep(reference.rule, reference.group, number), gradient, master, states)], FACTOR
        )
        reference.step(gradient)
    torch.testing.assert_close(master, reference.parameter.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_that_are_no_numbers(name: str) -> None:
    master = torch.randn(40)
    reference = Reference(name, master)
    states = tuple(torch.zeros(40) for _ in reference.names)
    gradient = torch.randn(40)
    gradient[[1, 17, 38]], gradient[[2, 18, 39]], gradient[3] = torch.nan, torch.inf, -torch.inf
    for number in (1, 2):
        update.update(
            [UpdatePiece(UpdateStep(reference.rule, reference.group, number), gradient, master, states)], FACTOR
        )
        reference.step(gradient)
    assert_close(master, reference.parameter.detach(), torch.ones(40), ulps=16)


def every_float(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of 16 bits; of fp32 all upper halves with lower ones between and at ties, and around those."""
    bits = torch.arange(-(2**15), 2**15)
    if dtype != torch.float32:
        return bits.to(torch.int16).view(dtype)
    low = torch.tensor([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    return (bits[:, None] * 65536 + low).flatten().to(torch.int32).view(torch.float32)


def test_conversions_are_torchs(built: Library) -> None:
    for instructions in built.sets:
        for given in TYPES:
            source = every_float(given)
            found = torch.full((source.numel(),), -0.0)
            update.update([UpdatePiece(STILL, source, found, ())], -1.0, instructions=instructions)
            assert same_bits([found], [source.float()]), (instructions, given)
        master = every_float(torch.float32)
        for wanted in TYPES:
            output = torch.empty(master.numel(), dtype=wanted)
            update.update([UpdatePiece(STILL, torch.zeros_like(master), master.clone(), (), output)], 1.0)
            assert same_bits([output], [master.to(wanted)]), (instructions, wanted)


STILL = UpdateStep("sgd", {"lr": 1.0, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False}, 1)


def pieces_of(name: str, sizes: Sequence[int]) -> tuple[list[UpdatePiece], list[torch.Tensor]]:
    torch.manual_seed(1)
    reference = Reference(name, torch.zeros(1))
    total = sum(sizes)
    gradient, output, master = torch.randn(total).bfloat16(), torch.empty(total).bfloat16(), torch.randn(total)
    gradient[:: total // 7], gradient[1 :: total // 5] = torch.inf, torch.nan
    states = tuple(torch.rand(total) for _ in reference.names)
    steps = [UpdateStep(reference.rule, reference.group, number) for number in (3, 50)]
    split = zip(*(tensor.split(list(sizes)) for tensor in (gradient, master, output, *states)), strict=True)
    pieces = [UpdatePiece(steps[n % 2], g, p, tuple(s), o) for n, (g, p, o, *s) in enumerate(split)]
    return pieces, [master, output, *states]


SIZES = [70_001, 0, 5, 131_072, 16, 1, 30_000]


@pytest.mark.parametrize("name", ["adam", "adamw", "nesterov", "lion", "adagrad"])
def test_the_bits_depend_on_nothing_else(name: str, built: Library) -> None:
    pieces, expected = pieces_of(name, SIZES)
    update.update(pieces, FACTOR, threads=1)
    for instructions in built.sets:
        for threads in (1, 2, 3):
            pieces, found = pieces_of(name, SIZES)
            update.update(pieces, FACTOR, threads, instructions)
            assert same_bits(found, expected), (instructions, threads)
    whole, found = pieces_of(name, [sum(SIZES)])
    alike, other = pieces_of(name, SIZES)
    for piece in alike:
        piece.step = whole[0].step
    update.update(whole, FACTOR)
    update.update(alike, FACTOR)
    assert same_bits(found, other), "cut into pieces"


@pytest.mark.parametrize("streamed", [0, 1 << 40])
@pytest.mark.parametrize("name", ["adamw", "nesterov", "sgd"])
def test_out_of_place_is_in_place(name: str, streamed: int, built: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "STREAMED", streamed)
    for instructions in built.sets:
        for offset in (0, 1):
            pieces, expected = pieces_of(name, SIZES)
            update.update(pieces, FACTOR, 2, instructions)
            pieces, found = pieces_of(name, SIZES)
            before = [found[0].clone(), *(state.clone() for state in found[2:])]
            written = [torch.empty(sum(SIZES) + offset)[offset:] for _ in before]
            news = zip(*(tensor.split(SIZES) for tensor in written), strict=True)
            for piece, (master, *states) in zip(pieces, news, strict=True):
                piece.new_master, piece.new_states = master, tuple(states)
            update.update(pieces, FACTOR, 2, instructions)
            assert same_bits([written[0], found[1], *written[1:]], expected)
            assert same_bits([found[0], *found[2:]], before), "what was read is as it was"


def test_the_output_may_take_the_gradients_place() -> None:
    pieces, expected = pieces_of("adamw", [1003])
    update.update(pieces, FACTOR)
    pieces, found = pieces_of("adamw", [1003])
    pieces[0].output = pieces[0].gradient
    update.update(pieces, FACTOR)
    assert same_bits([found[0], pieces[0].gradient], expected[:2])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def assert_halves_of(master: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor) -> None:
    """They make up the master to the bit; the upper one is nearest, and to even but for ties. NaNs stay so."""
    nan = master.isnan()
    assert torch.equal(bits(halves.join(upper, lower))[~nan], bits(master)[~nan])
    assert torch.equal(upper.isnan(), nan)
    assert torch.equal(upper.signbit(), master.signbit())
    even = master.bfloat16()
    other = (bits(upper) != bits(even)) & ~nan
    assert (lower[other] == -(2**15)).all()
    assert (bits(upper)[other] - bits(even)[other] == 1).all(), "the neighbour away from zero"


def test_halves_make_up_every_master(built: Library) -> None:
    around = torch.tensor([0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF])
    signed = torch.cat([around, around - 2**15])[:, None] * 65536 + torch.arange(65536)
    master = torch.cat([every_float(torch.float32), signed.flatten().to(torch.int32).view(torch.float32)])
    upper, lower = halves.split(master)
    assert_halves_of(master, upper, lower)
    assert (bits(upper) != bits(master.bfloat16()))[~master.isnan()].any(), "ties were among them"
    for instructions in built.sets:
        new = torch.zeros_like(upper), torch.zeros_like(lower)
        still = UpdatePiece(STILL, torch.zeros_like(master), upper, (), None, new[0], (), lower, new[1])
        update.update([still], -1.0, instructions=instructions)
        minus = master == 0  # -0 + 0 may be 0
        assert_halves_of(torch.where(minus, halves.join(*new), master), *new)
        assert (halves.join(*new)[minus] == 0).all()


def test_a_nan_stays_one_in_halves(built: Library) -> None:
    """Whatever is in its lower bits, which would carry into the sign or leave infinity."""
    nans = torch.tensor([0x7F800001, 0x7FC07FFF, 0x7FFF8000, 0x7FFFFFFF, -1, -0x7FFFFF]).to(torch.int32)
    gradient = nans.view(torch.float32).repeat(8)
    for instructions in built.sets:
        upper, lower = halves.split(torch.ones(48))
        update.update([UpdatePiece(STILL, gradient, upper, (), remainder=lower)], instructions=instructions)
        assert upper.isnan().all()
        assert halves.join(upper, lower).isnan().all()


def halved(pieces: list[UpdatePiece]) -> list[UpdatePiece]:
    for piece in pieces:
        piece.master, piece.remainder = halves.split(piece.master)
    return pieces


def joined(pieces: list[UpdatePiece]) -> torch.Tensor:
    found = []
    for piece in pieces:
        upper = piece.master if piece.new_master is None else piece.new_master
        lower = piece.remainder if piece.new_remainder is None else piece.new_remainder
        assert lower is not None
        found.append(halves.join(upper, lower))
        assert_halves_of(found[-1], upper, lower)
    return torch.cat(found)


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "nesterov", "lion", "adagrad"])
def test_halves_are_updated_as_a_whole_master(name: str, built: Library) -> None:
    pieces, expected = pieces_of(name, SIZES)
    update.update(pieces, FACTOR, threads=1)
    for instructions in built.sets:
        for threads in (1, 2, 3):
            pieces, found = pieces_of(name, SIZES)
            update.update(halved(pieces), FACTOR, threads, instructions)
            assert same_bits([joined(pieces), *found[1:]], expected), (instructions, threads)


@pytest.mark.parametrize("streamed", [0, 1 << 40])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_halves_out_of_place(name: str, streamed: int, built: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "STREAMED", streamed)
    pieces, expected = pieces_of(name, SIZES)
    update.update(pieces, FACTOR)
    for instructions in built.sets:
        pieces, found = pieces_of(name, SIZES)
        written = [torch.empty(sum(SIZES) + 1)[1:] for _ in found[2:]]
        news = [states.split(SIZES) for states in written]
        before = [tensor.clone() for tensor in found]
        for number, piece in enumerate(halved(pieces)):
            assert piece.remainder is not None
            piece.new_master, piece.new_remainder = torch.empty_like(piece.master), torch.empty_like(piece.remainder)
            piece.new_states = tuple(states[number] for states in news)
        update.update(pieces, FACTOR, 2, instructions)
        assert same_bits([joined(pieces), found[1], *written], expected)
        old = [halves.join(piece.master, piece.remainder) for piece in pieces if piece.remainder is not None]
        assert same_bits([torch.cat(old), *found[2:]], [before[0], *before[2:]]), "what was read is as it was"


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "nesterov", "lion", "adagrad"])
def test_halves_without_the_library(name: str, missing: None) -> None:
    pieces, expected = pieces_of(name, [1003, 0, 5])
    update.update(pieces, FACTOR)
    for out_of_place in (False, True):
        pieces, found = pieces_of(name, [1003, 0, 5])
        for piece in halved(pieces):
            if out_of_place:
                assert piece.remainder is not None
                piece.new_master = torch.empty_like(piece.master)
                piece.new_remainder = torch.empty_like(piece.remainder)
        update.update(pieces, FACTOR)
        assert same_bits([joined(pieces), *found[1:]], expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_the_library_torch_does_it(name: str, missing: None, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        compare(name, 1003, torch.bfloat16, torch.float16, 1, 3)
    assert len(caplog.messages) == 1
    assert "install one, such as gcc" in caplog.messages[0].lower()


def test_out_of_place_without_the_library(missing: None) -> None:
    pieces, expected = pieces_of("adamw", [100])
    update.update(pieces, FACTOR)
    pieces, found = pieces_of("adamw", [100])
    before = [tensor.clone() for tensor in found]
    written = [torch.empty(100) for _ in range(3)]
    pieces[0].new_master, pieces[0].new_states = written[0], tuple(written[1:])
    update.update(pieces, FACTOR)
    assert same_bits([written[0], *written[1:]], [expected[0], *expected[2:]])
    assert same_bits([found[0], *found[2:]], [before[0], *before[2:]])


def test_a_library_of_another_version_is_not_used(missing, tmp_path, caplog) -> None:
    source = tmp_path / "other.c"
    source.write_text("int zeromesh_interface(void) { return 7; }\n")
    name = f"_native{native.EXTENSION_SUFFIXES[0]}"
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(tmp_path / name)], check=True)
    assert library() is None
    assert "another version" in caplog.text


def test_classes_and_groups_that_the_kernel_has_not() -> None:
    group = {"amsgrad": False, "differentiable": False}
    assert rule_of(torch.optim.AdamW, group) == "adamw"
    for key in ("amsgrad", "differentiable", "capturable"):
        assert rule_of(torch.optim.AdamW, {**group, key: True}) is None
    assert rule_of(torch.optim.RMSprop, {}) is None
    mine = type("Mine", (torch.optim.SGD,), {"step": lambda self, closure=None: None})
    assert rule_of(mine, {}) is None


HALF = torch.zeros(4, dtype=torch.int16)


def piece(**changes: Any) -> UpdatePiece:
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    given = {"step": UpdateStep("adamw", group, 1), "gradient": torch.ones(4), "master": torch.ones(4)}
    return UpdatePiece(**{**given, "states": (torch.zeros(4), torch.zeros(4)), **changes})


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"master": torch.ones(4, dtype=torch.float64)}, "exp_avg is torch.float32.*takes float64; use torch"),
        ({"gradient": torch.ones(4, dtype=torch.float64)}, "gradient is torch.float64.*float32 or bfloat16 or float16"),
        ({"gradient": torch.ones(5)}, r"gradient has shape \(5,\).*must have shape \(4,\)"),
        ({"gradient": torch.ones(8)[::2]}, "strides"),
        ({"gradient": torch.ones(2, 2)}, "shape"),
        ({"gradient": torch.ones(4, device="meta")}, "is on meta"),
        ({"states": (torch.zeros(4),)}, r"states \('exp_avg', 'exp_avg_sq'\), and 1 are given"),
        ({"states": (torch.zeros(4), torch.zeros(4).half())}, "exp_avg_sq is torch.float16"),
        ({"output": torch.ones(4, dtype=torch.int16)}, "output is torch.int16"),
        ({"new_states": (torch.zeros(4),)}, "2 states are read, and 1"),
        ({"new_master": torch.zeros(3)}, "new master"),
        ({"remainder": HALF}, "master is torch.float32.*takes bfloat16"),
        ({"master": torch.ones(4).bfloat16()}, "master is torch.bfloat16.*takes float32"),
        ({"master": torch.ones(4).bfloat16(), "remainder": torch.zeros(4)}, "remainder is torch.float32.*takes int16"),
        ({"master": torch.ones(4).bfloat16(), "remainder": HALF[:3]}, r"remainder has shape \(3,\)"),
        ({"new_remainder": HALF}, "give both or neither"),
        ({"master": torch.ones(4).bfloat16(), "remainder": HALF, "new_remainder": HALF}, "one is not"),
    ],
)
def test_tensors_that_the_kernel_would_misread_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        update.update([piece(**changes)])


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="threads is 0"):
        update.update([piece()], threads=0)
    with pytest.raises(ValueError, match="'sse'.*choose of those"):
        update.update([piece()], instructions="sse")
    with pytest.raises(ValueError, match="the kernel has adam, "):
        UpdateStep("adamax", {}, 1)
    with pytest.raises(ValueError, match="first step is 1"):
        UpdateStep("adam", {}, 0)
    update.update([])
