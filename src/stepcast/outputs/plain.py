"""Any noun as JSON: dataclasses become objects that name their type, arrays become lists."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any


def write(document: object) -> bytes:
    import msgspec

    return msgspec.json.format(msgspec.json.encode(to_plain(document)), indent=1) + b"\n"


def to_plain(value: Any) -> Any:
    """*value* as dicts, lists, numbers and strings."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        listed = {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
        return {"type": type(value).__name__} | listed
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    return [to_plain(item) for item in value]
