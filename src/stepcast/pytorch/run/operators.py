"""Works as calls of PyTorch on one device.

Operands are random, since zeros draw less power, and made once for each distinct work.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from stepcast.ir.dtype import DType
from stepcast.ir.work import Attention, Compute, Elementwise, ElementwiseKind, GroupedMatmul, Matmul, Recorded

# Memory-bound works as kernels of PyTorch: the very kernel where it has one, else one that moves as much.

K = ElementwiseKind
Call = Callable[[], Any]
PIECE_BYTES = 4e9  # that one kernel moves at most: many times what a cache holds
# Of fp32 and of bf16: weight, gradient and two moments read, all but the gradient written.
ADAM_BYTES = {DType.FP32: 28, DType.BF16: 14}
AS_STATED = 0.05  # that a kernel may move more or less than its work says
HEAD = 128  # elements of a head whose positions are turned together


class Streams:
    """Calls of memory-bound works; *random* makes operands, *weights* are the sizes of what is updated."""

    def __init__(self, torch: Any, device: str, random: Callable[..., Any], weights: Sequence[int]) -> None:
        self._torch, self._device, self._random = torch, device, random
        self._weights = tuple(weights)

    def call(self, work: Elementwise) -> Call:
        own = OWN.get(work.kind)
        found = own(self, work) if own is not None else None
        return found or self._moved(work)

    # ---- the kernel itself ----------------------------------------------------------------------------

    def _first(self, work: Elementwise) -> Any:
        return self._random(work.rows, work.columns, dtype=work.dtype)

    def _moves(self, work: Elementwise, reads: float, writes: float) -> bool:
        """Whether *reads* and *writes* operands of rows x columns are what *work* says."""
        one = work.elements * work.dtype.bytes
        return math.isclose(work.read_bytes, reads * one, rel_tol=AS_STATED) and math.isclose(
            work.write_bytes, writes * one, rel_tol=AS_STATED
        )

    def _activation(self, work: Elementwise) -> Call | None:
        if not self._moves(work, 2 if work.backward else 1, 1):
            return None
        first, aten = self._first(work), self._torch.ops.aten
        if work.backward:
            gradient = {K.GELU: aten.gelu_backward, K.SILU: aten.silu_backward}[work.kind]
            return partial(gradient, self._torch.randn_like(first), first)
        return partial({K.GELU: aten.gelu, K.SILU: aten.silu}[work.kind], first)

    def _softmax(self, work: Elementwise) -> Call | None:
        if not self._moves(work, 2 if work.backward else 1, 1):
            return None
        first, aten = self._first(work), self._torch.ops.aten
        if work.backward:
            result = self._torch.softmax(first, -1)
            return partial(aten._softmax_backward_data, first, result, -1, first.dtype)
        return partial(self._torch.softmax, first, -1)

    def _norm(self, work: Elementwise) -> Call | None:
        """Forward alone: a gradient is priced as one pass (Transformer Engine), and PyTorch makes two."""
        if work.backward or not self._moves(work, 1, 1):
            return None
        torch, first, shape = self._torch, self._first(work), (work.columns,)
        scale, functional = torch.randn_like(first[0]), torch.nn.functional
        if work.kind is K.RMS_NORM:
            return partial(functional.rms_norm, first, shape, scale)
        return partial(functional.layer_norm, first, shape, scale, torch.randn_like(scale))

    def _cross_entropy(self, work: Elementwise) -> Call | None:
        """Over rows that no block keeps: a maximum, a sum and a result are three reads."""
        if not self._moves(work, 2 if work.backward else 3, 1):
            return None
        first, aten = self._first(work), self._torch.ops.aten
        if work.backward:
            result = self._torch.log_softmax(first, -1)
            return partial(aten._log_softmax_backward_data, first, result, -1, first.dtype)
        return partial(self._torch.log_softmax, first, -1)

    def _cast(self, work: Elementwise) -> Call | None:
        torch, formats = self._torch, {2: self._torch.bfloat16, 4: self._torch.float32}
        widths = [round(each / work.elements) for each in (work.read_bytes, work.write_bytes)]
        if not all(each in formats for each in widths) or self._device == "cpu":
            return None
        first = self._first(work).to(formats[widths[0]])
        result = torch.empty_like(first, dtype=formats[widths[1]])
        return partial(result.copy_, first)

    def _embedding(self, work: Elementwise) -> Call | None:
        """Rows of a table of as many, each by a number drawn for it."""
        torch, aten = self._torch, self._torch.ops.aten
        first = self._first(work)
        chosen = torch.randint(0, work.rows, (work.rows,), device=self._device)
        if work.backward:
            return partial(aten.embedding_dense_backward, first, chosen, work.rows, -1, False)
        return partial(aten.embedding, first, chosen)

    def _turned(self, work: Elementwise) -> Call | None:
        """Heads times the cosines of their positions, taken out of what a projection made: such a kernel
        works out where each element lies. Turning them is as many bytes and one product more.
        """
        if not self._moves(work, 1, 1) or work.columns % HEAD:
            return None
        torch, heads = self._torch, work.columns // HEAD
        projected = self._random(work.rows, heads + 2, HEAD, dtype=work.dtype)[:, :heads]
        cosines = self._random(work.rows, 1, HEAD, dtype=work.dtype)
        result = torch.empty(heads, work.rows, HEAD, device=self._device, dtype=projected.dtype)
        return partial(torch.mul, projected, cosines, out=result.transpose(0, 1))

    def _placed(self, work: Elementwise) -> Call | None:
        """A product with an operand that is repeated along rows, or whose dimensions are swapped."""
        torch, first = self._torch, self._first(work)
        if work.kind is K.STRIDED:
            other = self._random(work.columns, work.rows, dtype=work.dtype).t()
        else:
            other = self._random(work.columns, dtype=work.dtype)
        reads = 2 if work.kind is K.STRIDED else 1
        return partial(torch.mul, first, other) if self._moves(work, reads, 1) else None

    def _joined(self, work: Elementwise) -> Call | None:
        if not self._moves(work, 1, 1) or work.columns < 2:
            return None
        halves = self._first(work).chunk(2, -1)
        return partial(self._torch.cat, halves[::-1], -1)

    def _summed(self, work: Elementwise) -> Call | None:
        if not math.isclose(work.read_bytes, work.elements * work.dtype.bytes, rel_tol=AS_STATED):
            return None
        return partial(self._torch.sum, self._first(work), -1 if work.kind is K.ROW_SUM else 0)

    def _dropped(self, work: Elementwise) -> Call | None:
        first, torch = self._first(work), self._torch
        if work.backward:
            mask = torch.rand(first.shape, device=self._device) > 0.5
            return partial(torch.ops.aten.native_dropout_backward, first, mask, 2.0)
        return partial(torch.native_dropout, first, 0.1, True)

    # ---- the optimizer --------------------------------------------------------------------------------

    def _updated(self, work: Elementwise) -> Call:
        """AdamW in one kernel over tensors like the stage's weights, until as many bytes have moved."""
        torch, moved = self._torch, work.read_bytes + work.write_bytes
        dtype = DType.BF16 if moved / work.elements < ADAM_BYTES[DType.FP32] * 0.75 else DType.FP32
        each = ADAM_BYTES[dtype]
        pieces = max(1, math.ceil(moved / PIECE_BYTES))
        sizes = self._sizes(max(1, round(moved / each / pieces)))
        lists = [[self._random(size, dtype=dtype) for size in sizes] for _ in range(4)]
        steps = [torch.ones((), device=self._device) for _ in sizes]
        lists[3] = [each.square_() for each in lists[3]]
        one = partial(
            torch._fused_adamw_, *lists, [], steps, lr=1e-5, beta1=0.9, beta2=0.95, weight_decay=0.1,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        return _repeated(one, pieces)

    def _sizes(self, elements: int) -> list[int]:
        """Weights of the stage one after another, over again where they are too few."""
        found: list[int] = []
        while elements > 0:
            for size in self._weights or (elements,):
                if elements <= 0:
                    break
                found.append(min(size, elements))
                elements -= found[-1]
        return found

    # ---- one that moves as much -----------------------------------------------------------------------

    def _moved(self, work: Elementwise) -> Call:
        """What would not fit beside all else goes piece by piece."""
        read, write = work.read_bytes, work.write_bytes
        pieces = max(1, math.ceil((read + write) / PIECE_BYTES))
        return _repeated(self._moved_once(read / pieces, write / pieces), pieces)

    def _moved_once(self, read: float, write: float) -> Call:
        """A kernel of as many operands for its result as bytes are read for each that is written."""
        torch, item = self._torch, 4 if self._device == "cpu" else 2
        if write < 0.02 * read:
            data = self._random(max(1, int(read / item)))
            return partial(torch.sum, data)
        operands = min(3, round(read / write)) if write else 0
        elements = max(1, int((read + write) / item / (operands + 1)))
        values = [self._random(elements) for _ in range(operands)]
        result = values[0].clone() if values else self._random(elements)
        if operands == 0:
            return partial(result.fill_, 1.0)
        if operands == 1:
            return partial(result.copy_, values[0])
        if operands == 2:
            return partial(torch.add, *values, out=result)
        return partial(torch.addcmul, *values, out=result)


def _repeated(one: Call, times: int) -> Call:
    if times == 1:
        return one

    def repeated() -> None:
        for _ in range(times):
            one()

    return repeated


OWN: dict[ElementwiseKind, Callable[[Streams, Elementwise], Call | None]] = {
    K.GELU: Streams._activation,
    K.SILU: Streams._activation,
    K.SOFTMAX: Streams._softmax,
    K.RMS_NORM: Streams._norm,
    K.LAYER_NORM: Streams._norm,
    K.CROSS_ENTROPY: Streams._cross_entropy,
    K.CAST: Streams._cast,
    K.EMBEDDING: Streams._embedding,
    K.ROTARY: Streams._turned,
    K.BROADCAST: Streams._placed,
    K.STRIDED: Streams._placed,
    K.JOIN: Streams._joined,
    K.ROW_SUM: Streams._summed,
    K.COLUMN_SUM: Streams._summed,
    K.DROPOUT: Streams._dropped,
    K.OPTIMIZER: Streams._updated,
}


CYCLES_PER_S = 1.8e9  # of a GPU's clock while it waits, near enough for times of a recorded computation


class CannotRunError(ValueError):
    """A work that PyTorch's own operators do not have."""


class Operators:
    """Calls by work; *weights* are the sizes of those that the optimizer updates."""

    def __init__(self, torch: Any, device: str, weights: Sequence[int] = ()) -> None:
        self._torch, self.device = torch, device
        self._known: dict[Compute, Call] = {}
        self._streams = Streams(torch, device, self._random, weights)
        self._formats = {
            DType.BF16: torch.bfloat16,
            DType.FP16: torch.float16,
            DType.FP32: torch.float32,
            DType.TF32: torch.float32,
            DType.FP64: torch.float64,
        }

    def call(self, work: Compute) -> Call:
        found = self._known.get(work)
        if found is None:
            found = self._known[work] = self._made(work)
        return found

    def _random(self, *shape: int, dtype: DType = DType.BF16) -> Any:
        torch, wanted = self._torch, self._formats.get(dtype, self._torch.bfloat16)
        if self.device == "cpu":  # its power does not depend on the values, and drawing them takes long
            return torch.zeros(*shape, dtype=torch.float32)  # not every CPU multiplies halves
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(wanted)

    def _made(self, work: Compute) -> Call:
        match work:
            case Matmul():
                return self._product(work)
            case GroupedMatmul():
                return self._grouped(work)
            case Attention():
                return self._attention(work)
            case Elementwise():
                return self._streams.call(work)
            case Recorded():
                return self._waited(work)
        raise CannotRunError(f"PyTorch has no operator for a {type(work).__name__}; it cannot be run")

    def _product(self, work: Matmul) -> Call:
        torch = self._torch
        if work.dtype is DType.FP8 and self.device != "cpu":
            left = self._random(work.m, work.k).to(torch.float8_e4m3fn)
            right = self._random(work.n, work.k).to(torch.float8_e4m3fn).t()
            one = torch.ones((), device=self.device)
            return partial(torch._scaled_mm, left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        lead = (work.batch,) if work.batch > 1 else ()
        left = self._random(*lead, work.m, work.k, dtype=work.dtype)
        # A weight is kept with its outputs first, as torch.nn.Linear does.
        right = self._random(*lead, work.n, work.k, dtype=work.dtype).transpose(-2, -1)
        out = torch.empty(*lead, work.m, work.n, device=self.device, dtype=left.dtype)
        multiply = partial(torch.bmm if lead else torch.mm, left, right, out=out)
        return partial(self._rounded, multiply) if work.dtype is DType.TF32 else multiply

    def _rounded(self, multiply: Call) -> None:
        """With operands of fp32 rounded on the way, which PyTorch does when it is told so."""
        switch = self._torch.backends.cuda.matmul
        before, switch.allow_tf32 = switch.allow_tf32, True
        multiply()
        switch.allow_tf32 = before

    def _grouped(self, work: GroupedMatmul) -> Call:
        torch = self._torch
        rows = self._random(work.m, work.k, dtype=work.dtype)
        weights = self._random(work.groups, work.n, work.k, dtype=work.dtype).transpose(-2, -1)
        ends = [work.m * (at + 1) // work.groups for at in range(work.groups)]
        if self.device != "cpu" and hasattr(torch, "_grouped_mm"):
            offsets = torch.tensor(ends, device=self.device, dtype=torch.int32)
            return partial(torch._grouped_mm, rows, weights, offs=offsets)

        def each() -> None:
            start = 0
            for group, end in enumerate(ends):
                if end > start:
                    torch.mm(rows[start:end], weights[group])
                start = end

        return each

    def _attention(self, work: Attention) -> Call:
        torch = self._torch

        def tensor(heads: int, length: int, width: int) -> Any:
            made = self._random(work.batch, length, heads, width, dtype=work.dtype)
            return made.transpose(1, 2).detach()

        inputs = [
            tensor(work.heads, work.query_len, work.head_dim),
            tensor(work.kv_heads, work.key_len, work.head_dim),
            tensor(work.kv_heads, work.key_len, work.value_dim),
        ]
        mask = self._random(1, 1, work.query_len, work.key_len, dtype=work.dtype) if work.masked else None
        causal = work.causal and mask is None and work.query_len == work.key_len
        shared = work.kv_heads < work.heads
        options = {"attn_mask": mask, "is_causal": causal, "enable_gqa": shared}
        forward = partial(self._attended, inputs, options)
        if not work.backward:
            return forward
        for each in inputs:
            each.requires_grad_()
        result = forward()
        gradient = torch.randn_like(result)
        return partial(torch.autograd.grad, result, inputs, gradient, retain_graph=True)

    def _attended(self, inputs: list[Any], options: dict[str, Any]) -> Any:
        """The kernel of cuDNN where there is one, as Transformer Engine runs it on current GPUs."""
        torch = self._torch
        attend = torch.nn.functional.scaled_dot_product_attention
        if self.device == "cpu":
            return attend(*inputs, **options)
        kinds = torch.nn.attention.SDPBackend
        order = [kinds.CUDNN_ATTENTION, kinds.FLASH_ATTENTION, kinds.EFFICIENT_ATTENTION, kinds.MATH]
        with torch.nn.attention.sdpa_kernel(order, set_priority=True):
            return attend(*inputs, **options)

    def _waited(self, work: Recorded) -> Call:
        if self.device == "cpu":
            return partial(time.sleep, work.duration_s)
        return partial(self._torch.cuda._sleep, int(work.duration_s * CYCLES_PER_S))
