"""What punar costs where nothing is recomputed: microseconds an operator on tiny tensors, and step time on the demo's models.

    python benchmarks/overhead.py [--json] [--rounds 60] [--models minilm,gpt2,...] [--threads 1]

All variants run in one process and take turns, in an order that rotates, so that whatever else the machine does slows them alike. A number
is the median over the rounds of the difference to (or ratio to) the eager step of the same round. Operators are counted by a dispatch mode,
in forward and backward of the plain step: that count is the divisor for every variant, also for those that run operators twice.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import punar
from punar.demo.models import MODELS, make_task
from punar.reporting.table import format_columns

Step = Callable[[], None]

MODEL_HEADER = ("model", "operators", "plain, ms", "watched (budget=None)", "middle half", "kept (budget=1.0)", "middle half")


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCost:
    """One variant on the tiny model. Microseconds an operator, above eager."""

    variant: str
    step_us: float
    extra_us_per_operator: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """Forward and backward of a demo model of which nothing is recomputed, relative to plain: (lower quartile, median, upper quartile).

    ``watched``: every operator is seen (``budget=None``). ``kept``: under a plan that keeps everything (``budget=1.0``), most of whose steps run unwatched.
    """

    model: str
    operators: int
    plain_ms: float
    watched: tuple[float, float, float]
    kept: tuple[float, float, float]


class Empty(TorchDispatchMode):
    """Does nothing but pass the operator on: the floor for anything that sees operators from Python."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Lean(TorchDispatchMode):
    """The same without the wrapper that torch puts around a mode's method to keep its compiler out."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Counter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Tiny(nn.Module):
    """Fifty layers of four operators on eight numbers: all of the time is the cost of calling."""

    def __init__(self, depth: int = 50, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * 0.5
        return x


def main() -> None:
    options = parse_options()
    torch.set_num_threads(options.threads)
    operators, costs = measure_operators(options.rounds)
    models = [measure_model(name, options.model_rounds) for name in options.models.split(",") if name]
    device = f"cpu, {options.threads} threads, torch {torch.__version__}"
    if options.json:
        body = {"device": device, "tiny_operators": operators, "tiny": list(map(asdict, costs)), "models": list(map(asdict, models))}
        print(json.dumps(body, indent=2))
        return
    print(f"{device}; tiny model, {operators} operators in forward and backward; measured, median of {options.rounds} rounds\n")
    rows = [(cost.variant, f"{cost.step_us:.0f}", f"{cost.extra_us_per_operator:+.2f}") for cost in costs]
    print(format_columns(("variant", "step, µs", "µs an operator above eager"), rows, left=1))
    print(f"\ndemo models relative to plain, nothing recomputed; measured, median of {options.model_rounds} rounds\n")
    print(format_columns(MODEL_HEADER, [model_cells(cost) for cost in models], left=1))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What punar costs where nothing is recomputed.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--rounds", type=int, default=60, help="rounds on the tiny model")
    parser.add_argument("--model-rounds", type=int, default=15, help="rounds on each demo model")
    parser.add_argument("--models", default=",".join(sorted(MODELS)), help="demo models, with commas; empty for none")
    parser.add_argument("--threads", type=int, default=1, help="threads that torch computes with")
    return parser.parse_args()


# -- tiny operators ----------------------------------------------------------------------------------------------------------


def measure_operators(rounds: int) -> tuple[int, list[OperatorCost]]:
    """The number of operators of the tiny step, and the cost of each variant."""
    torch.manual_seed(0)
    model, x = Tiny(), torch.randn(4, 8)
    operators = count_operators(partial(plain_step, model, x))
    variants = make_variants(model, x)
    times = take_turns(variants, rounds, warmup=6)
    eager = times["eager"]
    return operators, [
        OperatorCost(
            variant=name,
            step_us=median(taken) / 1e3,
            extra_us_per_operator=median(a - b for a, b in zip(taken, eager, strict=True)) / 1e3 / operators,
        )
        for name, taken in times.items()
    ]


def make_variants(model: nn.Module, x: Tensor) -> dict[str, Step]:
    """Every variant runs the same forward and backward; gradients are made anew each time."""
    step = partial(plain_step, model, x)
    return {
        "eager": step,
        "empty dispatch mode": partial(inside, Empty(), step),
        "empty dispatch mode, not wrapped by torch": partial(inside, Lean(), step),
        "identity saved-tensor hooks": partial(hooked_step, step),
        "empty mode, not wrapped, and identity hooks": partial(inside, Lean(), partial(hooked_step, step)),
        "punar, watched (budget=None)": partial(inside, punar.Remat(budget=None), step),
        "punar, a plan that keeps all, most steps unwatched (budget=1.0)": partial(inside, punar.Remat(budget=1.0), step),
        "checkpoint, whole model (recomputes all)": partial(checkpointed_step, model, x),
        "checkpoint, each layer (recomputes all)": partial(layerwise_step, model, x),
        "selective checkpoint, whole, saves all": partial(selective_step, model, x, CheckpointPolicy.MUST_SAVE),
        "selective checkpoint, whole, saves matmuls": partial(selective_step, model, x, None),
    }


def plain_step(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()
    model.zero_grad()


def inside(context: Any, step: Step) -> None:
    with context:
        step()


def hooked_step(step: Step) -> None:
    with torch.autograd.graph.saved_tensors_hooks(identity, identity):
        step()


def identity(tensor: Tensor) -> Tensor:
    return tensor


def checkpointed_step(model: nn.Module, x: Tensor) -> None:
    checkpoint(model, x, use_reentrant=False).sum().backward()
    model.zero_grad()


def layerwise_step(model: Tiny, x: Tensor) -> None:
    for layer in model.layers:
        x = checkpoint(one_layer, layer, x, use_reentrant=False)
    x.sum().backward()
    model.zero_grad()


def one_layer(layer: nn.Module, x: Tensor) -> Tensor:
    return x + torch.tanh(layer(x)) * 0.5


def selective_step(model: nn.Module, x: Tensor, fixed: CheckpointPolicy | None) -> None:
    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if fixed is not None:
            return fixed
        is_matmul = func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_matmul else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    checkpoint(model, x, use_reentrant=False, context_fn=contexts).sum().backward()
    model.zero_grad()


# -- demo models -------------------------------------------------------------------------------------------------------------


def measure_model(name: str, rounds: int) -> ModelCost:
    """Plain, watched and all-keep steps of one demo model in turn."""
    print(f"measuring {name}", file=sys.stderr)
    task = make_task(name, steps=1, seed=0)

    def step() -> None:
        task.loss_fn(task.model, task.batches[0]).backward()
        task.model.zero_grad()

    operators = count_operators(step)
    budgets = {"watched": None, "kept": 1.0}
    variants = {"plain": step} | {name: partial(inside, punar.Remat(budget=budget), step) for name, budget in budgets.items()}
    times = take_turns(variants, rounds, warmup=6)
    return ModelCost(
        model=name,
        operators=operators,
        plain_ms=median(times["plain"]) / 1e6,
        watched=quartiles(times["watched"], times["plain"]),
        kept=quartiles(times["kept"], times["plain"]),
    )


def quartiles(times: list[int], plain: list[int]) -> tuple[float, float, float]:
    ratios = sorted(a / b for a, b in zip(times, plain, strict=True))
    return ratios[len(ratios) // 4], median(ratios), ratios[-1 - len(ratios) // 4]


def model_cells(cost: ModelCost) -> tuple[str, ...]:
    ratios = [text for low, middle, high in (cost.watched, cost.kept) for text in (f"{middle:.3f}x", f"{low:.3f} to {high:.3f}")]
    return cost.model, str(cost.operators), f"{cost.plain_ms:.0f}", *ratios


# -- measuring ---------------------------------------------------------------------------------------------------------------


def count_operators(step: Step) -> int:
    with Counter() as counter:
        step()
    return counter.count


def take_turns(variants: dict[str, Step], rounds: int, *, warmup: int) -> dict[str, list[int]]:
    """Nanoseconds of each variant in each round; the warm-up rounds (in which punar records and plans) do not count."""
    times: dict[str, list[int]] = {name: [] for name in variants}
    names = list(variants)
    for turn in range(warmup + rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            begin = time.perf_counter_ns()
            variants[name]()
            times[name].append(time.perf_counter_ns() - begin)
    return {name: taken[warmup:] for name, taken in times.items()}


if __name__ == "__main__":
    main()
