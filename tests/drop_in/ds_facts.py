"""Facts about DeepSpeed's behaviour, asked of the module that is given: the real one's answers are in ds_facts.json.

To record a section with DeepSpeed 0.19.8:
``DS_ACCELERATOR=cpu torchrun --nproc-per-node 1 tests/drop_in/ds_facts.py SECTION``. Each in a process of its own,
since numbers that are not finite stay in DeepSpeed's buffers.
"""

import gc
import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

RECORDED = Path(__file__).with_name("ds_facts.json")
BUCKETS = {"reduce_bucket_size": 2000, "allgather_bucket_size": 2000, "stage3_prefetch_bucket_size": 2000}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).pow(2).mean() * 20


def batch(number: int = 0) -> torch.Tensor:
    return torch.linspace(-1, 1, 32).view(4, 8) + number


def raises(kinds: Any, ask: Callable[[], Any]) -> bool:
    try:
        ask()
    except kinds:
        return True
    return False


class Facts:
    def __init__(self, deepspeed: Any) -> None:
        self.deepspeed = deepspeed

    def engine(self, stage: int, net: Any = None, optimizer: Any = None, named: Any = None, **config: Any) -> Any:
        model = Net() if net is None else net
        written = {"train_micro_batch_size_per_gpu": 4, **config}
        if stage:
            written["zero_optimization"] = {"stage": stage, **BUCKETS, **written.get("zero_optimization", {})}
        if named is not None:
            written["optimizer"] = {"type": named, "params": {"lr": 0.01}}
        elif optimizer is None:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        parameters = list(model.parameters())
        return self.deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=parameters, config=written)[
            0
        ]

    def sums(self, engine: Any) -> list[float]:
        found = []
        for parameter in engine.module.parameters():
            with self.deepspeed.zero.GatheredParameters([parameter]):
                found.append(round(float(parameter.detach().double().sum()), 4))
        return found

    def gone(self, stage: int) -> list[float]:
        net = Net()
        for number in range(2):
            engine = self.engine(stage, net=net, named="Adam")
            engine.backward(engine(batch(number)))
            engine.step()
            if number == 0:
                del engine
                gc.collect()
        return self.sums(engine)

    def answers(self, section: str) -> Iterator[tuple[str, Any]]:
        for key, ask in getattr(self, f"of_{section}")():
            yield f"{section}: {key}", ask()

    def of_arguments(self) -> Iterator[tuple[str, Any]]:
        start = self.deepspeed.initialize
        named = {"optimizer": {"type": "Nothing", "params": {}}, "train_batch_size": 4}
        cases: dict[str, dict[str, Any]] = {
            "no model": {"config": {}},
            "no configuration": {"model": Net()},
            "two configurations": {"model": Net(), "config": {}, "args": type("Args", (), {"deepspeed_config": {}})()},
            "no such optimizer": {"model": Net(), "config": named, "model_parameters": Net().parameters()},
            "no size of a batch": {"model": Net(), "config": {"steps_per_print": 1}},
            "an optimizer's name": {"model": Net(), "config": {"train_batch_size": 4}, "optimizer": "Adam"},
        }
        for stage in (1, 2):
            config = {"train_batch_size": 4, "zero_optimization": {"stage": stage}}
            cases[f"no optimizer at ZeRO-{stage}"] = {"model": Net(), "config": config}
        for name, given in cases.items():
            yield name, lambda given=given: raises(AssertionError, lambda: start(**given))

        def without(call: str) -> bool:
            engine = start(model=Net(), config={"train_batch_size": 4})[0]
            loss = engine(batch())
            return raises(AssertionError, lambda: engine.step() if call == "step" else engine.backward(loss))

        for call in ("backward", "step"):
            yield f"{call} without an optimizer", lambda call=call: without(call)

    def of_optimizers(self) -> Iterator[tuple[str, Any]]:
        zero = "deepspeed.runtime.zero"
        homes = {
            "DeepSpeedZeroOptimizer": f"{zero}.stage_1_and_2",
            "DeepSpeedZeroOptimizer_Stage3": f"{zero}.stage3",
            "BF16_Optimizer": "deepspeed.runtime.bf16_optimizer",
            "FP16_Optimizer": "deepspeed.runtime.fp16.fused_optimizer",
            "FP16_UnfusedOptimizer": "deepspeed.runtime.fp16.unfused_optimizer",
            "FusedAdam": "deepspeed.ops.adam",
            "DeepSpeedCPUAdam": "deepspeed.ops.adam",
        }
        bf16: dict[str, Any] = {"bf16": {"enabled": True}}
        host = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
        kinds: dict[str, tuple[int, dict[str, Any]]] = {
            **{f"ZeRO-{stage}": (stage, {"named": "Adam"}) for stage in range(4)},
            **{f"ZeRO-{stage} in bf16": (stage, {"named": "Adam", **bf16}) for stage in range(4)},
            "a user's, in bf16": (0, bf16),
            "gradients in fp32": (1, {"named": "AdamW", **bf16, "data_types": {"grad_accum_dtype": "fp32"}}),
            "on the host": (2, {"named": "Adam", **host}),
        }

        def classes(stage: int, given: dict[str, Any]) -> list[str]:
            optimizer = self.engine(stage, **given).optimizer
            own = self.deepspeed.__name__
            types = {n: getattr(import_module(home.replace("deepspeed", own, 1)), n) for n, home in homes.items()}
            both = [optimizer] if getattr(optimizer, "optimizer", None) is None else [optimizer, optimizer.optimizer]
            # Here both are one object, so that only the wrapper's classes and the inner one's can be told together.
            return sorted({name for one in both for name, kind in types.items() if isinstance(one, kind)})

        for name, (stage, given) in kinds.items():
            yield name, lambda stage=stage, given=given: classes(stage, given)

        def untested() -> Any:
            net = Net()
            return self.engine(2, net=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))

        yield "untested", lambda: raises(AssertionError, untested)
        mixed = {**bf16, "data_types": {"grad_accum_dtype": "fp32"}}
        yield "mixed dtypes", lambda: raises(NotImplementedError, lambda: self.engine(0, named="Adam", **mixed))
        masters = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}
        yield "masters alone", lambda: raises(AssertionError, lambda: self.engine(2, named="Adam", **masters))
        error = import_module(f"{self.deepspeed.__name__}.runtime.zero.utils").ZeRORuntimeException
        yield "torch's on the host", lambda: raises(error, lambda: self.engine(2, **host))

    def of_training(self) -> Iterator[tuple[str, Any]]:
        for stage in range(4):

            def run(stage: int = stage, **config: Any) -> list[float]:
                options = {"zero_allow_untested_optimizer": True, **config}
                net = Net()
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                engine = self.engine(stage, net=net, optimizer=optimizer, **options)
                for number in range(2):
                    engine.backward(engine(batch(number)))
                    engine.step()
                return self.sums(engine)

            yield f"clipped at ZeRO-{stage} unless told otherwise", run
            yield f"not clipped at ZeRO-{stage}", lambda run=run: run(gradient_clipping=0.0)

        def again(stage: int) -> list[float]:
            net = Net()
            engines: list[Any] = []
            for number in range(2):
                for earlier in engines:
                    earlier.destroy()
                engines.append(self.engine(stage, net=net, named="Adam"))
                engines[-1].backward(engines[-1](batch(number)))
                engines[-1].step()
            return self.sums(engines[-1])

        for stage in range(4):
            yield f"initialized again at ZeRO-{stage}", lambda stage=stage: again(stage)

    def of_contexts(self) -> Iterator[tuple[str, Any]]:
        def nested(engine: Any) -> None:
            with engine.no_sync(), engine.no_sync():
                pass

        def step(engine: Any) -> None:
            with engine.no_sync():
                engine.backward(engine(batch()))
                engine.step()

        def enter(engine: Any) -> None:
            with engine.no_sync():
                pass

        for stage in range(4):
            for ask in (nested, step, enter):
                yield (
                    f"{ask.__name__} at ZeRO-{stage}",
                    lambda ask=ask, stage=stage: raises(AssertionError, lambda: ask(self.engine(stage))),
                )

        def counted(stage: int, context: str) -> list[int]:
            engine = self.engine(stage, gradient_accumulation_steps=1)
            with getattr(engine, context)():
                for number in range(3):
                    engine.backward(engine(batch(number)))
            engine.step()
            return [engine.micro_steps, engine.global_steps]

        yield "no_sync counts", lambda: counted(0, "no_sync")
        for stage in (1, 2, 3):
            yield f"coalesced at ZeRO-{stage}", lambda stage=stage: counted(stage, "coalesce_grad_reduction")
        for name, loss in (
            ("a float", 3.0),
            ("no scalar", torch.ones(3, requires_grad=True)),
            ("no graph", torch.ones(())),
        ):
            for method in ("backward", "scale"):
                yield (
                    f"{method} of {name}",
                    lambda method=method, loss=loss: raises(
                        AssertionError, lambda: getattr(self.engine(1), method)(loss)
                    ),
                )

    def of_parameters(self) -> Iterator[tuple[str, Any]]:
        zero, config = self.deepspeed.zero, {"train_batch_size": 4, "zero_optimization": {"stage": 3, **BUCKETS}}

        def modified() -> list[Any]:
            with zero.Init(config_dict_or_path=config):
                layer = nn.Linear(100, 100)
            found: list[Any] = [layer.weight.ds_status.name, list(layer.weight.ds_shape)]
            with zero.GatheredParameters(list(layer.parameters()), modifier_rank=0):
                found += [layer.weight.ds_status.name, list(layer.weight.shape)]
                nn.init.constant_(layer.weight, 0.5)
                nn.init.zeros_(layer.bias)
            found.append(layer.weight.ds_status.name)
            engine = self.engine(3, net=layer, named="Adam")
            return [*found, float(engine(torch.ones(1, 100)).sum())]

        yield "modified before initialize", modified

        def kept() -> bool:
            with zero.Init(config_dict_or_path=config):
                layer = nn.Linear(8, 6)
            with zero.GatheredParameters(layer.weight):
                layer.weight.data.fill_(9)
            with zero.GatheredParameters(layer.weight):
                return float(layer.weight.sum()) == 432.0

        yield "a change without modifier_rank is kept", kept

        def dtypes() -> list[str]:
            found = []
            for key in ("bf16", "fp16"):
                with zero.Init(config_dict_or_path={**config, key: {"enabled": True}}):
                    found.append(str(nn.Linear(8, 6).weight.dtype))
            return found

        yield "dtype of the configuration", dtypes

    def of_tiles(self) -> Iterator[tuple[str, Any]]:
        tiled = import_module(f"{self.deepspeed.__name__}.runtime.zero.tiling").TiledLinear
        whole = nn.Linear(8, 12)

        def parts(**given: Any) -> list[Any]:
            layer = tiled(8, 12, init_linear=whole, **given)
            made, x = layer(torch.ones(2, 8)), torch.ones(2, 8)
            same = torch.allclose(made if torch.is_tensor(made) else torch.cat(made, -1), whole(x), atol=1e-5)
            shapes = [[[*list(tile.weight.shape), tile.bias is not None] for tile in row] for row in layer.linears]
            return [same, torch.is_tensor(made), shapes, layer.in_parts, layer.out_parts]

        yield "of both", lambda: parts(in_splits=3, out_splits=5)
        yield "apart", lambda: parts(out_splits=2, combine_out_splits=False)
        for name in ("in_splits", "out_splits"):
            yield f"too many {name}", lambda name=name: raises(RuntimeError, lambda: tiled(8, 12, **{name: 100}))

    def of_data(self) -> Iterator[tuple[str, Any]]:
        def order(size: int, drop: bool, **given: Any) -> list[list[int]]:
            config = {"train_micro_batch_size_per_gpu": 4, "dataloader_drop_last": drop}
            loader = self.engine(0, named="Adam", **config).deepspeed_io(torch.arange(size), **given)
            return [batch.tolist() for _ in range(2) for batch in loader]

        for size, drop in ((10, False), (10, True), (8, False)):
            yield f"two passes over {size}, drop {drop}", lambda size=size, drop=drop: order(size, drop)
        yield "to evaluate", lambda: order(6, False, route="eval")
        own = torch.utils.data.SequentialSampler(range(6))
        yield "own sampler", lambda: order(6, False, data_sampler=own)

        def passed() -> list[list[int]]:
            net = Net()
            config = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam"}}
            loader = self.deepspeed.initialize(
                model=net, model_parameters=net.parameters(), training_data=[*range(10)], config=config
            )[2]
            return [batch.tolist() for _ in range(2) for batch in loader]

        yield "of initialize", passed

    def of_overflows(self) -> Iterator[tuple[str, Any]]:
        def skips(stage: int, config: dict[str, Any]) -> list[Any]:
            net = Net()
            engine = self.engine(stage, net=net, named="Adam", **config)
            answers = []
            for factor in (float("inf"), 1.0, float("inf")):
                before = self.sums(engine)
                engine.backward(engine(batch().to(next(net.parameters()).dtype)) * factor)
                engine.step()
                counts = [engine.was_step_applied(), engine.skipped_steps, engine.global_steps]
                norm = engine.get_global_grad_norm()
                answers.append([*counts, norm is not None and 0 < float(norm) < 1e30, self.sums(engine) != before])
            return answers

        bf16: dict[str, Any] = {"bf16": {"enabled": True}}
        kinds: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
            "fp16": ((0, 1, 2, 3), {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}),
            "fp16 with a fixed scale": ((0, 2), {"fp16": {"enabled": True, "loss_scale": 128}}),
            "bf16": ((0, 1, 2, 3), bf16),
            "bf16 without check": ((0, 1, 2, 3), {"bf16": {"enabled": True, "check_grad_overflow": False}}),
            "fp32": ((1, 2, 3), {}),
        }
        for name, (stages, config) in kinds.items():
            for stage in stages:
                yield f"{name} at ZeRO-{stage}", lambda stage=stage, config=config: skips(stage, config)

    def of_scales(self) -> Iterator[tuple[str, Any]]:
        def scales(stage: int) -> list[Any]:
            section = {"enabled": True, "initial_scale_power": 2, "loss_scale_window": 2, "hysteresis": 2}
            net = Net()
            engine = self.engine(stage, net=net, named="Adam", fp16=section)
            scaler = engine.optimizer.loss_scaler if stage else engine.optimizer.loss_scale_config
            answers = []
            for factor in (*[1.0] * 5, *[float("inf")] * (7 if stage == 0 else 3), *[1.0] * 4):
                engine.backward(engine(batch().half()) * factor)
                engine.step()
                answers.append([float(scaler.cur_scale), engine.skipped_steps])
            return [scaler.scale_window, answers]

        for stage in (0, 1, 2, 3):
            yield f"dynamic at ZeRO-{stage}", lambda stage=stage: scales(stage)

        def fixed(stage: int) -> list[Any]:
            optimizer = self.engine(stage, named="Adam", fp16={"enabled": True, "loss_scale": 128}).optimizer
            return [optimizer.loss_scaler.dynamic, optimizer.loss_scaler.cur_scale, optimizer.dynamic_loss_scale]

        for stage in (1, 2, 3):
            yield f"fixed at ZeRO-{stage}", lambda stage=stage: fixed(stage)

    def of_unmanaged(self) -> Iterator[tuple[str, Any]]:
        config: dict[str, Any] = {"managed_gradient_accumulation": False, "gradient_accumulation_steps": 2}

        def engine(stage: int) -> Any:
            options = {"zero_optimization": {"overlap_comm": False}, "gradient_clipping": 0.0}
            return self.engine(stage, named="Adam", **options, **config)

        def counts(stage: int) -> list[Any]:
            own, found = engine(stage), []
            for backwards in (1, 3):
                for number in range(backwards):
                    own.backward(own(batch(number)), scale_wrt_gas=backwards == 3)
                found.append(own.is_gradient_accumulation_boundary())
                own.step()
                found += [own.micro_steps, own.global_steps, own.global_samples]
            return [*found, self.sums(own)]

        for stage in (1, 2, 3):
            yield f"counts at ZeRO-{stage}", lambda stage=stage: counts(stage)
        yield (
            "set_gradient_accumulation_boundary",
            lambda: raises(AssertionError, lambda: engine(1).set_gradient_accumulation_boundary(True)),
        )
        yield (
            "coalesce_grad_reduction",
            lambda: raises(AssertionError, lambda: engine(1).coalesce_grad_reduction().__enter__()),
        )

    def of_formats(self) -> Iterator[tuple[str, Any]]:
        autocast = import_module(f"{self.deepspeed.__name__}.runtime.torch_autocast")

        def cast(stage: int, kind: str, **config: Any) -> list[Any]:
            net = Net()
            engine = self.engine(
                stage, net=net, named="Adam", torch_autocast={"enabled": True, "dtype": kind}, **config
            )
            first = net.first.weight
            loss = engine(batch().to(first.dtype))
            engine.backward(loss)
            engine.step()
            return [str(first.dtype), str(loss.dtype), str(autocast.get_comm_dtype(first))]

        bf16, fp16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 4}}
        for stage in (1, 3):
            for name, config in (("bf16", bf16), ("fp16", fp16)):
                kind = f"{name} under autocast at ZeRO-{stage}"
                yield kind, lambda stage=stage, name=name, config=config: cast(stage, name, **config)

        def low(stage: int) -> list[str]:
            section = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
            engine = self.engine(stage, named="Adam", bf16=section)
            engine.backward(engine(batch().bfloat16()))
            engine.step()
            states = engine.optimizer.optimizer.state.values()
            return sorted(
                {
                    str(value.dtype)
                    for state in states
                    for value in state.values()
                    if torch.is_tensor(value) and value.dim()
                }
            )

        for stage in (1, 2, 3):
            yield f"states in 16 bits at ZeRO-{stage}", lambda stage=stage: low(stage)
        yield "a sum in capitals", lambda: self.engine(1, named="Adam", gradient_allreduce_op="SUM").global_steps

    def of_states(self) -> Iterator[tuple[str, Any]]:
        adam = import_module(f"{self.deepspeed.__name__}.ops.adam")

        def dtypes(wide: bool) -> list[str]:
            parameter = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
            optimizer = adam.DeepSpeedCPUAdam([parameter], fp32_optimizer_states=wide)
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            return [
                str(parameter.dtype),
                *(str(optimizer.state[parameter][n].dtype) for n in ("exp_avg", "exp_avg_sq")),
            ]

        for wide in (True, False):
            yield f"fp32_optimizer_states={wide}", lambda wide=wide: dtypes(wide)


def _section(name: str) -> str:
    return name.partition(":")[0]


SECTIONS = sorted(name.removeprefix("of_") for name in dir(Facts) if name.startswith("of_"))

if __name__ == "__main__":
    import deepspeed

    deepspeed.init_distributed("gloo")
    chosen = sys.argv[1]
    facts = {n: answer for n, answer in json.loads(RECORDED.read_text()).items() if not n.startswith(f"{chosen}: ")}
    facts |= dict(Facts(deepspeed).answers(chosen))
    lines = [f" {json.dumps(name)}: {json.dumps(facts[name])}" for name in sorted(facts, key=_section)]
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
