"""Metrics for OpenTelemetry, through whatever meter provider the program has set up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from punar.errors import UsageError
from punar.export.libraries import imported
from punar.export.metrics import METRICS, Metric
from punar.torch.session import StepStats

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter

_UNITS = {"bytes": "By", "seconds": "s", "ratio": "1", "": "1"}
"""Source: UCUM, as OpenTelemetry's semantic conventions ask (https://opentelemetry.io/docs/specs/semconv/general/metrics/)."""


class OpenTelemetry:
    """Records each step on the instruments ``punar.step``, ``punar.measured_peak``, ``punar.recomputed`` and so on.

    Args:
        meter: what makes the instruments; by default one named ``punar``, of the provider that was set for the process.
        attributes: recorded with each number, such as ``{"rank": "0"}``.

    Raises:
        MissingDependency: ``opentelemetry-api`` is not installed.
        UsageError: the meter is none, or the attributes are no mapping.
    """

    def __init__(self, meter: Meter | None = None, *, attributes: Mapping[str, str] | None = None) -> None:
        if not isinstance(attributes or {}, Mapping):
            raise UsageError(f'asked to record attributes with each number, found {attributes!r}; give a mapping such as {{"rank": "0"}}')
        if meter is not None and not hasattr(meter, "create_counter"):
            raise UsageError(f"asked to record on {meter!r}, which makes no instruments; give what opentelemetry.metrics.get_meter returns")
        if meter is None:
            meter = imported("opentelemetry.metrics", "opentelemetry-api", "opentelemetry").get_meter("punar")
        self._updates = [_update(meter, metric) for metric in METRICS]
        self._attributes = dict(attributes or {})

    def __call__(self, stats: StepStats) -> None:
        """Records a step."""
        for metric, update in zip(METRICS, self._updates, strict=True):
            number = metric.read(stats)
            if number is not None:
                update(number, self._attributes)


def _update(meter: Meter, metric: Metric) -> Callable[[float, Mapping[str, str]], None]:
    """What records one more number of a metric."""
    about: dict[str, Any] = {"name": f"punar.{metric.name}", "unit": _UNITS[metric.unit], "description": metric.text}
    match metric.kind:
        case "sum":
            return meter.create_counter(**about).add
        case "spread":
            return meter.create_histogram(**about).record
        case "last":
            return meter.create_gauge(**about).set
