"""What would make the best faster: twice the network, more memory, twice the batch."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from stepcast.forecast.predict import predict
from stepcast.hardware import Cluster
from stepcast.ir.model import Model
from stepcast.ir.strategy import Strategy
from stepcast.searching.best import MORE_BYTES
from stepcast.searching.result import Result, SimulatedCandidate
from stepcast.units import format_bytes

FEW = 5


@dataclass(frozen=True, slots=True)
class Changed:
    """The best of some candidates after a change: its step and its tokens per second, both over those of the
    best without it."""

    words: str
    strategy: Strategy
    step_s: float
    step_ratio: float
    speed_ratio: float


def sensitivity(result: Result, model: Model, cluster: Cluster, few: int = FEW) -> tuple[Changed, ...]:
    """Return which of the best *few* leads after each change, all on as many GPUs as the best uses."""
    if not result.best or not result.counts.complete:
        return ()
    best, found = result.best[0], []
    alike = [each for each in result.best if each.gpus == best.gpus][:few]
    if result.is_late:
        return ()
    if (faster := with_network(cluster, 2.0)) is not None:
        trials = ((each.strategy, _step_s(model, faster, each, each.strategy)) for each in alike)
        found.append(_fastest("2 x network", best, trials))
    roomier = result.roomier or best
    if roomier.rank > best.rank:
        roomier = best
    found.append(_fastest(f"+{format_bytes(MORE_BYTES)}", best, [(roomier.strategy, roomier.step_s)]))
    if result.is_late:
        return tuple(found)
    doubled = [(each, _doubled(each.strategy)) for each in alike]
    found.append(_fastest("2 x batch", best, [(more, _step_s(model, cluster, each, more)) for each, more in doubled]))
    return tuple(found)


def with_network(cluster: Cluster, times: float) -> Cluster | None:
    """*cluster* with links between nodes that many times as fast; None where there are none."""
    nic = cluster.node.nic
    if nic is None:
        return None
    faster = replace(nic, bandwidth_bytes_per_s=nic.bandwidth_bytes_per_s * times)
    return replace(cluster, node=replace(cluster.node, nic=faster))


def _doubled(strategy: Strategy) -> Strategy:
    return replace(strategy, global_batch=2 * strategy.global_batch)


def _step_s(model: Model, cluster: Cluster, found: SimulatedCandidate, strategy: Strategy) -> float:
    return predict(model, cluster, strategy, found.framework, found.options).step_s


def _fastest(words: str, best: SimulatedCandidate, trials: Iterable[tuple[Strategy, float]]) -> Changed:
    def pace(trial: tuple[Strategy, float]) -> float:
        strategy, step_s = trial
        return step_s / strategy.tokens

    strategy, step_s = min(trials, key=pace)
    usual = best.step_s / best.strategy.tokens
    return Changed(words, strategy, step_s, step_s / best.step_s, usual / pace((strategy, step_s)))
