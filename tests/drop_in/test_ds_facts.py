"""Behaviour of the real DeepSpeed, recorded by ``ds_facts.py``, holds here."""

import json

import pytest

from ds_facts import RECORDED, Facts
from zeromesh import deepspeed


@pytest.mark.full
def test_what_deepspeed_does_happens_here(one_rank: None) -> None:
    recorded = json.loads(RECORDED.read_text())

    found = dict(Facts(deepspeed).all())

    assert json.loads(json.dumps(found)) == recorded
