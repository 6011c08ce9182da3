"""Weights that a benchmark of a few steps never gives a gradient."""

from stepcast.ir.model import Model


def unseen_share(model: Model, tokens: int) -> float:
    """Of all weights, the rows of an embedding whose tokens are not among *tokens* drawn evenly, again and
    again the same; a tied one has gradients as the head.
    """
    if model.tied:
        return 0.0
    rows = model.vocab * (1.0 - 1.0 / model.vocab) ** tokens
    return round(rows * model.hidden / model.parameters, 3)
