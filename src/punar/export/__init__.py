"""Exporters of what each step of a ``Remat`` did: given to it as ``on_step``, they are called with its ``StepStats``.

Numbers only: no tensor's contents, no names of the model's parts. Each library is imported when its exporter is made, not before.
"""

from punar.export.jsonl import JsonLines
from punar.export.metrics import METRICS, Metric
from punar.export.opentelemetry import OpenTelemetry
from punar.export.prometheus import Prometheus
from punar.export.tensorboard import TensorBoard

__all__ = ["METRICS", "JsonLines", "Metric", "OpenTelemetry", "Prometheus", "TensorBoard"]
