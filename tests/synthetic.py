"""Traces of made-up steps: a forward program is written down, autograd's backward is played for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from punar.ir import EventKind, Op, Trace, TraceBuilder


@dataclass(frozen=True, kw_only=True)
class Step:
    """One forward operator: what it reads (earlier steps by index, -1 for the batch), makes, saves, and costs.

    ``saves_inputs`` and ``saves_output`` say what autograd keeps for its backward. ``writes``: it makes a new version of that one of its reads
    in place, in the same storage, and ``bytes`` is its. ``is_asked``: backward unpacks what was saved for it.
    """

    name: str
    reads: tuple[int, ...]
    bytes: int
    time_ns: int = 10_000
    saves_inputs: bool = False
    saves_output: bool = False
    scratch: int = 0
    kind: str = "other"
    is_replayable: bool = True
    backward_ratio: float = 2.0
    gradient_bytes: int = 0
    module: str = ""
    writes: int = -1
    is_asked: bool = True


@dataclass
class Player:
    """Plays forward and backward of a program into a ``TraceBuilder``."""

    program: Sequence[Step]
    builder: TraceBuilder = field(default_factory=lambda: TraceBuilder("cpu"))
    value: dict[int, int] = field(default_factory=dict)
    storage: dict[int, int] = field(default_factory=dict)
    gradient: dict[int, int] = field(default_factory=dict)
    saves: list[list[int]] = field(default_factory=list)

    def play(self, overhead_ns: int = 6000) -> Trace:
        batch = self.builder.add_storage(bytes=1 << 10, is_source=True)
        self.value[-1], self.storage[-1] = self.builder.add_value(storage=batch, version=0, producer=-1), batch
        root = list(range(len(self.program)))
        for index, step in enumerate(self.program):
            root[index] = root[step.writes] if step.writes >= 0 else index
        last = {root[r] if r >= 0 else r: i for i, step in enumerate(self.program) for r in step.reads}
        for index, step in enumerate(self.program):
            self.forward(index, step, root, last)
        for index in reversed(range(len(self.program))):
            self.backward(index, self.program[index])
        return self.builder.build(resident_bytes=1 << 12, overhead_ns=overhead_ns)

    def forward(self, index: int, step: Step, root: list[int], last: dict[int, int]) -> None:
        """Runs one operator; what it reads is the latest version of a storage, as with views."""
        inputs = tuple(self.value[root[r] if r >= 0 else r] for r in dict.fromkeys(step.reads))
        inputs = tuple(dict.fromkeys(inputs))
        saved = [self.builder.add_save(v) for v in inputs] if step.saves_inputs else []
        at = root[index]
        version = 0
        if at == index:
            self.storage[at] = self.builder.add_storage(bytes=step.bytes, is_source=False)
        else:
            version = self.builder.values[self.value[at]].version + 1
        self.value[at] = self.builder.add_value(storage=self.storage[at], version=version, producer=len(self.builder.ops))
        peak = step.bytes + step.scratch if at == index else step.scratch
        self.run(step, inputs, (self.value[at],), step.time_ns, peak, is_backward=False)
        if step.saves_output:
            saved.append(self.builder.add_save(self.value[at]))
        self.saves.append(saved)
        for r in dict.fromkeys(root[r] for r in step.reads if r >= 0):
            if last[r] == index:
                self.builder.add_event(EventKind.FREE, self.storage[r])
        if at not in last and index < len(self.program) - 1:
            self.builder.add_event(EventKind.FREE, self.storage[at])

    def backward(self, index: int, step: Step) -> None:
        """The operator's backward makes a gradient for each of its inputs but the batch, and for its parameters."""
        for save in self.saves[index] if step.is_asked else []:
            self.builder.add_event(EventKind.DEMAND, save)
        targets = [r for r in dict.fromkeys(step.reads) if r >= 0]
        sizes = [self.program[r].bytes for r in targets] + [step.gradient_bytes] * bool(step.gradient_bytes)
        made = self.compute(step, sizes, int(step.time_ns * step.backward_ratio), step.scratch)
        for save in self.saves[index]:
            self.builder.add_event(EventKind.RELEASE, save)
        if index in self.gradient:
            self.builder.add_event(EventKind.FREE, self.gradient.pop(index))
        for target, storage in zip(targets, made, strict=False):
            self.accumulate(target, storage)

    def accumulate(self, target: int, storage: int) -> None:
        """A second gradient for the same value is added to the first in a new storage."""
        if target in self.gradient:
            total = self.compute(self.program[target], [self.program[target].bytes], 2000, 0, name="add")[0]
            self.builder.add_event(EventKind.FREE, storage)
            self.builder.add_event(EventKind.FREE, self.gradient[target])
            storage = total
        self.gradient[target] = storage

    def compute(self, step: Step, sizes: Sequence[int], time_ns: int, scratch: int, name: str = "") -> list[int]:
        """Runs a backward operator that makes storages of the given sizes."""
        made = [self.builder.add_storage(bytes=size, is_source=False) for size in sizes]
        values = [self.builder.add_value(storage=storage, version=0, producer=len(self.builder.ops)) for storage in made]
        self.run(step, (), tuple(values), time_ns, sum(sizes) + scratch, is_backward=True, name=name)
        return made

    def run(
        self, step: Step, inputs: tuple[int, ...], outputs: tuple[int, ...], time_ns: int, peak: int, *, is_backward: bool, name: str = ""
    ) -> None:
        label = name or step.name + ("_backward" if is_backward else "")
        self.builder.add_op(
            Op(
                id=len(self.builder.ops),
                name=label,
                kind=step.kind,
                is_backward=is_backward,
                has_grad_mode=not is_backward,
                module=step.module,
                signature=f"{label}({step.bytes})",
                inputs=inputs,
                outputs=outputs,
                time_ns=time_ns,
                peak_bytes=peak,
                is_replayable=step.is_replayable and not is_backward,
            )
        )


def trace_of(program: Sequence[Step], overhead_ns: int = 6000) -> Trace:
    """The whole step of a forward program whose last operator makes the loss."""
    return Player(program).play(overhead_ns)


def block(start: int, into: int, width: int, module: str, attention: int = 1) -> list[Step]:
    """A transformer block over a stream of ``width`` bytes, whose input is the step ``into``; times in proportion to a CPU's."""
    unit = width // 64
    at = start

    def step(name: str, reads: tuple[int, ...], bytes: int, time: int, kind: str = "other", **kw: bool) -> Step:
        return Step(name=name, reads=reads, bytes=bytes, time_ns=time * unit // 100, kind=kind, module=module, **kw)

    return [
        step("norm", (into,), width, 40, "norm", saves_inputs=True),
        step("qkv", (at,), 3 * width, 900, "matmul", saves_inputs=True),
        step("attention", (at + 1,), width, 500 * attention, "attention", saves_inputs=True, saves_output=True),
        step("project", (at + 2,), width, 300, "matmul", saves_inputs=True),
        step("add", (into, at + 3), width, 20),
        step("norm", (at + 4,), width, 40, "norm", saves_inputs=True),
        step("up", (at + 5,), 4 * width, 1200, "matmul", saves_inputs=True),
        step("gelu", (at + 6,), 4 * width, 100, saves_inputs=True),
        step("down", (at + 7,), width, 1200, "matmul", saves_inputs=True),
        step("add", (at + 4, at + 8), width, 20),
    ]


def transformer(blocks: int, width: int = 1 << 20, vocabulary: int = 4) -> Trace:
    """Embedding, blocks, and a loss head of ``vocabulary`` times the stream's width."""
    program = [Step(name="embed", reads=(-1,), bytes=width)]
    for index in range(blocks):
        program += block(len(program), len(program) - 1, width, f"layers.{index}")
    last = len(program) - 1
    program += [
        Step(
            name="logits",
            reads=(last,),
            bytes=vocabulary * width,
            time_ns=vocabulary * width // 400,
            kind="matmul",
            saves_inputs=True,
            module="head",
        ),
        Step(
            name="softmax",
            reads=(last + 1,),
            bytes=vocabulary * width,
            time_ns=vocabulary * width // 4000,
            saves_output=True,
            module="loss",
        ),
        Step(name="nll", reads=(last + 2,), bytes=4, time_ns=10_000, module="loss"),
    ]
    return trace_of(program)


def chain(sizes: Sequence[int], times: Sequence[int] | None = None, overhead_ns: int = 0) -> Trace:
    """A chain of operators that each save their input."""
    times = times or [10_000] * len(sizes)
    program = [
        Step(name="layer", reads=(i - 1,), bytes=size, time_ns=time, saves_inputs=True)
        for i, (size, time) in enumerate(zip(sizes, times, strict=True))
    ]
    return trace_of(program, overhead_ns)
