"""Tensors that stay in fp32 in a 16-bit run, errors about dtypes and devices, and the device of batches."""

from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from zeromesh.base.dtypes import MismatchError, dtypes, require_names
from zeromesh.base.loader import Loader, Sampler
from zeromesh.base.precision import Precision
from zeromesh.deepspeed import parameters

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Fp32Norm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.float()).to(x.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 16), Fp32Norm(16), nn.Linear(16, 4)
        self.register_buffer("offset", torch.full((4,), 1.001))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(torch.tanh(self.norm(self.first(x)))) + self.offset).float().square().mean()


def config(precision: str | None, **more: Any) -> dict[str, Any]:
    chosen = {} if precision is None else {precision: {"enabled": True}}
    if precision == "fp16":
        chosen["fp16"]["loss_scale"] = 1.0
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    return {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, **chosen, **more}


def make() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.mark.parametrize("stage", [0, 3])
def test_tensors_that_the_configuration_names_train_in_fp32_as_in_torch(stage: int) -> None:
    chosen = {"data_types": {"keep_in_fp32_modules": ["norm.", "off*"], "buffer_dtype": "bf16"}}
    engine, *_ = zeromesh.initialize(model=make(), config=config("bf16", zero_optimization={"stage": stage}, **chosen))
    masters = {name: parameter.detach().clone() for name, parameter in make().named_parameters()}
    plain: Any = make().bfloat16()
    plain.norm.float()
    plain.offset = make().offset
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    for _ in range(3):
        loss = engine(x)
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(masters[name])
        expected = plain(x)
        plain.zero_grad()
        expected.backward()
        for name, parameter in plain.named_parameters():
            assert parameter.dtype is (torch.float32 if "norm" in name else torch.bfloat16)
            masters[name].add_(parameter.grad.float(), alpha=-0.1)
        assert torch.equal(loss, expected)
    state = engine.gathered_state_dict()
    assert engine.module.offset.dtype is torch.float32
    assert all(torch.equal(state[name], value.to(state[name].dtype)) for name, value in masters.items())


@pytest.mark.parametrize("precision", DTYPES)
def test_routers_that_transformers_keeps_in_fp32_compute_as_in_transformers(precision: str, tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    shape = transformers.Ernie4_5_MoeConfig(
        hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, moe_num_experts=8, moe_k=2, moe_layer_start_index=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Ernie4_5_MoeForCausalLM(shape)
    model.save_pretrained(tmp_path)
    plain = transformers.Ernie4_5_MoeForCausalLM.from_pretrained(tmp_path, dtype=DTYPES[precision]).train()
    engine, *_ = zeromesh.initialize(model=model.train(), config=config(precision, zero_optimization={"stage": 3}))
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    assert {name: p.dtype for name, p in model.named_parameters()} == {
        name: p.dtype for name, p in plain.named_parameters()
    }
    assert model.model.layers[0].mlp.gate.weight.dtype is torch.float32
    assert torch.equal(engine(input_ids=tokens, labels=tokens).loss, plain(input_ids=tokens, labels=tokens).loss)


def test_a_name_that_keeps_nothing_in_fp32_is_refused() -> None:
    for patterns, text in ((["nrom"], "'nrom' is in the name of no parameter"), (["("], "is not a pattern of names")):
        with pytest.raises(ValueError, match=text):
            zeromesh.initialize(
                model=make(), config=config("bf16", data_types={"keep_in_fp32_modules": patterns})
            )  # fmt: skip


def test_layers_that_stay_in_fp32_do_not_compute_in_float8(caplog: pytest.LogCaptureFixture) -> None:
    model: Any = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    chosen = {"float8": {"enabled": True, "skip": []}, "data_types": {"keep_in_fp32_modules": ["1.weight", "1.bias"]}}
    zeromesh.initialize(model=model, config=config("bf16", **chosen))
    assert [layer.weight.dtype is torch.float32 for layer in model] == [False, True, False]
    assert ["forward" in vars(layer) for layer in model] == [True, False, True]


class Memory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.float())[0].mean()


@pytest.mark.parametrize(("model", "path"), [(make, "norm"), (Memory, "inner")], ids=["norm", "recurrent"])
def test_a_dtype_that_does_not_fit_is_told_with_module_and_remedy(model: Any, path: str) -> None:
    engine, *_ = zeromesh.initialize(model=model(), config=config("bf16"))
    with pytest.raises(MismatchError, match=rf'{path} meets another dtype.*keep_in_fp32_modules = \["{path}"\]'):
        engine(torch.ones(2, 8))


def test_inputs_on_another_device_are_told_with_the_line_to_write() -> None:
    engine, *_ = zeromesh.initialize(model=make(), config=config(None))
    with pytest.raises(MismatchError, match=r"first computes on cpu.*batch = batch.to\(engine.device\)"):
        engine(torch.ones(2, 8, device="meta"))


def test_other_errors_of_a_forward_stay_as_they_are() -> None:
    engine, *_ = zeromesh.initialize(model=make(), config=config("bf16"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        engine(torch.ones(2, 7))
    assert not isinstance(caught.value, MismatchError)


def test_batches_of_the_engines_loader_are_on_its_device() -> None:
    data = [(torch.ones(2), {"label": number}) for number in range(4)]
    loader = Loader(data, Sampler(data, 1, 0, 7, False), 2, None, False, torch.device("meta"))
    assert [(x.device.type, y["label"].device.type) for x, y in loader] == [("meta", "meta")] * 2


def test_tensors_that_stay_in_fp32_have_it_before_weights_are_read_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    shape = transformers.Ernie4_5_MoeConfig(
        hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=64, moe_num_experts=8, moe_k=2, moe_layer_start_index=0,
    )  # fmt: skip
    monkeypatch.setattr(parameters, "_transformers_loads", lambda: True)
    with parameters.ZeroInit(config_dict_or_path=config("bf16", zero_optimization={"stage": 3})):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)  # as from_pretrained does
        model = transformers.Ernie4_5_MoeForCausalLM(shape)
        torch.set_default_dtype(before)
    gate = model.model.layers[0].mlp.gate
    assert gate.weight.dtype is gate.moe_statics.e_score_correction_bias.dtype is torch.float32
    assert model.model.layers[0].self_attn.q_proj.weight.dtype is torch.bfloat16


def test_each_name_of_a_tensor_may_keep_it_in_fp32() -> None:
    model: Any = make()
    model.twin, model.same = nn.Linear(16, 4), model.norm
    model.twin.weight = model.last.weight
    model.first = nn.ModuleDict({"_orig_mod": nn.ModuleDict({"base_layer": model.first})})  # as torch.compile and PEFT
    patterns = ("twin.weight", "same.", "first.weight", "_orig_mod.base_layer.bias")
    require_names(model, patterns, "key")
    chosen = dtypes(model, Precision(compute=torch.bfloat16, keep_fp32=patterns))
    wide = {name for name, tensor in model.named_parameters() if chosen[id(tensor)] is torch.float32}
    assert wide == {
        "first._orig_mod.base_layer.weight",
        "first._orig_mod.base_layer.bias",
        "norm.weight",
        "norm.bias",
        "last.weight",
    }


@pytest.mark.parametrize(("kept", "warns"), [([], True), (["norm."], False)])
def test_parameters_that_a_user_made_fp32_are_told_of(kept: list[str], warns: bool, caplog: Any) -> None:
    model = make().bfloat16()
    model.norm.float()
    zeromesh.initialize(model=model, config=config("bf16", data_types={"keep_in_fp32_modules": kept}))
    assert ("have fp32: norm.weight, norm.bias (2 in all)" in caplog.text) is warns
