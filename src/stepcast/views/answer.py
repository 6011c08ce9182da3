"""The base of answers: their JSON, and how a notebook shows them."""

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from stepcast.ir.types import FactDict

if TYPE_CHECKING:
    from stepcast.ir.timeline import Timeline
    from stepcast.views.view import View


class Answer:
    """An answer to a question; *describe* returns its JSON where that needs the question too."""

    __slots__ = ()
    view: ClassVar[str] = ""  # the function below views/ that shows it, "measured.kineto_view"
    title: ClassVar[str] = "analysis"
    describe: Callable[[Any], FactDict] | None = None

    def facts(self) -> FactDict:
        """Return the figures of the answer, without those of its question."""
        raise NotImplementedError

    def to_dict(self) -> FactDict:
        """Return what the command line prints with ``--json``, except for its command and version."""
        return self.describe(self) if self.describe else self.facts()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.show().title})" if self.view else super().__repr__()

    def _repr_html_(self) -> str | None:
        """Return the page that a notebook shows; None for an answer without one."""
        if not self.view:
            return None
        from stepcast.views.html import render_notebook

        return render_notebook(self.show(), self.title)

    def show(self, timeline: "Timeline | None" = None) -> "View":
        """Return the view of the answer, with a *timeline* if its view shows one."""
        module, _, function = self.view.partition(".")
        build = getattr(import_module(f"stepcast.views.{module}"), function)
        view: View = build(self.to_dict()) if timeline is None else build(self.to_dict(), timeline)
        return view
