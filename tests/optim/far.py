"""What the tests of this folder run on other workers."""

from __future__ import annotations

import threading

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

    @gradwire.async_execution
    def forward_later(self, x):
        """The same in a callback, on another thread than this one."""
        self.thread = threading.get_ident()
        return gradwire.rpc_async("w0", torch.clone, args=(x,)).then(self._came)

    def _came(self, future):
        assert threading.get_ident() != self.thread
        return self(future.value())

    def refs(self):
        return [gradwire.RRef(parameter) for parameter in self.parameters()]

    def values(self):
        return [parameter.detach().clone() for parameter in self.parameters()]

    def grads(self):
        return [parameter.grad for parameter in self.parameters()]

    def remember(self):
        self.remembered = [parameter.detach() for parameter in self.parameters()]

    def write_where_it_was(self, by):
        for old in self.remembered:
            old.mul_(by)

    def slope(self, by=1.0):
        for parameter in self.parameters():
            parameter.grad = torch.full_like(parameter, by)

    def mapped(self, context):
        found = gradwire.get_gradients(context)
        return [found.get(parameter) for parameter in self.parameters()]


class Server:
    """One shared model, for any number of trainers; remembers the weights each forward has used."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(2, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
        self.model.double()
        self.gain = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.steps = 0

    def refs(self):
        return [gradwire.RRef(p) for p in [*self.model.parameters(), self.gain]]

    def forward(self, x):
        """The result, and what each parameter was when it was used: layer by layer."""
        used = []
        for layer in self.model:
            before = [p.detach() for p in layer.parameters()]
            y = layer(x)
            after = [p.detach() for p in layer.parameters()]
            if any(a.data_ptr() != b.data_ptr() for a, b in zip(before, after, strict=True)):
                used = None  # a step came in between: it cannot be told from here
            if used is not None:
                used += before
            x = y
        before = self.gain.detach()
        y = x * self.gain
        if used is not None:
            used = [*used, before] if before.data_ptr() == self.gain.data_ptr() else None
        return y, used and [u.clone() for u in used]

    def slope(self):
        for p in [*self.model.parameters(), self.gain]:
            p.grad = torch.ones_like(p)

    def gradients(self, context):
        found = gradwire.get_gradients(context)
        return [found[p] for p in [*self.model.parameters(), self.gain]]

    def values(self):
        return [p.detach().clone() for p in [*self.model.parameters(), self.gain]]


def model_with(weights):
    """The server's model in one process."""
    server = Server()
    with torch.no_grad():
        for p, value in zip([*server.model.parameters(), server.gain], weights, strict=True):
            p.copy_(value)
    return server


def train(server, optimizer_class, steps, seed):
    """One trainer, with an optimizer of its own; how many gradients it could check, all exact."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = gradwire.DistributedOptimizer(optimizer_class, server.rpc_sync().refs(), lr=0.01)
    checked = 0
    for _ in range(steps):
        x = torch.randn(16, 2, generator=generator).double()
        with gradwire.context() as context:
            y, used = server.rpc_sync().forward(x)
            gradwire.backward(context, [(y - x[:, :1] * x[:, 1:]).square().mean()])
            gradients = server.rpc_sync().gradients(context)
            optimizer.step(context)
        if used is not None:
            checked += 1
            check(used, gradients, x)
    return checked


def differentiate(server, steps, seed):
    """A trainer without contexts, that steps between its forward and its backward."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = gradwire.DistributedOptimizer(torch.optim.SGD, server.rpc_sync().refs(), lr=1e-3)
    checked = 0
    for _ in range(steps):
        x = torch.randn(16, 2, generator=generator).double().requires_grad_()
        y, used = server.rpc_sync().forward(x)
        optimizer.step()
        (gradient,) = torch.autograd.grad(y.square().mean(), x)
        if used is not None:
            checked += 1
            there, _ = model_with(used).forward(x)
            (expected,) = torch.autograd.grad(there.square().mean(), x)
            assert torch.equal(gradient, expected)
    return checked


def check(used, gradients, x):
    local = model_with(used)
    y, _ = local.forward(x)
    (y - x[:, :1] * x[:, 1:]).square().mean().backward()
    for p, gradient in zip([*local.model.parameters(), local.gain], gradients, strict=True):
        assert torch.equal(p.grad, gradient)


def step_many(parts, steps):
    """Steps down a constant slope."""
    refs = [ref for part in parts for ref in part.rpc_sync().refs()]
    optimizer = gradwire.DistributedOptimizer(torch.optim.SGD, refs, lr=1 / 128)
    for part in parts:
        part.rpc_sync().slope()
    for _ in range(steps):
        optimizer.step()


class Moody(torch.optim.SGD):
    """Does not like to go up."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["steps"] = state.get("steps", 0) + 1
        super().step()
        if any(p.grad is not None and (p.grad < 0).any() for p in group["params"]):
            raise ValueError("not up there")
