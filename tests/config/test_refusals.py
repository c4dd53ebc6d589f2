"""A row of the table of refusals is read by ``initialize`` and by the planner; no other place is needed."""

from collections.abc import Iterator

import pytest
from torch import nn

import zeromesh
from planning import GB, Plain, machine, memory, time
from zeromesh.apps.plan.choose.search import search
from zeromesh.apps.plan.choose.space import ModelLimits, PlanRequest
from zeromesh.apps.train.train_settings import TrainSettings
from zeromesh.config.refusals import REFUSALS
from zeromesh.config.settings import Settings

TOY = "zero_optimization.stage is 2, which is not to be used today; set it to 3"


@pytest.fixture
def toy() -> Iterator[None]:
    REFUSALS.append((lambda settings: settings.zero_optimization.stage == 2, TOY))
    yield
    REFUSALS.pop()


def stages() -> set[int]:
    """Return the stages of the layouts that the planner shows."""
    source, machine_of_four = Plain(4, 2e8), machine(1, 4, memory=12 * GB)
    request = PlanRequest(source, machine_of_four, 4, 2048, ModelLimits(), memory=memory, time=time)
    return {candidate.layout.stage for candidate in search(request).shown}


def test_without_the_row_the_planner_shows_such_layouts() -> None:
    assert 2 in stages()


@pytest.mark.usefixtures("toy")
def test_a_row_is_read_by_initialize_and_by_the_planner() -> None:
    document = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    for load in (Settings.load, TrainSettings.load):
        with pytest.raises(ValueError, match=TOY):
            load(document)
    with pytest.raises(ValueError, match=TOY):
        zeromesh.initialize(model=nn.Linear(2, 2), config=document)
    shown = stages()
    assert shown
    assert 2 not in shown


@pytest.mark.parametrize("number", range(len(REFUSALS)))
def test_a_row_accepts_the_defaults(number: int) -> None:
    when, _ = REFUSALS[number]
    assert not when(Settings())


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"enabled": True, "budget_gb": 2}, "only a plan keeps to a budget"),
        ({"granularity": "auto", "budget_gb": 2}, "enabled to true"),
        ({"enabled": True, "granularity": "auto", "targets": "Block"}, "activation_checkpointing.targets out"),
        ({"enabled": True, "granularity": "auto", "cpu_checkpointing": True}, "what is moved to the host"),
        ({"enabled": True, "granularity": "auto", "partition_activations": True}, "does not divide inputs"),
        ({"enabled": True, "granularity": "auto", "budget_gb": 0}, "must be a number > 0"),
    ],
)
def test_what_a_plan_of_saved_tensors_contradicts_is_refused(section: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings.load({"activation_checkpointing": section})


def test_auto_is_a_value_where_it_means_something() -> None:
    loaded = Settings.load({"activation_checkpointing": "auto", "context_parallel": {"strategy": "auto"}})
    assert loaded.activation_checkpointing.planned
    assert loaded.context_parallel.strategy == "auto"


@pytest.mark.parametrize(
    ("pipeline", "said"),
    [({"recompute": True}, "leave pipeline.recompute out"), ({"schedule": {"file": "own.txt"}}, "name one there")],
)
def test_a_plan_of_saved_tensors_refuses_what_it_cannot_count(pipeline: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Settings.load({"activation_checkpointing": "auto", "mesh": {"pipeline": 2}, "pipeline": pipeline})


@pytest.mark.usefixtures("one_rank")
def test_a_plan_of_saved_tensors_needs_samples() -> None:
    with pytest.raises(ValueError, match="pass training_data to initialize"):
        zeromesh.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 2, "activation_checkpointing": "auto"})
