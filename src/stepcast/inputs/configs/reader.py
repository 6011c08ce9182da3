"""``read_config``: recognise the tool that a configuration is for, and read it."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from stepcast.inputs.configs import megatron, nemo, peers, torchtitan, tuning
from stepcast.inputs.configs.keys import RunConfig
from stepcast.inputs.configs.shell import read_flags
from stepcast.inputs.source import FormatError, Source, expect, parse_toml, prefix_errors, read_words
from stepcast.inputs.table import refuse_known
from stepcast.ir.limits import DESCRIPTION

Table = Mapping[str, object]
WORDS = read_words("configs")
UNRECOGNISED = f"unrecognised configuration format: expected {WORDS['read_configs']['expected']}"
INNER_FILES = WORDS["read_configs"]["inner_files"].split()
INNER_ENDINGS = (".json", ".yaml", ".yml")
MOST_FILES = 3  # a script names a file of accelerate, which names one of DeepSpeed
MOST_DEEP = 200
MOST_UNFOLDED = 200_000
LONGEST_NUMBER = 300  # digits; Python writes the largest float with 309
TOOLS: tuple[tuple[Callable[[Table], bool], Callable[[Table], RunConfig]], ...] = (
    (torchtitan.looks_like, torchtitan.read),
    (lambda table: any(name in table for name in ("distributed_type", *tuning.PLUGINS)), tuning.read_accelerate),
    (lambda table: any(name in table for name in tuning.DEEPSPEED_ONLY), tuning.read_deepspeed),
    (lambda table: table.keys() >= peers.CALCULON_RUN, peers.read_calculon),
    (lambda table: table.keys() >= peers.SIMUMAX_RUN, peers.read_simumax),
)


def read_config(path: str | os.PathLike[str]) -> RunConfig:
    """Read the run that the configuration at *path* describes; its tool is recognised by its content."""
    path = os.fspath(path)
    source = Source(path)
    try:
        return read_text(source.text(DESCRIPTION), path, opens_files=True)
    except FormatError as error:
        refuse_known(source, "a configuration is needed")
        raise error.in_file(path) from None


def read_text(text: str, path: str, opens_files: bool = False) -> RunConfig:
    """Read a configuration from its *text*; the ending of *path* decides between TOML, YAML and arguments.

    *opens_files*: files that it names belong to it, and are looked for in the working folder and next to *path*.
    """
    for mark, why in WORDS["unread_configs"].items():
        expect(not re.search(mark, text), why)
    folder = os.path.dirname(path) if opens_files else None
    if path.endswith((".toml", ".yaml", ".yml")) or text.lstrip().startswith("{"):
        return _read_table(_add_files(_parse_table(text, path), folder))
    if path.endswith(".py"):
        return tuning.read(_add_files(tuning.parse_python(text), folder), "trainer")
    flags = read_flags(text)
    named = {name if name.startswith("$") else name.replace("-", "_"): value for name, value in flags.items()}
    tool, keys = tuning.read_command(text, named)
    if tool in ("trainer", "llama-factory", "swift", "openrlhf"):
        return tuning.read(_add_files(keys, folder), tool)
    config = megatron.read_arguments(flags, text)
    expect(config.understood, UNRECOGNISED)
    return config


def _read_table(table: Table) -> RunConfig:
    if isinstance(arguments := table.get("MODEL_ARGS"), dict):
        return megatron.read_test(arguments)
    if tool := tuning.find_tool(table):
        return tuning.read(table, tool)
    for looks_like, read in TOOLS:
        if looks_like(table):
            return read(table)
    training = table.get("training")
    if isinstance(training, dict) and "model" in training:
        table = training  # the file holds the launcher's configuration around it
    if isinstance(table.get("model"), dict):
        return nemo.read(table)
    raise FormatError(UNRECOGNISED)


def _parse_table(text: str, path: str) -> dict[str, object]:
    if path.endswith(".toml"):
        return parse_toml(text)
    return parse_yaml(text) if path.endswith((".yaml", ".yml")) else parse_json(text)


def _add_files(table: Table, folder: str | None, depth: int = 0) -> Table:
    """Return *table* with the contents of the files that its keys name; those that do not exist stay names."""
    if folder is None or depth > MOST_FILES:
        return table
    filled = dict(table)
    for name, value in table.items():
        if name == "deepspeed_config" and isinstance(value, dict):  # a table that has such keys
            filled[name] = _add_files(value, folder, depth + 1)
        elif name in INNER_FILES and isinstance(value, str) and (words := value.split()):
            if value.lstrip().startswith("{"):
                filled[name] = parse_json(value)
                continue
            # On a command line other words may follow.
            files = [place for file in (value, words[0]) for place in (file, os.path.join(folder, file))]
            inner_path = next((file for file in files if file.endswith(INNER_ENDINGS) and os.path.isfile(file)), None)
            if inner_path is not None:
                try:
                    inner = _parse_table(Source(inner_path).text(DESCRIPTION), inner_path)
                except FormatError as error:
                    raise error.in_file(inner_path) from None
                filled[name] = _add_files(inner, os.path.dirname(inner_path), depth + 1)
    return filled


def parse_json(text: str) -> dict[str, object]:
    with prefix_errors("not valid JSON", "", (msgspec.DecodeError, RecursionError)):
        table = msgspec.json.decode(text)
    if not isinstance(table, dict):
        raise FormatError("holds no JSON object")
    return table


def parse_yaml(text: str) -> dict[str, object]:
    import yaml  # only for these files

    safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class ConfigLoader(safe):  # type: ignore[misc]
        """Refuses long numbers: those of base 60 (1:30:00) take the square of their length."""

        def construct_scalar(self, node: Any) -> Any:
            if node.tag.endswith((":int", ":float")) and len(node.value) > LONGEST_NUMBER:
                raise FormatError(f"has a number of more than {LONGEST_NUMBER} digits")
            return super().construct_scalar(node)

    try:
        _check_unfolded(yaml.parse(text, Loader=safe))
        table = yaml.load(text, Loader=ConfigLoader)
    except (yaml.YAMLError, RecursionError, ValueError, AttributeError, OverflowError) as error:
        text = str(error).replace('in "<unicode string>", ', "at ")
        raise FormatError(f"not valid YAML: {' '.join(text.split())}") from None
    if not isinstance(table, dict):
        raise FormatError("holds no YAML mapping")
    return table


def _check_unfolded(events: Iterable[object]) -> None:
    """Raise a FormatError where YAML nests, or its aliases unfold, beyond what its reader takes."""
    sizes: dict[str, int] = {}
    open_anchors: list[tuple[str | None, int]] = [(None, 0)]  # an anchor, and the values below it so far
    for event in events:
        kind, anchor = type(event).__name__, getattr(event, "anchor", None)
        if kind in ("MappingStartEvent", "SequenceStartEvent"):
            open_anchors.append((anchor, 1))
        elif kind in ("MappingEndEvent", "SequenceEndEvent", "ScalarEvent", "AliasEvent"):
            size = sizes.get(str(anchor), 1) if kind == "AliasEvent" else 1
            if kind.endswith("EndEvent"):
                anchor, size = open_anchors.pop()
            if anchor is not None and kind != "AliasEvent":
                sizes[anchor] = size
            open_anchors[-1] = (open_anchors[-1][0], open_anchors[-1][1] + size)
        if len(open_anchors) > MOST_DEEP or open_anchors[-1][1] > MOST_UNFOLDED:
            raise FormatError("nests too deeply, or its aliases stand for too much, to be a configuration")
