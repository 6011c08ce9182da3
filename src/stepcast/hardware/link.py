"""One direction of one connection."""

from dataclasses import dataclass, replace

from stepcast.hardware.check import require_amount, require_positive


@dataclass(frozen=True, slots=True)
class Link:
    """One direction: its line rate, the time of an empty message, and the share of the rate that data get."""

    bandwidth_bytes_per_s: float
    latency_s: float
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        require_positive(self, "bandwidth_bytes_per_s", "efficiency")
        require_amount(self, "latency_s")
        if self.efficiency > 1:
            raise ValueError(f"efficiency must be at most 1, not {self.efficiency!r}")

    @property
    def effective_bytes_per_s(self) -> float:
        """What a long transfer reaches."""
        return self.bandwidth_bytes_per_s * self.efficiency

    def scaled(self, factor: float) -> "Link":
        """The same link with *factor* times the bandwidth: several side by side, or a share of one."""
        return replace(self, bandwidth_bytes_per_s=self.bandwidth_bytes_per_s * factor)
