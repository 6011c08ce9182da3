"""The view of a step's network: use of its links over time, the busiest ones, and what was slowed down."""

from collections.abc import Mapping, Sequence

from stepcast.ir.types import FactDict, Facts
from stepcast.units import format_bytes, format_percent
from stepcast.views import view as ui
from stepcast.views.declared import build_view

MOST_LINKS = 10
# Sharing links costs so much of a step that it is worth a look.
COSTLY = 0.01


def network_view(facts: Facts) -> ui.View:
    """Return the view of a step whose communication shares links."""
    step_s, hottest = facts["step_s"], facts["hottest"]
    tiers = [tier for tier in facts["tiers"] if tier["bytes"] > 0]
    sharing_cost = step_s / facts["alone_step_s"] - 1 if facts["alone_step_s"] else 0.0
    busiest = hottest[0] if hottest else {}
    lead = "Use of the busiest link of each tier, from the start of the step to its end."
    of_tiers = [(tier["tier"], tier["busiest_over_time"]) for tier in tiers]
    of_links = [(_link_name(tier), tier["share_over_time"]) for tier in hottest[:MOST_LINKS]]
    darker = "A line for each link, the busiest first. Darker is more use; red is more than 94 %."
    on_page: Facts = {"lead": darker, "wide": True, "shown": ui.Shown.PAGE}
    use, use_of_links = "use of the busiest link of each tier over time", "use of each link over time"
    return build_view(
        "network",
        facts,
        costs=f"sharing links costs {format_percent(sharing_cost)}",
        unused=not tiers,
        busiest={**busiest, "equal": busiest.get("alike") if busiest.get("alike", 1) > 1 else None},
        at_capacity=_at_capacity(busiest, step_s) if busiest else None,
        mood=ui.Mood.BAD if sharing_cost >= COSTLY else ui.Mood.NEUTRAL,
        used_tiers=tiers,
        tiers_over_time=ui.HeatMap("Tiers over time", of_tiers, step_s, use, lead=lead, wide=True),
        links_over_time=ui.HeatMap("The busiest links over time", of_links, step_s, use_of_links, **on_page),
        busiest_links=_busiest_links(hottest, step_s) if tiers else None,
        slowed=_slowed(facts["operations"]),
    )


def _at_capacity(link: Facts, step_s: float) -> str:
    share = link["full_s"] / step_s if step_s else 0.0
    return format_percent(share) if share else "0 %"


def _link_name(link: Facts) -> str:
    others = link["alike"] - 1
    return f"{link['link']}, and {others:,} equal ones" if others else str(link["link"])


def _busiest_links(links: Sequence[Facts], step_s: float) -> ui.Bars | None:
    if not links:
        return None
    groups = sorted({name for link in links for name in link["users"]})
    bars = []
    for link in links[:MOST_LINKS]:
        total, amounts, tips = sum(link["users"].values()) or 1.0, dict[str, float](), []
        for group in groups:
            if size := link["users"].get(group, 0.0):
                kind = _colour(group)
                amounts[kind] = amounts.get(kind, 0.0) + size / total * link["share"]
                tips.append(f"{group} {format_bytes(size)}")
        at_capacity = f"at capacity {format_percent(link['full_s'] / step_s)}" if step_s else ""
        share, tip = format_percent(link["share"]), f"{link['link']}: {', '.join(tips)}"
        bars.append(ui.Bar(_link_name(link), amounts, share, at_capacity, tip))
    columns: dict[str, ui.Source] = {
        **ui.columns("busiest_links=link links=alike, mean_use=share"),
        "at capacity": lambda link: format_percent(link["full_s"] / step_s) if step_s else "-",
        "used by": lambda link: _users_words(link["users"]),
    }
    kinds: dict[str, str] = {}
    for group in groups:
        kind = _colour(group)
        kinds[kind] = f"{kinds[kind]}, {group}" if kind in kinds else group
    most, listed = max(link["share"] for link in links), ui.table_of("Busiest links", links[:MOST_LINKS], columns)
    lead = "Mean use of each link by the groups that use it, and the share of the step at capacity."
    shares: Facts = {"show": format_percent, "unit": 0.01, "table": listed, "lead": lead, "wide": True}
    return ui.Bars("Who uses the busiest links", bars, kinds, most, **shares)


def _users_words(users: Mapping[str, float]) -> str:
    """Return the groups whose bytes a link carries, most first: ``dp 80 %, pp 20 %``."""
    total = sum(users.values()) or 1.0
    shares = {name: size / total for name, size in users.items()}
    return ", ".join(f"{name} {format_percent(share, 0)}" for name, share in shares.items() if share >= 0.005)


def _colour(group: str) -> str:
    """Return the colour of a group; those of its family share one."""
    return next((kind for kind in ("tp", "cp", "ep", "pp", "dp") if kind in group), "other")


def _slowed(operations: Sequence[Facts]) -> list[FactDict]:
    """Return each kind and group of communication, summed over stages, the most slowed first."""
    sums: dict[tuple[str, str], FactDict] = {}
    for row in operations:
        key = row["operation"], row["group"]
        total = sums.setdefault(key, {"operation": key[0], "group": key[1], "runs": 0, "slowest": 1.0})
        total["runs"] += row["count"]
        for name in ("alone_s", "took_s"):
            total[name] = total.get(name, 0.0) + row[name]
        total["slowest"] = max(total["slowest"], row["slowest"])
    for total in sums.values():
        total["slowdown"] = total["took_s"] / total["alone_s"] if total["alone_s"] > 0 else 1.0
    return sorted(sums.values(), key=lambda row: row["alone_s"] - row["took_s"])
