"""The facts of framework profiles, for ``show`` and ``list``."""

from dataclasses import asdict
from typing import Any

from stepcast.frameworks.catalog import framework_names, load_profile
from stepcast.frameworks.profile import Profile
from stepcast.frameworks.words import overlap_words, recompute_word

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


def all_frameworks() -> list[Facts]:
    return [{"framework": name, **profile_facts(load_profile(name))} for name in framework_names()]
