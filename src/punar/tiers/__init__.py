"""Where bytes go that leave the device: a spool file and how fast it is. No framework is imported here."""

from punar.tiers.bandwidth import Bandwidth, measure
from punar.tiers.files import OperatingSystem
from punar.tiers.spool import Block, Spool, Transfer

__all__ = ["Bandwidth", "Block", "OperatingSystem", "Spool", "Transfer", "measure"]
