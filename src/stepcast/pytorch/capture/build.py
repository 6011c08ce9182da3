"""Build a Captured from a traced step: layers in the order of the forward, with repeats folded by what they run.

The CPU's time for each operator is counted in launches of a kernel. Microseconds of single calls are measured where
many other calls run in between, and where a loop repeats the call (tools/measure_calls.py, data/fits/calls.toml).
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from stepcast.cost.memory.allocator import CachingAllocator
from stepcast.hardware.catalog import load_fit
from stepcast.ir.captured import Captured, CapturedMemory, LayerPart, ShardUnit, count_flops, is_product
from stepcast.ir.recurrent import RecurrentCells
from stepcast.ir.types import DType
from stepcast.ir.work import Elementwise, ElementwiseKind
from stepcast.ir.workload import Block, Layer, Op, Role, Stage, Workload, find_patterns
from stepcast.pytorch.capture.compiled import Fusion
from stepcast.pytorch.capture.emulation import CALLS, FIT, MEASURED, RecurrentSizes
from stepcast.pytorch.capture.kernels import Works, works_of
from stepcast.pytorch.capture.splits import Splits, find_splits
from stepcast.pytorch.capture.tracer import LISTED, PRODUCTS, RECURRENT, Event, Moment, StepTrace

DISPATCH, TIMES = FIT["dispatch"], load_fit("calls")
STEP, LAUNCH_US = TIMES["step"], 1e6 * DISPATCH["light_s"]


class HostedEvent(NamedTuple):
    """An operator as the host sees it: its kernels, whether it waits for them, and its time in kernels to issue."""

    name: str
    works: Works
    host_waits: bool = False
    calls: float = 1.0


def build_captured(
    trace: StepTrace, *, name: str, tokens: int, batch: int, precision: str, facts: Iterable[tuple[str, str]],
    compiled: bool = False, warnings: tuple[str, ...] = (),
) -> Captured:  # fmt: skip
    """Return the program of *trace*; *compiled* joins kernels as torch.compile does."""
    splits = find_splits(trace)
    works = {number: works_of(event) for number, event in enumerate(trace.events)}
    if compiled:
        fusion = Fusion(trace)
        works |= dict.fromkeys(fusion.joined, ()) | fusion.works
    segments = _Segments(trace, works, splits, compiled)
    layers, parts = segments.layers(), segments.parts()
    remaining = [place for place, layer in enumerate(layers) if layer.all_ops or parts[place].parameters]
    optimizer = Layer(str(Role.OPTIMIZER), _update_ops(trace, segments.host_waits, segments.calls), role=Role.OPTIMIZER)
    body_layers = [layers[place] for place in remaining]
    patterns = find_patterns(list(map(id, body_layers)), len(body_layers), shortest=True)
    body = tuple(Block(tuple(body_layers[start:end]), times) for start, end, times in patterns)
    stage = Stage(body, epilogue=(optimizer,) if optimizer.forward else ())
    flops = count_flops(stage)  # the format of most of them is that of the step
    workload = Workload((stage,), name=name, source="captured", warnings=warnings)
    return Captured(
        workload, parts=tuple(_join_parts(parts, remaining)), memory=_peak_memory(trace), tokens=tokens, batch=batch,
        parameters=sum(trace.parameters.values()),
        precision=max(flops, key=lambda dtype: flops[dtype], default=DType(precision)), compiled=compiled,
        facts=tuple(facts), units=tuple(segments.units(remaining)),
        recomputed_flops=sum(
            work.flops
            for number, event in enumerate(trace.events) if event.recomputed
            for work in works[number] if is_product(work)
        ),
        ties=splits.ties_of(segments.readers(), {place: number for number, place in enumerate(remaining)}, trace),
    )  # fmt: skip


def _join_parts(parts: Sequence[LayerPart], remaining: Sequence[int]) -> Iterator[LayerPart]:
    """Yield the parts of the *remaining* layers, each with the saved activations and the peaks of the layers before it
    that are left out because their operators are joined with others' (the last also with those that follow).
    """
    starts = [0, *(place + 1 for place in remaining[:-1])]
    for place, start, end in zip(remaining, starts, [*starts[1:], len(parts)], strict=False):
        held = split = 0
        forward, backward = (0, 0), (0, 0)
        for part in parts[start:end]:
            forward = max(forward, (held + part.forward_peak_bytes, split + part.split_forward_bytes))
            backward = max(backward, (held + part.backward_peak_bytes, split + part.split_backward_bytes))
            held, split = held + part.kept_bytes, split + part.split_kept_bytes
        yield replace(
            parts[place], kept_bytes=held, forward_peak_bytes=forward[0], backward_peak_bytes=backward[0],
            split_kept_bytes=split, split_forward_bytes=forward[1], split_backward_bytes=backward[1],
        )  # fmt: skip


def _place_events(trace: StepTrace) -> list[int]:
    """Return for each event the segment it belongs to, a run of one module's forward; -1 for the optimizer."""
    places: list[int] = []
    forwards: dict[str, list[int]] = defaultdict(list)  # events of a module's forward, in order
    recomputed: dict[str, int] = defaultdict(int)
    last_module, segment = None, -1
    for number, event in enumerate(trace.events):
        own, place = forwards[event.module], -1
        if event.moment is Moment.FORWARD:
            segment += event.module != last_module
            last_module, place = event.module, segment
            own.append(number)
        elif event.recomputed and event.moment is Moment.BACKWARD:
            index = min(recomputed[event.module], len(own) - 1)
            recomputed[event.module] += 1
            place = places[own[index]] if own else segment
        elif event.moment is Moment.BACKWARD:
            by_module = places[own[-1]] if own else max(segment, 0)
            place = places[event.source] if 0 <= event.source < number else by_module
        places.append(place)
    return places


class _Segments:
    """The operators and the memory of each segment."""

    def __init__(self, trace: StepTrace, works: dict[int, Works], splits: Splits, compiled: bool) -> None:
        self._trace, self._works, self._splits, self._compiled = trace, works, splits, compiled
        self.calls = count_calls(trace, works)
        self._places = _place_events(trace)
        self._count = max(self._places, default=-1) + 1
        # The events of each segment: forward, gradients of inputs, gradients of weights.
        self._events: list[tuple[list[int], ...]] = [([], [], []) for _ in range(self._count)]
        for number, (event, place) in enumerate(zip(trace.events, self._places, strict=True)):
            if place >= 0:
                is_gradient = any(trace.storages[tensor.storage].role == "gradients" for tensor in event.writes)
                phase = 0 if event.moment is Moment.FORWARD else 2 if is_gradient and not event.recomputed else 1
                self._events[place][phase].append(number)
        # For each wait of the host, the last event before it that runs a kernel.
        self.host_waits, last = set[int](), None
        for number in works if trace.host_waits else ():
            last = number if works[number] else last
            if number in trace.host_waits and last is not None:
                self.host_waits.add(last)

    def _name_ops(self, numbers: Sequence[int], spent: float) -> tuple[tuple[Op, ...], float]:
        hosted = list[HostedEvent]()
        for number in numbers:
            event, works = self._trace.events[number], self._works[number]
            calls = self.calls[number] + event.host_calls
            if self._compiled and number not in self._trace.uncompiled:  # kernels after the first take little
                calls = CALLS["compiled"] * (1.0 + CALLS["further"] * (len(works) - 1)) if works else 0.0
            hosted.append(HostedEvent(event.name, works, number in self.host_waits, calls))
        return name_ops(hosted, spent)

    def layers(self) -> list[Layer]:
        """Return the layer of each segment; layers that run the same are one object, whatever their names.

        The CPU's time for the same calls differs, by what it ran before them: each of these layers takes the mean.
        """
        places_by_ops: dict[tuple[tuple[int, int], tuple[Op, ...]], list[int]] = defaultdict(list)
        segments = list[tuple[Op, ...]]()  # forward, gradients of inputs and of weights, one after another
        before = after = 0.0  # spent by the host in segments without kernels, forward and backward: the next one waits
        for place, phases in enumerate(self._events):
            forward, before = self._name_ops(phases[0], before)
            weights, after = self._name_ops(phases[2], after)
            inputs, after = self._name_ops(phases[1], after)
            segments.append((*forward, *inputs, *weights))
            ends = len(forward), len(forward) + len(inputs)
            places_by_ops[ends, tuple(replace(op, kernels=0) for op in segments[-1])].append(place)
        layers: dict[int, Layer] = {}
        for ((first, second), _), places in places_by_ops.items():
            ops = [
                replace(same[0], kernels=round(sum(op.kernels for op in same) / len(same), 2))
                for same in zip(*(segments[place] for place in places), strict=True)
            ]
            phases = self._events[places[0]]
            module = self._trace.events[phases[0][0]].module if phases[0] else ""
            # Indices into lists of modules are left open.
            name = ".".join("*" if word.isdigit() else word for word in module.split(".")) or "model"
            layer = Layer(name, tuple(ops[:first]), tuple(ops[first:second]), tuple(ops[second:]))
            layers |= dict.fromkeys(places, layer)
        return [layers[place] for place in range(self._count)]

    def parts(self) -> list[LayerPart]:
        trace, places, shared = self._trace, self._places, self._splits.shared
        end = max((number for number, event in enumerate(trace.events, 1) if event.moment is Moment.FORWARD), default=0)
        first: dict[int, int] = {}  # segment that makes a storage
        last: dict[int, int] = {}  # last segment that reads it
        computed = {number for number, storage in enumerate(trace.storages) if storage.role == "parameters"}
        for event, place in zip(trace.events, places, strict=True):
            if event.moment is Moment.FORWARD:
                reads, writes = ([tensor.storage for tensor in side] for side in (event.reads, event.writes))
                last |= dict.fromkeys(reads, place)
                for written in writes:
                    first.setdefault(written, place)
                computed.update(writes if not computed.isdisjoint(reads) else ())
        saved, split_saved = [0] * (self._count + 1), [0] * (self._count + 1)
        crossing = [0] * (self._count + 2)  # changes of the bytes that cross into a segment
        for number, place in first.items():
            storage = trace.storages[number]
            if storage.role != "activations":
                continue
            if storage.created <= end and (storage.freed is None or storage.freed > end):
                saved[place] += storage.size_bytes
                split_saved[place] += storage.size_bytes if number in shared else 0
            if number in computed:
                crossing[place + 1] += storage.size_bytes
                crossing[last.get(number, place) + 1] -= storage.size_bytes
        sent = list(accumulate(crossing))
        owned, peaks = self._owned_parameters(), self._peaks(saved, split_saved)
        forward, backward = peaks[Moment.FORWARD], peaks[Moment.BACKWARD]
        return [
            LayerPart(
                **owned.get(place, {}), kept_bytes=saved[place], split_kept_bytes=split_saved[place],
                forward_peak_bytes=forward[place][0], split_forward_bytes=forward[place][1],
                backward_peak_bytes=backward[place][0], split_backward_bytes=backward[place][1],
                sent_bytes=sent[place] if place else 0, split=self._split(place),
            )
            for place in range(self._count)
        ]  # fmt: skip

    def units(self, remaining: Sequence[int]) -> Iterator[ShardUnit]:
        """Yield the units that the script shards, in places of *remaining*."""
        names = [f"{self._trace.events[phases[0][0]].module}." if phases[0] else "" for phases in self._events]
        for unit in self._trace.units:
            prefixes = tuple(f"{name}." if name else "" for name in unit.names)
            places = [place for place, name in enumerate(names) if name.startswith(prefixes)]
            if places and remaining:
                first = min(bisect_left(remaining, places[0]), len(remaining) - 1)
                last = max(first, bisect_right(remaining, places[-1]) - 1)
                yield ShardUnit(first, last, unit.gathered_bytes, unit.reduced_bytes, unit.is_freed)

    def _peaks(self, saved: Sequence[int], split_saved: Sequence[int]) -> dict[Moment, list[tuple[int, int]]]:
        """Return the most bytes of each segment beyond those saved before it, and of these those that are split."""
        shared = self._splits.shared
        activations = held_over_time(self._trace, lambda number, role: role == "activations")
        split = held_over_time(self._trace, lambda number, role: role == "activations" and number in shared)
        before, split_before = [0, *accumulate(saved)], [0, *accumulate(split_saved)]
        peaks = {moment: [(0, 0)] * self._count for moment in (Moment.FORWARD, Moment.BACKWARD)}
        for number, place in enumerate(self._places):
            if place >= 0:
                held = max(0, activations[number] - before[place])
                split_held = min(held, max(0, split[number] - split_before[place]))
                own = peaks[self._trace.events[number].moment]
                own[place] = max(own[place], (held, split_held))
        return peaks

    def _split(self, place: int) -> str:
        counts = {number: len(self._works[number]) for phase in self._events[place] for number in phase}
        letters = [self._splits.letters_of(phase, counts) for phase in self._events[place]]
        return "|".join(letters) if any(letters) else ""

    def readers(self) -> dict[int, list[int]]:
        """Return for each parameter's storage the segments whose forward reads it, in order."""
        readers: dict[int, dict[int, None]] = {storage: {} for storage in self._trace.parameters}
        for event, place in zip(self._trace.events, self._places, strict=True):
            for tensor in event.reads if event.moment is Moment.FORWARD else ():
                readers.get(tensor.storage, {})[place] = None
        return {storage: [*places] for storage, places in readers.items()}

    def _owned_parameters(self) -> dict[int, dict[str, int]]:
        """Return the parameters of each segment: it owns those that it reads first, segment 0 those never read."""
        readers, storages = self.readers(), self._trace.storages
        owned: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for storage, count in self._trace.parameters.items():
            own, size = owned[min(readers[storage], default=0)], storages[storage].size_bytes
            own["parameters"] += count
            own["parameter_bytes"] += size
            own["split_bytes"] += size if storage in self._splits.shared else 0
            gradient = self._trace.gradients.get(storage)
            own["gradient_bytes"] += 0 if gradient is None else storages[gradient].size_bytes
            own["reduced_bytes"] += self._trace.reduced.get(storage, 0)
        return owned


def name_ops(events: Iterable[HostedEvent], spent: float = 0.0) -> tuple[tuple[Op, ...], float]:
    """Return the kernels of events as ops, and what the host has *spent* before and among them if there are none.

    The host spends its time by the event, and what it runs before a kernel, views and modules, counts as kernels that
    it could have issued.
    """
    counts: dict[str, int] = defaultdict(int)
    ops: list[Op] = []
    for event in events:
        name = event.name.strip("_")
        spent += 0.0 if event.works else event.calls
        for work in event.works:
            counts[name] += 1
            spent += event.calls / len(event.works)
            ops.append(Op(name if counts[name] == 1 else f"{name} {counts[name]}", work, kernels=round(spent, 2)))
            spent = 0.0
        if event.host_waits and ops:  # the value that it reads is copied to it
            ops[-1] = replace(ops[-1], host_reads=True, kernels=ops[-1].kernels + 1)
    if ops and spent:
        ops[-1] = replace(ops[-1], kernels=round(ops[-1].kernels + spent, 2))
    return tuple(ops), 0.0 if ops else spent


def _update_ops(trace: StepTrace, host_waits: Container[int], calls: Sequence[float]) -> tuple[Op, ...]:
    """Return the ops of the optimizer; *calls* has the CPU's time of each event."""
    others, timed = list[HostedEvent](), list[tuple[int, int, Elementwise]]()
    for number, event in enumerate(trace.events):
        works = works_of(event) if event.moment is Moment.OPTIMIZER else ()
        if event.moment is Moment.OPTIMIZER and not event.name.startswith(LISTED):
            others.append(HostedEvent(event.name, works, number in host_waits, calls[number]))
        elif works and isinstance(works[0], Elementwise):
            length = max(event.options, default=1)
            timed.append((number, length, works[0]))
    ops, _ = name_ops(others)
    passes = [(length, work) for _, length, work in timed if work.kind is ElementwiseKind.LISTED_OPTIMIZER]
    total = sum(length for length, _ in passes)
    columns = max(1, round(sum(work.elements for _, work in passes) / MEASURED["listed_passes"]))
    read, written = sum(work.read_bytes for _, work in passes), sum(work.write_bytes for _, work in passes)
    # The host launches them one by one, and the GPU begins with the first.
    updates = list[Op]()
    for number, length, work in timed:
        is_listed = work.kind is ElementwiseKind.LISTED_OPTIMIZER
        issued = calls[number] * DISPATCH["light_s"] / DISPATCH["listed_update_s" if is_listed else "update_s"]
        if is_listed:
            share = length / total
            work = replace(work, columns=max(1, round(columns * share)), read_bytes=read * share,
                           write_bytes=written * share)  # fmt: skip
        name = f"update {len(updates) + 1}" if updates else "update"
        updates.append(Op(name, work, kernels=round(issued, 2), host_reads=number in host_waits))
    return (*ops, *updates)


def held_over_time(trace: StepTrace, counts: Callable[[int, str], bool]) -> list[int]:
    """Return the bytes in memory during each event, of the storages whose number and role *counts*."""
    events = len(trace.events)
    changes = [0] * (events + 2)
    for number, storage in enumerate(trace.storages):
        if counts(number, storage.role):
            changes[min(storage.created, events)] += storage.size_bytes
            if storage.freed is not None:
                changes[min(storage.freed, events + 1)] -= storage.size_bytes
    return list(accumulate(changes[:events]))


def _peak_memory(trace: StepTrace) -> CapturedMemory:
    """Return the bytes of each role at the event with the most memory."""
    events = trace.events
    end = max((number for number, event in enumerate(events, 1) if event.moment is Moment.FORWARD), default=0)
    held = held_over_time(trace, lambda number, role: True)
    fullest = held.index(max(held)) if held else 0
    roles: dict[str, int] = defaultdict(int)
    for storage in trace.storages:
        if storage.created > fullest or (storage.freed is not None and storage.freed <= fullest):
            continue
        role = "parameters" if storage.role == "buffers" else storage.role
        if role == "activations" and (storage.created >= end or (storage.freed or len(events)) <= end):
            role = "temporary"
        roles[role] += storage.size_bytes
    activations = held_over_time(trace, lambda number, role: role == "activations")
    updates = [activations[number] for number, event in enumerate(events) if event.moment is Moment.OPTIMIZER]
    gradients = sum(trace.storages[number].size_bytes for number in set(trace.gradients.values()))
    memory = CapturedMemory(**roles, all_gradients=gradients, update=max(updates, default=0))
    return replace(memory, unused=max(0, reserve_bytes(trace) - memory.peak))


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
            us = sum(recent.time_us("forward", kind) for kind in event.called)
            us += STEP["backward"] if event.begins_backward else 0.0
            us += STEP["update"] + STEP["updated"] * event.updated if event.updated is not None else 0.0
            counted.append((us + _time_event(event, works[number], recent, node_us)) / LAUNCH_US)
    return counted


def _time_event(event: Event, works: Works, recent: RecentCalls, node_us: float) -> float:
    if event.name.startswith(LISTED):
        length = max(event.options, default=1)
        return float(STEP["list"] + length * STEP["fused" if event.name.startswith("_fused") else "listed"])
    if event.name in RECURRENT:
        sizes = RecurrentSizes(*event.options)
        launched = sum(work.steps for work in works if isinstance(work, RecurrentCells) and not work.is_persistent)
        call_us, layer_us, step_us = STEP[event.name]
        layers = sizes.layers * sizes.directions
        return float(call_us + layer_us * layers + step_us * launched + node_us * event.is_backward)
    phase = "backward" if event.is_backward else "forward"
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


def reserve_bytes(trace: StepTrace) -> int:
    """Return the bytes that the allocator reserves for *trace*, without the buffers of cuBLAS.

    Optimizer states are allocated at the end of the first step, in blocks that its activations left; the activations
    of the second step then need blocks elsewhere.
    """
    replay = _Replay(trace)
    for number in range(MEASURED["replayed_steps"]):
        replay.run_step(is_first=number == 0)
    return replay.memory.peak_reserved - replay.buffers


class _Replay:
    """The storages of a step by when they are made and freed, and the blocks that hold them."""

    def __init__(self, trace: StepTrace) -> None:
        self.memory, self.buffers = CachingAllocator(), 0
        self._storages = trace.storages
        moments = [event.moment for event in trace.events]
        self._ticks = len(moments) + 2
        backwards = [tick for tick, moment in enumerate(moments) if moment is Moment.BACKWARD]
        # A program lets go of the results of its last step when it has those of the next.
        self._released = {tick for tick in backwards if moments[tick - 1] is not Moment.BACKWARD} | {self._ticks - 1}
        updates = (tick for tick in range(max(backwards, default=0), len(moments)) if moments[tick] == Moment.OPTIMIZER)
        self._update = next(updates, self._ticks - 1)
        # The first product of each thread.
        products = [tick for tick, event in enumerate(trace.events) if event.name in PRODUCTS]
        threads = {moments[tick] is Moment.BACKWARD: tick for tick in reversed(products)}
        self._products = set(threads.values())
        self._created, self._freed = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        # Sizes of what the last step left and this one frees: gradients, and graphs that a later backward uses.
        self._stale = defaultdict[int, list[int]](list)
        self._states = list[int]()
        self._blocks = dict[int, int]()
        self._left, self._old = defaultdict[int, list[int]](list), list[int]()
        written = {tensor.storage for event in trace.events for tensor in event.writes}
        for number, storage in enumerate(trace.storages):
            if not storage.size_bytes:
                continue
            role, freed, is_carried = storage.role, storage.freed, storage.is_carried
            is_input = freed is None and (is_carried or number not in written)
            if role in ("parameters", "buffers") or (role == "activations" and is_input):
                self._make(number)
            elif role == "optimizer":
                self._states.append(number)
            elif freed is not None and (is_carried or (role == "gradients" and not storage.created)):
                self._stale[freed].append(storage.size_bytes)
            elif freed != 0:
                self._created[min(storage.created, self._ticks - 1)].append(number)
                if freed is not None:
                    self._freed[min(freed, self._ticks - 1)].append(number)

    def _make(self, number: int) -> None:
        if number in self._blocks:
            self._old.append(self._blocks[number])
        self._blocks[number] = self.memory.allocate(self._storages[number].size_bytes)

    def _free(self, numbers: Iterable[int]) -> None:
        for number in filter(self._blocks.__contains__, numbers):
            self.memory.free(self._blocks.pop(number))

    def run_step(self, is_first: bool) -> None:
        """Allocate and free the storages of one step; the first also makes what stays."""
        for tick in range(self._ticks):
            self._free(number for number in self._freed[tick] if self._storages[number].created < tick)
            for size in self._stale[tick]:
                if self._left[size]:
                    self.memory.free(self._left[size].pop(0))
            if tick in self._released:
                for block in self._old:
                    self.memory.free(block)
                self._old.clear()
            if is_first and tick == self._update:
                for number in self._states:
                    self._make(number)
            for number in self._created[tick]:
                if not (self._storages[number].role == "gradients" and not tick and number in self._blocks):
                    self._make(number)
                    if self._storages[number].freed == tick:  # by the operator itself, before it makes the next
                        self._free((number,))
            if is_first and tick in self._products:
                self.memory.allocate(MEASURED["product_buffer"])
                self.buffers += MEASURED["product_buffer"]
            self._free(number for number in self._freed[tick] if self._storages[number].created >= tick)
        expected = Counter(size for sizes in self._stale.values() for size in sizes)
        for number, storage in enumerate(self._storages):
            is_left = storage.role in ("gradients", "activations") and storage.freed is None and storage.created
            left = self._left[storage.size_bytes]
            if is_left and number in self._blocks and len(left) < expected[storage.size_bytes]:
                left.append(self._blocks.pop(number))
