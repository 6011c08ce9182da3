"""How verbs print: JSON alone on standard output, or text that fits the terminal; warnings aside."""

import argparse
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepcast.report.text import bullet

if TYPE_CHECKING:
    from stepcast.ir.timeline import Timeline


def print_json(value: Any) -> None:
    """One JSON object on standard output and nothing else there."""
    import msgspec

    data = msgspec.json.format(msgspec.json.encode(value, enc_hook=_plain), indent=2)
    sys.stdout.write(data.decode() + "\n")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def new_file(name: str) -> str:
    """A file to write beside what is printed, as an argparse type: it cannot be standard output.

    That it can be written is seen before the work is done, and not after.
    """
    if name in ("", "-"):
        raise argparse.ArgumentTypeError(f"expected the name of a file to write, not {name!r}")
    if why := _unwritable(name):
        raise argparse.ArgumentTypeError(f"{name}: {why}")
    return name


def _unwritable(name: str) -> str:
    """Why no file *name* can be written; nothing where it can."""
    folder = os.path.dirname(name) or "."
    if os.path.isdir(name):
        return "is a folder; expected the name of a file to write"
    if not os.path.isdir(folder):
        return f"there is no folder {folder}; create it first"
    if not os.access(name if os.path.exists(name) else folder, os.W_OK):
        return "cannot be written: permission denied; choose another place"
    return ""


# Arguments of verbs that name files to write, and those that name files to read.
WRITTEN = ("trace", "to_workload", "output")
READ = ("file", "files", "runs", "input", "predicted", "measured", "model", "cluster", "gpu", "calibration")


def check_files(args: argparse.Namespace) -> None:
    """No verb writes over what it reads, or two things into one file."""
    taken: dict[str, str] = {}
    for name in (*READ, *WRITTEN):
        value = getattr(args, name, None)
        for path in value if isinstance(value, list) else [value]:
            if not isinstance(path, str) or path in ("", "-"):  # --runs is a number elsewhere
                continue
            if name in READ and not os.path.exists(path):
                continue
            place = os.path.realpath(path)
            if name in WRITTEN and place in taken:
                use = "to read" if taken[place] in READ else f"that --{taken[place].replace('_', '-')} writes"
                raise ValueError(f"{path}: is the file {use}; give another name to write")
            taken[place] = name


def write_file(path: str, data: bytes) -> int:
    """Write *data*, compressed where the name ends in .gz; the bytes written."""
    if why := _unwritable(path):
        raise ValueError(f"{path}: {why}")
    if path.endswith(".gz"):
        import gzip

        data = gzip.compress(data, mtime=0)
    return Path(path).write_bytes(data)


def write_trace(timeline: "Timeline", path: str) -> None:
    """Write *timeline* for a trace viewer."""
    from stepcast.outputs.perfetto import write

    write_file(path, write(timeline))


def terminal_width() -> int:
    """Columns to fill: the terminal's, within what reads well."""
    return max(60, min(shutil.get_terminal_size((100, 24)).columns, 140))


def print_warnings(warnings: Iterable[str]) -> None:
    """Warnings go to standard error, so that they never mix with a result that is piped on."""
    for warning in warnings:
        print(bullet(warning, "warning: ", terminal_width()), file=sys.stderr)


def print_notes(notes: Iterable[str]) -> None:
    """What a user may want to know and need not act on: one line each, as errors have."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def heading(title: str) -> str:
    return f"\033[1m{title}\033[0m" if sys.stdout.isatty() else title
