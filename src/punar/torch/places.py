"""Opens the places that a user names to offload to, where the device of a step is known."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from punar.costs import remembered
from punar.errors import OffloadError, UsageError
from punar.plan.moves import Channel
from punar.tiers import Spool, measure
from punar.torch.host import HostTier, measured
from punar.torch.offload import Copy, DiskTier, MoveCount, Offload, Tier
from punar.torch.staged import StagedTier
from punar.torch.streams import CudaStreams

UNLIMITED = 1 << 50
"""Stands for a capacity that nobody named."""

STAGING_SHARE = 8
"""The share of the machine's memory that is pinned at most for what is on its way to a disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A folder on a disk, or with none the computer's memory, for what is on a CUDA device. ``most_bytes``: to use there."""

    folder: str | None
    most_bytes: int | None

    @property
    def name(self) -> str:
        return "cpu" if self.folder is None else f"disk:{self.folder}"

    @property
    def kind(self) -> str:
        """As the names of a plan's channels begin."""
        return self.name.partition(":")[0]

    def serves(self, device: str) -> bool:
        """Whether tensors of this device can go there."""
        return torch.device(device).type in (("cuda",) if self.folder is None else ("cpu", "cuda"))


class Disk:
    """A spool for tensors in the computer's memory, or through pinned memory on a CUDA device: whichever comes first."""

    def __init__(self, spool: Spool) -> None:
        self.spool = spool
        self.tier: DiskTier | StagedTier | None = None

    @property
    def is_told(self) -> bool:
        """Whether something had to be kept."""
        return self.tier is not None and self.tier.is_told

    def send(self, base: Tensor, count: MoveCount) -> Copy | None:
        """Begins to copy a tensor's whole storage; None where that cannot be."""
        if self.tier is None:
            self.tier = StagedTier(self.spool, staging_bytes()) if base.device.type == "cuda" else DiskTier(self.spool)
        return self.tier.send(base, count)

    def bury(self) -> None:
        """Lets go of memory that only copies which nobody needs still read or wrote, where they have ended."""
        if self.tier is not None:
            self.tier.bury()

    def close(self) -> None:
        """Ends what is under way and gives the disk's space back."""
        (self.spool if self.tier is None else self.tier).close()


def opened(places: Sequence[Place], device: str) -> Offload | None:
    """Opens those of the places that serve a device, and measures how fast they are; None where none was asked for.

    Where the system refuses pinned memory, a plan must do without: there is no channel for it then.

    Raises:
        UsageError: none serves it.
        OffloadError: a folder cannot be used.
    """
    if not places:
        return None
    found = [_opened_on_disk(place) if place.folder is not None else _opened_on_host(place, device) for place in _serving(places, device)]
    usable = [(tier, channel) for tier, channel in found if channel is not None]
    return Offload([tier for tier, _ in usable], tuple(channel for _, channel in usable))


def _opened_on_disk(place: Place) -> tuple[Tier, Channel]:
    assert place.folder is not None
    spool = Spool(place.folder, place.most_bytes)
    return Disk(spool), _channel_of(spool, place)


def _opened_on_host(place: Place, device: str) -> tuple[Tier, Channel | None]:
    if not torch.cuda.is_available():
        raise UsageError(
            f"asked how fast {device} copies to the computer's memory, found no CUDA device here; plan on the machine that trains"
        )
    streams = CudaStreams(torch.device(device))
    tier = HostTier(capacity_of(place), streams)
    try:
        return tier, measured(streams, tier.capacity_bytes)
    except OffloadError as error:
        tier.tell(error)
        return tier, None


def unmeasured(places: Sequence[Place], channels: Sequence[Channel]) -> Offload:
    """Opens the places that a plan given beforehand moves to; how fast they are matters no more.

    Raises:
        UsageError: one is none of those asked for.
        OffloadError: a folder cannot be used.
    """
    left = list(places)
    tiers: list[Tier] = []
    for channel in channels:
        alike = [place for place in left if place.kind == channel.name.partition(":")[0]]
        if not alike:
            asked = f"only {' and '.join(place.name for place in places)}" if places else "nowhere to"
            raise UsageError(
                f"asked to obey a plan that offloads to {channel.name}, found {asked}: give Remat `offload` too, as when the plan was made"
            )
        place = next((place for place in alike if place.name == channel.name), alike[0])
        left.remove(place)
        tiers.append(HostTier(capacity_of(place)) if place.folder is None else Disk(Spool(place.folder, place.most_bytes)))
    return Offload(tiers, tuple(channels))


def described_channels(places: Sequence[Place], device: str, described: Mapping[str, str]) -> tuple[Channel, ...]:
    """How fast those of the places that serve a device would be, by the device's description.

    Raises:
        UsageError: none serves it.
    """
    return tuple(_described_channel(place, described) for place in _serving(places, device))


def _described_channel(place: Place, described: Mapping[str, str]) -> Channel:
    speed = int(described["host_bytes_per_s" if place.folder is None else "disk_bytes_per_s"])
    capacity_bytes = UNLIMITED if place.most_bytes is None else place.most_bytes
    return Channel(name=place.name, capacity_bytes=capacity_bytes, write_bytes_per_s=speed, read_bytes_per_s=speed)


def _serving(places: Sequence[Place], device: str) -> list[Place]:
    """Those of the places that a device's tensors can go to.

    Raises:
        UsageError: none serves it.
    """
    serving = [place for place in places if place.serves(device)]
    if not serving:
        raise UsageError(f"asked to offload to {' or '.join(place.name for place in places)}, found a step on {device}; {_advice(device)}")
    return serving


def capacity_of(place: Place) -> int:
    """How much pinned memory may be used: half of the machine's where nobody said."""
    return physical_bytes() // 2 if place.most_bytes is None else place.most_bytes


def staging_bytes() -> int:
    """How much pinned memory may be used for what is on its way to a disk."""
    return physical_bytes() // STAGING_SHARE


def physical_bytes() -> int:
    """The machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _advice(device: str) -> str:
    if torch.device(device).type == "cpu":
        return 'its tensors are in the computer\'s memory already: give a disk, "disk:/path/of/a/folder"'
    return "nothing can be offloaded from there: leave `offload` out"


def _channel_of(spool: Spool, place: Place) -> Channel:
    """How fast a disk is, as this run or one before measured."""
    disk = {"tier": "disk", "computer": platform.node(), "file_system": str(os.stat(spool.folder).st_dev)}
    speed = remembered(disk, ("write_bytes_per_s", "read_bytes_per_s"), lambda: asdict(measure(spool)))
    return Channel(
        name=place.name,
        capacity_bytes=UNLIMITED if place.most_bytes is None else place.most_bytes,
        write_bytes_per_s=speed["write_bytes_per_s"],
        read_bytes_per_s=speed["read_bytes_per_s"],
        latency_ns=speed.get("latency_ns", 0),
        busy_percent=speed.get("busy_percent", 0) if torch.get_num_threads() >= _cores() else 0,
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
