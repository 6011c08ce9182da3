"""Changes to a Framework among those to a Strategy."""

from dataclasses import fields
from typing import Any

from stepcast.ir.framework import Framework

NAMES = {field.name for field in fields(Framework)}


def software(changes: dict[str, Any]) -> Framework:
    """The Framework of those *changes* that are its fields, which are taken out."""
    return Framework(**{name: changes.pop(name) for name in list(changes) if name in NAMES})
