"""Where axes go: shared arithmetic of layout ops on a set of tracked axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class NotLocal(Exception):
    """The op mixes slots, or puts device data into them: the region ends before it."""


def ints(shape: Sequence[object]) -> tuple[int, ...]:
    """A static shape; symbolic sizes end the region."""
    out = []
    for s in shape:
        if not isinstance(s, int):
            expr = getattr(getattr(s, "node", None), "expr", None)
            if expr is None or not expr.is_number:
                raise NotLocal(f"size {s} follows from ints, and has not settled yet")
            s = int(expr)
        out.append(int(s))
    return tuple(out)


def hint(x: Any) -> int:
    """The value of a size or an int in the call that was traced; adds no guard. 0: unknown."""
    if isinstance(x, int):
        return x
    value = getattr(getattr(x, "node", None), "hint", None)
    return int(value) if value is not None else 0


def reshape_groups(src: Sequence[int], dst: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Smallest groups of source and target axes with equal products, in order."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(src) or j < len(dst):
        a: list[int] = []
        b: list[int] = []
        pa = pb = 1
        if i < len(src):
            a, pa, i = [i], src[i], i + 1
        if j < len(dst) and (pa != 1 or not a):
            b, pb, j = [j], dst[j], j + 1
        elif j < len(dst) and dst[j] == 1:
            b, pb, j = [j], 1, j + 1
        while pa != pb:
            if pa < pb:
                if i >= len(src):
                    raise NotLocal("reshape does not factor")
                a.append(i)
                pa *= src[i]
                i += 1
            else:
                if j >= len(dst):
                    raise NotLocal("reshape does not factor")
                b.append(j)
                pb *= dst[j]
                j += 1
        groups.append((a, b))
    return groups


def reshape_dims(src: Sequence[int], dst: Sequence[int], dims: Sequence[int]) -> tuple[int, ...]:
    """Where the tracked axes ``dims`` of ``src`` are in ``dst``.

    Raises NotLocal where a tracked axis is merged with an untracked one.
    """
    out: list[int] = []
    tracked = set(dims)
    for a, b in reshape_groups(src, dst):
        hit = [d for d in a if d in tracked]
        if not any(src[d] != 1 for d in hit):
            continue
        if any(d not in tracked and src[d] != 1 for d in a):
            raise NotLocal("reshape merges the slot axis with another")
        out.extend(d for d in b if dst[d] != 1)
    if not out:
        raise NotLocal("a single slot has no axis of its own")
    # axes of size 1 between slot axes belong to them
    full = tuple(range(out[0], out[-1] + 1))
    if any(dst[d] != 1 and d not in out for d in full):
        raise NotLocal("slot axes are not adjacent")
    return full


def normal_dims(dims: object, rank: int) -> tuple[int, ...]:
    """Reduction axes as non-negative ints; None or [] means all."""
    if dims is None or dims == []:
        return tuple(range(rank))
    if isinstance(dims, int):
        dims = [dims]
    assert isinstance(dims, (list, tuple))
    return tuple(int(d) % rank for d in dims)
