"""Source lines that write new rows into a cache, for every movement and spelling of `spec.WRITES`."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Cache `c` and rows `new` as expressions; slots on `axis`; `n` new of `total`, `sink` stay first.

    Counts are in slots, or in frames where the layout has an axis of frames. `n` may be the variable
    of the number of new rows: then `count` is what it stands for.
    """

    c: str
    new: str
    axis: int
    n: str
    count: int
    total: int
    sink: int

    def at(self, a: object, b: object) -> str:
        """`c[:, a:b]` on the slot axis."""
        return self.c + self.cut(a, b)

    def cut(self, a: object, b: object) -> str:
        return "[" + ":, " * self.axis + f"{a}:{b}]"

    def cat(self, *parts: str) -> str:
        return f"torch.cat([{', '.join(parts)}], dim={self.axis})"

    def column(self, values: str) -> str:
        """1-D `values` broadcast along the slot axis; trailing axes by `[..., None]`."""
        return f"({values})[(slice(None), *[None] * ({self.c}.dim() - {self.axis} - 1))]"


def shift(p: Place, how: str) -> list[str]:
    """The oldest rows of the window go, the new ones come last."""
    n, s, total, ax = p.n, p.sink, p.total, p.axis
    keep = [p.at(0, s)] * bool(s)
    if how == "cat":
        return [f"{p.c}.copy_({p.cat(*keep, p.at(f'{s} + {n}', total), p.new)})"]
    if how == "clone":
        return [
            f"{p.at(s, f'{total} - {n}')} = {p.at(f'{s} + {n}', total)}.clone()",
            f"{p.at(f'{total} - {n}', total)} = {p.new}",
        ]
    if how == "roll":
        return [
            f"moved = torch.roll({p.at(s, total)}, -{n}, {ax})",
            f"moved{p.cut(f'{total - s} - {n}', total - s)} = {p.new}",
            f"{p.at(s, total)} = moved",
        ]
    if how == "gather":
        ids = f"torch.arange({total} - {n}) + {n} * (torch.arange({total} - {n}) >= {s})"
        return [f"{p.c}.copy_({p.cat(f'{p.c}.index_select({ax}, {ids})', p.new)})"]
    if how == "aside":
        return [
            f"moved = torch.empty_like({p.c})",
            *([f"moved{p.cut(0, s)} = {p.at(0, s)}"] * bool(s)),
            f"moved{p.cut(s, f'{total} - {n}')} = {p.at(f'{s} + {n}', total)}",
            f"moved{p.cut(f'{total} - {n}', total)} = {p.new}",
            f"{p.c}.copy_(moved)",
        ]
    if how == "blocks":
        steps = range(s, total - p.count, p.count)
        return [
            *(f"{p.at(i, i + p.count)}.copy_({p.at(i + p.count, i + 2 * p.count)})" for i in steps),
            f"{p.at(total - p.count, total)} = {p.new}",
        ]
    if how == "where":
        old = p.column(f"torch.arange({total}) < {s}")
        return [
            f"{p.c}.copy_(torch.where({old}, {p.c}, torch.roll({p.c}, -{n}, {ax})))",
            f"{p.at(f'{total} - {n}', total)} = {p.new}",
        ]
    if how == "pad":
        pad = f"(0, 0) * ({p.c}.dim() - {ax} - 1) + (0, {n})"
        return [
            f"moved = F.pad({p.at(f'{s} + {n}', total)}, {pad})",
            f"moved{p.cut(f'{total - s} - {n}', total - s)} = {p.new}",
            f"{p.at(s, total)} = moved",
        ]
    if how == "scatter":
        src, dst = f"torch.arange({s} + {n}, {total})", f"torch.arange({s}, {total} - {n})"
        return [
            f"{p.c}.index_copy_({ax}, {dst}, {p.c}.index_select({ax}, {src}))",
            f"{p.c}.index_copy_({ax}, torch.arange({total} - {n}, {total}), {p.new})",
        ]
    assert how == "two"
    last = p.at(f"{total} - {n}", total)
    return [
        f"{p.c}.copy_({p.cat(*keep, p.at(f'{s} + {n}', total), last)})",
        f"{last}.copy_({p.new})",
    ]


def ring(p: Place, how: str) -> list[str]:
    """The window is a ring already."""
    n, s, ax, window = p.count, p.sink, p.axis, p.total - p.sink
    at = f"{s} + (step % {window // n}) * {n}"
    if how == "slice":
        return [f"p = {at}", f"{p.at('p', f'p + {n}')} = {p.new}"]
    if how == "narrow":
        return [f"{p.c}.narrow({ax}, {at}, {n}).copy_({p.new})"]
    if how == "index_copy":
        return [f"{p.c}.index_copy_({ax}, torch.arange({n}) + ({at}), {p.new})"]
    if how == "index_put":
        return [f"{p.c}[{':, ' * ax}torch.arange({n}) + ({at})] = {p.new}"]
    if how == "wrap":
        ids = f"(torch.arange({n}) + step * {n + 1}) % {window} + {s}"
        return [f"{p.c}.index_copy_({ax}, {ids}, {p.new})"]
    if how == "select":
        return [f"{p.c}.select({ax}, {at}).copy_({p.new}.squeeze({ax}))"]
    assert how == "where"
    hit = p.column(f"torch.arange({p.total}) == {at}")
    return [f"{p.c}.copy_(torch.where({hit}, {p.new}, {p.c}))"]


def middle(p: Place, how: str) -> list[str]:
    """The second oldest rows go."""
    a = p.sink + p.count
    if how == "cat":
        return [f"{p.c}.copy_({p.cat(p.at(0, a), p.at(a + p.count, p.total), p.new)})"]
    ids = [i for i in range(p.total) if not a <= i < a + p.count]
    kept = f"{p.c}[{':, ' * p.axis}torch.tensor({ids})]"
    return [f"{p.c}.copy_({p.cat(kept, p.new)})"]


def front(p: Place, how: str) -> list[str]:
    """Newest first."""
    s, n = p.sink, p.count
    if how == "cat":
        parts = [p.at(0, s)] * bool(s) + [p.new, p.at(s, p.total - n)]
        return [f"{p.c}.copy_({p.cat(*parts)})"]
    return [
        f"{p.at(s + n, p.total)} = {p.at(s, p.total - n)}.clone()",
        f"{p.at(s, s + n)} = {p.new}",
    ]


def insert(p: Place, how: str) -> list[str]:
    a = p.sink + p.count
    return [f"{p.c}.copy_({p.cat(p.at(0, a), p.new, p.at(a, p.total - p.count))})"]


def partial(p: Place, how: str) -> list[str]:
    """Only some of the new rows are kept: the last ones, or the first."""
    s, u = p.sink, max(1, p.count - 1)
    new = f"{p.new}{p.cut(p.count - u, p.count) if how == 'cat' else p.cut(0, u)}"
    keep = [p.at(0, s)] * bool(s)
    return [f"{p.c}.copy_({p.cat(*keep, p.at(s + u, p.total), new)})"]


def reverse(p: Place, how: str) -> list[str]:
    """The new rows in reversed order."""
    flipped = f"{p.new}.flip({p.axis})"
    return shift(
        Place(p.c, flipped, p.axis, p.n, p.count, p.total, p.sink), how if how == "cat" else "clone"
    )


def split(p: Place, how: str) -> list[str]:
    """The new rows are written in two pieces."""
    n, total, s, u = p.count, p.total, p.sink, max(1, p.count // 2)
    moved = f"{p.at(s, total - n)} = {p.at(s + n, total)}.clone()"
    first = f"{p.at(total - n, total - n + u)} = {p.new}{p.cut(0, u)}"
    rest = [f"{p.at(total - n + u, total)} = {p.new}{p.cut(u, n)}"] * (u < n)
    return [moved, first, *rest] if how == "clone" else [moved, *rest, first]


def overwrite(p: Place, how: str) -> list[str]:
    return [f"{p.at(f'{p.total} - {p.n}', p.total)} = {p.new}"]


def revise(p: Place, how: str) -> list[str]:
    """An older frame is written anew as well."""
    a = p.total - 2 * p.count
    return [*shift(p, how), f"{p.at(a, a + p.count)} = 0.5 * {p.new} + 0.3"]


def grow_sink(p: Place, how: str) -> list[str]:
    """The first frames of a session stay; how many depends on the step."""
    ids = f"torch.arange({p.total - p.count})"
    keep = f"{ids} + {p.count} * ({ids} >= min(step, 2) * {p.count})"
    return [f"{p.c}.copy_({p.cat(f'{p.c}.index_select({p.axis}, {keep})', p.new)})"]


def swap(p: Place, how: str) -> list[str]:
    """What is kept changes places."""
    ids = list(range(p.total - 1, p.count - 1, -1))
    return [f"{p.c}.copy_({p.cat(f'{p.c}.index_select({p.axis}, torch.tensor({ids}))', p.new)})"]


def double(p: Place, how: str) -> list[str]:
    """Two shifts in a row, of which the first brings something else."""
    other = Place(p.c, f"({p.new} * 0.5)", p.axis, p.n, p.count, p.total, p.sink)
    return [*shift(other, how), *shift(p, how)]


def zero(p: Place, how: str) -> list[str]:
    """A slot is cleared."""
    hit = p.at(p.sink, p.sink + 1)
    clear = f"{hit} = 0" if how == "slice" else f"{hit}.zero_()"
    return [*shift(p, "clone"), clear]


def stay(p: Place, how: str) -> list[str]:
    return ["pass"]


MOVEMENTS: dict[str, Callable[[Place, str], list[str]]] = {
    "shift": shift,
    "ring": ring,
    "middle": middle,
    "front": front,
    "insert": insert,
    "partial": partial,
    "reverse": reverse,
    "split": split,
    "overwrite": overwrite,
    "revise": revise,
    "grow_sink": grow_sink,
    "swap": swap,
    "double": double,
    "zero": zero,
    "stay": stay,
}
