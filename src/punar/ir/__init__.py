"""What a step does: operators, values, storages and the events that order them. No framework is imported here."""

from punar.ir.trace import Event, EventKind, Op, Save, Storage, Trace, TraceBuilder, Value

__all__ = ["Event", "EventKind", "Op", "Save", "Storage", "Trace", "TraceBuilder", "Value"]
