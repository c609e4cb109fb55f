"""What the examples share: a small network, its data, and one process that trains it alone."""

import sys

import torch
from torch import nn

STEPS, ROWS, WIDTH = 5, 24, 32
TOLERANCE = 1e-6


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 8))


def batch(step: int, part: int = 0, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Part ``part`` of the inputs and targets of a step."""
    draw = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(ROWS, 16, generator=draw), torch.randn(ROWS, 8, generator=draw)
    return inputs.chunk(parts)[part], targets.chunk(parts)[part]


def optimizer_of(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(model: nn.Module, part: int = 0, parts: int = 1) -> nn.Module:
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        inputs, targets = batch(step, part, parts)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model


def finish(what: str, got, wanted=None) -> None:
    """Compare parameters with those of one process that trained alone. Exits with 1 if they differ."""
    wanted = train(network()).parameters() if wanted is None else wanted
    pairs = [(left.detach(), right.detach()) for left, right in zip(got, wanted, strict=True)]
    worst = max(float((left - right).abs().max()) for left, right in pairs)
    print(f"{what}: differs from one process by {worst:.1e} at most", flush=True)
    torch.distributed.destroy_process_group()
    sys.exit(int(not worst <= TOLERANCE))
