"""DualPipe: micro-batches enter at both ends, and a forward overlaps a backward that goes the other way."""

from collections import deque

from stepcast.ir.schedules import PiecePlacement
from stepcast.simulation.schedule import Schedule, Slot, SlotAction


def dualpipe(stages: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """The eight steps of DualPipe. A chunk is a direction: the stage holds two pieces of the model.

    Source: DeepSeek-V3 Technical Report (2024), section 3.2.1 and figure 5; the lengths of the steps are
    those of github.com/deepseek-ai/DualPipe.
    """
    orders = (_Stage(stages, micro_batches, stage).order() for stage in range(stages))
    return Schedule("dualpipe", stages, micro_batches, chunks, PiecePlacement.TWO_WAY, tuple(orders))


class _Stage:
    """Writes the order of one stage. *near* is the direction whose entrance is the closer one, *far* the
    other."""

    def __init__(self, stages: int, micro_batches: int, stage: int) -> None:
        self.from_edge = min(stage, stages - 1 - stage)
        self.to_middle = stages // 2 - 1 - self.from_edge
        self.main = micro_batches // 2 - stages + self.from_edge + 1
        self.near, self.far = (0, 1) if stage < stages // 2 else (1, 0)
        self.half = micro_batches // 2
        self.slots: list[Slot] = []
        self.forwards = [0, 0]
        self.backwards = [0, 0]
        self.held: deque[Slot] = deque()

    def order(self) -> tuple[Slot, ...]:
        near, far = self.near, self.far
        for _ in range(2 * self.to_middle):
            self.forward(near)
        for _ in range(self.from_edge + 1):
            self.forward(near)
            self.forward(far)
        for _ in range(self.to_middle):
            self.input(far)
            self.weight()
            self.forward(far)
        for turn in range(self.main):
            # The two middle stages run their first pair one after the other: the far side is waiting for it.
            self.forward(near, overlap=turn > 0 or self.to_middle > 0)
            self.backward(far)
            self.forward(far, overlap=True)
            self.backward(near)
        for _ in range(self.to_middle):
            self.backward(far)
            self.forward(far, overlap=True)
            self.backward(near)
        self.drain()
        return tuple(self.slots)

    def drain(self) -> None:
        """The last backwards; the second half of them leave their weight gradients for the gaps that
        follow."""
        tail = [self.far, self.near] * (self.from_edge + 1)
        for count, direction in enumerate(tail):
            if count <= self.from_edge:
                self.backward(direction)
            else:
                self.input(direction)
        for _ in range(self.to_middle):
            self.weight()
            self.input(self.near)
        while self.held:
            self.weight()

    def batch(self, counter: list[int], direction: int) -> int:
        counter[direction] += 1
        return direction * self.half + counter[direction] - 1

    def forward(self, direction: int, overlap: bool = False) -> None:
        self.slots.append(Slot(SlotAction.FORWARD, self.batch(self.forwards, direction), direction, overlap))

    def backward(self, direction: int) -> None:
        self.slots.append(Slot(SlotAction.BACKWARD, self.batch(self.backwards, direction), direction))

    def input(self, direction: int) -> None:
        slot = Slot(SlotAction.INPUT, self.batch(self.backwards, direction), direction)
        self.slots.append(slot)
        self.held.append(slot)

    def weight(self) -> None:
        """The weight gradient that has waited longest."""
        slot = self.held.popleft()
        self.slots.append(Slot(SlotAction.WEIGHT, slot.micro_batch, slot.chunk))
