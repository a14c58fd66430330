"""What operators cost: measured times, a model of them, a cache between runs, and descriptions of devices that are not here. Knows no framework."""

from punar.costs.cache import CostCache, remembered
from punar.costs.devices import Device, find_device, known_devices
from punar.costs.ledger import Ledger
from punar.costs.model import CostModel, fit
from punar.costs.roofline import timed_on
from punar.costs.scratch import with_scratch
from punar.costs.work import Work, work_of

__all__ = [
    "CostCache",
    "CostModel",
    "Device",
    "Ledger",
    "Work",
    "find_device",
    "fit",
    "known_devices",
    "remembered",
    "timed_on",
    "with_scratch",
    "work_of",
]
