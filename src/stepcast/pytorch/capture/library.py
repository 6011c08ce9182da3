"""Operators that a GPU runs in libraries of its own, where PyTorch writes out many for tensors without data.

RMSNorm is one kernel forward and one operator backward (ATen/native/cuda/layer_norm_kernel.cu); LSTM, GRU and
RNN are one call of cuDNN each way (ATen/native/cudnn/RNN.cpp).
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from stepcast.pytorch.capture.attention import NAMESPACE

# Gates of a cell, and what cuDNN saves for each element of its result: measured as the memory that a forward
# leaves behind on an H200 with cuDNN 9.19, of one to four layers, both directions, fp32 and bf16.
CELLS = {"lstm": (4, 6), "gru": (3, 7), "rnn_tanh": (1, 2), "rnn_relu": (1, 2)}
# While it runs backward cuDNN has gradients of the gates twice over (the same runs).
GATE_GRADIENTS = 2


class Recurrent(NamedTuple):
    """The sizes of a recurrent network, as the operator's list of numbers."""

    gates: int
    saved: int  # for each element of a layer's result
    steps: int
    batch: int
    inputs: int
    hidden: int
    layers: int
    directions: int
    projected: int  # width of what a cell hands on where that is projected; else 0

    @property
    def width(self) -> int:
        """Width of a layer's result in one direction."""
        return self.projected or self.hidden


@lru_cache(maxsize=1)
def define_operators() -> Any:
    """Define the operators once, forward and backward."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define("rms_norm(Tensor input, Tensor? weight) -> (Tensor, Tensor)")
    library.define("rms_norm_backward(Tensor grad, Tensor input, Tensor sums, Tensor? weight) -> (Tensor, Tensor)")
    library.define("recurrent(Tensor input, Tensor[] states, Tensor[] weights, int[] sizes) -> Tensor[]")
    library.define(
        "recurrent_backward(Tensor grad, Tensor input, Tensor out, Tensor reserve, Tensor[] states, "
        "Tensor[] weights, int[] sizes) -> Tensor[]"
    )

    def rms_norm(input: Any, weight: Any) -> Any:
        rows = input.shape[:-1] if weight is None else input.shape[: input.dim() - weight.dim()]
        return torch.empty_like(input), input.new_empty(rows, dtype=torch.float32)

    def rms_norm_backward(grad: Any, input: Any, sums: Any, weight: Any) -> Any:
        return torch.empty_like(input), input.new_empty(0) if weight is None else torch.empty_like(weight)

    def recurrent(input: Any, states: Any, weights: Any, sizes: Any) -> Any:
        own = Recurrent(*sizes)
        out = input.new_empty((*input.shape[:-1], own.directions * own.width))
        rows = math.prod(input.shape[:-1])
        reserve = (own.saved * own.layers * own.hidden - own.width) * own.directions * rows
        return [out, input.new_empty(max(0, reserve)), *(torch.empty_like(each) for each in states)]

    def recurrent_backward(grad: Any, input: Any, out: Any, reserve: Any, states: Any, weights: Any, sizes: Any) -> Any:
        own = Recurrent(*sizes)
        rows = math.prod(input.shape[:-1])
        scratch = input.new_empty(GATE_GRADIENTS * own.gates * own.hidden * own.directions * rows)
        return [torch.empty_like(input), scratch, *(torch.empty_like(each) for each in (*states, *weights))]

    for implementation in (rms_norm, rms_norm_backward, recurrent, recurrent_backward):
        library.impl(implementation.__name__, implementation, "Meta")
    return library


class _RmsNorm(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(context: Any, input: Any, weight: Any) -> Any:
        out, sums = torch.ops.stepcast.rms_norm(input, weight)
        context.save_for_backward(input, sums, weight)
        return out

    @staticmethod
    def backward(context: Any, grad: Any) -> Any:
        input, sums, weight = context.saved_tensors
        found, of_weight = torch.ops.stepcast.rms_norm_backward(grad, input, sums, weight)
        return found, None if weight is None else of_weight


class _RecurrentNet(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(context: Any, sizes: Recurrent, states: int, input: Any, *rest: Any) -> Any:
        own, weights = list(rest[:states]), list(rest[states:])
        out, reserve, *made = torch.ops.stepcast.recurrent(input, own, weights, list(sizes))
        context.sizes, context.states = sizes, states
        context.save_for_backward(input, out, reserve, *own, *weights)
        context.set_materialize_grads(False)
        return (out, *made)

    @staticmethod
    def backward(context: Any, grad: Any, *_: Any) -> Any:
        input, out, reserve, *rest = context.saved_tensors
        own, weights = rest[: context.states], rest[context.states :]
        grad = torch.zeros_like(out) if grad is None else grad
        found, scratch, *others = torch.ops.stepcast.recurrent_backward(
            grad, input, out, reserve, own, weights, list(context.sizes)
        )
        del scratch
        return (None, None, found, *others)


def rms_norm(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    """``torch.nn.functional.rms_norm`` as a GPU runs it; what it computes does not depend on *eps*."""
    define_operators()
    return _RmsNorm.apply(input, weight)


def recurrent_net(name: str, *args: Any) -> Any:
    """``torch.lstm`` and the like (*name*) as cuDNN runs them, of padded sequences: packed ones have lengths,
    which are values of a tensor.
    """
    define_operators()
    gates, saved = CELLS[name]
    data, states, weights, _, layers, _, _, both, batch_first = args
    steps, batch = (data.shape[1], data.shape[0]) if batch_first else (data.shape[0], data.shape[1])
    own = list(states) if isinstance(states, list | tuple) else [states]
    hidden = weights[0].shape[0] // gates
    projected = own[0].shape[-1] if own[0].shape[-1] != hidden else 0
    numbers = Recurrent(gates, saved, steps, batch, data.shape[-1], hidden, layers, 2 if both else 1, projected)
    return _RecurrentNet.apply(numbers, len(own), data, *own, *weights)
