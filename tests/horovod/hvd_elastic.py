"""An elastic script that may lose a rank in the middle."""

import argparse
import os
import signal

import torch

import zeromesh.horovod as hvd

STEPS = 5


def loss_of(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    rows = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)
    return model(rows).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--die-at", type=int, default=-1)
    parser.add_argument("--output")
    args = parser.parse_args()
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    resets: list[int] = []
    firsts: list[int] = []

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        firsts.append(state.step)
        while state.step < STEPS:
            if state.step == args.die_at and not resets and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            loss_of(model, state.step, hvd.rank()).backward()
            optimizer.step()
            state.step += 1
            if state.step % 2 == 0:
                state.commit()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, step=0)
    state.register_reset_callbacks([lambda: resets.append(1)])
    train(state)
    if hvd.rank() == 0:
        result = {"weight": model.weight.detach(), "first_step": firsts[0], "resets": len(resets)}
        torch.save(result, args.output)


if __name__ == "__main__":
    main()
