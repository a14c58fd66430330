"""What happened, as plain data first and as text, tables or JSON after. No framework is imported here."""

from punar.reporting.comparison import Comparison, Row
from punar.reporting.report import Report, StepLike

__all__ = ["Comparison", "Report", "Row", "StepLike"]
