"""States in bf16: one rule of rounding in C and in torch, right on the average, with an error that is bounded."""

import math
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zeromesh.base.kernels import halves, native, rounding
from zeromesh.base.kernels import update_pass as update
from zeromesh.base.kernels.native import library
from zeromesh.base.kernels.update_pass import UpdatePiece, UpdateStep
from zeromesh.base.kernels.update_rules import RULES

FACTOR = 0.37
ADAM = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
SGD = {"lr": 0.1, "weight_decay": 0.1, "dampening": 0.0}
GROUPS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam, maximized": ("adam", ADAM | {"maximize": True}),
    "adamw": ("adamw", ADAM),
    "nesterov": ("sgd", SGD | {"momentum": 0.9, "nesterov": True}),
    "sgd": ("sgd", SGD | {"momentum": 0.0, "nesterov": False}),
    "lion": ("lion", {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}),
    "adagrad": ("adagrad", {"lr": 0.1, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.1}),
}
ELEMENTS = 70_001


def piece_of(name: str, narrow: Sequence[bool], elements: int = ELEMENTS, number: int = 3) -> UpdatePiece:
    """A piece whose numbers are the same however wide its states are, and all fit into bf16."""
    torch.manual_seed(elements)
    rule, group = GROUPS[name]
    gradient, master = torch.randn(elements).bfloat16(), torch.randn(elements)
    gradient[:: max(elements // 7, 1)], gradient[1 :: max(elements // 5, 1)] = torch.inf, torch.nan
    states = [torch.rand(elements).bfloat16() for _ in RULES[rule].states(group)]
    chosen = tuple(state if is_narrow else state.float() for state, is_narrow in zip(states, narrow, strict=False))
    return UpdatePiece(UpdateStep(rule, group, number), gradient, master, chosen, torch.empty(elements).bfloat16())


def cut(piece: UpdatePiece, begin: int, end: int) -> UpdatePiece:
    part = slice(begin, end)
    states = tuple(state[part] for state in piece.states)
    assert piece.output is not None
    return UpdatePiece(piece.step, piece.gradient[part], piece.master[part], states, piece.output[part])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of numbers; those of NaNs, which may be made of two, as one."""
    return tensor.nan_to_num(nan=123.0).view(torch.int32 if tensor.dtype is torch.float32 else torch.int16)


def assert_same(found: UpdatePiece, master: torch.Tensor, states: Sequence[torch.Tensor], about: Any = None) -> None:
    for one, other in zip((found.master, *found.states), (master, *states), strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(bits(one), bits(other)), about


def expected_of(name: str, narrow: Sequence[bool], elements: int, number: int = 3) -> UpdatePiece:
    """The step of fp32 states, whose results torch rounds."""
    piece = piece_of(name, [False] * 2, elements, number)
    gradient = piece.gradient.float() * FACTOR * (-1 if piece.step.group.get("maximize") else 1)
    salt = rounding.salt_of(number if RULES[piece.step.rule].counted else 0)
    random = rounding.random_bits(gradient, piece.master, salt)
    update.update([piece], FACTOR)
    states = zip(piece.states, narrow, strict=False)
    piece.states = tuple(
        rounding.round_randomly(state, random, index) if is_narrow else state
        for index, (state, is_narrow) in enumerate(states)
    )
    return piece


WIDTHS = [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize("name", GROUPS)
def test_the_kernel_rounds_as_torch_does_whatever_the_cut(name: str) -> None:
    native_library = library()
    if native_library is None:
        pytest.skip("no native kernels")
    for narrow in WIDTHS:
        for elements in (0, 1, 15, 16, 17, ELEMENTS):
            expected = expected_of(name, narrow, elements)
            for instructions in native_library.sets:
                for threads in (1, 2):
                    whole = piece_of(name, narrow, elements)
                    parts = [cut(whole, 0, elements // 3), cut(whole, elements // 3, elements)]
                    update.update(parts, FACTOR, threads, instructions)
                    about = narrow, elements, instructions, threads
                    assert_same(whole, expected.master, expected.states, about)
                    assert whole.output is not None
                    assert torch.equal(bits(whole.output), bits(whole.master.bfloat16())), about


@pytest.mark.parametrize("name", GROUPS)
def test_split_masters_and_other_places_round_alike(name: str) -> None:
    expected = expected_of(name, WIDTHS[0], ELEMENTS)
    split, apart = piece_of(name, WIDTHS[0]), piece_of(name, WIDTHS[0])
    split.master, split.remainder = halves.split(split.master)
    apart.new_master = torch.empty_like(apart.master)
    apart.new_states = tuple(torch.empty_like(state) for state in apart.states)
    before = [tensor.clone() for tensor in (apart.master, *apart.states)]
    update.update([split, apart], FACTOR)
    joined = halves.join(split.master, split.remainder)
    assert torch.equal(bits(joined), bits(expected.master))
    for found, state in zip(split.states, expected.states, strict=True):
        assert torch.equal(bits(found), bits(state))
    assert_same(apart, before[0], before[1:], "what was read is as it was")
    apart.master, apart.states = apart.new_master, apart.new_states
    assert_same(apart, expected.master, expected.states)


@pytest.mark.parametrize("name", GROUPS)
def test_torchs_update_rounds_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products and sums may be rounded otherwise, which leaves a state at most at the next bf16 number."""
    monkeypatch.setattr(update, "WINDOW", 30_000)
    for narrow in WIDTHS:
        expected, found = expected_of(name, narrow, ELEMENTS), piece_of(name, narrow)
        update.update_on_device([found], FACTOR)
        for index, (one, other) in enumerate(zip(found.states, expected.states, strict=True)):
            finite = other.isfinite()
            assert torch.equal(one.isfinite(), finite)
            torch.testing.assert_close(one[finite].float(), other[finite].float(), rtol=2**-6, atol=1e-6)
            if narrow[index]:
                assert (one == other)[finite].float().mean() > 0.999, (narrow, index)


class Made(TorchDispatchMode):
    """Counts the bytes that operators make and that live at one time, at the most."""

    def __init__(self, *given: torch.Tensor) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return result

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def test_torchs_update_makes_the_bytes_that_a_plan_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update, "WINDOW", 20_000)
    most = 0.0
    for name in GROUPS:
        piece = piece_of(name, WIDTHS[0])
        piece.master, piece.remainder = halves.split(piece.master)
        given = piece.gradient, piece.master, piece.remainder, *piece.states, piece.output
        with Made(*(tensor for tensor in given if tensor is not None)) as made:
            update.update_on_device([piece], FACTOR)
        most = max(most, made.peak / 20_000)
    assert most == pytest.approx(update.WINDOW_BYTES, rel=0.01)


def test_updates_without_the_library_take_narrow_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "FOLDER", tmp_path)
    library.cache_clear()
    found, expected = piece_of("adamw", WIDTHS[0]), piece_of("adamw", WIDTHS[0])
    update.update([found], FACTOR)
    library.cache_clear()
    update.update_on_device([expected], FACTOR)
    assert_same(found, expected.master, expected.states)


def test_other_states_are_refused() -> None:
    piece = piece_of("adamw", WIDTHS[0], 4)
    piece.states = (piece.states[0].half(), piece.states[1])
    for step in (update.update, update.update_on_device):
        with pytest.raises(ValueError, match="exp_avg is torch.float16.*takes float32 or bfloat16"):
            step([piece])
    piece = piece_of("adamw", WIDTHS[0], 4)
    piece.new_states = tuple(state.float() for state in piece.states)
    with pytest.raises(ValueError, match="new exp_avg is torch.float32.*takes bfloat16"):
        update.update([piece])
    piece = piece_of("adamw", WIDTHS[0], 4)
    piece.master, piece.gradient, piece.output = piece.master.double(), piece.gradient.double(), None
    with pytest.raises(ValueError, match="exp_avg is torch.bfloat16.*takes float64"):
        update.update_on_device([piece])
    piece = piece_of("adamw", WIDTHS[0], 4)
    piece.gradient = piece.gradient.to("meta")
    with pytest.raises(ValueError, match="gradient is on meta, and the update works on cpu"):
        update.update_on_device([piece])


def test_numbers_of_bf16_infinities_and_nans_stay_what_they_are() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    for random in (0, -1, 0x1234):
        chosen = torch.full((every.numel(),), random, dtype=torch.int32)
        assert torch.equal(bits(rounding.round_randomly(every.float(), chosen, 0)), bits(every))
    least = torch.tensor([0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    assert least.isnan().all()
    assert rounding.round_randomly(least, torch.zeros(2, dtype=torch.int32), 1).isnan().all()


COUNT = 1 << 18


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("same", ["gradient", "master"])
def test_rounding_is_right_on_the_average_and_within_a_last_place(index: int, same: str) -> None:
    torch.manual_seed(index)
    numbers = {"gradient": torch.randn(COUNT), "master": torch.randn(COUNT)}
    numbers[same] = torch.zeros(COUNT)  # as of a layer that begins with zeros, or of rows without gradients
    random = rounding.random_bits(**numbers, salt=rounding.salt_of(1))
    state = torch.randn(COUNT)
    error = (rounding.round_randomly(state, random, index).double() - state.double()) / state.double().abs()
    assert error.abs().max() < 2**-7
    # Five times what the mean of so many independent errors strays by.
    assert error.mean().abs() < 5 * error.std() / COUNT**0.5
    assert error.std() < 2**-8


def test_steps_and_states_round_independently() -> None:
    torch.manual_seed(3)
    gradient, master = torch.randn(COUNT), torch.randn(COUNT)
    drawn = [rounding.random_bits(gradient, master, rounding.salt_of(number)) for number in (1, 2, 3)]
    parts = torch.stack([(random >> 16 * index & 0xFFFF).double() for random in drawn for index in (0, 1)])
    assert (parts.mean(1) / 65535 - 0.5).abs().max() < 5 * 0.29 / COUNT**0.5
    assert (torch.corrcoef(parts) - torch.eye(6)).abs().max() < 5 / COUNT**0.5


def moment_after(rounds: Any, steps: int, beta: float, squares: torch.Tensor, start: float) -> torch.Tensor:
    """Second moments that begin at ``start``, by Adam's kernel in bf16, or rounded by another function."""
    group = ADAM | {"betas": (0.9, beta), "lr": 1e-3, "weight_decay": 0.0}
    gradient = squares.sqrt()
    states = torch.zeros_like(gradient), torch.full_like(gradient, start).bfloat16()
    master = torch.linspace(-1, 1, len(gradient))
    for number in range(1, steps + 1):
        if rounds is None:
            update.update([UpdatePiece(UpdateStep("adam", group, number), gradient, master, states)])
        else:
            states[1].copy_(rounds(states[1].float() * beta + (1 - beta) * squares))
    return states[1].double()


def test_second_moments_move_where_nearest_rounding_stalls() -> None:
    """At beta2 = 0.999 a step changes a moment by a thousandth, and half of a last place is at least 2^-9."""
    squares, beta, steps = torch.full((4096,), 0.25), 0.999, 500
    expected = 0.25 + (1.0 - 0.25) * beta**steps
    nearest = moment_after(lambda moment: moment.bfloat16(), steps, beta, squares, 1.0)
    assert (nearest == 1.0).all(), "it has not moved at all"
    found = moment_after(None, steps, beta, squares, 1.0)
    assert abs(found.mean().item() / expected - 1) < 0.005
    # The bound for one element, of the largest number that the moment has been (see the next test).
    bound = 2**-8 / math.sqrt(1 - beta**2)
    assert ((found - expected) ** 2).mean().sqrt() < bound


@pytest.mark.parametrize("beta", [0.9, 0.99])
def test_the_error_of_an_average_is_within_the_bound(beta: float) -> None:
    """Of a moment at rest: the root of the mean square error is at most 2^-8 / sqrt(1 - beta^2) of it."""
    squares = torch.linspace(0.25, 1.0, 1 << 14)
    steps = math.ceil(4 / (1 - beta))
    found = moment_after(None, steps, beta, squares, 0.0)
    expected = squares.double() * (1 - beta**steps)
    error = found / expected - 1
    bound = 2**-8 / math.sqrt(1 - beta**2)
    assert bound / 8 < error.square().mean().sqrt() < bound, "the bound holds, and says something"
    assert error.mean().abs() < 0.2 * error.std()
