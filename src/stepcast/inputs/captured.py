"""Captured programs (``stepcast capture -o FILE``): JSON of our own, with the record of a workload."""

import msgspec

from stepcast.inputs.chakra.record import WorkloadRecord, build_workload
from stepcast.inputs.source import FormatError, Source, prefix_errors
from stepcast.ir.captured import Captured, CapturedMemory, LayerPart, ShardUnit, Tie
from stepcast.ir.dtype import DType
from stepcast.ir.limits import CAPTURED

FORMAT, VERSION = "stepcast-captured", 5


class CapturedFile(msgspec.Struct, forbid_unknown_fields=True):
    """A captured program as a file holds it."""

    format: str
    version: int
    workload: WorkloadRecord
    parts: tuple[LayerPart, ...]
    memory: dict[str, int]
    parameters: int
    tokens: int
    batch: int
    precision: DType
    compiled: bool
    facts: tuple[tuple[str, str], ...] = ()
    ties: tuple[Tie, ...] = ()
    units: tuple[ShardUnit, ...] = ()


def refuse_captured(source: Source) -> None:
    """Raise a FormatError that names the option for captured programs, where *source* is one and was read as another
    kind of file.
    """
    if f'"{FORMAT}"' in source.head[:200]:
        how = "'stepcast predict --captured FILE' and 'stepcast search --captured FILE' predict its step"
        raise FormatError(f"is a captured program; {how}", source.path)


def read(source: Source) -> Captured:
    data = source.data(CAPTURED)
    with prefix_errors("no captured program", source.path, (msgspec.MsgspecError, UnicodeDecodeError, TypeError)):
        version = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("version", msgspec.Raw(b"none"))
        if bytes(version) != str(VERSION).encode():
            found, expected = bytes(version).decode()[:20], f"this stepcast reads version {VERSION}"
            raise FormatError(f"version {found}; {expected}: capture the program again", source.path)
        file = msgspec.json.decode(data, type=CapturedFile)
        own = {name: getattr(file, name) for name in ("parts", "parameters", "tokens", "batch", "precision")}
        own |= {name: getattr(file, name) for name in ("compiled", "facts", "ties", "units")}
        return Captured(workload=build_workload(file.workload), memory=CapturedMemory(**file.memory), **own)
