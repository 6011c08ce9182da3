"""The CPU's time for each operator of a traced step, counted in launches of a kernel.

Microseconds of single calls are measured where many other calls run in between, and where a loop repeats the call
(tools/measure_calls.py, data/fits/calls.toml).
"""

import math

from stepcast.hardware.catalog import load_fit
from stepcast.ir.recurrent import RecurrentCells
from stepcast.pytorch.capture.emulation import RecurrentSizes
from stepcast.pytorch.capture.kernels import MEASURED, Works
from stepcast.pytorch.capture.tracer import LISTED, PRODUCTS, RECURRENT, Event, StepTrace

TIMES = load_fit("calls")
STEP = TIMES["step"]
FORWARD, BACKWARD = "forward", "backward"
LAUNCH_US = 1e6 * load_fit("captured")["dispatch"]["light_s"]


class RecentCalls:
    """Kinds of calls in the order in which the CPU ran them last, by which the code of a call is in its caches or not.

    The more other kinds ran since the last call of a kind, the more of its code has to be loaded again.
    """

    def __init__(self) -> None:
        self._kinds: list[tuple[str, str]] = []

    def time_us(self, phase: str, name: str, launches: bool = True) -> float:
        """Return the microseconds of a call, which may be of an operator that was not measured itself."""
        kind, others = (phase, name), len(self._kinds)
        if kind in self._kinds:
            others -= 1 + self._kinds.index(kind)
            self._kinds.remove(kind)
        self._kinds.append(kind)
        us, repeated_us = TIMES[phase].get(name) or TIMES[phase]["kernel" if launches else "view"]
        return float(us - (us - repeated_us) * math.exp(-others / STEP["cached_kinds"]))


def count_calls(trace: StepTrace, works: dict[int, Works]) -> list[float]:
    """Return the CPU's launches for each event with what runs before it: modules, autograd's engine, optimizers."""
    gradients = [event for event in trace.events if event.is_backward]
    nodes = sum(event.nodes for event in trace.events if not event.recomputed)
    engine_us = nodes * STEP["node"] + len(trace.gradients) * STEP["accumulated"]
    node_us = engine_us / max(1, len(gradients))  # some nodes pass gradients on and run no operator
    recent, counted = RecentCalls(), list[float]()
    for _ in range(2):  # the second time as in any later step
        counted = []
        for number, event in enumerate(trace.events):
            us = sum(recent.time_us(FORWARD, kind) for kind in event.called)
            us += STEP["backward"] if event.begins_backward else 0.0
            us += STEP["update"] + STEP["updated"] * event.updated if event.updated is not None else 0.0
            counted.append((us + _time_event(event, works[number], recent, node_us)) / LAUNCH_US)
    return counted


def _time_event(event: Event, works: Works, recent: RecentCalls, node_us: float) -> float:
    if event.name.startswith(LISTED):
        length = max((size for size in event.options if isinstance(size, int)), default=1)
        tensor_us = STEP["fused" if event.name.startswith("_fused") else "listed"]
        return float(STEP["list"] + length * tensor_us)
    if event.name in RECURRENT:
        sizes = RecurrentSizes(*(option for option in event.options if isinstance(option, int)))
        launched = sum(work.steps for work in works if isinstance(work, RecurrentCells) and not work.is_persistent)
        call_us, layer_us, step_us = STEP[event.name]
        layers = sizes.layers * sizes.directions
        return float(call_us + layer_us * layers + step_us * launched + node_us * event.is_backward)
    phase = BACKWARD if event.is_backward else FORWARD
    name = f"{event.name} sorted" if len(works) > MEASURED["sort_kernels"] else event.name
    us = recent.time_us(phase, name if name in TIMES[phase] else event.name, bool(works))
    if event.is_backward:
        us += node_us
    elif not event.nodes:
        us *= STEP["without_node"]
    if event.name in PRODUCTS:  # copies of operands, each an operator of its own
        us += LAUNCH_US * max(0, len(works) - 1)
    elif event.name not in TIMES[phase]:
        us += STEP["further"] * max(0, len(works) - 1)
    return us
