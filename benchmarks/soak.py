"""Is everything flat after thousands of steps? Trains under changing shapes, memory errors, a disk that fills up, plans that change, interrupts and threads.

    python benchmarks/soak.py --seconds 180

Several *strands* take a step in turn, each with a model of its own and a plain twin that takes the same step without punar: weights must stay equal bit for
bit. At even distances all is let go of that is not held, and counted: bytes of live tensors, file descriptors, threads, child processes, the resident set. The
script ends with exit code 1 where one of them is higher at the end than in the middle, by more than is said below, or where weights differ.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import punar
from punar.plan.moves import Channel
from punar.tiers import Spool
from punar.tiers.files import OperatingSystem
from punar.torch.offload import DiskTier, Offload

WIDTH, BLOCKS = 32, 2

SHAPES = (64, 128, 192)
"""Rows of a batch."""

RENEWED = 120
"""After so many steps a strand gets a Remat of its own anew: what the one before held must go with it."""

THREADED = 20
"""At each so many steps a thread trains as well."""

SLACK = {"tensor_bytes": 0, "descriptors": 0, "threads": 0, "children": 0, "allocated_bytes": 8 << 20, "resident_bytes": 24 << 20}
"""By how much the median of the last third of the counts may exceed that of the second. What is allocated: ``remat.stats`` grows with each step, by design. The
resident set: pages that are partly free stay as well."""


class Mallinfo(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What is alive. Units: seconds since the start, steps so far of all strands, bytes. ``allocated_bytes``: of the C library, not given back."""

    seconds: float
    steps: int
    tensor_bytes: int
    descriptors: int
    threads: int
    children: int
    allocated_bytes: int
    resident_bytes: int

    @classmethod
    def take(cls, seconds: float, steps: int) -> Count:
        """Counts after plans that are being made are done, and after all that is not held is gone."""
        for thread in threading.enumerate():
            if thread.name == "punar-planning":
                thread.join()
        gc.collect()
        allocated = Mallinfo()
        library = ctypes.CDLL(None)
        if hasattr(library, "mallinfo2"):  # glibc's
            library.malloc_trim(0)
            library.mallinfo2.restype = Mallinfo
            allocated = library.mallinfo2()
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors()}
        pages = int(_read("/proc/self/statm").split()[1])
        return cls(
            seconds=seconds,
            steps=steps,
            tensor_bytes=sum(storages.values()),
            descriptors=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            children=sum(len(_read(f"/proc/self/task/{task}/children").split()) for task in os.listdir("/proc/self/task")),
            allocated_bytes=allocated.uordblks + allocated.hblkhd,
            resident_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
        )


def tensors() -> Iterator[Tensor]:
    """All that are alive; by type, since objects that stand for others warn when they are asked for their class."""
    return (item for item in gc.get_objects() if issubclass(type(item), Tensor))


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:  # a thread that has ended since, or a kernel that does not tell
        return ""


def rising(counts: list[Count]) -> dict[str, tuple[float, float]]:
    """What is higher in the last third of the counts than in the second, by more than its slack: both medians of it."""
    third = len(counts) // 3
    found = {}
    for name, slack in SLACK.items():
        middle, end = (median(getattr(count, name) for count in part) for part in (counts[third : 2 * third], counts[-third:]))
        if end > middle + slack:
            found[name] = (middle, end)
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """``faults``: called before each block, and before the backward pass of each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.faults: Callable[[], object] | None = None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.faults is not None:
                self.faults()
            x = block(x)
            if self.faults is not None:
                x.register_hook(self._in_backward)
        return x

    def _in_backward(self, gradient: Tensor) -> None:
        if self.faults is not None:
            self.faults()


class Strand:
    """One kind of trouble: a model, its plain twin, and steps that both take."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.model, self.twin = Model(), Model()
        self.twin.load_state_dict(self.model.state_dict())
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in (self.model, self.twin)]
        self.steps = self.events = self.seen = 0
        self.renew()

    def renew(self) -> None:
        self.remat = punar.Remat(budget="min")

    def step(self) -> None:
        """One step of both; where one of the model's was given up, neither is taken."""
        self.steps += 1
        if self.steps % RENEWED == 0:
            self.seen += self.see()
            self.renew()
        batch = torch.randn(self.rows(), WIDTH)
        state = torch.get_rng_state()
        if self.run(batch):
            torch.set_rng_state(state)
            loss_of(self.twin, batch)
            for optimizer in self.optimizers:
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def see(self) -> int:
        """Events that the strand's Remat has counted itself."""
        return 0

    def rows(self) -> int:
        return 128

    def run(self, batch: Tensor) -> bool:
        """The model's step; whether it went through."""
        with self.remat:
            loss_of(self.model, batch)
        return True

    def is_equal(self) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.model.parameters(), self.twin.parameters(), strict=True))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    return loss.detach()


class Shapes(Strand):
    """Each batch may have another size than the one before."""

    def rows(self) -> int:
        found = self.random.choice(SHAPES)
        self.events += found != 128
        return found


class OutOfMemory(Strand):
    """Some steps have more than their limit, and some operators find no memory."""

    def renew(self) -> None:
        self.remat = punar.Remat(budget=0.9, limit="800 KiB")
        self.model.faults = self.fail

    def fail(self) -> None:
        if self.random.random() < 0.02:
            self.events += 1
            raise MemoryError("no memory, this time")

    def rows(self) -> int:
        return self.random.choice((64, 128, 192))

    def run(self, batch: Tensor) -> bool:
        try:
            self.remat.step(loss_of, self.model, batch)
        except MemoryError:  # the tightest plan failed as well: a user makes the batch smaller
            return False
        return True

    def see(self) -> int:
        return sum(stats.rescues for stats in self.remat.stats)


FAST = Channel(name="disk", capacity_bytes=1 << 40, write_bytes_per_s=1 << 40, read_bytes_per_s=1 << 40)
"""A disk said to be so fast that values of a few kilobytes are moved."""


class FillingUp(OperatingSystem):
    """A disk that is full now and then."""

    def __init__(self, strand: DiskFull) -> None:
        self.strand = strand

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        if self.strand.is_full:
            self.strand.events += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, data, offset)


class DiskFull(Strand):
    """Values go to a disk, which fills up after a while in each life of a Remat."""

    is_full = False

    def rows(self) -> int:
        return 1024  # smaller values are not worth a copy

    def __init__(self, seed: int, folder: str) -> None:
        self.folder = folder
        super().__init__(seed)

    def renew(self) -> None:
        self.remat = punar.Remat(budget=0.6)
        spool = Spool(self.folder, files=FillingUp(self))
        self.remat._session.movers.offload = Offload(
            [DiskTier(spool)], (FAST,)
        )  # in place of what `offload` opens: it fills up when we say
        self.is_full = False

    def run(self, batch: Tensor) -> bool:
        self.is_full = self.steps % 60 > 40
        return super().run(batch)

    def see(self) -> int:
        return sum(stats.moved_bytes > 0 for stats in self.remat.stats)


class OtherPlans(Strand):
    """The model's own code takes another time every so many steps, so that plans are made anew in another process; now and then a step is more tightly planned."""

    def run(self, batch: Tensor) -> bool:
        self.model.faults = self.idle if self.steps // 45 % 2 else None
        return super().run(batch)

    def idle(self) -> None:
        time.sleep(0.004)

    def see(self) -> int:
        return len(self.remat.drifts)


class Interrupts(Strand):
    """``KeyboardInterrupt`` in the middle of forward or backward, which the loop catches; the step is left out."""

    def renew(self) -> None:
        super().renew()
        self.model.faults = self.interrupt
        signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts in the background ignores it else

    def interrupt(self) -> None:
        if self.random.random() < 0.02:
            signal.raise_signal(signal.SIGINT)

    def run(self, batch: Tensor) -> bool:
        try:
            return super().run(batch)
        except KeyboardInterrupt:
            self.events += 1
            return False


class Threads(Strand):
    """Every so many steps a thread trains with a Remat of its own, beside this one's."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.other = Model().eval()  # its dropout would draw from the same generator at any time

    def run(self, batch: Tensor) -> bool:
        if self.steps % THREADED == 0:
            self.events += 1
            thread = threading.Thread(target=self.train, args=(self.other,))
            thread.start()
            done = super().run(batch)
            thread.join()
            return done
        return super().run(batch)

    @staticmethod
    def train(model: Model) -> None:
        remat = punar.Remat(budget="min")
        batch = torch.ones(64, WIDTH)
        for _ in range(5):
            with remat:
                loss_of(model, batch)
            model.zero_grad()


class Leaking(Strand):
    """Holds a tensor of each step: shows that a leak is found."""

    def run(self, batch: Tensor) -> bool:
        self.held = [*getattr(self, "held", ()), torch.ones(256)]
        return super().run(batch)


def strands(folder: str, seed: int, *, is_leaking: bool) -> list[Strand]:
    found = [Shapes(seed), OutOfMemory(seed + 1), DiskFull(seed + 2, folder), OtherPlans(seed + 3), Interrupts(seed + 4), Threads(seed + 5)]
    return [*found, Leaking(seed + 6)] if is_leaking else found


def soak(all_strands: list[Strand], *, seconds: float, most_steps: int, counts: int) -> Iterator[Count]:
    """Steps in turn until the time or the steps are over; counts so many times on the way, evenly by either."""
    start, steps, taken = time.monotonic(), 0, 0
    while taken < counts:
        for strand in all_strands:
            strand.step()
            steps += 1
        done = max((time.monotonic() - start) / seconds, steps / most_steps if most_steps else 0)
        if done >= (taken + 1) / counts:
            taken += 1
            before = time.monotonic()
            count = Count.take(before - start, steps)
            start += time.monotonic() - before  # it may have waited for a plan
            yield count


HEADER = ("seconds", "steps", "live tensors, KiB", "descriptors", "threads", "children", "allocated, MiB", "resident, MiB")


def row(count: Count) -> str:
    shown = [getattr(count, field.name) for field in fields(count)]
    shown[0], shown[2] = round(shown[0]), round(shown[2] / 1024)
    shown[-2:] = [round(size / 2**20) for size in shown[-2:]]
    return " | ".join(f"{cell:>{len(title)}}" for cell, title in zip(shown, HEADER, strict=True))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=180.0, help="how long to train at most; counting comes on top")
    parser.add_argument("--steps", type=int, default=0, help="how many steps of all strands at most; 0: as many as there is time for")
    parser.add_argument("--counts", type=int, default=18, help="how often to count; 9 at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--leak", action="store_true", help="leak on purpose, to see that it is found")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(argv)
    if asked.counts < 9:
        parser.error("fewer than 9 counts do not show whether something rises")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", UserWarning)  # what is provoked here is told as it should be
    counts: list[Count] = []
    with tempfile.TemporaryDirectory(prefix="punar-soak-") as folder:
        run = strands(folder, asked.seed, is_leaking=asked.leak)
        if not asked.json:
            print(" | ".join(HEADER))
        for count in soak(run, seconds=asked.seconds, most_steps=asked.steps, counts=asked.counts):
            counts.append(count)
            if not asked.json:
                print(row(count), flush=True)
        troubles = {
            type(strand).__name__: {"steps": strand.steps, "events": strand.events, "seen": strand.seen + strand.see()} for strand in run
        }
        different = [type(strand).__name__ for strand in run if not strand.is_equal()]
    rises = rising(counts)
    result: dict[str, Any] = {"counts": [asdict(count) for count in counts], "strands": troubles, "rising": rises, "different": different}
    if asked.json:
        print(json.dumps(result, indent=2))
    else:
        print("\n".join(f"{name}: {told}" for name, told in troubles.items()))
        print(f"rising: {rises or 'nothing'}; weights that differ from the plain twin's: {different or 'none'}")
    return 1 if rises or different else 0


if __name__ == "__main__":
    sys.exit(main())
