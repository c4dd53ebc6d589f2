"""Behaviour of the real DeepSpeed, recorded by ``ds_facts.py``, holds here."""

import json

import pytest

from ds_facts import RECORDED, SECTIONS, Facts, batch
from zeromesh import deepspeed


@pytest.mark.parametrize("section", SECTIONS)
def test_what_deepspeed_does_happens_here(section: str, one_rank: None) -> None:
    recorded = {name: value for name, value in json.loads(RECORDED.read_text()).items() if name.startswith(section)}

    found = dict(Facts(deepspeed).answers(section))

    assert recorded
    assert json.loads(json.dumps(found)) == recorded


def test_a_loss_that_is_not_finite_leaves_an_update_out_without_zero_too(one_rank: None) -> None:
    """DeepSpeed makes the update, after which all parameters are nan."""
    facts = Facts(deepspeed)
    engine = facts.engine(0, named="Adam")
    before = facts.sums(engine)
    engine.backward(engine(batch()) * float("nan"))
    engine.step()

    assert (facts.sums(engine), engine.skipped_steps, engine.was_step_applied()) == (before, 1, False)


@pytest.mark.some(1)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_may_be_initialised_again_when_its_engine_is_gone(stage: int, one_rank: None) -> None:
    recorded = json.loads(RECORDED.read_text())

    assert Facts(deepspeed).gone(stage) == recorded[f"training: initialized again at ZeRO-{stage}"]
