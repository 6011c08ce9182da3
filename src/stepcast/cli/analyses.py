"""Analyses of measured runs that need a cluster or constants: Megatron-LM traces, OptimusPrime and nccl-tests logs.

``cli.analyze`` loads them for these formats alone.
"""

from stepcast.analyze.megatron.analysis import analyze_megatron
from stepcast.analyze.megatron.record import record_megatron
from stepcast.analyze.recording import play_measured, timeline_of
from stepcast.analyze.result import AnalysisResult
from stepcast.analyze.sweeps import analyze_sweep
from stepcast.hardware import load_cluster, load_gpu
from stepcast.hardware.catalog import CatalogError, data_names
from stepcast.inputs.source import Source
from stepcast.ir.limits import DESCRIPTION
from stepcast.ir.measured import CollectiveSweep, RunLog
from stepcast.ir.timeline import Timeline
from stepcast.optimus.analysis import analyze_optimus
from stepcast.optimus.calibration import CLUSTER, lengths_of, load_shipped, plan_run, read_calibrated
from stepcast.optimus.step import machine_of
from stepcast.questions.question import AnalyzeQuestion


def measured_timeline(timeline: Timeline) -> Timeline:
    """Return the traces of a Megatron-LM step on one clock, with waits apart from transfers."""
    return timeline_of({"measured": play_measured(record_megatron(timeline))})


def analyze_megatron_run(timeline: Timeline, question: AnalyzeQuestion) -> AnalysisResult:
    """Explain the traces of a Megatron-LM step; with a cluster, compare with the bandwidth that it should reach."""
    cluster = load_cluster(question.cluster, question.set) if question.cluster else None
    return analyze_megatron(timeline, cluster).result


def analyze_optimus_run(log: RunLog, question: AnalyzeQuestion) -> AnalysisResult:
    """Explain an OptimusPrime log, with the constants and the cluster of the question, or else the shipped ones."""
    cluster = load_cluster(question.cluster or CLUSTER, question.set)
    constants, lengths = load_shipped(), lengths_of(log)
    if question.calibration:
        constants = read_calibrated(Source(question.calibration).text(DESCRIPTION), question.calibration)
        lengths = constants.lengths_of(log)
    return analyze_optimus(log, plan_run(log, lengths), machine_of(cluster), constants.constants)


def analyze_nccl_tests(sweep: CollectiveSweep, question: AnalyzeQuestion) -> AnalysisResult:
    """Compare an nccl-tests log size by size with the prediction for its cluster, and explain shortfalls."""
    if question.cluster is None:
        try:
            gpu = load_gpu(sweep.device).name
            names = [name for name in data_names("clusters") if load_cluster(name).gpu.name == gpu]
            hint = f"; clusters with {gpu}: {', '.join(names)}" if names else ""
        except CatalogError:
            hint = "; see 'stepcast list clusters'"
        raise ValueError(f"{sweep.source}: use --cluster to name the cluster of the log{hint}")
    return analyze_sweep(sweep, load_cluster(question.cluster, question.set))
