"""Puts back what a step changed, so that it can run once more as if it had never begun.

NOTE. What is known of a step's changes, and how.

1. A storage that was there before the step is copied when the first operator is about to write into it: running statistics, gradients that are
   accumulated into, caches. Where nothing is written, nothing is copied. Storages that operators of the step made are not: they die with it.
2. Gradients of leaves are remembered when an operator first reads the leaf, or when a backward pass that leads to it begins, whichever comes first:
   most are new in the step, and remembering that there was none costs nothing.
3. Generators: the shared ones at the beginning, an operator's own when it first draws.
4. Modules: their attributes at the beginning, the contents of lists, dicts, sets and deques among these and inside these, and the states of Python's
   and numpy's generators among these. The same of schedulers of learning rates, and of what they set in their optimizer's groups.
5. What a compiled region writes is not seen: buffers of modules that have one are copied at the beginning.
6. Copies of what is on a device lie in the computer's memory; the others are counted as the step's.
"""

from __future__ import annotations

import functools
import itertools
import random
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from punar.errors import UsageError
from punar.torch.engine import nodes_from
from punar.torch.meter import Meter
from punar.torch.operators import OperatorInfo, operator_info, outputs_in, tensors_in
from punar.torch.optimizers import BEFORE_STEP
from punar.torch.random_state import generator_of
from punar.torch.state import RandomStates

T = TypeVar("T")

_numbers = itertools.count(1)
_CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})
"""Those that are surely emptied and filled again as they were; types derived from them may do other things."""

_MOST_FOLLOWED = 256
"""So many items of a container are looked at for containers inside it."""


class Undo:
    """What a step changed so far, by the rules of the NOTE. Belongs to one step, and to each repetition of it."""

    def __init__(self, modules: Iterable[nn.Module], meter: Meter, schedulers: Iterable[LRScheduler] = ()) -> None:
        self.meter = meter
        self.number = next(_numbers)
        self.thread = threading.get_ident()
        self.random = RandomStates.take()
        self.generators: dict[torch.Generator, Tensor] = {}
        self.storages: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
        self.shapes: dict[int, tuple[Tensor, torch.UntypedStorage, Any]] = {}
        self.others: dict[int, tuple[Tensor, Tensor]] = {}
        self.leaves: dict[int, tuple[Tensor, Tensor | None]] = {}
        inner = _each_once(inner for module in modules for inner in module.modules())
        self.attributes = [Attributes(each) for each in (*inner, *schedulers)]
        for optimizer in _each_once(scheduler.optimizer for scheduler in schedulers):
            self.attributes.append(Attributes(optimizer, names=("param_groups",)))
        for buffer in _each_once(buffer for module in inner if is_compiled(module) for buffer in module.buffers()):
            self.copy(buffer)

    # -- what the step does ----------------------------------------------------------------------------------------------

    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An operator is about to run."""
        info = operator_info(func)
        for tensor in tensors_in((*args, *kwargs.values())):
            if tensor.requires_grad:
                self.see_leaf(tensor if tensor._base is None else tensor._base)
        if info.can_write and not info.is_refill:
            for tensor in info.written(args, kwargs):
                self.copy(tensor)
        if info.is_random:
            self.see_generator(generator_of(args, kwargs))

    def after(self, info: OperatorInfo, out: Any) -> None:
        """An operator has run: what it made is the step's own. Only torch's own operators say without fail whether they made it."""
        if not info.makes or not info.name.startswith("aten."):
            return
        for tensor in outputs_in(out):
            storage = _storage_of(tensor)
            if storage is not None:
                storage._punar_step = self.number  # type: ignore[attr-defined]

    def is_made(self, storage: torch.UntypedStorage) -> bool:
        """Whether an operator of this step made a storage."""
        return getattr(storage, "_punar_step", None) == self.number

    def see_leaf(self, tensor: Tensor) -> None:
        """Remembers the gradient of a leaf that was there before the step."""
        if id(tensor) in self.leaves or not (tensor.is_leaf and tensor.requires_grad):
            return
        storage = _storage_of(tensor)
        if storage is None or not self.is_made(storage):
            self.leaves[id(tensor)] = (tensor, tensor.grad)

    def see_backward(self, outputs: Iterable[Any]) -> None:
        """A backward pass is about to run: it writes into the gradients of the leaves that it leads to."""
        leaves = (leaf for _, leaf in nodes_from(outputs))
        for tensor in (*leaves, *outputs):
            if isinstance(tensor, Tensor):
                self.see_leaf(tensor)

    def see_generator(self, generator: torch.Generator | None) -> None:
        """Remembers the state of a generator that an operator is about to draw from."""
        if generator is not None and generator not in self.generators:
            self.generators[generator] = generator.get_state()

    def copy(self, tensor: Tensor) -> None:
        """Copies the storage of a tensor that is about to be overwritten, the first time."""
        storage = _storage_of(tensor)
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            if storage is None:
                if id(tensor) not in self.others:
                    self.others[id(tensor)] = (tensor, tensor.clone())
                return
            if self.is_made(storage) or storage.device.type == "meta":
                return
            self.shapes.setdefault(id(tensor), (tensor, storage, _shape_of(tensor)))
            if storage._cdata in self.storages:
                return
            copied = bytes_of(storage).to("cpu", copy=True)
            self.storages[storage._cdata] = (storage, copied)
        if storage.device.type == "cpu":
            self.meter.record_created(copied)

    # -- going back ------------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Puts everything back; the next attempt finds it as the first one did."""
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            for storage, copied in self.storages.values():
                if storage.nbytes() != len(copied):
                    storage.resize_(len(copied))
                bytes_of(storage).copy_(copied)
            for tensor, storage, shape in self.shapes.values():
                if (tensor.untyped_storage()._cdata, _shape_of(tensor)) != (storage._cdata, shape):
                    tensor.set_(storage, *shape)
            for tensor, copied in self.others.values():
                tensor.copy_(copied)
            for leaf, gradient in self.leaves.values():
                leaf.grad = gradient
        for attributes in self.attributes:
            attributes.restore()
        for generator, state in self.generators.items():
            generator.set_state(state)
        self.random.restore()

    @contextmanager
    def refusing_optimizers(self) -> Iterator[None]:
        """Within, an optimizer that steps in this thread, or on parameters that this step reads, is refused before it has changed anything."""
        BEFORE_STEP.add(self.refuse)
        try:
            yield
        finally:
            BEFORE_STEP.remove(self.refuse)

    def refuse(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses an optimizer that is of the step."""
        parameters = (id(p) for group in optimizer.param_groups for p in group["params"])
        if threading.get_ident() == self.thread or any(p in self.leaves for p in parameters):
            raise UsageError(
                f"asked to run a step that can be repeated, found {type(optimizer).__name__}.step() inside it: what an optimizer changes cannot be "
                "put back without a copy of every parameter. Step the optimizer after remat.step has returned"
            )


class Attributes:
    """An object's attributes, as they were: all of them, or those of these names."""

    __slots__ = ("contents", "named", "names", "owner", "states")

    def __init__(self, owner: object, names: tuple[str, ...] = ()) -> None:
        self.owner, self.names = owner, names
        self.named = {name: each for name, each in owner.__dict__.items() if not names or name in names}
        self.contents: dict[int, tuple[Any, Any]] = {}
        self.states: list[Callable[[], None]] = []
        self.see(self.named.values())

    def see(self, items: Iterable[Any]) -> None:
        """Remembers what attributes, or items of one, hold now."""
        for item in items:
            if type(item) in _CONTAINERS:
                if id(item) not in self.contents:
                    self.contents[id(item)] = (item, item.copy())
                    if item:
                        self.see(itertools.islice(item.values() if isinstance(item, dict) else item, _MOST_FOLLOWED))
            elif isinstance(item, random.Random):
                self.states.append(functools.partial(item.setstate, item.getstate()))
            elif type(item).__module__ == "numpy.random._generator":
                self.states.append(functools.partial(setattr, item.bit_generator, "state", item.bit_generator.state))

    def restore(self) -> None:
        attributes = self.owner.__dict__
        if not self.names:
            attributes.clear()
        attributes.update(self.named)
        for item, before in self.contents.values():
            item.clear()
            item.extend(before) if isinstance(item, (list, deque)) else item.update(before)
        for restore in self.states:
            restore()


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's call goes to ``torch.compile``."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _each_once(items: Iterable[T]) -> list[T]:
    return list({id(item): item for item in items}.values())


def bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """A flat byte tensor on a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """A tensor's storage; None for tensors without one."""
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        return None


def _shape_of(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies in its storage: offset, sizes, strides."""
    return tensor.storage_offset(), tensor.shape, tensor.stride()
