"""What frameworks are, as facts for ``show`` and rows for ``list``."""

from dataclasses import asdict
from typing import Any

from stepcast.frameworks.catalog import framework_names, load_profile
from stepcast.frameworks.profile import Profile
from stepcast.frameworks.words import overlap_words, recompute_word
from stepcast.units import GB, GIB

Facts = dict[str, Any]


def profile_facts(profile: Profile) -> Facts:
    framework, defaults = profile.framework, profile.defaults
    software = {
        name: str(value) if isinstance(value, str) else value
        for name, value in asdict(framework).items()
        if name not in ("name", "optimizer", "overhead")
    }
    for name in profile.as_trained & set(software):
        software[name] = "as trained"
    optimizer = asdict(framework.optimizer)
    optimizer["moment_dtype"] = (
        "as trained" if "moment_dtype" in profile.as_trained else str(framework.optimizer.moment_dtype)
    )
    return {
        "kind": "framework",
        "name": profile.name,
        "description": profile.description,
        "software": software,
        "optimizer": optimizer,
        "memory": asdict(framework.overhead),
        "defaults": {
            "precision": str(defaults.precision),
            "sharding": str(defaults.sharding),
            "sequence_parallel": defaults.sequence_parallel,
            "recompute": recompute_word(defaults.recompute),
            "overlap": list(overlap_words(defaults.overlap)),
            "context": str(defaults.context),
            "seq": defaults.seq,
            "chunks": defaults.chunks,
        },
        "supports": {key: list(words) for key, words in profile.supports.items()},
        "presets": len(profile.presets),
        "residuals": [each.facts() for each in profile.residuals],
        "sources": dict(profile.sources),
    }


def profile_pairs(found: Facts) -> list[tuple[str, object]]:
    """The facts of a framework as a person reads them."""
    software, optimizer, memory, chosen = (found[part] for part in ("software", "optimizer", "memory", "defaults"))
    habits = [name.replace("_", " ") for name, value in software.items() if value is True and name != "flash_attention"]
    attention = "flash" if software["flash_attention"] else "unfused"
    master = "fp32 weights" if optimizer["master_weights"] else "no fp32 weights"
    pairs: list[tuple[str, object]] = [
        ("framework", f"{found['name']}: {found['description']}"),
        ("kernels", f"{software['kernels']}, issued {software['execution']}"),
        ("attention", f"{attention}, kernels {software['attention']}"),
        ("gradients", software["gradient_dtype"]),
        ("optimizer", f"{optimizer['kind']}, moments {optimizer['moment_dtype']}, {master}"),
        ("dispatcher", software["dispatcher"]),
        ("offloaded", software["offloaded"]),
        ("selective", software["selective"]),
        ("habits", ", ".join(habits) or "none"),
        (
            "memory",
            f"{memory['context_bytes'] / GB:g} GB of context, {memory['communicator_bytes'] / GIB:g} GiB a "
            f"group, {memory['fragmentation']:.0%} of activations and {memory['displaced']:.0%} of moments "
            "fragmented"
            + (" (expandable segments)" if memory["expandable_segments"] else "")
            + (", fitted" if memory["fitted"] else ""),
        ),
    ]
    usual = f"{chosen['precision']}, sharding {chosen['sharding']}, recompute {chosen['recompute']}"
    pairs += [("unless said", usual), ("overlap", ", ".join(chosen["overlap"]) or "nothing")]
    pairs += [(key.replace("_", " "), ", ".join(words) or "none") for key, words in found["supports"].items()]
    if found["presets"]:
        pairs.append(("presets", found["presets"]))
    pairs += [
        ("residual", f"{_kind(each)}: times {each['factor']:g} ({each['rows']} runs, {each['sources']} sources)")
        for each in found["residuals"]
    ]
    return pairs


def _kind(residual: Facts) -> str:
    return f"{'experts' if residual['experts'] else 'dense'} on {residual['generation']}"


def all_frameworks() -> list[Facts]:
    return [{"framework": name, **profile_facts(load_profile(name))} for name in framework_names()]


def framework_row(found: Facts) -> Facts:
    software, chosen = found["software"], found["defaults"]
    return {
        "framework": found["name"],
        "kernels": software["kernels"],
        "execution": software["execution"],
        "gradients": software["gradient_dtype"],
        "sharding": chosen["sharding"],
        "recompute": chosen["recompute"],
    }
