"""The step that a command line describes, for verbs that take a model, a cluster and a strategy."""

import argparse
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from stepcast.cli.applicable import check_applicable, left_of_file
from stepcast.cli.background import with_background
from stepcast.cli.calibrations import check_gpu, load_calibration
from stepcast.cli.engine import engine_of
from stepcast.cli.options import add_options
from stepcast.cli.place import has_racks
from stepcast.cli.strategy import (
    USUAL_FRAMEWORK,
    given_by,
    layout_of,
    optimizer_of,
    settle_gpus,
    settled_facts,
    strategy_of,
)
from stepcast.cli.strategy_options import add_strategy_arguments

if TYPE_CHECKING:
    from stepcast.cost.calibration import Calibration
    from stepcast.forecast.options import Options
    from stepcast.forecast.simulate import Prediction
    from stepcast.frameworks.profile import Profile, Settled
    from stepcast.hardware import Cluster
    from stepcast.ir.framework import Framework
    from stepcast.ir.layout import Layout
    from stepcast.ir.model import Model
    from stepcast.ir.strategy import Strategy


@dataclass(frozen=True)
class Asked:
    """The values that a command line describes; *assumptions* are what it left open."""

    model: "Model"
    cluster: "Cluster"
    strategy: "Strategy"
    framework: "Framework"
    calibration: "Calibration | None"
    options: "Options"
    assumptions: tuple[str, ...]
    missing: tuple[str, ...] = ()
    """What the run uses that its software does not have, a sentence each."""

    @cached_property
    def prediction(self) -> "Prediction":
        from stepcast.forecast.predict import predict

        values = self.model, self.cluster, self.strategy, self.framework
        prediction = predict(*values, self.options, self.calibration)
        return prediction.noting(warnings=self.missing) if self.missing else prediction

    def facts(self) -> dict[str, Any]:
        """What was asked, in the words of the JSON contract."""
        from stepcast.cli.choices import row_words
        from stepcast.frameworks.words import recompute_word

        strategy, node = self.strategy, self.cluster.node
        return {
            "model": self.model.name,
            "parameters": self.model.parameters,
            "cluster": self.cluster.name,
            "gpu": self.cluster.gpu.name,
            "gpus_per_node": node.gpus,
            "framework": self.framework.name,
            "execution": str(self.framework.execution),
            "kernels": str(self.framework.kernels),
            "strategy": {
                **row_words(strategy),
                "recompute": recompute_word(strategy.recompute),
                "global_batch": strategy.global_batch,
                "seq": strategy.seq,
            },
        }


def add_forecast_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(own=parser, described=None)
    what = parser.add_argument_group("what runs, and where")
    add_options(
        what,
        f"""
        --config FILE        take model, strategy and framework from a Megatron-LM script or argument file,
                             NeMo or Megatron-Bridge YAML, torchtitan TOML, DeepSpeed JSON, accelerate YAML;
                             options given here win
        --ignore-unknown     leave out keys of --config that its tool does not have, instead of refusing them
        --model M            name in the catalogue, or a config.json
        --cluster C          name in the catalogue, a GPU (one node of it), or a TOML file
        --gpu G              or GPUs of one node: one, or as many as --gpus says
        --set
        --place
        --framework F        whose habits fill what is left out: a name in the catalogue, or a TOML file
                             (default: {USUAL_FRAMEWORK})
        """,
    )
    add_strategy_arguments(parser)
    prices = parser.add_argument_group("prices")
    add_options(
        prices,
        """
        --calibration FILE  your GPU as 'stepcast profile' measured it
        --residual          correct the step by what published runs of this framework on such GPUs took beyond
                            predictions
        """,
    )


def forecast(args: argparse.Namespace) -> Asked:
    """The run that *args* describe, predicted."""
    asked = asked_by(args)
    assert asked.prediction
    return asked


def asked_by(args: argparse.Namespace) -> Asked:
    """The run that *args* describe; what they leave out is settled by the framework and the model."""
    from stepcast.forecast.options import Options
    from stepcast.frameworks.catalog import framework_names, load_profile, profile_of
    from stepcast.frameworks.profile import missing_features, settle
    from stepcast.hardware import Place, load_cluster
    from stepcast.ir.legality import recomputable
    from stepcast.ir.model_parts import Mixer
    from stepcast.models.catalog import load_model

    assumptions: list[str] = []
    check_named(args)
    model = load_model(args.model) if isinstance(args.model, str) else args.model
    cluster = load_cluster(args.cluster, args.set) if isinstance(args.cluster, str) else args.cluster
    settle_gpus(args, cluster, assumptions)
    calibration = load_calibration(args.calibration) if args.calibration else None
    corrects = calibration is not None and bool(calibration.corrections)
    software = args.framework or USUAL_FRAMEWORK
    profile = load_profile(software) if isinstance(software, str) else profile_of(software)
    if not isinstance(software, str) and software.name not in framework_names():
        assumptions.append(f"framework {software.name!r} is not in the catalogue: general defaults are used")
    layout = layout_of(args, profile, model, cluster.gpu.name)
    usual = settle(profile, model, cluster.gpu.name, layout, {})
    settled = _settled(args, profile, model, cluster.gpu.name, layout)
    _forget_usual(args, settled_facts(usual))
    residual = profile.residual(cluster.gpu.generation, model.experts is not None)
    modules = recomputable(model)
    facts = {
        **settled_facts(settled),
        "vpp": layout.vpp,
        "experts": model.experts is not None,
        "modules": modules,
        "module_list": ", ".join(sorted(modules)) or "none",
        "predicts_further": model.next_token_layers > 0,
        "mamba": any(block.mixer is Mixer.MAMBA for block in model.blocks),
        "corrects": corrects,
        "residual_known": residual is not None,
        "generation": cluster.gpu.generation,
        "racks": has_racks(args),
        "model": model.name,
        "framework": profile.name,
    }
    check_applicable(args, **facts)
    if getattr(args, "described", None) is not None and (left := left_of_file(args, **facts)):
        vars(args).update(left)
        settled = _settled(args, profile, model, cluster.gpu.name, layout)
    if calibration is not None:
        check_gpu(calibration, args.calibration, cluster.gpu.name)
    strategy = strategy_of(args, model, layout, settled, profile.defaults.seq, assumptions)
    if args.framework is None:
        assumptions.append(_software(settled.framework))
    options = Options(
        place=Place(args.place), residual=residual if args.residual else None, engine=engine_of(args)
    )
    options = with_background(options, args, cluster, strategy.layout.gpus)
    missing = tuple(missing_features(profile, strategy, settled.framework))
    return Asked(
        model, cluster, strategy, settled.framework, calibration, options, tuple(assumptions), missing
    )


def _settled(
    args: argparse.Namespace, profile: "Profile", model: "Model", gpu: str, layout: "Layout"
) -> "Settled":
    from stepcast.frameworks.profile import settle

    said = given_by(args)
    # Formats of moments follow that of training, so the optimizer that is changed is the one of these.
    formats = {name: value for name, value in said.items() if name in ("precision", "autocast")}
    trained = settle(profile, model, gpu, layout, formats).framework
    given = {**said, **optimizer_of(args, trained.optimizer)}
    return settle(profile, model, gpu, layout, given)


def tried(
    args: argparse.Namespace, change: Mapping[str, Any], held: Mapping[str, Any] = MappingProxyType({})
) -> argparse.Namespace:
    """*args* with *change*, for a run that is only tried; what is *held* stays, also where it was assumed."""
    other = copy.copy(args)
    changed = {**held, **change}
    if "global_batch" in changed:
        changed["accumulation"] = None
    vars(other).update({**changed, "given": args.given | set(change), "quiet": True})
    return other


def check_named(args: argparse.Namespace) -> None:
    """A run needs a model and a place; a GPU stands for one node of it."""
    if args.model is None:
        file = getattr(args, "described", None)
        if file is not None:
            raise ValueError(f"{file.file} names no model that is known; give --model as well")
        raise ValueError("which model? name one of 'stepcast list models', or give a config.json")
    gpu = getattr(args, "gpu", None)
    if gpu is not None and args.cluster not in (None, gpu):
        raise ValueError("--gpu is for a run without a cluster; leave it or --cluster out")
    if gpu is not None:
        args.cluster = gpu
    if args.cluster is None:
        raise ValueError("where? give --cluster, a name from 'stepcast list clusters', or --gpu for one GPU")


def _software(framework: "Framework") -> str:
    """What is taken of the software where nobody names it: it decides as much as the layout does."""
    from stepcast.ir.framework import Execution

    issued = "as captured graphs" if framework.execution is Execution.GRAPHS else "one by one"
    return (
        f"the software is {framework.name}, its {framework.kernels} kernels issued {issued} (--framework; "
        "plain eager PyTorch is pytorch or transformers, and slower)"
    )


def _forget_usual(args: argparse.Namespace, usual: dict[str, Any]) -> None:
    """An option that says what the framework does anyway is not given in vain."""
    args.given = frozenset(name for name in args.given if getattr(args, name) != usual.get(name, object()))
