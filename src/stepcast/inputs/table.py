"""Every format stepcast reads (``data/formats.toml``), and the function that reads any of them.

The function ``read(source)`` of a reader module (or ``read_run(sources)``, where several files make one run) returns
what a file holds. A format is recognised by its marks or columns, or else by ``looks_like(head)`` of its module. In a
module of several formats the names of functions end with the format's variant, ``read_slurm``, or they take it. Modules
are imported only when needed.
"""

import gc
import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import Any

from stepcast.inputs.source import DATA, FormatError, Source, expect, read_toml
from stepcast.ir.types import dataclass, require


@dataclass(frozen=True, slots=True)
class Format:
    """One format: its name, its title, the kind of document it gives, and its reader."""

    name: str
    title: str
    gives: str
    module: str
    joins: bool = False
    binary: bool = False
    variant: str = ""
    marks: tuple[str, ...] = ()  # patterns that the beginning of every such file has
    columns: str = ""  # names in its first line

    def load(self) -> ModuleType:
        return import_module(f"stepcast.inputs.{self.module}")

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function of the reader: ``looks_like``, ``read`` or ``read_run``."""
        module = self.load()
        reader: Callable[..., Any] | None = getattr(module, f"{name}_{self.variant}" if self.variant else name, None)
        return reader or partial(getattr(module, name), variant=self.variant)

    def matches(self, source: Source) -> bool:
        """Return True if the beginning of a file is that of this format."""
        if self.marks:
            text = source.head_bytes.decode("latin-1") if self.binary else source.head
            return all(re.search(mark, text) for mark in self.marks)
        if self.columns:
            first = source.head.lstrip("\ufeff \t\r\n").partition("\n")[0]
            return {*self.columns.split()} <= {name.strip() for name in re.split("[,\t]", first)}
        return bool(self.function("looks_like")(source.head_bytes if self.binary else source.head))


FORMATS = tuple(Format(name, **entry) for name, entry in read_toml(DATA / "formats.toml").items())


def format_named(name: str) -> Format:
    known = {entry.name: entry for entry in FORMATS}
    require(name in known, f"unknown format {name!r}; known: {', '.join(known)}")
    return known[name]


def recognise(source: Source) -> Format:
    """Return the format of *source*, by its content."""
    expect(source.head_bytes.strip(), "is empty; expected a workload, trace, log or model file", source.path)
    for entry in FORMATS:
        with suppress(RecursionError):  # nested too deeply to be looked at
            if entry.matches(source):
                return entry
    if source.head.lstrip().startswith("{") and '"step_s":' in source.head:
        raise FormatError("is the --json output of a verb; 'stepcast compare' and 'stepcast show' take it", source.path)
    if re.search(r'^stepcast = "', source.head, re.MULTILINE):
        raise FormatError("is a run that --save wrote; 'stepcast predict' predicts it", source.path)
    kind = "binary data" if b"\0" in source.head_bytes else "text"
    raise FormatError(f"{kind} of no known format; 'stepcast list formats' lists those that are read", source.path)


def refuse_known(source: Source, wanted: str) -> None:
    """Raise the error of :func:`misused` for a file of another kind, which could not be read as what is wanted."""
    try:
        entry = recognise(source)
    except FormatError:
        return
    if entry.gives in ("workload", "timeline", "captured"):
        raise misused(entry, source.path, wanted)


def misused(entry: Format, path: str, wanted: str) -> FormatError:
    """Return the error that a file is not what a verb wants, with the verb that takes it."""
    uses = read_toml(DATA / "words" / "uses.toml")
    use = uses.get(entry.name) or uses.get(entry.gives, "'stepcast analyze' explains it")
    return FormatError(f"is recognised as {entry.title}, but {wanted}; {use}", path)


def read_sources(sources: Sequence[Source], entry: Format) -> Any:
    """Return the document in files of one format."""
    collects = gc.isenabled()
    gc.disable()  # readers build millions of objects and no cycles, which it would scan again
    try:
        return entry.function("read_run")(sources) if entry.joins else entry.function("read")(sources[0])
    except FormatError as error:
        raise error.in_file(sources[0].path) from None
    except RecursionError:
        raise FormatError("is nested too deeply", sources[0].path) from None
    except (ValueError, ArithmeticError) as error:  # a check that a document makes of itself, or a number too large
        raise FormatError(str(error), sources[0].path) from None
    finally:
        if collects:
            gc.enable()


def read(path: str | os.PathLike[str], format_name: str | None = None) -> Any:
    """Read a file, a folder that holds one run, or a set of files by its prefix."""
    path = os.fspath(path)
    files = folder_files(path) if os.path.isdir(path) else set_files(path)
    return read_as_one([Source(file) for file in files], format_name)[1]


def folder_files(path: str) -> list[str]:
    """Return the files of a run's folder, hidden ones left out."""
    names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    files = [file for name in names if os.path.isfile(file := os.path.join(path, name))]
    if not files:
        folders_text = f"; it holds {len(names)} folders, such as {names[0]}: name one" if names else ""
        raise FormatError(f"is a directory without files; expected one run's trace files{folders_text}", path)
    return files


def set_files(path: str) -> list[str]:
    """Return the file at *path*; where there is none, the files PREFIX.RANK.et of the set that it names."""
    if os.path.exists(path):
        return [path]
    from stepcast.inputs.chakra.reader import prefix_of, rank_of, run_of

    prefix = prefix_of(path)
    folder = os.path.dirname(prefix)
    try:
        siblings = [os.path.join(folder, name) for name in os.listdir(folder or ".")]
    except OSError:
        return [path]
    ranks = {rank: file for file in siblings if run_of(file) == prefix and (rank := rank_of(file)) is not None}
    groups = [file for file in siblings if file == f"{prefix}.comm_group.json"]
    return [ranks[rank] for rank in sorted(ranks)] + groups if ranks else [path]


def read_as_one(sources: Sequence[Source], format_name: str | None = None) -> tuple[Format, Any]:
    """Return the format and the one document of *sources*; several files are the ranks of one run."""
    entry = format_named(format_name) if format_name else recognise(sources[0])
    for source in sources[1:]:
        source_format = entry if format_name else recognise(source)
        if source_format is not entry:
            raise FormatError(
                f"is {source_format.name}, but {sources[0].path} is {entry.name}; name the files of one run alone",
                source.path,
            )
    if len(sources) > 1 and not entry.joins:
        raise FormatError(f"{entry.name} files are read one at a time; give one of them", sources[1].path)
    return entry, read_sources(sources, entry)
