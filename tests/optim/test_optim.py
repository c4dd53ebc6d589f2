import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from compare import assert_close
from simulated_ranks import train_on_ranks
from zeromesh.base.optimizer_table import UNKNOWN, row_of
from zeromesh.base.piece import Piece
from zeromesh.base.split import Held
from zeromesh.shard.optim import factory
from zeromesh.shard.optim.factory import ParameterGroup, adopt, build

SHAPES = {
    "embed.weight": (11, 6),
    "0.weight": (6, 6),
    "0.bias": (6,),
    "1.weight": (10, 6),
    "1.scale": (),
    "2.weight": (4, 10),
    "2.bias": (4,),
    "idle.weight": (3, 3),
}
LAYOUT = [["0.weight", "0.bias", "1.weight", "1.scale"], ["2.weight", "2.bias", "idle.weight"], ["embed.weight"]]
MATRICES = frozenset({"0.weight", "1.weight", "2.weight", "idle.weight"})
NO_DECAY = frozenset({"0.bias", "1.scale", "2.bias"})
STEPS = 6


def make_values(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()
    }


def make_gradients(dtype: torch.dtype = torch.float64) -> list[dict[str, torch.Tensor | None]]:
    """Of STEPS steps. One parameter never has a gradient, two have none in some steps, and one is zero once."""
    generator = torch.Generator().manual_seed(5)
    steps: list[dict[str, torch.Tensor | None]] = []
    for step in range(STEPS):
        gradients: dict[str, torch.Tensor | None] = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for name, shape in SHAPES.items()
        }
        gradients["idle.weight"] = None
        if step in (0, 3):
            gradients["1.weight"] = None
        if step == 2:
            gradients["2.bias"] = None
        steps.append(gradients)
    return steps


def train_whole(make: Any, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in make_values(dtype).items()}
    optimizers = make(parameters)
    for gradients in make_gradients(dtype):
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        for optimizer in optimizers:
            optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def two_groups(pieces: Mapping[str, Piece]) -> list[ParameterGroup]:
    return [
        ParameterGroup(tuple(piece for name, piece in pieces.items() if name not in NO_DECAY), {"weight_decay": 0.1}),
        ParameterGroup(
            tuple(piece for name, piece in pieces.items() if name in NO_DECAY), {"weight_decay": 0.0, "lr": 0.02}
        ),
    ]


def train_pieces(name: str, params: dict[str, Any], ranks: int, dtype: torch.dtype = torch.float64, **options: Any):
    return train_on_ranks(
        make_values(dtype),
        make_gradients(dtype),
        LAYOUT,
        ranks,
        lambda pieces, exchange: build(
            name, params, two_groups(pieces), exchange, ranks > 1, matrices=lambda: MATRICES, **options
        ),
    )


def torch_groups(parameters: Mapping[str, torch.nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [p for name, p in parameters.items() if name not in NO_DECAY], "weight_decay": 0.1},
        {"params": [p for name, p in parameters.items() if name in NO_DECAY], "weight_decay": 0.0, "lr": 0.02},
    ]


ELEMENTWISE = [
    ("AdamW", {"lr": 0.01}, torch.optim.AdamW, {}),
    ("adamw", {"lr": 0.01, "betas": [0, 0.9], "amsgrad": True}, torch.optim.AdamW, {"betas": (0.0, 0.9)}),
    ("Adam", {"lr": 0.01}, torch.optim.AdamW, {}),
    ("adam", {"lr": 0.01, "adam_w_mode": False, "torch_adam": True}, torch.optim.Adam, {}),
    ("sgd", {"lr": 0.01, "momentum": 0.9, "nesterov": True}, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.01}, torch.optim.SGD, {}),
    ("Adagrad", {"lr": 0.01, "lr_decay": 0.1}, torch.optim.Adagrad, {"lr_decay": 0.1}),
    ("adadelta", {"lr": 0.01}, torch.optim.Adadelta, {}),
    ("ADAMAX", {"lr": 0.01}, torch.optim.Adamax, {}),
    ("nadam", {"lr": 0.01}, torch.optim.NAdam, {}),
    ("radam", {"lr": 0.01}, torch.optim.RAdam, {}),
    ("rmsprop", {"lr": 0.01, "momentum": 0.5}, torch.optim.RMSprop, {"momentum": 0.5}),
    ("ASGD", {"lr": 0.01}, torch.optim.ASGD, {}),
]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("name", "params", "cls", "arguments"), ELEMENTWISE)
def test_elementwise_optimizers_on_pieces_equal_torch_on_whole_parameters(name, params, cls, arguments, ranks):
    if params.get("amsgrad"):
        arguments = arguments | {"amsgrad": True}
    expected = train_whole(lambda parameters: [cls(torch_groups(parameters), lr=0.01, **arguments)])
    ours, _, _ = train_pieces(name, params, ranks)
    assert_close(ours, expected, 1e-12)


def test_rprop_which_has_no_weight_decay_equals_torch_on_pieces():
    expected = train_whole(lambda parameters: [torch.optim.Rprop(parameters.values(), lr=0.01)])
    ours, _, _ = train_on_ranks(
        make_values(),
        make_gradients(),
        LAYOUT,
        3,
        lambda pieces, exchange: build("rprop", {"lr": 0.01}, [ParameterGroup(tuple(pieces.values()))], exchange, True),
    )
    assert_close(ours, expected, 1e-12)


def test_fused_updates_are_used_where_torch_has_them_and_count_steps_per_parameter():
    _, _, optimizers = train_pieces("AdamW", {"lr": 0.01}, 2, torch.float32)
    for optimizer in optimizers:
        assert [group["fused"] for group in optimizer.param_groups] == [True, True]
    steps = {float(state["step"]) for optimizer in optimizers for state in optimizer.state.values()}
    assert steps == {STEPS, STEPS - 1, STEPS - 2}
    for choice in ({"fused": False}, {"foreach": True}, {"foreach": False}):
        (unfused,) = train_pieces("AdamW", {"lr": 0.01, **choice}, 1)[2]
        assert not unfused.param_groups[0]["fused"]


def test_fused_adagrad_counts_right_where_the_default_dtype_is_float64():
    torch.set_default_dtype(torch.float64)
    try:
        arguments = {"lr": 0.01, "lr_decay": 0.5}
        ours, _, _ = train_pieces("adagrad", arguments, 2)
        expected, _, _ = train_pieces("adagrad", {**arguments, "fused": False}, 1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_close(ours, expected, 1e-12)


def lion_step(w, g, m, lr, beta1, beta2, decay):  # algorithm 2 of Chen et al. 2023, on whole arrays
    update = torch.sign(beta1 * m + (1 - beta1) * g)
    return w - lr * (update + decay * w), beta2 * m + (1 - beta2) * g


@pytest.mark.parametrize("ranks", [1, 3])
def test_lion_follows_its_paper(ranks):
    expected, momenta = make_values(), {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for gradients in make_gradients():
        for name, g in gradients.items():
            if g is not None:
                lr, decay = (0.02, 0.0) if name in NO_DECAY else (0.01, 0.1)
                expected[name], momenta[name] = lion_step(expected[name], g, momenta[name], lr, 0.9, 0.99, decay)
    ours, _, _ = train_pieces("Lion", {"lr": 0.01, "betas": [0.9, 0.99]}, ranks)
    assert_close(ours, expected, 1e-12)


class WholeLamb:  # algorithm 2 of You et al. 2020 on whole parameters, with clamped trust ratio
    def __init__(self, lr, decay, eps=1e-8, correct=True, low=0.01, high=10.0):
        self.lr, self.decay, self.eps, self.correct, self.low, self.high = lr, decay, eps, correct, low, high
        self.t, self.m, self.v = 0, 0.0, 0.0

    def __call__(self, w, g):
        self.t += 1
        self.m, self.v = 0.9 * self.m + 0.1 * g, 0.999 * self.v + 0.001 * g * g
        m, v = self.m, self.v
        if self.correct:
            m, v = m / (1 - 0.9**self.t), v / (1 - 0.999**self.t)
        update = m / (v.sqrt() + self.eps) + self.decay * w
        if w.norm() == 0 or update.norm() == 0:
            return w - self.lr * update
        return w - self.lr * min(max((w.norm() / update.norm()).item(), self.low), self.high) * update


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("params", "arguments"),
    [
        ({}, {}),
        ({"bias_correction": False, "eps": 1e-3}, {"correct": False, "eps": 1e-3}),
        ({"max_coeff": 1.01, "min_coeff": 0.99, "amsgrad": False}, {"low": 0.99, "high": 1.01}),
    ],
)
def test_lamb_uses_norms_of_whole_parameters(ranks, params, arguments):
    values = make_values()
    values["0.bias"].zero_()
    references = {name: WholeLamb(*((0.02, 0.0) if name in NO_DECAY else (0.01, 0.1)), **arguments) for name in SHAPES}
    expected = dict(values)
    for gradients in make_gradients():
        expected |= {name: references[name](expected[name], g) for name, g in gradients.items() if g is not None}
    ours, hub, _ = train_on_ranks(
        values,
        make_gradients(),
        LAYOUT,
        ranks,
        lambda pieces, exchange: build("Lamb", {"lr": 0.01, **params}, two_groups(pieces), exchange, ranks > 1),
    )
    assert_close(ours, expected, 1e-12)
    assert [len(calls) for calls in hub.calls] == [STEPS] * ranks


def make_muon_reference(parameters: Mapping[str, torch.nn.Parameter], **muon: Any) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in parameters.items() if name in MATRICES]
    plain = [p for name, p in parameters.items() if name not in MATRICES | NO_DECAY]
    small = [p for name, p in parameters.items() if name in NO_DECAY]
    groups = [{"params": plain, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0, "lr": 0.02}]
    return [
        torch.optim.Muon(matrices, weight_decay=0.1, **{"lr": 0.01} | muon),
        torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.95)),
    ]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "options", [{}, {"nesterov": False, "momentum": 0.8, "ns_steps": 3}, {"adjust_lr_fn": "match_rms_adamw"}]
)
def test_muon_on_pieces_equals_torch_muon_and_adamw_on_whole_parameters(ranks, options):
    expected = train_whole(lambda parameters: make_muon_reference(parameters, **options))
    ours, hub, _ = train_pieces("Muon", {"lr": 0.01, "betas": [0.8, 0.95], **options}, ranks)
    assert_close(ours, expected, 1e-12)
    assert all(calls == [("gather", 0), ("gather", 1)] * STEPS for calls in hub.calls)


def test_muon_has_a_learning_rate_for_each_part():
    expected = train_whole(lambda parameters: make_muon_reference(parameters, lr=0.3))
    ours, _, optimizers = train_pieces("Muon", {"muon_lr": 0.3, "adam_lr": 0.01, "betas": [0.8, 0.95]}, 2)
    assert [group["lr"] for group in optimizers[0].param_groups] == [0.3, 0.01, 0.02, 0.02]
    assert_close(ours, expected, 1e-12)


@pytest.mark.parametrize("name", ["Muon", "Lamb", "Lion", "AdamW"])
def test_optimizers_continue_after_loading_their_state_dict(name):
    expected, _, _ = train_pieces(name, {"lr": 0.01}, 2)

    def reload(optimizer: torch.optim.Optimizer) -> None:
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer.state.clear()
        optimizer.load_state_dict(saved)

    ours, _, optimizers = train_on_ranks(
        make_values(),
        make_gradients(),
        LAYOUT,
        2,
        lambda pieces, exchange: build(
            name, {"lr": 0.01}, two_groups(pieces), exchange, True, matrices=lambda: MATRICES
        ),
        after_step=reload,
    )
    assert_close(ours, expected, 0.0)
    updated = {name for name in SHAPES if any(gradients[name] is not None for gradients in make_gradients())}
    assert sum(len(optimizer.state) for optimizer in optimizers) >= len(updated)


@pytest.mark.parametrize("name", ["adam", "lamb", "lion", "muon", "adagrad", "sgd"])
def test_groups_agree_on_ranks_that_hold_nothing_of_them(name):
    tiny = {"a": torch.ones(1, dtype=torch.float64), "b": torch.ones(1, 1, dtype=torch.float64)}
    gradients = [{"a": torch.ones(1, dtype=torch.float64), "b": torch.ones(1, 1, dtype=torch.float64)}] * 2
    _, _, optimizers = train_on_ranks(
        tiny,
        gradients,
        [["a", "b"]],
        3,
        lambda pieces, exchange: build(
            name,
            {"lr": 0.5},
            [ParameterGroup(tuple(p for n, p in pieces.items() if n == key)) for key in ("a", "b")],
            exchange,
            True,
            matrices=lambda: frozenset({"b"}),
        ),
    )
    described = [[(group["lr"], group.get("weight_decay")) for group in o.param_groups] for o in optimizers]
    assert described[0] == described[1] == described[2]
    assert len(described[0]) == (4 if name == "muon" else 2)


@pytest.mark.parametrize("name", ["adamw", "lamb", "lion", "muon"])
def test_fp32_pieces_agree_with_one_rank(name):
    whole, _, _ = train_pieces(name, {"lr": 0.01}, 1, torch.float32)
    pieces, _, _ = train_pieces(name, {"lr": 0.01}, 3, torch.float32)
    assert all(value.dtype is torch.float32 for value in pieces.values())
    assert_close(pieces, whole, 1e-6)


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("adamw", {"weight_decey": 0.1}, 'weight_decey.*did you mean "weight_decay"'),
        ("adamw", {"learning_rate": 0.1}, r'optimizer\.params\.learning_rate is not a parameter.*did you mean "lr"'),
        ("adamw", {"lr": "3e-4"}, r'optimizer\.params\.lr = "3e-4" must be a number; write it without the quotes'),
        ("adamw", {"lr": True}, r"optimizer\.params\.lr = true must be a number"),
        ("adamw", {"betas": [0.9]}, r"optimizer\.params\.betas = \[0\.9\] must be a list of 2 numbers"),
        ("adamw", {"betas": [0.9, "0.99"]}, r'optimizer\.params\.betas\[1\] = "0\.99" must be a number'),
        ("adamw", {"amsgrad": "yes"}, r'optimizer\.params\.amsgrad = "yes" must be true or false'),
        ("muon", {"ns_steps": 2.5}, r"optimizer\.params\.ns_steps = 2\.5 must be a whole number"),
        ("adamw", {"max_grad_norm": 1.0}, "gradient_clipping"),
        ("adam", {"bias_correction": False}, "bias_correction"),
        ("adam", {"freeze_step": 10}, "1-bit"),
        ("lamb", {"amsgrad": True}, "amsgrad"),
        ("sgd", {"torch_adam": True}, "torch_adam"),
        ("adamw", {"lr": -1}, "adamw.*-1"),
        ("muon", {"adjust_lr_fn": "mine"}, "adjust_lr_fn"),
        ("lbfgs", {}, "LBFGS"),
        ("sparseadam", {}, "SparseAdam"),
        ("adafactor", {}, "Adafactor.*sharded.*ZeRO-0"),
    ],
)
def test_bad_optimizers_are_refused_by_name_with_a_remedy(name, params, message):
    with pytest.raises(ValueError, match=message):
        train_pieces(name, params, 2)


def test_auto_means_not_given_and_parameters_without_effect_are_accepted():
    params = {"lr": "auto", "betas": "auto", "bias_correction": True, "set_grad_none": True, "adam_w_mode": True}
    (optimizer,) = train_pieces("Adam", params, 1)[2]
    assert isinstance(optimizer, torch.optim.AdamW)
    assert optimizer.defaults["lr"] == 1e-3
    assert optimizer.defaults["weight_decay"] == 0.0


def test_adafactor_which_looks_at_shapes_gets_them_where_parameters_are_whole():
    expected = train_whole(lambda parameters: [torch.optim.Adafactor(torch_groups(parameters), lr=0.01)])
    ours, _, _ = train_pieces("adafactor", {"lr": 0.01}, 1)
    assert_close(ours, expected, 1e-12)


class Custom(torch.optim.SGD):
    """A user's own class."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def adopted(pieces: Mapping[str, Piece], make: Any, sharded: bool, **options: Any) -> torch.optim.Optimizer:
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in make_values().items()}
    optimizer = make(parameters)
    groups = list(optimizer.param_groups)
    adopt(optimizer, {p: pieces.get(name) for name, p in parameters.items()}, sharded, **options)
    assert all(before is after for before, after in zip(groups, optimizer.param_groups, strict=True))
    return optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(torch_groups(parameters), lr=0.01),
        lambda parameters: torch.optim.SGD(torch_groups(parameters), lr=0.01, momentum=0.9),
        lambda parameters: torch.optim.Adagrad(torch_groups(parameters), lr=0.01, initial_accumulator_value=0.1),
        lambda parameters: torch.optim.RMSprop([(n, p) for n, p in parameters.items()], lr=0.01),
    ],
)
@pytest.mark.parametrize("ranks", [1, 3])
def test_adopted_optimizers_equal_themselves_on_whole_parameters(make, ranks):
    expected = train_whole(lambda parameters: [make(parameters)])
    ours, _, _ = train_on_ranks(
        make_values(), make_gradients(), LAYOUT, ranks, lambda pieces, _: adopted(pieces, make, ranks > 1)
    )
    assert_close(ours, expected, 1e-12)


def test_adopted_torch_muon_gets_matrices_where_parameters_are_whole():
    def make(parameters):
        return torch.optim.Muon([p for name, p in parameters.items() if name in MATRICES], lr=0.01)

    expected = train_whole(lambda parameters: [make(parameters)])
    arguments = (make_values(), make_gradients(), LAYOUT)
    ours, _, _ = train_on_ranks(*arguments, 1, lambda pieces, _: adopted(pieces, make, False))
    assert_close(ours, expected, 1e-12)
    for allow_untested in (False, True):
        with pytest.raises(ValueError, match=r"Muon.*sharded"):
            train_on_ranks(
                *arguments, 2, lambda pieces, _, a=allow_untested: adopted(pieces, make, True, allow_untested=a)
            )


def test_unknown_classes_are_refused_on_shards_unless_allowed():
    def make(parameters):
        return Custom(parameters.values(), lr=0.01)

    expected = train_whole(lambda parameters: [make(parameters)])
    arguments = (make_values(), make_gradients(), LAYOUT, 3)
    with pytest.raises(ValueError, match=r"Custom.*zero_allow_untested_optimizer"):
        train_on_ranks(*arguments, lambda pieces, _: adopted(pieces, make, True))
    ours, _, _ = train_on_ranks(*arguments, lambda pieces, _: adopted(pieces, make, True, allow_untested=True))
    assert_close(ours, expected, 1e-12)


def whole_piece(name: str, parameter: torch.nn.Parameter) -> Piece:
    flat = torch.nn.Parameter(parameter.detach().flatten().clone())
    return Piece(name, Held(tuple(parameter.shape)), 0, parameter.numel(), flat)


def test_adopt_refuses_stepped_optimizers_and_foreign_parameters():
    mine, foreign = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(4, 5))
    pieces = {mine: whole_piece("mine", mine)}
    with pytest.raises(ValueError, match=r"group 0, parameter 1 \(other\) of shape \(4, 5\)"):
        adopt(torch.optim.AdamW([("mine", mine), ("other", foreign)]), pieces, sharded=True)
    stepped = torch.optim.SGD([mine], lr=0.1, momentum=0.9)
    mine.grad = torch.ones_like(mine)
    stepped.step()
    with pytest.raises(ValueError, match="load_checkpoint"):
        adopt(stepped, pieces, sharded=True)


def test_adopt_cuts_the_state_that_is_made_at_construction():
    matrix, scalar = torch.nn.Parameter(torch.ones(2, 3)), torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.Adagrad([matrix, scalar])
    optimizer.state[matrix]["sum"].copy_(torch.arange(6.0).view(2, 3))
    part = Piece("matrix", Held((2, 3)), 2, 5, torch.nn.Parameter(torch.ones(3)))
    adopt(optimizer, {matrix: part, scalar: whole_piece("scalar", scalar)}, sharded=True)
    first, second = (optimizer.state[parameter] for parameter in optimizer.param_groups[0]["params"])
    assert first["sum"].tolist() == [2.0, 3.0, 4.0]
    assert second["sum"].shape == (1,)
    assert first["step"].shape == second["step"].shape == ()


def test_adopt_drops_frozen_parameters_and_leaves_out_those_not_given():
    first, second, frozen = (torch.nn.Parameter(torch.ones(2, 3)) for _ in range(3))
    frozen.requires_grad_(False)
    pieces = {first: whole_piece("first", first), second: whole_piece("second", second)}
    optimizer = torch.optim.AdamW([("frozen", frozen), ("first", first)])
    adopt(optimizer, pieces, sharded=True)
    assert optimizer.param_groups[0]["params"] == [pieces[first].parameter]
    assert optimizer.param_groups[0]["param_names"] == ["first"]


def test_an_adopted_scheduler_keeps_moving_the_learning_rate():
    parameter = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    piece = whole_piece("p", parameter)
    adopt(optimizer, {parameter: piece}, sharded=True)
    for _ in range(2):
        piece.parameter.grad = torch.ones(4)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert torch.equal(piece.parameter.detach(), torch.full((4,), -0.5))


def test_every_torch_optimizer_is_known_to_be_right_or_refused_on_shards():
    classes = {c for c in vars(torch.optim).values() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)}
    assert [cls for cls in classes - {torch.optim.Optimizer} if row_of(cls) is UNKNOWN] == []


@pytest.mark.parametrize(
    ("name", "params", "expected"),
    [
        ("adamw", {}, 8),
        ("adam", {"adam_w_mode": False, "amsgrad": True}, 12),
        ("lamb", {}, 8),
        ("lion", {}, 4),
        ("muon", {}, 4),
        ("sgd", {"lr": "auto"}, 0),
        ("sgd", {"momentum": 0.9}, 4),
        ("RMSprop", {"centered": True, "momentum": 0.9}, 12),
        ("Adafactor", {}, 1),  # a row and a column of a small matrix
        ("adamw", {"capturable": True, "fused": True}, 8),
        ("adamw", {"lr": -1.0}, 8),  # which is refused at the start
        ("LBFGS", {}, 0),
    ],
)
def test_bytes_of_states_are_those_of_an_update(name: str, params: Mapping[str, Any], expected: int) -> None:
    assert sum(factory.state_bytes(name, params).values()) == expected


def test_an_index_into_a_group_without_pieces_says_why() -> None:
    piece = Piece("weight", Held((4,)), 0, 4, torch.nn.Parameter(torch.zeros(4)))
    optimizer = build("adamw", {}, [ParameterGroup((piece,)), ParameterGroup(())], None, True)  # type: ignore[arg-type]
    assert optimizer.param_groups[0]["params"][0] is piece.parameter
    empty = optimizer.param_groups[1]["params"]
    assert list(empty) == [] == empty[:1]
    assert not empty
    with pytest.raises(IndexError, match="updates no piece of this parameter group"):
        empty[0]
