"""Random differentiable programs: a list of small instructions on a pool of tensors, run by an interpreter.

An instruction picks its operands by number, modulo what is in the pool, so that any list of instructions is a program and hypothesis can
shrink it. What an instruction cannot use it makes fit, by views where that is possible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

POOL = 6
"""Tensors that a program has in its hands at once; the oldest are dropped."""

LARGEST = 256
"""Elements of the largest tensor in the pool."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """``name`` of an entry of ``INSTRUCTIONS``; ``x`` and ``y`` pick its operands, ``k`` is a small number that it may use."""

    name: str
    x: int
    y: int
    k: int


@dataclass(frozen=True, slots=True)
class Program:
    instructions: tuple[Instruction, ...]

    @property
    def takes_data_dependent_paths(self) -> bool:
        return any(i.name in BRANCHING for i in self.instructions)

    @property
    def replaces_what_outlives_a_step(self) -> bool:
        return any(i.name in OUTLIVING for i in self.instructions)

    @property
    def outliving_bytes(self) -> int:
        """The most that the tensors take which the model replaces within each step."""
        return sum(i.name in OUTLIVING for i in self.instructions) * LARGEST * 8


class ProgramModel(nn.Module):
    """Parameters, buffers and a private generator for programs; running it interprets the program."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.weight = nn.Parameter(torch.randn(8, 8) * 0.4)
        self.tied = self.weight
        self.bias = nn.Parameter(torch.randn(8) * 0.1)
        self.gain = nn.Parameter(torch.rand(8) + 0.5)
        self.filter = nn.Parameter(torch.randn(2, 1, 3) * 0.5)
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.rnn = nn.GRUCell(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.register_buffer("state", torch.ones(8))
        self.register_buffer("cache", torch.zeros(4, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.generator = torch.Generator().manual_seed(3)
        self.kept: list[Tensor] = []

    def forward(self, batch: Tensor) -> Tensor:
        first = (self.weight * self.gain).sum() * 0.01  # what it saves lives to the end: the step is one episode whatever the program drops
        parts = [_scalar(t) for t in self.run(batch) if t.numel()]
        return torch.stack([*parts, first]).sum().square()

    def run(self, batch: Tensor) -> list[Tensor]:
        """Interprets the program; what is left in the pool."""
        pool = [batch, F.linear(batch, self.tied, self.bias)]
        for instruction in self.program.instructions:
            x, y = pool[-1 - instruction.x % len(pool)], pool[-1 - instruction.y % len(pool)]
            made = INSTRUCTIONS[instruction.name](self, x, y, instruction.k)
            del x, y
            pool += [t for t in (made if isinstance(made, (tuple, list)) else (made,)) if t is not None and t.numel() <= LARGEST]
            del made
            pool = pool[-POOL:]
        return pool


def _scalar(t: Tensor) -> Tensor:
    if t.is_complex():
        t = t.abs()
    return t.to(torch.float32).mean().tanh()


# -- making operands fit -----------------------------------------------------------------------------------------------


def real(x: Tensor) -> Tensor:
    """A floating-point tensor: of a complex one the real part, a view; of integers a copy."""
    if x.is_complex():
        return x.real
    return x if x.is_floating_point() else x.to(torch.float32)


def single(x: Tensor) -> Tensor:
    """As float32."""
    return real(x).to(torch.float32)


def like(x: Tensor, y: Tensor) -> Tensor:
    """``y`` as something that broadcasts against ``x``."""
    if x.shape == y.shape:
        return y
    return y.reshape(-1)[0] if y.numel() else y.new_ones(())


def matrix(x: Tensor, width: int = 8) -> Tensor:
    """A matrix with ``width`` columns, a view where that can be."""
    x = real(x)
    if x.numel() < width:
        return x.sum().expand(2, width)
    x = x.reshape(-1)
    return x[: x.numel() // width * width].reshape(-1, width)[:16]


def cast(weight: Tensor, x: Tensor) -> Tensor:
    return weight.to(x.dtype)


def fresh(x: Tensor, k: int) -> Tensor:
    """What is written into: most often a copy, else the tensor itself."""
    x = real(x)
    return x if k % 3 == 0 and not x.is_leaf and 0 not in x.stride() else x.clone(memory_format=torch.contiguous_format)


def row(x: Tensor) -> Tensor:
    return x.reshape(-1) if x.dim() == 0 else x[0]


# -- custom functions --------------------------------------------------------------------------------------------------


class Product(torch.autograd.Function):
    """Saves its inputs as it should."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return (grad * y).sum_to_size(x.shape), (grad * x).sum_to_size(y.shape)


class Scaled(torch.autograd.Function):
    """Keeps a tensor on ``ctx``, which no saved-tensor hook sees; saves its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.scale = x.abs().mean() + 1
        out = x.div(ctx.scale).tanh()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grad * (1 - out * out) / ctx.scale


class Dirty(torch.autograd.Function):
    """Writes into its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(0.5)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.5


class Unseen(torch.autograd.Function):
    """Fills ``empty`` or ``zeros`` without dispatching an operator, as a Triton kernel or a C extension does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_zeros: bool) -> Tensor:
        out = torch.zeros_like(x) if is_zeros else torch.empty_like(x)
        np.tanh(x.detach().numpy(), out=out.numpy())
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (out,) = ctx.saved_tensors
        return grad * (1 - out * out), None


# -- instructions ------------------------------------------------------------------------------------------------------

Made = Tensor | tuple[Tensor, ...] | list[Tensor] | None
Rule = Callable[[ProgramModel, Tensor, Tensor, int], Made]


def write_row(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    out = fresh(x, k)
    row(out).mul_(0.5).add_(real(like(row(out), y)))
    return out


def write_slice(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    out = fresh(x, k).reshape(-1)
    out[k % 2 :: 2] = real(like(out, y)).reshape(-1)[k % 2 :: 2] * 2 if like(out, y).dim() else real(like(out, y)).to(out.dtype)
    return out


def write_transposed(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    out = matrix(x).clone() if k % 3 else matrix(x) * 1
    out.t()[k % 8].add_(real(y).mean())
    return out


def write_then_read_old(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    """An activation is read, overwritten and read again."""
    out = real(x) * 1.5
    before = out + 1
    out.tanh_()
    after = out * 2
    return before, after


def write_beside(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    """Parts of one storage are overwritten one after the other, and saved, as the gates of a recurrent cell are."""
    out = matrix(x).clone() if k % 3 else matrix(x) * 1
    one, other = out.unsafe_chunk(2, 1)
    one.sigmoid_()
    between = one * 2 if k % 2 else one.exp()
    other.tanh_()
    return between, one * other


def index_put(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    out = matrix(fresh(x, k)).clone()
    places = torch.tensor([k % out.shape[0], 0])
    out.index_put_((places,), real(y).mean().to(out.dtype), accumulate=bool(k % 2))
    return out


def index_add(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    out = matrix(x).clone()
    out.index_add_(0, torch.tensor([0]), cast(matrix(y)[:1], out))
    return out


def scatter(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    values = matrix(x)
    return torch.zeros_like(values).scatter_(1, values.detach().argsort(dim=1), values)


def fill_zeros(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    values = matrix(x)
    out = values.new_zeros(values.shape[0] + 1, 8)
    out[: values.shape[0]] = values
    return out


def fill_empty(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    values = matrix(x)
    out = torch.empty(2, *values.shape, dtype=values.dtype)
    out[0] = values
    out[1].copy_(values.sin())
    return out


def copy_whole(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    values = real(x)
    out = torch.empty_like(values).copy_(values)
    return out.mul_(1.5) if k % 2 else out


def running(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    with torch.no_grad():
        m.mean.mul_(0.9).add_(single(x).detach().mean(), alpha=0.1)
        m.count += 1
    return real(x) - m.mean.mean().to(real(x).dtype)


def write_cache(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    with torch.no_grad():
        m.cache[k % 4].copy_(single(matrix(x)).mean(0))
    return m.cache.clone() * m.gain


def read_cache(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    """The buffer itself is saved; where it is written later, eager raises."""
    return single(matrix(x)) * (m.cache[k % 4] if k % 2 else m.cache[k % 4] + 1)


def replace_state(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    old = m.state
    m.state = (m.state * 0.5 + single(x).mean()).detach()
    return single(matrix(x)) * old


def batch_norm(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    return F.batch_norm(single(matrix(torch.cat([matrix(x), matrix(x).flip(0) * 0.5]))), m.mean, m.var, m.gain, m.bias, training=k % 4 != 3)


def frozen_statistics(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    with torch.no_grad():
        mean = real(x).mean()
        scale = real(x).abs().amax() + 1
    return (real(x) - mean) / scale


def private_noise(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    values = real(x)
    if k % 2:
        return values * torch.rand(values.shape, generator=m.generator).to(values.dtype)
    return values * torch.empty_like(values).normal_(generator=m.generator)


def branch(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    if float(real(x).detach().sum()) > 0.1 * (k - 3):
        return real(x).sin() * 2
    return (real(x).exp().clamp(max=4), real(x).relu())


def select_positive(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    values = real(x).reshape(-1)
    return values[values > 0] * 2


def attributes_function(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    return Scaled.apply(real(x))


def dirty(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    return Dirty.apply(fresh(x, k) if k % 3 else real(x) * 2)


def hooked(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    out = real(x).sin()
    if out.requires_grad:
        out.register_hook(lambda grad: grad * 0.5)
    return out


def attention(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    query, key = (single(matrix(t)).reshape(1, 1, -1, 8) for t in (x, y))
    return F.scaled_dot_product_attention(query, key, key, dropout_p=0.3 if k % 2 else 0.0)


def embed(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    ids = single(matrix(x)).detach().argmax(1)
    return F.embedding(ids, m.tied if k % 2 else m.weight.t())


def convolve(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    out = F.conv1d(single(matrix(x)).unsqueeze(1), m.filter, padding=1)
    return F.max_pool1d(out, 2) if k % 2 else out


def as_complex(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    out = single(matrix(x)) * m.phase
    match k % 4:
        case 0:
            return out.conj()
        case 1:
            return out.conj().imag
        case 2:
            return torch.view_as_real(out)
    return out * out.conj()


def no_choice(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    out = torch.view_as_complex(single(matrix(x)).reshape(-1, 2).contiguous())
    return torch.fft.fft(out) if k % 2 else out.abs()


def keep_state(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    """A tensor with its graph from outside the pool's life: kept on the model until the next step replaces it."""
    m.kept = [real(x)]
    return None


def rnn(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    steps = single(matrix(x))
    hidden = steps.new_zeros(1, 8)
    for step in steps[:3]:
        hidden = m.rnn(step[None], hidden)
    return hidden


def slices(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    if x.dim() == 0:
        return x.unsqueeze(0)
    return x[k % x.shape[0] :] if x.shape[0] else x


def expand(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    return row(x).reshape(-1)[:8].unsqueeze(0).expand(2 + k % 3, -1)


def parts(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    values = matrix(x)
    match k % 3:
        case 0:
            return values.chunk(2, 1)
        case 1:
            return values.split([3, 5], 1)
    return values.unbind(0)[:3]


def write_part(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    """Writes into one part of a storage while another is read and saved."""
    whole = matrix(x) * 1.25
    left, right = whole[:, :4], whole[:, 4:]
    out = left.sin() if k % 2 else left + 1
    right.mul_(0.5).add_(out)
    return whole, out


def sort(m: ProgramModel, x: Tensor, y: Tensor, k: int) -> Made:
    values, order = matrix(x).sort(dim=1)
    return values, order


INSTRUCTIONS: dict[str, Rule] = {
    # elementwise
    "add": lambda m, x, y, k: x + like(x, y),
    "sub": lambda m, x, y, k: x - 0.5 * like(x, y),
    "mul": lambda m, x, y, k: x * like(x, y),
    "div": lambda m, x, y, k: x / (like(x, y).abs() + 1),
    "tanh": lambda m, x, y, k: real(x).tanh(),
    "exp": lambda m, x, y, k: real(x).clamp(max=2).exp(),
    "relu": lambda m, x, y, k: real(x).relu(),
    "gelu": lambda m, x, y, k: F.gelu(real(x)),
    "silu": lambda m, x, y, k: F.silu(real(x)),
    "square": lambda m, x, y, k: x.pow(2) if x.is_floating_point() else real(x) * real(x),
    "where": lambda m, x, y, k: torch.where(real(x) > 0, real(x), real(like(x, y)).to(real(x).dtype)),
    "lerp": lambda m, x, y, k: torch.lerp(single(x), single(like(x, y)).expand_as(x), 0.25 * k),
    # matrix products
    "linear": lambda m, x, y, k: F.linear(matrix(x), cast(m.weight, real(x)), cast(m.bias, real(x)) if k % 2 else None),
    "tied": lambda m, x, y, k: single(matrix(x)) @ m.tied.t(),
    "part_of_weight": lambda m, x, y, k: single(matrix(x))[:, : k + 1] @ m.weight[: k + 1],
    "outer": lambda m, x, y, k: single(matrix(x)).t() @ single(matrix(x)),
    "bmm": lambda m, x, y, k: torch.bmm(single(matrix(x)).unsqueeze(0), m.weight.expand(1, 8, 8)),
    "addmm": lambda m, x, y, k: torch.addmm(m.bias, single(matrix(x)), m.weight, beta=0.5),
    "einsum": lambda m, x, y, k: torch.einsum("ni,ij,j->nj", single(matrix(x)), m.weight, m.gain),
    "attention": attention,
    # reductions and normalizations
    "sum": lambda m, x, y, k: x.sum(-1, keepdim=bool(k % 2)) if x.dim() else x.sum(),
    "mean": lambda m, x, y, k: real(x).mean(0) if x.dim() else real(x) * 2,
    "amax": lambda m, x, y, k: matrix(x).amax(1),
    "max": lambda m, x, y, k: tuple(matrix(x).max(1)),
    "logsumexp": lambda m, x, y, k: matrix(x).logsumexp(1),
    "cumsum": lambda m, x, y, k: matrix(x).cumsum(k % 2),
    "var_mean": lambda m, x, y, k: torch.var_mean(matrix(x), dim=1),
    "norm": lambda m, x, y, k: F.normalize(matrix(x), dim=1),
    "softmax": lambda m, x, y, k: matrix(x).softmax(1),
    "cross_entropy": lambda m, x, y, k: F.cross_entropy(single(matrix(x)), single(matrix(x)).detach().argmin(1)),
    "layer_norm": lambda m, x, y, k: F.layer_norm(single(matrix(x)), (8,), m.gain, m.bias),
    "group_norm": lambda m, x, y, k: F.group_norm(single(matrix(x)).unsqueeze(2), 2, m.gain, m.bias),
    "batch_norm": batch_norm,
    "frozen_statistics": frozen_statistics,
    # views, copies and shapes
    "transpose": lambda m, x, y, k: x.transpose(0, -1) if x.dim() else x,
    "slice": slices,
    "strided": lambda m, x, y, k: x[::2] if x.dim() else x,
    "flatten": lambda m, x, y, k: x.reshape(-1),
    "matrix": lambda m, x, y, k: matrix(x, (2, 4, 8)[k % 3]),
    "expand": expand,
    "parts": parts,
    "diagonal": lambda m, x, y, k: matrix(x).diagonal(),
    "windows": lambda m, x, y, k: matrix(x).unfold(1, 3, 2),
    "cat": lambda m, x, y, k: torch.cat([matrix(x), cast(matrix(y), real(x))]),
    "stack": lambda m, x, y, k: torch.stack([real(x), real(like(x, y)).to(real(x).dtype).expand_as(x)]),
    "flip": lambda m, x, y, k: x.flip(0) if x.dim() else x,
    "roll": lambda m, x, y, k: matrix(x).roll(k, 1),
    "pad": lambda m, x, y, k: F.pad(matrix(x), (1, 1)),
    "detach": lambda m, x, y, k: x.detach(),
    "index": lambda m, x, y, k: matrix(x)[:, torch.tensor([0, k % 8, 3])],
    "gather": lambda m, x, y, k: matrix(x).gather(1, matrix(y).detach().argsort(1)[: matrix(x).shape[0]]),
    "topk": lambda m, x, y, k: tuple(matrix(x).topk(1 + k % 4, dim=1)),
    "sort": sort,
    # dtypes
    "double": lambda m, x, y, k: real(x).double(),
    "bfloat16": lambda m, x, y, k: real(x).bfloat16(),
    "float": lambda m, x, y, k: single(x),
    "complex": as_complex,
    "fourier": no_choice,
    "one_hot": lambda m, x, y, k: F.one_hot(matrix(x).detach().argmax(1), 8),
    # writes in place
    "add_": lambda m, x, y, k: fresh(x, k).add_(0.5),
    "mul_": lambda m, x, y, k: fresh(x, k).mul_(real(like(real(x), y)).detach()),
    "sigmoid_": lambda m, x, y, k: fresh(x, k).sigmoid_(),
    "relu_": lambda m, x, y, k: F.relu_(fresh(x, k)),
    "masked_fill_": lambda m, x, y, k: fresh(x, k or 1).masked_fill_(real(x).detach() > 0.5, 0.25),
    "write_row": write_row,
    "write_slice": write_slice,
    "write_transposed": write_transposed,
    "write_then_read_old": write_then_read_old,
    "write_part": write_part,
    "write_beside": write_beside,
    "index_put_": index_put,
    "index_add_": index_add,
    "scatter_": scatter,
    "fill_zeros": fill_zeros,
    "fill_empty": fill_empty,
    "copy_whole": copy_whole,
    "dropout_": lambda m, x, y, k: F.dropout(fresh(x, k), 0.3, inplace=True),
    "dirty": dirty,
    # buffers
    "running": running,
    "write_cache": write_cache,
    "read_cache": read_cache,
    "replace_state": replace_state,
    "keep_state": keep_state,
    # random operators
    "dropout": lambda m, x, y, k: F.dropout(real(x), 0.4),
    "alpha_dropout": lambda m, x, y, k: F.alpha_dropout(single(x), 0.4),
    "noise": lambda m, x, y, k: real(x) * torch.rand_like(real(x)),
    "private_noise": private_noise,
    "bernoulli": lambda m, x, y, k: real(x) * torch.bernoulli(single(x).detach().sigmoid().nan_to_num(0.5)).to(real(x).dtype),
    "gumbel": lambda m, x, y, k: F.gumbel_softmax(single(matrix(x)), hard=bool(k % 2)),
    "rrelu": lambda m, x, y, k: F.rrelu(single(x), training=True),
    "permute_rows": lambda m, x, y, k: matrix(x)[torch.randperm(matrix(x).shape[0])],
    # functions, layers, paths
    "product_function": lambda m, x, y, k: Product.apply(real(x), real(like(x, y))),
    "attributes_function": attributes_function,
    "unseen": lambda m, x, y, k: Unseen.apply(single(x), bool(k % 2)),
    "hooked": hooked,
    "embed": embed,
    "convolve": convolve,
    "rnn": rnn,
    "branch": branch,
    "select_positive": select_positive,
}

BRANCHING = frozenset({"branch", "select_positive"})
"""They do different things in different steps."""

OUTLIVING = frozenset({"replace_state", "keep_state"})
"""What they make outlives the step, and is replaced somewhere within the next."""

_small = st.integers(0, 5)
instructions = st.builds(Instruction, st.sampled_from(sorted(INSTRUCTIONS)), _small, _small, _small)
straight_instructions = st.builds(Instruction, st.sampled_from(sorted(set(INSTRUCTIONS) - BRANCHING)), _small, _small, _small)


def programs(*, is_straight: bool = False, most: int = 20) -> st.SearchStrategy[Program]:
    """Programs of up to ``most`` instructions. ``is_straight``: every step takes the same path."""
    rows = straight_instructions if is_straight else instructions
    return st.lists(rows, min_size=2, max_size=most).map(lambda found: Program(tuple(found)))
