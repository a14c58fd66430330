"""``torch.compile`` with ``activation_memory_budget``, in a process of its own and relative to plain ``torch.compile``.

Transformers' blocks are compiled one by one, as their users do, other models whole. What the compiler keeps between steps is mostly its code: it
is not counted, in plain ``torch.compile`` and with a budget alike.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch._dynamo.config as dynamo
import torch._functorch.config as functorch
from torch._inductor.compile_fx import compile_fx

from peers.measure import Bench, Ratio, Run
from peers.memory import find_witness
from peers.models import Subject, make_subject
from peers.patches import restore

BUDGETS = (1.0, 0.7, 0.4, 0.2, 0.0)
"""The first is plain ``torch.compile``."""


def measure_compiled(name: str, scale: float, rounds: int, until: float) -> dict[str, Any]:
    """The points of one model, with what compiling each took."""
    dynamo.recompile_limit, dynamo.accumulated_recompile_limit = 64, 1024
    bench = Bench(make_subject(name, scale), find_witness())
    runs, compile_s = [], []
    for budget in BUDGETS:
        start = time.perf_counter()
        runs.append(bench.add(Run(name=f"torch.compile, budget {budget}", patch=compiled(bench.subject, budget))))
        compile_s.append(time.perf_counter() - start)
        print(f"  {runs[-1].name}: {runs[-1].error or f'{compile_s[-1]:.0f} s'}", file=sys.stderr, flush=True)
    bench.take_turns(rounds, until)
    base = runs[0]
    return {
        "model": name,
        "scale": scale,
        "rounds": rounds,
        "compiled": "each block" if is_by_block(bench.subject) else "whole",
        "plain_compiled_against_eager": {} if base.error else base.as_data(bench.plain),
        "compile_s": dict(zip((run.name for run in runs), compile_s, strict=True)),
        "points": [point(run, base) for run in runs[1:]] if not base.error else [],
        "errors": {run.name: run.error for run in runs if run.error},
    }


def point(run: Run, base: Run) -> dict[str, Any]:
    """A run relative to plain ``torch.compile``; only its name and error where it failed."""
    if run.error:
        return {"name": run.name, "error": run.error}
    return {
        "name": run.name,
        "memory_ratio": (run.peak_bytes - run.held_bytes) / (base.peak_bytes - base.held_bytes),
        "time_ratio": asdict(Ratio.of(run.cpu_s, base.cpu_s)),
        "gradient_error": run.gradient_error,
    }


def is_by_block(subject: Subject) -> bool:
    return subject.has_attention


def compiled(subject: Subject, budget: float) -> Callable[[], Any]:
    """A patch that runs blocks or model compiled within a budget; compiled once for each class, at its first step."""
    modules = subject.blocks if is_by_block(subject) else [subject.model]
    backend = backend_within(budget)
    forwards = {kind: torch.compile(kind.forward, backend=backend) for kind in {type(module) for module in modules}}

    @contextmanager
    def patch() -> Iterator[None]:
        for module in modules:
            module.forward = partial(forwards[type(module)], module)
        try:
            yield
        finally:
            restore(modules)

    return patch


def backend_within(budget: float) -> Callable[..., Any]:
    """Inductor with this share as the partitioner's budget, whatever the process's setting is."""

    def compile_graph(graph: Any, inputs: Any) -> Any:
        with functorch.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    return compile_graph
