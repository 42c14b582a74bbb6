"""Split learning: two organisations train one model, and neither sees the data of the other.

The clinic has the inputs and the lower half of the model, the lab has the labels and the upper
half. Each is a process with its own certificate and key, and they connect over TLS. Only data is
sent: activations in one direction, their gradients in the other, and the loss.

The other organisation may call the names without an underscore, so `Lab` is the only one.
"""

import logging
import multiprocessing
import os
import secrets
import socket
import tempfile
from pathlib import Path

import torch
from torch import nn

import gradwire
from gradwire.launch.certs import Folder, make

STEPS, RATE, BATCH = 60, 1.0, 64
_HOST = "127.0.0.1"  # with two machines: the address of each
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)


def _both_tables():
    """The inputs, which only the clinic has, and the labels, which only the lab has."""
    x = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, :1] > x[:, 1:2].abs() - 0.5).double()
    return x, y


def _halves():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh()), nn.Linear(32, 1)


def _step(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= RATE * parameter.grad
    model.zero_grad()


class Lab:
    """The upper half and the labels. It lives in the lab and returns the loss, but no label."""

    def __init__(self):
        _, self._labels = _both_tables()
        _, self._top = _halves()

    def loss(self, h, rows):
        wanted = self._labels[rows]
        return nn.functional.binary_cross_entropy_with_logits(self._top(h), wanted)

    def step(self):
        _step(self._top)


def _train(bottom, lab, x, step):
    losses = []
    for n in range(STEPS):
        rows = torch.arange(n * BATCH, (n + 1) * BATCH) % len(x)
        loss = lab.loss(bottom(x[rows]), rows)
        loss.backward()  # through both organisations
        step()
        losses.append(loss.item())
    return losses


def _options(files, name, port):
    """The options of one organisation."""
    tls = gradwire.Tls(
        certificate=files / f"{name}.pem",
        key=files / f"{name}.key",
        authority=files / "authority.pem",
    )
    meeting = f"tcp://{_HOST}:{port}"
    return gradwire.Options(init_method=meeting, listen=f"tcp://{_HOST}:0", tls=tls)


def _be_the_lab(files, port):
    logging.getLogger("gradwire").setLevel("ERROR")  # do not log the calls that it refuses
    gradwire.init_rpc("lab", rank=1, world_size=2, options=_options(files, "lab", port))
    gradwire.shutdown()  # serves until the clinic is done


def _be_the_clinic(files, port):
    gradwire.init_rpc("clinic", rank=0, world_size=2, options=_options(files, "clinic", port))
    x, _ = _both_tables()
    bottom, _ = _halves()
    lab = gradwire.remote("lab", Lab)

    def step():
        _step(bottom)
        lab.rpc_sync().step()

    losses = _train(bottom, lab.rpc_sync(), x, step)
    expected = _in_one_place()
    print(f"loss {losses[0]:.6f} -> {losses[-1]:.6f}, in one place {expected[-1]:.6f}")
    assert losses[-1] < losses[0] / 2
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected))

    for what in (_both_tables, os.listdir, torch.load, eval):
        try:
            gradwire.rpc_sync("lab", what)
        except gradwire.NotExposed as refusal:
            print("the lab says:", str(refusal).splitlines()[0])
        else:
            raise AssertionError(f"the lab has run {what}")
    try:
        lab.to_here()
    except gradwire.NotSerializable as refusal:
        print("the lab says:", str(refusal).splitlines()[0])
    else:
        raise AssertionError("the lab has given itself away")
    gradwire.shutdown()


def _in_one_place():
    bottom, _ = _halves()
    lab = Lab()
    x, _ = _both_tables()

    def step():
        _step(bottom)
        lab.step()

    return _train(bottom, lab, x, step)


def _hand_out(folder, names):
    """Create the certificates, as `gradwire certs` does, and the secret; distribute them."""
    made = Folder(folder / "authority")
    make(made, names, days=1)
    for name in names:
        files = folder / name
        files.mkdir(mode=0o700)
        (files / "authority.pem").write_bytes(made.authority.read_bytes())
        made.certificate(name).rename(files / f"{name}.pem")
        made.key(name).rename(files / f"{name}.key")
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    os.environ["GRADWIRE_SECRET_FILE"] = str(secret)


def _main():
    with socket.socket() as probe, tempfile.TemporaryDirectory() as folder:
        probe.bind((_HOST, 0))
        port = probe.getsockname()[1]
        probe.close()
        _hand_out(Path(folder), ["clinic", "lab"])
        spawn = multiprocessing.get_context("spawn")
        organisations = [
            spawn.Process(target=be, args=(Path(folder) / name, port))
            for name, be in (("lab", _be_the_lab), ("clinic", _be_the_clinic))
        ]
        for organisation in organisations:
            organisation.start()
        for organisation in organisations:
            organisation.join(90)
            assert organisation.exitcode == 0, "see what it printed"


if __name__ == "__main__":
    _main()
