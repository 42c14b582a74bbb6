"""Draws random programs. A program is plain data, so that its blocks travel as arguments.

A *block* is a list of steps that one worker runs over a list of values; each step appends to it. A
number in a step that stands for a value is taken modulo how many there are, so every block is
valid. What a drawn program uses is counted: a feature that is never drawn fails the run.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

Step = list
Block = list

MODES = [
    "backward",
    "retain twice",
    "twice without retain",
    "two losses",
    "one of two losses",
    "grad",
    "grad of a received value",
    "second order",
    "context map",
    "context map twice",
    "reference backward",
    "served backward",
]
INTO_MAP = ["context map", "context map twice", "reference backward"]
OPERATORS = ["add", "scaled", "gated", "relu", "of parameter", "negated", "indexed", "cut off"]
SHAPES = ["0-dim", "empty", "non-contiguous", "expanded", "sparse"]
CALLS = ["sync", "async", "remote"]
FEATURES = [
    *(f"mode: {mode}" for mode in MODES),
    *(f"operator: {operator}" for operator in OPERATORS),
    *(f"shape: {shape}" for shape in SHAPES),
    *(f"call: {how}" for how in CALLS),
    "depth 4",
    "call to oneself",
    "callback to the caller",
    "recursion",
    "fan-out joined later",
    "fan-out from threads",
    "reference passed to a third worker",
    "method through a reference",
    "state kept and used later",
    "one of several results used",
    "under no_grad",
    "under inference_mode",
    "caught remote exception",
    "parameter as argument",
    "list of tensors",
    "dict of tensors",
    "same tensor twice",
    "received tensor modified in place",
    "returned tensor modified in place",
    "tensor hook",
    "node pre hook",
    "node post hook",
    "multi-grad hook",
    "leaf hook",
    "post-accumulate hook",
    "accumulator hook",
    "user-written function",
    "function that gives no gradient",
    "checkpoint, reentrant",
    "checkpoint, not reentrant",
]


@dataclass
class Program:
    """What to run, on how many workers, and how to differentiate it."""

    seed: int
    workers: int
    mode: str
    body: Block
    losses: list[list[int]]
    leaf_hooks: list[int]
    features: Counter = field(default_factory=Counter)

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.mode} on {self.workers} workers"


def draw(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    mode = MODES[seed % len(MODES)]
    drawer = _Drawer(rng, workers=rng.randint(2, 5), mode=mode)
    drawer.note(f"mode: {mode}")
    body = drawer.block(worker=0, caller=None, depth=0, steps=rng.randint(2, 7))
    losses = [[rng.randrange(64) for _ in range(rng.randint(1, 5))] for _ in range(2)]
    hooked = [w for w in range(drawer.workers) if rng.random() < 0.4]
    if hooked:
        drawer.note("leaf hook", "post-accumulate hook", "accumulator hook")
    return Program(seed, drawer.workers, mode, body, losses, hooked, drawer.features)


class _Drawer:
    def __init__(self, rng: random.Random, workers: int, mode: str) -> None:
        self.rng, self.workers, self.mode = rng, workers, mode
        self.features: Counter = Counter()
        self.budget = 30

    def note(self, *features: str) -> None:
        for feature in features:
            assert feature in FEATURES, feature
            self.features[feature] += 1

    def index(self) -> int:
        return self.rng.randrange(64)

    def block(
        self, worker: int, caller: int | None, depth: int, steps: int, *, pure: bool = False
    ) -> Block:
        """Steps for one worker.

        A pure block keeps no state and hangs no hooks: it may run twice, or along with others.
        """
        if depth == 4:
            self.note("depth 4")
        drawn = []
        if depth and self.rng.random() < 0.25:
            self.note("received tensor modified in place")
            drawn.append(["modify received"])
        return drawn + [self.step(worker, caller, depth, pure) for _ in range(steps)]

    def step(self, worker: int, caller: int | None, depth: int, pure: bool) -> Step:
        self.budget -= 1
        kinds = [self.operator] * 5 + [self.function, self.stopped]
        if not pure:
            kinds += [self.hook, self.keep]
        if depth < 4 and self.budget > 0:
            far = [self.call] * 6 + [self.shaped, self.failing, self.recursion, self.checkpoint]
            if not pure:
                far += [self.kept, self.fan_out, self.reference, self.method]
            kinds += far
        return self.rng.choice(kinds)(worker, caller, depth, pure)

    # -- steps on the worker itself

    def operator(self, *_: object) -> Step:
        name = self.rng.choice(OPERATORS)
        self.note(f"operator: {name}")
        return ["operator", name, self.index(), self.index()]

    def function(self, *_: object) -> Step:
        self.note("user-written function")
        return ["function", self.index(), self.rng.random() < 0.5]

    def stopped(self, *_: object) -> Step:
        self.note("function that gives no gradient")
        return ["stopped", self.index()]

    def hook(self, *_: object) -> Step:
        kind = self.rng.choice(
            ["tensor hook", "node pre hook", "node post hook", "multi-grad hook"]
        )
        self.note(kind)
        return ["hook", kind, self.index(), self.index()]

    def keep(self, *_: object) -> Step:
        return ["keep", self.index()]

    # -- steps that reach other workers

    def target(self, worker: int, caller: int | None) -> int:
        to = self.rng.randrange(self.workers)
        if to == worker:
            self.note("call to oneself")
        if to == caller:
            self.note("callback to the caller")
        return to

    def inner(self, to: int, worker: int, depth: int, pure: bool) -> Block:
        return self.block(to, worker, depth + 1, self.rng.randint(1, 4), pure=pure)

    def call(self, worker: int, caller: int | None, depth: int, pure: bool) -> Step:
        to = self.target(worker, caller)
        how = self.rng.choice(CALLS)
        self.note(f"call: {how}")
        mode = self.rng.choice(["grad"] * 6 + ["no_grad", "inference_mode"])
        if mode != "grad":
            self.note(f"under {mode}")
        shape = self.rng.choice(["plain"] * 3 + ["list", "dict", "twice", "parameter"])
        named = {"list": "list of tensors", "dict": "dict of tensors"}
        named |= {"twice": "same tensor twice", "parameter": "parameter as argument"}
        if shape in named:
            self.note(named[shape])
        returned = [self.index() for _ in range(self.rng.randint(1, 3))]
        used = [self.index() for _ in range(self.rng.randint(1, 2))]
        if len(returned) > 1:
            self.note("one of several results used")
        modify = self.rng.random() < 0.25
        if modify:
            self.note("returned tensor modified in place")
        return [
            "call",
            {
                "to": to,
                "how": how,
                "mode": mode,
                "shape": shape,
                "block": self.inner(to, worker, depth, pure),
                "arguments": [self.index() for _ in range(self.rng.randint(0, 2))],
                "returned": returned,
                "used": used,
                "modify": modify,
            },
        ]

    def shaped(self, worker: int, caller: int | None, *_: object) -> Step:
        shape = self.rng.choice(SHAPES)
        self.note(f"shape: {shape}")
        return ["shaped", self.target(worker, caller), shape, self.index()]

    def failing(self, worker: int, caller: int | None, depth: int, pure: bool) -> Step:
        self.note("caught remote exception")
        to = self.target(worker, caller)
        return ["failing", to, self.inner(to, worker, depth, pure), self.index()]

    def recursion(self, worker: int, caller: int | None, *_: object) -> Step:
        self.note("recursion")
        return ["recursion", self.target(worker, caller), self.rng.randint(1, 4), self.index()]

    def checkpoint(self, worker: int, caller: int | None, depth: int, _: bool) -> Step:
        # The inner backward of a reentrant checkpoint has only `.grad` to write to, and says so.
        reentrant = self.rng.random() < 0.3 and self.mode not in INTO_MAP
        self.note("checkpoint, reentrant" if reentrant else "checkpoint, not reentrant")
        block = self.block(worker, caller, depth + 1, self.rng.randint(1, 3), pure=True)
        block = [step for step in block if step != ["modify received"]]
        return ["checkpoint", reentrant, block, self.index()]

    def kept(self, worker: int, caller: int | None, *_: object) -> Step:
        self.note("state kept and used later")
        return ["kept", self.target(worker, caller), self.index()]

    def fan_out(self, worker: int, caller: int | None, depth: int, _: bool) -> Step:
        self.note("fan-out joined later")
        branches = []
        for _ in range(self.rng.randint(2, 3)):
            to = self.target(worker, caller)
            branches.append([to, self.inner(to, worker, depth, True), self.index()])
        threads = self.rng.random() < 0.4
        if threads:
            self.note("fan-out from threads")
        return ["fan out", branches, [self.index() for _ in range(2)], threads]

    def reference(self, worker: int, caller: int | None, depth: int, pure: bool) -> Step:
        self.note("reference passed to a third worker")
        owner, third = self.target(worker, caller), self.target(worker, caller)
        return ["reference", owner, self.inner(owner, worker, depth, pure), third, self.index()]

    def method(self, worker: int, caller: int | None, *_: object) -> Step:
        self.note("method through a reference")
        return ["method", self.target(worker, caller), self.index(), self.index()]
