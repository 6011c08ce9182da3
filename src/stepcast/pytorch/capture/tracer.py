"""Trace one training step on meta tensors: every operator that reaches the dispatcher, with its module and tensors.

Meta tensors have shapes, types and strides but no data, so a step of any size takes no memory, and its backward runs
in this thread. The values of small integer tensors (positions, masks, sizes) are computed too; where a program reads
one, the host waits for the GPU. The choices of a router are unknown: tokens are spread evenly over all experts. A
program that reads any other value that depends on its weights cannot be captured.
"""

import contextlib
import math
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import field
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from stepcast.cost.memory.allocator import ROUNDING
from stepcast.ir.types import dataclass
from stepcast.pytorch.capture import emulation
from stepcast.pytorch.capture.emulation import FIT, MEASURED, META, VALUES, Args, Kwargs, TorchCall, is_on_host

DTYPES = {getattr(torch, name): dtype for name, dtype in FIT["dtypes"].items()}
TRACED = {name: tuple(words) for name, words in FIT["traced"].items()}
READ_A_VALUE, INDEXED, COPIES, RECURRENT, PRODUCTS, LISTED = (
    TRACED[name] for name in ("read_a_value", "indexed", "copies", "recurrent", "products", "listed")
)
# A GPU copies operands of these that are not contiguous (aten/src/ATen/native/cuda/layer_norm_kernel.cu): how many.
COPIED = {"native_layer_norm": 1, "native_layer_norm_backward": 2}


class CaptureError(ValueError):
    """A program cannot be captured; the message says why."""


class Moment(IntEnum):
    """The part of the step in which an operator ran."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2


class TracedTensor(NamedTuple):
    """One operand: its shape, strides and format, and the storage that holds it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    storage: int

    @property
    def elements(self) -> int:
        """Return the elements in memory: a broadcast dimension counts as one."""
        return math.prod(size for size, stride in zip(self.shape, self.stride, strict=True) if stride)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Event(NamedTuple):
    """One dispatched operator."""

    name: str
    reads: tuple[TracedTensor, ...]
    writes: tuple[TracedTensor, ...]
    options: tuple[int, ...]  # such as its dimensions
    moment: Moment
    module: str  # its name in the model
    recomputed: bool  # part of a forward that the backward runs again
    source: int = -1  # in a backward: the event of the forward whose gradient this computes
    nodes: int = 0  # of autograd, made for it
    host_calls: float = 0.0  # before it: random numbers that the host draws, checkpoints that it enters or runs again
    called: tuple[str, ...] = ()  # code of Python before it: modules, functions
    begins_backward: bool = False
    updated: int | None = None  # weights of an optimizer whose update begins with it
    is_tf32: bool = False  # whether it multiplies fp32 operands as TF32

    @property
    def is_backward(self) -> bool:
        """True if it is part of a backward, and of no forward that it runs again."""
        return self.moment is Moment.BACKWARD and not self.recomputed


@dataclass
class Storage:
    """One piece of memory: its bytes, and the numbers of the events that made and freed it."""

    size_bytes: int
    created: int
    freed: int | None = None
    role: str = "activations"
    is_carried: bool = False  # made by the step before


class TracedUnit(NamedTuple):
    """Modules that the script shards together, by name, and the bytes that are gathered and reduced for them."""

    names: tuple[str, ...]
    gathered_bytes: int
    reduced_bytes: int
    is_freed: bool  # after its forward


@dataclass
class StepTrace:
    """A traced step: its operators in order, and the storages they read and write."""

    events: list[Event] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    parameters: dict[int, int] = field(default_factory=dict)  # elements by storage
    gradients: dict[int, int] = field(default_factory=dict)  # storage of the gradient by storage of the parameter
    reduced: dict[int, int] = field(default_factory=dict)  # bytes of the gradient, likewise
    uncompiled: set[int] = field(default_factory=set)  # events outside of the compiled program
    returned: set[int] = field(default_factory=set)  # storages of its results
    host_waits: set[int] = field(default_factory=set)  # events that the host waits for
    units: list[TracedUnit] = field(default_factory=list)


class Tracer(TorchDispatchMode):  # type: ignore[misc]
    """Records every operator, and when memory is allocated and freed."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the check loads a compiler

    compiles = False  # whether torch.compile joins operators, adds up gradients and sums rows by itself

    def __init__(self, module_names: dict[int, str]) -> None:
        super().__init__()
        self.moment = Moment.FORWARD
        self._module_names = module_names
        self._stack = [""]
        self._owners: dict[int, str] = {}
        self._last_source = 0
        self.begin_trace()

    def begin_trace(self) -> None:
        self.trace = StepTrace()
        self._event_of_node: dict[int, int] = {}  # by the sequence number of an autograd node
        self._storage_numbers: dict[int, int] = {}
        self._watches: dict[int, weakref.ref[object]] = {}
        self._sequence, self.begins_backward = torch.autograd._get_sequence_nr(), False  # as of the next event
        self.updated: int | None = None
        emulation.take_host_work()

    def add_parameter(self, module: str, parameter: Tensor) -> None:
        """Note that *module* owns *parameter*; one with several owners is counted once."""
        self._owners[id(parameter)] = module
        self.add_tensor(parameter, "parameters")
        self.trace.parameters[self._number_storage(parameter)] = parameter.numel()

    @contextlib.contextmanager
    def follow_modules(self) -> Iterator[None]:
        """Track the module whose forward runs, by global hooks."""
        hooks = torch.nn.modules.module
        with (
            hooks.register_module_forward_pre_hook(self.enter_module),
            hooks.register_module_forward_hook(self.leave_module, always_call=True),
        ):
            yield

    def enter_module(self, module: torch.nn.Module, inputs: object) -> None:
        self._stack.append(self._module_names.get(id(module), self._stack[-1]))
        emulation.call("module")

    def leave_module(self, *_: object) -> None:
        self._stack.pop()

    def _locate(self) -> tuple[str, bool, int]:
        """Return the module of the current operator, whether it is recomputed, and the event of its forward."""
        node = torch._C._current_autograd_node() if self.moment is Moment.BACKWARD else None
        if node is None or len(self._stack) > 1:
            if self.moment is not Moment.OPTIMIZER:
                # The latest autograd node belongs to the first operator that runs after it was made.
                self._event_of_node.setdefault(torch.autograd._get_sequence_nr() - 1, len(self.trace.events))
            return self._stack[-1], node is not None, -1
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._owners.get(id(variable), ""), False, -1
        self._last_source = self._event_of_node.get(node._sequence_nr(), self._last_source)
        return self.trace.events[self._last_source].module if self.trace.events else "", False, self._last_source

    def add_tensor(self, tensor: Tensor, role: str) -> None:
        """Note a tensor that exists before the step."""
        self.trace.storages[self._number_storage(tensor)].role = role

    def add_results(self, results: Iterable[Tensor]) -> None:
        """Note what a compiled program returns: memory that its backward cannot use again."""
        self.trace.returned.update(map(self._number_storage, results))

    def add_existing(self, modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Note what exists before the step: parameters, buffers, gradients and the states of optimizers."""
        for module in modules:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                self.add_parameter(name.rpartition(".")[0], parameter)
            for buffer in module.buffers():
                self.add_tensor(buffer, "buffers")
        for optimizer in optimizers:
            for parameter in parameters_of(optimizer):
                if self._number_storage(parameter) not in self.trace.parameters:
                    self.add_parameter("", parameter)
                if parameter.grad is not None:
                    self.add_tensor(parameter.grad, "gradients")
            for value in (value for state in optimizer.state.values() for value in state.values()):
                if isinstance(value, Tensor):
                    self.add_tensor(value, "optimizer")

    def add_gradient(self, parameter: Tensor) -> None:
        """Note the gradient of *parameter* if the step made one."""
        grad = parameter.grad
        number = None if grad is None else self._storage_numbers.get(grad.untyped_storage()._cdata)
        if number is not None:
            self.trace.storages[number].role = "gradients"
            self.trace.gradients[self._number_storage(parameter)] = number
            self.trace.reduced[self._number_storage(parameter)] = grad.nbytes

    def _number_storage(self, tensor: Tensor, is_read: bool = False) -> int:
        """Return the number of a tensor's storage; one that is read before it is written was made before the step."""
        if tensor.layout is not torch.strided:
            raise CaptureError("the sizes of sparse tensors are values, which a captured step does not have; "
                               "capture the program with dense ones (sparse=False)")  # fmt: skip
        storage = tensor.untyped_storage()
        key = storage._cdata
        number = self._storage_numbers.get(key)
        if number is None:
            size = round_up(storage.nbytes(), ROUNDING) if _is_meta(tensor) else 0
            number = self._storage_numbers[key] = len(self.trace.storages)
            self.trace.storages.append(Storage(size, 0 if is_read else len(self.trace.events), is_carried=is_read))
            self._watches[key] = weakref.ref(storage, partial(self._free, key, number))
        return number

    def _free(self, key: int, number: int, _: object) -> None:
        self.trace.storages[number].freed = len(self.trace.events)
        if self._storage_numbers.get(key) == number:
            del self._storage_numbers[key], self._watches[key]

    def __torch_dispatch__(
        self, func: TorchCall, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        kwargs = kwargs or {}
        if kwargs.get("device") not in (None, META) and self.moment is not Moment.OPTIMIZER:
            kwargs = {**kwargs, "device": META}
        name = func._schema.name.partition("::")[2]
        read = [*list_tensors(args), *list_tensors(kwargs.values())]
        if name in READ_A_VALUE:
            return self._read_value(func, args, kwargs, read)
        if name == "_safe_softmax":
            with self:
                return emulation.safe_softmax(*args)
        if name == "add" and self._adds_gradients(args):
            func, name = torch.ops.aten.add_.Tensor, "add_"
        # A GPU multiplies gradient and result first (aten/src/ATen/native/cuda/SoftMax.cu).
        product = torch.empty_like(args[0]) if name == "_softmax_backward_data" else None
        if product is not None:
            self._number_storage(product)
        copies = [tensor.contiguous() for tensor in args[: COPIED.get(name, 0)]]
        for copy, tensor in zip(copies, args, strict=False):
            if copy is not tensor:
                self._number_storage(copy)
        result = self._run(func, name, (*copies, *args[len(copies) :]), kwargs, read)
        written = list_tensors((result,)) or (read if name.endswith("_") else [])
        # The memory that an operator needs while it runs, as traces of PyTorch's allocator show it.
        held, sizes = None, () if self.compiles and name == "sum" else workspace_bytes(name, args, written)
        for tensor in written if sizes else ():
            self._number_storage(tensor)
        for size in sizes:
            held = None  # that of the kernel before
            held = torch.empty(size, dtype=torch.uint8, device=META)
            self._number_storage(held)
        if name in COPIES and is_on_host(read[-1]) and _is_meta(written[0]):
            if self.moment is not Moment.OPTIMIZER:
                self.copy_from_host(read[-1], written[0], bool(kwargs.get("non_blocking") or args[2:3] == (True,)))
        elif self.moment is not Moment.OPTIMIZER or any(map(_is_meta, read)):
            self._add_event(name, args, read, written)
            if name in TRACED["sized_by_values"] or (
                name in INDEXED and any(tensor.dtype is torch.bool for tensor in read)
            ):
                self._add_host_wait()
        del held
        return result

    def copy_from_host(self, source: Tensor, target: Tensor, non_blocking: bool) -> None:
        """Note a copy to the GPU; the CPU waits for it if it is asked to, or if it stages many parts."""
        name, is_staged = emulation.begin_copy(source, target.nbytes)
        self._add_event(name, (), [], [target])
        if (is_staged or not non_blocking) and not torch.compiler._is_compiling_flag:
            self._add_host_wait()

    def _adds_gradients(self, args: Args) -> bool:
        """Return True if autograd adds up two gradients of a tensor, in place as it builds no graph (input_buffer.cpp).

        A forward that a checkpoint runs again builds one, also where it calls no module.
        """
        first, second = args[:2]
        if self.moment is not Moment.BACKWARD or torch.is_grad_enabled() or self.compiles:
            return False
        is_sum = isinstance(second, Tensor) and (first.shape, first.dtype) == (second.shape, second.dtype)
        return is_sum and bool(first.is_contiguous())

    def _add_host_wait(self) -> None:
        """Note that the host waits for the last operator."""
        if self.moment is not Moment.OPTIMIZER and self.trace.events:
            self.trace.host_waits.add(len(self.trace.events) - 1)

    def _run(self, func: TorchCall, name: str, args: Args, kwargs: Kwargs, read: list[Tensor]) -> object:
        """Run the operator on meta tensors, and on the values of its operands where these are known."""
        if name.startswith(LISTED) and read and _is_meta(read[0]):
            # Lists of tensors, changed in place or made like the first list.
            if name in ("_foreach_norm", "_foreach_max"):
                return [tensor.new_empty(()) for tensor in args[0]]
            return None if name.endswith("_") else [torch.empty_like(tensor) for tensor in args[0]]
        if name == "_grouped_mm":
            return emulation.grouped_mm(*args, **kwargs)
        if name.startswith("convolution"):
            return _lay_channels_last(func(*args, **kwargs), read)
        values = self._values_of(read)
        if values is None or name in TRACED["unknown_values"]:
            if name.endswith("_") and read and hasattr(read[0], VALUES):
                delattr(read[0], VALUES)
            result = func(*(emulation.expand_masks(args) if name in INDEXED else args), **kwargs)
            if name in TRACED["choices"] and self._runs_forward() and args[0].is_floating_point():
                for choices in list_tensors((result,)):
                    emulation.choose_evenly(choices, args[0].shape[-1])
            return result
        real = None
        try:
            result = func(*args, **kwargs)
            if not all(map(emulation.may_be_known, list_tensors((result,)))):
                return result
            with contextlib.suppress(RuntimeError):
                real = _call_on_values(func, args, kwargs, values)
        except RuntimeError:  # the shape of the result depends on values, which are known
            with contextlib.suppress(RuntimeError):
                real = _call_on_values(func, args, kwargs, values)
            if real is None:
                raise
            result = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(META), real)
        for tensor, value in zip(list_tensors((result,)), list_tensors((real,)), strict=False):
            setattr(tensor, VALUES, value)
        return result

    def _values_of(self, read: list[Tensor]) -> dict[int, Tensor] | None:
        """Return the values of all tensors by id, or None where some are unknown."""
        if not self._runs_forward():
            return None
        values = {}
        for tensor in read:
            value = tensor if tensor.device.type == "cpu" else getattr(tensor, VALUES, None)
            if value is None or not emulation.may_be_known(value):
                return None
            values[id(tensor)] = value
        return values

    def _runs_forward(self) -> bool:
        """Return True while a forward runs, also one that the backward recomputes."""
        return self.moment is Moment.FORWARD or (self.moment is Moment.BACKWARD and len(self._stack) > 1)

    def _read_value(self, func: TorchCall, args: Args, kwargs: Kwargs, read: list[Tensor]) -> object:
        values = self._values_of(read)
        if values is None:
            is_real = all(tensor.device.type == "cpu" for tensor in read)
            return func(*args, **kwargs) if is_real else self.read_unknown(read)
        if any(map(_is_meta, read)):
            self._add_host_wait()
        return _call_on_values(func, args, kwargs, values)

    def read_unknown(self, read: list[Tensor]) -> object:
        """Return the value of a tensor that has none; here a program must not read it."""
        raise CaptureError(
            f"{self._stack[-1] or 'the program'} looks at the value of a tensor that depends on weights or data, and a "
            "captured step has none; leave that out"
        )

    def _add_event(self, name: str, args: Args, read: list[Tensor], written: list[Tensor]) -> None:
        module, recomputed, source = self._locate()
        reads = tuple(self._describe(tensor, is_read=True) for tensor in read)
        writes = reads if written is read else tuple(map(self._describe, written))
        options: tuple[int, ...]
        if name.startswith(LISTED):
            options = tuple(len(value) for value in args if isinstance(value, list | tuple))
        elif name.startswith("attention"):
            options = (args[3 if name == "attention" else 4] is not None, *args[-2:])
        elif name.startswith("convolution"):
            options = (_transform_bytes(args), *(value for value in args if isinstance(value, int)))
        elif name in RECURRENT:
            options = tuple(args[-1])
        else:  # the first list of integers, such as dimensions, or else those that are by themselves
            lists = (value for value in args if isinstance(value, list | tuple) and value and type(value[0]) is int)
            options = tuple(next(lists, [value for value in args if type(value) is int]))
        is_tf32 = bool(read) and read[0].dtype is torch.float32 and _runs_as_tf32(name)
        sequence = torch.autograd._get_sequence_nr()
        nodes, self._sequence = sequence - self._sequence, sequence
        begins = *emulation.take_host_work(), self.begins_backward, self.updated
        self.begins_backward, self.updated = False, None
        ran = self.moment, module, recomputed, source, nodes
        self.trace.events.append(Event(name, reads, writes, options, *ran, *begins, is_tf32))

    def _describe(self, tensor: Tensor, is_read: bool = False) -> TracedTensor:
        dtype = DTYPES.get(tensor.dtype, "fp32")
        return TracedTensor(tuple(tensor.shape), tensor.stride(), dtype, self._number_storage(tensor, is_read))


def parameters_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _is_meta(tensor: Tensor) -> bool:
    return bool(tensor.device.type == "meta")


def workspace_bytes(name: str, args: Args, written: list[Tensor]) -> tuple[int, ...]:
    """Return the bytes that the kernels of an operator need one after another, beyond its operands and results.

    cuDNN sums gradients of queries in fp32. A sum over 1,024 rows or more, 256 for each of four threads, is shared by
    several thread blocks, and each block stores its partial sums of 128 columns
    (aten/src/ATen/native/cuda/Reduce.cuh, with 132 multiprocessors of 16 blocks).
    """
    if name.startswith("convolution"):
        return _convolution_bytes(args, written)
    if name == "attention_backward" and args[1].dtype is not torch.float32:
        return (int(4 * (args[1].numel() + args[1].numel() // args[1].shape[-1])),)
    if name == "sum" and args[0].dim() > 1 and written[0].numel() and args[0].is_contiguous():
        columns, rows = written[0].numel(), args[0].numel() // written[0].numel()
        if columns == args[0].shape[-1] and columns % 4 == 0 and rows >= 1024:
            return (int(512 * columns * min(-(-2112 // -(-columns // 128)), -(-rows // 64))),)
    return ()


def _convolution_bytes(args: Args, written: list[Tensor]) -> tuple[int, ...]:
    """Return the bytes that cuDNN needs for a convolution, or for the gradients of its data and of its weight.

    It copies operands and result to channels last, unless they are, as traces of PyTorch's allocator on an H200 show.
    The result of a forward in TF32 is written as it is to be, and few channels are read as they are; the gradient of
    a weight in bf16 pads them to 8, and is summed in parts, a tile of 64 x 64 for each multiprocessor.
    """
    images = [tensor for tensor in list_tensors(args[:3]) if tensor.dim() > 2]
    (data, weight), groups = images[-2:], [value for value in args if isinstance(value, int)][-1]
    channels, is_half = data.shape[1], data.dtype.itemsize == 2
    is_plain = math.prod(weight.shape[2:]) == 1 and math.prod(data.shape[2:]) % 8 == 0
    if is_plain or groups == channels > 1 or any(map(is_channels_last, images)):
        return ()
    copied, transformed = sum(tensor.nbytes for tensor in images), _transform_bytes(args)
    if len(images) == 2:
        is_copied = channels >= (8 if is_half else 32)
        return (copied + written[0].nbytes * is_half,) if is_copied else ()
    for_data, for_weight = args[-1][:2]
    padding = (round_up(channels, 8) - channels) * data.nbytes // channels
    is_copied = for_weight and (is_half or channels >= 8)
    for_sums = transformed or copied - weight.nbytes + padding + MEASURED["partial_sums"]
    return (*(copied,) * for_data, *(for_sums,) * is_copied)


def _transform_bytes(args: Args) -> int:
    """Return the bytes of the Fourier transforms by which cuDNN computes the gradient of a weight in TF32, or 0.

    It does so for windows of five and more, without strides, over short sides; each channel is transformed as a square
    of a power of two, in complex numbers, twice (740 shapes on an H200, data/captured/transforms.csv).
    """
    if len(args) < 11 or args[1].dtype is not torch.float32 or args[7] or not args[-1][1]:
        return 0
    data, weight, taps = args[1], args[2], max(args[2].shape[2:])
    side = 2 ** (max(data.shape[2:]) + taps - 2).bit_length()
    longest = (*MEASURED["transformed_sides"], 0)[data.dim() - 3]
    is_short = side <= longest and {*args[4], *args[6]} == {1} and not is_channels_last(data)
    is_narrow = weight.shape[0] <= 64 and weight.shape[1] >= 32
    return weight.shape[0] * weight.shape[1] * side * (side // 2 + 1) * 16 if taps > 4 and is_short and is_narrow else 0


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of *multiple* that is at least *size*."""
    return -(-size // multiple) * multiple


def _runs_as_tf32(name: str) -> bool:
    """Return True if PyTorch may round the fp32 operands of this operator to TF32 for the tensor cores."""
    if name in PRODUCTS:
        own = legacy = torch.backends.cuda.matmul
    elif name.startswith("convolution") or name in RECURRENT:
        legacy = torch.backends.cudnn
        own = getattr(legacy, "rnn" if name in RECURRENT else "conv", legacy)
    else:
        return False
    try:  # since PyTorch 2.9, which refuses to read the older switch where a program sets the newer
        return bool(own.fp32_precision == "tf32")
    except (AttributeError, AssertionError):
        return bool(legacy.allow_tf32)


def _lay_channels_last(result: object, read: list[Tensor]) -> object:
    """Return images in the layout of cuDNN's results: channels last where data or weight are (ConvUtils.h)."""
    images = [tensor for tensor in read if tensor.dim() == 4]
    if not any(is_channels_last(tensor) for tensor in images):
        return result
    layouts = {4: torch.channels_last}
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda tensor: torch.empty_like(tensor, memory_format=layouts.get(tensor.dim())), result
    )


def is_channels_last(tensor: Tensor | TracedTensor) -> bool:
    """Return True if the channels of each position are next to each other in memory, and there are several."""
    stride = tensor.stride if isinstance(tensor, TracedTensor) else tensor.stride()
    return len(stride) == 4 and stride[1] == 1 and tensor.shape[1] > 1 and stride[3] >= tensor.shape[1]


def _call_on_values(func: TorchCall, args: Args, kwargs: Kwargs, values: dict[int, Tensor]) -> object:
    """Call *func* on the CPU, with its tensors replaced by their *values*."""

    def replace_leaf(leaf: object) -> object:
        if isinstance(leaf, Tensor):
            return values[id(leaf)]
        return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

    real_args, real_kwargs = torch.utils._pytree.tree_map(replace_leaf, (args, kwargs))
    return func(*real_args, **real_kwargs)


def list_tensors(values: Iterable[object]) -> list[Tensor]:
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += list_tensors(value)
    return tensors
