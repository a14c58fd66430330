"""Metrics for Prometheus: served over HTTP, or in a file for the node exporter's textfile collector."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from punar.errors import UsageError
from punar.export.libraries import imported
from punar.export.metrics import METRICS, Metric
from punar.torch.session import StepStats

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


class Prometheus:
    """Keeps metrics up to date for Prometheus: ``punar_measured_peak_bytes``, ``punar_step_seconds_sum``, ``punar_recomputed_bytes_total``.

    Give at least one of ``port``, ``path`` and ``registry``.

    Args:
        port: serve them there, under ``/metrics``; 0 for any free one. ``address``: who may ask: ``"0.0.0.0"`` for other machines too.
        path: write them to this file after each step; it is replaced as a whole.
        registry: where to register them, if they are served by someone else; else they have a registry of their own.

    Attributes:
        port: where they are served, None where they are not.

    Raises:
        MissingDependency: ``prometheus-client`` is not installed.
        UsageError: neither port, path nor registry was given, the path is in no folder, the port cannot be had, or the registry has such metrics already.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        address: str = "127.0.0.1",
        path: str | os.PathLike[str] | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        if port is None and path is None and registry is None:
            raise UsageError(
                "asked to export to Prometheus, not told where: give a port to serve on, a path to write to, or a registry that is served"
            )
        client = imported("prometheus_client", "prometheus-client", "prometheus")
        self._registry = client.CollectorRegistry() if registry is None else registry
        try:
            self._updates = [_update(client, self._registry, metric) for metric in METRICS]
        except ValueError as error:
            raise UsageError(
                f"asked to register punar's metrics, the registry has them already ({error}); use one exporter in each registry"
            ) from error
        self._write = client.write_to_textfile
        self._path = None if path is None else self._checked(path)
        self._server: Any = None
        self.port = None if port is None else self._serve(client, port, address)

    @staticmethod
    def _checked(path: str | os.PathLike[str]) -> str:
        if not isinstance(path, (str, os.PathLike)) or not Path(path).absolute().parent.is_dir():
            raise UsageError(f"asked to write metrics to {path!r}, found no folder for it; give a file in a folder that is there")
        return os.fspath(path)

    def _serve(self, client: Any, port: int, address: str) -> int:
        try:
            self._server, _ = client.start_http_server(port, addr=address, registry=self._registry)
        except (OSError, OverflowError) as error:
            raise UsageError(
                f"asked to serve metrics on {address}, port {port}: {error}; give a free port of an address of this machine, or port 0 for any"
            ) from error
        return int(self._server.server_port)

    def __call__(self, stats: StepStats) -> None:
        """Takes a step into account.

        Raises:
            OSError: the file cannot be written.
        """
        for metric, update in zip(METRICS, self._updates, strict=True):
            number = metric.read(stats)
            if number is not None:
                update(number)
        if self._path is not None:
            self._write(self._path, self._registry)

    def close(self) -> None:
        """Ends serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = self.port = None


def _update(client: Any, registry: CollectorRegistry, metric: Metric) -> Callable[[float], None]:
    """What takes one more number of a metric."""
    about = {"name": f"punar_{metric.name}", "unit": metric.unit, "documentation": metric.text, "registry": registry}
    if metric.kind == "sum":
        update = client.Counter(**about).inc
    elif metric.kind == "spread":
        update = client.Summary(**about).observe
    else:
        update = client.Gauge(**about).set
    return update  # type: ignore[no-any-return]
