"""The moment of the peak in words."""

from __future__ import annotations

from dataclasses import dataclass

from punar.ir.trace import Trace
from punar.plan.playback import Peak
from punar.reporting.explain.places import module_of, origin_of, title_of
from punar.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What runs when a step needs the most bytes. Units: bytes of the whole step, predicted.

    Attributes:
        operator, module, source: its name, its module's path and the line of Python that called it, or whose backward it is; "" where not known.
        title: these in one.
        phase: ``forward``, ``backward``, ``replay``, or ``coding`` where a value is encoded or read back.
        bytes: the peak. own_bytes: what the operator allocates; scratch_bytes: of these, what is gone when it ends.
        resident_bytes: there before the step. alive_bytes: what the step has made before and is alive.
        outside_bytes: the peak that was seen outside of forward and backward, in an optimizer's step for example, where that is higher; else 0.
    """

    operator: str
    module: str
    source: str
    title: str
    phase: str
    bytes: int
    own_bytes: int
    scratch_bytes: int
    resident_bytes: int
    alive_bytes: int
    outside_bytes: int = 0

    @classmethod
    def of(cls, trace: Trace, peak: Peak, promised_bytes: int = 0) -> Moment:
        """Reads the moment off a playback's peak. ``promised_bytes``: what a plan predicts, with what is outside of forward and backward."""
        op = trace.ops[peak.op]
        made = sum(trace.storages[trace.values[value].storage].bytes for value in op.outputs if not trace.values[value].version)
        phase = "coding" if peak.is_coding else "replay" if peak.is_replay else "backward" if op.is_backward else "forward"
        return cls(
            operator=op.name,
            module=module_of(trace, peak.op),
            source=origin_of(trace, peak.op).source,
            title=title_of(trace, peak.op),
            phase=phase,
            bytes=peak.bytes,
            own_bytes=peak.own_bytes,
            scratch_bytes=peak.own_bytes if peak.is_coding else max(0, peak.own_bytes - made),
            resident_bytes=trace.resident_bytes,
            alive_bytes=peak.bytes - peak.own_bytes - trace.resident_bytes,
            outside_bytes=promised_bytes if promised_bytes > peak.bytes else 0,
        )

    def __str__(self) -> str:
        when = {
            "forward": f"in forward, while {self.title} runs",
            "backward": f"in backward, while {self.title} runs",
            "replay": f"in backward, while {self.title} runs again",
            "coding": f"while what {self.title} made is encoded or read back",
        }[self.phase]
        scratch = f", {format_bytes(self.scratch_bytes)} of them for the moment only" if self.scratch_bytes else ""
        text = (
            f"{format_bytes(self.bytes)} {when}. It allocates {format_bytes(self.own_bytes)}{scratch}; "
            f"{format_bytes(self.alive_bytes)} are alive from before, and {format_bytes(self.resident_bytes)} are resident."
        )
        if not self.outside_bytes:
            return text
        return (
            f"{format_bytes(self.outside_bytes)} outside of forward and backward: an optimizer's step in the `with` block, or something else in it, sets the peak, "
            f"not activations, and no plan can lower it; what is outside of the block is not counted. In forward and backward the most are {text}"
        )
