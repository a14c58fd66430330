"""What the tape remembers of a forward pass while a plan is obeyed: values, recorded operators and saved-tensor handles.

NOTE. Who refers to whom; everything is freed by reference counts.

1. A storage's record refers to its latest ``Value`` weakly.
2. The ``Episode`` refers to the values made in it until backward begins; afterwards only handles and lineages do.
3. A value is either held (``base`` is a detached alias of its storage), or refers to the recorded operator that makes it again, or has a
   copy off the device.
4. A recorded operator refers to the values it reads strongly, to those it makes weakly.
5. Autograd refers to the handles.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from punar.errors import UsageError
from punar.torch.operators import PLAIN_TYPES
from punar.torch.random_state import RandomState

if TYPE_CHECKING:
    from punar.torch.offload import Coming, Copy

_disabled = torch._C._DisableTorchDispatch


class _Active(threading.local):
    """Who is in charge in this thread: the number of the session whose ``with`` block is running."""

    owner: int | None = None


active = _Active()


class Value:
    """One version of a storage's contents (see the NOTE). ``hold_from``, ``rank``: as in the plan.

    ``checksum``: of what a factory filled it with, since a kernel that dispatches nothing may write there before anything reads it; and of what was found
    in memory that others can write to (see ``foreign_checksum``).
    ``copy``: of a value that is moved off the device or encoded, until it is back; where ``base`` is None there is nothing else of it.
    """

    __slots__ = ("__weakref__", "base", "checksum", "copy", "hold_from", "nbytes", "op", "rank", "versions", "writes")

    is_shared = True
    """Whether any tape may read it; one that an evictor drops and brings back is good for its own tape alone."""

    def __init__(self, *, op: RecordedOp | None, writes: int, hold_from: int = 0, rank: int = 0, nbytes: int = 0) -> None:
        self.base: Tensor | None = None
        self.copy: Copy | None = None
        self.versions: tuple[int, ...] = ()
        self.checksum: int | None = None
        self.op = op
        self.writes = writes
        self.hold_from = hold_from
        self.rank = rank
        self.nbytes = nbytes

    def is_held_from(self, clock: int) -> bool:
        """Whether a replay at this time of backward holds the value when it has made it."""
        return self.hold_from <= clock

    def hold(self, base: Tensor, *, is_just_written: bool = False) -> None:
        """From now on the value is at hand and needs no lineage.

        ``versions``: those that ``base``'s version counter may show while its contents are this value. Autograd counts a write after the
        operator that makes it, so that a value held within that operator may show one more.
        """
        self.base, self.op, self.checksum = base, None, None
        self.versions = (base._version, base._version + 1) if is_just_written else (base._version,)


class Geometry:
    """How a tensor reads a storage: enough to make an equal tensor on an equal storage."""

    __slots__ = ("dtype", "is_conj", "is_neg", "offset", "size", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.size = tensor.size()
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.dtype = tensor.dtype
        self.is_conj = tensor.is_conj() if self.dtype.is_complex else False
        self.is_neg = tensor.is_neg()

    def view(self, base: Tensor) -> Tensor:
        """A tensor that reads ``base``'s storage as the original read its own: ``base`` itself where it does."""
        if self.is_read_by(base):
            return base
        with _disabled():
            tensor = torch.empty(0, dtype=self.dtype, device=base.device)
            tensor.set_(base.untyped_storage(), self.offset, self.size, self.stride)
            if self.is_conj:
                tensor = torch._conj(tensor)
            if self.is_neg:
                tensor = torch._neg_view(tensor)
        return tensor

    def is_read_by(self, base: Tensor) -> bool:
        return (
            base.dtype is self.dtype
            and base.size() == self.size
            and base.stride() == self.stride
            and base.storage_offset() == self.offset
            and base.is_neg() == self.is_neg
            and (base.is_conj() if self.dtype.is_complex else False) == self.is_conj
        )


class TensorRef(Geometry):
    """A tensor as the reading of a value."""

    __slots__ = ("value",)

    def __init__(self, tensor: Tensor, value: Value) -> None:
        super().__init__(tensor)
        self.value = value


class Slot:
    """Stands in recorded arguments where a tensor stood."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class RecordedOp:
    """One operator call that a replay may run again.

    ``reads``: what its tensor arguments read; ``values``: the distinct values of these. ``overwrites``: (value read, output place) of each storage it writes into.
    ``makes``: weak references to its values, with the place of each among the call's outputs (-1: written in place).
    ``has_grad_mode``: some kernels make other outputs where gradients are enabled (oneDNN's recurrent layers their workspace).
    """

    __slots__ = ("args", "func", "has_grad_mode", "kwargs", "makes", "number", "overwrites", "peak_bytes", "random", "reads", "values")

    def __init__(self, number: int, func: Any, peak_bytes: int) -> None:
        self.number = number
        self.func = func
        self.peak_bytes = peak_bytes
        self.has_grad_mode = torch.is_grad_enabled()
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.reads: list[TensorRef] = []
        self.values: tuple[Value, ...] = ()
        self.overwrites: list[Value] = []
        self.makes: list[tuple[weakref.ref[Value], int]] = []
        self.random: RandomState | None = None


class Episode:
    """One forward pass with its backward: counts the handles that autograd holds, and the demands that it makes.

    It is over when autograd has saved something (``saves``) and let go of all of it (no ``handles``).
    ``coming``: the values that are off the device, where there are some.
    """

    __slots__ = ("clock", "coming", "handles", "has_begun_backward", "is_sealed", "owner", "saves", "values")

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.values: list[Value] = []
        self.handles = 0
        self.saves = 0
        self.clock = 0
        self.coming: Coming | None = None
        self.is_sealed = self.has_begun_backward = False

    def begin_backward(self) -> None:
        """The first saved tensor is asked for.

        Raises:
            UsageError: that happens in the block of another Remat.
        """
        if active.owner not in (None, self.owner):
            raise UsageError(
                "asked to run backward on a graph that another Remat recorded, inside this one's `with` block; "
                "its replays would be counted and planned here. Run this backward in the other Remat's block, or outside of both"
            )
        self.has_begun_backward = True
        self.seal()
        if self.coming is not None:
            self.coming.fetch_due(0)

    def seal(self) -> None:
        """The forward pass is over: from here on values live by handles and lineages alone."""
        self.is_sealed = True
        self.values.clear()

    def let_go(self) -> None:
        """Autograd lets go of one handle; with the last of them the pass is over, also where nobody ran backward."""
        self.handles -= 1
        if not self.handles:
            self.seal()


def alias(tensor: Tensor) -> Tensor:
    """A tensor on the same storage and version counter that keeps no autograd graph alive; has the attributes that the user put on it."""
    if tensor.requires_grad and tensor.is_leaf:
        return tensor  # a leaf that requires grad can get no history later
    return detached(tensor)


def detached(tensor: Tensor) -> Tensor:
    """The same, and always another tensor, so that the storage is known to have one more user."""
    if is_fake(tensor):
        return _fake_alias(tensor)
    if type(tensor) is not Tensor and type(tensor) not in PLAIN_TYPES:
        return tensor.detach()
    # Below autograd, as in a dispatch mode, an alias would get a version counter of its own, which shows no later write.
    with _disabled(), torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        other = tensor.detach()
    if tensor.__dict__:
        other.__dict__.update(tensor.__dict__)
    return other


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor is a ``FakeTensor``: one with a shape and no data. Asked without loading what defines them."""
    return type(tensor) is not Tensor and hasattr(tensor, "fake_mode")


def _fake_alias(tensor: Tensor) -> Tensor:
    """``alias`` of a fake tensor, whose own dispatch is what keeps it one: only the modes are left out."""
    with _disable_current_modes(), torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


_NOTHING: dict[torch.device, Tensor] = {}


def version_counter(tensor: Tensor) -> Tensor:
    """An empty tensor that shares a tensor's version counter, and so shows its later writes without keeping its storage alive."""
    with _disabled(), torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):  # as in ``alias``
        counter = tensor.detach()
        nothing = _NOTHING.get(tensor.device)
        if nothing is None:
            nothing = _NOTHING[tensor.device] = torch.empty(0, device=tensor.device)
        counter.data = nothing
    return counter


def checksum(tensor: Tensor) -> int:
    """A number that changes where the bytes of a tensor's storage do; 0 for a storage without bytes to read (zero tensors, meta and fake tensors)."""
    if is_fake(tensor) or tensor.device.type == "meta" or tensor._is_zerotensor():
        return 0
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        whole = flat.numel() // 8 * 8
        head = int(flat[:whole].view(torch.int64).sum()) if whole else 0
        return head * 257 + int(flat[whole:].sum(dtype=torch.int64))


def foreign_checksum(tensor: Tensor) -> int | None:
    """The checksum of a tensor whose memory others can write to unseen, as that of numpy's arrays and of other processes; None for others and parameters."""
    if tensor.device.type != "cpu" or is_fake(tensor) or tensor.untyped_storage().resizable():
        return None
    return None if isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter) else checksum(tensor)


def is_rewritten(value: Value, tensor: Tensor) -> bool:
    """Whether others have written to the memory of a value that no operator made, since it was read first."""
    return value.op is None and value.checksum is not None and checksum(tensor) != value.checksum


def overlaps(ref: Geometry, written: Tensor) -> bool:
    """Whether two readings of one storage share an element; in doubt they do."""
    count = written.untyped_storage().nbytes() // written.element_size()
    if ref.dtype.itemsize != written.element_size() or written.numel() == count:
        return True
    with _disabled(), torch.no_grad():
        places = torch.zeros(count, dtype=torch.bool)
        places.as_strided(written.size(), written.stride(), written.storage_offset()).fill_(True)
        return bool(places.as_strided(ref.size, ref.stride, ref.offset).any())
