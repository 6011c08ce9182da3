"""Captured programs (``stepcast capture -o FILE``): JSON of our own, with the record of a workload."""

from typing import get_type_hints

import msgspec

from stepcast.inputs.chakra.record import WorkloadRecord, build_workload
from stepcast.inputs.source import FormatError, Source, prefix_errors
from stepcast.ir.captured import Captured, CapturedMemory
from stepcast.ir.limits import CAPTURED

FORMAT, VERSION = "stepcast-captured", 6
DAMAGED = (msgspec.MsgspecError, UnicodeDecodeError, TypeError, KeyError)


def read(source: Source) -> Captured:
    data = source.data(CAPTURED)
    with prefix_errors("no captured program", source.path, DAMAGED):
        file = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        version = bytes(file.get("version", b"none"))
        if version != str(VERSION).encode():
            expected = f"this stepcast reads version {VERSION}"
            raise FormatError(f"version {version.decode()[:20]}; {expected}: capture the program again", source.path)
        kinds = {**get_type_hints(Captured), "workload": WorkloadRecord, "memory": dict[str, int]}
        if unknown := sorted(file.keys() - kinds.keys() - {"format", "version"}):
            raise FormatError(f"no captured program: unknown field {unknown[0]}", source.path)
        values = {name: msgspec.json.decode(file[name], type=kind) for name, kind in kinds.items() if name in file}
        own = {"workload": build_workload(values["workload"]), "memory": CapturedMemory(**values["memory"])}
        return Captured(**values | own)
