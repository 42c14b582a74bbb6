"""Two devices: a layer on another worker's device, with values and gradients that stay on devices.

       w0, on HERE                        w1, on THERE
       x  ----- device_map ----------->   tanh(x @ weight)
       y  <---- the inverted map ------   .
       loss

With CUDA, the workers are two processes; with one GPU they share it. Without CUDA, the workers are
in one process and the devices are pretended: their tensors lie in host memory, and operators on
them are queued on streams and run later, as on a GPU.
"""

import torch

import gradwire
from gradwire.testing import cluster
from gradwire.testing.pretend.driver import PretendDriver
from gradwire.testing.pretend.tensors import install

if torch.cuda.is_available():
    HERE, THERE = "cuda:0", f"cuda:{torch.cuda.device_count() - 1}"
else:
    HERE, THERE = "pretend:0", "pretend:1"
TO_W1 = {HERE: THERE}


def make_weight(values):
    """Runs on w1, which keeps the weight on its device."""
    return values.to(THERE).requires_grad_()


def layer(weight, x):
    return torch.tanh(x @ weight.local_value())


def gradient_of(weight):
    return weight.local_value().grad


def device_of(x):
    return str(x.device)


def double(x):
    return x * 2


def in_one_process(weight, x):
    """The same layer on the CPU, which gives the expected gradients."""
    weight, x = weight.clone().requires_grad_(), x.clone().requires_grad_()
    loss = torch.tanh(x @ weight).square().mean()
    loss.backward()
    return loss, x.grad, weight.grad


def main():
    torch.manual_seed(0)
    values, inputs = torch.randn(8, 4), torch.randn(16, 8)
    weight = gradwire.remote("w1", make_weight, args=(values,))
    x = inputs.to(HERE).requires_grad_()

    # Without a map, a tensor arrives on the device that it is on.
    same = gradwire.rpc_sync("w1", device_of, args=(x,))
    mapped = gradwire.rpc_sync("w1", device_of, args=(x,), device_map=TO_W1)
    print(f"a tensor on {HERE} arrives on {same}, and with the map on {mapped}")
    assert (same, mapped) == (HERE, THERE)

    y = gradwire.rpc_sync("w1", layer, args=(weight, x), device_map=TO_W1)
    loss = y.square().mean()
    loss.backward()
    print(f"the result is on {y.device}, its gradient returned to {x.grad.device}")
    assert str(y.device) == str(x.grad.device) == HERE

    weight_grad = gradwire.rpc_sync("w1", gradient_of, args=(weight,))
    print(f"the gradient of the weight is on {weight_grad.device}")
    assert str(weight_grad.device) == THERE

    expected = in_one_process(values, inputs)
    print(f"loss {loss.item():.6f}, on the CPU of one process {expected[0].item():.6f}")
    for ours, theirs in zip((loss, x.grad, weight_grad), expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-3, atol=1e-4)

    # The device has perhaps not computed the argument yet. What is sent is its value at the call.
    z = torch.ones(1024, device=HERE)
    future = gradwire.rpc_async("w1", double, args=(z,))
    z.fill_(7)
    sent = future.wait()
    print(f"overwritten after the call: {z[0].item():g}; doubled on w1: {sent[0].item():g}")
    assert (sent.cpu() == 2).all()
    assert (z.cpu() == 7).all()


if __name__ == "__main__":
    if torch.cuda.is_available():
        gradwire.run(main, world_size=2)
    else:
        install()
        driver = PretendDriver()
        functions = [make_weight, layer, gradient_of, device_of, double]
        with cluster(2, expose=functions, drivers=lambda _: driver) as workers:
            workers[0].run(main)
