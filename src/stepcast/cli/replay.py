"""``stepcast replay FILE... --what-if K=V``: a measured run under changed conditions."""

import argparse
from typing import TYPE_CHECKING

from stepcast.cli.analyze import read_measured
from stepcast.cli.options import add_options
from stepcast.cli.output import write_trace
from stepcast.cli.pages import print_view, write_view
from stepcast.cli.rules import check_applicable
from stepcast.ir.facts import find_doubts

if TYPE_CHECKING:
    from stepcast.analyze.replay import Replay
    from stepcast.ir.timeline import Timeline
    from stepcast.views.view import View


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        """
        files FILE           Megatron traces of all ranks of a run, or their folder
        --what-if K=V ...    micro-batches=16, schedule=interleaved|1f1b|gpipe, bandwidth.tp=2x (also dp, pp,
                             embedding; or 50GB/s), rank.7=healthy (or 1.5x), stage.3.layers=-1, dp=4,
                             gpu=h100, compute=0.9x; may be repeated
        --scale-to dp=N      grow the run to N replicas; the same as --what-if dp=N
        --gpu NAME           the GPU it ran on, which gpu= is compared with
        --cluster C          what it runs on: prices communication that was not measured
        --set
        --trace FILE         write the timeline (before and after) as Perfetto / Chrome JSON
        --engine
        --html
        --json
        """,
        files={"nargs": "+"},
    )


def replayed(args: argparse.Namespace) -> "View":
    """The run of *args* under its changes; its trace and its page are written where they are asked for."""
    from stepcast.analyze.megatron.record import record_megatron
    from stepcast.analyze.replay import replay
    from stepcast.analyze.whatif import surroundings
    from stepcast.hardware import load_cluster
    from stepcast.views.measured import replay_view

    entry, timeline = read_measured(args.files, None)
    if entry.name != "megatron":
        raise ValueError(
            f"{args.files[0]}: is {entry.name}; replay needs Megatron traces, which tell what waits for what"
        )
    recording = record_megatron(timeline)
    changes = [*args.what_if, *_scale(args.scale_to)]
    check_applicable(args, changes=changes)
    dtype = str(recording.facts.get("dtype", "bf16"))
    cluster = load_cluster(args.cluster, args.set) if args.cluster else None
    around = surroundings(dtype, recording.layout.tp, args.gpu, cluster)
    if args.engine != "fast" and cluster is None:
        raise ValueError(f"--engine {args.engine} needs the links of a cluster: give --cluster as well")
    result = replay(recording, changes, around, cluster if args.engine != "fast" else None)
    if args.trace:
        _write(result, args.trace)
    found = result.facts()
    found["warnings"] = [*found["warnings"], *find_doubts(found)]
    view = replay_view(found, _timeline(result) if args.html else None)
    write_view(args, view)
    return view


def run(args: argparse.Namespace) -> int:
    print_view(args, replayed(args))
    return 0


def _scale(text: str | None) -> list[str]:
    if text is None:
        return []
    if not text.replace(" ", "").startswith("dp="):
        raise ValueError(f"--scale-to grows the number of replicas; write dp=64, not {text!r}")
    return [text]


def _write(result: "Replay", path: str) -> None:
    write_trace(_timeline(result), path)


def _timeline(result: "Replay") -> "Timeline":
    from stepcast.analyze.play import timeline_of

    labelled = {"measured": result.measured.played, "replayed": result.before.played}
    if result.changes:
        labelled["changed"] = result.after.played
    return timeline_of(labelled)
