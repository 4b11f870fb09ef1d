"""Define what the exercises on attention share: causal attention of grouped heads, its gradients, and mistakes."""

import math

import torch

from grading import Mistake, random, stored

QUERY_NAMES = "sequence token head element"
ROUNDED_MISTAKES = {  # of the forwards without groups, in 08 and 22
    "scores in the inputs' dtype": Mistake(
        "        m_new =", "        S = S.to(q.dtype).to(tl.float32)\n        m_new =", "o", says="right in float32"
    ),
    "o in the inputs' dtype": Mistake(
        "        m, l = m_new",
        "        o = o.to(q.dtype).to(tl.float32)\n        m, l = m_new",
        "o",
        says="right in float32",
    ),
}


def packed(B, T, H, K, D=16, scale=1.2, apart=0.0):
    """Return projections [B, T, H + 2K, D] of H query heads, K key heads and K value heads.

    apart: added to the queries and subtracted from the keys; the scores are negative then.
    """
    qkv = random(B, T, H + 2 * K, D, seed=1, scale=scale, offset=0.3)
    qkv[:, :, :H] += apart
    qkv[:, :, H : H + K] -= apart
    return qkv


def attended(scores, v):
    """Return softmax(scores) v; an answer rounds its P for tl.dot, whatever it is relative to."""
    return stored(scores.softmax(-1)) @ v


def causal(qkv, H, K, first_masked=1, masked=-math.inf, grouped=True, bias=None, attend=attended):
    """Return o [B, T, H, D], and lse [B, H, T]: log2 of each query's sum of exponentials of its scaled scores.

    attend(scores, v) returns softmax(scores) v. The rest is for wrong answers: the distance from which keys are masked,
    what a masked score becomes, False for query head h with key head h % K, and bias(query, key), which is added to the
    scores.
    """
    q, k, v = (heads.transpose(1, 2) for heads in qkv.split([H, K, K], dim=2))
    if grouped:
        k, v = (heads.repeat_interleave(H // K, dim=1) for heads in (k, v))
    else:
        k, v = (heads.repeat(1, H // K, 1, 1) for heads in (k, v))
    scores = stored(q @ k.transpose(2, 3) / math.sqrt(q.shape[3]), value=False, gradient=True)
    later = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).triu(first_masked)
    scores = scores.masked_fill(later, masked)
    if bias is not None:
        position = torch.arange(scores.shape[2], device=q.device)
        scores = scores + bias(position[:, None], position[None, :])
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return attend(scores, v).transpose(1, 2), wide.logsumexp(3) * math.log2(math.e)


def projections(B, T, H, K, D=16):
    """Return qkv, and do, the gradient of o."""
    return {"qkv": packed(B, T, H, K, D), "do": random(B, T, H, D, seed=2, scale=0.9, offset=0.2), "H": H, "K": K}


def saved(qkv, do, H, K):
    """Return what a forward keeps for the backward: o, lse, and delta [B, H, T], the sum of do · o of each query."""
    o, lse = causal(qkv.double(), H, K)
    delta = (do.double() * o).sum(3).transpose(1, 2)
    return {"o": o.to(qkv.dtype), "lse": lse.float(), "delta": delta.float()}


def gradients(qkv, do, H, K, delta=None):
    """Return dq [B, T, H, D], dk and dv [B, T, K, D].

    delta: take this one, in place of the sum of do · o; P then goes into no tl.dot, because only dq is asked for.
    """
    qkv = qkv.detach().requires_grad_()
    attend = attended if delta is None else lambda scores, v: scores.softmax(-1) @ v
    o, lse = causal(qkv, H, K, attend=attend)
    results, gradients = [o], [do]
    if delta is not None:  # a score's gradient is P · (dP - delta), and P is that of its lse in base e
        results.append(lse)
        gradients.append(((do * o).sum(3).transpose(1, 2) - delta).detach() * math.log(2))
    dqkv = torch.autograd.grad(results, qkv, gradients)[0]
    return dict(zip(("dq", "dk", "dv"), dqkv.split([H, K, K], dim=2), strict=True))


def parts(dqkv, H, K):
    """Views of a packed gradient."""
    return dict(zip(("dq", "dk", "dv"), dqkv.split([H, K, K], dim=2), strict=True))
