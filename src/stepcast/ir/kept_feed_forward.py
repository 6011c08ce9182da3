"""Bytes that an MLP or experts keep from their forward until their backward."""

from stepcast.ir.dtype import FP32_BYTES
from stepcast.ir.framework import Kernels
from stepcast.ir.kept_shape import SavedShape
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Activation


def mlp_kept(model: Model, shape: SavedShape, rows: float, inner: float) -> float:
    """Activation inputs and output: the second matmul keeps the latter."""
    if shape.kernels is Kernels.FUSED:
        return rows * inner * ((2 if model.gated else 1) * shape.activated + shape.matmul)
    sides = (3 if shape.plain else 2) if model.gated else 1
    if model.activation is Activation.RELU and not model.gated:
        return rows * inner * shape.element  # its own result, which the second product needs too, is enough
    if shape.written and model.activation is Activation.GELU_NEW:
        # Its input, both factors of the last product and the tanh; autocast has them in fp32.
        return rows * inner * (4 * shape.stream + shape.element)
    return rows * inner * (sides + 1) * shape.element


def activated(model: Model, shape: SavedShape, rows: float, inner: float) -> float:
    """Of that, what the activation and its gate made."""
    inputs = 2 if model.gated else 1
    kept = shape.activated if shape.kernels is Kernels.FUSED else shape.element
    return mlp_kept(model, shape, rows, inner) - rows * inner * inputs * kept


def mlp_transient(model: Model, shape: SavedShape, rows: float, inner: float) -> float:
    return rows * inner * shape.element * (2 if model.gated else 1)


def experts_kept(model: Model, shape: SavedShape) -> float:
    """Tokens in the order of the experts, and the experts' own activations.

    Megatron-LM weights inside the activation; a plain loop keeps each result before and after its weight.
    """
    experts = model.experts
    assert experts is not None
    width = experts.latent or model.hidden
    rows = _expert_rows(model, shape)
    gathered = rows * shape.expert_tp
    kept = gathered * width * shape.matmul
    if shape.kernels is not Kernels.FUSED:
        kept += rows * width * shape.element * 2
    kept += mlp_kept(model, shape, gathered, experts.ffn / shape.expert_tp)
    kept += shape.tokens / shape.outer * experts.count * FP32_BYTES * 2  # router logits and probabilities
    if experts.latent:
        kept += shape.tokens / shape.outer * experts.latent * shape.element
    if experts.shared_ffn:
        kept += mlp_kept(model, shape, shape.tokens, experts.shared_ffn / shape.tp)
    return kept


def experts_activated(model: Model, shape: SavedShape) -> float:
    experts = model.experts
    assert experts is not None
    gathered = _expert_rows(model, shape) * shape.expert_tp
    return activated(model, shape, gathered, experts.ffn / shape.expert_tp)


def _expert_rows(model: Model, shape: SavedShape) -> float:
    assert model.experts is not None
    return shape.tokens / shape.outer * model.experts.top_k * shape.routed


def experts_transient(model: Model, shape: SavedShape) -> float:
    experts = model.experts
    assert experts is not None
    rows = _expert_rows(model, shape) * shape.expert_tp
    if shape.plain:  # one expert at a time
        rows /= experts.count
    width = experts.latent or model.hidden
    return rows * (experts.ffn / shape.expert_tp * (2 if model.gated else 1) + width) * shape.element
