"""The questions of ``stepcast analyze`` and ``stepcast replay`` about measured runs."""

from typing import Annotated

from stepcast.ir.types import replace
from stepcast.questions.choices import Choice, Question
from stepcast.questions.question import CHOICES

INPUT = "input"


class AnalyzeQuestion(Question, frozen=True, kw_only=True):
    """A question about measured files."""

    # fmt: off
    format: Annotated[str | None, Choice(group=INPUT)] = None
    cluster: Annotated[str | None, Choice(group=INPUT)] = None
    set: Annotated[tuple[str, ...], Choice(group=INPUT)] = ()
    calibration: Annotated[str | None, Choice(group=INPUT)] = None
    # fmt: on


class ReplayQuestion(Question, frozen=True, kw_only=True):
    """A question about measured files under changed conditions."""

    # fmt: off
    what_if: Annotated[tuple[str, ...], Choice(group=INPUT)] = ()
    scale_to: Annotated[str | None, Choice(group=INPUT)] = None
    gpu: Annotated[str | None, Choice(group=INPUT)] = None
    cluster: Annotated[str | None, Choice(group=INPUT)] = None
    set: Annotated[tuple[str, ...], Choice(group=INPUT)] = ()
    engine: Annotated[str, replace(CHOICES["engine"], group=INPUT)] = "fast"
    # fmt: on

    @property
    def changes(self) -> list[str]:
        """The changes of ``--what-if`` and ``--scale-to``."""
        if self.scale_to is not None and not self.scale_to.replace(" ", "").startswith("dp="):
            raise ValueError(f"--scale-to scales the number of replicas; write dp=64, not {self.scale_to!r}")
        return [*self.what_if, *([self.scale_to] if self.scale_to is not None else [])]
