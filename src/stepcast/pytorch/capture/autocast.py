"""Mixed precision as PyTorch's autocast has it on a GPU, for tensors that are on no device.

Where autocast is on is PyTorch's own state, which a program changes with ``torch.autocast("cuda")``.

Which operations run in bf16 and which in fp32: aten/src/ATen/autocast_mode.h, the lists of CUDA. Weights are
cast once in a forward and kept (autocast_mode.cpp, cached_cast).
"""

from typing import Any

import torch

F, T = torch.nn.functional, torch.Tensor
GPU = "cuda"
NARROW = frozenset((
    F.linear, torch.matmul, T.matmul, T.__matmul__, T.__rmatmul__, torch.mm, T.mm, torch.bmm, T.bmm,
    torch.addmm, T.addmm, torch.baddbmm, T.baddbmm, torch.einsum, F.conv1d, F.conv2d, F.conv3d,
    F.conv_transpose1d, F.conv_transpose2d, F.multi_head_attention_forward, torch.mv, torch.addmv,
    torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu,
))  # fmt: skip
WIDE = frozenset((
    torch.pow, T.pow, T.__pow__, T.__rpow__, torch.rsqrt, T.rsqrt, torch.exp, T.exp, torch.log, T.log,
    torch.softmax, T.softmax, F.softmax, F.log_softmax, torch.log_softmax, T.log_softmax, F.layer_norm,
    F.rms_norm, torch.rms_norm,
    F.group_norm, F.cross_entropy, F.nll_loss, torch.cumsum, T.cumsum, torch.sum, T.sum, torch.prod, T.prod,
    torch.norm, T.norm, F.mse_loss, F.smooth_l1_loss, F.kl_div, torch.cosh, torch.sinh, torch.tan, torch.acos,
    torch.asin, torch.expm1, torch.log1p, torch.reciprocal, T.reciprocal, F.binary_cross_entropy_with_logits,
))  # fmt: skip


class Casts:
    """Casts what an operation reads where autocast is on for GPUs, and saves the casts of weights."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, Any]] = {}

    @property
    def _dtype(self) -> Any:
        """The format of products; None where autocast is off."""
        return torch.get_autocast_dtype(GPU) if torch.is_autocast_enabled(GPU) else None

    def forget(self) -> None:
        """The forward has ended."""
        self._kept.clear()

    def of(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not (func in NARROW or func in WIDE) or (dtype := self._dtype) is None:
            return args, kwargs
        found: tuple[Any, Any] = self.cast((args, kwargs), torch.float32 if func in WIDE else dtype)
        return found

    def narrow(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """*values* as a product reads them."""
        dtype = self._dtype
        found: tuple[Any, ...] = values if dtype is None else self.cast(values, dtype)
        return found

    def cast(self, value: Any, dtype: Any) -> Any:
        """*value* with its floating-point tensors as *dtype*."""
        if isinstance(value, T):
            if not value.is_floating_point() or value.dtype in (dtype, torch.float64):
                return value
            weight = value.is_leaf and value.requires_grad and dtype is not torch.float32
            if not weight or torch._C._current_autograd_node() is not None:
                return value.to(dtype)
            if id(value) not in self._kept:
                self._kept[id(value)] = (value, value.to(dtype))
            return self._kept[id(value)][1]
        if isinstance(value, tuple | list):
            return type(value)(self.cast(each, dtype) for each in value)
        if isinstance(value, dict):
            return {key: self.cast(each, dtype) for key, each in value.items()}
        return value
