"""`run_ranks` itself: results in order, the failing rank's traceback, no hang outlives it."""

# mypy: no-check-untyped-defs, allow-untyped-defs

import os
import time

import pytest
import torch
import torch.distributed as dist

from .conftest import RankFailed, run_ranks


def add(more):
    x = torch.full((3,), float(dist.get_rank() + more))
    dist.all_reduce(x)
    return dist.get_rank(), x.tolist()


def one_raises():
    if dist.get_rank() == 1:
        raise KeyError("of rank one")
    dist.all_reduce(torch.ones(1))


def one_dies():
    if dist.get_rank() == 1:
        os._exit(3)
    dist.all_reduce(torch.ones(1))


def one_is_missing():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    return os.getpid()


def test_results_come_in_order():
    assert run_ranks(add, 3, 5) == [(r, [18.0] * 3) for r in range(3)]


def test_the_failing_rank_is_shown():
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2.*one_raises.*of rank one"):
        run_ranks(one_raises, 2)


def test_a_dead_rank_is_told():
    with pytest.raises(RankFailed, match="rank"):
        run_ranks(one_dies, 2)


def test_a_hang_ends_and_shows_where():
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)hang|one_is_missing"):
        run_ranks(one_is_missing, 2, timeout=3)
    assert time.monotonic() - started < 30
