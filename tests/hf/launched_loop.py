"""A loop of Accelerate as its users write it, for launchers: ``launched_loop.py RESULT [ZEROMESH_CONFIG]``.

The result is a JSON file with the losses. The second argument brings ZeroMesh's plugin, in place of a launcher's.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader

from hf_training import BATCH, EPS, RATE, model, samples


def main(result: str, config: str | None = None) -> None:
    """Train for eight batches, two for each update."""
    plugin = None
    if config is not None:
        import zeromesh.hf

        plugin = zeromesh.hf.plugin(config)
    loading = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2, dataloader_config=loading)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, eps=EPS)
    net, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(samples(32), batch_size=BATCH))
    losses = []
    for batch in loader:
        with accelerator.accumulate(net):
            loss = net(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(accelerator.gather(loss.detach().reshape(1)).mean()))
    if accelerator.is_main_process:
        kind = str(accelerator.distributed_type)
        Path(result).write_text(json.dumps({"losses": losses, "ranks": accelerator.num_processes, "kind": kind}))


if __name__ == "__main__":
    main(*sys.argv[1:])
