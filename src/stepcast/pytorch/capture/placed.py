"""A program's tensors on no device, with the fused operators of a GPU."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from stepcast.pytorch.capture.attention import fused_attention
from stepcast.pytorch.capture.autocast import Casts
from stepcast.pytorch.capture.library import CELLS, recurrent_net, rms_norm

META = torch.device("meta")
SHADOW = "_stepcast_values"  # of a tensor whose values are known
_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_DROPOUT = torch.nn.functional.dropout
_RECURRENT = {getattr(torch, name): name for name in CELLS}


class Placed(TorchFunctionMode):  # type: ignore[misc]
    """Puts whatever a program makes on no device at all, and takes a GPU's attention and dropout.

    These two are called within functions of PyTorch too, where a mode does not see them.
    """

    def __init__(self, compiled: bool = False) -> None:
        super().__init__()
        self.casts = Casts()
        self._masks: dict[int, tuple[Any, Any]] | None = {} if compiled else None

    def __enter__(self) -> Any:
        functional = torch.nn.functional
        functional.scaled_dot_product_attention, functional.dropout = self._attention, _dropout
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        functional = torch.nn.functional
        functional.scaled_dot_product_attention, functional.dropout = _ATTENTION, _DROPOUT

    def _attention(self, query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        query, key, value = self.casts.narrow((query, key, value))
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = self._added(attn_mask, query.dtype)
        return fused_attention(query, key, value, attn_mask, *args, **kwargs)

    def _added(self, mask: Any, dtype: Any) -> Any:
        """*mask* as numbers to add, which each call makes (transformers/attention.cpp,
        convert_boolean_attn_mask); a compiler makes the same ones once.
        """
        if self._masks is not None and id(mask) in self._masks:
            return self._masks[id(mask)][1]
        made = torch.where(mask, 0.0, float("-inf")).to(dtype)
        if self._masks is not None:
            self._masks[id(mask)] = (mask, made)
        return made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.casts.of(func, args, kwargs or {})
        if func is _ATTENTION:
            return self._attention(*args, **kwargs)
        if func is _DROPOUT:
            return _dropout(*args, **kwargs)
        if func is torch.nn.functional.rms_norm or func is torch.rms_norm:
            return rms_norm(*args, **kwargs)
        if func in _RECURRENT:
            return recurrent_net(_RECURRENT[func], *args)
        if func is torch.tensor or func is torch.as_tensor:
            return _made(func, args, kwargs)
        if func is torch.Tensor.cuda or func is torch.Tensor.cpu:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(META if _names_device(each) else each for each in args)
        if "device" in kwargs or func in _constructors():
            kwargs = {**kwargs, "device": META}
        return func(*args, **kwargs)


def _names_device(value: Any) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.split(":")[0] in
                                               ("cuda", "cpu", "meta"))  # fmt: skip


def _made(func: Any, args: Any, kwargs: Any) -> Any:
    """A tensor of given numbers: on a GPU a copy to it, for which the host waits; on the host none."""
    real = func(*args, **{**kwargs, "device": "cpu"})
    if real.device.type != "cpu":
        return real
    if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "cpu":
        return real.to(META)
    with torch._C._DisableTorchDispatch():
        found = real.to(META)
    setattr(found, SHADOW, real)
    return found


def _constructors() -> Any:
    from torch.utils._device import _device_constructors

    return _device_constructors()


def _dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """As a GPU has it: one kernel that keeps a mask of bytes."""
    if not training or p == 0.0:
        return input
    return torch.native_dropout(input, p, True)[0]
