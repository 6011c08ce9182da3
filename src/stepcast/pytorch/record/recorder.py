"""Records one rank: a profiler over a window of steps, boundaries and memory of all others.

A step ends with the optimizer's. Within the window PyTorch's profiler writes a trace (operators, kernels,
collectives, with each module's forward marked); outside of it a step costs one look at the clock.
"""

import atexit
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from stepcast.inputs.recorded import FLIGHT, STEPS
from stepcast.pytorch.load import load_torch

MOST_DEPTH = 4  # of modules whose forward is marked: deeper ones are operators by themselves
OFFSET_ROUNDS = 5
COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single", "broadcast", "reduce", "barrier", "send", "recv", "isend", "irecv"),
)
MOST_KEPT = 100_000  # collectives that are written down


@dataclass(frozen=True)
class RecordingWindow:
    """Steps that go by before the profiler starts, and steps that it sees."""

    skip: int = 5
    steps: int = 3


@dataclass
class Recorder:
    """One process of a job."""

    folder: str
    window: RecordingWindow = field(default_factory=RecordingWindow)

    def __post_init__(self) -> None:
        self._ends: list[float] = []
        self._peaks: list[int] = []
        self._messages: list[tuple[float, float, str, int, tuple[int, ...]]] = []
        self._profiler: Any = None
        self._hooks: list[Any] = []
        self._offset_s = 0.0
        self._kept: dict[str, Any] = {}
        self._began_s = time.time()
        self._optimizer: int | None = None
        self._pending: Any = None

    def start(self) -> "Recorder":
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._hooks.append(register_optimizer_step_post_hook(self._stepped))
        atexit.register(self.stop)
        return self

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        """An optimizer has stepped; the step ends when the next forward begins, with what lies between."""
        if self._optimizer is None:
            self._optimizer = id(optimizer)
            self._first_step()
        if self._optimizer != id(optimizer):  # of several optimizers the first ends the step
            return
        self._ended()
        from torch.nn.modules.module import register_module_forward_pre_hook

        # Here the profiler is within a mark of the optimizer, which would last as long as writing a trace.
        self._pending = register_module_forward_pre_hook(lambda *_: self._ended())

    def _ended(self) -> None:
        """The boundary after a step, unless it was told already."""
        if self._pending is None:
            return
        self._pending.remove()
        self._pending = None
        self._ends.append(time.time())
        number = len(self._ends)
        if self._profiler is not None:
            self._profiler.step()
        if number == self.window.skip:
            self._open()
        elif number == self.window.skip + self.window.steps + 1:
            self._close()

    def _first_step(self) -> None:
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            self._wrap(dist)
            self._offset_s = self._offset(dist)

    # ---- messages -------------------------------------------------------------------------------------

    def _wrap(self, dist: Any) -> None:
        """Calls of torch.distributed, with group and bytes; what C++ issues is in the profiler's trace."""
        for name in COLLECTIVES:
            call = getattr(dist, name, None)
            if call is not None:
                self._kept[name] = call
                setattr(dist, name, self._noted(name, call, dist))

    def _noted(self, name: str, call: Any, dist: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            begin = time.time()
            found = call(*args, **kwargs)
            if len(self._messages) < MOST_KEPT:
                group = kwargs.get("group")
                ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
                size = sum(_bytes(each) for each in args)
                self._messages.append((begin, time.time(), name, size, ranks))
            return found

        return noted

    def _offset(self, dist: Any) -> float:
        """Seconds that this rank's clock is ahead of rank 0's: stamps right after the same barriers."""
        try:
            stamps = []
            for _ in range(OFFSET_ROUNDS):
                self._kept["barrier"]()
                stamps.append(time.time())
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, stamps)
            ahead = sorted(mine - first for mine, first in zip(stamps, everyone[0], strict=True))
            return float(ahead[len(ahead) // 2])
        except Exception:  # a job must not end because it is watched
            return 0.0

    # ---- the window -----------------------------------------------------------------------------------

    def _open(self) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile, schedule

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.reset_peak_memory_stats()
        self._profiler = profile(
            activities=activities,
            record_shapes=True,
            schedule=schedule(wait=0, warmup=1, active=self.window.steps, repeat=1),
            on_trace_ready=self._write_trace,
        )
        self._profiler.start()
        self._mark_modules(torch)

    def _mark_modules(self, torch: Any) -> None:
        """Each module's forward by its class, as deep as blocks lie."""
        hooks, depth, open_marks = torch.nn.modules.module, [0], []

        def enter(module: Any, _: Any) -> None:
            self._ended()  # a step that ends here ends before the mark begins
            depth[0] += 1
            mark = None
            if depth[0] <= MOST_DEPTH and self._profiler is not None:
                mark = torch.profiler.record_function(f"nn.Module: {type(module).__name__}_{depth[0]}")
                mark.__enter__()
            open_marks.append(mark)

        def leave(*_: Any) -> None:
            depth[0] -= 1
            if open_marks and (mark := open_marks.pop()) is not None:
                mark.__exit__(None, None, None)

        self._modules = [
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ]

    def _close(self) -> None:
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        for hook in self._modules:
            hook.remove()
        profiler.stop()
        self._write_steps()

    # ---- what is left behind --------------------------------------------------------------------------

    def _write_trace(self, profiler: Any) -> None:
        os.makedirs(self.folder, exist_ok=True)
        profiler.export_chrome_trace(os.path.join(self.folder, f"rank{self.rank:05d}.json"))

    @property
    def rank(self) -> int:
        return int(os.environ.get("RANK", 0))

    def stop(self) -> None:
        """Writes what there is; called at the end of the process."""
        self._ended()
        if not self._ends:
            return
        self._close()
        self._write_steps()
        self._write_flight()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        atexit.unregister(self.stop)

    def _write_steps(self) -> None:
        import torch

        on_gpu = torch.cuda.is_available()
        found = {
            "rank": self.rank,
            "world": int(os.environ.get("WORLD_SIZE", 1)),
            "host": os.uname().nodename,
            "ahead_s": self._offset_s,
            "window": [self.window.skip, self.window.steps],
            "step_ends_s": self._ends,
            "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
            "collectives": [
                {"start_s": begin, "end_s": end, "name": name, "bytes": size, "ranks": ranks}
                for begin, end, name, size, ranks in self._messages
            ],
        }
        folder = os.path.join(self.folder, STEPS)
        os.makedirs(folder, exist_ok=True)
        from stepcast.outputs.files import write_file

        write_file(os.path.join(folder, f"rank{self.rank:05d}.json"), json.dumps(found).encode())

    def _write_flight(self) -> None:
        """What PyTorch's flight recorder still holds, where it is on (torch 2.13 names it otherwise)."""
        if not os.environ.get("STEPCAST_RECORD_FLIGHT"):
            return
        try:
            import torch._C._distributed_c10d as native

            dump = getattr(native, "_dump_fr_trace_json", None) or native._dump_nccl_trace_json
            held = dump()
        except Exception:  # a job must not end because it is watched
            return
        from stepcast.outputs.files import write_file

        folder = os.path.join(self.folder, FLIGHT)
        os.makedirs(folder, exist_ok=True)
        data = held if isinstance(held, bytes) else held.encode()
        write_file(os.path.join(folder, f"rank{self.rank:05d}.json"), data)


@contextmanager
def record(folder: str, skip: int = 5, steps: int = 3) -> Iterator[Recorder]:
    """Record the training steps within the block: *steps* in full after the first *skip*."""
    load_torch("record")
    recorder = Recorder(folder, RecordingWindow(skip, steps)).start()
    try:
        yield recorder
    finally:
        recorder.stop()


def _bytes(value: Any) -> int:
    if hasattr(value, "element_size"):
        return int(value.numel() * value.element_size())
    if isinstance(value, list | tuple):
        return sum(_bytes(each) for each in value)
    return 0
