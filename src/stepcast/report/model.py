"""What a Model is: its sizes and exact parameter counts."""

from typing import Any

from stepcast.ir.model import Model

Facts = dict[str, Any]
SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "max_seq")


def model_facts(model: Model) -> Facts:
    facts: Facts = {"kind": "model", "name": model.name}
    facts |= {name: getattr(model, name) for name in SIZES}
    facts |= {
        "tied": model.tied,
        "gated": model.gated,
        "activation": str(model.activation),
        "position": str(model.position.kind),
        "norm": str(model.norm.kind),
        "parameters": model.parameters,
        "active_parameters": model.active_parameters,
        "embedding_parameters": model.embedding_parameters,
        "head_parameters": model.head_parameters,
    }
    if model.experts is not None:
        facts |= {
            "experts": model.experts.count,
            "experts_per_token": model.experts.top_k,
            "expert_ffn": model.experts.ffn,
            "expert_layers": model.expert_layers,
        }
    return facts
