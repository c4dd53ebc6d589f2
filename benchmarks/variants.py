"""What is compared: rows of one table, of which each makes a training step of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cases import ADAMW, Case
from zeromesh.architectures.decoder import Decoder

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


def split(case: Case, model: Decoder, device: torch.device, sequence: bool = False, stage: int = 1) -> tuple[Step, Any]:
    """Tensor parallelism over all ranks, which share the samples of all."""
    ranks = dist.get_world_size()
    further = {
        "mesh": {"tensor": ranks},
        "tensor_parallel": {"sequence": sequence},
        "train_micro_batch_size_per_gpu": case.batch * ranks,
    }
    return zeromesh(case, model, device, stage, further)


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


def deepspeed(case: Case, model: Decoder, device: torch.device, stage: int) -> tuple[Step, None]:
    """A stage of DeepSpeed, with buckets that suit the model. Runs in the environment that has it."""
    import deepspeed

    config = configuration(case, stage)
    config["steps_per_print"] = 1_000_000
    config["zero_optimization"] |= {
        "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET, "sub_group_size": BUCKET,
        "stage3_prefetch_bucket_size": BUCKET,
    }  # fmt: skip
    deepspeed.init_distributed(verbose=False)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine_step(engine), None


FAMILIES = ("floor", "torch", "ZeroMesh", "DeepSpeed")
VARIANTS: dict[str, Variant] = {
    "floor": Variant("floor", floor),
    "DDP": Variant("torch", partial(ddp, zero=False)),
    "DDP + ZeroRedundancyOptimizer": Variant("torch", partial(ddp, zero=True)),
    "FSDP2, no reshard (ZeRO-2)": Variant("torch", partial(fsdp2, reshard=False)),
    "FSDP2, reshard (ZeRO-3)": Variant("torch", partial(fsdp2, reshard=True)),
    "torch tensor parallel": Variant("torch", tensor_parallel, whole=True),
    **{f"ZeroMesh {stage}": Variant("ZeroMesh", partial(zeromesh, stage=stage)) for stage in range(4)},
    **{f"ZeroMesh {stage}, mpi": Variant("ZeroMesh", partial(zeromesh, stage=stage), "mpi") for stage in (0, 3)},
    **{
        f"ZeroMesh tensor parallel{how}{place}": Variant("ZeroMesh", partial(split, sequence=bool(how)), backend, True)
        for place, backend in (("", None), (", mpi", "mpi"))
        for how in ("", ", sequence")
    },
    **{f"DeepSpeed {stage}": Variant("DeepSpeed", partial(deepspeed, stage=stage)) for stage in range(4)},
}
