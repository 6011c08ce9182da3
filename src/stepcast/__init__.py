"""stepcast: forecast a distributed LLM training step, and explain one after it ran."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from stepcast.inputs.errors import FormatError as FormatError
    from stepcast.inputs.table import read as read
    from stepcast.ir.layout import Layout as Layout
    from stepcast.ir.model import Model as Model
    from stepcast.ir.strategy import Strategy as Strategy
    from stepcast.ir.timeline import Timeline as Timeline
    from stepcast.ir.workload import Workload as Workload

# Names are loaded when first used: `import stepcast` alone costs nothing.
PUBLIC = {
    "FormatError": "stepcast.inputs.errors",
    "read": "stepcast.inputs.table",
    "Layout": "stepcast.ir.layout",
    "Model": "stepcast.ir.model",
    "Strategy": "stepcast.ir.strategy",
    "Timeline": "stepcast.ir.timeline",
    "Workload": "stepcast.ir.workload",
}
__all__ = ["__version__", *PUBLIC]


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return getattr(import_module(PUBLIC[name]), name)
    raise AttributeError(f"module 'stepcast' has no attribute {name!r}")
