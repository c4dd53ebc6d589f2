"""Scripts in the style of DeepSpeed's examples, whose one changed line is the import, and the same in plain torch.

Each takes ``deepspeed``, the module or None for plain torch, and returns its losses.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

BATCH = 4
STEPS = 6


def config(stage: int, rate: float = 1e-2) -> dict[str, Any]:
    optimizer = {"type": "Adam", "params": {"lr": rate, "betas": [0.8, 0.999], "eps": 1e-4}}
    sizes = {"train_batch_size": BATCH, "gradient_clipping": 0.0}  # DeepSpeed clips to 1 unless it is told
    return {**sizes, "optimizer": optimizer, "zero_optimization": {"stage": stage}}


def adam(model: nn.Module, rate: float = 1e-2) -> torch.optim.Optimizer:
    # DeepSpeed's Adam decouples the decay unless it is told; there is none here.
    return torch.optim.Adam(model.parameters(), lr=rate, betas=(0.8, 0.999), eps=1e-4)


def share(batch: torch.Tensor) -> torch.Tensor:
    """This rank's samples."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else batch


def mean(loss: torch.Tensor) -> float:
    """The mean over the ranks."""
    total = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(total)
        total /= dist.get_world_size()
    return float(total)


def images(seed: int) -> torch.Tensor:
    return torch.randn(BATCH, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


class Net(nn.Module):
    """The network of the CIFAR example, smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.pool, self.conv2 = nn.Conv2d(3, 6, 3), nn.MaxPool2d(2, 2), nn.Conv2d(6, 8, 2)
        self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(self.pool(F.relu(self.conv1(x)))))
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def cifar(deepspeed: Any, stage: int) -> list[float]:
    """Classification, with the command line and the engine as the CIFAR example has them."""
    torch.manual_seed(0)
    net = Net()
    engine: Any = net
    if deepspeed is not None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--local_rank", type=int, default=-1)
        args = deepspeed.add_config_arguments(parser).parse_args([])
        deepspeed.init_distributed()
        parameters = filter(lambda p: p.requires_grad, net.parameters())
        engine, _, _, _ = deepspeed.initialize(args=args, model=net, model_parameters=parameters, config=config(stage))
    optimizer = adam(net) if deepspeed is None else None
    criterion, losses = nn.CrossEntropyLoss(), []
    for step in range(STEPS):
        labels = torch.randint(10, (BATCH,), generator=torch.Generator().manual_seed(100 + step))
        loss = criterion(engine(share(images(step))), share(labels))
        losses.append(mean(loss))
        if optimizer is None:
            engine.backward(loss)
            engine.step()
        else:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return losses


def gan(deepspeed: Any, stage: int) -> list[float]:
    """Two networks that train in turns, each with its engine; the discriminator has two backwards for an update."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 192), nn.Tanh())
    critic = nn.Sequential(nn.Linear(192, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1), nn.Sigmoid())
    fakes: Any = generator
    judges: Any = critic
    if deepspeed is not None:
        judges, _, _, _ = deepspeed.initialize(model=critic, model_parameters=critic.parameters(), config=config(stage))
        fakes, _, _, _ = deepspeed.initialize(
            model=generator, model_parameters=generator.parameters(), config=config(stage)
        )
    optimizers = None if deepspeed is not None else (adam(critic), adam(generator))
    losses = []
    for step in range(STEPS):
        noise = share(torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step)))
        real = share(images(step)).flatten(1)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = fakes(noise)
        judged = judges(torch.cat([real, fake.detach()]))
        wrong = F.binary_cross_entropy(judged, torch.cat([ones, zeros]))
        _update(judges, wrong, optimizers and optimizers[0])
        fooled = F.binary_cross_entropy(judges(fake), ones)
        _update(fakes, fooled, optimizers and optimizers[1], judges)
        losses += [mean(wrong), mean(fooled)]
    return losses


def _update(engine: Any, loss: torch.Tensor, optimizer: Any, other: Any = None) -> None:
    if optimizer is not None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    else:
        engine.backward(loss)
        engine.step()
    # Gradients that passed through the other network must not be in its next update.
    if other is not None:
        other.zero_grad()


def bert(deepspeed: Any, stage: int) -> list[float]:
    """Masked language modelling as HelloDeepSpeed has it: a loop over keyword arguments, accumulation, a checkpoint."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "max_position_embeddings": 20}
    model = RobertaForMaskedLM(RobertaConfig(vocab_size=40, **sizes, **quiet))
    engine: Any = model
    if deepspeed is not None:
        both = {**config(stage), "train_batch_size": 2 * BATCH, "gradient_accumulation_steps": 2}
        engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=both)
    optimizer, losses = adam(model) if deepspeed is None else None, []
    for step in range(STEPS):
        tokens = torch.randint(2, 40, (BATCH, 16), generator=torch.Generator().manual_seed(step))
        order = torch.rand(BATCH, 16, generator=torch.Generator().manual_seed(50 + step)).argsort(1)
        # Two in each sample, so that the mean over ranks is the mean over labels.
        masked = torch.zeros(BATCH, 16, dtype=torch.bool).scatter(1, order[:, :2], True)
        batch = {"input_ids": tokens.masked_fill(masked, 1), "labels": tokens.masked_fill(~masked, -100)}
        batch["attention_mask"] = torch.ones_like(tokens)
        loss = engine(**{name: share(value) for name, value in batch.items()}).loss
        losses.append(mean(loss))
        if optimizer is None:
            engine.backward(loss)
            engine.step()
        else:
            (loss / 2).backward()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
    return losses


def alexnet(deepspeed: Any, stage: int) -> list[float]:
    """A list of layers in two stages, as the pipeline example joins AlexNet's."""
    torch.manual_seed(0)
    features = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    layers = [*features, lambda x: torch.flatten(x, 1), nn.Linear(128, 16), nn.ReLU(), nn.Linear(16, 10)]
    criterion, losses = nn.CrossEntropyLoss(), []

    def data(step: int) -> Any:
        labels = torch.randint(10, (BATCH,), generator=torch.Generator().manual_seed(100 + step))
        return iter(zip(images(step).chunk(2), labels.chunk(2), strict=True))

    if deepspeed is None:
        whole = nn.ModuleList(layer for layer in layers if isinstance(layer, nn.Module))
        optimizer = adam(whole)
        for step in range(STEPS):
            optimizer.zero_grad()
            parts = []
            for x, labels in data(step):
                for layer in layers:
                    x = layer(x)
                parts.append(criterion(x, labels) / 2)
                parts[-1].backward()
            optimizer.step()
            losses.append(float(sum(parts)))
        return losses
    deepspeed.init_distributed()
    net = deepspeed.pipe.PipelineModule(layers=layers, loss_fn=criterion, num_stages=2, partition_method="parameters")
    both = {**config(stage), "train_micro_batch_size_per_gpu": BATCH // 2}
    parameters = [p for p in net.parameters() if p.requires_grad]
    engine, _, _, _ = deepspeed.initialize(model=net, model_parameters=parameters, config=both)
    return [float(engine.train_batch(data_iter=data(step))) for step in range(STEPS)]


SCRIPTS = {"cifar": cifar, "gan": gan, "bert": bert, "alexnet": alexnet}


def run(name: str, stage: int) -> list[float]:
    """Run a script with the changed line."""
    import zeromesh.deepspeed as deepspeed

    return SCRIPTS[name](deepspeed, stage)
