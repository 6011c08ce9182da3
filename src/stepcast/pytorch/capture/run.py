"""Run a program once under the tracer."""

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
import torch.utils.checkpoint

from stepcast.hardware.cluster import Gpu
from stepcast.ir.captured import Captured
from stepcast.pytorch.capture.build import build_captured
from stepcast.pytorch.capture.emulation import GPU, EmulatedGpu
from stepcast.pytorch.capture.host import HOST_CALLS, apply_function, count_calls, enter_checkpoint
from stepcast.pytorch.capture.machine import PretendMachine, read_shapes
from stepcast.pytorch.capture.program import CaptureOptions, TrainingProgram, build_program
from stepcast.pytorch.capture.tracer import CaptureError, Moment, StepTrace, Tracer, parameters_of

# Questions of PyTorch about the machine, with the answers of one with a GPU: optimizers ask which kernels the device
# of their weights has, autocast whether it can be on, checkpoints whose autocast they restore.
GPU_ANSWERS: dict[tuple[str, str], Callable[..., object]] = {
    ("torch.optim.optimizer", "_get_fused_kernels_supported_devices"): lambda: ["cuda", "cpu", "meta"],
    ("torch.optim.optimizer", "_get_foreach_kernels_supported_devices"): lambda: ["cuda", "cpu", "meta"],
    ("torch.cuda.amp.common", "amp_definitely_not_available"): lambda: False,
    ("torch.cuda", "is_bf16_supported"): lambda including_emulation=True: True,
    ("torch.nn.utils.clip_grad", "_has_foreach_support"): lambda tensors, device: True,
    ("torch.nn.utils.clip_grad", "_device_has_foreach_support"): lambda device: True,
    ("torch.utils.checkpoint", "_infer_device_type"): lambda *args: enter_checkpoint(),
}
STARTERS = ("python", "torchrun", "accelerate", "deepspeed")


def capture(what: str, options: CaptureOptions) -> Captured:
    """Return one step of *what*, a Hugging Face config or ``module:function``."""
    with _answer_as_gpu() as warnings, _restore_precision():
        if options.tf32:
            torch.set_float32_matmul_precision("high")
        program = build_program(what, options)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            trace = _trace_program(program, options)
    settings = {
        "compiled": options.compiled,
        "autocast": options.autocast,
        "checkpoint": options.checkpoint,
        "tf32": options.tf32,
        "fused optimizer": any(group.get("fused") for group in program.optimizer.param_groups),
        f"attention {options.attention}": bool(options.attention),
        f"experts {options.experts}": bool(options.experts),
    }
    facts = {
        "torch": str(torch.__version__),
        **program.facts,
        "seq": str(program.tokens // program.batch),
        "settings": ", ".join(name for name, is_set in settings.items() if is_set),
    }
    precision = "bf16" if options.autocast else options.dtype
    return build_captured(
        trace, name=program.name, tokens=program.tokens, batch=program.batch, precision=precision,
        facts=facts.items(), compiled=options.compiled, warnings=tuple(warnings),
    )  # fmt: skip


def is_command(program: str, words: Sequence[str]) -> bool:
    """Return True if *program* with *words* is the command of a training script."""
    starter = os.path.basename(program)
    return starter.endswith(".py") or (bool(words) and starter.startswith(STARTERS))


def capture_command(command: Sequence[str], gpus: int, gpu: Gpu | None = None, batch: str = "") -> Captured:
    """Return one step of the training script that *command* starts, on *gpus* GPUs if it starts fewer processes; it
    sees *gpu*, or an H100. Loaders yield batches of the shapes of *batch* where it is given.
    """
    from stepcast.pytorch.capture.script import capture_script

    machine = PretendMachine(gpus, gpu) if gpu is not None else PretendMachine(gpus)
    machine.batch = read_shapes(batch)
    with _answer_as_gpu() as warnings, _restore_precision():
        machine.notes |= dict.fromkeys(warnings)
        return capture_script(command, machine)


@contextlib.contextmanager
def _answer_as_gpu() -> Iterator[list[str]]:
    """Answer PyTorch's questions about the machine as one with a GPU does, and count the CPU's time of other calls.

    Yields a warning for each name that this release of PyTorch does not have.
    """
    warnings = list[str]()
    with contextlib.ExitStack() as patches:
        function = torch.autograd.Function
        patches.enter_context(mock.patch.object(function, "apply", apply_function(function.apply.__func__)))
        for module, name in (*GPU_ANSWERS, *HOST_CALLS):
            owner = importlib.import_module(module)
            place = module, name
            if hasattr(owner, name):
                answer = GPU_ANSWERS.get(place) or count_calls(getattr(owner, name), HOST_CALLS[place])
                patches.enter_context(mock.patch.object(owner, name, answer))
            else:
                lacking = "the CPU's time in checkpoints" if place in HOST_CALLS else "the kernels of a GPU"
                release = f"PyTorch {torch.__version__} has no {module}.{name}"
                warnings.append(f"{release}, by which capture knows {lacking}: the step may be predicted too short")
        yield warnings


@contextlib.contextmanager
def _restore_precision() -> Iterator[None]:
    """Restore PyTorch's precision of fp32 products, which the program may set."""
    switches = (torch.backends, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [getattr(switch, "fp32_precision", None) for switch in switches]
    older = None
    with contextlib.suppress(RuntimeError):  # PyTorch refuses to read it once the newer switches were set
        older = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        if older is not None:
            torch.set_float32_matmul_precision(older)
        for switch, precision in zip(switches, before, strict=True):
            if precision is not None:
                switch.fp32_precision = precision


def _trace_program(program: TrainingProgram, options: CaptureOptions) -> StepTrace:
    """Trace forward, backward and update of *program*, after an update that makes the states of its optimizer."""
    tracer = Tracer({id(module): name for name, module in program.model.named_modules()})
    tracer.compiles, tracer.moment = options.compiled, Moment.OPTIMIZER
    for parameter in parameters_of(program.optimizer):
        parameter.grad = torch.empty_like(parameter)
    with tracer, torch.no_grad():
        program.optimizer.step()
    program.optimizer.zero_grad(set_to_none=True)
    tracer.trace.events.clear()
    for storage in tracer.trace.storages:
        storage.made = 0
        storage.freed = None if storage.freed is None else 0
    tracer.moment = Moment.FORWARD
    tracer.add_existing([program.model], [program.optimizer])
    try:
        _run_step(program, options, tracer)
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, NotImplementedError | RuntimeError) and "meta" in str(error).lower():
            first_line = str(error).strip().splitlines()[0]
            raise CaptureError(f"{program.name}: an operator cannot run without data: {first_line}") from error
        raise CaptureError(f"{program.name}: failed: {type(error).__name__}: {error}") from error
    return tracer.trace


def _run_step(program: TrainingProgram, options: CaptureOptions, tracer: Tracer) -> None:
    gpu = EmulatedGpu(compiled=options.compiled)
    with tracer, tracer.follow_modules(), gpu:
        with (
            # Libraries that see that they are compiled leave out what reads values.
            mock.patch.object(torch.compiler, "_is_compiling_flag", options.compiled),
            torch.autocast(GPU, torch.bfloat16) if options.autocast else contextlib.nullcontext(),
        ):
            loss, *others = program.results()
        gpu.casts.clear()
        tracer.moment = Moment.BACKWARD
        if not options.compiled:
            others.clear()
        # Unread results of a compiled program have gradients too, of zeros.
        zeros = [torch.zeros_like(tensor) for tensor in others]
        tracer.trace.uncompiled.update(range(len(tracer.trace.events) - len(zeros), len(tracer.trace.events)))
        ones = torch.ones_like(loss)
        tracer.begins_backward = True
        # Outside of the modes, where checkpoints recompute a forward.
        torch.autograd.graph._engine_run_backward(
            (loss, *others), (ones, *zeros), False, False, (), allow_unreachable=True, accumulate_grad=True
        )
        del others, zeros
    for parameter in dict.fromkeys((*program.model.parameters(), *parameters_of(program.optimizer))):
        tracer.add_gradient(parameter)
    tracer.moment, tracer.updated = Moment.OPTIMIZER, len(tracer.trace.gradients)
    with tracer, torch.no_grad():
        program.optimizer.step()
        program.optimizer.zero_grad(set_to_none=True)
    del loss
