"""What the tests of this folder run on other workers."""

from __future__ import annotations

import torch
from torch import nn

import gradwire


class Part(nn.Module):
    """A layer on one worker."""

    def __init__(self, seed: int, inputs: int = 4, outputs: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator).double())
        self.scale = nn.Parameter(torch.ones(outputs, dtype=torch.float64))

    def forward(self, x):
        return torch.tanh(self.linear(x)) * self.scale

    def refs(self):
        return [gradwire.RRef(parameter) for parameter in self.parameters()]

    def values(self):
        return [parameter.detach().clone() for parameter in self.parameters()]

    def grads(self):
        return [parameter.grad for parameter in self.parameters()]

    def mapped(self, context):
        found = gradwire.get_gradients(context)
        return [found.get(parameter) for parameter in self.parameters()]
