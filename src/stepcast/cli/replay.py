"""``stepcast replay FILE... --what-if K=V``: a measured run under changed conditions."""

import argparse
from collections.abc import Sequence

from msgspec.structs import replace

from stepcast.analyze.kineto.whatif import KinetoReplay, replay_kineto
from stepcast.analyze.megatron.record import record_megatron
from stepcast.analyze.recording import timeline_of
from stepcast.analyze.replay import Replay, ReplayResult, replay, surroundings
from stepcast.cli.analyze import read_measured
from stepcast.cli.output import print_notes, show_view, write_trace
from stepcast.hardware import load_cluster
from stepcast.inputs.table import misused
from stepcast.ir.timeline import Timeline
from stepcast.ir.types import find_doubts
from stepcast.questions.choices import option_of
from stepcast.questions.question import ReplayQuestion, check_rules
from stepcast.views.view import View


def run(args: argparse.Namespace) -> int:
    _, view, notes = replay_files(args.files, args.question, args.trace, with_timeline=bool(args.html))
    print_notes(notes)
    show_view(args, view)
    return 0


def replay_files(
    files: Sequence[str], question: ReplayQuestion, trace: str | None = None, with_timeline: bool = False
) -> tuple[ReplayResult | KinetoReplay, View, tuple[str, ...]]:
    """Return result and view of measured *files* under changes, and notes on choices without effect; write *trace*."""
    entry, timeline = read_measured(files)
    if entry.name == "kineto":
        if other := sorted(question.given - {"what_if"} | ({"trace"} if trace else set())):
            raise ValueError(f"{files[0]}: {option_of(other[0])} is for Megatron traces; leave it out")
        kineto = replay_kineto(timeline, question.changes)
        return kineto, kineto.show(), ()
    if entry.name != "megatron":
        raise misused(entry, files[0], "replay needs Megatron or Kineto traces")
    recording, changes = record_megatron(timeline), question.changes
    gpu, dp = (any(change.startswith(name) for change in changes) for name in ("gpu", "dp"))
    facts = {"gpu_changes": gpu, "dp_changes": dp, "cluster": question.cluster, "engine": question.engine}
    notes = check_rules("replay", question.given, facts)
    cluster = load_cluster(question.cluster, question.set) if question.cluster else None
    if question.engine != "fast" and cluster is None:
        raise ValueError(f"--engine {question.engine} needs the links of a cluster: use --cluster as well")
    around = surroundings(str(recording.facts.get("dtype", "bf16")), recording.layout.tp, question.gpu, cluster)
    replayed = replay(recording, changes, around, cluster if question.engine != "fast" else None)
    if trace:
        write_trace(_build_timeline(replayed), trace)
    result = replayed.result
    result = replace(result, warnings=[*result.warnings, *find_doubts(result.facts())])
    return result, result.show(_build_timeline(replayed) if with_timeline else None), notes


def _build_timeline(result: Replay) -> Timeline:
    labelled = {"measured": result.measured, "replayed": result.before}
    if result.changes:
        labelled["changed"] = result.after
    return timeline_of(labelled)
