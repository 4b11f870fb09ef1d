"""Define what exercises 09 to 11 share: causal attention of grouped heads in PyTorch, and its gradients."""

import math

import torch

from grading import random

QUERY_NAMES = "sequence token head element"


def packed(B, T, H, K, D=16, scale=1.2, apart=0.0):
    """Return projections [B, T, H + 2K, D] of H query heads, K key heads and K value heads.

    apart: added to the queries and subtracted from the keys; the scores are negative then.
    """
    qkv = random(B, T, H + 2 * K, D, seed=1, scale=scale, offset=0.3)
    qkv[:, :, :H] += apart
    qkv[:, :, H : H + K] -= apart
    return qkv


def causal(qkv, H, K, first_masked=1, masked=-math.inf, grouped=True, bias=None):
    """Return o [B, T, H, D], and lse [B, H, T]: log2 of each query's sum of exponentials of its scaled scores.

    The rest is for wrong answers: the distance from which keys are masked, what a masked score becomes, False for query
    head h with key head h % K, and bias(query, key), which is added to the scores.
    """
    q, k, v = (heads.transpose(1, 2) for heads in qkv.split([H, K, K], dim=2))
    if grouped:
        k, v = (heads.repeat_interleave(H // K, dim=1) for heads in (k, v))
    else:
        k, v = (heads.repeat(1, H // K, 1, 1) for heads in (k, v))
    scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
    later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(first_masked)
    scores = scores.masked_fill(later, masked)
    if bias is not None:
        position = torch.arange(scores.shape[2], device=q.device)
        scores = scores + bias(position[:, None], position[None, :])
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return (scores.softmax(3) @ v).transpose(1, 2), wide.logsumexp(3) * math.log2(math.e)


def saved(B, T, H, K, D=16):
    """Return what a backward kernel is given: qkv, o, do, lse and delta [B, H, T] (the sum of do · o of each query)."""
    qkv = packed(B, T, H, K, D)
    o, lse = causal(qkv, H, K)
    do = random(B, T, H, D, seed=2, scale=0.9, offset=0.2)
    return {"qkv": qkv, "o": o, "do": do, "lse": lse, "delta": (do * o).sum(3).transpose(1, 2), "H": H, "K": K}


def gradients(qkv, do, H, K):
    """dq [B, T, H, D], dk and dv [B, T, K, D]."""
    qkv = qkv.detach().requires_grad_()
    dqkv = torch.autograd.grad(causal(qkv, H, K)[0], qkv, do)[0]
    return dict(zip(("dq", "dk", "dv"), dqkv.split([H, K, K], dim=2), strict=True))


def parts(dqkv, H, K):
    """Views of a packed gradient."""
    return dict(zip(("dq", "dk", "dv"), dqkv.split([H, K, K], dim=2), strict=True))
