"""Fused attention as an operator of its own, as a GPU runs it.

On tensors without data PyTorch would choose the kernels of a CPU or write the scores out. A GPU runs one
kernel that keeps queries, keys, values, its result and a number for each row (the logarithm of its sum).
"""

import math
from functools import lru_cache
from typing import Any

NAMESPACE = "stepcast"


@lru_cache(maxsize=1)
def attention_operators() -> Any:
    """The operators, defined once: forward and backward."""
    import torch

    library = torch.library.Library(NAMESPACE, "DEF")
    library.define(
        "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool causal, bool drops) -> (Tensor, Tensor)"
    )
    library.define(
        "attention_backward(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor out, "
        "Tensor sums, bool causal, bool drops) -> (Tensor, Tensor, Tensor)"
    )

    def forward(query: Any, key: Any, value: Any, mask: Any, causal: bool, drops: bool) -> Any:
        # Laid out in memory as the queries are (ATen/native/cudnn/MHA.cpp).
        shape = (*query.shape[:3], value.shape[-1])
        order = sorted(range(4), key=lambda at: (-query.stride(at), at))
        return torch.empty_permuted(shape, order, dtype=query.dtype, device=query.device), query.new_empty(
            shape[:3], dtype=torch.float32
        )

    def backward(grad: Any, query: Any, key: Any, value: Any, *rest: Any) -> Any:
        return tuple(torch.empty_like(each) for each in (query, key, value))

    library.impl("attention", forward, "Meta")
    library.impl("attention_backward", backward, "Meta")

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        query, key, value, mask, causal, drops = inputs
        ctx.save_for_backward(query, key, value, mask, *output)
        ctx.options = (causal, drops)
        ctx.set_materialize_grads(False)

    def gradients(context: Any, grad: Any, _: Any) -> Any:
        query, key, value, mask, out, sums = context.saved_tensors
        found = torch.ops.stepcast.attention_backward(grad, query, key, value, mask, out, sums, *context.options)
        return (*found, None, None, None)

    torch.library.register_autograd(f"{NAMESPACE}::attention", gradients, setup_context=keep, lib=library)
    return library


def fused_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """``scaled_dot_product_attention`` by these operators."""
    import torch

    attention_operators()
    if query.dim() != 4:
        lead = query.shape[:-2]
        four = [each.reshape(1, math.prod(each.shape[:-2]), *each.shape[-2:]) for each in (query, key, value)]
        mask = None if attn_mask is None else attn_mask.reshape(1, -1, *attn_mask.shape[-2:])
        out = fused_attention(four[0], four[1], four[2], mask, dropout_p, is_causal, scale, enable_gqa)
        return out.reshape(*lead, *out.shape[-2:])
    shared = query.shape[1] != key.shape[1]
    learnt = attn_mask is not None and attn_mask.requires_grad
    if learnt or (shared and not (enable_gqa and query.dtype in (torch.bfloat16, torch.float16))):
        # Flash attention and cuDNN take halves alone, and heads that share keys where they are told so; the
        # other fused kernel takes as many keys as queries (ATen/native/transformers/cuda/sdp_utils.cpp).
        # A mask that is learnt, as T5's positions are, has a gradient in neither.
        return _written_out(query, key, value, attn_mask, dropout_p, is_causal, scale)
    return torch.ops.stepcast.attention(query, key, value, attn_mask, is_causal, dropout_p > 0)[0]


def _written_out(
    query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, scale: float | None
) -> Any:
    """Attention operation by operation, in fp32 (ATen's _scaled_dot_product_attention_math), with
    the dropout of a GPU.
    """
    import torch

    dtype, wide = query.dtype, [each.float() for each in (query, key, value)]
    half = math.sqrt(scale if scale is not None else query.shape[-1] ** -0.5)
    if is_causal:
        causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = torch.where(causal, 0.0, float("-inf")).to(torch.float32)
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1 and key.shape[1] > 1:
        wide[1:] = [each.repeat_interleave(repeats, 1) for each in wide[1:]]
    scores = torch.matmul(wide[0] * half, wide[1].transpose(-2, -1) * half)
    if mask is not None:
        scores.add_(mask)
    shares = torch.ops.aten._safe_softmax(scores, -1)
    if dropout_p:
        shares = torch.native_dropout(shares, dropout_p, True)[0]
    return torch.matmul(shares, wide[2]).to(dtype)
