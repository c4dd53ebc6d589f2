"""Behaviour of the real DeepSpeed, recorded by ``ds_facts.py``, holds here."""

import json

import pytest

from ds_facts import RECORDED, SECTIONS, Facts
from zeromesh import deepspeed


@pytest.mark.parametrize("section", SECTIONS)
def test_what_deepspeed_does_happens_here(section: str, one_rank: None) -> None:
    recorded = {name: value for name, value in json.loads(RECORDED.read_text()).items() if name.startswith(section)}

    found = dict(Facts(deepspeed).answers(section))

    assert recorded
    assert json.loads(json.dumps(found)) == recorded


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_model_may_be_initialised_again_when_its_engine_is_gone(stage: int, one_rank: None) -> None:
    recorded = json.loads(RECORDED.read_text())

    assert Facts(deepspeed).gone(stage) == recorded[f"training: initialized again at ZeRO-{stage}"]
