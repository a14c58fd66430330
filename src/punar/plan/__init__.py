"""What to do about a step: plans, the simulator that judges them, and bounds on what any plan could reach."""

from punar.plan.bound import bound as lower_bound
from punar.plan.plan import Plan, Skeleton, make_plan, plain_plan
from punar.plan.simulate import Simulation, simulate

__all__ = ["Plan", "Simulation", "Skeleton", "lower_bound", "make_plan", "plain_plan", "simulate"]
