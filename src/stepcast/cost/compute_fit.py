"""The learnt constants of the compute prices, built from a parsed fit file."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from stepcast.cost.attention import AttentionFit
from stepcast.cost.matmul import MatmulFit
from stepcast.cost.memory_bound import StreamFit
from stepcast.cost.power import PowerFit
from stepcast.cost.scan import SCANS, ScanFit

Fit = TypeVar("Fit")

DEFAULT_STREAM = "other"
UNSEEN = "unseen"


class FitError(ValueError):
    """A fit file that does not say what the model needs, or says something else."""


@dataclass(frozen=True, slots=True)
class ComputeFit:
    """Everything the model of operator times has learnt. The physics is in the functions that take it."""

    source: str
    tensor: MatmulFit
    simt: MatmulFit
    # By architecture, where its kernels differ from ``tensor`` and ``simt``.
    tensor_of: Mapping[str, MatmulFit] = field(hash=False)
    simt_of: Mapping[str, MatmulFit] = field(hash=False)
    matrix_efficiency: Mapping[str, float] = field(hash=False)  # by number format, of the matmul efficiency
    # By architecture and number format, where it differs from ``matrix_efficiency``.
    matrix_efficiency_of: Mapping[str, Mapping[str, float]] = field(hash=False)
    grouped_efficiency: float  # factor on the matmul efficiency of a grouped multiply
    grouped_s: float  # per group of a grouped multiply: setting up its descriptors
    attention_forward: AttentionFit
    attention_backward: AttentionFit
    streams: Mapping[str, StreamFit] = field(hash=False)
    # What library kernels reach of the memory bandwidth, by architecture.
    memory_efficiency: Mapping[str, float] = field(hash=False)
    power: PowerFit
    step_launch_s: float  # a kernel behind others in a busy stream
    backward_call_s: float  # the least that one backward call through the autograd engine takes by itself
    # Kind of work -> architecture on which it was measured, or UNSEEN -> half width of the 90 % range.
    spread: Mapping[str, Mapping[str, float]] = field(hash=False)
    # Kind of what runs along the sequence and phase, which fits of other operators do without.
    scans: Mapping[tuple[str, str], ScanFit] = field(hash=False, default_factory=dict)

    def scan(self, kind: str, backward: bool) -> ScanFit:
        found = self.scans.get((kind, "backward" if backward else "forward"))
        if found is None:
            raise FitError(f"fit: {kind} is missing: this fit cannot price what runs along the sequence")
        return found

    def stream(self, key: str) -> StreamFit:
        """The fit of a kind of memory-bound kernel, or of kinds without their own."""
        return self.streams.get(key) or self.streams[DEFAULT_STREAM]

    def measured(self, kind: str, architecture: str) -> bool:
        """Whether work of *kind* was measured on *architecture*, or is scaled from others."""
        return architecture in self.spread[kind]

    def half_width(self, kind: str, architecture: str) -> float:
        known = self.spread[kind]
        return known.get(architecture, known[UNSEEN])

    def memory_share(self, architecture: str) -> float:
        """What the architecture reaches of its bandwidth, relative to the streams of the fit."""
        known = self.memory_efficiency
        return known.get(architecture, known.get(UNSEEN, 1.0))

    def tensor_fit(self, architecture: str) -> MatmulFit:
        return self.tensor_of.get(architecture, self.tensor)

    def simt_fit(self, architecture: str) -> MatmulFit:
        return self.simt_of.get(architecture, self.simt)

    def efficiency_of(self, architecture: str, dtype: str) -> float:
        own = self.matrix_efficiency_of.get(architecture, {})
        return own.get(dtype, self.matrix_efficiency.get(dtype, 1.0))


def compute_fit(table: Mapping[str, Any]) -> ComputeFit:
    """A parsed fit file as a ComputeFit; FitError names what is missing or unknown."""
    try:
        streams = {name: _build(StreamFit, entry, f"stream.{name}") for name, entry in table["stream"].items()}
        if DEFAULT_STREAM not in streams:
            raise FitError(f"stream.{DEFAULT_STREAM} is missing: it stands in for kinds without their own fit")
        return ComputeFit(
            source=str(table["source"]),
            tensor=_matmul(table["matmul"]["tensor"], "matmul.tensor"),
            simt=_matmul(table["matmul"]["simt"], "matmul.simt"),
            tensor_of=_by_architecture(table["matmul"], "tensor"),
            simt_of=_by_architecture(table["matmul"], "simt"),
            matrix_efficiency=dict(table["matrix_efficiency"]),
            matrix_efficiency_of={name: dict(entry) for name, entry in table.get("matrix_efficiency_of", {}).items()},
            grouped_efficiency=float(table["grouped_efficiency"]),
            grouped_s=float(table["grouped_s"]),
            attention_forward=_build(AttentionFit, table["attention"]["forward"], "attention.forward"),
            attention_backward=_build(AttentionFit, table["attention"]["backward"], "attention.backward"),
            streams=streams,
            memory_efficiency=dict(table.get("memory_efficiency", {})),
            power=_build(PowerFit, table["power"], "power"),
            step_launch_s=float(table["step_launch_s"]),
            backward_call_s=float(table["backward_call_s"]),
            spread={kind: dict(entry) for kind, entry in table["spread"].items()},
            scans={
                (kind, phase): _build(ScanFit, entry, f"{kind}.{phase}")
                for kind in SCANS
                for phase, entry in table.get(kind, {}).items()
            },
        )
    except KeyError as missing:
        raise FitError(f"fit: {missing} is missing") from None


def _by_architecture(table: Mapping[str, Any], unit: str) -> dict[str, MatmulFit]:
    """The fits of architectures that differ from the common one; each entry holds the differences."""
    common = table[unit]
    found = {}
    for name, entry in table.get(f"{unit}_of", {}).items():
        batched = {**common.get("batched", {}), **entry.get("batched", {})}
        found[name] = _matmul({**common, **entry, "batched": batched}, f"matmul.{unit}_of.{name}")
    return found


def _matmul(entry: Mapping[str, Any], where: str) -> MatmulFit:
    alone = {name: value for name, value in entry.items() if name != "batched"}
    tiles = tuple((int(height), int(width)) for height, width in entry["tiles"])
    found = _build(MatmulFit, {**alone, "tiles": tiles}, where)
    if not entry.get("batched"):
        return found
    return replace(found, batched=_matmul({**alone, **entry["batched"]}, f"{where}.batched"))


def _build(kind: type[Fit], entry: Mapping[str, Any], where: str) -> Fit:
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    unknown = sorted(set(entry) - known)
    if unknown:
        raise FitError(f"fit: {where}.{unknown[0]} is not known; known are {', '.join(sorted(known))}")
    try:
        return kind(**entry)
    except TypeError as error:
        raise FitError(f"fit: {where}: {error}") from None
