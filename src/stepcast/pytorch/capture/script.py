"""Capture a training script as it is: run it on tensors without data up to its second or third optimizer step.

Tensors on a GPU have no data. Tensors of the host are real where they are small, so that loaders, samplers and
indices work; large ones have no data either, and what is computed with them is not part of the step. The first step
makes the optimizer's states; the second, from one optimizer step to the next, is the one that is captured. Where it
reads values of the GPU, the third is: scripts print their loss after the first step and then once in many. Gradient
accumulation is recognised by equal passes between two optimizer steps; only the last pass is kept.
"""

import contextlib
import io
import math
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.optim import optimizer as optimizer_hooks
from torch.utils._device import _device_constructors

from stepcast.ir.captured import Captured
from stepcast.pytorch.capture import emulation
from stepcast.pytorch.capture import tracer as tracing
from stepcast.pytorch.capture.build import build_captured
from stepcast.pytorch.capture.emulation import HOST, META, VALUES, Args, EmulatedGpu, Kwargs, TorchCall, is_on_host
from stepcast.pytorch.capture.machine import PretendMachine, read_command, sizes_of
from stepcast.pytorch.capture.tracer import CaptureError, Moment, StepTrace, Tracer, list_tensors, parameters_of

T = Tensor
HOST_FLOATS, HOST_INTEGERS = 2**16, 2**24  # the most elements of a tensor of the host that has data
FROM_DATA = (torch.tensor, torch.as_tensor, torch.from_numpy, torch.asarray, torch.frombuffer)
# Values of tensors that have none: a loss of one, no overflow, no condition that ends a loop; a check of all elements,
# such as that of a distribution's arguments, holds.
FINITE = dict.fromkeys((torch.isnan, T.isnan, torch.isinf, T.isinf), False)
FINITE |= dict.fromkeys((torch.isfinite, T.isfinite, torch.all, T.all, torch._is_all_true), True)
RANDOM = (torch.randn, torch.rand, torch.randint, torch.randperm, torch.normal, torch.randn_like, torch.rand_like)
MOST_READS = 4_000  # of values of the GPU on one line: a loop that waits for a value would not end
SAME_PASS = 0.05  # passes of accumulation differ by a smaller share of their operators
GPU_0 = torch.device("cuda", 0)


class StepTracedError(BaseException):
    """Ends the script once its step is traced; no ``except Exception`` of the script stops it."""


class CompiledResult(NamedTuple):
    """A differentiable result of compiled code."""

    edge: GradientEdge
    end: int  # the sequence number of the first autograd node after the compiled code
    shape: torch.Size
    dtype: torch.dtype


def find_reads(roots: Iterable[Tensor], begin: int) -> dict[GradientEdge, float]:
    """Return what is read on the way to *roots*, with the sequence number of the last node that reads it; nodes before
    *begin* are not followed.
    """
    reads = {get_gradient_edge(root): math.inf for root in roots if root.requires_grad}
    waiting, seen = [edge.node for edge in reads], set()
    while waiting:
        node = waiting.pop()
        number = node._sequence_nr()
        if node in seen or number < begin:
            continue
        seen.add(node)
        for source in (GradientEdge(*pair) for pair in node.next_functions if pair[0] is not None):
            reads[source] = max(reads.get(source, 0), number)
            waiting.append(source.node)
    return reads


class ScriptTracer(Tracer):
    """Records what a script runs on the GPU, from one optimizer step to the next."""

    def __init__(self, machine: PretendMachine) -> None:
        super().__init__({})
        self.machine = machine
        self.recording = False
        self.roots: dict[int, torch.nn.Module] = {}  # modules that the script calls
        self.batch_sizes: tuple[int, int] | None = None
        self._reads: dict[str, int] = {}  # by line, of unknown values
        self._waits_first = False
        self._regions: list[torch.nn.Module | None] = []  # what runs compiled: modules, None for functions
        self._results: list[list[CompiledResult]] = []  # of each call of compiled code that no backward has reached
        machine.call_compiled = self.call_compiled

    def enter_module(self, module: torch.nn.Module, inputs: object) -> None:
        if len(self._stack) == 1 and id(module) not in self.roots:
            prefix = f"{type(module).__name__}." if self.roots else ""
            self.roots[id(module)] = module
            for name, inner in module.named_modules():
                self._module_names.setdefault(id(inner), f"{prefix}{name}".rstrip("."))
        if self.batch_sizes is None and self.recording and list_tensors((inputs,)):
            self.batch_sizes = sizes_of(inputs)
        if id(module) in self.machine.compiled:
            self._begin_region(module)
        super().enter_module(module, inputs)

    def leave_module(self, *called: object) -> None:
        super().leave_module(*called)
        if self._regions and self._regions[-1] is called[0]:
            self._end_region(called[-1])

    def call_compiled(self, call: Callable[[], Any]) -> Any:
        """Return what *call* of a compiled function returns."""
        result = None
        self._begin_region(None)
        try:
            result = call()
        finally:
            self._end_region(result)
        return result

    def _begin_region(self, module: torch.nn.Module | None) -> None:
        self._regions.append(module)
        torch.compiler._is_compiling_flag = self.compiles = True

    def _end_region(self, results: object) -> None:
        """Note the *results* of compiled code, unless it is part of other compiled code."""
        self._regions.pop()
        torch.compiler._is_compiling_flag = bool(self._regions)
        if self._regions or not self.recording:
            return
        leaves, end = torch.utils._pytree.tree_leaves(results), torch.autograd._get_sequence_nr()
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
        self.add_results(tensors)
        call = [CompiledResult(get_gradient_edge(own), end, own.shape, own.dtype) for own in tensors]
        if call:
            self._results.append(call)

    def take_unread_results(self, roots: Sequence[Tensor]) -> list[CompiledResult]:
        """Return the results that nothing outside of their compiled code reads on the way to *roots*, of the calls of
        which something does. Their gradients are tensors of zeros, which the compiled backward reads.
        """
        begin = min([result.end for call in self._results for result in call], default=None)
        if begin is None:
            return []
        reads = find_reads(roots, begin)
        unread, waiting = list[CompiledResult](), list[list[CompiledResult]]()
        for call in self._results:
            own = [result for result in call if reads.get(result.edge, -1) < result.end]
            if len(own) == len(call):
                waiting.append(call)
            else:
                unread += own
        self._results = waiting
        return unread

    def __torch_dispatch__(
        self, func: TorchCall, types: object, args: Args = (), kwargs: Kwargs | None = None
    ) -> object:
        name, kwargs = func._schema.name.partition("::")[2], kwargs or {}
        with torch._C.DisableTorchFunction():  # in a backward it would answer for the tensors
            read = [*list_tensors(args), *list_tensors(kwargs.values())]
            moves = name == "_to_copy" and kwargs.get("device") == META and read[0].device.type == "cpu"
            if (read and all(map(is_on_host, read)) and not moves) or (not read and kwargs.get("device") != META):
                return self._run_on_host(func, name, args, kwargs, read)
            if any(tensor.device.type == "cpu" and tensor.dim() for tensor in read) and name not in tracing.COPIES:
                args, kwargs = torch.utils._pytree.tree_map_only(
                    Tensor, lambda tensor: emulation.move_to_meta(tensor) if tensor.dim() else tensor, (args, kwargs)
                )
            return super().__torch_dispatch__(func, types, args, kwargs)

    def _run_on_host(self, func: TorchCall, name: str, args: Args, kwargs: Kwargs, read: list[Tensor]) -> object:
        if not any(hasattr(tensor, HOST) for tensor in read):
            return func(*args, **kwargs)
        if name in tracing.READ_A_VALUE:
            return self.read_unknown(read)
        args, kwargs = torch.utils._pytree.tree_map_only(Tensor, lambda tensor: tensor.to(META), (args, kwargs))
        result = func(*args, **kwargs)
        for tensor in list_tensors((result,)):
            setattr(tensor, HOST, True)
        return result

    def _run(self, func: TorchCall, name: str, args: Args, kwargs: Kwargs, read: list[Tensor]) -> object:
        return None if name.startswith("_amp_") else super()._run(func, name, args, kwargs, read)

    def _add_event(self, name: str, args: Args, read: list[Tensor], written: list[Tensor]) -> None:
        if not self.recording:
            return
        super()._add_event(name, args, read, written)
        event, runs_compiled = self.trace.events[-1], bool(self._regions)
        if event.moment is Moment.BACKWARD and event.source >= 0:
            runs_compiled = event.source not in self.trace.uncompiled
        if not runs_compiled:
            self.trace.uncompiled.add(len(self.trace.events) - 1)
        if self._waits_first:
            self._waits_first = False
            self._add_host_wait()

    def _add_host_wait(self) -> None:
        if self.recording and not self.trace.events:
            self._waits_first = True  # for the last update; the next operator is launched after it
        super()._add_host_wait()

    def _read_value(self, func: TorchCall, args: Args, kwargs: Kwargs, read: list[Tensor]) -> object:
        if any(not is_on_host(tensor) for tensor in read) and self._values_of(read) is not None:
            self._count_read()
        return super()._read_value(func, args, kwargs, read)

    def _count_read(self) -> str:
        """Return the line that reads a value of the GPU; refuse a line that reads without end."""
        place = locate_caller()
        self._reads[place] = self._reads.get(place, 0) + 1
        if self._reads[place] > MOST_READS:
            raise CaptureError(
                f"{place}: a loop depends on the values of tensors, which a captured step does not have; give it a "
                "fixed number of turns"
            )
        return place

    def read_unknown(self, read: list[Tensor]) -> object:
        """Return a plausible value, and note the line that reads it."""
        tensor = read[0]
        value: object = 1.0 if tensor.is_floating_point() else tensor.dtype is not torch.bool
        place = self._count_read()
        self.machine.note(f"{place}: reads a value that depends on weights or data; it was taken as {value}")
        if not is_on_host(tensor):
            self._add_host_wait()
        return value

    def open_window(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Begin to record, with everything that exists."""
        self.begin_trace()
        self.recording, self._results = True, []
        self.add_existing(self.roots.values(), optimizers)


class ScriptGpu(EmulatedGpu):
    """Places tensors where the script asks: on the GPU without data, on the host with data where they are small."""

    def __init__(self, tracer: ScriptTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def place(self, func: TorchCall, args: Args, kwargs: Kwargs) -> object:
        own = args[0] if args and isinstance(args[0], Tensor) else None
        is_meta = own is not None and own.device.type == "meta"
        if is_meta and func in ANSWERS:
            return ANSWERS[func](self, own, *args[1:])
        if func is DATA_SET:
            if hasattr(own, HOST) and not hasattr(args[1], HOST):
                delattr(own, HOST)
            return func(*args, **kwargs)
        if func is T.pin_memory:
            setattr(own, emulation.PINNED, True)
            return own
        if func is T.cuda:
            return self._move(own, GPU_0, kwargs)
        if func is T.cpu:
            return self._move(own, torch.device("cpu"), kwargs)
        if func is T.to:
            return self._convert(own, args[1:], kwargs)
        if is_meta and func in FINITE:
            result = func(*args, **kwargs)
            if not hasattr(result, VALUES):
                setattr(result, VALUES, torch.full(result.shape, FINITE[func]))
            return result
        device = kwargs.get("device")
        if func in FROM_DATA:
            real = func(*args, **{name: value for name, value in kwargs.items() if name != "device"})
            return real if device is None else self._move(real, as_device(device), kwargs)
        if device is None and func not in _device_constructors():
            return func(*args, **kwargs)
        return self._construct(func, args, kwargs)

    def _construct(self, func: TorchCall, args: Args, kwargs: Kwargs) -> object:
        own = {**kwargs, "device": torch.device("cpu")}
        is_pinned = own.pop("pin_memory", False)
        without_data = {name: value for name, value in own.items() if name != "generator"} | {"device": META}
        if kwargs.get("device") is not None and as_device(kwargs["device"]).type != "cpu":
            return func(*args, **without_data)
        with torch._C._DisableTorchDispatch():
            result = func(*args, **without_data)
        if not isinstance(result, Tensor):
            return func(*args, **{**kwargs, "device": torch.device("cpu")})
        if func in RANDOM and self._tracer.recording:
            emulation.spend(emulation.CALLS["random"] * result.numel())
        if result.numel() > (HOST_FLOATS if result.is_floating_point() else HOST_INTEGERS):
            setattr(result, HOST, True)
        else:
            result = func(*args, **own)
        if is_pinned:
            setattr(result, emulation.PINNED, True)
        return result

    def _convert(self, own: Tensor, args: Args, kwargs: Kwargs) -> object:
        """Run ``tensor.to(...)``."""
        if args and isinstance(args[0], Tensor):
            device, dtype = torch.device("cpu") if is_on_host(args[0]) else META, args[0].dtype
            non_blocking = memory_format = None
        else:
            named = tuple(torch.device("cuda", value) if type(value) is int else value for value in args)
            words = {name: value for name, value in kwargs.items() if name != "copy"}
            device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*named, **words)
        moved = own if device is None else self._move(own, device, {"non_blocking": non_blocking})
        options = {"dtype": dtype, "memory_format": memory_format}
        given = {name: value for name, value in options.items() if value is not None}
        return T.to(moved, **given, copy=True) if kwargs.get("copy") else T.to(moved, **given) if given else moved

    def _move(self, own: Tensor, device: torch.device, kwargs: Kwargs) -> object:
        if (device.type == "cpu") == is_on_host(own):
            return own
        if device.type == "cpu":
            result = own * 1 if own.requires_grad else own.detach()  # a product keeps the graph
            setattr(result, HOST, True)
            self._tracer._add_host_wait()
            emulation.fetch(own.nbytes)
            return result
        if hasattr(own, HOST):
            with torch._C._DisableTorchDispatch():  # which would place it where *own* is
                result = torch.empty_like(own)
            if self._tracer.recording:
                self._tracer.copy_from_host(own, result, bool(kwargs.get("non_blocking")))
            return result.requires_grad_(own.requires_grad and own.is_leaf)
        return own.to(META, non_blocking=bool(kwargs.get("non_blocking")))

    def read_text(self, own: Tensor, form: str = "") -> str:
        return format(self.read_values(own).item(), form) if own.dim() == 0 else f"tensor(shape={tuple(own.shape)})"

    def read_values(self, own: Tensor) -> Tensor:
        """Return the values of a tensor; unknown ones are equal."""
        if hasattr(own, VALUES):
            return getattr(own, VALUES)
        dtype = torch.float32 if own.dtype is torch.bfloat16 else own.dtype
        return torch.full(own.shape, self._tracer.read_unknown([own]), dtype=dtype, device="cpu")


DATA_SET = T.data.__set__
# Questions about a tensor without data, as one with data would answer them.
ANSWERS: dict[TorchCall, Callable[..., object]] = {
    T.device.__get__: lambda _, own, *rest: torch.device("cpu") if hasattr(own, HOST) else GPU_0,
    T.is_cuda.__get__: lambda _, own, *rest: not hasattr(own, HOST),
    T.is_cpu.__get__: lambda _, own, *rest: hasattr(own, HOST),
    T.is_meta.__get__: lambda *rest: False,
    T.get_device: lambda *rest: 0,
    T.is_pinned: lambda _, own, *rest: hasattr(own, emulation.PINNED),
    T.tolist: lambda gpu, own, *rest: gpu.read_values(own).tolist(),
    **dict.fromkeys((T.numpy, T.__array__), lambda gpu, own, *rest: gpu.read_values(own).numpy()),
    T.__format__: ScriptGpu.read_text,
    T.__repr__: ScriptGpu.read_text,
}


def as_device(device: object) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def locate_caller() -> str:
    """Return file and line of the innermost frame outside of PyTorch and this package."""
    inside = (os.path.dirname(torch.__file__), os.path.dirname(os.path.dirname(os.path.dirname(__file__))))
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and (frame.f_code.co_filename.startswith((*inside, "<"))):
        frame = frame.f_back
    return f"{shorten_path(frame.f_code.co_filename)}:{frame.f_lineno}"


def shorten_path(path: str) -> str:
    return min(path, os.path.relpath(path), key=len)


class ScriptRun:
    """One run of a script under the modes, until its second optimizer step has ended."""

    def __init__(self, machine: PretendMachine) -> None:
        self.machine, self.tracer = machine, ScriptTracer(machine)
        self.gpu = ScriptGpu(self.tracer)
        self.optimizers: dict[int, torch.optim.Optimizer] = {}
        self.passes: list[int] = []  # the number of events at the end of each backward
        self.second: tuple[StepTrace, list[int]] | None = None  # the second step and its passes, where it reads values

    def _before_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.optimizers.setdefault(id(optimizer), optimizer)
        self.tracer.moment = Moment.OPTIMIZER
        self.tracer.updated = sum(1 for _ in parameters_of(optimizer))

    def _after_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.tracer.moment = Moment.FORWARD
        if id(optimizer) == next(iter(self.optimizers)):  # of several optimizers the first ends the step
            with torch._C.DisableTorchFunction():
                self._end_step()

    def _end_step(self) -> None:
        if self.tracer.recording:
            for parameter in chain.from_iterable(map(parameters_of, self.optimizers.values())):
                self.tracer.add_gradient(parameter)
            if not self.tracer.trace.host_waits or self.second is not None:
                self.tracer.recording = False
                self.tracer._watches.clear()  # what the script still holds is freed by its end, not by the step
                raise StepTracedError
            self.second = self.tracer.trace, self.passes
        self.passes = []
        self.tracer.open_window(list(self.optimizers.values()))

    def _backward(
        self, tensors: Tensor | Sequence[Tensor], grad_tensors: Tensor | Sequence[Tensor | None] | None = None,
        retain_graph: bool | None = None, create_graph: bool = False, grad_variables: object = None,
        inputs: Tensor | Sequence[Tensor] | None = None,
    ) -> None:  # fmt: skip
        """Run ``tensor.backward()`` and ``torch.autograd.backward`` outside of their own dispatch."""
        results = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        gradients = [grad_tensors] if grad_tensors is None or isinstance(grad_tensors, Tensor) else list(grad_tensors)
        pairs = zip(results, gradients + [None] * len(results), strict=False)
        seeds = [torch.ones_like(result) if seed is None else seed for result, seed in pairs]
        self.gpu.forget_casts()
        before, self.tracer.moment = self.tracer.moment, Moment.BACKWARD
        unread = self.tracer.take_unread_results(results)
        seeds += [torch.zeros(result.shape, dtype=result.dtype, device=META) for result in unread]
        roots = (*results, *[result.edge for result in unread])
        self.tracer.begins_backward = True
        targets = () if inputs is None else (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        torch.autograd.graph._engine_run_backward(
            roots, tuple(seeds), bool(retain_graph), create_graph, targets,
            allow_unreachable=True, accumulate_grad=True,
        )  # fmt: skip
        self.tracer.moment = before
        self.passes.append(len(self.tracer.trace.events))

    def run(self, words: Sequence[str]) -> None:
        """Run the script or module that *words* name with its arguments."""
        backward = self._backward

        def tensor_backward(
            tensor: Tensor, gradient: object = None, retain_graph: bool | None = None, create_graph: bool = False,
            inputs: object = None,
        ) -> None:  # fmt: skip
            backward(tensor, gradient, retain_graph, create_graph, inputs=inputs)

        originals = sys.argv, list(sys.path)
        try:
            with (
                mock.patch.object(T, "backward", tensor_backward),
                mock.patch.object(torch.autograd, "backward", backward),
                optimizer_hooks.register_optimizer_step_pre_hook(self._before_update),
                optimizer_hooks.register_optimizer_step_post_hook(self._after_update),
                self.machine.show(),
                contextlib.redirect_stdout(sys.stderr),
                self.tracer,
                self.tracer.follow_modules(),
                self.gpu,
            ):
                _run_words(words)
        except StepTracedError:
            return
        finally:
            sys.argv, sys.path[:] = originals
            torch.compiler._is_compiling_flag = False
        if self.second is not None:
            self.tracer.trace, self.passes = self.second
            return
        reached = "one optimizer step; it needs two" if self.tracer.recording else "any optimizer step"
        raise CaptureError(f"{' '.join(words[:2])}: the script ended before {reached}, so that no step can be captured")


def _run_words(words: Sequence[str]) -> None:
    is_module = words[0] == "-m"
    name = words[1] if is_module and len(words) > 1 else words[0]
    sys.argv = [name, *words[1 + is_module :]]
    if not is_module and not os.path.isfile(name):
        raise CaptureError(f"{name}: no such script")
    sys.path.insert(0, os.getcwd() if is_module else os.path.dirname(os.path.abspath(name)))
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except CaptureError:
        raise
    except SystemExit as error:
        if error.code:
            raise CaptureError(f"{name}: exited with {error.code} before a step was captured") from None
    except Exception as error:
        raise explain_error(error, name) from error


def explain_error(error: Exception, name: str) -> CaptureError:
    """Return an error of the program *name* with the innermost line of its own."""
    inside = (os.sep + "stepcast" + os.sep, "runpy", "<frozen ", os.path.dirname(torch.__file__))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(part in frame.filename for part in inside)]
    place = f"{shorten_path(own[-1].filename)}:{own[-1].lineno}" if own else name
    message = " ".join(str(error).split())[:300]
    if isinstance(error, KeyError) and error.args[0] in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        message += "; start the script with torchrun --nproc-per-node N, which sets it"
    return CaptureError(f"{place}: {type(error).__name__}: {message}")


def capture_script(command: Sequence[str], machine: PretendMachine) -> Captured:
    """Return the step of a training script; *machine* has the number of GPUs if more than the command starts."""
    words, processes = read_command(command)
    if not words:
        raise CaptureError(f"{' '.join(command)}: names no script; expected python FILE ARGUMENTS")
    machine.gpus = max(machine.gpus, processes)
    run = ScriptRun(machine)
    with torch.random.fork_rng(devices=()), contextlib.suppress(io.UnsupportedOperation):
        run.run(words)
    trace, accumulation = fold_passes(run.tracer.trace, run.passes)
    if not trace.events:
        raise CaptureError(f"{' '.join(words[:2])}: the step runs nothing on a GPU; move the model and its "
                           'batches to "cuda", which capture emulates')  # fmt: skip
    trace.units = list(machine.list_units(run.tracer._module_names)) if machine.gpus > 1 else []
    batch, seq = run.tracer.batch_sizes or (1, 1)
    if run.tracer.batch_sizes is None:
        machine.note("no module was called with a batch: the step counts as one sample")
    first = next(iter(run.tracer.roots.values()), None)
    optimizer = next(iter(run.optimizers.values()))
    settings = {
        "compiled": bool(machine.compiled),
        "fused optimizer": any(group.get("fused") for group in optimizer.param_groups),
        f"optimizer {type(optimizer).__name__}": True,
    }
    if machine.gpus > 1 and not machine.sharding and machine.tp == 1:
        machine.note(f"{machine.gpus} GPUs, but the script wraps no model in DDP or FSDP: predicted as DDP")
    if machine.collectives:
        calls = ", ".join(f"{count} {name}" for name, count in machine.collectives.items())
        machine.note(f"collectives that the script calls itself are not part of the prediction: {calls}")
    facts = {
        "torch": torch.__version__,
        "transformers": getattr(sys.modules.get("transformers"), "__version__", None),
        "script": " ".join(words),
        "seen gpu": machine.gpu.name,
        "model": type(first).__name__ if first is not None else "",
        "seq": seq,
        "settings": ", ".join(name for name, is_set in settings.items() if is_set),
        "gpus": machine.gpus if machine.gpus > 1 else None,
        "sharding": machine.sharding if machine.gpus > 1 else None,
        "tp": machine.tp if machine.tp > 1 else None,
        "bucket_mb": machine.bucket_mb,
        "ddp": machine.ddp,
        "accumulation": accumulation if accumulation > 1 else None,
        "gradients summed": "in every pass" if machine.ddp and accumulation > 1 and not machine.skips_sums else None,
    }
    return build_captured(
        trace, name=os.path.basename(words[-1] if words[0] == "-m" else words[0]), tokens=batch * seq, batch=batch,
        precision="fp32", facts=[(name, str(value)) for name, value in facts.items() if value is not None],
        compiled=bool(machine.compiled), warnings=tuple(machine.notes),
    )  # fmt: skip


def fold_passes(trace: StepTrace, passes: Sequence[int]) -> tuple[StepTrace, int]:
    """Return the trace with one of several equal passes of accumulation, the last, and the number of passes.

    What runs after the last backward, such as clipping, is part of the update; so is clearing gradients.
    """
    events = trace.events
    if not passes:
        raise CaptureError("the step has no backward; call loss.backward() before optimizer.step()")
    sizes = [end - start for start, end in zip((0, *passes), passes, strict=False)]
    usual = sizes[-1]
    has_updates = any(event.moment is Moment.OPTIMIZER for event in events[: passes[-1]])
    folds = len(sizes) > 1 and not has_updates and all(abs(size - usual) <= SAME_PASS * usual + 50 for size in sizes)
    start, trace.events = passes[-2] if folds else 0, []
    for number, event in enumerate(events[start:], start):
        clears = number < passes[0] and event.name.startswith((*tracing.LISTED, "zero_"))
        moment = Moment.OPTIMIZER if number >= passes[-1] or clears else event.moment
        trace.events.append(event._replace(moment=moment, source=max(event.source - start, -1)))
    for storage in trace.storages:
        storage.created = max(0, storage.created - start)
        storage.freed = None if storage.freed is None else max(0, storage.freed - start)
    trace.uncompiled = {number - start for number in trace.uncompiled if number >= start}
    trace.host_waits = {number - start for number in trace.host_waits if number >= start}
    return trace, len(sizes) if folds else 1
