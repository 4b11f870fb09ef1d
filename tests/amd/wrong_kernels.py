"""Kernels with faults that Triton's interpreter does not show: it runs a program's operations one after another.

Each function runs one kernel on CPU tensors and returns what it computed and what is right.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def reversed_through_memory_kernel(x_ptr, scratch_ptr, y_ptr, BLOCK: tl.constexpr):
    """Store a tile and load it in the opposite order, without a barrier in between."""
    i = tl.arange(0, BLOCK)
    tl.store(scratch_ptr + i, tl.load(x_ptr + i))
    tl.store(y_ptr + i, tl.load(scratch_ptr + BLOCK - 1 - i))


@triton.jit
def shifted_in_place_kernel(x_ptr, BLOCK: tl.constexpr):
    """Store a tile over itself, 16 elements further: threads store as they loaded, without a detour through LDS."""
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i + 16, tl.load(x_ptr + i))


@triton.jit
def matmul_kernel(a_ptr, b_ptr, c_ptr, M: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply a [M, K] by b [K, M]."""
    m, k = tl.arange(0, M), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * M + m[None, :])
    tl.store(c_ptr + m[:, None] * M + m[None, :], tl.dot(a, b, input_precision=PRECISION))


def reversed_through_memory():
    x, scratch, y = torch.randn(1024), torch.zeros(1024), torch.zeros(1024)
    reversed_through_memory_kernel[(1,)](x, scratch, y, 1024)
    return y, x.flip(0)


def shifted_in_place():
    x = torch.randn(1040)
    right = torch.cat([x[:16], x[:-16]])
    shifted_in_place_kernel[(1,)](x, 1024)
    return x, right


def matmul(M, K, precision, **options):
    a, b, c = torch.randn(M, K), torch.randn(K, M), torch.zeros(M, M)
    matmul_kernel[(1,)](a, b, c, M, K, precision, **options)
    return c, a @ b


def small_products():
    """float16 products of 2^-15: CDNA 2 takes them for zero in its matrix units."""
    a, b, c = torch.full((16, 16), 2.0**-15).half(), torch.ones(16, 16).half(), torch.zeros(16, 16)
    matmul_kernel[(1,)](a, b, c, 16, 16, "ieee")
    return c, a.float() @ b.float()


# Fault -> (target, function, part of what the interpreter says; "" if only the result is wrong).
WRONG_KERNELS = {
    "waves read what others have not stored yet": ("gfx942", reversed_through_memory, ""),
    "waves store over what others have not loaded yet": ("gfx1100", shifted_in_place, ""),
    "float32 is multiplied with 11 bits": ("gfx942", lambda: matmul(32, 32, "tf32"), ""),
    "small float16 are zero": ("gfx90a", small_products, ""),
    "the tile needs more LDS than there is": ("gfx942", lambda: matmul(128, 256, "ieee"), "bytes of LDS"),
    "as many warps as on 32 lanes": (
        "gfx942",
        lambda: matmul(64, 32, "ieee", num_warps=64 * 32 // 64),
        "lanes in a workgroup",
    ),
}


def run(name):
    """Return what the interpreter says about a kernel, "" if nothing, and whether its result is right."""
    from amd.assembly import Fault
    from amd.launch import executed

    target, function, _ = WRONG_KERNELS[name]
    torch.manual_seed(0)
    try:
        with executed(target):
            return "", is_right(*function())
    except Fault as fault:
        return str(fault), False


def is_right(found, wanted):
    return torch.allclose(found, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())
