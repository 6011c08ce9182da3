"""Works as calls of PyTorch on one device: products and attention as they are, the rest by what it moves.

Operands are random, since zeros draw less power, and made once for each distinct work.
"""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from stepcast.ir.dtype import DType
from stepcast.ir.work import (
    Attention,
    Compute,
    Elementwise,
    ElementwiseKind,
    GroupedMatmul,
    Matmul,
    Recorded,
)

K = ElementwiseKind
Call = Callable[[], Any]
PIECE_BYTES = 4e9  # that one kernel moves at most: many times what a cache holds
ADAM_BYTES = 28  # weight, gradient and two moments read, all but the gradient written
CYCLES_PER_S = 1.8e9  # of a GPU's clock while it waits, near enough for times of a recorded computation


class CannotRunError(ValueError):
    """A work that PyTorch's own operators do not have."""


class Operators:
    """Calls by work."""

    def __init__(self, torch: Any, device: str) -> None:
        self._torch, self.device = torch, device
        self._known: dict[Compute, Call] = {}
        self._half = torch.float32 if device == "cpu" else torch.bfloat16
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
                return self._streamed(work)
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
        return partial(torch.bmm if lead else torch.mm, left, right, out=out)

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

    def _updated(self, work: Elementwise) -> Call:
        """AdamW in one kernel, over as many weights, in fp32."""
        torch, elements = self._torch, work.elements
        pieces = max(1, math.ceil(elements * ADAM_BYTES / PIECE_BYTES))
        weight = torch.nn.Parameter(self._random(max(1, int(elements / pieces)), dtype=DType.FP32))
        weight.grad = torch.zeros_like(weight)
        step = torch.optim.AdamW([weight], fused=True).step

        def repeated() -> None:
            for _ in range(pieces):
                step()

        return repeated

    def _streamed(self, work: Elementwise) -> Call:
        """The kernel itself where PyTorch has one; else one that reads and writes as much."""
        torch, functional = self._torch, self._torch.nn.functional
        if work.kind is K.OPTIMIZER and self.device != "cpu":
            return self._updated(work)
        whole = work.rows * work.columns * (work.dtype.bytes if work.dtype in self._formats else 2)
        usual = math.isclose(work.read_bytes, whole, rel_tol=0.05) and not work.backward
        if usual and math.isclose(work.write_bytes, whole, rel_tol=0.05):
            first = self._random(work.rows, work.columns, dtype=work.dtype)
            match work.kind:
                case K.GELU:
                    return partial(functional.gelu, first)
                case K.SILU:
                    return partial(functional.silu, first)
                case K.SOFTMAX:
                    return partial(functional.softmax, first, -1)
                case K.RMS_NORM:
                    return partial(functional.rms_norm, first, (work.columns,), torch.randn_like(first[0]))
                case K.LAYER_NORM:
                    scale, shift = torch.randn_like(first[0]), torch.randn_like(first[0])
                    return partial(functional.layer_norm, first, (work.columns,), scale, shift)
        return self._moved(work.read_bytes, work.write_bytes)

    def _moved(self, read: float, write: float) -> Call:
        """Kernels that move so much; what would not fit beside all else goes piece by piece."""
        pieces = max(1, math.ceil((read + write) / PIECE_BYTES))
        one = self._moved_once(read / pieces, write / pieces)
        if pieces == 1:
            return one

        def repeated() -> None:
            for _ in range(pieces):
                one()

        return repeated

    def _moved_once(self, read: float, write: float) -> Call:
        """A kernel of as many operands for its result as bytes are read for each that is written."""
        torch, item = self._torch, 4 if self.device == "cpu" else 2
        if write < 0.02 * read:
            data = self._random(max(1, int(read / item)))
            return partial(torch.sum, data)
        operands = min(3, round(read / write)) if write else 0
        elements = max(1, int((read + write) / item / (operands + 1)))
        result = torch.empty(elements, device=self.device, dtype=self._half)
        values = [self._random(elements) for _ in range(operands)]
        if operands == 0:
            return partial(result.fill_, 1.0)
        if operands == 1:
            return partial(result.copy_, values[0])
        if operands == 2:
            return partial(torch.add, *values, out=result)
        return partial(torch.addcmul, *values, out=result)

    def _waited(self, work: Recorded) -> Call:
        if self.device == "cpu":
            return partial(time.sleep, work.duration_s)
        return partial(self._torch.cuda._sleep, int(work.duration_s * CYCLES_PER_S))
