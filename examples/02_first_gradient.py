"""The first gradient: `loss.backward()` through two other workers, compared with one process.

       w0                      w1                  w2 (owns the weight)
       x  ------------------>  sin
       h  <------------------  .
       .  ---------------------------------------> tanh(h @ weight)
       y  <---------------------------------------  .
       loss

The backward pass takes the same way back. It leaves `x.grad` on w0 and `weight.grad` on w2.
"""

import torch

import gradwire


def project(weight, x):
    """Runs on the worker that owns the weight."""
    return torch.tanh(x @ weight.local_value())


def gradient_of(weight):
    return weight.local_value().grad


def in_one_process(weight, x):
    """The same program with ordinary calls, which gives the expected gradients."""
    y = torch.tanh(torch.sin(x) @ weight)
    loss = y.square().mean()
    loss.backward()
    return loss


def train():
    weight = gradwire.remote("w2", torch.randn, args=(8, 4), kwargs={"requires_grad": True})
    x = torch.randn(16, 8, requires_grad=True)

    h = gradwire.rpc_sync("w1", torch.sin, args=(x,))
    y = gradwire.rpc_sync("w2", project, args=(weight, h))
    loss = y.square().mean()
    loss.backward()
    weight_grad = gradwire.rpc_sync("w2", gradient_of, args=(weight,))

    local_weight = weight.to_here().detach().requires_grad_()  # a leaf of its own
    local_x = x.detach().clone().requires_grad_()
    expected = in_one_process(local_weight, local_x)

    print("                 three workers   one process")
    print(f"loss             {loss.item():13.8f} {expected.item():13.8f}")
    print(f"|x.grad|         {x.grad.norm():13.8f} {local_x.grad.norm():13.8f}")
    print(f"|weight.grad|    {weight_grad.norm():13.8f} {local_weight.grad.norm():13.8f}")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(x.grad, local_x.grad)
    torch.testing.assert_close(weight_grad, local_weight.grad)


if __name__ == "__main__":
    gradwire.run(train, world_size=3)
