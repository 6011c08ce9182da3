"""Schedules as text, which ``parse_schedule`` reads back."""

from stepcast.simulation.schedule import Schedule


def format_schedule(schedule: Schedule) -> str:
    """Return the text of *schedule*."""
    lines = [
        f"stages {schedule.stages}",
        f"micro-batches {schedule.micro_batches}",
        f"chunks {schedule.chunks}",
        f"placement {schedule.placement}",
        "",
    ]
    for stage, order in enumerate(schedule.orders):
        text = "".join(f"{slot}+" if slot.with_next else f"{slot} " for slot in order)
        lines.append(f"{stage}: {text.strip()}")
    return "\n".join(lines) + "\n"
