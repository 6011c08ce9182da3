"""``stepcast network``: link utilisation and contention during a step."""

import argparse
from dataclasses import replace

from stepcast.cli.options import cluster_question, option_of
from stepcast.cli.output import origin, print_notes, show_view
from stepcast.cli.simulate import asked_facts
from stepcast.forecast.options import Engine, Options
from stepcast.forecast.prediction import Prediction
from stepcast.forecast.simulate import simulate
from stepcast.hardware import Place, load_cluster
from stepcast.inputs.table import read
from stepcast.ir.facts import FactDict
from stepcast.questions.runs import is_workload, run_facts
from stepcast.questions.settle import add_background, settle
from stepcast.views.network import network_view

# Options that a workload file leaves open.
WITH_WORKLOAD = {"run", "model", "cluster", "gpu", "set", "place", "gpus", "top", "html", "json", "background"}


def run(args: argparse.Namespace) -> int:
    has_workload = args.model is not None and is_workload(args.model)
    prediction, fast_s, asked = _simulate_workload(args) if has_workload else _simulate_model(args)
    shared = prediction.fluid
    assert shared is not None, "the fluid engine was asked for"
    topology = prediction.cluster.topology
    pairs = f"{topology.queue_pairs} queue pair{'' if topology.queue_pairs == 1 else 's'} per connection"
    routing = {"ecmp": f"ECMP by hash, {pairs}", "adaptive": f"adaptive routing, {pairs}"}
    routing["spray"] = "packets sprayed evenly over all paths"
    found: FactDict = {
        **asked,
        **origin(args),
        "gpus": prediction.workload.layout.gpus,
        "engine": "fluid",
        "alone_step_s": prediction.run.makespan_s,
        "fast_step_s": fast_s,
        "routing": routing[topology.routing],
        **shared.observed.facts(args.top),
        "assumptions": list(prediction.report.assumptions),
        "warnings": list(prediction.report.warnings),
    }
    show_view(args, network_view(found))
    return 0


def _simulate_model(args: argparse.Namespace) -> tuple[Prediction, float, FactDict]:
    run = settle(args.question.change({"engine": "fluid"}))
    print_notes(run.notes)
    fast = replace(run, options=replace(run.options, engine=Engine.FAST)).prediction
    return run.prediction.noting(run.assumptions), fast.simulated_s, run_facts(run)


def _simulate_workload(args: argparse.Namespace) -> tuple[Prediction, float, FactDict]:
    for name in sorted(args.given - WITH_WORKLOAD):
        raise ValueError(f"{option_of(name)} has no effect with a workload file, which states it itself; leave it out")
    if args.cluster is None:
        raise ValueError("no cluster given: use --cluster NAME (see 'stepcast list clusters') or a TOML file")
    cluster = load_cluster(args.cluster, args.set)
    options = Options(gpus=args.gpus, place=Place(args.place))
    workload = read(args.model)
    fast = simulate(workload, cluster, options)
    options = add_background(options, cluster_question(args), cluster, fast.workload.layout.gpus)
    shared = simulate(workload, cluster, replace(options, engine=Engine.FLUID))
    return shared, fast.simulated_s, asked_facts([args.model], fast)
