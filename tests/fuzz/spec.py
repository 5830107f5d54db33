"""What a random model is: independent choices, each with a plain default to shrink towards.

A `Spec` is drawn from a seed. `source.py` writes it as a module of plain PyTorch, `drive.py` runs it.
Not every combination makes sense as a model, but each is a program with one meaning, and rtc must keep
it or say no.
"""

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# cache layouts: axes of [batch, slots, heads, features], E = heads x features, F = frames
LAYOUTS = ("BSHD", "BHSD", "SBHD", "BHDS", "HBSD", "BSE", "SHD", "HSD", "BFTHD")
HOMES = ("buffer", "submodule", "parameter", "args", "dict", "list")

# movement -> spellings
WRITES = {
    "shift": (
        "cat",
        "clone",
        "roll",
        "gather",
        "aside",
        "blocks",
        "where",
        "pad",
        "scatter",
        "two",
    ),
    "ring": ("slice", "narrow", "index_copy", "index_put", "wrap", "select", "where"),
    "middle": ("cat", "gather"),
    "front": ("cat", "clone"),
    "insert": ("cat",),
    "partial": ("cat", "first"),
    "reverse": ("cat", "clone"),
    "split": ("clone", "backwards"),
    "overwrite": ("slice",),
    "revise": ("clone", "cat"),
    "grow_sink": ("gather",),
    "swap": ("gather",),
    "double": ("cat", "clone"),
    "zero": ("slice", "zero_"),
    "stay": ("nothing",),
}
READS = (
    "all", "last", "first", "sink_last", "evens", "flip", "pick", "twice", "moving", "unroll", "unroll",
)  # fmt: skip
KEY_OPS = (
    "rope", "rope", "rope", "rms", "ln", "normalize", "head", "slot_mul", "slot_add", "age", "step_int",
    "step_float", "f32", "bf16", "quant", "tanh", "gate", "mix", "demean", "flip_d", "amax_slot",
    "amax_all", "cumsum_d", "tiny", "literal", "data",
)  # fmt: skip
VALUE_OPS = ("head", "slot_mul", "f32", "rms", "tanh", "rope", "step_int", "mix", "age")
# reductions round differently for another number of rows: nothing that may flip a digit after them
REDUCING = {
    "rms",
    "ln",
    "normalize",
    "demean",
    "amax_slot",
    "amax_all",
    "cumsum_d",
    "mix",
    "tanh",
    "gate",
}
ROUNDING = {"f32", "bf16", "quant"}
ROPES = (
    "half",
    "roll",
    "interleaved",
    "complex",
    "partial",
    "axes",
    "split_sink",
    "addcmul",
    "decay",
)
# offset of the window's positions, and of the sink's, as a function of the step
OFFSETS = (
    "0", "step * {n}", "step", "(step % 5) * {n}", "(step // 3) * {n}", "min(step, 6) * {n}",
    "max(step - 4, 0) * {n}", "(step * {n}) % 17", "-step", "step * {n} - (step // 7) * 7 * {n}",
    "3 * ((step + 2) % 4)", "step % 2",
)  # fmt: skip
SINK_OFFSETS = ("same", "0", "step", "(step % 5) * {n}", "-2")
POSITIONS = ("slot", "slot", "slot", "age", "scaled", "reversed", "table")
ATTENTIONS = ("sdpa", "matmul", "einsum", "by_hand")
MASKS = (
    "none", "none", "none", "slot", "age", "visible", "growing", "triangle", "step", "causal", "row",
)  # fmt: skip
STAGES = ("before", "after", "cat", "cat_all", "clone")
INTS = ("up", "up", "up", "jumps", "repeats", "back", "walk", "constant", "large")
SECONDS = ("none", "none", "none", "other_rope", "other_value", "again", "raw", "old", "query")
OPTIONS = ("", "", "", "", "no_ring", "write_back", "nothing")

ACTIONS = (
    "read", "read", "read", "peek", "zero", "part", "swap", "swap_all", "load", "materialize",
    "invalidate", "eager", "twin", "twin_plain", "deepcopy", "inference", "hold", "const", "const_swap",
    "grad", "explain", "fail", "session", "session", "reopen", "report", "shape", "copy_row", "data",
    "numpy", "held_write", "odd_read", "copy_compiled",
)  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """Sizes in slots; `new` rows join in a pass. The defaults are the plainest model."""

    seed: int = 0
    batch: int = 1
    heads: int = 2
    dim: int = 8
    new: int = 2
    frames: int = 4  # of the window
    sink: int = 0  # in frames
    layers: int = 1
    passes: int = 1
    later: str = "overwrite"  # movement of the passes after the first
    layout: str = "BHSD"
    layout_v: str = ""  # another one for the values
    stacked: int = -1  # axis on which keys and values lie side by side, or -1
    home: str = "buffer"
    write: tuple[str, str] = ("shift", "cat")
    write_v: tuple[str, str] | None = None  # another one for the values
    stage: str = "before"  # the write stands before or after the read, or the read is of a cat
    read: str = "all"
    slice_late: bool = False  # the read is cut after the change of layout
    work: str = "BHSD"
    key_ops: tuple[str, ...] = ()
    value_ops: tuple[str, ...] = ()
    value: str = "v"  # "key": keys serve as values; "roped": rotated ones do
    rope: str = "half"
    position: str = "slot"
    offset: str = "0"
    sink_offset: str = "same"
    attention: str = "sdpa"
    mask: str = "none"
    groups: int = 1  # query heads per key head
    group_by: str = "gqa"
    text: int = 0
    second: str = "none"
    flag: str = "none"  # a bool argument: "first" shifts or overwrites, "const" chooses a constant
    extra_int: bool = False  # an int argument besides the step
    shared: bool = False  # two layers on one pair of caches
    dtype: str = "float64"  # of the caches
    options: str = ""
    start: str = "zeros"
    ints: str = "up"
    feedback: bool = False
    actions: tuple[tuple[int, str], ...] = ()

    @property
    def window(self) -> int:
        return self.frames * self.new

    @property
    def slots(self) -> int:
        return (self.frames + self.sink) * self.new


def draw(seed: int, steps: int = 40) -> Spec:
    """The spec of a seed. Half of the choices are left plain, so that the others meet alone too."""
    r = random.Random(seed)

    def rare(p: float, then: Any, other: Any) -> Any:
        chosen = then() if callable(then) else then
        return chosen if r.random() < p else other

    movement = rare(0.5, lambda: r.choice(list(WRITES)), "shift")
    write = (movement, r.choice(WRITES[movement]))
    spec = Spec(
        seed=seed,
        batch=r.choice((1, 1, 2)),
        heads=r.choice((1, 2, 2, 3)),
        dim=r.choice((4, 8, 8, 12)),
        new=r.choice((1, 2, 2, 3)),
        frames=r.choice((3, 4, 4, 5)),
        sink=r.choice((0, 0, 1, 1, 2)),
        layers=r.choice((1, 1, 1, 2)),
        passes=r.choice((1, 1, 1, 2, 3)),
        later=r.choice(("overwrite", "overwrite", "overwrite", "same", "stay")),
        layout=r.choice(LAYOUTS),
        layout_v=rare(0.15, lambda: r.choice(LAYOUTS[:6]), ""),
        stacked=rare(0.15, lambda: r.choice((0, 1)), -1),
        home=r.choice(HOMES),
        write=write,
        write_v=rare(0.2, lambda: _write_v(r, movement), None),
        stage=rare(0.5, lambda: r.choice(STAGES), "before"),
        read=rare(0.3, lambda: r.choice(READS), "all"),
        slice_late=r.random() < 0.5,
        work=r.choice(("BSHD", "BHSD")),
        key_ops=_ops(r, KEY_OPS, r.choice((0, 1, 1, 2, 3)), rope=0.6),
        value_ops=_ops(r, VALUE_OPS, rare(0.3, lambda: r.choice((1, 2)), 0)),
        value=rare(0.15, lambda: r.choice(("key", "roped")), "v"),
        rope=r.choice(ROPES),
        position=r.choice(POSITIONS),
        offset=r.choice(OFFSETS),
        sink_offset=r.choice(SINK_OFFSETS),
        attention=r.choice(ATTENTIONS),
        mask=r.choice(MASKS),
        groups=r.choice((1, 1, 1, 2)),
        group_by=r.choice(("gqa", "repeat", "expand")),
        text=rare(0.15, 2, 0),
        second=r.choice(SECONDS),
        flag=rare(0.25, lambda: r.choice(("first", "const")), "none"),
        extra_int=r.random() < 0.2,
        shared=r.random() < 0.1,
        dtype=rare(0.2, lambda: r.choice(("float32", "bfloat16")), "float64"),
        options=r.choice(OPTIONS),
        start=r.choice(("zeros", "normal")),
        ints=r.choice(INTS),
        feedback=r.random() < 0.3,
    )
    actions = []
    for step in range(2, steps):
        if r.random() < 0.12:
            actions.append((step, r.choice(ACTIONS)))
    return legal(dataclasses.replace(spec, actions=tuple(actions)))


def _write_v(r: random.Random, movement: str) -> tuple[str, str]:
    """The values are written in another spelling, seldom in another movement."""
    if r.random() < 0.25:
        movement = r.choice(list(WRITES))
    return movement, r.choice(WRITES[movement])


def _ops(r: random.Random, ops: tuple[str, ...], n: int, rope: float = 0.0) -> tuple[str, ...]:
    chosen = [r.choice(ops) for _ in range(n)]
    if r.random() < rope and "rope" not in chosen:
        chosen.insert(r.randrange(len(chosen) + 1), "rope")
    return tuple(chosen)


def legal(spec: Spec) -> Spec:
    """Mend combinations that eager PyTorch would not run, or whose rounding would prove nothing."""
    change: dict[str, Any] = {}
    if spec.stacked >= 0:
        change.update(layout_v="", write_v=None)
        if spec.home == "list":
            change["home"] = "dict"
    if "SHD" in (spec.layout, spec.layout_v) or "HSD" in (spec.layout, spec.layout_v):
        change["batch"] = 1
    if spec.write[0] in ("grow_sink", "middle", "revise") and spec.frames < 4:
        change["frames"] = 4
    for name in ("key_ops", "value_ops"):
        ops, seen = [], False
        for op in getattr(spec, name):
            seen |= op in REDUCING
            if not (op in ROUNDING and seen):
                ops.append(op)
        change[name] = tuple(ops)
    if spec.attention != "sdpa":
        change["group_by"] = "repeat" if spec.group_by == "gqa" else spec.group_by
        if spec.mask == "causal":
            change["mask"] = "triangle"
    if spec.text and spec.mask == "causal":
        change["mask"] = "none"
    if spec.flag == "first":
        change.update(passes=1, stage="before")
    if spec.stage in ("cat", "cat_all"):
        change.update(write=("shift", "cat"), write_v=None, passes=1, read="all")
        if spec.second == "old":
            change["second"] = "none"
    if spec.shared and spec.layers == 1:
        change["shared"] = False
    for name in ("write", "write_v"):
        w = change.get(name, getattr(spec, name))
        if w == ("ring", "where") and not (spec.new == 1 or spec.layout == "BFTHD"):
            change[name] = ("ring", "slice")
        if w == ("ring", "select") and not (spec.new == 1 or spec.layout == "BFTHD"):
            change[name] = ("ring", "narrow")
    return dataclasses.replace(spec, **change)


def simpler(spec: Spec) -> Iterator[tuple[str, Spec]]:
    """(what was simplified, the simpler spec), one choice at a time."""
    plain = Spec()
    if len(spec.actions) > 1:
        half = len(spec.actions) // 2
        yield "actions", dataclasses.replace(spec, actions=spec.actions[:half])
        yield "actions", dataclasses.replace(spec, actions=spec.actions[half:])
    for i in range(len(spec.actions)):
        rest = spec.actions[:i] + spec.actions[i + 1 :]
        yield "actions", dataclasses.replace(spec, actions=rest)
    for name in ("key_ops", "value_ops"):
        ops = getattr(spec, name)
        for i in range(len(ops)):
            yield name, dataclasses.replace(spec, **{name: ops[:i] + ops[i + 1 :]})
    for field in dataclasses.fields(spec):
        default = getattr(plain, field.name)
        if field.name not in ("seed", "actions") and getattr(spec, field.name) != default:
            found = legal(dataclasses.replace(spec, **{field.name: default}))
            if found != spec:
                yield field.name, found


def shown(spec: Spec) -> str:
    """The choices that are not plain."""
    plain = Spec()
    parts = [
        f"{f.name}={getattr(spec, f.name)!r}"
        for f in dataclasses.fields(spec)
        if getattr(spec, f.name) != getattr(plain, f.name)
    ]
    return f"Spec({', '.join(parts)})"
