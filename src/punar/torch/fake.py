"""Traces a step on fake tensors: shapes, dtypes and storages as the step has them, no weights, no activations, no computation.

NOTE. How a fake step stands for the real one.

1. The model's parameters, buffers and gradients, and the batch's tensors, are replaced by fake tensors while the step runs, and put back. Tensors
   that shared a storage share one. They may be meta tensors, or fake ones, or real.
2. All fake tensors are on the CPU, whatever device the step is traced for: a build of torch without CUDA has no autograd for its tensors.
   Where a device is asked for inside the step, it is given the CPU (``_OnCpu``). What torch.compile would compile runs as it is written.
3. What CUDA computes by another operator than the CPU is run as that operator (``kernels``).
4. Small tensors of integers are computed beside the fake ones, for models that look at positions and masks to decide on their path (``known_values``).
5. After a write into a view that needs a gradient, and for the gradient of what was there before, autograd makes views anew: of plain tensors by
   ``as_strided``, of fake ones by the operators that made them, which are taken to be that (``FakeTracer.on_op``).
6. What no fake tensor can tell, the number behind an element or the size of a selection, ends the trace (``DataDependentStep``).
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from punar.errors import DataDependentStep, PunarError, UsageError
from punar.ir import Trace
from punar.torch.kernels import cuda_kernels
from punar.torch.known_values import KnownValues, know, value_of
from punar.torch.leftovers import forget_fakes
from punar.torch.modules import ModulePaths
from punar.torch.operators import PLAIN_TYPES, in_backward, operator_info, signature_of, tensors_in
from punar.torch.records import Geometry, is_fake
from punar.torch.rescue import add_note
from punar.torch.session import Session
from punar.torch.state import LossFn, restored, run_step
from punar.torch.tracer import Tracer
from punar.torch.undo import Attributes

_CPU = torch.device("cpu")


_AS_STRIDED = torch.ops.aten.as_strided.default
_NEW = str(torch.ops.aten.new_empty_strided.default)


_REDUCED = {
    "aten.mse_loss.default": 2,
    "aten.smooth_l1_loss.default": 2,
    "aten.soft_margin_loss.default": 1,
    "aten.binary_cross_entropy.default": 1,
}
"""Losses whose kernels, CUDA's too, make one number an element before they reduce them, and reduce them in place: the result keeps a storage for all. With how
many such storages they have meanwhile. Source: ``Loss.cpp`` and ``cuda/Loss.cu`` in ``aten/src/ATen/native``, https://github.com/pytorch/pytorch."""


def _widen(loss: Tensor, args: tuple[Any, ...], times: int) -> int:
    """Gives a loss that is one number the storage that it was reduced in; returns what its kernel has meanwhile, in bytes."""
    storage = loss.untyped_storage()
    known: int = storage.nbytes()
    if loss.dim():
        return known
    nbytes: int = max(known, math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape)) * loss.element_size())
    storage.resize_(nbytes)
    return times * nbytes


def _is_copying() -> bool:
    """Whether the node of backward that runs is that of a write into a view."""
    node = torch._C._current_autograd_node()
    return node is not None and node.name().endswith("CopySlices")


class FakeTracer(Tracer):
    """Watches an episode that computes nothing: operators take no time and no scratch that could be measured."""

    regrown: tuple[Tensor, Geometry] | None = None
    """What autograd is about to make a view of again, and how that reads it."""

    sliced: Tensor | None = None
    """The copy of a gradient of which a node of backward takes a view next."""

    def start_probe(self) -> None:
        return None

    def on_op(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        info = operator_info(func)
        if self.regrown is not None:
            (base, wanted), self.regrown = self.regrown, None
            if info.is_view and args[0] is base:
                out = func(*args, **kwargs)
                if not wanted.is_read_by(out):
                    self.regrown = (out, wanted)
                return out
        if info.is_view and self.sliced is not None:
            return self.slice(func(*args, **kwargs), self.sliced)
        self.sliced = args[0] if info.writes and self.rows[-1]["name"] == _NEW and _is_copying() else None
        written = info.written(args, kwargs) if info.writes and torch.is_grad_enabled() and not in_backward() else []
        if len(written) == 1 and written[0]._base is not None and any(t.requires_grad for t in tensors_in((*args, *kwargs.values()))):
            self.regrown = (written[0]._base, Geometry(written[0]))
        return super().on_op(func, args, kwargs)

    def slice(self, view: Tensor, base: Tensor) -> Tensor:
        """One operator stands for all the views by which a gradient is sliced."""
        args = (base, list(view.size()), list(view.stride()), view.storage_offset())
        row = self.rows[-1]
        if row["name"] != str(_AS_STRIDED):
            made: Tensor = super().on_op(_AS_STRIDED, args, {})
            return made
        row["signature"] = signature_of(row["name"], args, {})
        return view

    def timed(self, number: int, row: dict[str, Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        row["time_ns"] = 0
        out = func(*args, **kwargs)
        if row["name"] in _REDUCED:
            row["peak_bytes"] = _widen(out, args, _REDUCED[row["name"]])
        return out


class FakeSession(Session):
    """Records a step that runs on fake tensors, as one of ``device``. ``optimizer_bytes``: resident beside what the step reads."""

    tracer_type = FakeTracer

    def __init__(self, device: torch.device, optimizer_bytes: int) -> None:
        super().__init__(_never_plans)
        self.device = device
        self.optimizer_bytes = self.optimizer_outside_bytes = optimizer_bytes

    def set_device(self, tensors: list[Tensor]) -> None:
        """The device is the one asked for (Rule 2)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # a fake tensor is asked for its device
            return func(*args, **(kwargs or {}))
        if self.device.type != "cpu" and torch.is_autocast_enabled(self.device.type):
            _refuse_autocast()
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise _data_dependent(error.func, ModulePaths().current()) from error
        except FakeTensorDeviceMismatchError as error:
            raise UsageError(
                f"asked to trace a step without data, found a tensor in {_place(ModulePaths().current())} that is on the meta device and no parameter, buffer or "
                "attribute of a module, nor in the batch: pass it in the batch, or make it on the CPU"
            ) from error
        except UnsupportedOperatorException as error:
            raise UsageError(
                f"asked to trace a step without data, found {error.func} in {_place(ModulePaths().current())}, of which torch does not know what shapes it "
                "makes; register them with torch.library.register_fake, or profile the step where it can run"
            ) from error
        except RuntimeError as error:
            if not isinstance(error, PunarError) and not hasattr(error, "__notes__"):
                add_note(
                    error,
                    f"This is {func} in {_place(ModulePaths().current())}, for tensors without data. If it runs on real ones, torch knows less of it than it "
                    "can do: use another dtype, such as bfloat16, or profile the step where it can run.",
                )
            raise

    def complete(self) -> None:
        """Freezes the trace; there is nothing to plan yet, as operators have no times."""
        tracer, self.pending = self.pending, None
        if tracer is None:
            return
        is_backward_seen = any(row["is_backward"] for row in tracer.rows)
        meta = {
            "torch": torch.__version__,
            "optimizer_bytes": str(self.optimizer_bytes),
            "gradient_bytes": str(self.pending_key.gradient_bytes),
        }
        self.trace = tracer.finish(is_backward_seen=is_backward_seen, meta=meta)


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeStep:
    """A step's trace, with the numbers of the storages of parameters and of their gradients, by the id of the parameter; without those that it did not touch."""

    trace: Trace
    parameters: dict[int, int]
    gradients: dict[int, int]


def trace_fake(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn,
    *,
    device: str,
    optimizer_bytes: int = 0,
    has_gradients: bool = True,
    is_accumulating: bool = False,
    in_flight: int = 1,
) -> FakeStep | None:
    """The trace of ``loss_fn(model, batch).backward()`` as it would run on ``device``, such as ``"cuda:0"``; None where autograd saves nothing.

    Operators' times are 0, and they are taken to need their outputs alone.

    Args:
        optimizer_bytes: resident besides.
        has_gradients: whether gradients that the model has now are there when the step begins.
        is_accumulating: whether one of each trained parameter is, be it there now or not.
        in_flight: how many forward passes there are before the backward pass of the first one.

    Raises:
        DataDependentStep: an operator's result, or the model's path, depends on data.
        UsageError: the loss is no scalar tensor, nothing requires a gradient, or an operator's shapes are not known to torch.
    """
    users = _mode_of(model, batch)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if users is None else users
    try:
        step = _traced(
            _Fakes(mode, has_gradients=has_gradients, is_accumulating=is_accumulating),
            FakeSession(torch.device(device), optimizer_bytes),
            model,
            batch,
            loss_fn,
            in_flight,
        )
    except BaseException:
        forget_fakes(None)
        raise
    forget_fakes(mode if users is None else None)
    return step


def _traced(fakes: _Fakes, session: FakeSession, model: nn.Module, batch: Any, loss_fn: LossFn, in_flight: int) -> FakeStep | None:
    """What ``trace_fake`` returns; when it has, nothing of punar's keeps the tensors that were made."""
    random_state = restored(nn.Module())  # fake tensors draw no random numbers, but the step may draw others
    with _fakes_are_plain(), cuda_kernels(is_asked=session.device.type == "cuda"), random_state, fakes.replaced(model):
        fake_batch = fakes.tree(batch)
        with (
            fakes.mode,
            KnownValues(),
            _OnCpu(),
            _autocast_is_refused(),
            _transformers_sees_no_fakes(),
            torch.compiler.set_stance("force_eager"),
        ):
            _run(session, model, fake_batch, loss_fn, in_flight)
        session.complete()
    trace = session.trace
    if trace is None or not trace.saves:
        return None
    pairs = [(id(parameter), fakes.of(parameter)) for parameter in model.parameters()]
    gradients = [(key, fake.grad) for key, fake in pairs if fake.grad is not None]
    return FakeStep(trace=trace, parameters=_storages(session, pairs), gradients=_storages(session, gradients))


def _storages(session: Session, tensors: list[tuple[int, Tensor]]) -> dict[int, int]:
    """The numbers that a trace has for tensors' storages."""
    records = [(key, session.meter.record_of(tensor)) for key, tensor in tensors]
    return {key: record.number for key, record in records if record is not None and record.number >= 0}


def _run(session: Session, model: nn.Module, batch: Any, loss_fn: LossFn, in_flight: int) -> None:
    """One step in the session's block, which ends whatever happens."""
    is_failed = True
    session.start()
    try:
        run_step(model, batch, loss_fn, in_flight)
        is_failed = False
    finally:
        session.stop(is_failed=is_failed)


class _Fakes:
    """Makes fake tensors like others, equal storages once (Rule 1)."""

    def __init__(self, mode: FakeTensorMode, *, has_gradients: bool, is_accumulating: bool) -> None:
        self.mode = mode
        self.has_gradients = has_gradients
        self.is_accumulating = is_accumulating
        self.bases: dict[int, Tensor] = {}
        self.known: dict[int, Tensor] = {}
        self.originals: list[Tensor] = []

    def tree(self, batch: Any) -> Any:
        """A batch with its tensors replaced, in whatever containers they are."""
        if not isinstance(batch, MutableMapping) or isinstance(batch, dict):
            return tree_map_only(Tensor, self.of, batch)
        made = copy.copy(batch)
        for name, item in batch.items():
            made[name] = self.tree(item)
        return made

    def of(self, tensor: Tensor) -> Tensor:
        """The fake one of a tensor: a leaf, that requires a gradient where the original does, and has a gradient where the original has one."""
        known = self.known.get(id(tensor))
        if known is not None:
            return known
        with self.mode, torch.no_grad():
            fake = self.like(tensor)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            else:
                fake.requires_grad_(tensor.requires_grad)
            if self.has_gradients and tensor.is_leaf and tensor.grad is not None:
                fake.grad = self.like(tensor.grad)
            elif self.is_accumulating and isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                fake.grad = torch.empty_like(fake, requires_grad=False)
        know(fake, tensor)
        self.known[id(tensor)] = fake
        self.originals.append(tensor)  # ids and storages are known by address: they must live
        return fake

    def like(self, tensor: Tensor) -> Tensor:
        """A fake tensor that reads its storage as another reads its own."""
        if is_lazy(tensor):
            raise UsageError(
                "asked to trace a step without data, found a parameter of a lazy module, whose shape is not known yet: call the model once before, "
                "on a meta batch where it is large"
            )
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError as error:
            raise UsageError(
                f"asked to trace a step without data, found a {type(tensor).__name__} with layout {tensor.layout}, which has no storage to count; "
                "give strided tensors, or profile the step where it can run"
            ) from error
        base = self.bases.get(storage._cdata)
        if base is None:
            base = self.bases[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_CPU)
        fake = torch.empty(0, dtype=tensor.dtype, device=_CPU)
        return fake.set_(base.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())

    @contextmanager
    def replaced(self, model: nn.Module) -> Iterator[None]:
        """Within, the model's tensors are fake: parameters, buffers, other attributes; whatever the attributes become is undone at the end.

        What is in their containers too: recurrent layers have their parameters in a list besides, and steps append to lists.
        """
        modules = tuple(model.modules())
        before = [Attributes(module) for module in modules]
        try:
            for module in modules:
                for table in (module.__dict__, module._parameters, module._buffers):
                    for name, tensor in tuple(table.items()):
                        if isinstance(tensor, Tensor):
                            setattr(module, name, self.of(tensor))
            yield
        finally:
            for attributes in before:
                attributes.restore()


def _mode_of(model: nn.Module, batch: Any) -> FakeTensorMode | None:
    """The mode that the model was built under, since two cannot be mixed; None where it was under none."""
    found: list[Tensor] = [*model.parameters(), *model.buffers()]
    tree_map_only(Tensor, found.append, batch)
    for tensor in found:
        if is_fake(tensor):
            mode: FakeTensorMode = tensor.fake_mode  # type: ignore[attr-defined]
            return mode
    return None


@contextmanager
def _fakes_are_plain() -> Iterator[None]:
    """Within, fake tensors are watched as ordinary ones."""
    PLAIN_TYPES.add(FakeTensor)
    try:
        yield
    finally:
        PLAIN_TYPES.discard(FakeTensor)


@contextmanager
def _transformers_sees_no_fakes() -> Iterator[None]:
    """Transformers takes fake tensors for those of a compiler, and builds attention masks for them that the real step does without."""
    module = sys.modules.get("transformers.utils.import_utils")
    original = getattr(module, "is_fake_tensor", None)
    if module is None or original is None:
        yield
        return
    module.is_fake_tensor = _is_never  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.is_fake_tensor = original  # type: ignore[attr-defined]


def _is_never(_: Any) -> bool:
    return False


@contextmanager
def _autocast_is_refused() -> Iterator[None]:
    """``torch.autocast("cuda")`` where there is no CUDA only warns and does nothing, and the trace would be one of another step."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*CUDA is not available.*[Aa]utocast")
        try:
            yield
        except UserWarning as warning:
            if "CUDA is not available" not in str(warning):
                raise  # the user's warnings are errors
            _refuse_autocast()


def _refuse_autocast() -> NoReturn:
    raise UsageError(
        'asked to trace a step without data, found torch.autocast("cuda"), whose casts are made by CUDA alone: build the model in the dtype it is to '
        "compute in, such as bfloat16, or profile the step on that device"
    )


class _OnCpu(TorchFunctionMode):
    """Gives the CPU where another device is asked for, which need not be here (Rule 2); and elements that are known to those who ask for an array."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.numpy and is_fake(args[0]):
            known = value_of(args[0])
            if known is None:
                raise _data_dependent("Tensor.numpy", ModulePaths().current())
            with torch._C._DisableTorchDispatch():
                return known.numpy()
        if func is Tensor.to and len(args) > 1 and isinstance(args[1], int):
            args = (args[0], _CPU, *args[2:])
        return func(*map(_here, args), **{name: _here(item) for name, item in kwargs.items()})


def _here(item: Any) -> Any:
    """The CPU instead of another device; other arguments as they are."""
    if isinstance(item, torch.device) and item.type not in ("cpu", "meta"):
        return _CPU
    return _CPU if isinstance(item, str) and item.partition(":")[0] == "cuda" else item


def _place(module: str) -> str:
    return module or "the loss function"


def _data_dependent(func: Any, module: str) -> DataDependentStep:
    return DataDependentStep(
        f"asked to trace a step without data, found {func} in {_place(module)}, whose result depends on data (a number read from a tensor, or a selection of "
        "unknown size): shapes and the model's path after it are unknown. Replace it for this trace by what it usually gives, or profile the step where it can run",
        operator=str(func),
        module=module,
    )


def _never_plans(*_: Any) -> NoReturn:
    raise AssertionError("a fake step is not planned for while it runs")
