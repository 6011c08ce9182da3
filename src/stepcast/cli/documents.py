"""Reading what a verb's FILE arguments name, with the changes its options ask for."""

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from stepcast.cli.numbers import MOST_LAYERS, count
from stepcast.cli.progress import open_source
from stepcast.inputs.table import FORMATS, folder_files, read_as_one
from stepcast.ir.edits import repeat_layers, scale_backward
from stepcast.ir.workload import Workload

if TYPE_CHECKING:
    from stepcast.cost.calibration import Calibration


def add_edit_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that state what a workload file leaves out."""
    parser.add_argument(
        "--format",
        choices=[entry.name for entry in FORMATS],
        help="read as this format instead of recognising it",
    )
    parser.add_argument(
        "--repeat-layers",
        type=count(1, MOST_LAYERS),
        metavar="N",
        help="operator tables: the model has N of the one layer given",
    )
    parser.add_argument(
        "--backward-factor",
        type=float,
        metavar="X",
        help="take backward times as X times forward (2 is usual for matmuls)",
    )


def read_document(paths: Sequence[str], args: argparse.Namespace) -> Any:
    """The noun in *paths*, which are one document: a file, a folder, or the files of one run."""
    sources = [open_source(path) for path in expand(paths)]
    return apply_edits(read_as_one(sources, args.format)[1], args)


def expand(paths: Sequence[str]) -> list[str]:
    """Folders replaced by their files."""
    return [file for path in paths for file in (folder_files(path) if os.path.isdir(path) else [path])]


def apply_edits(document: Any, args: argparse.Namespace) -> Any:
    if not isinstance(document, Workload):
        return document
    if args.repeat_layers is not None:
        document = repeat_layers(document, args.repeat_layers)
        document = _without_warning(document, "--repeat-layers")
    if args.backward_factor is not None:
        document = scale_backward(document, args.backward_factor)
        document = _without_warning(document, "--backward-factor")
    return document


def _without_warning(workload: Workload, option: str) -> Workload:
    """The user has answered the warning that asked for *option*."""
    from dataclasses import replace

    kept = tuple(warning for warning in workload.warnings if option not in warning)
    return replace(workload, warnings=kept)


def load_calibration(path: str) -> "Calibration":
    """A user's measurements of a GPU, as ``profile`` and ``calibrate`` write them."""
    import tomllib

    from stepcast.cost.calibration import calibration

    try:
        with open(path, "rb") as file:
            table = tomllib.load(file)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}; expected a calibration written by 'stepcast profile'") from None
    return calibration(table, path)
