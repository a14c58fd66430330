"""Whatever can take a session's values until backward: a place off the device, and codecs."""

from __future__ import annotations

from torch import Tensor

from punar.plan.codecs import codec_of
from punar.plan.moves import Channel
from punar.torch.codecs import CodecTier
from punar.torch.meter import Meter
from punar.torch.offload import Copy, MoveCount, Offload


class Movers:
    """``offload``: the places off the device, where there are some; ``count``: what moved in the step at hand."""

    def __init__(self) -> None:
        self.offload: Offload | None = None
        self.codecs: dict[Channel, CodecTier] = {}
        self.count = MoveCount()

    def begin(self) -> None:
        """A step begins: what moves is counted anew, and what the last one left behind is let go."""
        self.count = MoveCount()
        if self.offload is not None:
            self.offload.bury()

    def send(self, channel: Channel, base: Tensor, meter: Meter) -> Copy | None:
        """Has a tensor's whole storage leave by a plan's channel; None where that cannot be."""
        copy: Copy | None = None
        if channel.is_codec:
            copy = self.codec(channel, meter).send(base, self.count)
        elif self.offload is not None:
            copy = self.offload.send(channel, base, self.count)
        self.count.kept += copy is None
        return copy

    def codec(self, channel: Channel, meter: Meter) -> CodecTier:
        tier = self.codecs.get(channel)
        if tier is None or tier.meter is not meter:
            known = codec_of(channel.name)
            assert known is not None  # plans are checked where they are read
            tier = self.codecs[channel] = CodecTier(channel, *known, meter)
        return tier
