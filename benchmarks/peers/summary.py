"""What the measured points add up to: counts and medians, and the table."""

from __future__ import annotations

from statistics import median
from typing import Any

from punar.reporting.table import format_markdown

Point = dict[str, Any]

LEAST_OVERHEAD = 0.02
"""Of the plain step: overheads of peers below this are within the noise, so that a reduction of them says nothing."""

HEADER = (
    "model",
    "peer",
    "its memory",
    "its time",
    "our time at its memory",
    "÷ its time",
    "middle half",
    "our memory at its time",
    "÷ its memory",
)


def summarise(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The totals over all models, for eager peers with ``rotor`` and for the compiler."""
    points = [point for result in results for point in result["points"]]
    return {
        "models": [result["model"] for result in results],
        "eager": totals([point for point in points if point["family"] != "compile"]),
        "compile": totals([point for point in points if point["family"] == "compile"]),
        "failed": {f"{result['model']}: {run['name']}": run["error"] for result in results for run in result["runs"] if run["error"]},
    }


def totals(points: list[Point]) -> dict[str, Any]:
    """Counts and medians. A point for which punar has no plan counts against it, with the plain step's memory at the peer's time."""
    times = [point["at_its_memory"]["time_to_peer"] if point["at_its_memory"] else None for point in points]
    memories = [point["at_its_time"]["memory_to_peer"] if point["at_its_time"] else point["plain_memory_to_peer"] for point in points]
    reductions = [reduction for reduction in map(overhead_reduction, points) if reduction is not None]
    return {
        "points": len(points),
        "time_no_worse": sum(time is not None and time["median"] <= 1 for time in times),
        "time_worse_beyond_noise": sum(time is None or time["low"] > 1 for time in times),
        "time_better_beyond_noise": sum(time is not None and time["high"] < 1 for time in times),
        "median_overhead_reduction": median(reductions) if reductions else None,
        "points_with_overhead": len(reductions),
        "memory_lower": sum(memory < 1 for memory in memories),
        "median_memory_reduction": 1 - median(memories) if memories else None,
    }


def overhead_reduction(point: Point) -> float | None:
    """The share of a peer's overhead that punar saves at its memory; None where the peer has too little."""
    theirs = point["time_ratio"]["median"] - 1
    if theirs < LEAST_OVERHEAD or not point["at_its_memory"]:
        return None
    return 1 - (point["at_its_memory"]["time_ratio"]["median"] - 1) / theirs


def sentence(total: dict[str, Any], what: str) -> str:
    """The totals as one line."""
    if not total["points"]:
        return f"{what}: no points"
    reduction = total["median_overhead_reduction"]
    return (
        f"{what}: our time no worse at {total['time_no_worse']} of {total['points']} peer points "
        f"(beyond the middle half: better at {total['time_better_beyond_noise']}, worse at {total['time_worse_beyond_noise']}); "
        f"median overhead reduction {'unknown' if reduction is None else f'{reduction:.0%}'}; "
        f"our memory at peer's time lower at {total['memory_lower']} of {total['points']}; "
        f"median reduction {total['median_memory_reduction']:.0%}"
    )


def as_markdown(results: list[dict[str, Any]], summary: dict[str, Any]) -> str:
    """The page that ``--all`` writes."""
    rows = [row(result["model"], point) for result in results for point in result["points"]]
    notes = "\n".join(f"- {name}: {error}" for name, error in summary["failed"].items())
    settings = sorted(
        {
            f"{r['threads']} thread(s), torch {r['torch']}, scale {r['scale']}, {r['rounds']} rounds, peaks by {r['memory_by']}"
            for r in results
        }
    )
    return (
        "\n\n".join(
            [
                "# Side by side with the peers",
                "; ".join(settings)
                + ". Memory and time are measured, relative to the plain step (for `torch.compile`, to plain `torch.compile`).",
                sentence(summary["eager"], "eager peers and rotor"),
                sentence(summary["compile"], "torch.compile with a budget"),
                format_markdown(HEADER, rows, left=2),
                *([f"Peers that could not run:\n\n{notes}"] if notes else []),
            ]
        )
        + "\n"
    )


def row(model: str, point: Point) -> tuple[str, ...]:
    at_memory, at_time = point["at_its_memory"], point["at_its_time"]
    time = ("no plan", "", "")
    if at_memory:
        to_peer = at_memory["time_to_peer"]
        time = (f"{at_memory['time_ratio']['median']:.3f}", f"{to_peer['median']:.3f}", f"{to_peer['low']:.3f} to {to_peer['high']:.3f}")
    memory = ("none so fast", f"({point['plain_memory_to_peer']:.3f})")
    if at_time:
        memory = (f"{at_time['memory_ratio']:.3f}", f"{at_time['memory_to_peer']:.3f}")
    return model, point["peer"], f"{point['memory_ratio']:.3f}", f"{point['time_ratio']['median']:.3f}", *time, *memory
