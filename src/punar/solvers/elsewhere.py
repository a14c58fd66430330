"""Planning in another process, so that a search of seconds takes none of the interpreter that trains.

A thread of the training process would share its interpreter lock: the steps of 16 blocks took 3.4 times as long while it planned, and 1.06 times beside another
process, on two cores. That one loads neither torch nor the user's code, only what plans (see ``solve``); it gets a trace, which is data, and gives back a plan.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO

from punar.errors import PlanError, PunarError
from punar.ir import Trace
from punar.plan import Plan
from punar.plan.moves import Channel
from punar.solvers.door import least, solve

MOST_SECONDS = 600.0
"""A search that takes longer is given up."""

_NICENESS = 5
"""How far the other process stands back behind the one that trains, as ``nice`` counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What ``solve`` is asked. ``budget_bytes``: None for what ``least`` finds."""

    trace: Trace
    budget_bytes: int | None
    solver: str = "auto"
    channels: tuple[Channel, ...] = ()

    def answer(self) -> Plan:
        """Makes the plan, here and now.

        Raises:
            InfeasibleBudget: no known plan fits.
        """
        if self.budget_bytes is None:
            return least(self.trace, self.channels)
        return solve(self.trace, self.budget_bytes, self.solver, self.channels)


_PROGRAM = f"""
import sys
sys.path[:] = filter(None, sys.path)  # where it was started is no place to import from
from {__name__} import serve
serve(sys.stdin.buffer, sys.stdout.buffer)
"""


def solve_elsewhere(request: Request) -> Plan:
    """Answers a request in a process of its own, and waits for it.

    Raises:
        PlanError: no plan fits, or the process could not be started, failed, or took too long.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM],
            input=pickle.dumps(request),
            capture_output=True,
            timeout=MOST_SECONDS,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            check=False,
        )
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise PlanError(f"asked for a plan from another process, which could not be had: {error}") from error
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip() or "nothing").splitlines()[-1]
        raise PlanError(f"asked for a plan from another process, which ended with {done.returncode} and said: {last}")
    try:
        found = pickle.loads(done.stdout)
    except Exception as error:  # whatever else was written there decides which
        raise PlanError(f"asked for a plan from another process, found no plan in what it wrote: {error}") from error
    if isinstance(found, Plan):
        return found
    raise PlanError(f"asked for a plan from another process, which found none: {found}")


def can_ask() -> bool:
    """Whether there is an interpreter to start: a program that was frozen into one file would start itself again."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Reads one request and writes the plan, or what an error of ours says."""
    with suppress(AttributeError, OSError):
        os.nice(_NICENESS)
    request = pickle.load(questions)
    try:
        found: Plan | str = request.answer()
    except PunarError as error:
        found = str(error)
    answers.write(pickle.dumps(found))
