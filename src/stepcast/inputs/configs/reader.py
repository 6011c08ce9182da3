"""``read_config``: which tool a configuration is of, and what it says."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stepcast.inputs.configs import accelerate, deepspeed, megatron, nemo, torchtitan
from stepcast.inputs.configs.keys import RunConfig
from stepcast.inputs.errors import FormatError
from stepcast.inputs.source import Source
from stepcast.inputs.toml import parse_toml
from stepcast.ir.limits import DESCRIPTION

KNOWN = (
    "Megatron-LM arguments or scripts, NeMo or Megatron-Bridge YAML, torchtitan TOML, DeepSpeed JSON, accelerate YAML"
)

MOST_DEEP = 200
MOST_UNFOLDED = 200_000

Table = Mapping[str, Any]
TOOLS: tuple[tuple[Callable[[Table], bool], Callable[[Table], RunConfig]], ...] = (
    (torchtitan.looks_like, torchtitan.read),
    (accelerate.looks_like, accelerate.read),
    (deepspeed.looks_like, deepspeed.read),
)


def read_config(path: str | os.PathLike[str]) -> RunConfig:
    """What the configuration at *path* says of a run; recognised by its content."""
    source = Source(path)
    try:
        return _read(source.text(DESCRIPTION), os.fspath(path))
    except FormatError as error:
        raise error.at(os.fspath(path)) from None


def _read(text: str, path: str) -> RunConfig:
    if path.endswith(".toml"):
        table = parse_toml(text)
    elif text.lstrip().startswith("{"):
        table = _json(text)
    elif path.endswith((".yaml", ".yml")):
        table = _yaml(text)
    else:
        found = megatron.read_script(text)
        if not found.understood:
            raise FormatError(f"is no configuration that is known: expected {KNOWN}")
        return found
    return _of_table(table)


def _of_table(table: Mapping[str, Any]) -> RunConfig:
    if isinstance(table.get("MODEL_ARGS"), dict):
        return megatron.read_test(table)
    for looks_like, read in TOOLS:
        if looks_like(table):
            return read(table)
    if isinstance(table.get("training"), dict) and "model" in table["training"]:
        table = table["training"]  # the launcher's whole configuration
    if isinstance(table.get("model"), dict):
        return nemo.read(table)
    raise FormatError(f"is no configuration that is known: expected {KNOWN}")


def _json(text: str) -> dict[str, Any]:
    import msgspec

    try:
        table = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"not valid JSON: {error}") from None
    if not isinstance(table, dict):
        raise FormatError("holds no JSON object")
    return table


def _yaml(text: str) -> dict[str, Any]:
    import yaml  # only for these files

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        _check_unfolded(yaml.parse(text, Loader=loader))
        table = yaml.load(text, Loader=loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        first = " ".join(str(error).split())
        raise FormatError(f"not valid YAML: {first}") from None
    if not isinstance(table, dict):
        raise FormatError("holds no YAML mapping")
    return table


def _check_unfolded(events: Iterable[Any]) -> None:
    """A FormatError where it nests, or its aliases unfold, beyond what its reader takes."""
    sizes: dict[str, int] = {}
    within: list[tuple[str | None, int]] = [(None, 0)]  # an anchor, and the values below it so far
    for event in events:
        kind, anchor = type(event).__name__, getattr(event, "anchor", None)
        if kind in ("MappingStartEvent", "SequenceStartEvent"):
            within.append((anchor, 1))
        elif kind in ("MappingEndEvent", "SequenceEndEvent", "ScalarEvent", "AliasEvent"):
            size = sizes.get(str(anchor), 1) if kind == "AliasEvent" else 1
            if kind.endswith("EndEvent"):
                anchor, size = within.pop()
            if anchor is not None and kind != "AliasEvent":
                sizes[anchor] = size
            within[-1] = (within[-1][0], within[-1][1] + size)
        if len(within) > MOST_DEEP or within[-1][1] > MOST_UNFOLDED:
            raise FormatError("nests too deeply, or its aliases stand for too much, to be a configuration")
