"""Reading the files that a verb names, with the changes of its options."""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from stepcast.cli.output import open_source, print_notes
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import folder_files, read_as_one, recognise, set_files
from stepcast.ir.types import require
from stepcast.ir.workload import Workload, repeat_layers, scale_backward

Recognise = Callable[[Source], object]
"""Raises a FormatError for a file of no known format."""
MOST_NAMED = 5


def load_lazily(name: str) -> Callable[..., Any]:
    """Return the function that ``package.module:function`` names; its module is loaded when it is called."""
    module, _, function = name.partition(":")
    return lambda *given, **named: getattr(import_module(f"stepcast.{module}"), function)(*given, **named)


def read_document(paths: Sequence[str], args: argparse.Namespace) -> Any:
    """Return the contents of *paths*, which are one document: a file, a folder, or the files of one run."""
    return apply_edits(read_as_one(open_sources(paths, args.format), args.format)[1], args)


def open_sources(
    paths: Sequence[str], format_name: str | None = None, recognised: Recognise = recognise
) -> list[Source]:
    """Return the files that *paths* name; files of unknown formats in a folder are left out."""
    sources: list[Source] = []
    for path in paths:
        require(path != "", "the name of a file is empty; is a variable of your shell not set?")
        if os.path.isdir(path):
            inside = [open_source(file) for file in folder_files(path)]
            sources += inside if format_name else _known_of(inside, path, recognised)
            continue
        matching: list[str] = []  # the files of a pattern that the shell did not expand, such as 'ar.*.et'
        if any(mark in path for mark in "*?[") and not os.path.exists(path):
            from glob import glob

            matching = sorted(filter(os.path.isfile, glob(path)))
        sources += map(open_source, matching or set_files(path))
    return sources


def _known_of(sources: Sequence[Source], folder: str, recognised: Recognise) -> list[Source]:
    known, unknown = [], []
    for source in sources:
        try:
            recognised(source)
            known.append(source)
        except FormatError as error:
            unknown.append(f"{os.path.basename(source.path)} ({error.message.partition(';')[0]})")
    listed = ", ".join(unknown[:MOST_NAMED]) + (", ..." if len(unknown) > MOST_NAMED else "")
    if not known:
        raise FormatError(f"holds no file of a known format: {listed}", folder)
    if unknown:
        print_notes([f"{folder}: left out {len(unknown)} of {len(sources)} files: {listed}"])
    return known


def apply_edits(document: Any, args: argparse.Namespace) -> Any:
    if not isinstance(document, Workload):
        return document
    for name, edit in (("repeat-layers", repeat_layers), ("backward-factor", scale_backward)):
        value = getattr(args, name.replace("-", "_"))
        if value is not None:
            document = edit(document, value)
            # A warning may have asked for the option.
            warnings = tuple(warning for warning in document.warnings if f"--{name}" not in warning)
            document = replace(document, warnings=warnings)
    return document
