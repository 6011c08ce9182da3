"""What the code of transformers makes of a model where PyTorch's attention cannot do it.

Sources: transformers 5.17, integrations/sdpa_attention.py, masking_utils.py and models/*/modeling_*.py.
"""

from stepcast.ir.architecture import Architecture
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Framework, Kernels, Modules
from stepcast.ir.model_parts import Activation, NormKind, PositionKind
from stepcast.ir.strategy import Strategy


def fuses_attention(model: Architecture, strategy: Strategy, framework: Framework) -> bool:
    """Whether one kernel does it: none knows sinks, none heads that share keys in fp32, and models whose
    scores are biased by distance never ask for one.
    """
    if falls_back(model, framework):
        return False
    if framework.modules is Modules.TRANSFORMERS:
        shared = model.heads != model.kv_heads and strategy.stored is DType.FP32
        if model.attention_sinks or shared or model.position.kind is PositionKind.ALIBI:
            return False
    return framework.flash_attention


def falls_back(model: Architecture, framework: Framework) -> bool:
    """Whether PyTorch runs its attention operation by operation in fp32: Falcon's code hands it one head of
    keys for all without saying that they are shared, which none of its kernels takes
    (_scaled_dot_product_attention_math, aten/src/ATen/native/transformers/attention.cpp).
    """
    one = model.joined and not model.gated and model.kv_heads == 1 < model.heads
    rotary = model.position.kind is PositionKind.ROTARY
    return framework.modules is Modules.TRANSFORMERS and one and rotary


def masks_window(window: int | None, strategy: Strategy, framework: Framework) -> bool:
    """Whether a mask says which pairs count: of a window, which PyTorch's attention does not know, and of any
    model whose code is compiled, where a mask cannot be left out for what is in it.
    """
    if framework.modules is not Modules.TRANSFORMERS:
        return False
    compiled = framework.kernels is Kernels.COMPILED
    return compiled or (window is not None and window <= strategy.seq)


def selects_heads(model: Architecture) -> bool:
    """Whether queries, keys and values are taken by index from the one tensor that a product made of them:
    BLOOM's code, whose gradients fill a tensor of that size each.
    """
    return model.activation is Activation.GELU_BLOOM


def lies_by_heads(model: Architecture) -> bool:
    """Whether queries lie head by head, not token by token: code that joins their parts makes them so."""
    return model.position.tailed or model.latent is not None


def widens_softmax(model: Architecture) -> bool:
    """Attention that is written out has its softmax in fp32, but for GPT-2, OPT, GPT-NeoX and GPT-OSS."""
    biased = model.position.kind is PositionKind.ALIBI
    return (model.norm.kind is NormKind.RMS or biased) and not model.attention_sinks
