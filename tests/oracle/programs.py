"""Draws random programs. A program is plain data, so that its blocks travel as arguments.

A *block* is a list of steps that one worker runs over a list of values; each step appends to it. A
number in a step that stands for a value is taken modulo how many there are, so every block is
valid. What a drawn program uses is counted: a feature that is never drawn fails the run.

A program has one act or several, which share what the workers and the root keep. An *act* is the
block of the root, and one way to differentiate what it computed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

Step = list
Block = list

KINDS = [
    "threads",
    "finalizers",
    "inner backwards",
    "failed passes",
    "inputs",
    "draws",
    "acts",
    "contexts",
    "unread",
]
"""Groups of steps and modes that can be left out of what is drawn. Without "contexts", none is
opened but for the modes that need one."""

ONE_CONTEXT, NO_CONTEXT, MIXED_CONTEXTS = "one context", "no context", "mixed contexts"
SCOPES = [NO_CONTEXT, ONE_CONTEXT, MIXED_CONTEXTS]
"""Whether an act is one context, which ends with it; or there is none; or some blocks open contexts
of their own that stay open until the program is over, and what is made in them is mixed."""

LATER, EARLIER = "loss kept for later", "loss of an earlier act"
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
    "backward into inputs",
    "failed pass",
    "failed pass into the map",
    LATER,
    EARLIER,
]
KIND_OF_MODE = {
    "backward into inputs": "inputs",
    "failed pass": "failed passes",
    "failed pass into the map": "failed passes",
    LATER: "acts",
    EARLIER: "acts",
}
INTO_MAP = ["context map", "context map twice", "reference backward", "failed pass into the map"]
FAILING = ["failed pass", "failed pass into the map"]
OPERATORS = ["add", "scaled", "gated", "relu", "of parameter", "negated", "indexed", "cut off"]
SHAPES = ["0-dim", "empty", "non-contiguous", "expanded", "sparse"]
CALLS = ["sync", "async", "remote"]
PLACES = ["a pool", "a fresh thread", "a fresh thread with the context", "asyncio.to_thread"]
DRAWS = ["dropout", "randint", "randperm"]
THRESHOLDS = [(700, 10, 10), (50, 5, 5), (5, 2, 2)]
INNER = ["hand-written checkpoint", "reversible block"]
FEATURES_OF_KIND = {
    "threads": [
        *(f"operator in {place}" for place in PLACES),
        *(f"call in {place}" for place in PLACES),
        "a deep chain and a shallow one, joined in another thread",
    ],
    "finalizers": ["finalizer that calls", "collector runs often"],
    "inner backwards": [*INNER],
    "failed passes": ["failing node"],
    "inputs": [],
    "draws": [*(f"draw: {draw}" for draw in DRAWS), "draw under a checkpoint"],
    "acts": ["several acts", "value carried to the next act", "state detached between acts"],
    "contexts": [
        *(f"scope: {scope}" for scope in SCOPES if scope != NO_CONTEXT),
        "block in a context of its own",
    ],
    "unread": ["result never read", "result dropped at once", "call that never leaves"],
}
FEATURES = [
    *(f"mode: {mode}" for mode in MODES),
    *(f"operator: {operator}" for operator in OPERATORS),
    *(f"shape: {shape}" for shape in SHAPES),
    *(f"call: {how}" for how in CALLS),
    f"scope: {NO_CONTEXT}",
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
    *(feature for features in FEATURES_OF_KIND.values() for feature in features),
]


def features_of(kinds: Collection[str]) -> list[str]:
    """What can be drawn if these kinds are."""
    without = {feature for kind in KINDS if kind not in kinds for feature in FEATURES_OF_KIND[kind]}
    without |= {f"mode: {mode}" for mode, kind in KIND_OF_MODE.items() if kind not in kinds}
    return [feature for feature in FEATURES if feature not in without]


@dataclass
class Act:
    """What the root runs, how it is differentiated, and what of it the next act finds."""

    mode: str
    body: Block
    losses: list[list[int]]
    leaves: list[int]
    """of the root, whose gradients are asked for beside those of received tensors"""
    retain: bool = False
    """whether the graph stays after the last pass of this act"""
    carried: list[int] = field(default_factory=list)
    """values that the root has in the next act too"""
    detached: list[int] = field(default_factory=list)
    """of what is kept and carried, cut off after this act"""
    zeroed: bool = False
    """whether all gradients are dropped after this act"""


@dataclass
class Program:
    """What to run, and on how many workers."""

    seed: int
    workers: int
    scope: str
    acts: list[Act]
    leaf_hooks: list[int]
    thresholds: tuple[int, int, int] | None = None
    """of the garbage collector while it runs"""
    features: Counter = field(default_factory=Counter)

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return any(self.features[f"draw: {draw}"] for draw in DRAWS)

    @property
    def adds_by_itself(self) -> bool:
        """Whether a backward inside the pass adds to leaves."""
        return any(self.features[feature] for feature in ("checkpoint, reentrant", *INNER))

    def __str__(self) -> str:
        modes = ", then ".join(act.mode for act in self.acts)
        return f"seed {self.seed}: {modes} on {self.workers} workers, {self.scope}"


def draw(seed: int, kinds: Collection[str] = KINDS) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    modes = [mode for mode in MODES if KIND_OF_MODE.get(mode) in (None, *kinds)]
    scope = rng.choice(SCOPES if "contexts" in kinds else [NO_CONTEXT])
    count = rng.choice([1, 1, 1, 2, 3, 4]) if "acts" in kinds else 1
    drawer = _Drawer(rng, rng.randint(2, 5), scope, kinds)
    drawer.note(f"scope: {scope}")
    mode = modes[seed % len(modes)]  # in turn, so that a few programs use all
    if mode in (LATER, EARLIER):
        drawn = [LATER, *rng.choices(modes, k=count - 1), EARLIER]
    else:
        drawn = [mode, *rng.choices(modes, k=count - 1)]
    if len(drawn) > 1:
        drawer.note("several acts")
    acts = [drawer.act(mode, is_last=n == len(drawn)) for n, mode in enumerate(drawn, 1)]
    hooked = [w for w in range(drawer.workers) if rng.random() < 0.4]
    if hooked:
        drawer.note("leaf hook", "post-accumulate hook", "accumulator hook")
    thresholds = None
    if drawer.features["finalizer that calls"] and rng.random() < 0.8:
        drawer.note("collector runs often")
        thresholds = rng.choice(THRESHOLDS)
    return Program(seed, drawer.workers, scope, acts, hooked, thresholds, drawer.features)


class _Drawer:
    def __init__(
        self, rng: random.Random, workers: int, scope: str, kinds: Collection[str]
    ) -> None:
        self.rng, self.workers, self.scope, self.kinds = rng, workers, scope, kinds
        self.mode = ""
        self.features: Counter = Counter()
        self.budget = 30
        self.may_draw = "draws" in kinds
        self.checkpoints = 0
        """around what is drawn now"""

    def act(self, mode: str, *, is_last: bool) -> Act:
        rng = self.rng
        self.mode, self.budget = mode, max(self.budget, 8)
        self.note(f"mode: {mode}")
        body = self.block(worker=0, caller=None, depth=0, steps=rng.randint(2, 7))
        losses = [[rng.randrange(64) for _ in range(rng.randint(1, 5))] for _ in range(2)]
        act = Act(mode, body, losses, [leaf for leaf in range(2) if rng.random() < 0.4])
        if not is_last:
            act.retain = rng.random() < 0.85
            act.carried = [self.index() for _ in range(rng.randint(0, 2))]
            act.detached = [n for n in range(4) if rng.random() < 0.25]
            act.zeroed = rng.random() < 0.3
            if act.carried:
                self.note("value carried to the next act")
            if act.detached:
                self.note("state detached between acts")
        return act

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
        if "threads" in self.kinds:
            kinds += [self.elsewhere] * 4
        if self.may_draw:
            kinds += [self.random_draw] * (6 if self.checkpoints else 3)
        if self.mode in FAILING:
            kinds += [self.fuse] * 4
        if depth < 4 and self.budget > 0:
            kinds += self.far_steps(pure)
        return self.rng.choice(kinds)(worker, caller, depth, pure)

    def far_steps(self, pure: bool) -> list:
        """The steps that reach other workers."""
        far = [self.call] * 6 + [self.shaped, self.failing, self.recursion]
        far += [self.checkpoint] * (4 if self.may_draw else 1)
        if "threads" in self.kinds:
            far += [self.chains] * 2
        if "unread" in self.kinds and not self.checkpoints:
            far += [self.unread, self.never_leaves]
        if "inner backwards" in self.kinds:
            far += [self.inner_backward] * 3
        if self.may_draw:
            far += [self.draw_there] * (6 if self.checkpoints else 1)
        if not pure:
            far += [self.kept, self.fan_out, self.reference, self.method]
            if "finalizers" in self.kinds:
                far += [self.finalizer] * 3
            if self.scope == MIXED_CONTEXTS:
                far += [self.room] * 4
        return far

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

    def elsewhere(self, *_: object) -> Step:
        place, name = self.rng.choice(PLACES), self.rng.choice(OPERATORS)
        self.note(f"operator in {place}", f"operator: {name}")
        return ["elsewhere", place, name, self.index(), self.index()]

    def random_draw(self, *_: object) -> Step:
        draw = self.rng.choice(DRAWS)
        self.note(f"draw: {draw}")
        if self.checkpoints:
            self.note("draw under a checkpoint")
        return ["draw", draw, self.index()]

    def draw_there(self, worker: int, caller: int | None, depth: int, pure: bool) -> Step:
        """A call whose last step draws, and whose result is used."""
        step = self.call(worker, caller, depth, pure)
        details = step[1]
        details["block"].append([*self.random_draw()[:2], -1])
        details["returned"].append(-1)
        details["used"].append(-1)
        return step

    def fuse(self, *_: object) -> Step:
        self.note("failing node")
        return ["fuse", self.index()]

    # -- steps that reach other workers

    def chains(self, worker: int, caller: int | None, *_: object) -> Step:
        self.note("a deep chain and a shallow one, joined in another thread")
        places = [*PLACES, "a fresh thread", None]
        lengths = [self.rng.randint(4, 7), self.rng.randint(1, 2)]
        self.rng.shuffle(lengths)
        chains = [
            [
                [self.target(worker, caller), self.rng.choice(places), self.rng.choice(places)]
                for _ in range(length)
            ]
            for length in lengths
        ]
        return ["chains", chains, self.rng.choice(PLACES), self.index()]

    def finalizer(self, worker: int, caller: int | None, *_: object) -> Step:
        self.note("finalizer that calls")
        return ["finalizer", self.target(worker, caller), self.index()]

    def inner_backward(self, worker: int, caller: int | None, depth: int, _: bool) -> Step:
        kind = self.rng.choice(INNER)
        self.note(kind)
        if kind == "reversible block":
            to = self.target(worker, caller) if self.rng.random() < 0.5 else None
            return ["reversible", to, self.index(), self.index()]
        return ["hand-written", self.recomputed(worker, caller, depth, draws=False), self.index()]

    def recomputed(self, worker: int, caller: int | None, depth: int, *, draws: bool) -> Block:
        """A block that runs again in the backward."""
        before = self.may_draw
        self.may_draw = before and draws
        self.checkpoints += 1
        block = self.block(worker, caller, depth + 1, self.rng.randint(1, 3), pure=True)
        self.checkpoints -= 1
        self.may_draw = before
        return [step for step in block if step != ["modify received"]]

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
        if "unread" in self.kinds and self.rng.random() < 0.15:
            self.note("result dropped at once")
            used = []
        modify = bool(used) and self.rng.random() < 0.25
        if modify:
            self.note("returned tensor modified in place")
        return [
            "call",
            {
                "to": to,
                "how": how,
                "place": self.place_of_call(),
                "mode": mode,
                "shape": shape,
                "block": self.inner(to, worker, depth, pure),
                "arguments": [self.index() for _ in range(self.rng.randint(0, 2))],
                "returned": returned,
                "used": used,
                "modify": modify,
            },
        ]

    def place_of_call(self) -> str | None:
        # A checkpoint that draws knows only the calls of its own thread.
        if "threads" not in self.kinds or self.checkpoints or self.rng.random() < 0.7:
            return None
        place = self.rng.choice(PLACES)
        self.note(f"call in {place}")
        return place

    def unread(self, worker: int, caller: int | None, depth: int, _: bool) -> Step:
        """A call whose result nobody asks for. Nobody knows when it runs, or whether."""
        self.note("result never read")
        to, how = self.target(worker, caller), self.rng.choice(CALLS[1:])
        may_draw, self.may_draw = self.may_draw, False
        block = self.inner(to, worker, depth, True)
        self.may_draw = may_draw
        return ["unread", to, how, block, self.index()]

    def never_leaves(self, *_: object) -> Step:
        self.note("call that never leaves")
        return ["never leaves", self.index()]

    def room(self, worker: int, caller: int | None, depth: int, pure: bool) -> Step:
        self.note("block in a context of its own")
        block = self.block(worker, caller, depth + 1, self.rng.randint(1, 3), pure=pure)
        return ["room", [step for step in block if step != ["modify received"]]]

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
        reentrant = self.rng.random() < 0.3
        self.note("checkpoint, reentrant" if reentrant else "checkpoint, not reentrant")
        block = self.recomputed(worker, caller, depth, draws=True)
        return ["checkpoint", reentrant, block, self.index()]

    def kept(self, worker: int, caller: int | None, *_: object) -> Step:
        self.note("state kept and used later")
        return ["kept", self.target(worker, caller), self.index()]

    def fan_out(self, worker: int, caller: int | None, depth: int, _: bool) -> Step:
        self.note("fan-out joined later")
        branches = []
        may_draw, self.may_draw = self.may_draw, False  # they would draw in any order
        for _ in range(self.rng.randint(2, 3)):
            to = self.target(worker, caller)
            branches.append([to, self.inner(to, worker, depth, True), self.index()])
        self.may_draw = may_draw
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
