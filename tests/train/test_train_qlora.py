"""``zeromesh train`` with quantized weights and with LoRA+: what is refused, and PEFT's own groups."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from huggingface_models import MODELS
from zeromesh.apps.train.model import parameter_groups
from zeromesh.apps.train.train_settings import TrainSettings

MODEL = {"path": "models/tiny", "sequence_length": 8}
NF4 = {"library": "bitsandbytes", "bits": 4, "type": "nf4", "double": True}
SGD = {"type": "SGD", "params": {"lr": 0.1}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"huggingface": {**MODEL, "quantization": NF4}}, "without lora nothing would be trained; add a section lora"),
        ({"huggingface": {**MODEL, "quantization": {"bits": 3}}}, "quantization.bits"),
        ({"huggingface": {**MODEL, "quantization": {"bits": 8, "type": "nf4"}}}, "type is for 4 bits of bitsandbytes"),
        (
            {"huggingface": {**MODEL, "quantization": NF4}, "lora": {}, "mesh": {"tensor": 2}},
            "cannot be split along mesh.tensor = 2; set it to 1",
        ),
        ({"huggingface": MODEL, "lora": {"plus_ratio": 4}}, "multiplies optimizer.params.lr, which is not set"),
        (
            {"huggingface": MODEL, "lora": {"plus_ratio": 4}, "optimizer": SGD, "scheduler": {"type": "WarmupLR"}},
            "WarmupLR gives all parameters one learning rate",
        ),
    ],
)
def test_contradictions_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings.load({"train_batch_size": 1, **config})


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
def test_groups_of_lora_plus_are_pefts() -> None:
    import peft
    from peft.optimizers import create_loraplus_optimizer

    options = peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"])
    model = peft.get_peft_model(MODELS["llama"].build(), options)
    config = {"train_batch_size": 1, "huggingface": MODEL, "lora": {"plus_ratio": 16}, "optimizer": SGD}
    found = parameter_groups(model, TrainSettings.load(config))
    wanted = create_loraplus_optimizer(model, torch.optim.SGD, lr=0.1, loraplus_lr_ratio=16).param_groups
    chosen = [group for group in wanted if group["params"]]
    assert len(found or []) == len(chosen) == 3
    for group, expected in zip(found or [], chosen, strict=True):
        assert [*map(id, group["params"])] == [*map(id, expected["params"])]
        assert (group["lr"], group["weight_decay"]) == (expected["lr"], expected["weight_decay"])
    del config["lora"]
    assert parameter_groups(model, TrainSettings.load(config)) is None
