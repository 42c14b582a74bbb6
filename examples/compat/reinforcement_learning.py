"""REINFORCE with observers: each plays in a world of its own, and asks the agent what to do.

Written for torch.distributed.rpc, and for nothing else:

    python examples/compat/reinforcement_learning.py
    python -m gradwire.compat examples/compat/reinforcement_learning.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.rpc import RRef, remote, rpc_async, rpc_sync

OBSERVERS = 2
EPISODES, STEPS = 6, 12
DISCOUNT = 0.9


def call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method, rref, *args, **kwargs):
    """Run the method of the object behind the reference, where the object is."""
    return rpc_sync(rref.owner(), call_method, args=[method, rref, *args], kwargs=kwargs)


class Corridor:
    """A corridor of nine places. Standing in the middle is rewarded; the floor is slippery."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.place = 0

    def reset(self):
        self.place = int(torch.randint(-4, 5, (), generator=self.generator))
        return self.state()

    def step(self, action: int):
        slips = float(torch.rand((), generator=self.generator)) < 0.1
        move = 0 if slips else (-1, 1)[action]
        self.place = max(-4, min(4, self.place + move))
        return self.state(), 1.0 - abs(self.place) / 2

    def state(self):
        return torch.tensor([self.place / 4, abs(self.place) / 4])


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, state):
        return torch.softmax(self.layers(state), dim=-1)


class Observer:
    """Lives on a worker of its own, with its world."""

    def __init__(self, number: int):
        self.number = number
        self.world = Corridor(seed=number)

    def run_episode(self, agent_rref, steps: int) -> None:
        state = self.world.reset()
        for _ in range(steps):
            action = remote_method(Agent.select_action, agent_rref, self.number, state)
            state, reward = self.world.step(action)
            remote_method(Agent.report_reward, agent_rref, self.number, reward)


class Agent:
    """Has the policy, and is asked by all observers at once."""

    def __init__(self):
        self.agent_rref = RRef(self)
        self.policy = Policy()
        self.optimizer = optim.Adam(self.policy.parameters(), lr=0.05)
        self.dice = [torch.Generator().manual_seed(100 + n) for n in range(OBSERVERS)]
        self.observer_rrefs = [
            remote(f"observer{n}", Observer, args=(n,)) for n in range(OBSERVERS)
        ]
        self.forget()

    def forget(self) -> None:
        self.rewards = [[] for _ in range(OBSERVERS)]
        self.states = [[] for _ in range(OBSERVERS)]
        self.actions = [[] for _ in range(OBSERVERS)]

    def select_action(self, observer: int, state) -> int:
        with torch.no_grad():
            probabilities = self.policy(state)
        action = int(torch.multinomial(probabilities, 1, generator=self.dice[observer]))
        self.states[observer].append(state)
        self.actions[observer].append(action)
        return action

    def report_reward(self, observer: int, reward: float) -> None:
        self.rewards[observer].append(reward)

    def run_episode(self) -> None:
        futures = [
            rpc_async(
                rref.owner(),
                call_method,
                args=(Observer.run_episode, rref, self.agent_rref, STEPS),
            )
            for rref in self.observer_rrefs
        ]
        for future in futures:
            future.wait()

    def finish_episode(self) -> tuple[float, float]:
        loss = torch.stack([self.loss(observer) for observer in range(OBSERVERS)]).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        reward = sum(sum(rewards) for rewards in self.rewards)
        self.forget()
        return loss.item(), reward

    def loss(self, observer: int):
        total, returns = 0.0, []
        for reward in reversed(self.rewards[observer]):
            total = reward + DISCOUNT * total
            returns.append(total)
        weights = torch.tensor(returns[::-1])
        probabilities = self.policy(torch.stack(self.states[observer]))
        chosen = probabilities.gather(1, torch.tensor(self.actions[observer])[:, None])[:, 0]
        return -(chosen.log() * (weights - weights.mean())).sum()


def run_agent() -> None:
    agent = Agent()
    for episode in range(EPISODES):
        agent.run_episode()
        loss, reward = agent.finish_episode()
        print(f"episode {episode} loss {loss!r} reward {reward!r}")


def run(rank: int, world_size: int, init_method: str) -> None:
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method)
    name = "agent" if rank == 0 else f"observer{rank - 1}"
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        run_agent()
    rpc.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        meeting = (Path(place) / "meeting").as_uri()
        mp.spawn(run, args=(OBSERVERS + 1, meeting), nprocs=OBSERVERS + 1, join=True)
