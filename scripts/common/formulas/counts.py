"""FLOPs, bytes, launches and saved activations of every part of a training step, as functions of the sizes.

    sizes = sizes_of(load_version(3).parse_options(["--preset", "small"]))
    step = step_counts(3, "bfloat16", sizes)
    step["attention"]["backward"]["flops"], total(step, "bytes")

The order is that of TINY_LLAMA_ARCHITECTURE.md. tests/tools/formulas/test_counts.py compares every part with the
operators and kernels that the scripts run.

flops       of matmuls, 2 per multiply-add; attention kernels compute the causal half of the scores
operations  of everything else: one per element of the largest operand, as version 1 computes it in float32
bytes       each launch reads its operands once and writes its results once; a cache may save some of it
launches    operators that compute; PyTorch's may start more than one kernel, a Triton kernel is one
saved       bytes that the backward needs from the forward, each storage once, without parameters and RoPE tables

Version 3's fused loss computes output head and cross-entropy, and their gradients, in chunks of rows in the forward. It
is counted from FUSED_LOSS_FROM vocabulary entries on, unless the argument fused says otherwise.
Gradient scaling (float16) is left out. Of version 4 the FLOPs alone are counted: the compiler chooses the rest.
"""

from collections import namedtuple

from common.formulas.gpus import GPUS, peak_tflops

PARTS = (
    "embedding", "norms and residual", "QKV projection", "RoPE", "attention", "output projection", "gate and up",
    "SwiGLU", "down projection", "output head", "cross-entropy", "AdamW",
)  # fmt: skip
PHASES = ("forward", "backward")
ELEMENT_BYTES = {"float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2}
CAST = 6  # bytes: an element is read in float32 and written in 16 bits, or the other way round
MAX_ONE_HOT = 4096  # vocabulary up to which version 3 computes the embedding's gradient as a matmul
FUSED_LOSS_FROM = 16384  # vocabulary from which on version 3 computes output head and loss in chunks
LOSS_CHUNK = 2048  # rows of such a chunk


class Sizes(namedtuple("Sizes", "B T C H K D F V L")):
    """Batch, tokens, hidden_dim, query heads, key/value heads, head_dim, intermediate_dim, vocab_size, layers."""

    @property
    def kv(self):
        """Return the columns of the keys."""
        return self.K * self.D

    @property
    def one_hot(self):
        """Tell whether version 3 computes the embedding's gradient as a matmul; of the letter V assume it."""
        return (self.V <= MAX_ONE_HOT) is not False

    @property
    def fused(self):
        """Tell whether version 3's loss is the fused one by default; of the letter V assume that it is not."""
        return (self.V >= FUSED_LOSS_FROM) is True

    @property
    def loss_chunks(self):
        """Return the rows of each chunk of the fused loss."""
        rows = self.B * self.T
        return [min(LOSS_CHUNK, rows - first) for first in range(0, rows, LOSS_CHUNK)]


def sizes_of(config):
    """Return the sizes in a training script's options."""
    B, T, C = config.batch_size, config.seq_len, config.hidden_dim
    H, K = config.num_heads, config.num_kv_heads
    return Sizes(B, T, C, H, K, C // H, config.intermediate_dim, config.vocab_size, config.num_layers)


# ---------------------------------------------------------------- parameters and FLOPs


def weight_matrices(s):
    """Return {name: (part, inputs, outputs)} of the weight matrices of a layer of version 1."""
    return {
        "q": ("QKV projection", s.C, s.C),
        "k": ("QKV projection", s.C, s.kv),
        "v": ("QKV projection", s.C, s.kv),
        "o": ("output projection", s.C, s.C),
        "gate": ("gate and up", s.C, s.F),
        "up": ("gate and up", s.C, s.F),
        "down": ("down projection", s.F, s.C),
    }


def projections(s):
    """Return {part: (inputs, outputs)} of the weight matrices of a layer, those of a part side by side."""
    found = {}
    for part, inputs, outputs in weight_matrices(s).values():
        _, before = found.get(part, (inputs, 0))
        found[part] = (inputs, before + outputs)
    return found


def gemms(s):
    """Return the matmuls of a step of version 1, each as (names, part, batch, m, k, n, calls).

    A call multiplies `batch` pairs of [m, k] and [k, n]. Weight matrices of one shape share an entry.
    """
    rows = s.B * s.T
    heads = s.B * s.H
    names_of = {}
    for name, (_, inputs, outputs) in weight_matrices(s).items():
        names_of.setdefault((inputs, outputs), []).append(name)
    weights = [(", ".join(names), *shape, len(names) * s.L) for shape, names in names_of.items()]
    weights.append(("output head", s.C, s.V, 1))
    found = []
    for names, inputs, outputs, calls in weights:
        found.append((names, "forward", 1, rows, inputs, outputs, calls))
        found.append((names, "input gradient", 1, rows, outputs, inputs, calls))
        found.append((names, "weight gradient", 1, outputs, rows, inputs, calls))
    found.append(("scores", "forward", heads, s.T, s.D, s.T, s.L))
    found.append(("weights x value", "forward", heads, s.T, s.T, s.D, s.L))
    found.append(("gradient of weights", "input gradient", heads, s.T, s.D, s.T, s.L))
    found.append(("gradients of q, k, v", "input gradient", heads, s.T, s.T, s.D, 3 * s.L))
    return found


def parameters(s):
    """Return {part: (parameters of each layer, parameters outside the layers)}."""
    matrices = {part: (k * n, 0) for part, (k, n) in projections(s).items()}
    return {"embedding": (0, s.V * s.C), "norms and residual": (2 * s.C, s.C), **matrices}


def parameter_count(s):
    return sum(of_step(pair, s) for pair in parameters(s).values())


def forward_flops(s):
    """Return {part: (FLOPs of each layer, FLOPs outside the layers)} that the forward needs; the backward needs twice.

    A matmul of m x k with k x n takes 2mkn. Of the T x T scores the causal half is needed, in two matmuls.
    """
    rows = s.B * s.T
    found = {part: (2 * rows * k * n, 0) for part, (k, n) in projections(s).items()}
    found |= {"attention": (2 * rows * s.T * s.C, 0), "output head": (0, 2 * rows * s.C * s.V)}
    return {part: found[part] for part in PARTS if part in found}


def of_step(pair, s):
    """Return the sum over a step of what each layer has, and what comes once."""
    return s.L * pair[0] + pair[1]


def required_flops(s):
    """Return {part: FLOPs of a step that no version can do without}."""
    return {part: 3 * of_step(pair, s) for part, pair in forward_flops(s).items()}


# Matmuls over the causal half of the scores, forward and backward. Version 1 computes the masked half too; fused
# kernels recompute scores in the backward, and both backward kernels of version 3 the scores and their gradients.
ATTENTION_MATMULS = {1: (4, 8), 2: (2, 5), 3: (2, 7), 4: (2, 5)}


def flops_done(version, s):
    """Return {part: (forward, backward)}: the FLOPs of a step that a version computes."""
    done = {part: (flops // 3, 2 * flops // 3) for part, flops in required_flops(s).items()}
    done["attention"] = tuple(n * s.L * s.B * s.T * s.T * s.C for n in ATTENTION_MATMULS[version])
    if version == 3 and s.one_hot:
        done["embedding"] = (0, 2 * s.B * s.T * s.C * s.V)
    return done


def operations(s):
    """Return {part: (forward, backward)}: element-wise operations and reductions of a step of version 1."""
    rows = s.B * s.T
    x = s.B * s.T * s.C
    scores = s.B * s.H * s.T * s.T
    wide = rows * s.F
    logits = rows * s.V
    rotated = x + rows * s.kv
    norms = s.L * (10 * x + 4 * rows) + 4 * x + 2 * rows
    return {
        "embedding": (0, x + s.V * s.C),
        "norms and residual": (norms, s.L * (24 * x + 6 * rows) + 11 * x + 3 * rows),
        "QKV projection": (0, s.L * 2 * x),
        "RoPE": (s.L * 3 * rotated, s.L * 3.5 * rotated),
        "attention": (s.L * 3 * scores, s.L * (3 * scores + 2 * x)),
        "gate and up": (0, s.L * x),
        "SwiGLU": (s.L * 2 * wide, s.L * 3 * wide),
        "cross-entropy": (2 * logits, 2 * logits),
        "AdamW": (0, 8 * parameter_count(s)),
    }


# ---------------------------------------------------------------- bytes, launches, saved activations


class Part(namedtuple("Part", "forward backward saved", defaults=((), (), 0))):
    """The bytes of each launch, forward and backward, and the bytes saved for backward."""

    def __add__(self, other):
        return Part([*self.forward, *other.forward], [*self.backward, *other.backward], self.saved + other.saved)


def matmul(m, k, n, e):
    """Return the bytes of a matmul of m x k with k x n elements of e bytes."""
    return e * (m * k + k * n + m * n)


def projection(s, version, e, k, n, saved=0, wide_input=True):
    """Count x Wᵀ and its two gradients; autocast converts the weight and, if it is float32, the input each time."""
    rows = s.B * s.T
    one = matmul(rows, k, n, e)
    casts = []
    if version < 3 and e == 2:  # autocast
        casts.append(CAST * k * n)
        if wide_input:
            casts.append(CAST * rows * k)
        saved += 2 * k * n
    return Part([one, *casts], [one, one, *casts], saved)


def embedding(s, version, e):
    e = 4 if version < 3 else e  # under autocast the residual stream and the weights are float32
    x = e * s.B * s.T * s.C
    tokens = 8 * s.B * s.T
    table = e * s.V * s.C
    add = 3 * table  # the gradient of the output head is added
    if version == 3 and s.one_hot:
        onehot = e * s.B * s.T * s.V
        return Part([2 * x + tokens], [onehot, tokens + e * s.B * s.T, onehot + x + table, add], tokens)
    return Part([2 * x + tokens], [x + tokens + table, add], tokens)


def norm(s, version, e, residual):
    """Count an RMSNorm, with the residual add that belongs to it."""
    n = s.B * s.T * s.C
    r = 4 * s.B * s.T
    w = 4 * s.C
    if version == 3:  # forward; backward with partial sums of dw, and their sum
        terms = 4 if residual else 2
        return Part([terms * e * n + r + w], [(terms if residual else 3) * e * n + r + 2 * w, 2 * w], e * n + r)
    x = 4 * n
    forward = [2 * x, x + r, 2 * r, 2 * r, 2 * x + r, 2 * x + w]  # pow, mean, + eps, rsqrt, x · rstd, · w
    weight = [3 * x, x + w, 2 * x + w]  # dy · x · rstd and its sum over rows: dw; dy · w
    rstd = [3 * x, x + r, 2 * r, 2 * r, 3 * r]  # its gradient, a sum over columns, and the derivative of rsqrt
    mean = [x + r, 2 * x, 2 * x, 3 * x]  # the derivatives of mean and pow
    part = Part(forward, [*weight, 2 * x + r, *rstd, *mean, 3 * x], 2 * x + r)
    if residual:  # the gradient of a sum goes to both terms; one comes from a 16-bit matmul
        casts = [CAST * n] if e == 2 else []
        part += Part([2 * x + e * n], [3 * x, *casts])
    return part


def qkv_projection(s, version, e):
    x, packed = e * s.B * s.T * s.C, e * s.B * s.T * (s.C + 2 * s.kv)
    if version == 1:
        parts = [projection(s, version, e, s.C, n) for n in (s.C, s.kv, s.kv)]
        add = 12 * s.B * s.T * s.C  # dx is the sum of three
        return parts[0] + parts[1] + parts[2] + Part([], [add, add], 3 * x if e == 2 else x)
    concatenate = [2 * packed] if version == 2 else []  # dq, dk and dv
    return projection(s, version, e, s.C, s.C + 2 * s.kv, saved=x) + Part([], concatenate)


def rope(s, version, e):
    rows = s.B * s.T
    table = 2 * s.T * s.D  # bytes of the cosines, as many of the sines
    if version == 3:  # the backward is part of the attention kernels
        return Part([2 * e * rows * (s.C + 2 * s.kv) + 2 * table])
    part = Part()
    for n in (rows * s.C, rows * s.kv):
        multiply = 4 * n + table  # float32; cos and sin multiply halves of the heads
        add = 6 * n
        cat = 8 * n
        casts = [CAST * n] * 2 if e == 2 else []
        part += Part([multiply] * 4 + [add, add, cat, *casts], [multiply] * 4 + [4 * n, add, add, cat, *casts])
    return part


def scored_attention(s, e):
    """Count version 1's attention, which writes the scores."""
    q = s.B * s.T * s.C
    kv = s.B * s.T * s.kv
    n = s.B * s.H * s.T * s.T
    mask = s.T * s.T
    repeat = [e * (q + kv)] * 2  # of k and v
    bmm = e * (2 * q + n)  # two operands of T x D, one of T x T
    casts = [CAST * n] * 2 if e == 2 else []
    # copies of q, k and v; bmm, 1 / sqrt(D), mask, softmax, bmm; ones and triu
    forward = [*repeat, *[2 * e * q] * 3, bmm, 2 * e * n, 8 * n + mask, 8 * n, bmm, mask, 2 * mask, *casts]
    # copy of do; dP, dv, softmax, mask, 1 / sqrt(D), dq, dk; sums over the query heads of a key head
    backward = [2 * e * q, bmm, bmm, 12 * n, 8 * n + mask, 2 * e * n, bmm, bmm, *repeat, *casts]
    return Part(forward, backward, 3 * e * q + (4 if e == 4 else 6) * n + mask)


def attention(s, version, e):
    if version == 1:
        return scored_attention(s, e)
    q = e * s.B * s.T * s.C
    kv = e * s.B * s.T * s.kv
    row = 4 * s.B * s.T * s.H
    if version == 3:  # forward; dq, with the row sums Δ; dk and dv. The last two read the RoPE tables
        tables = 4 * s.T * s.D
        qkv = q + 2 * kv
        backward = [qkv + 3 * q + 2 * row + tables, qkv + q + 2 * row + 2 * kv + tables]
        return Part([qkv + q + row], backward, qkv + q + row)
    if e == 4:  # float32 kernels want a key head for every query head
        repeat = [q + kv] * 2
        return Part([*repeat, 4 * q + row], [8 * q + row, *repeat], 4 * q + row)
    packed = q + 2 * kv  # v is a view of the packed projection, which stays
    return Part([2 * q + 2 * kv + row], [4 * q + 4 * kv + row], packed + 2 * q + kv + row)


def gate_up_projection(s, version, e):
    x = e * s.B * s.T * s.C
    if version > 1:
        return projection(s, version, e, s.C, 2 * s.F, saved=x)
    one = projection(s, version, e, s.C, s.F)
    return one + one + Part([], [12 * s.B * s.T * s.C], 2 * x if e == 2 else x)  # dx is the sum of two


def swiglu(s, version, e):
    n = e * s.B * s.T * s.F
    if version == 3:
        return Part([3 * n], [5 * n], 2 * n)
    concatenate = [4 * n] if version == 2 else []  # the gradients of both halves
    # silu, · b; dy · b, dy · silu(a), silu's derivative
    return Part([2 * n, 3 * n], [3 * n, 3 * n, 3 * n, *concatenate], 3 * n)


def cross_entropy(s, version, e):
    n = s.B * s.T * s.V
    rows = s.B * s.T
    if version == 3:
        forward, backward = loss_kernels(s, e, rows)
        sums = 8 * rows + 8  # of losses, and of the rows that are counted
        divide = 12
        return Part([forward, sums, divide], [4, backward + 8], e * n + 16 * rows + 8)  # ones_like first
    casts = [CAST * n] if e == 2 else []
    forward = [*casts, 8 * n, 4 * n + 8 * rows + 8]  # log_softmax, nll_loss
    return Part(forward, [4, 8 * n + 8 * rows + 8, 12 * n, *casts], 4 * n + 8 * rows + 4)


def loss_kernels(s, e, rows):
    """Return the bytes of version 3's two loss kernels for so many rows, forward and backward, scale left out."""
    n = rows * s.V
    forward = e * n + 24 * rows  # reads logits and labels; writes loss, counted, maximum and log(l) of each row
    return forward, 2 * e * n + 16 * rows


def fused_loss(s, e):
    """Count output head and cross-entropy of version 3 in chunks. What is saved are the gradients, dw in float32."""
    rows = s.B * s.T
    x = rows * s.C
    w = s.V * s.C
    matmuls = []
    forward_kernels = []
    backward_kernels = []
    for chunk in s.loss_chunks:
        forward, backward = loss_kernels(s, e, chunk)
        forward_kernels.append(forward)
        backward_kernels.append(backward + 4)  # a scale of 1
        one = matmul(chunk, s.C, s.V, e)  # logits; dx
        dw = e * chunk * (s.V + s.C) + 4 * w * (2 if matmuls else 1)  # the first chunk's is not added to anything
        matmuls += [one, one, dw]
    scaled = [2 * e * x + 4, (4 + e) * w + 4]  # dx and dw
    sums = 8 * rows + 8
    divide = 12
    forward = [*forward_kernels, *backward_kernels, 4, sums, divide]  # 4: the scale
    at_least_one = 8  # clamps the number of rows that are counted
    loss = Part(forward, [4, at_least_one, divide], e * x + 4 * w + 8)
    return {"output head": Part(matmuls, scaled), "cross-entropy": loss}


def adamw(s, version, precision):
    """Count the optimizer; the update of its step counters is a launch of few bytes, on the host in version 1."""
    vectors = (2 * s.L + 1) * s.C
    matrices = parameter_count(s) - vectors
    if version == 1:  # foreach: decay, lerp, · beta2, addcmul, sqrt, / , + eps, addcdiv
        return Part([], [n * (matrices + vectors) for n in (8, 12, 8, 16, 8, 8, 8, 16)])
    if version == 2:  # fused: t + 1 of 6 tensors a layer and 2 more; weight and moments read and written, gradient read
        tensors = 6 * s.L + 2
        return Part([], [8 * tensors, 28 * (matrices + vectors) + 4 * tensors])
    wide = 26 if precision == "bfloat16" else 28  # a bfloat16 copy and its low bits are float32 in two pieces
    in_16_bits = ELEMENT_BYTES[precision] == 2
    updates = [wide * matrices, 28 * vectors] if in_16_bits else [28 * (matrices + vectors)]
    return Part([], [16, 40, *updates])  # t + 1, beta ** t


def parts(version, precision, s, fused=None):
    """Return {part: Part} of each layer, and of what a step does outside the layers.

    fused tells whether version 3's loss is the fused one, None that its default is.
    """
    if version == 4:
        raise ValueError("version 4 launches what the compiler makes of it, which no formula counts")
    e = ELEMENT_BYTES[precision]
    one_norm = norm(s, version, e, residual=True)
    x = e * s.B * s.T * s.C
    y = e * s.B * s.T * s.F
    copy = Part([2 * x], [], x) if version == 1 else Part()  # of the mixed values; fused kernels write them as needed
    layer = {
        "norms and residual": one_norm + one_norm,
        "QKV projection": qkv_projection(s, version, e),
        "RoPE": rope(s, version, e),
        "attention": attention(s, version, e),
        "output projection": projection(s, version, e, s.C, s.C, wide_input=False) + copy,
        "gate and up": gate_up_projection(s, version, e),
        "SwiGLU": swiglu(s, version, e),
        "down projection": projection(s, version, e, s.F, s.C, saved=y, wide_input=False),
    }
    once = {
        "embedding": embedding(s, version, e),
        "norms and residual": norm(s, version, e, residual=False),
        "output head": projection(s, version, e, s.C, s.V, saved=x),
        "cross-entropy": cross_entropy(s, version, e),
        "AdamW": adamw(s, version, precision),
    }
    if loss_is_fused(version, s, fused):
        once |= fused_loss(s, e)
    return layer, once


# ---------------------------------------------------------------- a whole step


def loss_is_fused(version, s, fused=None):
    """Tell whether output head and cross-entropy are counted in chunks; fused as in parts()."""
    return version == 3 and (s.fused if fused is None else fused)


def step_counts(version, precision, s, fused=None):
    """Return {part: {phase: {quantity: number}}} of a training step; fused as in parts()."""
    layer, once = parts(version, precision, s, fused)
    flops = flops_done(version, s)
    elementwise = operations(s)
    if loss_is_fused(version, s, fused):  # the forward computes the gradients too
        flops["output head"] = (sum(flops["output head"]), 0)
        elementwise["cross-entropy"] = (sum(elementwise["cross-entropy"]), 0)
    counts = {}
    for part in PARTS:
        counts[part] = {}
        pair = (layer.get(part, Part()), once.get(part, Part()))
        for i, phase in enumerate(PHASES):
            launches = [getattr(one, phase) for one in pair]
            counts[part][phase] = {
                "flops": flops.get(part, (0, 0))[i],
                "operations": elementwise.get(part, (0, 0))[i],
                "bytes": of_step([sum(each) for each in launches], s),
                "launches": of_step([len(each) for each in launches], s),
                "saved": of_step([one.saved for one in pair], s) if phase == "forward" else 0,
            }
    return counts


def both_phases(counts, quantity):
    """Return {part: forward and backward together}."""
    return {part: sum(phases[phase][quantity] for phase in PHASES) for part, phases in counts.items()}


def total(counts, quantity):
    return sum(both_phases(counts, quantity).values())


def intensity(counts):
    """Return {part: {"flops" (operations included), "bytes", "flop_per_byte"}} per part and for the "step"."""
    flops, operations, moved = (both_phases(counts, quantity) for quantity in ("flops", "operations", "bytes"))
    rows = {part: {"flops": flops[part] + operations[part], "bytes": moved[part]} for part in counts}
    rows["step"] = {key: sum(row[key] for row in rows.values()) for key in ("flops", "bytes")}
    return {part: row | {"flop_per_byte": row["flops"] / row["bytes"]} for part, row in rows.items()}


# ---------------------------------------------------------------- kernels

# Version 3's kernels: the part and phase of each, and which of its launches there.
KERNELS = {
    "rmsnorm_forward_kernel": ("norms and residual", "forward", slice(None)),
    "rmsnorm_backward_kernel": ("norms and residual", "backward", slice(0, None, 2)),
    "column_sum_kernel": ("norms and residual", "backward", slice(1, None, 2)),
    "rope_kernel": ("RoPE", "forward", slice(None)),
    "attention_forward_kernel": ("attention", "forward", slice(None)),
    "attention_backward_dq_kernel": ("attention", "backward", slice(0, 1)),
    "attention_backward_dkdv_kernel": ("attention", "backward", slice(1, 2)),
    "swiglu_forward_kernel": ("SwiGLU", "forward", slice(None)),
    "swiglu_backward_kernel": ("SwiGLU", "backward", slice(None)),
    "cross_entropy_forward_kernel": ("cross-entropy", "forward", slice(0, 1)),
    "cross_entropy_backward_kernel": ("cross-entropy", "backward", slice(1, None)),
    "adamw_kernel": ("AdamW", "backward", slice(2, None)),
}
KERNEL_MATMULS = {"attention_forward_kernel": 2, "attention_backward_dq_kernel": 3, "attention_backward_dkdv_kernel": 4}


def kernel_counts(precision, s, fused=None):
    """Return {kernel of version 3: (FLOPs, bytes) of a launch, on average over a step}; fused as in parts().

    Attention's FLOPs are those of its matmuls, those of the others the operations of version 1.
    """
    both = parts(3, precision, s, fused)
    elementwise = operations(s)
    places = dict(KERNELS)
    if loss_is_fused(3, s, fused):
        chunks = len(s.loss_chunks)
        places["cross_entropy_forward_kernel"] = ("cross-entropy", "forward", slice(0, chunks))
        places["cross_entropy_backward_kernel"] = ("cross-entropy", "forward", slice(chunks, 2 * chunks))
    found = {}
    for kernel, (part, phase, which) in places.items():
        each, single = (getattr(place.get(part, Part()), phase)[which] for place in both)
        launches = s.L * len(each) + len(single)
        flops = s.L * KERNEL_MATMULS.get(kernel, 0) * s.B * s.T * s.T * s.C
        if kernel not in KERNEL_MATMULS and kernel != "column_sum_kernel":
            flops = elementwise[part][PHASES.index(KERNELS[kernel][1])]
        found[kernel] = flops / launches, (s.L * sum(each) + sum(single)) / launches
    return found


# ---------------------------------------------------------------- GPUs


def roofline_us(work, gpu, precision):
    """Return (shortest time in us, "memory" or "compute") of {quantity: number} at the peaks of a GPU of the table.

    A GPU without units for a precision computes in float32.
    """
    matmul_peak = peak_tflops(gpu, precision) or peak_tflops(gpu, "float32")
    compute = work["flops"] / matmul_peak + work["operations"] / peak_tflops(gpu, "float32")
    memory = work["bytes"] / GPUS[gpu].tb_s
    return max(compute, memory) / 1e6, "compute" if compute > memory else "memory"


def rooflines(counts, gpu, precision):
    """Return {part: (us, bound)}; forward and backward are bound separately, the longer one names the bound."""
    rows = {}
    for part, phases in counts.items():
        times = [roofline_us(phases[phase], gpu, precision) for phase in PHASES]
        rows[part] = sum(us for us, _ in times), max(times)[1]
    return rows


def shortest_step_ms(counts, gpu, precision):
    return sum(us for us, _ in rooflines(counts, gpu, precision).values()) / 1e3
