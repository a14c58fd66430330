"""One step on one page of HTML: what memory costs in time, what is there when, who holds it, and what was measured. Data first, drawing apart."""

from punar.reporting.page.block import Block, block_of
from punar.reporting.page.curve import Curve, CurvePoint, NamedPoint
from punar.reporting.page.memory import Memory, memory_of
from punar.reporting.page.modules import ModuleRow, modules_of
from punar.reporting.page.page import Page, StepRow, step_rows

__all__ = [
    "Block",
    "Curve",
    "CurvePoint",
    "Memory",
    "ModuleRow",
    "NamedPoint",
    "Page",
    "StepRow",
    "block_of",
    "memory_of",
    "modules_of",
    "step_rows",
]
