"""The lanes of every rank, and the registers through which the pieces of a slot pass times on."""

from stepcast.ir.layout import Channel, Group
from stepcast.ir.types import cached_property, dataclass
from stepcast.ir.workload import Phase
from stepcast.simulation.schedule import SlotAction

COMPUTE = 0
COMPUTE_NAME = "compute"
SEND_NAMES = ("pp send activations", "pp send gradients")
RECEIVE_NAMES = ("pp receive activations", "pp receive gradients")
HOST_NAME = "host"
STREAMS = 2
"""Slots that one call may interleave."""
PHASES_OF = {
    SlotAction.FORWARD: (Phase.FORWARD,),
    SlotAction.BACKWARD: (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT),
    SlotAction.INPUT: (Phase.INPUT_GRADIENT,),
    SlotAction.WEIGHT: (Phase.WEIGHT_GRADIENT,),
}
"""The phases of a layer that each kind of slot runs. A whole backward passes its gradient on when it has ended, as
autograd does; a split one after its input half."""


@dataclass(frozen=True)
class Lanes:
    """Compute, the lanes of the pipeline's messages, one for each group, the host's; then registers.

    Messages that both sides stop for need lanes to receive in; others arrive in the sender's. An eager host has a lane
    of its own, in which it issues what the others run.
    """

    groups: tuple[Channel, ...]
    receives: bool = False
    host: bool = False
    named: tuple[str, ...] = ()  # ops that others wait for by name in a later piece

    @cached_property
    def messages(self) -> tuple[str, ...]:
        return SEND_NAMES + RECEIVE_NAMES if self.receives else SEND_NAMES

    @cached_property
    def lanes(self) -> tuple[str, ...]:
        groups = (str(group) for group in self.groups)
        return (COMPUTE_NAME, *self.messages, *groups, *((HOST_NAME,) if self.host else ()))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of lanes and registers."""
        streams = (f"{what} {stream}" for stream in range(STREAMS) for what in ("given", "done"))
        return (*self.lanes, "begin", "turn", "read", *streams, *self.named)

    @cached_property
    def count(self) -> int:
        return len(self.names)

    @property
    def begin(self) -> int:
        """A register that nothing is ever stored in: the start of the step."""
        return len(self.lanes)

    @property
    def turn(self) -> int:
        """When the compute lane came to the slot."""
        return len(self.lanes) + 1

    @property
    def read(self) -> int:
        """The latest result that the host needs before it issues more."""
        return len(self.lanes) + 2

    def given(self, stream: int) -> int:
        """Return the register of when the slot's activation or gradient arrived."""
        return len(self.lanes) + 3 + 2 * stream

    def done(self, stream: int) -> int:
        """Return the register of the end of the slot's latest computation or blocking communication."""
        return len(self.lanes) + 4 + 2 * stream

    @cached_property
    def register(self) -> dict[str, int]:
        """Registers by the names of ops."""
        first = len(self.lanes) + 3 + 2 * STREAMS
        return {name: first + index for index, name in enumerate(self.named)}

    @cached_property
    def collectives(self) -> tuple[int, ...]:
        """The lanes of the groups."""
        first = 1 + len(self.messages)
        return tuple(range(first, first + len(self.groups)))

    @cached_property
    def host_lane(self) -> int | None:
        return len(self.lanes) - 1 if self.host else None

    @cached_property
    def _lane_of(self) -> dict[Channel, int]:
        return dict(zip(self.groups, self.collectives, strict=True))

    def of(self, group: Channel) -> int:
        """Return the lane of *group*."""
        return self._lane_of[group]

    def group(self, lane: int) -> Channel | None:
        """Return the group whose communication runs in *lane*; None for computing and for the host."""
        if lane in (COMPUTE, self.host_lane):
            return None
        index = lane - 1 - len(self.messages)
        return Group.PP if index < 0 else self.groups[index]
