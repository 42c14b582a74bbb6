"""Groups: one call to several workers, their gradients, and what the workers do together.

w0 gives a batch to both trainers at once. They agree on the mean of their losses by themselves.
"""

import torch

import gradwire

TRAINERS = gradwire.group("trainers", ["w1", "w2"])


def loss_of(weight, batch):
    """Runs on each trainer, with its own part of the batch."""
    me = list(TRAINERS).index(gradwire.get_worker_info().name)
    part = batch[me :: len(TRAINERS)]
    loss = (part @ weight).square().sum()
    total = sum(gradwire.all_gather(loss.item(), TRAINERS))  # small values, from each to each
    return loss, total


def fail_on_odd():
    number = gradwire.get_worker_info().id
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number


def main():
    torch.manual_seed(0)
    weight, batch = torch.randn(4, requires_grad=True), torch.randn(6, 4)

    (first, total), (second, same) = gradwire.rpc_sync(TRAINERS, loss_of, args=(weight, batch))
    print(f"the losses are {first.item():.3f} and {second.item():.3f}, in total {total:.3f}")
    assert total == same == first.item() + second.item()

    (first + second).backward()  # through both calls
    alone = weight.detach().requires_grad_()
    (batch @ alone).square().sum().backward()
    print(f"the gradient is {[round(each, 3) for each in weight.grad.tolist()]}")
    assert torch.allclose(weight.grad, alone.grad)

    story = "nothing was raised"
    try:
        gradwire.rpc_sync(["w0", "w1", "w2"], fail_on_odd)
    except* ValueError as group:
        story = str(group)
    print(story)
    assert "fail_on_odd failed on 1 of 3 workers: w1 (ValueError)" in story


if __name__ == "__main__":
    gradwire.run(main, world_size=3)
