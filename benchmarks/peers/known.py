"""Points of planners that do not install beside today's torch, measured once: they stand on the figures, hollow, and in no table.

Activations' peak and CPU time, both relative to plain, on the models at scale 1, two cores, torch 2.13 on CPU; times about ±5 %.

Source: rotor: Beaumont, Eyraud-Dubois, Hermann, Joly, Shilova 2019, arXiv:1911.13214. Rockmate: Zhao, Le Hellard, Eyraud-Dubois, Gusak,
Beaumont 2023, arXiv:2307.01236. SAC ILP: ``torch.distributed._tools``.
"""

from __future__ import annotations

Known = tuple[float, float]
"""Memory ratio, time ratio."""

KNOWN: dict[str, dict[str, tuple[Known, ...]]] = {
    "gpt": {
        "rotor (package)": ((0.729, 1.045), (0.51, 1.145), (0.36, 1.18), (0.24, 1.25)),
        "Rockmate": ((0.865, 0.98), (0.819, 1.06), (0.792, 1.16)),
        "SAC ILP": ((0.78, 1.02), (0.62, 1.13), (0.45, 1.20)),
    },
    "vit": {"rotor (package)": ((0.470, 1.21), (0.237, 1.25)), "Rockmate": ((0.780, 1.04), (0.755, 1.29))},
    "resnet50": {"rotor (package)": ((0.782, 1.05), (0.565, 1.14))},
    "mlp": {"rotor (package)": ((0.202, 1.23), (0.103, 1.27))},
}
"""By model and planner. Where a range was measured (1.00 to 1.09, 1.11 to 1.18) its middle stands here."""
