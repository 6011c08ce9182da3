"""One training step on meta tensors: every operator that reaches the dispatcher, with its module and tensors.

Meta tensors have shapes, types and strides and no data, so a step of any size takes no memory, and its
backward runs in this thread. Values that a program looks at (positions, masks, sizes) are kept beside small
integer tensors, and where it looks the host waits for the GPU. What a router would choose is not known: its
tokens go to all experts alike. A program that looks at anything else its weights made cannot be captured.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepcast.pytorch.capture.events import TF32, Event, Moment, StepTrace, Storage, Tensor
from stepcast.pytorch.capture.placed import META, SHADOW

# Of a tensor whose values are kept: a batch of token numbers; of who chose which expert.
KNOWN_ELEMENTS, KNOWN_CHOICES = 2**20, 2**24
# PyTorch's allocator on a GPU hands out whole blocks of this many bytes (c10/cuda/CUDACachingAllocator.cpp).
BLOCK_BYTES = 512
DTYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.int64: "int64", torch.int32: "int32", torch.int16: "int16", torch.int8: "int8",
    torch.uint8: "int8", torch.bool: "bool", torch.complex64: "fp64", torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}  # fmt: skip
# Whose values nobody knows.
UNKNOWN = ("empty", "empty_strided", "empty_like", "new_empty", "bernoulli", "native_dropout")
# The host reads how large their results are; of these where places are named by truth values.
MEASURED = ("nonzero", "masked_select", "_unique2", "unique_consecutive")
INDEXED = ("index", "index_put_", "index_put", "_index_put_impl_")
COPIES = ("_to_copy", "copy_")
# What a router chooses by.
CHOICES: dict[str, Callable[[Any], Any]] = {"topk": lambda found: found[1], "argmax": lambda found: found}
# Arguments of these that are no tensors say how much they compute.
OPTIONS = ("convolution", "attention")
RECURRENT = ("recurrent", "recurrent_backward")
PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "linear")
# Operators over lists of tensors, which an optimizer has.
LISTED = ("_foreach_", "_fused_adam", "_fused_sgd")


class CaptureError(ValueError):
    """A program that cannot be captured, and why."""


class Tracer(TorchDispatchMode):  # type: ignore[misc]
    """Writes down every operator, and when memory is taken and given back."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the check loads a compiler

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.trace = StepTrace()
        self.moment = Moment.FORWARD
        self._names = names
        self._module_of: dict[str, int] = {}
        self._stack: list[int] = [self._module("")]
        self._of_sequence: dict[int, int] = {}
        self._known: dict[int, int] = {}
        self._watches: dict[int, Any] = {}
        self._owner: dict[int, int] = {}
        self._last = 0

    # ---- modules --------------------------------------------------------------------------------------

    def _module(self, name: str) -> int:
        found = self._module_of.get(name)
        if found is None:
            found = self._module_of[name] = len(self.trace.modules)
            self.trace.modules.append(name)
        return found

    def owns(self, name: str, parameter: Any) -> None:
        """The module *name* has *parameter*; one that several have is counted once."""
        module = self._module(name)
        self._owner[id(parameter)] = module
        self.adopt(parameter, "parameters")
        self.trace.parameters[self._storage(parameter)] = parameter.numel()

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Keeps the module whose code runs, by hooks on all of them."""
        hooks = torch.nn.modules.module

        def enter(module: Any, _: Any) -> None:
            name = self._names.get(id(module))
            self._stack.append(self._stack[-1] if name is None else self._module(name))

        def leave(*_: Any) -> None:
            self._stack.pop()

        before = hooks.register_module_forward_pre_hook(enter)
        after = hooks.register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _place(self) -> tuple[int, bool, int]:
        """The module of what is dispatched, whether it is a forward computed again, and whose gradient."""
        node = torch._C._current_autograd_node() if self.moment is Moment.BACKWARD else None
        if node is None or len(self._stack) > 1:
            if self.moment is not Moment.OPTIMIZER:
                # The node that was made last is that of the first operator after it.
                number = torch.autograd._get_sequence_nr() - 1
                self._of_sequence.setdefault(number, len(self.trace.events))
            return self._stack[-1], node is not None, -1
        variable = getattr(node, "variable", None)
        if variable is not None:
            return self._owner.get(id(variable), 0), False, -1
        self._last = self._of_sequence.get(node._sequence_nr(), self._last)
        module = self.trace.events[self._last].module if self.trace.events else 0
        return module, False, self._last

    # ---- memory ---------------------------------------------------------------------------------------

    def adopt(self, tensor: Any, role: str) -> None:
        """A tensor that was there before the step."""
        number = self._storage(tensor)
        self.trace.storages[number].role = role

    def holds_gradient(self, parameter: Any) -> None:
        """The gradient of *parameter* exists: its storage is one of gradients."""
        number = self._known.get(parameter.grad.untyped_storage()._cdata)
        if number is not None:
            self.trace.storages[number].role = "gradients"
            self.trace.gradients[self._storage(parameter)] = number

    def _storage(self, tensor: Any) -> int:
        storage = tensor.untyped_storage()
        key = storage._cdata
        found = self._known.get(key)
        if found is None:
            size = storage.nbytes()
            size = -(-size // BLOCK_BYTES) * BLOCK_BYTES if tensor.device.type == "meta" else 0
            found = self._known[key] = len(self.trace.storages)
            self.trace.storages.append(Storage(size, len(self.trace.events)))
            self._watches[key] = weakref.ref(storage, self._freed(key, found))
        return found

    def _freed(self, key: int, number: int) -> Callable[[Any], None]:
        def free(_: Any) -> None:
            self.trace.storages[number].freed = len(self.trace.events)
            if self._known.get(key) == number:
                del self._known[key], self._watches[key]

        return free

    # ---- operators ------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") not in (None, META) and self.moment is not Moment.OPTIMIZER:
            kwargs = {**kwargs, "device": META}
        packet = func._schema.name.partition("::")[2]
        read = _tensors(args) if not kwargs else [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        if packet in ("_local_scalar_dense", "item", "equal", "is_nonzero"):
            return self._value(func, args, kwargs, read)
        if packet == "_safe_softmax":
            with self:
                return _safe_softmax(*args)
        # A GPU multiplies gradient and result first (aten/src/ATen/native/cuda/SoftMax.cu).
        product = torch.empty_like(args[0]) if packet == "_softmax_backward_data" else None
        if product is not None:
            self._storage(product)
        found = self._run(func, packet, args, kwargs, read)
        wrote = _tensors((found,)) if found is not None else []
        if not wrote and packet.endswith("_"):
            wrote = read
        if self.moment is not Moment.OPTIMIZER or any(each.device.type == "meta" for each in read):
            self._note(func, packet, args, read, wrote)
            if _waits(packet, kwargs, read):
                self._look()
        return found

    def _look(self) -> None:
        """The host waits for what was issued last."""
        if self.moment is not Moment.OPTIMIZER and self.trace.events:
            self.trace.looked.add(len(self.trace.events) - 1)

    def _run(self, func: Any, packet: str, args: Any, kwargs: Any, read: list[Any]) -> Any:
        if packet.startswith(LISTED) and read and read[0].device.type == "meta":
            # Lists of tensors, changed in place or made anew, each as its first operand.
            return None if packet.endswith("_") else [torch.empty_like(each) for each in args[0]]
        if packet == "_grouped_mm":
            return _grouped_product(*args, **kwargs)
        shadows = self._shadows(read)
        if shadows is None or packet in UNKNOWN:
            if packet.endswith("_") and read and hasattr(read[0], SHADOW):
                delattr(read[0], SHADOW)
            found = func(*args, **kwargs)
            if packet in CHOICES and self._computes():
                _choose_evenly(CHOICES[packet](found), args[0].shape[-1])
            return found
        try:
            found = func(*args, **kwargs)
            made = _tensors((found,))
            if not all(_may_be_known(each) for each in made):
                return found
            real = self._known_values(func, args, kwargs, shadows)
        except (RuntimeError, NotImplementedError):  # its shape follows from values, which are known
            real = self._known_values(func, args, kwargs, shadows)
            if real is None:
                raise
            found = torch.utils._pytree.tree_map_only(torch.Tensor, lambda each: each.to(META), real)
            made = _tensors((found,))
        if real is not None:
            for each, value in zip(made, _tensors((real,)), strict=True):
                setattr(each, SHADOW, value)
        return found

    def _known_values(self, func: Any, args: Any, kwargs: Any, shadows: dict[int, Any]) -> Any:
        values = _replaced((args, kwargs), shadows)
        try:
            return func(*values[0], **values[1])
        except (RuntimeError, NotImplementedError):
            return None

    def _shadows(self, read: list[Any]) -> dict[int, Any] | None:
        """Values by tensor, where they are all known; floats of the data never are."""
        if not self._computes():
            return None
        found = {}
        for each in read:
            value = each if each.device.type == "cpu" else getattr(each, SHADOW, None)
            if value is None or not _may_be_known(value):
                return None
            found[id(each)] = value
        return found

    def _computes(self) -> bool:
        """Whether a forward runs, or runs again."""
        return self.moment is Moment.FORWARD or (self.moment is Moment.BACKWARD and len(self._stack) > 1)

    def _value(self, func: Any, args: Any, kwargs: Any, read: list[Any]) -> Any:
        shadows = self._shadows(read)
        if shadows is None and all(each.device.type == "cpu" for each in read):
            return func(*args, **kwargs)
        if shadows is None:
            module = self.trace.modules[self._stack[-1]] or "the program"
            raise CaptureError(
                f"{module} looks at the value of a tensor that depends on weights or data, and a captured "
                "step has none; leave that out"
            )
        if any(each.device.type == "meta" for each in read):
            self._look()
        values = _replaced((args, kwargs), shadows)
        return func(*values[0], **values[1])

    def _note(self, func: Any, packet: str, args: Any, read: list[Any], wrote: list[Any]) -> None:
        module, again, source = self._place()
        reads = tuple(map(self._tensor, read))
        writes = reads if wrote is read else tuple(map(self._tensor, wrote))
        options: tuple[Any, ...] = ()
        if packet.startswith(LISTED):
            options = tuple(len(each) for each in args if isinstance(each, list | tuple))
        elif packet.startswith(OPTIONS):
            options = tuple(each for each in args if isinstance(each, int))
            if packet.startswith("attention"):
                masked = args[3 if packet == "attention" else 4] is not None
                options = (masked, *args[-2:])
        elif packet in RECURRENT:
            options = tuple(args[-1])
        if read and read[0].dtype is torch.float32 and _runs_as_tf32(packet):
            options = (TF32, *options)
        self.trace.events.append(Event(packet, reads, writes, options, self.moment, module, again, source))

    def _tensor(self, tensor: Any) -> Tensor:
        shape, stride = tuple(tensor.shape), tensor.stride()
        return Tensor(shape, stride, DTYPES.get(tensor.dtype, "fp32"), self._storage(tensor))


def _runs_as_tf32(packet: str) -> bool:
    """Whether PyTorch lets the tensor cores of a GPU round the operands of this operator to TF32."""
    if packet in PRODUCTS:
        own = legacy = torch.backends.cuda.matmul
    elif packet.startswith("convolution") or packet in RECURRENT:
        legacy = torch.backends.cudnn
        own = getattr(legacy, "rnn" if packet in RECURRENT else "conv", legacy)
    else:
        return False
    try:  # since PyTorch 2.9, which refuses to read the older switch where a program sets the newer
        return bool(own.fp32_precision == TF32)
    except (AttributeError, AssertionError):
        return bool(legacy.allow_tf32)


def _grouped_product(left: Any, right: Any, offs: Any = None, bias: Any = None, out_dtype: Any = None) -> Any:
    """Rows of each expert by its weight, or, of two matrices, the gradient of each expert's weight."""
    groups = (offs.shape[0],) if left.dim() == right.dim() == 2 else ()
    if left.dim() == 3:
        groups = (left.shape[0],)
    return left.new_empty((*groups, left.shape[-2], right.shape[-1]), dtype=out_dtype or left.dtype)


def _safe_softmax(scores: Any, dim: int, dtype: Any = None) -> Any:
    """Rows of which nothing is left are zeros (aten/src/ATen/native/SoftMax.cpp, _safe_softmax)."""
    found = torch.softmax(scores, dim, dtype)
    empty = (scores == float("-inf")).all(dim, keepdim=True)
    return torch.where(empty, torch.zeros((), dtype=found.dtype, device=META), found)


def _waits(packet: str, kwargs: Any, read: list[Any]) -> bool:
    """Whether a host waits for the operator: for the size of its result, or to have copied its numbers."""
    if packet in COPIES:
        copied = any(each.device.type == "cpu" for each in read[-1:])
        return copied and not kwargs.get("non_blocking") and not torch.compiler._is_compiling_flag
    return packet in MEASURED or (packet in INDEXED and any(each.dtype is torch.bool for each in read))


def _may_be_known(tensor: Any) -> bool:
    chosen = tensor.dtype in (torch.int64, torch.bool)
    return bool(tensor.numel() <= (KNOWN_CHOICES if chosen else KNOWN_ELEMENTS))


def _choose_evenly(indices: Any, among: int) -> None:
    """What a router chose, whose scores nobody knows: row after row the next ones, so that all are chosen
    alike often and none twice by a row.
    """
    if among and _may_be_known(indices):
        chosen = torch.arange(indices.numel(), device="cpu").remainder(among).reshape(indices.shape)
        setattr(indices, SHADOW, chosen)


def _tensors(values: Any) -> list[Any]:
    found = []
    for each in values:
        if isinstance(each, torch.Tensor):
            found.append(each)
        elif isinstance(each, list | tuple):
            found += _tensors(each)
    return found


def _replaced(value: Any, known: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return known[id(value)]
    if isinstance(value, list | tuple):
        return type(value)(_replaced(each, known) for each in value)
    if isinstance(value, dict):
        return {key: _replaced(each, known) for key, each in value.items()}
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value
