"""Named constants from Megatron-LM traces."""

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepcast.analyze.megatron.analysis import MegatronAnalysis, analyze_megatron
from stepcast.calibrate.megatron import calibrate_megatron
from stepcast.cli.calibrate import Facts, of_kind
from stepcast.cli.progress import open_source
from stepcast.hardware import load_cluster, load_gpu
from stepcast.inputs.table import format_named, read_sources

if TYPE_CHECKING:
    from stepcast.hardware import Gpu


def calibrate(paths: Sequence[str], args: argparse.Namespace) -> tuple[Facts, str]:
    gpu = _gpu(args, paths[0])
    runs = {source: _analysis(files) for source, files in _runs(of_kind(paths, "megatron")).items()}
    return calibrate_megatron(runs, gpu, args.cluster, args.model)


def _gpu(args: argparse.Namespace, where: str) -> "Gpu":
    if args.gpu:
        return load_gpu(args.gpu)
    if args.cluster:
        return load_cluster(args.cluster).gpu
    raise ValueError(
        f"{where}: a Megatron trace does not tell the GPU; say which with --gpu or --cluster, such as "
        "--cluster a800-node"
    )


def _runs(paths: Sequence[str]) -> dict[str, list[str]]:
    """Files of one run by its folder."""
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(os.path.dirname(path), []).append(path)
    return {folder if len(files) > 1 else files[0]: files for folder, files in found.items()}


def _analysis(files: Sequence[str]) -> MegatronAnalysis:
    timeline = read_sources([open_source(path) for path in files], format_named("megatron"))
    return analyze_megatron(timeline)
