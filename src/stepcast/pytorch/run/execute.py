"""One rank's part of a step, op by op."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stepcast.ir.work import Collective, HostCopy, HostUpdate, Transfer
from stepcast.ir.workload import Layer, Op, Phase
from stepcast.pytorch.run.operators import CannotRunError, Operators
from stepcast.pytorch.run.plan import Record, RunPlan, Turn

BACKWARD = {
    "forward": (Phase.FORWARD,),
    "backward": (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT),
    "input-gradient": (Phase.INPUT_GRADIENT,),
    "weight-gradient": (Phase.WEIGHT_GRADIENT,),
}


class Exchange(Protocol):
    """How messages reach other ranks; one that does nothing where there are none."""

    def collective(self, work: Collective) -> Any: ...

    def receive(self, stage: int, size_bytes: int, backward: bool) -> None: ...

    def send(self, stage: int, size_bytes: int, backward: bool) -> None: ...

    def finish(self) -> None: ...


@dataclass
class Executor:
    """Runs the plan of one rank and writes down when each op ran."""

    plan: RunPlan
    rank: int
    operators: Operators
    exchange: Exchange
    clock: Any
    _waiting: dict[str, Any] = field(default_factory=dict)
    _rows: list[tuple[str, str, Any, Any, int, object]] = field(default_factory=list)

    @property
    def stage(self) -> int:
        return self.plan.stage_of_rank(self.rank)

    def prepare(self) -> None:
        """Operands of every op are made before the first step."""
        for chunk in range(self.plan.layout.vpp):
            for layer, _ in self.plan.stage_of(self.stage, chunk).counted_layers(1):
                for op in layer.all_ops:
                    if not isinstance(op.work, Collective | Transfer):
                        self._checked(op)

    def _checked(self, op: Op) -> Any:
        if isinstance(op.work, HostCopy | HostUpdate):
            raise CannotRunError(f"{op.name}: what is offloaded to the host cannot be run")
        return self.operators.call(op.work)  # type: ignore[arg-type]

    def step(self, number: int) -> list[Record]:
        """One whole step; when each of its ops ran."""
        self._walk()
        times = self.clock.read([(begin, end) for _, _, begin, end, _, _ in self._rows])
        return [
            Record(self.rank, lane, name, begin, end - begin, micro_batch, number, work)
            for (lane, name, _, _, micro_batch, work), (begin, end) in zip(self._rows, times, strict=True)
        ]

    def elapsed_s(self) -> float:
        """Seconds of one step in which ops are not marked."""
        self.clock.quiet = True
        self._walk()
        self.clock.quiet = False
        return float(self.clock.elapsed_s())

    def _walk(self) -> None:
        self._rows.clear()
        self.clock.start()
        first = self.plan.stage_of(self.stage, 0)
        self._run(first.prologue, (Phase.FORWARD,), -1)
        for turn in self.plan.orders[self.stage]:
            self._turn(turn)
        for chunk in range(self.plan.layout.vpp):
            self._run(self.plan.stage_of(self.stage, chunk).epilogue, tuple(Phase), -1)
        for handle in self._waiting.values():
            handle.wait()
        self._waiting.clear()
        self.exchange.finish()

    def _turn(self, turn: Turn) -> None:
        plan, backward = self.plan, turn.kind != "forward"
        before = plan.neighbour(self.stage, turn.chunk, 1 if backward else -1)
        after = plan.neighbour(self.stage, turn.chunk, -1 if backward else 1)
        moves = turn.kind != "weight-gradient" and plan.layout.pp > 1
        if before is not None and moves:
            self._message("receive", before[0], backward, turn.micro_batch)
        layers: Sequence[Layer] = plan.stage_of(self.stage, turn.chunk).body_layers(turn.micro_batch)
        self._run(reversed(layers) if backward else layers, BACKWARD[turn.kind], turn.micro_batch)
        if after is not None and moves:
            self._message("send", after[0], backward, turn.micro_batch)

    def _message(self, way: str, stage: int, backward: bool, micro_batch: int) -> None:
        begin = self.clock.begin()
        act = self.exchange.receive if way == "receive" else self.exchange.send
        act(stage, self.plan.boundary_bytes, backward)
        direction = "backward" if backward else "forward"
        self._rows.append(("pp", f"{direction} {way}", begin, self.clock.end(), micro_batch, None))

    def _run(
        self, layers: Sequence[Layer] | Iterator[Layer], phases: Sequence[Phase], micro_batch: int
    ) -> None:
        for layer in layers:
            for phase in phases:
                for op in layer.ops(phase):
                    self._op(layer, op, micro_batch)

    def _op(self, layer: Layer, op: Op, micro_batch: int) -> None:
        for name in op.after:
            if name in self._waiting:
                self._waiting.pop(name).wait()
        begin = self.clock.begin()
        if isinstance(op.work, Collective):
            handle = self.exchange.collective(op.work)
            if handle is not None and op.blocking:
                handle.wait()
            elif handle is not None:
                self._waiting[op.name] = handle
            lane = str(op.work.group)
        elif isinstance(op.work, Transfer):
            return  # the schedule says when stages send
        else:
            self._checked(op)()
            lane = "compute"
        name = layer.op_name(op)
        self._rows.append((lane, name, begin, self.clock.end(), micro_batch, op.work))
