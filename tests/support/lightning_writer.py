"""Ranks of the real Lightning: train, save ``last.ckpt``, and what the module and its optimizer hold then.

``lightning_writer.py FOLDER PRECISION`` as one process, or under torchrun as ranks of DDP.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lightning
import torch

from foreign_checkpoints import Small, everything, groups, tokens


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Small()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch)
        return loss

    def configure_optimizers(self) -> tuple[list[torch.optim.Optimizer], list[object]]:
        optimizer = torch.optim.AdamW(groups(self.net), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def main(folder: Path, precision: str) -> None:
    torch.manual_seed(5)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_steps=3, precision=precision,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    module = Module()
    data = torch.utils.data.DataLoader([tokens(number) for number in range(8)], batch_size=None)
    trainer.fit(module, data)
    trainer.save_checkpoint(folder / "last.ckpt")
    if trainer.is_global_zero:
        torch.save(everything(module.net, trainer.optimizers[0]), folder / "held.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
