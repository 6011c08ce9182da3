"""The questions of ``stepcast analyze`` and ``stepcast replay`` about measured runs."""

import os
from typing import Annotated, TypedDict

from stepcast.questions.choices import Choice, Question
from stepcast.questions.question import CHOICES

INPUT = "input"


class AnalyzeQuestion(Question, frozen=True, kw_only=True):
    """A question about measured files."""

    # fmt: off
    format: Annotated[str | None, Choice(group=INPUT, metavar="NAME",
        help="read files in this format instead of detecting it: one of 'stepcast list formats'")] = None
    cluster: Annotated[str | None, Choice(group=INPUT, metavar="C", aliases=CHOICES["cluster"].aliases,
        help="cluster of the run, to compare achieved bandwidths with (needed for nccl-tests logs)")] = None
    set: Annotated[tuple[str, ...], Choice(group=INPUT, metavar="KEY=VALUE", help=CHOICES["set"].help,
        aliases=CHOICES["set"].aliases)] = ()
    calibration: Annotated[str | None, Choice(group=INPUT, metavar="C.toml", aliases=CHOICES["calibration"].aliases,
        help="OptimusPrime: constants that 'stepcast calibrate' wrote")] = None
    # fmt: on


class ReplayQuestion(Question, frozen=True, kw_only=True):
    """A question about measured files under changed conditions."""

    # fmt: off
    what_if: Annotated[tuple[str, ...], Choice(group=INPUT, metavar="K=V", aliases="whatif", help="a change: "
        "micro-batches=16, schedule=interleaved|1f1b|gpipe, bandwidth.tp=2x (also dp, pp, embedding; or 50GB/s), "
        "rank.7=healthy (or 1.5x), stage.3.layers=-1, dp=4, gpu=h100 or compute=0.9x; for Kineto traces "
        "compile=elementwise, host=graphs (or 0.5x), collective.tp=2x, kernel:NAME=0.5x or class.matmul=0.8x; may "
        "repeat")] = ()
    scale_to: Annotated[str | None, Choice(group=INPUT, metavar="dp=N",
        help="scale the run to N replicas (the same as --what-if dp=N)")] = None
    gpu: Annotated[str | None, Choice(group=INPUT, metavar="NAME", aliases=CHOICES["gpu"].aliases,
        help="GPU of the run, to compare with that of --what-if gpu=NAME")] = None
    cluster: Annotated[str | None, Choice(group=INPUT, metavar="C", aliases=CHOICES["cluster"].aliases,
        help="cluster of the run, to estimate communication that was not measured")] = None
    set: Annotated[tuple[str, ...], Choice(group=INPUT, metavar="KEY=VALUE", help=CHOICES["set"].help,
        aliases=CHOICES["set"].aliases)] = ()
    engine: Annotated[str, Choice(group=INPUT, help=CHOICES["engine"].help, values=CHOICES["engine"].values)] = "fast"
    # fmt: on

    @property
    def changes(self) -> list[str]:
        """The changes of ``--what-if`` and ``--scale-to``."""
        if self.scale_to is not None and not self.scale_to.replace(" ", "").startswith("dp="):
            raise ValueError(f"--scale-to scales the number of replicas; write dp=64, not {self.scale_to!r}")
        return [*self.what_if, *([self.scale_to] if self.scale_to is not None else [])]


class AnalyzeChoices(TypedDict, total=False):
    """Choices of ``stepcast.analyze``."""

    format: str | None
    cluster: str | None
    set: list[str] | tuple[str, ...] | str | None
    calibration: str | os.PathLike[str] | None
    trace: str | os.PathLike[str] | None


class ReplayChoices(TypedDict, total=False):
    """Choices of ``stepcast.replay``."""

    scale_to: str | None
    gpu: str | None
    cluster: str | None
    set: list[str] | tuple[str, ...] | str | None
    trace: str | os.PathLike[str] | None
    engine: str | None
