"""Runs of models without memory: values, guesses, limits, recorders, and what they leave in the user's model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from harness import run_command
from zeromesh.apps.plan.cost.cost_trace import TracedCost
from zeromesh.base.containers import tensors_of
from zeromesh.base.dry.dry_run import DryRun, OperatorListener
from zeromesh.base.dry.meta_values import META, on_meta, value_of
from zeromesh.base.dry.model_copy import dry, imitated
from zeromesh.base.dry.model_inputs import InputSizes, inputs_of, samples_of


class Names(OperatorListener):
    """Names of the operators, before and after they are computed."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.computed: list[str] = []

    def on_read(self, func: Any, tensors: Sequence[Tensor]) -> None:
        self.read.append(func._overloadpacket.__name__)

    def on_operator(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        self.computed.append(func._overloadpacket.__name__)


class Counting(nn.Module):
    """Writes to buffers, to itself and to a list of its class."""

    calls: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        self.calls.append(len(self.calls))
        self.last = x
        return self.norm(self.layer(x)).sum()


def test_a_plan_leaves_buffers_and_attributes_of_the_model_alone() -> None:
    model, x = Counting().eval(), torch.randn(4, 4)
    assert TracedCost(model, {"x": x}).at(2, 1).exact
    assert model.steps.tolist() == [0.0] * 3
    assert int(model.norm.num_batches_tracked) == 0
    assert "last" not in vars(model)
    assert Counting.calls == []
    assert not model.training


def test_a_loss_that_reads_the_parameters_of_the_model_leaves_them_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    cost = TracedCost(model, {"input": torch.randn(4, 4)}, loss=lambda output: output.sum() + model[0].weight.sum())
    assert cost.at(2, 1).exact
    assert all(parameter.grad is None and not parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("guess", [None, False, True])
def test_known_values_are_used_and_others_are_the_guess(guess: bool | None) -> None:
    numbers, activation = on_meta(torch.tensor([3, 0, 5]), valued=True), torch.empty(3, device=META)
    run = DryRun(OperatorListener(), guess)
    with run:
        assert (numbers + 1).max().item() == 6
        assert numbers.nonzero().shape == (2, 1)
        assert activation[numbers > 0].shape == (2,)
        assert not run.values.guessed
        if guess is None:
            with pytest.raises(RuntimeError):
                activation.sum().item()
        else:
            assert activation.sum().item() == float(guess)
            assert activation[activation > 0].shape == (1,)
    assert run.values.guessed is (guess is not None)


def test_a_value_is_a_copy() -> None:
    numbers = torch.tensor([1, 2])
    meta_numbers = on_meta(numbers, valued=True)
    with DryRun(OperatorListener()):
        meta_numbers.add_(1)
    value = value_of(meta_numbers)
    assert value is not None
    assert value.tolist() == [2, 3]
    assert numbers.tolist() == [1, 2]


def test_results_that_are_made_again_are_as_those_of_torch() -> None:
    layer, names = nn.Linear(4, 6, device=META), Names()
    x = torch.empty(5, 4, device=META)
    with DryRun(names):
        results = [layer(x).t().softmax(-1) for _ in range(2)]
    assert results[0] is not results[1]
    assert results[0].stride() == results[1].stride() == layer(x).t().softmax(-1).stride()
    assert names.read == names.computed
    assert names.computed.count("addmm") == 2


def test_more_operators_than_the_limit_are_refused() -> None:
    x = torch.empty(2, device=META)
    run = DryRun(OperatorListener(), False, 3)
    with run:
        for _ in range(3):
            x = x + 1
    with pytest.raises(RuntimeError, match="more than 3 operators"), run:
        torch.add(x, 1)


def test_a_copy_has_the_values_of_small_buffers_and_the_dtype_asked_for() -> None:
    model = Counting()
    model.steps += 2
    with dry(model):
        copied, copies = imitated(model, torch.bfloat16)
    assert {p.dtype for p in copied.parameters()} == {torch.bfloat16}
    assert all(tensor.is_meta for tensor in copied.state_dict().values())
    value = value_of(copies[id(model.steps)])
    assert value is not None
    assert value.tolist() == [2.0] * 3


def test_inputs_follow_the_class_and_the_configuration() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = InputSizes(samples=3, length=7)
    config = transformers.ViTConfig(image_size=32, num_channels=1)
    inputs = inputs_of(transformers.ViTForImageClassification, config, sizes)
    assert {name: tuple(x.shape) for name, x in inputs.items()} == {"pixel_values": (3, 1, 32, 32), "labels": (3,)}
    inputs = inputs_of(transformers.BertForQuestionAnswering, transformers.BertConfig(), sizes)
    assert {name: tuple(x.shape) for name, x in inputs.items()} == {
        "input_ids": (3, 7),
        "start_positions": (3,),
        "end_positions": (3,),
    }
    assert list(samples_of(Counting())) == []


@pytest.mark.parametrize("guess", [None, True])
def test_operators_that_change_the_form_of_a_tensor_are_computed_each_time(guess: bool | None) -> None:
    shapes = []
    with DryRun(OperatorListener(), guess):
        for _ in range(2):
            shapes.append(torch.empty(2, 3, device=META).unsqueeze_(1).shape)
            shapes.append(torch.empty(2, 3, device=META).transpose_(0, 1).shape)
    assert shapes == [(2, 1, 3), (3, 2)] * 2


@pytest.mark.parametrize("guess", [None, True])
def test_a_tensor_outside_of_the_model_is_written_to_once(guess: bool | None) -> None:
    count = torch.tensor(0)
    with DryRun(OperatorListener(), guess):
        count.add_(1)
    assert int(count) == 1


def test_operators_of_others_are_called_without_values_alone() -> None:
    calls = []

    def send(x: Tensor) -> Tensor:
        calls.append(x)
        return x.clone()

    operator = torch.library.custom_op("dry_run_tests::send", send, mutates_args=(), schema="(Tensor x) -> Tensor")
    operator.register_fake(torch.empty_like)
    with DryRun(OperatorListener(), True):
        sent = operator(torch.arange(3))
    assert value_of(sent) is None
    assert calls == []


def test_a_function_that_holds_the_model_is_refused_on_any_device() -> None:
    with META:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    forward = model.forward
    vars(model)["forward"] = lambda input: forward(input)
    cost = TracedCost(model, {"input": torch.empty(2, 4, device=META)}).at(2, 1)
    assert not cost.exact
    assert "computes with the model itself" in cost.note


def test_a_loss_may_read_the_model_again_in_the_backward() -> None:
    model, head = nn.Linear(4, 4), nn.Linear(4, 2)
    model.add_module("head", head)

    def loss(output: Tensor) -> Tensor:
        return checkpoint(lambda x: head(x).sum(), output, use_reentrant=False)

    assert TracedCost(model, {"input": torch.empty(2, 4)}, loss=loss).at(2, 1).exact


@dataclass
class Sizes:
    """A configuration of which one field may not be read, as some of transformers."""

    width: int = 4
    runs: int = 0
    depth: int = 2

    def __getattribute__(self, name: str) -> Any:
        if name == "depth":
            raise RuntimeError("depth differs by layer")
        return super().__getattribute__(name)


class Configured(nn.Module):
    """Writes to its configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.layer = Sizes(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.config.runs += 1
        return self.layer(x).sum()


def test_a_configuration_that_cannot_be_read_is_copied_and_stays_as_it_is() -> None:
    model = Configured()
    cost = TracedCost(model, {"x": torch.randn(4, 4)}).at(2, 1)
    assert cost.exact, cost.note
    assert model.config.runs == 0
    assert tensors_of([model.config]) == []


PLAN = """
import torch
from torch import nn
from torch.nn import functional as F
from zeromesh.apps.plan.cost.cost_trace import TracedCost

assert TracedCost(nn.Linear(4, 4), {"input": torch.randn(3, 4)}, loss=lambda output: output.sum()).at(2, 1).exact
with torch.device("meta"):
    assert torch.tensor([1.0]).is_meta
assert F.scaled_dot_product_attention in torch.overrides.get_overridable_functions()[F]
print("as it was")
"""


@pytest.mark.full
def test_torch_knows_its_own_functions_after_the_first_plan_of_a_process() -> None:
    # Models that transformers loads afterwards would have positions of random memory.
    ended = run_command([sys.executable, "-c", PLAN])
    assert "as it was" in ended.stdout, ended.stdout
