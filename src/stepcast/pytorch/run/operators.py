"""Works as calls of PyTorch on one device.

Operands are random, since zeros draw less power, and made once for each distinct work.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from stepcast.ir.dtype import DType
from stepcast.ir.work import (
    Attention,
    Compute,
    Elementwise,
    GroupedMatmul,
    Matmul,
    Recorded,
)
from stepcast.pytorch.run.streams import Call, Streams

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
