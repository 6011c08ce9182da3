"""A traced step as a Captured: layers in the order of the forward, repeats found by what they do."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from stepcast.ir.captured import Captured, CapturedMemory, LayerPart
from stepcast.ir.dtype import DType
from stepcast.ir.work import Attention, Compute, Elementwise, ElementwiseKind, GroupedMatmul, Matmul
from stepcast.ir.workload import Block, Layer, Op, Role, Stage, Workload
from stepcast.pytorch.capture.events import Event, Moment, StepTrace
from stepcast.pytorch.capture.fuse import Fusion
from stepcast.pytorch.capture.kernels import works_of
from stepcast.pytorch.capture.splits import Splits, letters_of, splits_of
from stepcast.pytorch.capture.ties import ties_of

LISTED = ("_foreach_", "_fused_adam", "_fused_sgd")
SHORTEST_REPEAT = 2
# Kernels of AdamW over all weights, whose instructions ``LISTED_OPTIMIZER`` counts as one.
LISTED_PASSES = 8
Works = Callable[[Event], tuple[Compute, ...]]


def captured(
    trace: StepTrace,
    *,
    name: str,
    tokens: int,
    batch: int,
    precision: str,
    facts: Iterable[tuple[str, str]],
    compiled: bool = False,
) -> Captured:
    """The program of *trace*; *compiled* joins kernels as torch.compile does."""
    works: Works = works_of
    splits = splits_of(trace)
    if compiled:
        fusion = Fusion(trace)
        fusion.settle_memory()
        numbers = {id(event): at for at, event in enumerate(trace.events)}

        def works(event: Event) -> tuple[Compute, ...]:
            at = numbers[id(event)]
            return fusion.works.get(at, () if at in fusion.joined else works_of(event))

    places = _segments(trace)
    segments = _Segments(trace, places, works, splits)
    layers, parts = segments.layers(), segments.parts()
    kept = [at for at, layer in enumerate(layers) if layer.all_ops or parts[at].parameters]
    ties = ties_of(segments.readers(), {at: number for number, at in enumerate(kept)}, trace, splits)
    _hand_on(parts, kept)
    updates = [event for event in trace.events if event.moment is Moment.OPTIMIZER]
    optimizer = Layer(str(Role.OPTIMIZER), _update(updates), role=Role.OPTIMIZER)
    body = _folded([layers[at] for at in kept])
    workload = Workload(
        (Stage(tuple(body), epilogue=(optimizer,) if optimizer.forward else ()),), name=name, source="captured"
    )
    return Captured(
        workload=workload,
        parts=tuple(parts[at] for at in kept),
        memory=_memory(trace),
        parameters=sum(count for count in trace.parameters.values()),
        tokens=tokens,
        batch=batch,
        precision=_precision(body, precision),
        compiled=compiled,
        facts=tuple(facts),
        ties=ties,
    )


def _precision(body: Iterable[Block], usual: str) -> DType:
    """The format of most of the multiplications; *usual* where there are none."""
    flops: dict[DType, float] = defaultdict(float)
    for block in body:
        for layer in block.layers:
            for op in layer.all_ops:
                if isinstance(op.work, Matmul | GroupedMatmul | Attention):
                    flops[op.work.dtype] += block.repeat * op.work.flops
    return max(flops, key=lambda dtype: flops[dtype], default=DType(usual))


def _hand_on(parts: list[LayerPart], kept: Sequence[int]) -> None:
    """Add the memory of layers that are left out, their operators being joined with others', to the next
    layer that stays (to the last one where none follows).
    """
    waiting: list[LayerPart] = []
    stays = set(kept)
    for at, part in enumerate(parts):
        if at in stays:
            parts[at] = _joined([*waiting, part], part)
            waiting = []
        else:
            waiting.append(part)
    if waiting and kept:
        last = parts[kept[-1]]
        parts[kept[-1]] = _joined([last, *waiting], last)


def _joined(parts: Sequence[LayerPart], into: LayerPart) -> LayerPart:
    """*into* with the saved activations of all *parts*, which run one after another, and their peaks."""
    held = split = 0
    forward, backward = (0, 0), (0, 0)
    for part in parts:
        forward = max(forward, (held + part.forward_peak_bytes, split + part.split_forward_bytes))
        backward = max(backward, (held + part.backward_peak_bytes, split + part.split_backward_bytes))
        held, split = held + part.kept_bytes, split + part.split_kept_bytes
    return replace(
        into,
        kept_bytes=held,
        split_kept_bytes=split,
        forward_peak_bytes=forward[0],
        split_forward_bytes=forward[1],
        backward_peak_bytes=backward[0],
        split_backward_bytes=backward[1],
    )


def _segments(trace: StepTrace) -> list[int]:
    """For each event of forward and backward the segment it belongs to: a run of one module's forward."""
    places: list[int] = []
    forwards: dict[int, list[int]] = defaultdict(list)  # events of a module's forward, in order
    repeated: dict[int, int] = defaultdict(int)
    last_module, segment = -1, -1
    for at, event in enumerate(trace.events):
        if event.moment is Moment.FORWARD:
            if event.module != last_module:
                segment, last_module = segment + 1, event.module
            forwards[event.module].append(at)
            places.append(segment)
        elif event.moment is Moment.BACKWARD and event.again:
            before = forwards[event.module]
            number = min(repeated[event.module], len(before) - 1)
            repeated[event.module] += 1
            places.append(places[before[number]] if before else segment)
        elif event.moment is Moment.BACKWARD:
            source = event.source
            if 0 <= source < at:
                places.append(places[source])
            else:
                before = forwards[event.module]
                places.append(places[before[-1]] if before else max(segment, 0))
        else:
            places.append(-1)
    return places


class _Segments:
    """What each segment runs and has."""

    def __init__(self, trace: StepTrace, places: Sequence[int], works: Works, splits: Splits) -> None:
        self._trace, self._places, self._works, self._splits = trace, places, works, splits
        self._looked = self._last_looked()
        self.count = max(places, default=-1) + 1
        self._of: list[tuple[list[int], list[int], list[int]]] = [([], [], []) for _ in range(self.count)]
        for at, (event, place) in enumerate(zip(trace.events, places, strict=True)):
            if place >= 0:
                self._of[place][self._phase(event)].append(at)

    def _last_looked(self) -> set[int]:
        """Of what the host waits for, the last that runs a kernel."""
        found, last = set[int](), None
        for at, event in enumerate(self._trace.events if self._trace.looked else ()):
            last = at if self._works(event) else last
            if at in self._trace.looked and last is not None:
                found.add(last)
        return found

    def _ops(self, numbers: Sequence[int]) -> tuple[Op, ...]:
        return _ops([(self._trace.events[at], at in self._looked) for at in numbers], self._works)

    def _phase(self, event: Event) -> int:
        if event.moment is Moment.FORWARD:
            return 0
        if event.again:
            return 1
        storages = self._trace.storages
        return 2 if any(storages[each.storage].role == "gradients" for each in event.writes) else 1

    def layers(self) -> list[Layer]:
        """Layers that run the same are one object, whatever their names."""
        known: dict[object, Layer] = {}
        found = []
        for numbers in self._of:
            ops = tuple(map(self._ops, numbers))
            forward, inputs, weights = ops
            if ops not in known:
                module = self._trace.events[numbers[0][0]].module if numbers[0] else 0
                known[ops] = Layer(_shown(self._trace.modules[module]), forward, inputs, weights)
            found.append(known[ops])
        return found

    def parts(self) -> list[LayerPart]:
        trace, places = self._trace, self._places
        forward = [at for at, event in enumerate(trace.events) if event.moment is Moment.FORWARD]
        end = forward[-1] + 1 if forward else 0
        kept, split_kept = [0] * (self.count + 1), [0] * (self.count + 1)
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        computed = {at for at, storage in enumerate(trace.storages) if storage.role == "parameters"}
        for at in forward:
            event = trace.events[at]
            from_weights = any(each.storage in computed for each in event.reads)
            for each in event.reads:
                last[each.storage] = places[at]
            for each in event.writes:
                first.setdefault(each.storage, places[at])
                if from_weights:
                    computed.add(each.storage)
        for number, storage in enumerate(trace.storages):
            lives = storage.made <= end and (storage.freed is None or storage.freed > end)
            if lives and storage.role == "activations" and number in first:
                kept[first[number]] += storage.size_bytes
                if number in self._splits.shared:
                    split_kept[first[number]] += storage.size_bytes
        crossing = [0] * (self.count + 2)
        for number, made in first.items():
            if number in computed and trace.storages[number].role == "activations":
                crossing[made + 1] += trace.storages[number].size_bytes
                crossing[last.get(number, made) + 1] -= trace.storages[number].size_bytes
        sent, running = [], 0
        for change in crossing[: self.count]:
            running += change
            sent.append(running)
        owned, peaks = self._owned(), self._peaks(kept, split_kept)
        return [
            LayerPart(
                **owned.get(at, {}),
                kept_bytes=kept[at],
                forward_peak_bytes=peaks[Moment.FORWARD][at][0],
                backward_peak_bytes=peaks[Moment.BACKWARD][at][0],
                sent_bytes=sent[at] if at else 0,
                split_kept_bytes=split_kept[at],
                split_forward_bytes=peaks[Moment.FORWARD][at][1],
                split_backward_bytes=peaks[Moment.BACKWARD][at][1],
                split=self._split(at),
            )
            for at in range(self.count)
        ]

    def _peaks(self, kept: Sequence[int], split_kept: Sequence[int]) -> dict[Moment, list[tuple[int, int]]]:
        """For forward and backward of each segment the most that activations and temporary tensors take
        beyond what segments before it saved; and of that, the bytes that tensor parallelism splits.
        """
        trace = self._trace
        shared = self._splits.shared
        every = held_over_time(trace, lambda number, role: role == "activations")
        split = held_over_time(trace, lambda number, role: role == "activations" and number in shared)
        before, split_before = [0, *accumulate(kept)], [0, *accumulate(split_kept)]
        found = {moment: [(0, 0)] * self.count for moment in (Moment.FORWARD, Moment.BACKWARD)}
        for at, place in enumerate(self._places):
            if place >= 0:
                own = max(0, every[at] - before[place])
                peaks = found[trace.events[at].moment]
                peaks[place] = max(peaks[place], (own, min(own, max(0, split[at] - split_before[place]))))
        return found

    def _split(self, place: int) -> str:
        counts = {at: len(self._works(self._trace.events[at])) for each in self._of[place] for at in each}
        words = [letters_of(self._splits, each, counts) for each in self._of[place]]
        return "|".join(words) if any(words) else ""

    def readers(self) -> dict[int, list[int]]:
        """For each parameter's storage the segments whose forward reads it, in order."""
        found: dict[int, list[int]] = {storage: [] for storage in self._trace.parameters}
        for event, place in zip(self._trace.events, self._places, strict=True):
            if event.moment is Moment.FORWARD:
                for each in event.reads:
                    places = found.get(each.storage)
                    if places is not None and place not in places[-1:]:
                        places.append(place)
        return found

    def _owned(self) -> dict[int, dict[str, int]]:
        """Parameters by the segment that reads them first; those that no forward reads by the first."""
        place_of, storages = self.readers(), self._trace.storages
        found: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        for storage, count in self._trace.parameters.items():
            own, size = found[min(place_of[storage], default=0)], storages[storage].size_bytes
            own["parameters"] += count
            own["parameter_bytes"] += size
            own["split_bytes"] += size if storage in self._splits.shared else 0
            gradient = self._trace.gradients.get(storage)
            own["gradient_bytes"] += 0 if gradient is None else storages[gradient].size_bytes
        return found


def _shown(module: str) -> str:
    """A module's path with the places of lists left open."""
    return ".".join("*" if word.isdigit() else word for word in module.split(".")) or "model"


def _ops(events: Iterable[tuple[Event, bool]], works: Works = works_of) -> tuple[Op, ...]:
    """Kernels of *events*, each with whether the host waits for the last of them."""
    counts: dict[str, int] = defaultdict(int)
    ops: list[Op] = []
    for event, looked in events:
        name = event.name.strip("_")
        for work in works(event):
            counts[name] += 1
            shown = name if counts[name] == 1 else f"{name} {counts[name]}"
            ops.append(Op(shown, work))
        if looked:  # and what it looks at is copied to it
            ops[-1] = replace(ops[-1], host_reads=True, kernels=2)
    return tuple(ops)


def _update(events: Sequence[Event]) -> tuple[Op, ...]:
    """The optimizer: its passes over lists of tensors as one op, whose kernels are counted by tensor."""
    listed = [event for event in events if event.name.startswith(LISTED)]
    ops = _ops((event, False) for event in events if not event.name.startswith(LISTED))
    works = [work for event in listed for work in works_of(event) if isinstance(work, Elementwise)]
    if not works:
        return ops
    lists = [each for event in listed for each in event.options if isinstance(each, int)]
    largest = max(works, key=lambda work: work.columns)
    columns = largest.columns
    if largest.kind is ElementwiseKind.LISTED_OPTIMIZER:
        columns = max(1, round(sum(work.elements for work in works) / LISTED_PASSES))
    work = replace(
        largest,
        columns=columns,
        read_bytes=sum(each.read_bytes for each in works),
        write_bytes=sum(each.write_bytes for each in works),
    )
    return (*ops, Op("update", work, kernels=max(lists, default=1)))


def _folded(layers: Sequence[Layer]) -> list[Block]:
    """Runs of the same layer objects as blocks: at each place the repeating pattern that covers the most."""
    keys = [id(layer) for layer in layers]
    after: dict[int, list[int]] = defaultdict(list)  # where a layer object stands
    for at, key in enumerate(keys):
        after[key].append(at)
    blocks: list[Block] = []
    at, alone = 0, 0
    while at < len(keys):
        length, times = _longest(keys, at, after[keys[at]])
        if times < SHORTEST_REPEAT:
            at += 1
            continue
        blocks += [Block((layer,)) for layer in layers[alone:at]]
        blocks.append(Block(tuple(layers[at : at + length]), times))
        at += length * times
        alone = at
    return blocks + [Block((layer,)) for layer in layers[alone:]]


def _longest(keys: Sequence[int], at: int, places: Sequence[int]) -> tuple[int, int]:
    """The length and count of the pattern that begins at *at* and covers the most."""
    best = (1, 1)
    for place in places:
        length = place - at
        if length <= 0:
            continue
        if at + 2 * length > len(keys):
            break
        pattern, times = keys[at : at + length], 1
        while keys[at + times * length : at + (times + 1) * length] == pattern:
            times += 1
        if times > 1 and times * length > best[0] * best[1]:
            best = (length, times)
            break  # longer patterns are multiples of this one, or cover the same
    return best


def held_over_time(trace: StepTrace, counts: Callable[[int, str], bool]) -> list[int]:
    """The bytes in memory during each event, of storages whose number and role *counts*."""
    events = len(trace.events)
    changes = [0] * (events + 2)
    for number, storage in enumerate(trace.storages):
        if counts(number, storage.role):
            changes[min(storage.made, events)] += storage.size_bytes
            if storage.freed is not None:
                changes[min(storage.freed, events + 1)] -= storage.size_bytes
    return list(accumulate(changes[:events]))


def _memory(trace: StepTrace) -> CapturedMemory:
    """Who holds what when the most is held."""
    events, end = trace.events, 0
    for at, event in enumerate(events):
        if event.moment is Moment.FORWARD:
            end = at + 1
    held = held_over_time(trace, lambda number, role: True)
    fullest = held.index(max(held)) if held else 0
    temporary = held_over_time(trace, lambda number, role: role == "activations")
    found: dict[str, int] = defaultdict(int)
    gradients = 0
    for storage in trace.storages:
        gradients += storage.size_bytes if storage.role == "gradients" else 0
        if storage.made > fullest or (storage.freed is not None and storage.freed <= fullest):
            continue
        role = storage.role
        if role == "activations" and (storage.made >= end or (storage.freed or len(events)) <= end):
            role = "temporary"
        found["parameters" if role == "buffers" else role] += storage.size_bytes
    updates = [temporary[at] for at, event in enumerate(events) if event.moment is Moment.OPTIMIZER]
    return CapturedMemory(**found, all_gradients=gradients, update=max(updates, default=0))
