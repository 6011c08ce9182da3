"""Record one rank: a profiler over a window of steps, boundaries and memory of all others.

A step ends with the optimizer's. Within the window PyTorch's profiler writes a trace (operators, kernels,
collectives, with each module's forward marked); outside of it a step costs one look at the clock.
"""

import atexit
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

from stepcast.inputs.recorded import FLIGHT, STEPS
from stepcast.inputs.source import read_words
from stepcast.outputs.files import write_file
from stepcast.pytorch.load import load_torch

MOST_DEPTH = 4  # of modules whose forward is marked: deeper ones are operators by themselves
OFFSET_ROUNDS = 5
CLOCK_START_S = time.time() - time.perf_counter()
COLLECTIVES = read_words("pytorch")["collectives"]["watched"].split()
MOST_CALLS = 100_000  # collectives that are recorded


class Recorder:
    """Records one process of a job; the profiler starts after *skip* steps and sees *steps*."""

    def __init__(self, folder: str, skip: int = 5, steps: int = 3) -> None:
        self.folder, self.skip, self.steps = folder, skip, steps
        self._step_ends_s: list[float] = []
        self._calls: list[dict[str, object]] = []
        self._profiler: Any = None
        self._optimizer_hook: Any = None
        self._module_hooks: list[Any] = []
        self._offset_s = 0.0
        self._optimizer: int | None = None
        self._next_forward: Any = None  # a hook, after an optimizer has stepped

    def start(self) -> "Recorder":
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._optimizer_hook = register_optimizer_step_post_hook(self._after_optimizer)
        atexit.register(self.stop)
        return self

    def stop(self) -> None:
        """Write what was recorded; called at the end of the process."""
        self._end_step()
        if not self._step_ends_s:
            return
        self._close_window()
        self._write_steps()
        self._write_flight_recorder()
        self._optimizer_hook.remove()
        atexit.unregister(self.stop)

    def _after_optimizer(self, optimizer: object, *_: object) -> None:
        """Let the step end when the next forward begins, so that it has all that runs in between."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        if self._optimizer is None:
            self._optimizer = id(optimizer)
            self._watch_collectives()
        if self._optimizer == id(optimizer):  # of several optimizers the first ends the step
            self._end_step()
            # Here the profiler is within a mark of the optimizer, which would last as long as writing a trace.
            self._next_forward = register_module_forward_pre_hook(lambda *_: self._end_step())

    def _end_step(self) -> None:
        """Note the boundary after a step, unless it has been noted already."""
        if self._next_forward is None:
            return
        self._next_forward.remove()
        self._next_forward = None
        self._step_ends_s.append(_now_s())
        number = len(self._step_ends_s)
        if self._profiler is not None:
            self._profiler.step()
        if number == self.skip:
            self._open_window()
        elif number == self.skip + self.steps + 1:
            self._close_window()
        if self._profiler is not None:
            self._write_steps()  # which a job that is killed within the window leaves

    def _watch_collectives(self) -> None:
        """Record the calls of torch.distributed; those from C++ are in the profiler's trace."""
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            barrier = dist.barrier
            for name in filter(partial(hasattr, dist), COLLECTIVES):
                setattr(dist, name, self._watch_call(name, getattr(dist, name), dist))
            self._offset_s = _clock_offset_s(dist, barrier)

    def _watch_call(self, name: str, call: Callable[..., Any], dist: ModuleType) -> Callable[..., Any]:
        def watch(*args: Any, **kwargs: Any) -> Any:
            begin = _now_s()
            result = call(*args, **kwargs)
            if len(self._calls) < MOST_CALLS:
                group = kwargs.get("group")
                ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
                row = {"start_s": begin, "end_s": _now_s(), "name": name, "bytes": _tensor_bytes(args), "ranks": ranks}
                self._calls.append(row)
            return result

        return watch

    def _open_window(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile, schedule

        activities, steps = [ProfilerActivity.CPU], schedule(wait=0, warmup=1, active=self.steps, repeat=1)
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.reset_peak_memory_stats()
        self._profiler = profile(
            activities=activities, record_shapes=True, schedule=steps,
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(self._path("")),
        )  # fmt: skip
        self._profiler.start()
        self._mark_modules(torch)

    def _mark_modules(self, torch: ModuleType) -> None:
        """Mark each module's forward by its class, down to the depth of blocks."""
        hooks, marks = torch.nn.modules.module, list[Any]()
        depth = 0  # below the root module, whose forward has begun when the hooks are set

        def enter(module: object, _: object) -> None:
            nonlocal depth
            self._end_step()  # a step that ends here ends before the mark begins
            depth, mark = depth + 1, None
            if depth <= MOST_DEPTH and self._profiler is not None:
                mark = torch.profiler.record_function(f"nn.Module: {type(module).__name__}_{depth}")
                mark.__enter__()
            marks.append(mark)

        def leave(*_: object) -> None:
            nonlocal depth
            depth -= 1
            if marks and (mark := marks.pop()) is not None:
                mark.__exit__(None, None, None)

        self._module_hooks = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ]

    def _close_window(self) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        for hook in self._module_hooks:
            hook.remove()
        profiler.stop()
        self._write_steps()

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", 0))

    def _path(self, folder: str) -> str:
        """Return the path of this rank's file in *folder*, which is made."""
        place = os.path.join(self.folder, folder)
        os.makedirs(place, exist_ok=True)
        return os.path.join(place, f"rank{self.rank:05d}.json")

    def _write_steps(self) -> None:
        import torch

        facts = {
            "rank": self.rank,
            "world": int(os.environ.get("WORLD_SIZE", 1)),
            "host": os.uname().nodename,
            "ahead_s": self._offset_s,
            "window": [self.skip, self.steps],
            "step_ends_s": self._step_ends_s,
            "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0,
            "collectives": self._calls,
        }
        write_file(self._path(STEPS), json.dumps(facts).encode())

    def _write_flight_recorder(self) -> None:
        """Write what PyTorch's flight recorder holds, where it is on (torch 2.13 renamed the function)."""
        if not os.environ.get("STEPCAST_RECORD_FLIGHT"):
            return
        try:
            import torch._C._distributed_c10d as native

            text = (getattr(native, "_dump_fr_trace_json", None) or native._dump_nccl_trace_json)()
        except Exception:  # a job must not end because it is watched
            return
        write_file(self._path(FLIGHT), text if isinstance(text, bytes) else text.encode())


@contextmanager
def record(folder: str, skip: int = 5, steps: int = 3) -> Iterator[Recorder]:
    """Record the training steps within the block: *steps* in full after the first *skip*."""
    load_torch("record")
    recorder = Recorder(folder, skip, steps).start()
    try:
        yield recorder
    finally:
        recorder.stop()


def _now_s() -> float:
    """Return the time of day in seconds, by a clock that no adjustment of the host's clock moves while the job runs."""
    return CLOCK_START_S + time.perf_counter()


def _clock_offset_s(dist: ModuleType, barrier: Callable[[], object]) -> float:
    """Return the seconds by which this rank's clock is ahead of rank 0's: times right after the same barriers."""
    try:
        times = []
        for _ in range(OFFSET_ROUNDS):
            barrier()
            times.append(_now_s())
        everyone: list[list[float]] = [[]] * dist.get_world_size()
        dist.all_gather_object(everyone, times)
        ahead = sorted(own - first for own, first in zip(times, everyone[0], strict=True))
        return ahead[len(ahead) // 2]
    except Exception:  # a job must not end because it is watched
        return 0.0


def _tensor_bytes(value: Any) -> int:
    if hasattr(value, "element_size"):
        return int(value.numel() * value.element_size())
    return sum(map(_tensor_bytes, value)) if isinstance(value, list | tuple) else 0
