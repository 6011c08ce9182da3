"""Words for recomputation, offloading and overlap, on the command line and in profiles."""

from collections.abc import Iterable

from stepcast.ir.strategy import Offload, Overlap, Recompute, RecomputeKind, RecomputeModule

OFFLOADS = ("optimizer", "activations")
OVERLAPS = ("gradients", "parameters", "tensor", "tensor-gradients", "transfers", "experts")


def recompute_of(text: str) -> Recompute:
    """Read ``none``, ``selective``, ``full``, ``block:N`` or ``selective:A,B``; the error starts with the word."""
    kind, colon, rest = text.partition(":")
    if kind == RecomputeKind.SELECTIVE and colon:
        words, known = dict.fromkeys(rest.split(",")), [str(module) for module in RecomputeModule]
        if unknown := sorted(set(words) - set(known)):
            raise ValueError(f"selective: {unknown[0]!r} is not a module; expected {', '.join(known)}")
        return Recompute(RecomputeKind.SELECTIVE, modules=tuple(map(RecomputeModule, words)))
    if kind not in set(RecomputeKind) or (rest and not (rest.isascii() and rest.isdigit())):
        raise ValueError(f"{text!r}: expected none, selective, full, or block:N, or selective:A,B,...")
    return Recompute(RecomputeKind(kind), int(rest or 0))


def recompute_word(recompute: Recompute) -> str:
    if recompute.kind is RecomputeKind.BLOCK:
        return f"{recompute.kind}:{recompute.layers}"
    return f"{recompute.kind}:{','.join(recompute.modules)}" if recompute.modules else str(recompute.kind)


def offload_of(text: str) -> Offload:
    """Read ``none``, or ``optimizer`` and ``activations``, each alone or with a share: ``optimizer=0.5``."""
    shares: dict[str, float] = {}
    for word in [] if text == "none" else text.split(","):
        name, equals, share = word.partition("=")
        if name not in OFFLOADS or name in shares:
            raise ValueError(f"{text!r}: expected {' or '.join(OFFLOADS)}, each once, with =SHARE or without")
        try:
            shares[name] = float(share) if equals else 1.0
        except ValueError:
            raise ValueError(f"{text!r}: expected a share between 0 and 1, such as {name}=0.5") from None
    return Offload(**shares)


def offload_word(offload: Offload) -> str:
    shares = {name: getattr(offload, name) for name in OFFLOADS}
    words = [name if share == 1 else f"{name}={share!r}" for name, share in shares.items() if share]
    return ",".join(words) or "none"


def overlap_of(words: Iterable[str]) -> Overlap:
    """Read words for overlapped communication; the error starts with the wrong word."""
    chosen = set(words)
    if unknown := sorted(chosen - set(OVERLAPS)):
        raise ValueError(f"{unknown[0]!r}: expected {', '.join(OVERLAPS)}, or none")
    return Overlap(**{name.replace("-", "_"): name in chosen for name in OVERLAPS})


def overlap_words(overlap: Overlap) -> tuple[str, ...]:
    return tuple(name for name in OVERLAPS if getattr(overlap, name.replace("-", "_")))
