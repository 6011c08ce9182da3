"""OptimusPrime runs predicted from their configuration: a folder of logs, each left out of its own fit."""

import json
import os
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from stepcast.analyze.optimus.cost import Constants, Machine
from stepcast.analyze.optimus.fit import Observation, fit, observe
from stepcast.analyze.optimus.lengths import shuffled_length
from stepcast.analyze.optimus.plan import OptimusPlan, plan_of_log
from stepcast.analyze.optimus.program import step_s
from stepcast.cost.collectives import price, route_of
from stepcast.hardware import Cluster, load_cluster, resolve
from stepcast.hardware.catalog import load_fit
from stepcast.inputs.errors import FormatError
from stepcast.inputs.source import Source
from stepcast.inputs.table import folder_files, read_as_one, recognise
from stepcast.ir.check import require
from stepcast.ir.model import Model
from stepcast.ir.runlog import RunLog
from stepcast.ir.work import CollectiveKind
from stepcast.models.catalog import load_model, model_names
from stepcast.validate.optimus_memory import StagePeak, figures, stage_peaks
from stepcast.validate.scoreboard import Measurements, Row, columns

CLUSTER = "a40-pcie"
FORMAT = "optimus"
# Padded lengths of steps 1, 2, ... beside the logs, {"S": [...]}: the log does not print them.
LENGTHS_FILE = "seqlen_per_step.json"
# Fewer other runs than constants cannot fit them.
FEWEST_OTHERS = 4


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Constants with the lengths of the steps they were fitted to and the runs that were used.

    Each length is that of *in_order* rows of the data (0: not known), *rows_per_text* of which share a text.
    """

    constants: Constants
    sequences: tuple[float, ...]
    runs: tuple[str, ...]
    in_order: int = 0
    rows_per_text: float = 1.0

    def lengths_of(self, log: RunLog) -> tuple[float, ...]:
        """Of *log*'s steps. With data parallelism each rank draws its own rows (DistributedSampler in
        prepare_dataloader of opt_prime/opti_pri.py), and the longest of all holds the others up."""
        if log.layout.dp == 1 or not self.in_order:
            return self.sequences
        length = shuffled_length(self.sequences, self.in_order, self.rows_per_text, log.global_batch)
        return (length,) * len(self.sequences)


def calibrated_of(text: str, where: str) -> Calibrated:
    """What ``stepcast calibrate`` writes."""
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise FormatError(f"is no TOML: {error}", where) from None
    return _calibrated(table, where)


def _calibrated(table: dict[str, Any], where: str) -> Calibrated:
    try:
        constants = Constants(**{name: float(value) for name, value in table["constants"].items()})
        sequences = tuple(float(value) for value in table["sequences"])
        runs = tuple(str(run) for run in table.get("runs", ()))
        samples = table.get("samples", {})
        in_order, rows_per_text = int(samples.get("in_order", 0)), float(samples.get("rows_per_text", 1))
        require(in_order >= 0 and rows_per_text >= 1, "a text has at least one row")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError(
            f"holds no OptimusPrime constants ({error}); expected [constants] and sequences", where
        ) from None
    return Calibrated(constants, sequences, runs, in_order, rows_per_text)


@lru_cache(maxsize=1)
def shipped() -> Calibrated:
    """Constants that come with the package."""
    return _calibrated(load_fit(FORMAT), f"{FORMAT}.toml")


def machine_of(cluster: Cluster) -> Machine:
    """What the step's cost needs of a cluster; OptimusPrime computes in fp32 without TF32."""
    gpu = cluster.node.gpu

    @lru_cache(maxsize=4096)
    def all_reduce_s(ranks: range, size_bytes: float) -> float:
        if len(ranks) < 2:
            return 0.0
        path = resolve(cluster, ranks, active_per_node=min(len(ranks), cluster.domain_gpus))
        return float(
            price(CollectiveKind.ALL_REDUCE, max(1, round(size_bytes)), route_of(path, cluster)).seconds
        )

    def hop_bytes_per_s(one: int, other: int) -> float:
        path = resolve(cluster, [one, other])
        link = path.intra or path.inter
        assert link is not None
        return link.effective_bytes_per_s

    return Machine(
        name=cluster.name,
        matrix_flops=gpu.matrix_peak_flops("fp32"),
        memory_bytes_per_s=gpu.memory_bandwidth_bytes_per_s,
        launch_s=gpu.launch_overhead_s,
        all_reduce_s=all_reduce_s,
        hop_bytes_per_s=hop_bytes_per_s,
    )


@lru_cache(maxsize=8)
def model_with(parameters: int) -> Model:
    """The Llama of the catalogue that has so many parameters: a log names the class alone."""
    for name in model_names():
        if name.startswith("llama") and load_model(name).parameters == parameters:
            return load_model(name)
    raise ValueError(f"no Llama of the catalogue has {parameters:,} parameters; name the model")


def lengths_of(log: RunLog) -> tuple[float, ...]:
    """The steps' padded lengths from the file beside a log; the shipped ones where there is none."""
    file = os.path.join(os.path.dirname(log.source), LENGTHS_FILE)
    if not os.path.exists(file):
        return shipped().lengths_of(log)
    try:
        with open(file, encoding="utf-8") as handle:
            lengths = tuple(float(value) for value in json.load(handle)["S"])
    except (ValueError, KeyError, TypeError) as error:
        raise FormatError(
            f'is no list of lengths ({error}); expected {{"S": [88, 109, ...]}}', file
        ) from None
    if not all(0 < length < 1e9 for length in lengths):
        raise FormatError("has a length that is not above zero", file)
    return lengths


def run_name(plan: OptimusPlan, measured_s: float) -> str:
    """The same for two copies of one log, whatever their file names."""
    layout = plan.layout
    return (
        f"tp{layout.tp} dp{layout.dp} pp{layout.pp} micro-batch {plan.micro_batch} x {plan.micro_batches}: "
        f"{1e3 * measured_s:.2f} ms"
    )


def read_logs(paths: Sequence[str], skip: Callable[[str, str], None]) -> list[RunLog]:
    """The OptimusPrime logs among *paths*; files of other kinds are passed over, bad logs are skipped."""
    logs = []
    for path in paths:
        source = Source(path)
        try:
            if recognise(source).name != FORMAT:
                continue
        except FormatError:
            continue
        try:
            logs.append(read_as_one([source], FORMAT)[1])
        except FormatError as error:
            skip(path, error.message)
    return logs


def read_folder(folder: str, skip: Callable[[str, str], None]) -> list[RunLog]:
    """The logs of *folder*, or the one log it is."""
    return read_logs([folder] if os.path.isfile(folder) else folder_files(folder), skip)


def rows(logs: Sequence[RunLog], skip: Callable[[str, str], None]) -> tuple[Row, ...]:
    """Each run predicted from constants that never saw it.

    Of the run itself only the configuration is used, and its steps' padded lengths: nothing timed.
    The constants are fitted to the other runs; for a run that the shipped constants were not fitted to,
    they are the shipped ones.
    """
    machine = machine_of(load_cluster(CLUSTER))
    seen: list[Observation] = []
    for log in logs:
        try:
            plan = plan_of_log(log, model_with(log.parameters), lengths_of(log))
            seen.append(observe(log, plan, machine))
        except ValueError as error:
            skip(log.source, str(error).removeprefix(f"{log.source}: "))
    found = []
    for one in seen:
        others = [other for other in seen if other is not one]
        name = run_name(one.plan, one.measured_s)
        if name not in shipped().runs:
            constants, fitted = shipped().constants, "shipped"
        elif len(others) >= FEWEST_OTHERS:
            constants, fitted = fit(others, machine).constants, "fitted to the other runs"
        else:
            skip(one.source, f"fewer than {FEWEST_OTHERS} other runs to fit to")
            continue
        predicted_s = step_s(one.plan, machine, constants)
        layout = one.plan.layout
        tags = {"layout": f"tp{layout.tp} dp{layout.dp} pp{layout.pp}", "constants": fitted}
        found.append(Row(name, one.measured_s, predicted_s, tags))
    return tuple(found)


def peaks(logs: Sequence[RunLog]) -> tuple[StagePeak, ...]:
    """Peak memory of every stage of every run with a gpustat log beside it."""
    gpu = load_cluster(CLUSTER).gpu
    found: list[StagePeak] = []
    for log in logs:
        try:
            found += stage_peaks(log, model_with(log.parameters), gpu, lengths_of(log))
        except ValueError:  # told of by rows()
            continue
    return tuple(found)


def measure_folder(folder: str) -> Measurements:
    skipped: dict[str, int] = {}

    def skip(path: str, reason: str) -> None:
        skipped[reason] = skipped.get(reason, 0) + 1

    logs = read_folder(folder, skip)
    found = rows(logs, skip)
    notes = ["a run's configuration and its steps' lengths are used; nothing that was timed in it"]
    notes += [f"{os.path.basename(log.source)}: {told}" for log in logs for told in log.warnings]
    return Measurements(columns(found), skipped, figures=dict(figures(peaks(logs))), notes=tuple(notes))
