"""Every exception that punar raises on purpose.

PunarError
├── BudgetError            a budget that is not a budget (also a ValueError)
│   └── InfeasibleBudget   a budget below the least that any plan reaches
├── TargetError            targets that are none, or a file of them that cannot be read (also a ValueError)
├── PlanError              a plan or profile that cannot be read, written or used (also a ValueError)
│   └── PlanMismatch       a plan made for another model, shape or version
├── UsageError             the library was called in a way that cannot work (also a RuntimeError)
│   ├── NestedRemat        a Remat entered in a thread where one is active, or active in another
│   └── DataDependentStep  a step traced without data whose shapes or path depend on data
├── SavedTensorModified    a tensor needed for backward was overwritten (also a RuntimeError, as in eager)
├── ReplayError            a value could not be computed again (also a RuntimeError)
├── OutOfMemory            a step took more bytes than its limit (also a MemoryError)
├── OffloadError           a block of bytes could not be kept off the device (also a RuntimeError)
│   ├── SpoolFull          there is no room for it on disk
│   ├── HostMemoryFull     there is no room for it in pinned host memory
│   └── BlockCorrupted     what came back is not what was written
├── VerificationError      gradients or replays differ from the plain step's
└── MissingDependency      an optional package that the request needs is absent (also an ImportError)
"""

from __future__ import annotations

from collections.abc import Callable


class PunarError(Exception):
    """Base of every exception that punar raises on purpose."""


class BudgetError(PunarError, ValueError):
    """The budget is not a number of bytes, a fraction, ``"min"`` or ``"auto"``."""


class InfeasibleBudget(BudgetError):
    """No known plan fits the budget.

    Attributes:
        budget_bytes: what was asked.
        least_bytes: the least budget that would do.
        holders: what holds the memory at that least peak, as (module path, operator, bytes), largest first.
    """

    def __init__(self, message: str, *, budget_bytes: int, least_bytes: int, holders: tuple[tuple[str, str, int], ...] = ()) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.holders = holders
        self.moved: Callable[[int], InfeasibleBudget] | None = None
        """Says the same beside so many more resident bytes; None where that cannot be said."""


class TargetError(PunarError, ValueError):
    """A target is none, or a file of targets cannot be read or has other keys; says which are known."""


class PlanError(PunarError, ValueError):
    """A plan or profile cannot be read or written, is damaged, or is not one of ours; says which file and, where it can, which field."""


class PlanMismatch(PlanError):
    """A plan was made for another model, another shape or another version."""


class UsageError(PunarError, RuntimeError):
    """The library was called in a way that cannot work."""


class NestedRemat(UsageError):
    """A ``Remat`` was entered in a thread where one is active, or while it is itself active in another thread.

    Several threads may each have a ``Remat`` of their own.
    """


class DataDependentStep(UsageError):
    """A step that is traced without data has shapes, or takes a path, that depend on data.

    Attributes:
        operator: whose result is not known, such as ``aten.nonzero.default``.
        module: where it was called, such as ``GPT.layers.3``; "" outside of any.
    """

    def __init__(self, message: str, *, operator: str = "", module: str = "") -> None:
        super().__init__(message)
        self.operator = operator
        self.module = module


class SavedTensorModified(PunarError, RuntimeError):
    """A tensor needed for the backward pass was modified in place; eager raises here too."""


class ReplayError(PunarError, RuntimeError):
    """A dropped value could not be computed again from what the tape holds."""


class OutOfMemory(PunarError, MemoryError):
    """A step needed more bytes than the limit that it was given.

    Attributes:
        limit_bytes: the limit, of the whole step.
        needed_bytes: what the step had at that moment.
    """

    def __init__(self, message: str, *, limit_bytes: int = 0, needed_bytes: int = 0) -> None:
        super().__init__(message)
        self.limit_bytes = limit_bytes
        self.needed_bytes = needed_bytes


class OffloadError(PunarError, RuntimeError):
    """A block of bytes could not be written off the device or read back, or the place for it cannot be used."""


class SpoolFull(OffloadError):
    """There is no room for a block.

    Attributes:
        asked_bytes: the size of the block.
    """

    def __init__(self, message: str, *, asked_bytes: int = 0) -> None:
        super().__init__(message)
        self.asked_bytes = asked_bytes


class HostMemoryFull(OffloadError):
    """Pinned host memory for a block is refused by the system, or is more than was allowed.

    Attributes:
        asked_bytes: the size of the block.
    """

    def __init__(self, message: str, *, asked_bytes: int = 0) -> None:
        super().__init__(message)
        self.asked_bytes = asked_bytes


class BlockCorrupted(OffloadError):
    """A block that was read back has another checksum than when it was written."""


class VerificationError(PunarError):
    """Gradients, buffers or random state differ from the plain step's."""


class MissingDependency(PunarError, ImportError):
    """An optional package that the request needs is not installed."""
