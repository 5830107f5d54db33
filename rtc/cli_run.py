"""``rtc run TARGET`` on the command line: its flags, and one clear line for what goes wrong."""

from __future__ import annotations

import argparse
import logging
import math
import sys
from collections.abc import Sequence
from typing import Any

import rtc
from rtc.options import Options

HELP = """
On several ranks: torchrun --nproc-per-node 2 -m rtc run TARGET
Each process takes the GPU of its LOCAL_RANK (or the CPU, over Gloo) and joins the process group
before the factory is called. A factory with parameters named rank and world is given them. The
factory returns this rank's shard; models on the CPU are moved to the GPU.
"""


class UsageError(Exception):
    """Bad input: one line that says what, where, and what to do."""


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("--steps", type=int, default=20, help="steps to time (default: 20)")
    p.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    p.add_argument(
        "--advance", metavar="NAME[=BY]", action="append",
        help="an int argument that grows in each call, by 1 or BY (default: step, chunk and the "
        "like); may be given more than once",
    )  # fmt: skip
    p.add_argument(
        "--lowering", choices=("inductor", "eager"), default="inductor",
        help="eager: run the rewritten graph op by op; needs no compiler, and is slow",
    )  # fmt: skip
    p.add_argument(
        "--timeout", metavar="SECONDS", type=float, default=600.0,
        help="of the process group: how long ranks wait for one that loads (default: 600)",
    )  # fmt: skip
    p.add_argument(
        "--rank-timeout", metavar="SECONDS", type=float, default=Options.rank_timeout_s,
        help="without a sign of life, after which a rank is lost (default: 60)",
    )  # fmt: skip


def command(args: argparse.Namespace, options: Options) -> tuple[int, dict[str, Any] | None]:
    """(exit code, result on rank 0). One rank of several that failed ends here."""
    from rtc import run

    if args.steps < 1:
        raise UsageError(f"--steps {args.steps}: at least 1")
    if not 0 < args.timeout < math.inf:
        raise UsageError(f"--timeout {args.timeout}: a number of seconds")
    advance = _advance(args.advance)
    here = run.place(args.device)
    logging.disable(logging.ERROR)  # what fails is said in one line
    try:
        with run.group(here, args.timeout):
            result = run.run(args.target, here, options, args.steps, args.timeout, advance)
    except (run.RunError, rtc.RankLostError, rtc.RanksDisagreeError) as e:
        who = f"rank {here.rank}: " if here.world > 1 else ""
        print(f"rtc: {who}error: {e}", file=sys.stderr)
        return run.leave(here, 1), None
    except rtc.RtcError as e:  # of the target or the options: all ranks find it alike
        if here.rank == 0:
            print(f"rtc: error: {e}", file=sys.stderr)
        return run.leave(here, 2), None
    finally:
        logging.disable(logging.NOTSET)
    return 0, result if here.rank == 0 else None


def _advance(said: Sequence[str] | None) -> dict[str, int] | None:
    """``NAME`` and ``NAME=BY`` of the command line."""
    if said is None:
        return None
    out = {}
    for text in said:
        name, _, by = text.partition("=")
        try:
            out[name] = int(by or 1)
        except ValueError:
            raise UsageError(f"--advance {text}: NAME, or NAME=BY with a whole number") from None
    return out
