"""Muon for the matrices of the layers, Adam for everything else. Their state is small, and exact when it is stored.

Muon: K. Jordan and others, 2024. Momentum, then an orthogonal matrix near it by five Newton-Schulz iterations. Momentum
is kept in bfloat16 on purpose: what a checkpoint holds is what the optimizer had.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

MOMENTUM, BETAS, EPS = 0.95, (0.9, 0.98), 1e-8
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(updates: Tensor) -> Tensor:
    """Nearly orthogonal matrices near the given ones, [n, rows, columns]; in bfloat16 on CUDA, else float32."""
    a, b, c = _COEFFICIENTS
    x = updates.to(torch.bfloat16 if updates.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Optimizer:
    """Both optimizers over a model's parameters that require gradients."""

    def __init__(self, model: nn.Module, weight_decay: float) -> None:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.matrices = {name: p for name, p in named.items() if p.dim() == 2 and ".layers." in name}
        self.others = {name: p for name, p in named.items() if name not in self.matrices}
        self.weight_decay = weight_decay
        self.momentum = {n: torch.zeros_like(p, dtype=torch.bfloat16) for n, p in self.matrices.items()}
        self.first = {name: torch.zeros_like(p) for name, p in self.others.items()}
        self.second = {name: torch.zeros_like(p) for name, p in self.others.items()}
        shapes: dict[torch.Size, list[str]] = {}
        for name, p in self.matrices.items():
            shapes.setdefault(p.shape, []).append(name)
        self.groups = list(shapes.values())

    @torch.no_grad()
    def step(self, step: int, muon_lr: float, adam_lr: float) -> None:
        """One update from the gradients, which are dropped afterwards. step counts from 0."""
        for names in self.groups:
            self._muon(names, muon_lr)
        self._adam(step, adam_lr)
        for p in (*self.matrices.values(), *self.others.values()):
            p.grad = None

    def _muon(self, names: list[str], lr: float) -> None:
        parameters = [self.matrices[name] for name in names]
        gradient = torch.stack([_gradient(p) for p in parameters]).float()
        momentum = torch.stack([self.momentum[name] for name in names]).float()
        momentum = (MOMENTUM * momentum + (1 - MOMENTUM) * gradient).to(torch.bfloat16)
        for name, one in zip(names, momentum, strict=True):
            self.momentum[name].copy_(one)
        rows, columns = parameters[0].shape
        update = orthogonal((1 - MOMENTUM) * gradient + MOMENTUM * momentum.float()).float()
        scale = lr * max(1.0, rows / columns) ** 0.5
        for p, one in zip(parameters, update, strict=True):
            p.mul_(1 - lr * self.weight_decay).sub_(one, alpha=scale)

    def _adam(self, step: int, lr: float) -> None:
        names = list(self.others)
        gradients = [_gradient(self.others[name]) for name in names]
        first, second = [self.first[name] for name in names], [self.second[name] for name in names]
        torch._foreach_lerp_(first, gradients, 1 - BETAS[0])
        torch._foreach_mul_(second, BETAS[1])
        torch._foreach_addcmul_(second, gradients, gradients, 1 - BETAS[1])
        scales = torch._foreach_div(second, 1 - BETAS[1] ** (step + 1))
        torch._foreach_sqrt_(scales)
        torch._foreach_add_(scales, EPS)
        factor = -lr / (1 - BETAS[0] ** (step + 1))
        torch._foreach_addcdiv_([self.others[name] for name in names], first, scales, factor)

    def state(self) -> dict[str, Tensor]:
        """All state as tensors with names, as it is."""
        parts = {"momentum": self.momentum, "first": self.first, "second": self.second}
        return {f"{part}:{name}": tensor for part, state in parts.items() for name, tensor in state.items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take over what :meth:`state` gave.

        Raises:
            ValueError: when it is another model's.
        """
        own = self.state()
        if own.keys() != state.keys():
            raise ValueError(
                f"the optimizer state is of another model: {sorted(own.keys() ^ state.keys())[:4]} ..."
            )
        for name, tensor in own.items():
            tensor.copy_(state[name])


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "a parameter that the loss does not depend on"
    return parameter.grad
