"""Logits that are computed only if somebody looks at them, against plain torch: whole, and split over ranks."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from harness import run_ranks
from huggingface_models import GROUPED, MODELS, SPECIAL, USUAL, Model, masked, text
from zeromesh import Mesh
from zeromesh.base.linear_arithmetic import Kept, keeping
from zeromesh.base.split import Split
from zeromesh.comm.collectives import Group
from zeromesh.parallel.head.linear_cross_entropy import CHUNK_BYTES, Vocabulary
from zeromesh.parallel.head.logits import Logits
from zeromesh.parallel.pipeline.runtime.weight_gradients import roots_of

TOKENS, WIDTH, ENTRIES = (2, 7), 5, 11
EXACT = {"rtol": 1e-9, "atol": 1e-9}
MASK = torch.tensor([[True, False, True, True, False, False, True], [False] * 5 + [True] * 2])

Change = Callable[[Tensor], Tensor]

# What logits remember -> what is done to them, and to the labels of their loss.
REMEMBERED: dict[str, tuple[Change, Change]] = {
    "view": (lambda x: x.view(-1, ENTRIES), torch.flatten),
    "view, last dim open": (lambda x: x.view(14, -1), torch.flatten),
    "view of its size": (lambda x: x.view(-1, x.size(-1)), torch.flatten),
    "view_as": (lambda x: x.view_as(torch.empty(14, ENTRIES)), torch.flatten),
    "reshape": (lambda x: torch.reshape(x, (7, 2, ENTRIES)).flatten(0, 1), torch.flatten),
    "reshape of a slice": (lambda x: x[:, 1:].reshape(-1, ENTRIES), lambda y: y[:, 1:].flatten()),
    "reshape_as": (lambda x: x.reshape_as(torch.empty(14, ENTRIES)), torch.flatten),
    "flatten": (lambda x: x.flatten(0, 1), torch.flatten),
    "flatten, function": (lambda x: torch.flatten(x, 0, -2), torch.flatten),
    "unflatten": (lambda x: x.unflatten(1, (7, 1)).flatten(0, 2), torch.flatten),
    "unsqueeze": (lambda x: x.unsqueeze(0).view(-1, ENTRIES), torch.flatten),
    "squeeze": (lambda x: x[:, :1].squeeze(1), lambda y: y[:, 0]),
    "contiguous": (lambda x: x[..., :-1, :].contiguous().view(-1, ENTRIES), lambda y: y[..., 1:].flatten()),
    "clone": (lambda x: x.clone().view(-1, ENTRIES), torch.flatten),
    "first": (lambda x: x[0], lambda y: y[0]),
    "one token": (lambda x: x[1, 3], lambda y: y[1, 3]),
    "last tokens": (lambda x: x[:, -3:, :].flatten(0, 1), lambda y: y[:, -3:].flatten()),
    "last token": (lambda x: x[:, -1], lambda y: y[:, -1]),
    "steps": (lambda x: x[:, ::2].flatten(0, 1), lambda y: y[:, ::2].flatten()),
    "a new dim": (lambda x: x[:, None, 2].flatten(0, 1), lambda y: y[:, 2]),
    "a mask": (lambda x: x[MASK], lambda y: y[MASK]),
    "a mask, dim by dim": (lambda x: x[MASK[:, 0], :][0], lambda y: y[MASK[:, 0]][0]),
    "positions": (lambda x: x[torch.arange(2), torch.tensor([3, 5])], lambda y: y[torch.arange(2), [3, 5]]),
    "a list": (lambda x: x[0, [3, 1, 1]], lambda y: y[0, [3, 1, 1]]),
    "all entries": (lambda x: x[..., :ENTRIES].view(-1, ENTRIES), torch.flatten),
    "all": (lambda x: x[:, :, 0:][...].view(-1, ENTRIES), torch.flatten),
    "transpose": (lambda x: x.transpose(1, 2), lambda y: y),
    "transpose, function": (lambda x: torch.transpose(x, -1, 1), lambda y: y),
    "permute": (lambda x: x.permute(0, 2, 1).contiguous(), lambda y: y),
    "permute all": (lambda x: x.unsqueeze(1).permute(2, 3, 0, 1), lambda y: y.t()[:, :, None]),
    "movedim": (lambda x: x.movedim(-1, 1), lambda y: y),
    "transposed twice": (lambda x: x.transpose(1, 2).transpose(1, 2).reshape(-1, ENTRIES), torch.flatten),
    "scaled, transposed": (lambda x: (x * 0.5).transpose(1, 2) * 3, lambda y: y),
    "double": (lambda x: x.double().flatten(0, 1), torch.flatten),
    "to": (lambda x: x.to(torch.float64, copy=True).flatten(0, 1), torch.flatten),
    "to a device": (lambda x: x.to("cpu").cpu().flatten(0, 1), torch.flatten),
    "type_as": (lambda x: x.type_as(x).flatten(0, 1), torch.flatten),
    "times": (lambda x: (x * 0.3)[0], lambda y: y[0]),
    "times, the other way round": (lambda x: (2 * x)[0], lambda y: y[0]),
    "by": (lambda x: (x / 7)[0], lambda y: y[0]),
    "by, function": (lambda x: torch.div(x, -0.7)[0], lambda y: y[0]),
    "capped": (lambda x: (torch.tanh(x / 1.5) * 1.5)[0], lambda y: y[0]),
    "capped, scaled": (lambda x: ((x * 0.3 / 2).tanh() * 3 / 1.2)[0], lambda y: y[0]),
    "tanh": (lambda x: x.tanh()[0], lambda y: y[0]),
}

# What needs values.
COMPUTED: dict[str, Change] = {
    "softmax": lambda x: x.softmax(-1),
    "log_softmax, shifted": lambda x: F.log_softmax(x[..., :-1, :].contiguous(), dim=-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "sum": lambda x: x.sum(),
    "detached and whole": lambda x: x.detach() * x,
    "cat": lambda x: torch.cat([x, x[:, :1]], 1),
    "stack": lambda x: torch.stack([x[0], x[1]]),
    "matmul": lambda x: x @ x.mT,
    "plus": lambda x: x + 1,
    "minus": lambda x: 1 - x,
    "times a tensor": lambda x: x * torch.linspace(0, 1, ENTRIES),
    "times a scalar tensor": lambda x: x * torch.tensor(2.0),
    "times zero": lambda x: x * 0,
    "times logits": lambda x: x * x,
    "a number by them": lambda x: 2 / x,
    "rounded": lambda x: torch.div(x, 0.1, rounding_mode="floor") + x,
    "tanh twice": lambda x: x.tanh().tanh(),
    "narrower": lambda x: x.float().double(),
    "view without the vocabulary": lambda x: x.view(-1),
    "view of another": lambda x: x.view(2, 11, 7),
    "view as another dtype": lambda x: x.detach().view(torch.int64).view(torch.float64) * x,
    "squeezed where it is not one": lambda x: x.transpose(1, 2)[:1].squeeze(0),
    "some entries": lambda x: x[..., :3],
    "one entry": lambda x: x[..., 4],
    "entries": lambda x: x[0, 0, [1, 2]],
    "a new last dim": lambda x: x[..., None],
    "a mask of all": lambda x: x[x.detach() > 0],
    "indexed after transposing": lambda x: x.transpose(1, 2)[0],
    "indexed by bool": lambda x: x[True],
    "gathered": lambda x: x.gather(-1, torch.zeros(2, 7, 1, dtype=torch.int64)),
    "iterated": lambda x: next(iter(x)),
    "as a keyword": lambda x: torch.reshape(input=x, shape=(-1,)),
    "out": lambda x: torch.mul(x.detach(), 2, out=torch.empty(*TOKENS, ENTRIES, dtype=torch.float64)) * x,
    "through a function of autograd": lambda x: Square.apply(x),
    "a part through a function of autograd": lambda x: Square.apply(x[:, 2:] * 3),
    "through a checkpoint": lambda x: checkpoint(lambda y: y.exp(), x, use_reentrant=False),
}

# Options of a loss, and whether it does without values.
OPTIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, True),
    "sum": ({"reduction": "sum"}, True),
    "none": ({"reduction": "none"}, True),
    "ignored": ({"ignore_index": 3}, True),
    "smoothed": ({"label_smoothing": 0.2}, True),
    "weighted": ({"weight": torch.linspace(1, 2, ENTRIES, dtype=torch.float64)}, False),
    "before reduction": ({"size_average": False}, False),
}


class Square(torch.autograd.Function):  # one of a user's own, of which torch tells its arguments nothing
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    hidden = torch.randn(*TOKENS, WIDTH, dtype=torch.float64).to(dtype).requires_grad_()
    weight, bias = (torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in ((ENTRIES, WIDTH), (ENTRIES,)))
    labels = torch.randint(ENTRIES, TOKENS)
    labels[0, 2] = labels[1, 6] = -100
    return hidden, weight.requires_grad_(), bias.requires_grad_(), labels


def gradients(value: Tensor, *of: Tensor) -> list[Tensor]:
    upstream = torch.linspace(0.5, 2, value.numel(), dtype=value.dtype).view(value.shape)
    found = torch.autograd.grad(value, of, upstream, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(of, found, strict=True)]


def all_cases() -> dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]]:
    cases: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {}
    for name, (change, fit) in REMEMBERED.items():
        cases["loss", name] = (lambda x, y, c=change, f=fit: F.cross_entropy(c(x), f(y)), True)
        cases["values", name] = (lambda x, y, c=change: c(x).exp(), False)
    for name, change in COMPUTED.items():
        cases["computed", name] = (lambda x, y, c=change: c(x), False)
    cases["computed", "below torch's functions"] = (lambda x, y: unasked(lambda: x[:, 1:].exp()), True)
    for name, (options, lazy) in OPTIONS.items():
        cases["options", name] = (lambda x, y, o=options: loss(x.flatten(0, 1), y.flatten(), o), lazy)
    soft = torch.rand(14, ENTRIES, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    cases["options", "soft"] = (lambda x, y: F.cross_entropy(x.view(14, -1), soft), False)
    cases["options", "a module"] = (lambda x, y: torch.nn.CrossEntropyLoss()(x.transpose(1, 2), y), True)
    cases["options", "added"] = (lambda x, y: loss(x[0], y[0]) + loss(x[1].double(), y[1]), True)
    return cases


def unasked(compute: Callable[[], Tensor]) -> Tensor:
    """As code of torch calls torch, which does not ask a tensor's class."""
    with torch._C.DisableTorchFunctionSubclass():
        return compute()


def loss(logits: Tensor, labels: Tensor, options: dict[str, Any] | None = None) -> Tensor:
    options = options or {}
    return F.cross_entropy(logits, labels.where(labels != -100, options.get("ignore_index", -100)), **options)


def tensor_group() -> Group:
    return Mesh({"tensor": dist.get_world_size()}, torch.device("cpu")).group("tensor")


def part_of(value: Tensor, rank: int, rows: int) -> Tensor:
    whole = F.pad(value.detach(), (0, 0) * (value.ndim - 1) + (0, rows * 8), value=7.0)
    return whole[rank * rows : (rank + 1) * rows].clone().requires_grad_()


def split(rows: int, whole_bias: bool) -> dict[str, Any]:
    """All cases on this rank's rows: what they give, whether the logits remained lazy, and the gradients."""
    group = tensor_group()
    found = {}
    for name, (compute, _) in all_cases().items():
        hidden, weight, bias, labels = operands()
        own = [part_of(weight, group.rank, rows), bias if whole_bias else part_of(bias, group.rank, rows)]
        vocabulary = Vocabulary(min(group.rank * rows, ENTRIES), ENTRIES, group) if group.size > 1 else None
        logits = Logits(hidden, own[0], own[1], vocabulary, 20)
        value = compute(logits, labels)
        found[name] = value.detach(), logits.lazy, gradients(value, hidden, *own)
    return found


# With 4 ranks of 4 rows the last one has padding only.
@pytest.mark.some(1)
@pytest.mark.filterwarnings("ignore:size_average and reduce")
@pytest.mark.parametrize(
    ("ranks", "rows", "whole_bias"),
    [(1, 11, False), (2, 6, True), (4, 4, True), pytest.param(4, 3, False, marks=pytest.mark.full)],
)
def test_all_operations_give_the_values_and_gradients_of_torch(ranks, rows, whole_bias) -> None:
    by_rank = run_ranks(split, ranks, rows, whole_bias)
    hidden, weight, bias, labels = operands()
    for name, (compute, lazy) in all_cases().items():
        value = compute(F.linear(hidden, weight, bias), labels)
        want = gradients(value, hidden, weight, bias)
        values, remained, parts = zip(*(found[name] for found in by_rank), strict=True)
        assert set(remained) == {lazy}, name
        of_weight, of_bias = (torch.cat([part[place] for part in parts]) for place in (1, 2))
        for got in values:
            torch.testing.assert_close(got, value.detach(), **EXACT, msg=lambda text, name=name: f"{name}: {text}")
        for part in parts:
            torch.testing.assert_close(part[0], want[0], **EXACT, msg=lambda text, name=name: f"{name}: {text}")
            if whole_bias:
                torch.testing.assert_close(part[2], want[2], **EXACT)
        torch.testing.assert_close(of_weight[:ENTRIES], want[1], **EXACT)
        assert not of_weight[ENTRIES:].any()
        if not whole_bias:
            torch.testing.assert_close(of_bias[:ENTRIES], want[2], **EXACT)


@pytest.mark.parametrize("name", REMEMBERED)
def test_lazy_logits_look_like_the_tensor_that_they_stand_for(name: str) -> None:
    hidden, weight, bias, _ = operands()
    change = REMEMBERED[name][0]
    whole = Logits(hidden, weight, bias)
    logits, plain = change(whole), change(F.linear(hidden, weight, bias))
    assert isinstance(logits, Logits)
    for look in (
        lambda x: x.shape, lambda x: x.dtype, lambda x: x.device, lambda x: x.ndim, lambda x: x.dim(),
        lambda x: x.size(), lambda x: x.size(-1), lambda x: x.stride(), lambda x: x.storage_offset(),
        lambda x: x.numel(), lambda x: torch.numel(x), lambda x: len(x), lambda x: x.requires_grad,
        lambda x: x.is_leaf, lambda x: x.is_contiguous(), lambda x: x.is_floating_point(), lambda x: x.layout,
        lambda x: x.element_size(), lambda x: x.nbytes, lambda x: x.is_cuda, lambda x: x.get_device(),
        lambda x: torch.is_floating_point(x), lambda x: x.grad_fn is None, lambda x: torch.is_tensor(x),
    ):  # fmt: skip
        assert look(logits) == look(plain)
    assert whole.lazy
    assert logits.lazy
    values = logits.materialise()
    assert type(values) is Tensor
    assert values.stride() == plain.stride()
    assert torch.equal(values, plain)
    assert logits.materialise() is values
    assert not whole.lazy


def test_errors_are_those_of_torch_and_come_where_they_would() -> None:
    hidden, weight, bias, labels = operands()
    wrong: list[Callable[[Tensor], Any]] = [
        lambda x: x.view(3, -1),
        lambda x: x[:, 1:].view(-1, ENTRIES),
        lambda x: x.transpose(1, 3),
        lambda x: x[2],
        lambda x: x[0, 0, 0, 0],
        lambda x: x[torch.ones(3, dtype=torch.bool)],
        lambda x: F.cross_entropy(x, labels),
        lambda x: F.cross_entropy(x.view(-1, ENTRIES), labels.flatten()[1:]),
        lambda x: F.cross_entropy(x.view(-1, ENTRIES), labels.flatten().int()),
        lambda x: F.cross_entropy(x.view(-1, ENTRIES), labels.flatten(), reduction="average"),
        lambda x: F.cross_entropy(x.view(-1, ENTRIES), labels.flatten() + ENTRIES),
        lambda x: x.numpy(),
        lambda x: copy.deepcopy(x),
        lambda x: x.requires_grad_(False),
    ]
    for one in wrong:
        kinds = []
        for logits in (F.linear(hidden, weight, bias), Logits(hidden, weight, bias)):
            try:
                kinds.append(repr(one(logits)))
            except Exception as error:
                kinds.append(type(error).__name__)
        assert kinds[0] == kinds[1]
        assert kinds[0].endswith("Error")
    with pytest.raises(
        ValueError, match=r"weight must have shape \(rows, 5\), not \(11, 4\), and bias \(11,\), not \(3"
    ):
        Logits(hidden, weight[:, 1:], bias[:3])


def test_copies_files_and_trees_have_the_values() -> None:
    hidden, weight, bias, _ = operands()
    plain = F.linear(hidden, weight, bias)
    with torch.no_grad():
        logits = Logits(hidden, weight, bias)
        assert not logits.requires_grad
        file = io.BytesIO()
        torch.save({"logits": logits}, file)
        file.seek(0)
        copies = [
            copy.deepcopy(logits), copy.copy(logits), pickle.loads(pickle.dumps(logits)), torch.load(file)["logits"],
            torch.from_numpy(logits.numpy()), torch.tensor(logits.tolist(), dtype=torch.float64),
        ]  # fmt: skip
    assert all(type(one) is Tensor and torch.equal(one, plain) for one in copies)
    logits = Logits(hidden, weight, bias)
    tree = tree_map(lambda x: x, {"logits": logits, "others": (1, [logits])})
    assert tree["logits"] is logits
    assert logits.lazy
    assert torch.equal(tree_map(lambda x: x * 2, tree)["others"][1][0].detach(), plain * 2)
    logits = Logits(hidden, weight, bias)
    assert repr(logits.detach()) == repr(plain.detach())
    assert f"{logits[0, 0, 0]:.4f}" == f"{plain[0, 0, 0]:.4f}"


def test_changes_in_place_reach_views_and_no_copies_or_are_refused() -> None:
    hidden, weight, bias, labels = operands()

    def changed(logits: Tensor) -> list[Tensor]:
        view, clone, scaled, after = logits[:, 1:], logits.clone(), logits * 2, logits.transpose(1, 2)
        logits[:, :, 3] = -1.0
        view /= 2
        logits.add_(1)
        return [logits * 1, view * 1, clone * 1, scaled * 1, after * 1, F.cross_entropy(after, labels)]

    of_torch = changed(F.linear(hidden, weight, bias))
    for got, want in zip(changed(Logits(hidden, weight, bias)), of_torch, strict=True):
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(gradients(got, hidden, weight), gradients(want, hidden, weight))
    with torch.no_grad():
        logits = Logits(hidden, weight, bias)
        with pytest.raises(RuntimeError, match="aten.add_.Tensor would change logits that have no memory"):
            unasked(lambda: logits.add_(1))


@pytest.mark.some(1)
@pytest.mark.parametrize("use", [lambda x, y: F.cross_entropy(x, y), lambda x, y: x.exp().sum()])
def test_memory_is_free_as_soon_as_nobody_has_the_logits(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    hidden, weight, bias, labels = operands()

    def compute() -> list[ref[Any]]:
        held = 2 * hidden
        logits = Logits(held, weight, bias)
        changed = logits.transpose(1, 2) / 3
        use(changed, labels).backward()
        return [ref(one) for one in (held, logits, changed)]

    gc.collect()
    gc.disable()
    try:
        assert [one() for one in compute()] == [None] * 3
    finally:
        gc.enable()


def test_hooks_get_the_gradient_of_the_logits() -> None:
    hidden, weight, bias, labels = operands()
    seen = []
    for logits in (F.linear(hidden, weight, bias), Logits(hidden, weight, bias)):
        logits.register_hook(lambda gradient: 2 * gradient)
        logits.retain_grad()
        found = gradients(F.cross_entropy(logits.transpose(1, 2), labels), hidden, weight, bias)
        F.cross_entropy(logits.transpose(1, 2), labels).backward(inputs=[logits])
        seen.append([*found, logits.grad])
    torch.testing.assert_close(*seen)


def test_modes_are_those_of_the_time_when_the_logits_were_made() -> None:
    hidden, weight, bias, labels = operands()
    logits = Logits(hidden, weight, bias)
    with torch.no_grad():
        part = logits[:, 1:].clone()
        assert not part.requires_grad
        assert not F.cross_entropy(part.transpose(1, 2), labels[:, 1:]).requires_grad
        assert not F.cross_entropy(logits.transpose(1, 2), labels).requires_grad
        assert not logits.exp().requires_grad
    assert logits.exp().requires_grad
    assert not part.exp().requires_grad
    with torch.no_grad():
        logits = Logits(hidden, weight, bias)
    assert not F.cross_entropy(logits.transpose(1, 2), labels).requires_grad
    assert not logits.exp().requires_grad
    logits = Logits(hidden, weight, bias)
    with torch.inference_mode():
        best = logits.argmax(-1)
        within = Logits(hidden, weight, bias)
        lazy = F.cross_entropy(within.transpose(1, 2), labels)
        torch.testing.assert_close(lazy, F.cross_entropy(within.materialise().mT, labels))
    assert torch.equal(best, F.linear(hidden, weight, bias).argmax(-1))
    assert within.argmax(-1).is_inference() is False
    assert within.materialise().is_inference()
    assert F.cross_entropy(logits.transpose(1, 2), labels).requires_grad


def test_autocast_is_that_of_the_head() -> None:
    hidden, weight, bias, labels = (x.detach().float() if x.is_floating_point() else x for x in operands())
    with torch.autocast("cpu", torch.bfloat16):
        logits, plain = Logits(hidden, weight, bias), F.linear(hidden, weight, bias)
        inside = F.cross_entropy(logits.transpose(1, 2), labels)
    outside = F.cross_entropy(logits.float().transpose(1, 2), labels)
    assert logits.dtype == plain.dtype == torch.bfloat16
    assert inside.dtype == outside.dtype == torch.float32
    assert torch.equal(inside, outside)
    # Logits are rounded once on either side: two unit roundoffs. A loss sees those of its label, and of the rest.
    limit = 2 * 2 * 2**-8 * float(plain.detach().abs().amax(-1).mean())
    torch.testing.assert_close(outside, F.cross_entropy(plain.float().transpose(1, 2), labels), rtol=0, atol=limit)
    assert logits.lazy
    assert torch.equal(logits.materialise(), plain)
    with torch.autocast("cpu", torch.bfloat16):
        assert Logits(hidden.double(), weight.double()).dtype == torch.float64


def test_sixteen_bits() -> None:
    hidden, weight, bias, labels = operands(torch.bfloat16)
    plain = F.linear(hidden, weight, bias)
    for change in (lambda x: x, lambda x: x.float(), lambda x: x.to(torch.float32), lambda x: x.double()):
        logits = Logits(hidden, weight, bias)
        got = F.cross_entropy(change(logits).flatten(0, 1), labels.flatten())
        assert got.dtype == torch.promote_types(change(plain).dtype, torch.float32)
        want = F.cross_entropy(plain.double().flatten(0, 1), labels.flatten())
        assert abs(got.item() - want.item()) < 1e-2 * want.item()
        assert logits.lazy
        assert all(g.dtype == torch.bfloat16 for g in torch.autograd.grad(got, (hidden, weight, bias)))
        assert torch.equal(change(logits).materialise(), change(plain))
    assert not isinstance(Logits(hidden, weight, bias).half(), Logits)


def test_values_of_a_weight_that_was_changed_are_refused() -> None:
    for place in range(3):
        inputs = list(operands()[:3])
        logits, there = Logits(*inputs), Logits(*inputs)
        plain = there.materialise().clone()
        with torch.no_grad():
            inputs[place].mul_(2)
        assert torch.equal(there, plain)
        for use in (lambda x: x.argmax(-1), lambda x: F.cross_entropy(x[0], torch.zeros(7, dtype=torch.int64))):
            with pytest.raises(RuntimeError, match="was changed after its logits were made"):
                use(logits)


def test_logits_may_come_out_of_a_checkpoint_and_go_into_one() -> None:
    hidden, weight, bias, labels = operands()

    def head(hidden: Tensor) -> Tensor:
        return Logits(hidden, weight, bias)

    plain = F.linear(hidden, weight, bias)
    want = gradients(F.cross_entropy(plain[0] * 2, labels[0]), hidden, weight, bias)
    for reentrant in (True, False):
        logits = checkpoint(head, hidden, use_reentrant=reentrant)
        assert isinstance(logits, Logits)
        for operand in (hidden, weight, bias):
            operand.grad = None
        F.cross_entropy(logits[0] * 2, labels[0]).backward(torch.tensor(0.5))
        torch.testing.assert_close([hidden.grad, weight.grad, bias.grad], want)
        hidden.grad = None
        of_values = checkpoint(lambda x: x.exp(), Logits(hidden, weight, bias)[0], use_reentrant=reentrant)
        of_values.sum().backward()
        torch.testing.assert_close(hidden.grad, torch.autograd.grad(plain[0].exp().sum(), hidden, retain_graph=True)[0])


def test_second_derivatives_are_those_of_the_values_and_refused_by_the_loss() -> None:
    hidden, weight, bias, labels = operands()

    def second(logits: Tensor) -> Tensor:
        (first,) = torch.autograd.grad(F.cross_entropy(logits.mT, labels), hidden, create_graph=True)
        return torch.autograd.grad(first.square().sum(), weight)[0]

    want = second(F.linear(hidden, weight, bias))
    torch.testing.assert_close(second(Logits(hidden, weight, bias).materialise()), want)
    lazy = F.cross_entropy(Logits(hidden, weight, bias).transpose(1, 2), labels)
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        torch.autograd.grad(lazy, hidden, create_graph=True)
    squares = [Square.apply(make(hidden, weight, bias)).sum() for make in (F.linear, Logits)]
    firsts = [torch.autograd.grad(one, hidden, create_graph=True)[0].square().sum() for one in squares]
    torch.testing.assert_close(*(torch.autograd.grad(one, weight)[0] for one in firsts))


USES: dict[str, tuple[Change, int]] = {  # and how many weight gradients can come later
    "loss": (lambda logits: F.cross_entropy(logits.transpose(1, 2), operands()[3]), 1),
    "two losses": (lambda x: F.cross_entropy(x[0], operands()[3][0]) + F.cross_entropy(x[1], operands()[3][1]), 2),
    "values": (lambda logits: logits.exp().sum(), 1),
    "values and a loss": (lambda x: x.exp().sum() + F.cross_entropy(x.transpose(1, 2), operands()[3]), 1),
    "a function of the user's": (lambda logits: Square.apply(logits).sum(), 0),
}


@pytest.mark.parametrize("use", USES)
def test_weight_gradients_of_a_head_can_come_later(use: str) -> None:
    function, later = USES[use]
    *inputs, _ = operands()
    expected = gradients(function(F.linear(*inputs)), *inputs)
    kept: Kept = []
    with keeping(kept):
        function(Logits(*inputs)).backward(torch.tensor(0.5).double())
    roots = roots_of(kept)
    assert len(roots) == later
    torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
    for one, want in zip(inputs, expected, strict=True):
        torch.testing.assert_close(one.grad, want, **EXACT)


def test_a_listener_hears_of_what_is_computed() -> None:
    hidden, weight, bias, labels = operands()
    logits, heard = Logits(hidden, weight, bias), []
    logits.when_computed(heard.append)
    one = F.cross_entropy(logits[0], labels[0])
    two = F.cross_entropy(logits.transpose(1, 2), labels)
    with torch.no_grad():
        F.cross_entropy(logits[0], labels[0])
    assert [id(made) for made in heard] == [id(one), id(two)]
    logits[0].exp()
    assert [id(made) for made in heard] == [id(one), id(two), id(logits.materialise())]
    again: list[Tensor] = []
    logits.when_computed(again.append)
    assert again[0] is logits.materialise()


class Asked(torch.nn.Parameter):  # as an engine's that is not in memory: its class is asked before any operation
    count = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.count += func is F.linear
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_the_parameter_is_used_itself_when_something_is_computed() -> None:
    hidden, weight, _, labels = operands()
    parameter = Asked(weight.detach())
    logits = Logits(hidden, parameter)
    before = Asked.count
    computed = F.cross_entropy(logits[0].float().double(), labels[0])
    assert Asked.count == before + 1
    (gradient,) = torch.autograd.grad(computed, parameter)
    torch.testing.assert_close(gradient, torch.autograd.grad(loss((hidden @ weight.t())[0], labels[0]), weight)[0])


class Largest(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, Tensor) and one.device.type != "meta":
                self.bytes = max(self.bytes, one.untyped_storage().nbytes())
        return made


@pytest.mark.full
@pytest.mark.parametrize("flat", [True, False])
def test_the_memory_of_a_loss_is_that_of_a_chunk(flat: bool) -> None:
    hidden, weight = (torch.randn(*shape).requires_grad_() for shape in ((2, 2048, 8), (32000, 8)))
    labels = torch.randint(32000, (2, 2048))
    with Largest() as largest:
        logits, of = Logits(hidden, weight).double()[:, 1:], labels[:, 1:]
        logits, of = (logits.reshape(-1, 32000), of.flatten()) if flat else (logits.transpose(1, 2), of)
        F.cross_entropy(logits, of).backward()
    assert CHUNK_BYTES // 2 < largest.bytes <= CHUNK_BYTES
    with Largest() as largest:
        Logits(hidden[:, :300], weight).sum()
    assert largest.bytes == 600 * 32000 * 4


VOCABULARY = 97
COHERE = Model("CohereForCausalLM", "CohereConfig", {**GROUPED, **SPECIAL, "logit_scale": 0.25}, text, {})
ROBERTA = Model("RobertaForMaskedLM", "RobertaConfig", {**USUAL, **SPECIAL}, masked, {})
FAMILIES: dict[str, tuple[Model, str, dict[str, Any]]] = {
    "gpt2": (MODELS["gpt2"], "lm_head", {}),
    "llama": (MODELS["llama"], "lm_head", {}),
    "gemma2": (MODELS["gemma2"], "lm_head", {"final_logit_softcapping": 2.0}),
    "cohere": (COHERE, "lm_head", {}),
    "granite": (MODELS["granite"], "lm_head", {"logits_scaling": 0.5}),
    "bert": (MODELS["bert"], "cls.predictions.decoder", {}),
    "roberta": (ROBERTA, "lm_head.decoder", {}),
    "t5": (MODELS["t5"], "lm_head", {}),
    "whisper": (MODELS["whisper"], "proj_out", {}),
}
"""Name -> the model, where its head is, and options."""


def make(family: str, dtype: torch.dtype) -> tuple[Any, dict[str, Tensor], Any]:
    model, name, options = FAMILIES[family]
    torch.manual_seed(5)
    built = replace(model, options={**model.options, **options, "vocab_size": VOCABULARY}).build().double()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    batch = model.batch(torch.Generator().manual_seed(1))
    if family == "llama":
        batch["num_items_in_batch"] = torch.tensor(50)
    batch = {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}
    return built.to(dtype), batch, built.get_submodule(name)


def forward(model: Any, batch: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """In float64, ``float`` is an operation that keeps it: models go to fp32 with it for their losses."""
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:
            patch.setattr(Tensor, "float", Tensor.double)
        return model(**batch)


def lazily(family: str, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor, Any]:
    group = tensor_group()
    model, batch, head = make(family, dtype)
    cut = Split.padded(0, VOCABULARY, group.size)
    own = cut.take(head.weight.detach(), group.rank).requires_grad_()
    bias = head.bias if family == "bert" else None  # whole
    if family == "roberta":
        bias = cut.take(head.bias.detach(), group.rank).requires_grad_()
    vocabulary = Vocabulary(cut.intervals[group.rank][0][0], VOCABULARY, group)
    head.forward = lambda hidden: Logits(hidden, own, bias, vocabulary, 20)
    output = forward(model, batch, dtype)
    output.loss.backward()
    assert isinstance(output.logits, Logits)
    assert output.logits.lazy
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    of_bias = bias.grad if family == "roberta" else None
    return output.loss.detach(), found, own.grad, of_bias, output.logits.detach()


@pytest.mark.some(9)
@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        (2, torch.float64),
        *(pytest.param(*case, marks=pytest.mark.full) for case in ((1, torch.float64), (2, torch.float32))),
        (4, torch.float64),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_hugging_face_have_the_losses_and_gradients_of_torch(family, ranks, dtype) -> None:
    pytest.importorskip("transformers")
    tolerance = FAMILIES[family][0].tolerance if dtype == torch.float64 else 1e-5
    model, batch, head = make(family, dtype)
    output = forward(model, batch, dtype)
    output.loss.backward()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    near = {"rtol": tolerance, "atol": tolerance}
    by_rank = run_ranks(lazily, ranks, family, dtype, timeout=120)
    rows = torch.cat([found[2] for found in by_rank])
    assert not rows[VOCABULARY:].any()
    for value, found, _, _, logits in by_rank:
        torch.testing.assert_close(value, output.loss.detach(), **near)
        torch.testing.assert_close(logits, output.logits.detach(), **near)
        whole = {names[id(head.weight)]: rows[:VOCABULARY]}  # of which the embedding may be the same parameter
        if family == "roberta":
            whole[names[id(head.bias)]] = torch.cat([each[3] for each in by_rank])[:VOCABULARY]
        for parameter_name, parameter in model.named_parameters():
            parts = [of[parameter_name] for of in (found, whole) if parameter_name in of]
            assert parts or parameter.grad is None
            if parts:
                torch.testing.assert_close(sum(parts), parameter.grad, **near)


def test_outputs_of_hugging_face_are_trees_and_its_label_smoother_has_the_values() -> None:
    trainer = pytest.importorskip("transformers.trainer_pt_utils")
    modeling = pytest.importorskip("transformers.modeling_outputs")
    hidden, weight, bias, labels = operands()
    found = []
    for head in (F.linear, Logits):
        output = modeling.CausalLMOutput(logits=head(hidden, weight, bias))
        smoothed = trainer.LabelSmoother(0.1)(output, labels, shift_labels=True)
        found.append([smoothed, *gradients(smoothed, hidden, weight, bias)])
    torch.testing.assert_close(*found)
    output = modeling.CausalLMOutput(logits=Logits(hidden, weight, bias))
    assert output.to_tuple()[0] is output[0] is output.logits
    assert isinstance(tree_map(lambda x: x.double(), output), modeling.CausalLMOutput)
    assert output.logits.lazy
    with torch.no_grad():
        output = modeling.CausalLMOutput(logits=Logits(hidden, weight, bias))
        for one in (copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
            assert torch.equal(one.logits, F.linear(hidden, weight, bias))
