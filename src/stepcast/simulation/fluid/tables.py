"""What the kernel works on, as flat tables: flows and links, tasks, and where everything stands.

Parts are arrays where it is compiled and lists where it runs in Python.
"""

from typing import Any, NamedTuple


class Net(NamedTuple):
    """Flows and links as flat tables; entry e of a flow says that each unit of its level takes ``use[e]`` of
    a link's capacity.
    """

    first: Any
    link: Any
    owner: Any
    """The flow of each entry."""
    use: Any
    capacity: Any


class Now(NamedTuple):
    """The flows that are under way, by link, and what they get."""

    slot_first: Any
    """Of each link where the slots of its entries begin; those under way have the first of them."""
    slot_entry: Any
    slot_flow: Any
    slot: Any
    """Of each entry under way its slot."""
    members: Any
    """Of each link the entries under way."""
    wanted: Any
    """Of each link what they would take at their bounds."""
    links: Any
    """Rows of numbers of each link, as ``filling`` names them."""
    flows: Any
    """Rows of numbers of each flow."""


class Scratch(NamedTuple):
    """What one solution needs; marks are of the solution that set them."""

    fresh: Any
    touched: Any
    touch_mark: Any
    flows: Any
    """Those that changed."""
    look_mark: Any
    looks: Any
    """Of each link how often it was looked at."""
    key: Any
    """Of each link where it stands in the heap."""
    heap: Any
    heap_place: Any


class Work(NamedTuple):
    """Tasks, then repeating traffic; what waits for what; and which flows a task is."""

    next_first: Any
    next_task: Any
    own_s: Any
    """Seconds of a task that is no flows; of others what follows once they have ended."""
    kind: Any
    """Of each task which kind of flows it is; -1 for none."""
    kind_set: Any
    """Of each kind the set of flows: they begin together, and again only after all have ended."""
    kind_alone_s: Any
    kind_scale: Any
    """Bytes, as a multiple of those of the set."""
    set_first: Any
    set_of: Any
    """Of each flow its set."""
    amount: Any
    """Of each flow the level at which it would take a second."""
    tasks: int
    period_s: Any
    """Of repeating traffic."""
    patience: int
    """Flows whose rates are found exactly; then levels that change by less than *near* are not told."""
    near: float


class State(NamedTuple):
    """Where everything stands."""

    counts: Any
    missing: Any
    """Of each task how many that it waits for have not ended."""
    start_s: Any
    end_s: Any
    begin_s: Any
    begin_task: Any
    """Tasks of flows that will begin: a heap."""
    stack: Any
    set_task: Any
    """Of each set the task that it is under way for."""
    set_left: Any
    set_end_s: Any
    pace: Any
    """Rows of numbers of each flow, as ``kernel`` names them."""
    flow_end_s: Any
    block_end_s: Any
    block_mark: Any
    near_from_s: Any


class Log(NamedTuple):
    """At which level each flow was from when to when."""

    flow: Any
    from_s: Any
    to_s: Any
    level: Any
