"""What is compared: rows of one table, of which each makes a training step of a model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cases import ADAMW, Case
from zeromesh.apps.train.architectures.decoder import Decoder, rotary_table

Step = Callable[[torch.Tensor], torch.Tensor]
"""From this rank's tokens to its loss; with what the variant does between two batches."""

BUCKET = 4_000_000
"""Elements. DeepSpeed's own value, 500 million, reserves 2 GB whatever the model; this one suits the models here."""


@dataclass(frozen=True)
class Variant:
    """One row.

    Attributes:
        family: whose work it is; floor, torch, ZeroMesh or DeepSpeed.
        make: from a case, its model in fp32 and a device to the step, and the engine that has spans, if it has one.
        backend: what it runs on, whatever the others do; None is what they run on.
        whole: whether every rank is given the samples of all ranks, as it has a part of the model.
    """

    family: str
    make: Callable[[Case, Decoder, torch.device], tuple[Step, Any]]
    backend: str | None = None
    whole: bool = False


def floor(case: Case, model: Decoder, device: torch.device) -> tuple[Step, None]:
    """Forward and backward of this rank, and nothing else."""
    model.to(device, case.dtype)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss

    return step, None


def torch_step(case: Case, model: nn.Module, device: torch.device, optimizer: Any, autocast: bool) -> Step:
    """A training loop of torch."""

    def step(tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
            loss: torch.Tensor = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        if case.clip:
            clip([group["params"] for group in optimizer.param_groups], case.clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def clip(groups: list[list[torch.Tensor]], limit: float) -> None:
    """torch's ``clip_grad_norm_``, which takes parameters of one kind only: here each group is of one."""
    norms = [nn.utils.get_total_norm([parameter.grad for parameter in group]) for group in groups]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    norm = torch.linalg.vector_norm(torch.stack(whole))
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, limit, norm)


def ddp(case: Case, model: Decoder, device: torch.device, zero: bool) -> tuple[Step, None]:
    """DistributedDataParallel; in 16 bits by autocast over fp32 parameters, which is how it is used."""
    wrapped = nn.parallel.DistributedDataParallel(model.to(device), gradient_as_bucket_view=True)
    if zero:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer: Any = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, fused=True, **ADAMW)
    else:
        optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True, **ADAMW)
    return torch_step(case, wrapped, device, optimizer, autocast=case.bf16), None


def fsdp2(case: Case, model: Decoder, device: torch.device, reshard: bool, replicas: int = 1) -> tuple[Step, None]:
    """fully_shard on each block and the root; with several replicas it is HSDP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model.to(device)
    shards = dist.get_world_size() // replicas
    names = ("replicate", "shard")
    mesh = init_device_mesh(device.type, (replicas, shards), mesh_dim_names=names) if replicas > 1 else None
    narrow = torch.bfloat16 if case.bf16 else None
    policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=narrow)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    return torch_step(case, model, device, optimizer, autocast=False), None


def tensor_parallel(case: Case, model: Decoder, device: torch.device) -> tuple[Step, None]:
    """torch's plan for a transformer: columns and rows, the embedding by rows, and a loss of logits that stay split."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model.to(device)
    for block in model.blocks:
        columns = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
        plan: Any = {name: ColwiseParallel() for name in columns}
        plan |= {"attention.output": RowwiseParallel(), "mlp.down": RowwiseParallel()}
        parallelize_module(block, mesh, plan)
        attention: Any = block.attention
        attention.heads //= mesh.size()
        attention.kv_heads //= mesh.size()
    ends: Any = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, ends)
    # AdamW cannot take norms, which are plain tensors, in one group with what is split.
    parts, norms = ([p for p in model.parameters() if isinstance(p, DTensor) is cut] for cut in (True, False))
    optimizer = torch.optim.AdamW([{"params": parts}, {"params": norms}], fused=True, **ADAMW)
    step = torch_step(case, model, device, optimizer, autocast=case.bf16)

    def split_loss(tokens: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            loss: Any = step(tokens)
        return loss.full_tensor()

    return split_loss, None


def split(
    case: Case, model: Decoder, device: torch.device, sequence: bool = False, stage: int = 1, known: bool = True
) -> tuple[Step, Any]:
    """Tensor parallelism over all ranks, which share the samples of all."""
    ranks = dist.get_world_size()
    for module in () if known else model.modules():
        kind = type(module)
        if not kind.__module__.startswith("torch."):
            module.__class__ = type(kind.__name__, (kind,), {"__module__": "somebody"})  # the same code, of a user
    further = {
        "mesh": {"tensor": ranks},
        "tensor_parallel": {"sequence": sequence},
        "train_micro_batch_size_per_gpu": case.batch * ranks,
    }
    return zeromesh(case, model, device, stage, further)


def stages(case: Case, model: Decoder, device: torch.device, schedule: str) -> tuple[Step, Any]:
    """A stage on each rank; the samples of all ranks are micro-batches of one."""
    from zeromesh import initialize

    ranks = dist.get_world_size()
    further = {
        "mesh": {"pipeline": ranks},
        "pipeline": {"schedule": schedule},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": case.batch * ranks,
    }
    engine, *_ = initialize(model=model, config={**configuration(case, 0), **further})

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine.train_batch((one[:, :-1], one[:, 1:]) for one in tokens.split(1))
        return loss

    return step, engine


class Part(nn.Module):
    """Some blocks of a decoder, with what is before or after them; under autocast where that is asked for."""

    def __init__(self, model: Decoder, first: int, last: int, autocast: bool) -> None:
        super().__init__()
        begins, ends = first == 0, last == len(model.blocks)
        self.embedding = model.embedding if begins else None
        self.blocks = nn.ModuleList(model.blocks[first:last])
        self.norm, self.head = (model.norm, model.head) if ends else (None, None)
        self.sizes, self.autocast = model.sizes, autocast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens or an activation to an activation or logits."""
        positions = torch.arange(x.shape[1], device=x.device)[None]
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            if self.embedding is not None:
                x = self.embedding(x)
            rotary = rotary_table(positions[:, None], self.sizes.head_width, self.sizes.shape.rope_theta)
            for block in self.blocks:
                x = block(x, rotary, None)
            return x if self.head is None or self.norm is None else self.head(self.norm(x))


def parts(model: Decoder, autocast: bool) -> list[Part]:
    """A decoder's stages of whole blocks, which balance operations with those of the head."""
    from zeromesh.parallel.pipeline.runtime.cut import examine
    from zeromesh.parallel.pipeline.schedule.partition import starts_of

    starts = starts_of("best", examine(model, []), dist.get_world_size())
    return [Part(model, *ends, autocast) for ends in pairwise([*starts, len(model.blocks)])]


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As the decoder computes it."""
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def torch_pipeline(case: Case, model: Decoder, device: torch.device, schedule: str) -> tuple[Step, None]:
    """torch's stages; in 16 bits by autocast over fp32 parameters, as DDP."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = parts(model, case.bf16)[rank].to(device)
    optimizer = torch.optim.AdamW(part.parameters(), **ADAMW, fused=True)  # type: ignore[arg-type]
    stage, samples = PipelineStage(part, rank, ranks, device), case.batch * ranks
    # Of one stage per rank, what is interleaved is ZB-H1.
    runner: Any = (
        Schedule1F1B(stage, samples, loss_of)
        if schedule == "1f1b"
        else ScheduleInterleavedZeroBubble([stage], samples, loss_of)
    )

    def step(tokens: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        inputs = [tokens[:, :-1]] if rank == 0 else []
        labels = {"target": tokens[:, 1:]} if rank == ranks - 1 else {}
        runner.step(*inputs, **labels, losses=losses)
        if case.clip:
            squares = torch.stack([parameter.grad.square().sum() for parameter in part.parameters()]).sum()
            dist.all_reduce(squares)
            nn.utils.clip_grads_with_norm_(part.parameters(), case.clip, squares.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean().detach() if losses else torch.zeros((), device=device)
        dist.broadcast(mean, ranks - 1)
        return mean

    return step, None


def deepspeed_pipeline(case: Case, model: Decoder, device: torch.device) -> tuple[Step, None]:
    """DeepSpeed's PipelineModule, of which each rank's stage is one layer. Runs in the environment that has it."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed(verbose=False)
    ranks = dist.get_world_size()
    module = PipelineModule(parts(model, False), num_stages=ranks, loss_fn=loss_of, partition_method="uniform")
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": case.batch * ranks}
    config = {**configuration(case, 0), **sizes, "steps_per_print": 1_000_000}
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine.train_batch((one[:, :-1], one[:, 1:]) for one in tokens.split(1))
        return loss

    return step, None


def engine_step(engine: Any) -> Step:
    """The loop that ZeroMesh and DeepSpeed share."""

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
        return loss

    return step


def configuration(case: Case, stage: int) -> dict[str, Any]:
    """For both; the clipping is said, as DeepSpeed's default is 1."""
    return {
        "train_micro_batch_size_per_gpu": case.batch,
        "gradient_clipping": case.clip,
        "bf16": {"enabled": case.bf16},
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},  # type: ignore[call-overload]
    }


def zeromesh(
    case: Case, model: Decoder, device: torch.device, stage: int, further: Mapping[str, Any] | None = None
) -> tuple[Step, Any]:
    """A row of the placement table, with ``further`` keys in the configuration."""
    from zeromesh import initialize

    engine, *_ = initialize(model=model, config={**configuration(case, stage), **(further or {})})
    return engine_step(engine), engine


def off_device(
    case: Case, model: Decoder, device: torch.device, stage: int, places: Mapping[str, Any]
) -> tuple[Step, Any]:
    """A row of ZeroMesh of whose states some rest on the host."""
    return zeromesh(case, model, device, stage, {"zero_optimization": {"stage": stage, **places}})


def deepspeed(
    case: Case, model: Decoder, device: torch.device, stage: int, places: Mapping[str, Any] | None = None
) -> tuple[Step, None]:
    """A stage of DeepSpeed, with buckets that suit the model. Runs in the environment that has it."""
    import deepspeed

    config = configuration(case, stage)
    config["steps_per_print"] = 1_000_000
    config["zero_optimization"] |= {
        "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET, "sub_group_size": BUCKET,
        "stage3_prefetch_bucket_size": BUCKET, **(places or {}),
    }  # fmt: skip
    deepspeed.init_distributed(verbose=False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine_step(engine), None


OPTIMIZER_ON_HOST: dict[str, Any] = {"offload_optimizer": {"device": "cpu"}}
OPTIMIZER_ON_NVME: dict[str, Any] = {"offload_optimizer": {"device": "nvme", "nvme_path": tempfile.gettempdir()}}
ALL_ON_HOST: dict[str, Any] = {**OPTIMIZER_ON_HOST, "offload_param": {"device": "cpu"}}

FAMILIES = ("floor", "torch", "ZeroMesh", "DeepSpeed")
VARIANTS: dict[str, Variant] = {
    "floor": Variant("floor", floor),
    "DDP": Variant("torch", partial(ddp, zero=False)),
    "DDP + ZeroRedundancyOptimizer": Variant("torch", partial(ddp, zero=True)),
    "FSDP2, no reshard (ZeRO-2)": Variant("torch", partial(fsdp2, reshard=False)),
    "FSDP2, reshard (ZeRO-3)": Variant("torch", partial(fsdp2, reshard=True)),
    "torch pipeline, 1f1b": Variant("torch", partial(torch_pipeline, schedule="1f1b"), whole=True),
    "torch pipeline, zb-h1": Variant("torch", partial(torch_pipeline, schedule="zb-h1"), whole=True),
    "torch tensor parallel": Variant("torch", tensor_parallel, whole=True),
    **{f"ZeroMesh {stage}": Variant("ZeroMesh", partial(zeromesh, stage=stage)) for stage in range(4)},
    **{
        f"ZeroMesh {stage}, {where}": Variant("ZeroMesh", partial(off_device, stage=stage, places=places))
        for stage, where, places in (
            (2, "host", OPTIMIZER_ON_HOST),
            (3, "host", OPTIMIZER_ON_HOST),
            (3, "all on host", ALL_ON_HOST),
            (3, "nvme", OPTIMIZER_ON_NVME),
        )
    },
    **{f"ZeroMesh {stage}, mpi": Variant("ZeroMesh", partial(zeromesh, stage=stage), "mpi") for stage in (0, 3)},
    **{
        f"ZeroMesh tensor parallel{how}{place}": Variant("ZeroMesh", partial(split, sequence=bool(how)), backend, True)
        for place, backend in (("", None), (", mpi", "mpi"))
        for how in ("", ", sequence")
    },
    "ZeroMesh tensor parallel, traced": Variant("ZeroMesh", partial(split, known=False), whole=True),
    **{
        f"ZeroMesh pipeline, {name}{place}": Variant("ZeroMesh", partial(stages, schedule=name), backend, True)
        for place, backend in (("", None), (", mpi", "mpi"))
        for name in ("1f1b", "zb-h1")
    },
    **{f"DeepSpeed {stage}": Variant("DeepSpeed", partial(deepspeed, stage=stage)) for stage in range(4)},
    "DeepSpeed 2, CPU offload": Variant("DeepSpeed", partial(deepspeed, stage=2, places=OPTIMIZER_ON_HOST)),
    "DeepSpeed pipeline": Variant("DeepSpeed", deepspeed_pipeline, whole=True),
}
