"""Runs a program once under the tracer."""

import contextlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from stepcast.ir.captured import Captured
from stepcast.pytorch.capture.build import captured
from stepcast.pytorch.capture.events import Moment, Trace
from stepcast.pytorch.capture.placed import Placed
from stepcast.pytorch.capture.program import Asked, Program, program_of
from stepcast.pytorch.capture.tracer import CaptureError, Tracer


def traced(program: Program, asked: Asked) -> Trace:
    """Forward, backward and update of *program*, whose optimizer has its states already."""
    with _as_on_gpu(), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return _traced(program, asked)


def _traced(program: Program, asked: Asked) -> Trace:
    names = {id(module): name for name, module in program.model.named_modules()}
    tracer = Tracer(names)
    _make_states(program, tracer)
    for name, parameter in program.model.named_parameters(remove_duplicate=False):
        tracer.owns(name.rpartition(".")[0], parameter)
    for buffer in program.model.buffers():
        tracer.adopt(buffer, "buffers")
    for state in program.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                tracer.adopt(value, "optimizer")
    try:
        _step(program, asked, tracer)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, NotImplementedError | RuntimeError) and "meta" in str(error).lower():
            said = str(error).strip().splitlines()[0]
            raise CaptureError(f"{program.name}: an operator cannot run without data: {said}") from error
        raise CaptureError(f"{program.name}: failed: {type(error).__name__}: {error}") from error
    return tracer.trace


@contextlib.contextmanager
def _as_on_gpu() -> Iterator[None]:
    """Optimizers ask the device of their weights which kernels there are; these have a GPU's."""
    chooser = importlib.import_module("torch.optim.optimizer")
    names = ("_get_fused_kernels_supported_devices", "_get_foreach_kernels_supported_devices")
    known = {name: getattr(chooser, name) for name in names}
    for name in names:
        setattr(chooser, name, lambda: ["cuda", "cpu", "meta"])
    try:
        yield
    finally:
        for name, found in known.items():
            setattr(chooser, name, found)


def _make_states(program: Program, tracer: Tracer) -> None:
    """One update before the step that is traced, so that its optimizer is that of any later step."""
    for group in program.optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.empty_like(parameter)
    tracer.moment = Moment.OPTIMIZER
    with tracer, torch.no_grad():
        program.optimizer.step()
    program.optimizer.zero_grad(set_to_none=True)
    tracer.trace.events.clear()
    for storage in tracer.trace.storages:
        storage.made = 0
        storage.freed = None if storage.freed is None else 0
    tracer.moment = Moment.FORWARD


def _backward(results: Sequence[Any], gradients: Sequence[Any]) -> None:
    """``loss.backward()``, which runs outside of the modes, where checkpoints compute a forward again."""
    options = {"allow_unreachable": True, "accumulate_grad": True}
    torch.autograd.graph._engine_run_backward(tuple(results), tuple(gradients), False, False, (), **options)


@contextlib.contextmanager
def _compiling() -> Iterator[None]:
    """Libraries ask whether they are compiled, and then leave out what looks at values."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _step(program: Program, asked: Asked, tracer: Tracer) -> None:
    placed = Placed(torch.bfloat16 if asked.autocast else None, compiled=asked.compiled)
    with tracer, tracer.following(), placed:
        with _compiling() if asked.compiled else contextlib.nullcontext():
            loss, *others = program.results()
        placed.casts.forget()
        tracer.moment = Moment.BACKWARD
        if not asked.compiled:
            others.clear()
        # Results of a compiled program that nobody reads have gradients too, of zeros.
        zeros = [torch.zeros_like(each) for each in others]
        tracer.trace.given.update(range(len(tracer.trace.events) - len(zeros), len(tracer.trace.events)))
        ones = torch.ones_like(loss)
        _backward([loss, *others], [ones, *zeros])
        del others, zeros
    for parameter in program.model.parameters():
        if parameter.grad is not None:
            tracer.role(parameter.grad, "gradients")
    tracer.moment = Moment.OPTIMIZER
    with tracer, torch.no_grad():
        program.optimizer.step()
        program.optimizer.zero_grad(set_to_none=True)
    del loss


def capture(what: str, asked: Asked) -> Captured:
    """One step of *what*, a Hugging Face config or ``module:function``."""
    program = program_of(what, asked)
    trace = traced(program, asked)
    facts = {"torch": str(torch.__version__), **program.facts, "seq": str(asked.seq), **_choices(asked)}
    return captured(
        trace,
        name=program.name,
        tokens=program.tokens,
        batch=asked.batch,
        precision="bf16" if asked.autocast else asked.dtype,
        facts=facts.items(),
        compiled=asked.compiled,
    )


def _choices(asked: Asked) -> dict[str, str]:
    words = {
        "compiled": asked.compiled,
        "autocast": asked.autocast,
        "checkpoint": asked.checkpoint,
        "fused optimizer": asked.fused,
        f"attention {asked.attention}": bool(asked.attention),
        f"experts {asked.experts}": bool(asked.experts),
    }
    return {"settings": ", ".join(word for word, given in words.items() if given)}
