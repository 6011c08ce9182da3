"""Runs a program once under the tracer."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from stepcast.ir.captured import Captured
from stepcast.pytorch.capture.autocast import GPU
from stepcast.pytorch.capture.build import captured
from stepcast.pytorch.capture.events import Moment, StepTrace
from stepcast.pytorch.capture.placed import Placed
from stepcast.pytorch.capture.program import Asked, CapturedStep, program_of
from stepcast.pytorch.capture.tracer import CaptureError, Tracer


def traced(program: CapturedStep, asked: Asked) -> StepTrace:
    """Forward, backward and update of *program*, whose optimizer has its states already."""
    with _as_on_gpu(), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return _traced(program, asked)


def _traced(program: CapturedStep, asked: Asked) -> StepTrace:
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


# What PyTorch asks about the machine, and what a machine with a GPU answers: optimizers ask which kernels the
# device of their weights has, autocast whether it can be on, checkpoints whose autocast they restore.
ANSWERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch.optim.optimizer", "_get_fused_kernels_supported_devices"): lambda: ["cuda", "cpu", "meta"],
    ("torch.optim.optimizer", "_get_foreach_kernels_supported_devices"): lambda: ["cuda", "cpu", "meta"],
    ("torch.cuda.amp.common", "amp_definitely_not_available"): lambda: False,
    ("torch.cuda", "is_bf16_supported"): lambda including_emulation=True: True,
    ("torch.utils.checkpoint", "_infer_device_type"): lambda *args: GPU,
}


@contextlib.contextmanager
def _as_on_gpu() -> Iterator[None]:
    """Answer PyTorch's questions about the machine as one with a GPU does."""
    modules = {name: importlib.import_module(name) for name, _ in ANSWERS}
    known = {(module, name): getattr(modules[module], name) for module, name in ANSWERS}
    for (module, name), answer in ANSWERS.items():
        setattr(modules[module], name, answer)
    try:
        yield
    finally:
        for (module, name), found in known.items():
            setattr(modules[module], name, found)


def _make_states(program: CapturedStep, tracer: Tracer) -> None:
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


def _step(program: CapturedStep, asked: Asked, tracer: Tracer) -> None:
    placed = Placed(compiled=asked.compiled)
    with tracer, tracer.following(), placed:
        with (
            _compiling() if asked.compiled else contextlib.nullcontext(),
            torch.autocast(GPU, torch.bfloat16) if asked.autocast else contextlib.nullcontext(),
        ):
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
            tracer.holds_gradient(parameter)
    tracer.moment = Moment.OPTIMIZER
    with tracer, torch.no_grad():
        program.optimizer.step()
        program.optimizer.zero_grad(set_to_none=True)
    del loss


def capture(what: str, asked: Asked) -> Captured:
    """One step of *what*, a Hugging Face config or ``module:function``."""
    with _as_on_gpu(), _own_precision():
        if asked.tf32:
            torch.set_float32_matmul_precision("high")
        program = program_of(what, asked)
        trace = traced(program, asked)
    facts = {
        "torch": str(torch.__version__),
        **program.facts,
        "seq": str(program.tokens // program.batch),
        **_choices(asked, program),
    }
    return captured(
        trace,
        name=program.name,
        tokens=program.tokens,
        batch=program.batch,
        precision="bf16" if asked.autocast else asked.dtype,
        facts=facts.items(),
        compiled=asked.compiled,
    )


@contextlib.contextmanager
def _own_precision() -> Iterator[None]:
    """Leave PyTorch's precision of fp32 products as it was, whatever the program sets."""
    switches = (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [getattr(each, "fp32_precision", None) for each in switches]
    older = None
    with contextlib.suppress(RuntimeError):  # which PyTorch refuses to read once the newer were set
        older = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for each, precision in zip(switches, before, strict=True):
            if precision is not None:
                each.fp32_precision = precision


def _choices(asked: Asked, program: CapturedStep) -> dict[str, str]:
    words = {
        "compiled": asked.compiled,
        "autocast": asked.autocast,
        "checkpoint": asked.checkpoint,
        "tf32": asked.tf32,
        "fused optimizer": any(group.get("fused") for group in program.optimizer.param_groups),
        f"attention {asked.attention}": bool(asked.attention),
        f"experts {asked.experts}": bool(asked.experts),
    }
    return {"settings": ", ".join(word for word, given in words.items() if given)}
