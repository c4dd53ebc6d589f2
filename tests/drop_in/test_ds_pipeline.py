"""``deepspeed.pipe`` of the drop-in: batches at the ends only, evaluation, errors, and DeepSpeed 0.19.8's schedules."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zeromesh.deepspeed as ds
from harness import on_ranks
from run import plain_step
from zeromesh.config.curriculum_section import Curriculum
from zeromesh.engine.curriculum import length_at

deepspeed: Any = ds

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}


def make_layers() -> list[nn.Module]:
    torch.manual_seed(4)
    return [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 4)]


def data(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(3)
    return [(torch.randn(2, 4, generator=drawn), torch.randn(2, 4, generator=drawn)) for _ in range(count)]


def start(loss_fn: Any, stages: int) -> Any:
    model = deepspeed.pipe.PipelineModule(make_layers(), num_stages=stages, loss_fn=loss_fn)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)[0]


def at_ends(engine: Any, given: list[Any]) -> Iterator[Any] | None:
    return iter(given) if engine.is_first_stage() or engine.is_last_stage() else None


def check_training() -> None:
    engine, plain = start(F.mse_loss, dist.get_world_size()), nn.Sequential(*make_layers())
    optimizer = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(2):
        given = data(4)[2 * step : 2 * step + 2]
        want = torch.stack([F.mse_loss(plain(x), y) for x, y in given]).mean()
        plain_step(optimizer, want)
        torch.testing.assert_close(engine.train_batch(at_ends(engine, given)), want.detach())
        assert torch.equal(engine.agg_train_loss * 2, engine.total_loss) if engine.is_last_stage() else True
    outputs = [plain(x).detach() for x, _ in given]
    losses = torch.stack([F.mse_loss(plain(x), y) for x, y in given]).detach()
    found, logits = engine.eval_batch(at_ends(engine, given), return_logits=True)
    torch.testing.assert_close(found, losses.mean())
    last = engine.is_last_stage()
    torch.testing.assert_close(logits, outputs[-1] if last else None)
    each = engine.eval_batch(at_ends(engine, given), compute_loss=False, reduce_output=None)
    torch.testing.assert_close(each, outputs if last else None)
    assert (engine.eval_batch(iter(given), bcast_loss=False) is None) == (not last)
    with pytest.raises(NotImplementedError, match="reduce_output is 'sum'"):
        engine.eval_batch(iter(given), reduce_output="sum")
    error = deepspeed.runtime.pipe.engine.PipelineError
    for call in (lambda: engine(given[0][0]), lambda: engine.backward(losses), engine.step):
        with pytest.raises(error, match="of its own: call engine.train_batch"):
            call()
    grid = engine.grid
    assert (grid.get_stage_id(), engine.mpu, engine.is_pipe_parallel) == (engine.stage_id, grid, True)
    assert (engine.prev_stage, engine.next_stage) == (engine.stage_id - 1, engine.stage_id + 1)
    with pytest.raises(StopIteration):
        engine.train_batch(at_ends(engine, given[:1]))


@pytest.mark.full
@on_ranks(3)
def test_a_middle_stage_needs_no_batches() -> None:
    check_training()


@on_ranks(2)
def test_a_pipeline_trains_and_evaluates_as_plain_torch() -> None:
    check_training()


@on_ranks(2)
def test_a_pipeline_without_a_loss_is_evaluated_to_its_outputs(tmp_path: Path) -> None:
    model = deepspeed.pipe.PipelineModule(make_layers(), num_stages=2)
    parts, rank = model.parts, model.stage_id
    model.save_state_dict(str(tmp_path))
    dist.barrier()
    spec = deepspeed.pipe.LayerSpec
    model = deepspeed.pipe.PipelineModule(
        [spec(nn.Linear, 4, 6), nn.Tanh(), spec(nn.Linear, 6, 6), spec(nn.Linear, 6, 4)], num_stages=2
    )
    model.load_state_dir(str(tmp_path))
    assert [type(one).__name__ for one in model.forward_funcs] == model.kinds[parts[rank] : parts[rank + 1]]
    engine = deepspeed.initialize(model=model, config=CONFIG)[0]
    assert (model.parts, engine.is_data_parallel) == (parts, False)
    given = [(x, 0) for x, _ in data(2)]  # labels that mean nothing
    plain = nn.Sequential(*make_layers())
    want = torch.stack([plain(x) for x, _ in given]).mean(0).detach()
    torch.testing.assert_close(engine.eval_batch(iter(given) if rank == 0 else None), want)


@pytest.mark.full
@on_ranks(4)
def test_outputs_and_losses_are_means_over_replicas() -> None:
    engine, plain = start(F.mse_loss, 2), nn.Sequential(*make_layers())
    given = data(4)
    own = given[2 * engine.data_rank :][:2]
    outputs = engine.eval_batch(at_ends(engine, own), compute_loss=False)
    means = [torch.stack([plain(x) for x, _ in given[start : start + 2]]).mean(0) for start in (0, 2)]
    torch.testing.assert_close(outputs, torch.stack(means).mean(0).detach())
    loss = engine.eval_batch(at_ends(engine, own))
    torch.testing.assert_close(loss, torch.stack([F.mse_loss(plain(x), y) for x, y in given]).mean().detach())


LETTERS = {
    "L": "LoadMicroBatch", "F": "ForwardPass", "B": "BackwardPass", "s": "SendActivation", "r": "RecvActivation",
    "S": "SendGrad", "R": "RecvGrad", "t": "ReduceTiedGrads", "g": "ReduceGrads", "o": "OptimizerStep",
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "given", "steps"),
    [
        # As DeepSpeed 0.19.8 answers for (micro-batches, stages, stage); a digit is the buffer.
        ("Train", (1, 1, 0), "L0F0 B0tgo"),
        ("Train", (4, 2, 0), "L0F0 s0 L1F1 R0s1B0 L0F0 R1s0B1 L1F1 R0s1B0 - R1B1tgo"),
        ("Train", (4, 2, 1), "- r0L0F0 B0 S0r1L1F1 B1 S1r0L0F0 B0 S0r1L1F1 B1 S1tgo"),
        ("Train", (3, 3, 1), "- r0F0 s0 r1F1 R0s1B0 S0r0F0 R1s0B1 S1 R0B0 S0tgo"),
        ("Inference", (3, 3, 0), "L0F0 L1s0F1 L0s1F0 s0 -"),
        ("Inference", (3, 3, 1), "- r0F0 r1s0F1 r0s1F0 s0"),
        ("Inference", (3, 3, 2), "- - L0r0F0 L1r1F1 L0r0F0"),
        ("DataParallel", (2, 2, 0), "L0F0B0 L0F0B0go"),
    ],
)
def test_schedules_have_deepspeeds_instructions(kind: str, given: tuple[int, int, int], steps: str) -> None:
    schedule = deepspeed.runtime.pipe.schedule
    made = getattr(schedule, f"{kind}Schedule")(*given)
    letters = {getattr(schedule, name): letter for letter, name in LETTERS.items()}
    found = ["".join(f"{letters[type(one)]}{one.kwargs.get('buffer_id', '')}" for one in step) for step in made]
    assert " ".join(step or "-" for step in found) == steps
    assert repr(schedule.ForwardPass(buffer_id=3)) == "ForwardPass(buffer_id=3)"
    assert made.num_pipe_buffers() == (1 if kind == "DataParallel" else 2)


BOUNDS = {"curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 100}


@pytest.mark.parametrize(
    ("kind", "course", "difficulties"),
    [
        # As DeepSpeed 0.19.8 answers at these steps.
        ("fixed_linear", {"total_curriculum_step": 20, "difficulty_step": 8}, [8, 8, 16, 32, 48, 96, 100]),
        ("fixed_linear", {"total_curriculum_step": 7, "difficulty_step": 3}, [9, 21, 33, 84, 100, 100, 100]),
        ("fixed_root", {"total_curriculum_step": 15, "difficulty_step": 1, "root_degree": 3},
         [8, 45, 55, 75, 88, 100, 100]),
        ("fixed_discrete", {"difficulty": [8, 16, 100], "max_step": [3, 7]}, [8, 8, 8, 16, 100, 100, 100]),
    ],
)  # fmt: skip
def test_curricula_have_deepspeeds_difficulties(kind: str, course: dict[str, Any], difficulties: list[int]) -> None:
    settings = Curriculum(**BOUNDS, schedule_type=kind, schedule_config=course)
    assert [length_at(settings, step) for step in (0, 1, 2, 6, 10, 20, 50)] == difficulties
