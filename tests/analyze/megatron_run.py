"""Megatron-LM runs whose answer is known: a small 1F1B pipeline worked out rank by rank, written as traces.

Nothing of the simulator is used, so a replay of such a run is checked against something else.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

HIDDEN, SEQ, MICRO_BATCH = 64, 32, 1
ACTIVATION = f"[{SEQ}, {MICRO_BATCH}, {HIDDEN}]"
EXPERTS, TOP_K = 8, 2
REDUCE = (
    f"trace_src_func=allreduce,{{times}},input__shape=[{SEQ}, {HIDDEN}],input__dtype=torch.float32,"
    "func_name=linear_fwd,group=tp,comm_func=allreduce"
)
# As Echo writes the exchange of tokens: no func_name, and the rows that this rank hands in.
EXCHANGE = (
    "trace_src_func=_profiled_all_to_all_single,{{times}},input__shape=[{rows}, {hidden}],"
    "input__dtype=torch.float32,group=exp,comm_func=all_to_all"
)
COUNTS = (
    f"trace_src_func=_gather_along_first_dim_expert_parallel,{{times}},input__shape=[{EXPERTS}],"
    "input__dtype=torch.int64,func_name=gather_along_first_dim_expert_parallel,group=exp,comm_func=allgather"
)


@dataclass(frozen=True)
class Pipeline:
    """All times in milliseconds."""

    tp: int = 2
    pp: int = 3
    dp: int = 1
    micro_batches: int = 4
    layers: tuple[int, ...] = (2, 2, 2)
    half_layer_ms: float = 5.0  # attention, and the same for the MLP
    backward_factor: float = 2.0
    reduce_ms: float = 1.0
    message_ms: float = 0.8
    embedding_ms: float = 2.0
    gradients_ms: float = 4.0  # all-reduce of the gradients over two replicas
    optimizer_ms: float = 12.0
    gap_ms: float = 0.1
    ep: int = 0  # ranks that share experts; 0: a dense model
    # Of every 8 tokens, how many each member of an expert group gets; one row after the other by layer.
    routing: tuple[tuple[int, ...], ...] = ()
    token_ms: float = 0.05
    idle_expert_ms: float = 0.2  # what experts take for no token at all
    exchange_ms: float = 0.6
    backward_exchange_ms: float = 0.6
    file_name: str = "wd{world}_tp{tp}_pp{pp}_numl{layers}_bs{batch}_T_rank{rank}.txt"
    slow: dict[int, float] = field(default_factory=dict)
    clock_ms: dict[int, float] = field(default_factory=dict)  # of each rank

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def changed(self, **changes: object) -> "Pipeline":
        return replace(self, **changes)  # type: ignore[arg-type]


# A step of an operation: ("work", ms) or ("meet", key, members, ms, line of the trace).
Step = tuple[object, ...]


@dataclass
class _Operation:
    lines: list[tuple[str, int, str, str]]  # name, micro-batch, group, shape; two where fused
    steps: list[Step]
    start_ms: float = 0.0
    end_ms: float = 0.0
    inner: list[tuple[str, float, float]] = field(default_factory=list)  # line, start, end


class _Rank:
    def __init__(self, run: Pipeline, rank: int) -> None:
        self.run, self.rank = run, rank
        block = run.tp * run.dp
        self.stage, self.replica, self.tensor = rank // block, rank % block // run.tp, rank % run.tp
        self.pace = run.slow.get(rank, 1.0)
        self.operations: list[_Operation] = []
        self._plan()

    def at(self, stage: int, replica: int | None = None, tensor: int | None = None) -> int:
        replica = self.replica if replica is None else replica
        tensor = self.tensor if tensor is None else tensor
        return (stage * self.run.dp + replica) * self.run.tp + tensor

    def _plan(self) -> None:
        run, last = self.run, self.run.pp - 1
        warm_up = min(last - self.stage, run.micro_batches)
        for batch in range(warm_up):
            self._message(receive=("forward", batch))
            self._forward(batch)
            self._message(send=("forward", batch))
        steady = run.micro_batches - warm_up
        if steady:
            self._message(receive=("forward", warm_up))
        for batch in range(steady):
            self._forward(warm_up + batch)
            self._message(send=("forward", warm_up + batch), receive=("backward", batch))
            self._backward(batch)
            if batch < steady - 1:
                self._message(send=("backward", batch), receive=("forward", warm_up + batch + 1))
            else:
                self._message(send=("backward", batch))
        for batch in range(steady, run.micro_batches):
            self._message(receive=("backward", batch))
            self._backward(batch)
            self._message(send=("backward", batch))
        self._finish()

    def _message(self, send: tuple[str, int] | None = None, receive: tuple[str, int] | None = None) -> None:
        lines, steps = [], []
        for pair, verb in ((send, "send"), (receive, "recv")):
            if pair is None:
                continue
            way, batch = pair
            step = 1 if (way == "forward") == (verb == "send") else -1
            other = self.stage + step
            if not 0 <= other < self.run.pp:
                continue
            ends = tuple(sorted((self.rank, self.at(other))))
            lines.append((f"{verb}_{way}", batch, "pp", ACTIVATION))
            steps.append(("meet", ("message", way, ends, batch), ends, self.run.message_ms, ""))
        if lines:
            self.operations.append(_Operation(lines, [("all", *steps)]))

    def _layers(self, batch: int, name: str, factor: float) -> list[Step]:
        peers = tuple(self.at(self.stage, tensor=tensor) for tensor in range(self.run.tp))
        steps: list[Step] = []
        for number in range(2 * self.run.layers[self.stage]):
            steps.append(("work", self.run.half_layer_ms * factor * self.pace))
            if self.run.tp > 1:
                key = (name, peers, batch, number)
                steps.append(("meet", key, peers, self.run.reduce_ms, REDUCE))
            if self.run.ep and number % 2:
                steps += self._experts(batch, name, number // 2, factor)
        return [*steps, ("work", 0.2 * self.pace)]

    def _experts(self, batch: int, name: str, layer: int, factor: float) -> list[Step]:
        """Tokens go out, are worked on and come back; the backward does the same with their gradients."""
        run, first = self.run, self.replica // self.run.ep * self.run.ep
        peers = tuple(self.at(self.stage, replica) for replica in range(first, first + run.ep))
        shares = run.routing[(layer + batch) % len(run.routing)]
        sent = SEQ * MICRO_BATCH * TOP_K
        received = sent * run.ep * shares[self.replica - first] // sum(shares)

        exchange_ms = run.exchange_ms if name == "forward" else run.backward_exchange_ms

        def meet(what: str, line: str) -> Step:
            return ("meet", (name, what, peers, self.tensor, batch, layer), peers, exchange_ms, line)

        work_ms = (run.idle_expert_ms + run.token_ms * received) * factor * self.pace
        counts = [meet("counts", COUNTS)] if name == "forward" else []
        return [
            *counts,
            meet("out", EXCHANGE.format(rows=sent, hidden=HIDDEN)),
            ("work", work_ms),
            meet("back", EXCHANGE.format(rows=received, hidden=HIDDEN)),
        ]

    def _forward(self, batch: int) -> None:
        steps = self._layers(batch, "forward", 1.0)
        self.operations.append(_Operation([("forward_step", batch, "None", "None")], steps))
        if self.stage == self.run.pp - 1:
            loss = [("work", 0.3 * self.pace)]
            self.operations.append(_Operation([("loss_func", batch, "None", "None")], list(loss)))

    def _backward(self, batch: int) -> None:
        steps = self._layers(batch, "backward", self.run.backward_factor)
        self.operations.append(_Operation([("backward_step", batch, "None", "None")], steps))

    def _finish(self) -> None:
        run = self.run
        replicas = tuple(self.at(self.stage, replica) for replica in range(run.dp))
        gradients: Step = ("work", 1.0 * self.pace)
        if run.dp > 1:
            share = ((run.dp - 1) / run.dp) / 0.5
            gradients = ("meet", ("dp", replicas), replicas, run.gradients_ms * share, "")
        parameters = 1000 * run.layers[self.stage]
        self.operations.append(_Operation([("dp_allreduce", 0, "dp", f"[{parameters}]")], [gradients]))
        if self.stage in (0, run.pp - 1) and run.pp > 1:
            ends = (self.at(0), self.at(run.pp - 1))
            step: Step = ("meet", ("embedding", ends), ends, run.embedding_ms, "")
            self.operations.append(_Operation([("ep_allreduce", 0, "ep", f"[128, {HIDDEN}]")], [step]))
        model = tuple(self.at(stage, tensor=tensor) for stage in range(run.pp) for tensor in range(run.tp))
        steps: list[Step] = [("meet", ("norm", model), model, 0.0, ""), ("work", run.optimizer_ms * self.pace)]
        self.operations.append(_Operation([("optimizer_step", 0, "None", "None")], steps))


def work_out(run: Pipeline) -> list[_Rank]:
    """The operations of every rank with their times: each rank goes on until it must wait."""
    ranks = [_Rank(run, rank) for rank in range(run.ranks)]
    arrived: dict[object, dict[int, float]] = {}
    position = [(0, 0, 0.0, False) for _ in ranks]  # operation, step, clock, started
    moved = True
    while moved:
        moved = False
        for number, rank in enumerate(ranks):
            while True:
                after = _advance(rank, position[number], arrived, run)
                if after is None:
                    break
                position[number], moved = after, True
    assert all(at[0] == len(rank.operations) for at, rank in zip(position, ranks, strict=True)), "deadlock"
    return ranks


def _advance(
    rank: _Rank, at: tuple[int, int, float, bool], arrived: dict[object, dict[int, float]], run: Pipeline
) -> tuple[int, int, float, bool] | None:
    """One step of *rank*; None where it waits or has ended."""
    index, step_index, clock, started = at
    if index == len(rank.operations):
        return None
    operation = rank.operations[index]
    if not started:
        clock += run.gap_ms
        operation.start_ms = clock
        return index, 0, clock, True
    if step_index == len(operation.steps):
        operation.end_ms = clock
        return index + 1, 0, clock, False
    step = operation.steps[step_index]
    if step[0] == "work":
        return index, step_index + 1, clock + float(str(step[1])), True
    meets: Any = step[1:] if step[0] == "all" else (step,)
    ends = []
    for _, key, members, transfer_ms, _ in meets:
        came = arrived.setdefault(key, {})
        came.setdefault(rank.rank, clock)
        if len(came) == len(members):
            ends.append(max(came.values()) + transfer_ms)
    if len(ends) < len(meets):
        return None
    end = max(ends)
    if step[0] == "meet" and step[4]:
        operation.inner.append((str(step[4]), clock, end))
    return index, step_index + 1, end, True


def step_ms(run: Pipeline) -> float:
    ranks = work_out(run)
    start = min(rank.operations[0].start_ms for rank in ranks)
    return max(rank.operations[-1].end_ms for rank in ranks) - start


def write(run: Pipeline, folder: Path, keep: Callable[[int], bool] = lambda rank: True) -> list[str]:
    """One trace file per rank; the paths written."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank in work_out(run):
        if not keep(rank.rank):
            continue
        clock = 1e6 + run.clock_ms.get(rank.rank, 0.0)
        lines = [line for operation in rank.operations for line in _lines(rank, operation, clock)]
        name = run.file_name.format(
            world=run.ranks, tp=run.tp, pp=run.pp, ep=run.ep, layers=sum(run.layers), batch=MICRO_BATCH, rank=rank.rank
        )
        path = folder / name
        path.write_text("\n".join(lines) + "\n")
        paths.append(str(path))
    return paths


def _lines(rank: _Rank, operation: _Operation, clock: float) -> list[str]:
    parts = ", ".join(
        "'" + line.format(times=f"duration={end - start:.4f},timestamp={clock + end:.4f}") + "'"
        for line, start, end in operation.inner
    )
    return [
        f"rank:{rank.rank}:{name}(stage_id={rank.stage},batch_id={batch},mg_state=steady,"
        f"duration={operation.end_ms - operation.start_ms:.4f},description=None,group_kind={group},"
        f"input__shape={shape},input__dtype={'None' if shape == 'None' else 'torch.float32'},"
        f"timestamp={clock + operation.end_ms:.4f},sub_operations=[{parts}])"
        for name, batch, group, shape in operation.lines
    ]
