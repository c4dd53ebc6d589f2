"""Ranks of the real Megatron-Core: write a distributed checkpoint of a small GPT. Run by an environment that has it.

``megatron_writer.py FOLDER PRECISION`` under torchrun, on two CPU ranks that split the model by tensor parallelism. It
writes the checkpoint into FOLDER after three updates, with what Megatron's own reader finds in it as ``held.pt``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist


def main(folder: Path, precision: str) -> None:
    # Megatron asks CUDA for its device and its random states, also where nothing is on a GPU.
    tensor, kind = torch.tensor, torch.Tensor.type
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    torch.tensor = lambda *data, device=None, **options: tensor(*data, **options)  # type: ignore[assignment]
    torch.Tensor.type = lambda self, *to: kind(self, *to) if to else kind(self).replace("torch.", "torch.cuda.")  # type: ignore
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
    from megatron.core.transformer import TransformerConfig

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(2)
    torch.manual_seed(5)
    bf16 = precision == "bf16"
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12, use_cpu_initialization=True,
        bf16=bf16, params_dtype=dtype, tensor_model_parallel_size=2, add_bias_linear=True,
    )  # fmt: skip
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=16, max_sequence_length=8).to(dtype)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    inner = torch.optim.AdamW(
        [{"params": matrices, "wd_mult": 1.0}, {"params": vectors, "wd_mult": 0.0, "weight_decay": 0.0}], lr=0.01
    )
    options = OptimizerConfig(lr=0.01, bf16=bf16, params_dtype=dtype)
    optimizer: Any = (
        Float16OptimizerWithFloat16Params(inner, options, None, lambda *_: None)
        if bf16
        else FP32Optimizer(inner, options, lambda *_: None)
    )
    for number in range(3):
        for group in inner.param_groups:
            for place, p in enumerate(group["params"]):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * number + place)).to(p.dtype)
        inner.step()
    state = model.sharded_state_dict()
    held = {"model": state, "optimizer": optimizer.sharded_state_dict(state), "iteration": 3}
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(held, str(folder))
    found = dist_checkpointing.load_plain_tensors(str(folder))
    if dist.get_rank() == 0:
        torch.save(found, folder / "held.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
