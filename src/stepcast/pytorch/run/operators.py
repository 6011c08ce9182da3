"""Calls of PyTorch for the works of a workload, on one device.

Operands are random, since zeros draw less power, and made once for each distinct work. Memory-bound works run the
kernel that PyTorch has for them, or else one that moves as many bytes.
"""

import math
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import cycle, pairwise
from types import ModuleType
from typing import Any

from stepcast.ir.types import DType
from stepcast.ir.work import Attention, Compute, Elementwise, ElementwiseKind, GroupedMatmul, Matmul, Recorded

K = ElementwiseKind
Call = Callable[[], object]
PIECE_BYTES = 4e9  # the most that one kernel moves: many times the size of a cache
# Bytes per element of AdamW: weight, gradient and two moments are read, all but the gradient written.
ADAM_BYTES = {DType.FP32: 28, DType.BF16: 14}
BYTES_TOLERANCE = 0.05  # share by which a kernel may move more or fewer bytes than its work
HEAD = 128  # elements of a head, whose positions are rotated together
CYCLES_PER_S = 1.8e9  # approximate clock of a GPU that waits for the time of a recorded computation
# Operators of PyTorch that read rows and write rows; a gradient reads two operands.
UNARY = {K.GELU: "gelu", K.SILU: "silu", K.SOFTMAX: "softmax", K.CROSS_ENTROPY: "log_softmax"}


class Operators:
    """Calls by work; *weights* are the sizes of the weights that the optimizer updates."""

    def __init__(self, torch: ModuleType, device: str, weights: Sequence[int] = ()) -> None:
        self._torch, self.device, self._weights = torch, device, tuple(weights)
        self.call: Callable[[Compute], Call] = cache(self.build)  # whose operands exist already
        self._formats = {
            DType.BF16: torch.bfloat16,
            DType.FP16: torch.float16,
            DType.FP32: torch.float32,
            DType.TF32: torch.float32,
            DType.FP64: torch.float64,
        }

    def build(self, work: Compute) -> Call:
        """Make the operands of *work* and return a function that runs it."""
        match work:
            case Matmul():
                return self._matmul(work)
            case GroupedMatmul():
                return self._grouped_matmul(work)
            case Attention():
                return self._attention(work)
            case Elementwise():
                build = ELEMENTWISE.get(work.kind)
                return (build(self, work) if build is not None else None) or self._move_bytes(work)
            case Recorded():
                return self._wait(work)
        raise ValueError(f"PyTorch has no operator for a {type(work).__name__}; it cannot be run")

    def _random(self, *shape: int, dtype: DType = DType.BF16) -> Any:
        torch, wanted = self._torch, self._formats.get(dtype, self._torch.bfloat16)
        if self.device == "cpu":  # its power does not depend on the values, and random numbers take long
            return torch.zeros(*shape, dtype=torch.float32)  # not every CPU multiplies in half precision
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(wanted)

    def _rows(self, work: Elementwise) -> Any:
        return self._random(work.rows, work.columns, dtype=work.dtype)

    def _matmul(self, work: Matmul) -> Call:
        torch = self._torch
        if work.dtype is DType.FP8 and self.device != "cpu":
            left, right = (self._random(rows, work.k).to(torch.float8_e4m3fn) for rows in (work.m, work.n))
            scale = torch.ones((), device=self.device)
            return partial(torch._scaled_mm, left, right.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
        lead = (work.batch,) if work.batch > 1 else ()
        left = self._random(*lead, work.m, work.k, dtype=work.dtype)
        # A weight has its outputs first, as in torch.nn.Linear.
        right = self._random(*lead, work.n, work.k, dtype=work.dtype).transpose(-2, -1)
        out = torch.empty(*lead, work.m, work.n, device=self.device, dtype=left.dtype)
        multiply = partial(torch.bmm if lead else torch.mm, left, right, out=out)
        return partial(self._run_as_tf32, multiply) if work.dtype is DType.TF32 else multiply

    def _run_as_tf32(self, multiply: Call) -> None:
        """Run a product with its fp32 operands rounded to TF32."""
        switch = self._torch.backends.cuda.matmul
        before, switch.allow_tf32 = switch.allow_tf32, True
        multiply()
        switch.allow_tf32 = before

    def _grouped_matmul(self, work: GroupedMatmul) -> Call:
        torch = self._torch
        rows = self._random(work.m, work.k, dtype=work.dtype)
        weights = self._random(work.groups, work.n, work.k, dtype=work.dtype).transpose(-2, -1)
        ends = [work.m * (group + 1) // work.groups for group in range(work.groups)]
        if self.device != "cpu" and hasattr(torch, "_grouped_mm"):
            offsets = torch.tensor(ends, device=self.device, dtype=torch.int32)
            return partial(torch._grouped_mm, rows, weights, offs=offsets)

        def multiply_each() -> None:
            for group, (start, end) in enumerate(pairwise((0, *ends))):
                if end > start:
                    torch.mm(rows[start:end], weights[group])

        return multiply_each

    def _attention(self, work: Attention) -> Call:
        def tensor(heads: int, length: int, width: int) -> Any:
            return self._random(work.batch, length, heads, width, dtype=work.dtype).transpose(1, 2).detach()

        inputs = [
            tensor(work.heads, work.query_len, work.head_dim),
            tensor(work.kv_heads, work.key_len, work.head_dim),
            tensor(work.kv_heads, work.key_len, work.value_dim),
        ]
        mask = self._random(1, 1, work.query_len, work.key_len, dtype=work.dtype) if work.masked else None
        causal = work.causal and mask is None and work.query_len == work.key_len
        options = {"attn_mask": mask, "is_causal": causal, "enable_gqa": work.kv_heads < work.heads}
        forward = partial(self._attend, *inputs, **options)
        if not work.backward:
            return forward
        for operand in inputs:
            operand.requires_grad_()
        result = forward()
        return partial(self._torch.autograd.grad, result, inputs, self._torch.randn_like(result), retain_graph=True)

    def _attend(self, *inputs: Any, **options: Any) -> Any:
        """Run the kernel of cuDNN where there is one, as Transformer Engine does on current GPUs."""
        torch = self._torch
        attend = torch.nn.functional.scaled_dot_product_attention
        if self.device == "cpu":
            return attend(*inputs, **options)
        kinds = torch.nn.attention.SDPBackend
        order = [kinds.CUDNN_ATTENTION, kinds.FLASH_ATTENTION, kinds.EFFICIENT_ATTENTION, kinds.MATH]
        with torch.nn.attention.sdpa_kernel(order, set_priority=True):
            return attend(*inputs, **options)

    def _wait(self, work: Recorded) -> Call:
        if self.device == "cpu":
            return partial(time.sleep, work.duration_s)
        return partial(self._torch.cuda._sleep, int(work.duration_s * CYCLES_PER_S))

    def _unary(self, work: Elementwise) -> Call | None:
        # Log-softmax over rows that no block holds reads them for a maximum, a sum and the result.
        if not _moves(work, 2 if work.backward else 3 if work.kind is K.CROSS_ENTROPY else 1):
            return None
        torch, aten = self._torch, self._torch.ops.aten
        data, name = self._rows(work), UNARY[work.kind]
        if work.kind in (K.GELU, K.SILU):
            if work.backward:
                return partial(getattr(aten, f"{name}_backward"), torch.randn_like(data), data)
            return partial(getattr(aten, name), data)
        forward = partial(getattr(torch, name), data, -1)
        if work.backward:
            return partial(getattr(aten, f"_{name}_backward_data"), data, forward(), -1, data.dtype)
        return forward

    def _norm(self, work: Elementwise) -> Call | None:
        """Run a norm forward; a gradient is one pass in Transformer Engine and two in PyTorch."""
        if work.backward or not _moves(work, 1):
            return None
        torch, data, shape = self._torch, self._rows(work), (work.columns,)
        scale, functional = torch.randn_like(data[0]), torch.nn.functional
        if work.kind is K.RMS_NORM:
            return partial(functional.rms_norm, data, shape, scale)
        return partial(functional.layer_norm, data, shape, scale, torch.randn_like(scale))

    def _cast(self, work: Elementwise) -> Call | None:
        torch, formats = self._torch, {2: self._torch.bfloat16, 4: self._torch.float32}
        read, written = (round(size / work.elements) for size in (work.read_bytes, work.write_bytes))
        if read not in formats or written not in formats or self.device == "cpu":
            return None
        data = self._rows(work).to(formats[read])
        return partial(torch.empty_like(data, dtype=formats[written]).copy_, data)

    def _embedding(self, work: Elementwise) -> Call:
        """Look up random rows of a table with as many rows."""
        torch, aten, data = self._torch, self._torch.ops.aten, self._rows(work)
        chosen = torch.randint(0, work.rows, (work.rows,), device=self.device)
        if work.backward:
            return partial(aten.embedding_dense_backward, data, chosen, work.rows, -1, False)
        return partial(aten.embedding, data, chosen)

    def _rotary(self, work: Elementwise) -> Call | None:
        """Multiply heads by the cosines of their positions.

        The heads are part of the result of a projection, so that the kernel computes the address of each element. A
        rotation moves as many bytes and needs one product more.
        """
        if not _moves(work, 1) or work.columns % HEAD:
            return None
        torch, heads = self._torch, work.columns // HEAD
        projected = self._random(work.rows, heads + 2, HEAD, dtype=work.dtype)[:, :heads]
        cosines = self._random(work.rows, 1, HEAD, dtype=work.dtype)
        result = torch.empty(heads, work.rows, HEAD, device=self.device, dtype=projected.dtype)
        return partial(torch.mul, projected, cosines, out=result.transpose(0, 1))

    def _strided(self, work: Elementwise) -> Call | None:
        """Multiply by an operand that is repeated along rows, or whose dimensions are swapped."""
        swapped = work.kind is K.STRIDED
        if not _moves(work, 2 if swapped else 1):
            return None
        shape = (work.columns, work.rows) if swapped else (work.columns,)
        other = self._random(*shape, dtype=work.dtype)
        return partial(self._torch.mul, self._rows(work), other.t() if swapped else other)

    def _join(self, work: Elementwise) -> Call | None:
        if not _moves(work, 1) or work.columns < 2:
            return None
        return partial(self._torch.cat, self._rows(work).chunk(2, -1)[::-1], -1)

    def _sum(self, work: Elementwise) -> Call | None:
        if not math.isclose(work.read_bytes, work.elements * work.dtype.bytes, rel_tol=BYTES_TOLERANCE):
            return None
        return partial(self._torch.sum, self._rows(work), -1 if work.kind is K.ROW_SUM else 0)

    def _dropout(self, work: Elementwise) -> Call:
        data, torch = self._rows(work), self._torch
        if work.backward:
            mask = torch.rand(data.shape, device=self.device) > 0.5
            return partial(torch.ops.aten.native_dropout_backward, data, mask, 2.0)
        return partial(torch.native_dropout, data, 0.1, True)

    def _adamw(self, work: Elementwise) -> Call:
        """Run AdamW in one kernel over tensors like the stage's weights, until as many bytes have moved."""
        torch, moved = self._torch, work.read_bytes + work.write_bytes
        dtype = DType.BF16 if moved / work.elements < ADAM_BYTES[DType.FP32] * 0.75 else DType.FP32
        pieces = max(1, math.ceil(moved / PIECE_BYTES))
        left, sizes = max(1, round(moved / ADAM_BYTES[dtype] / pieces)), list[int]()
        weights = cycle(self._weights or (left,))
        while left > 0:
            sizes.append(min(next(weights), left))
            left -= sizes[-1]
        lists = [[self._random(size, dtype=dtype) for size in sizes] for _ in range(4)]
        lists[3] = [moment.square_() for moment in lists[3]]
        steps = [torch.ones((), device=self.device) for _ in sizes]
        update = partial(
            torch._fused_adamw_, *lists, [], steps, lr=1e-5, beta1=0.9, beta2=0.95, weight_decay=0.1,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        return _repeat(update, pieces)

    def _move_bytes(self, work: Elementwise) -> Call:
        """Run a kernel with as many operands as there are bytes read for each byte written, in pieces that fit."""
        torch, item = self._torch, 4 if self.device == "cpu" else 2
        pieces = max(1, math.ceil((work.read_bytes + work.write_bytes) / PIECE_BYTES))
        read, write = work.read_bytes / pieces, work.write_bytes / pieces
        if write < 0.02 * read:
            return _repeat(partial(torch.sum, self._random(max(1, int(read / item)))), pieces)
        operands = min(3, round(read / write)) if write else 0
        elements = max(1, int((read + write) / item / (operands + 1)))
        values = [self._random(elements) for _ in range(operands)]
        result = values[0].clone() if values else self._random(elements)
        kernels = (
            partial(result.fill_, 1.0),
            partial(result.copy_, *values),
            partial(torch.add, *values, out=result),
            partial(torch.addcmul, *values, out=result),
        )
        return _repeat(kernels[operands], pieces)


def _moves(work: Elementwise, reads: int) -> bool:
    """Return True if *work* reads as many bytes as *reads* operands of its rows and columns, and writes one."""
    operand = work.elements * work.dtype.bytes
    pairs = (work.read_bytes, reads * operand), (work.write_bytes, operand)
    return all(math.isclose(moved, expected, rel_tol=BYTES_TOLERANCE) for moved, expected in pairs)


def _repeat(call: Call, times: int) -> Call:
    def repeat() -> None:
        for _ in range(times):
            call()

    return call if times == 1 else repeat


ELEMENTWISE: dict[ElementwiseKind, Callable[[Operators, Elementwise], Call | None]] = {
    **dict.fromkeys(UNARY, Operators._unary),
    **dict.fromkeys((K.RMS_NORM, K.LAYER_NORM), Operators._norm),
    **dict.fromkeys((K.BROADCAST, K.STRIDED), Operators._strided),
    **dict.fromkeys((K.ROW_SUM, K.COLUMN_SUM), Operators._sum),
    K.CAST: Operators._cast,
    K.EMBEDDING: Operators._embedding,
    K.ROTARY: Operators._rotary,
    K.JOIN: Operators._join,
    K.DROPOUT: Operators._dropout,
    K.OPTIMIZER: Operators._adamw,
}
