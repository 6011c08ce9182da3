"""What the code of transformers makes of a model where PyTorch's attention cannot do it.

Sources: transformers 5.17, integrations/sdpa_attention.py, masking_utils.py and models/*/modeling_*.py.
"""

from stepcast.ir.architecture import Architecture
from stepcast.ir.dtype import DType
from stepcast.ir.framework import Framework, Kernels, Modules, SelectiveRule
from stepcast.ir.model_parts import Activation, NormKind, PositionKind
from stepcast.ir.strategy import RecomputeModule, Strategy


def fuses_attention(model: Architecture, strategy: Strategy, framework: Framework) -> bool:
    """Whether one kernel does it: none knows sinks, none what PyTorch falls back for, and models whose scores
    are biased by distance never ask for one.
    """
    if framework.modules is Modules.TRANSFORMERS:
        unknown = model.attention_sinks or model.position.kind is PositionKind.ALIBI
        if unknown or falls_back(model, strategy, framework):
            return False
    return framework.flash_attention


def recomputes_in_vain(model: Architecture, strategy: Strategy, framework: Framework) -> bool:
    """Return True if recomputing core attention, and nothing else, frees no memory.

    Fused attention stores no scores, and its inputs and result stay for the projections around it.
    """
    modules = framework.selective is SelectiveRule.MODULES
    core_only = strategy.recompute.selected == (RecomputeModule.CORE,)
    return modules and core_only and fuses_attention(model, strategy, framework)


def falls_back(model: Architecture, strategy: Strategy, framework: Framework) -> bool:
    """Whether PyTorch runs its attention operation by operation, in fp32: heads that share keys in fp32,
    which no kernel takes, and Falcon's, whose code does not say that they are shared
    (_scaled_dot_product_attention_math, aten/src/ATen/native/transformers/attention.cpp).
    """
    if framework.modules is not Modules.TRANSFORMERS or not framework.flash_attention:
        return False
    unsaid = model.joined and not model.gated and model.kv_heads == 1
    rotary = model.position.kind is PositionKind.ROTARY
    return model.heads != model.kv_heads and rotary and (unsaid or strategy.stored is DType.FP32)


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
