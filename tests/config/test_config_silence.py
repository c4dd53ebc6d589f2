"""Settings that would be dropped, changed or contradicted without a word are named, or refused."""

import logging
from typing import Any

import pytest
import torch
from torch import nn

import zeromesh
from harness import run_ranks
from zeromesh import Settings
from zeromesh.config.errors import ConfigError


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4, sparse=True)
        self.tied = nn.Linear(4, 8, bias=False)
        self.tied.weight = self.words.weight
        self.bags = nn.ModuleList([nn.EmbeddingBag(8, 4, sparse=True)])
        self.bags[0].weight.register_hook(lambda gradient: gradient)
        self.plain = nn.Embedding(8, 4)


def test_embeddings_whose_gradients_are_dense_in_spite_of_sparse_are_named(caplog: pytest.LogCaptureFixture) -> None:
    zeromesh.initialize(model=Tables(), config=ADAM)[0].destroy()
    found = [line for line in warnings(caplog) if "sparse=True" in line]
    assert [line.split(" are dense")[0] for line in found] == ["gradients of words", "gradients of bags.0"]
    assert "its weight is used elsewhere, too" in found[0]
    assert "its weight has hooks" in found[1]
    model = Tables()
    with pytest.raises(ValueError, match="SparseAdam.*sparse gradients alone; use Adam"):
        zeromesh.initialize(model=model, optimizer=torch.optim.SparseAdam([model.words.weight]), config={})


ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}


pytestmark = pytest.mark.usefixtures("one_rank")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_initialize_names_what_auto_has_become(caplog: pytest.LogCaptureFixture) -> None:
    config: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto"},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "betas": "auto", "weight_decay": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    zeromesh.initialize(model=nn.Linear(2, 1), config=config)
    (message,) = warnings(caplog)
    assert "\n" not in message
    for line in (
        "train_batch_size = 4",
        "gradient_accumulation_steps = 1",
        "gradient_clipping = 0.0",
        "fp16.enabled = false",
        "optimizer.params.betas = [0.9, 0.999]",
        "scheduler.params.warmup_num_steps = the default of WarmupLR",
    ):
        assert f" {line}" in message
    assert "reduce_bucket_size" not in message, "it has no effect, whatever it is"
    assert "micro_batch_size_per_gpu" not in message


UNFILLED: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, "optimizer.params.lr"),
    ({"bf16": {"enabled": "auto"}}, "bf16.enabled"),
    ({"fp16": {"enabled": "auto"}}, "fp16.enabled"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}}, "scheduler.params.warmup_max_lr"),
]


@pytest.mark.parametrize(("config", "path"), UNFILLED)
def test_initialize_refuses_what_decides_the_result_and_is_auto(config: dict[str, Any], path: str) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=f'{path} = "auto": write .* A Trainer fills in') as caught:
        zeromesh.initialize(model=model, config=ADAM | config)
    assert len(caught.value.problems) == 1
    assert type(model.weight) is nn.Parameter


def test_auto_decides_nothing_where_the_user_passes_the_object_itself() -> None:
    model = nn.Linear(2, 1)
    config = {"optimizer": UNFILLED[0][0]["optimizer"], "scheduler": UNFILLED[3][0]["scheduler"]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    _, used, _, schedule = zeromesh.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    assert (used.param_groups[0]["lr"], schedule) == (0.5, scheduler)


def test_nothing_is_said_where_nothing_is_auto(caplog: pytest.LogCaptureFixture) -> None:
    zeromesh.initialize(model=nn.Linear(2, 1), config=ADAM)
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("sizes", "listed"),
    [
        ({}, ["optimizer.type", "optimizer.params.lr"]),
        (
            {"train_batch_size": 4},
            [
                "train_batch_size",
                "train_micro_batch_size_per_gpu",
                "gradient_accumulation_steps",
                "optimizer.type",
                "optimizer.params.lr",
            ],
        ),
    ],
)
def test_settings_are_listed_once_and_no_size_of_batches_that_nobody_set(
    sizes: dict[str, int], listed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "zeromesh")
    zeromesh.initialize(model=nn.Linear(2, 1), config=ADAM | sizes)
    (message,) = [text for record in caplog.records if "settings you changed:" in (text := record.getMessage())]
    assert [line.split(" = ")[0].strip() for line in message.splitlines()[1:]] == listed


ON: list[dict[str, Any]] = [
    {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
    {"compression_training": {"layer_reduction": {"enabled": True, "keep_number_layer": 5}}},
    {"compression_training": {"enabled": False, "parts": [{"enabled": "yes"}]}},
    {"sparse_attention": {"mode": "fixed", "block": 16}},
    {"sparse_attention": {"enabled": True}},
    {"sparse_attention": {}},  # DeepSpeed has no switch in it, and takes the mode "fixed"
    {"sparse_attention": {"enabled": False, "mode": "fixed"}},
    {"zero_optimization": {"stage": 2, "zeropp_loco_param": {"err_beta": 0.8}}},
    {"amp": {"enabled": True}},
    {"vocabulary_size": 50257},
    {"pipeline": {"partition": "time"}},
    {"run": {"roll_back": 0}},  # to the last checkpoint
]

OFF: list[dict[str, Any]] = [
    {"compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}}},
    {"compression_training": {}},
    {"sparse_attention": None},
    {"amp": {"opt_level": "O1"}},
    {"elasticity": {"enabled": False}},
    {"vocabulary_size": None},
]


@pytest.mark.parametrize("document", ON, ids=str)
def test_unsupported_sections_that_are_switched_on_are_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is not available; "):
        Settings.load(document)


@pytest.mark.parametrize("document", OFF, ids=str)
def test_unsupported_sections_that_are_switched_off_are_accepted(
    document: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "zeromesh"):
        Settings.load(document)
    assert "it is switched off" in caplog.text


def test_a_misplaced_size_of_the_vocabulary_is_told_where_it_belongs() -> None:
    with pytest.raises(ConfigError, match=r"set data\.vocabulary_size or model\.vocab_size for zeromesh train"):
        Settings.load({"vocabulary_size": 50257})


class Any2d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, *given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        return self.weight * sum(value.sum() for value in (*given, *named.values()))


FED: list[tuple[list[tuple[int, ...]], int | None]] = [
    ([(4, 3), (4, 3)], 4),
    ([(1, 3), (1, 3)], 1),
    ([(16, 3), (16, 3)], None),
    ([(16, 3), (4, 3), (16, 3), (4, 3)], None),  # the last of a pass
    ([(16, 3), (4, 3), (5, 3)], 5),
    ([(32, 3)], 32),
    ([(7, 16, 3)], None),  # the batch is second
    ([(32, 16)], 32),  # here it is not
    ([(4,), (4,)], None),  # one sample, or packed tokens
    ([()], None),
]


@pytest.mark.parametrize(("shapes", "told"), FED)
def test_a_fed_micro_batch_is_compared_with_the_configured_one(shapes, told, caplog) -> None:
    engine = zeromesh.initialize(model=Any2d(), config={**ADAM, "train_micro_batch_size_per_gpu": 16})[0]
    engine.eval()
    engine(torch.ones(99, 3))
    engine.train()
    with torch.no_grad():
        engine(torch.ones(99, 3))
    engine(torch.ones(99, 3), torch.ones(98, 3))  # which of the two, cannot be told
    engine(x=torch.ones(16, 3), mask=torch.ones(9, 9))
    for shape in shapes:
        engine(torch.ones(shape))
    if told is None:
        assert warnings(caplog) == []
    else:
        (message,) = warnings(caplog)
        assert f"is given {told} sample{'s' * (told > 1)} at a time" in message
        assert "train_micro_batch_size_per_gpu is 16. Gradients are right" in message
        assert f"feed 16, or set train_micro_batch_size_per_gpu to {told}" in message


def test_a_first_micro_batch_that_is_smaller_is_told_of_at_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = zeromesh.initialize(model=Any2d(), config={**ADAM, "train_micro_batch_size_per_gpu": 16})[0]
    engine(torch.ones(4, 3))
    engine(torch.ones(5, 3))
    (message,) = warnings(caplog)
    assert "is given 4 samples at a time" in message


def test_without_configured_sizes_there_is_nothing_to_compare(caplog: pytest.LogCaptureFixture) -> None:
    engine = zeromesh.initialize(model=Any2d(), config=ADAM)[0]
    engine(torch.ones(99, 3))
    assert warnings(caplog) == []


def uneven(sizes: tuple[int, int], operation: str | None) -> list[str]:
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeromesh").addHandler(handler)
    more = {} if operation is None else {"gradient_allreduce_op": operation}
    engine = zeromesh.initialize(
        model=Any2d(), config={**ADAM, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, **more}
    )[0]
    for size in (max(sizes), sizes[engine.mesh.rank]) * 2:
        engine.backward(engine(torch.ones(size, 3)).sum())
        engine.step()
    logging.getLogger("zeromesh").removeHandler(handler)
    return found


@pytest.mark.parametrize(
    ("sizes", "operation", "told"), [((4, 2), None, 1), ((2, 4), None, 1), ((4, 4), None, 0), ((4, 2), "sum", 0)]
)
def test_a_smaller_micro_batch_on_one_rank_is_told_of_once(
    sizes: tuple[int, int], operation: str | None, told: int
) -> None:
    first, second = run_ranks(uneven, 2, sizes, operation)
    assert len(first) == told
    assert second == []
    if told:
        small = sizes.index(2)
        assert f"rank {small} computed on 3 samples at a time, and rank {1 - small} on 4" in first[0]
        assert "weighs 1.33 times as much" in first[0]


def staged() -> list[str]:
    found: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zeromesh").addHandler(handler)
    model = zeromesh.pipe.PipelineModule([nn.Linear(2, 2), nn.Linear(2, 1)], 2, loss_fn=lambda out, labels: out.sum())
    engine = zeromesh.initialize(model=model, config={**ADAM, "train_micro_batch_size_per_gpu": 2})[0]
    engine.train_batch(iter([(torch.ones(3, 2), torch.ones(3))]))
    return found


@pytest.mark.full
def test_stages_compare_it_too() -> None:
    first, second = run_ranks(staged, 2)
    assert len(first) == 1
    assert "is given 3 samples at a time" in first[0]
    assert second == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"fp32_allreduce": True}, "fp32_allreduce"),  # a key that has gone, which `load` explains
        ({"zero_optimization": {"stage": 2, "offload_optimiser": {}}}, "offload_optimiser"),
        ({"gradient_clipping": -1.0}, "gradient_clipping"),
    ],
)
def test_settings_made_without_load_refuse_the_same_keys(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Settings(**arguments)


def test_an_offloaded_share_counts_only_where_something_is_offloaded() -> None:
    section = {"device": "none", "ratio": 0.25}
    assert (
        Settings.load({"zero_optimization": {"stage": 2, "offload_optimizer": section}}).resolve(2).row.offloaded == 1
    )
    section["device"] = "cpu"
    on_host = Settings.load({"zero_optimization": {"stage": 2, "offload_optimizer": section}}).resolve(2)
    assert on_host.row.offloaded == 0.25
