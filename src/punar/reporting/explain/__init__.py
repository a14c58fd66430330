"""Why a step needs the memory it does: what sets the peak, what a plan does about it and why, and what would lower it."""

from punar.reporting.explain.advice import Advice
from punar.reporting.explain.choices import Choice
from punar.reporting.explain.explanation import Explanation, Least, check_plan, explain_step
from punar.reporting.explain.holders import Holder
from punar.reporting.explain.moment import Moment

__all__ = ["Advice", "Choice", "Explanation", "Holder", "Least", "Moment", "check_plan", "explain_step"]
