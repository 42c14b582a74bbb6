"""A language model split over two processes: embedding and decoder on the server, the LSTM here.

Written for torch.distributed.rpc, and for nothing else:

    python examples/compat/split_rnn.py
    python -m gradwire.compat examples/compat/split_rnn.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed.autograd as dist_autograd
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributed.optim import DistributedOptimizer
from torch.distributed.rpc import RRef

TOKENS, WIDTH, HIDDEN, LAYERS = 12, 8, 16, 2
BATCH, LENGTH, EPOCHS = 4, 6, 10


def call_method(method, rref, *args, **kwargs):
    return method(rref.local_value(), *args, **kwargs)


def remote_method(method, rref, *args, **kwargs):
    """Run the method of the object behind the reference, where the object is."""
    return rpc.rpc_sync(rref.owner(), call_method, args=[method, rref, *args], kwargs=kwargs)


def parameter_rrefs(module: nn.Module) -> list[RRef]:
    return [RRef(parameter) for parameter in module.parameters()]


def begin_alike(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)


class EmbeddingTable(nn.Module):
    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.encoder = nn.Embedding(tokens, width)
        begin_alike(self, seed=1)

    def forward(self, words):
        return self.encoder(words)


class Decoder(nn.Module):
    def __init__(self, tokens: int, hidden: int):
        super().__init__()
        self.decoder = nn.Linear(hidden, tokens)
        begin_alike(self, seed=2)

    def forward(self, output):
        return self.decoder(output)


class SplitRNN(nn.Module):
    """The parts far away are references; the LSTM is here."""

    def __init__(self, server: str):
        super().__init__()
        self.embedding_rref = rpc.remote(server, EmbeddingTable, args=(TOKENS, WIDTH))
        self.rnn = nn.LSTM(WIDTH, HIDDEN, LAYERS)
        self.decoder_rref = rpc.remote(server, Decoder, args=(TOKENS, HIDDEN))
        begin_alike(self.rnn, seed=3)

    def forward(self, words, hidden):
        embedded = remote_method(EmbeddingTable.forward, self.embedding_rref, words)
        output, hidden = self.rnn(embedded, hidden)
        return remote_method(Decoder.forward, self.decoder_rref, output), hidden

    def parameter_rrefs(self) -> list[RRef]:
        return [
            *remote_method(parameter_rrefs, self.embedding_rref),
            *parameter_rrefs(self.rnn),
            *remote_method(parameter_rrefs, self.decoder_rref),
        ]


def run_trainer() -> None:
    model = SplitRNN("server")
    optimizer = DistributedOptimizer(optim.SGD, model.parameter_rrefs(), lr=0.5)
    generator = torch.Generator().manual_seed(4)
    words = torch.randint(0, TOKENS, (LENGTH + 1, BATCH), generator=generator)
    inputs, targets = words[:-1], words[1:]
    losses = []
    for epoch in range(EPOCHS):
        hidden = (torch.zeros(LAYERS, BATCH, HIDDEN), torch.zeros(LAYERS, BATCH, HIDDEN))
        with dist_autograd.context() as context_id:
            output, _ = model(inputs, hidden)
            loss = nn.functional.cross_entropy(output.reshape(-1, TOKENS), targets.reshape(-1))
            dist_autograd.backward(context_id, [loss])
            optimizer.step(context_id)
        losses.append(loss.item())
        print(f"epoch {epoch} loss {losses[-1]!r}")
    assert losses[-1] < losses[0]


def run(rank: int, world_size: int, init_method: str) -> None:
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=init_method, rpc_timeout=30)
    name = "trainer" if rank == 0 else "server"
    rpc.init_rpc(name, rank=rank, world_size=world_size, rpc_backend_options=options)
    if rank == 0:
        run_trainer()
    rpc.shutdown()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        meeting = (Path(place) / "meeting").as_uri()
        mp.spawn(run, args=(2, meeting), nprocs=2, join=True)
