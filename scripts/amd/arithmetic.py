"""Compute what has no NumPy function: fused multiply-add, conversions, division helpers, bytes and bits.

Results are rounded as the ISA documents say. exp, log, reciprocal and square roots are exact here, while the hardware's
last bit may differ; denormal inputs and results of these are zero, as in hardware.
"""

import dataclasses
import functools
from fractions import Fraction

import numpy as np

U32, I32, U64, I64, F32, F64 = np.uint32, np.int32, np.uint64, np.int64, np.float32, np.float64
SMALLEST_NORMAL = 2.0**-126


def odd_sum(a, b):
    """Return a + b of float64, rounded so that another rounding to float32 is as good as one rounding of the exact sum.

    Where something was lost, the last bit of the sum becomes odd ("round to odd").
    """
    total = a + b
    # Knuth's TwoSum: total + lost is the exact sum.
    rounded_b = total - a
    rounded_a = total - rounded_b
    lost = (a - rounded_a) + (b - rounded_b)
    bits = total.view(I64)
    must_change = (lost != 0) & np.isfinite(total) & (bits & 1 == 0)
    towards_zero = (lost < 0) != (total < 0)
    step = np.where(towards_zero, -1, 1)
    return np.where(must_change, bits + step, bits).view(F64)


def fma(a, b, c):
    """Return a · b + c of float32, rounded once."""
    product = np.asarray(a, F64) * b  # exact
    total = product + c
    # total is rounded already. Rounding it again matters only if it is a tie, or the result is denormal. Of a tie, the
    # 29 bits that float32 has not are a one and zeros.
    tie = total.view(U64) << U64(64 - 29) == U64(1 << 63)
    if tie.any() or is_denormal(total).any():
        total = odd_sum(product, np.asarray(c, F64))
    return total.astype(F32)


def dot2(a, b, c):
    """Return the dot product of two pairs of float16 plus float32 c, rounded once."""
    halves = [np.ascontiguousarray(x)[:, None].view(np.float16).astype(F64) for x in (a, b)]
    return ((halves[0] * halves[1]).sum(-1) + c).astype(F32)


def bfloat16(bits):
    """Return bfloat16, as 16 bits each, as float32."""
    return (bits.astype(U32) << U32(16)).view(F32)


def dot2_bfloat16(a, b, c):
    """Return the dot product of two pairs of bfloat16 plus float32 c, rounded once."""
    pairs = [(bfloat16(x & U32(0xFFFF)).astype(F64), bfloat16(x >> U32(16)).astype(F64)) for x in (a, b)]
    (a_low, a_high), (b_low, b_high) = pairs
    return (a_low * b_low + a_high * b_high + c).astype(F32)


def dot4(a, b, c, kind_a=np.int8, kind_b=np.int8):
    """Return the dot product of two groups of four bytes plus c, which wraps around at 32 bits."""
    x, y = (np.ascontiguousarray(n)[:, None].view(kind) for n, kind in ((a, kind_a), (b, kind_b)))
    return ((x.astype(I64) * y).sum(-1) + c).astype(c.dtype)


def count_bits(x):
    """Return how many bits of each number of 32 bits are set."""
    return np.unpackbits(np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4), axis=1).sum(1, dtype=U32)


def flush(x):
    """Return x with zeros of the same sign for denormal numbers."""
    return np.where(np.abs(x) < SMALLEST_NORMAL, np.copysign(F32(0), x), x)


def mad(a, b, c):
    """Return a · b + c of float32 as CDNA 2's v_mad does: rounded twice, and denormal numbers are zero."""
    return flush(flush(flush(a) * flush(b)) + flush(c))


def transcendental(function, x):
    return flush(function(flush(x).astype(F64)).astype(F32))


def exp2(x):
    return transcendental(np.exp2, x)


def log2(x):
    return transcendental(np.log2, x)


def reciprocal(x):
    return transcendental(lambda x: 1 / x, x)


def reciprocal_sqrt(x):
    return transcendental(lambda x: 1 / np.sqrt(x), x)


def sqrt(x):
    return transcendental(np.sqrt, x)


def sine(x, function=np.sin):
    """Return the sine of x revolutions; the hardware knows 256 revolutions in each direction."""
    turns = np.asarray(x, F64)
    found = function(2 * np.pi * (turns - np.rint(turns)))
    return np.where(np.abs(turns) > 256, function(0.0), found).astype(F32)


def cosine(x):
    return sine(x, np.cos)


def fma64(a, b, c, scale=1.0):
    """Return (a · b + c) · scale of float64, rounded once: computed with fractions, one number after another.

    scale: a power of two.
    """
    a, b, c, scale = np.broadcast_arrays(a, b, c, scale)
    total = np.array((a * b + c) * scale)
    for i in np.nonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c))[0]:
        exact = (Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))) * Fraction(float(scale[i]))
        if exact:  # a zero's sign is that of the rounded sum
            try:
                total[i] = float(exact)
            except OverflowError:
                total[i] = np.copysign(np.inf, float(exact > 0) - 0.5)
    return total


def ldexp(x, exponent):
    """Return x · 2^exponent of float32, rounded once."""
    exponent = np.clip(exponent, -400, 400)  # of float64, too: beyond, the result is zero or infinity anyway
    return np.ldexp(np.asarray(x, F64), exponent).astype(F32)


def to_integer(x, kind):
    """Convert to an integer: truncate, saturate, and make NaN 0."""
    limits = np.iinfo(kind)
    return np.nan_to_num(np.clip(np.trunc(np.asarray(x, F64)), limits.min, limits.max), nan=0).astype(kind)


def classes(x):
    """Return the class of each float: the number of its bit in the mask of v_cmp_class.

    0 and 1 are NaN that signal and that are quiet. 2 to 5 are -inf, negative normal and denormal numbers and -0; 6 to
    9 are the positive ones, from 0 to inf.
    """
    quiet_bit = np.finfo(x.dtype).nmant - 1
    is_quiet = x.view(f"u{x.dtype.itemsize}") >> quiet_bit & 1 == 1
    size = np.abs(x)
    rank = np.select([size == np.inf, size >= np.finfo(x.dtype).tiny, size > 0], [3, 2, 1], 0)  # zero: 0
    return np.where(np.isnan(x), np.where(is_quiet, 1, 0), np.where(np.signbit(x), 5 - rank, 6 + rank))


def bfloat16_bits(x):
    """Return the bits of float32 x rounded to bfloat16, ties to even, NaN quiet."""
    bits = np.asarray(x, F32).view(U32)
    rounded = (bits + U32(0x7FFF) + (bits >> U32(16) & U32(1))) >> U32(16)
    return np.where(np.isnan(x), bits >> U32(16) | U32(0x40), rounded)


def half_bits(x):
    """Return the bits of x rounded to float16, in 32 bits."""
    return np.asarray(x).astype(np.float16).view(np.uint16).astype(U32)


def half_bits_towards_zero(x):
    """Return the bits of float32 x cut to float16, in 32 bits."""
    x = np.asarray(x, F32)
    rounded = x.astype(np.float16)
    below = np.nextafter(rounded, np.float16(0))
    return np.where(np.abs(rounded.astype(F32)) > np.abs(x), below, rounded).view(np.uint16).astype(U32)


@dataclasses.dataclass(frozen=True)
class Fp8:
    """Describe a format of 8 bits: a sign, an exponent and a fraction."""

    fraction_bits: int
    bias: int
    finite: int  # codes from zero on, without the sign
    nan: int

    @functools.cached_property
    def numbers(self):
        """Return the numbers from zero on, by their code."""
        codes = np.arange(self.finite)
        one = 1 << self.fraction_bits
        exponents = np.maximum(codes // one, 1) - self.bias
        return np.ldexp(np.where(codes < one, codes, one + codes % one) / one, exponents)

    @functools.cached_property
    def values(self):
        """Return the value of each of the 256 codes as float32."""
        rest = np.full(128 - self.finite, np.nan)
        if self.finite < self.nan < 0x80:  # infinity lies between them
            rest[0] = np.inf
        found = np.concatenate([self.numbers, rest, -self.numbers, -rest]).astype(F32)
        found[self.nan] = np.nan
        return found


# OCP's formats. Those of gfx942 have no infinity, and a single NaN in the place of -0.
E4M3 = Fp8(3, 7, 127, 0x7F)
E5M2 = Fp8(2, 15, 124, 0x7F)
E4M3_FNUZ = Fp8(3, 8, 128, 0x80)
E5M2_FNUZ = Fp8(2, 16, 128, 0x80)


def fp8_format(name, target):
    """Return the format that AMD's instructions call fp8 or bf8 on a target."""
    if target == "gfx942":
        return {"fp8": E4M3_FNUZ, "bf8": E5M2_FNUZ}[name]
    return {"fp8": E4M3, "bf8": E5M2}[name]


def fp8_bits(x, form):
    """Return the codes of float32 x rounded to a format, ties to even, and where x is beyond its largest number."""
    numbers = form.numbers
    size = np.abs(x).astype(F64)
    upper = np.minimum(np.searchsorted(numbers, size), len(numbers) - 1)
    lower = np.maximum(upper - 1, 0)
    middle = (numbers[lower] + numbers[upper]) / 2
    is_lower = (size < middle) | (size == middle) & (lower % 2 == 0)
    code = np.where(is_lower, lower, upper)
    has_negative_zero = form.nan != 0x80
    negative = np.signbit(x) & ((code > 0) | has_negative_zero)
    largest = numbers[-1] + (numbers[-1] - numbers[-2]) / 2
    return np.where(np.isnan(x), form.nan, code | negative << 7).astype(U32), size > largest


def fp8_values(codes, form):
    """Return numbers of 8 bits as float32."""
    return form.values[codes]


def pack(low, high):
    return (low & U32(0xFFFF)) | high << U32(16)


# ---------------------------------------------------------------- division: n / d without a divide instruction


@dataclasses.dataclass(frozen=True)
class Division:
    """Hold what the steps of a division depend on, of float32 or float64."""

    bits: type  # unsigned integers of the same size
    exponent_bits: int
    fraction_bits: int
    smallest_normal: float
    scale: float
    far: int  # n / d is so large that its steps may overflow if the exponents differ by this
    tiny: int  # so small an exponent field makes n tiny
    underflow: int  # n / d is zero if the exponents differ by less


DIVISIONS = {
    np.dtype(F32): Division(U32, 8, 23, SMALLEST_NORMAL, 2.0**64, far=96, tiny=23, underflow=-150),
    np.dtype(F64): Division(U64, 11, 52, 2.0**-1022, 2.0**128, far=768, tiny=53, underflow=-1075),
}


def exponent(x):
    """Return the exponent field of float32 or float64."""
    form = DIVISIONS[x.dtype]
    field = x.view(form.bits) >> form.bits(form.fraction_bits) & form.bits((1 << form.exponent_bits) - 1)
    return field.astype(np.int64)


def is_denormal(x, smallest_normal=SMALLEST_NORMAL):
    return (np.abs(x) < smallest_normal) & (x != 0)


def quotient_is_denormal(n, d, smallest_normal):
    """Return where the exact n / d is denormal; n is not zero."""
    n_fraction, n_exponent = np.frexp(np.abs(n))
    d_fraction, d_exponent = np.frexp(np.abs(d))
    least = np.frexp(smallest_normal)[1] - 1
    difference = n_exponent - d_exponent
    is_small = (difference < least) | (difference == least) & (n_fraction < d_fraction)
    return is_small & np.isfinite(n) & np.isfinite(d)


def div_scale(x, d, n):
    """Return x (which is d or n) scaled so that the steps of a division neither overflow nor underflow, and a flag.

    The flag says that div_fmas must scale the quotient back. The documents scale d by 2^64 where both 1 / d and n / d
    are denormal; then the quotient would be NaN. Here it is 2^-64, with which all quotients are right. Of float64, the
    scale is 2^128.
    """
    x, d, n = np.broadcast_arrays(x, d, n)
    form = DIVISIONS[x.dtype]
    up = x * x.dtype.type(form.scale)
    down = x * x.dtype.type(1 / form.scale)
    is_d = x.view(form.bits) == d.view(form.bits)
    is_n = x.view(form.bits) == n.view(form.bits)
    inverse_is_denormal = quotient_is_denormal(np.ones_like(d), d, form.smallest_normal)
    result_is_denormal = quotient_is_denormal(n, d, form.smallest_normal)
    cases = [  # condition, value, flag; the first that holds counts
        ((n == 0) | (d == 0), np.full_like(x, np.nan), False),
        (exponent(n) - exponent(d) >= form.far, np.where(is_d, up, x), True),
        (is_denormal(d, form.smallest_normal), up, False),
        (inverse_is_denormal & result_is_denormal, np.where(is_d, down, x), True),
        (inverse_is_denormal, down, False),
        (result_is_denormal, np.where(is_n, up, x), True),
        (exponent(n) <= form.tiny, up, False),
    ]
    conditions = [condition for condition, _, _ in cases]
    values = [value for _, value, _ in cases]
    flags = [np.full(x.shape, flag) for _, _, flag in cases]
    return np.select(conditions, values, x), np.select(conditions, flags, False)


def div_fmas(a, b, c, flag):
    """Return a · b + c, scaled back where the flag says so, rounded once."""
    a, b, c, flag = np.broadcast_arrays(a, b, c, flag)
    form = DIVISIONS[c.dtype]
    is_large = exponent(c) >= 1 << (form.exponent_bits - 1)
    back = np.where(flag, np.where(is_large, form.scale, 1 / form.scale), 1.0)
    if c.dtype == F64:
        return fma64(a, b, c, back)
    return (odd_sum(np.asarray(a, F64) * b, np.asarray(c, F64)) * back).astype(F32)


def div_fixup(q, d, n):
    """Return the quotient q of n / d, with the special cases that the steps before do not compute.

    The documents do not say so, but a quotient of ordinary numbers that is NaN has overflowed. Those of float16 are
    computed in float32, which their steps never leave.
    """
    q, d, n = np.broadcast_arrays(q, d, n)
    number = q.dtype.type
    cases = [
        (np.isnan(n) | np.isnan(d), np.nan),
        ((d == 0) & (n == 0) | np.isinf(d) & np.isinf(n), np.nan),
        ((d == 0) | np.isinf(n), np.inf),
        (np.isinf(d) | (n == 0), 0),
    ]
    if form := DIVISIONS.get(q.dtype):
        cases += [
            (exponent(n) - exponent(d) < form.underflow, 0),
            (np.isnan(q), np.inf),
        ]
    magnitude = np.select([condition for condition, _ in cases], [number(value) for _, value in cases], np.abs(q))
    negative = np.signbit(d) ^ np.signbit(n)
    return np.where(negative, -magnitude, magnitude).astype(number)


# ---------------------------------------------------------------- bits and bytes


def bit_field(x, first, width):
    """Return `width` bits of x from bit `first` on."""
    first = first & U32(31)
    width = width & U32(31)
    return x >> first & ((U32(1) << width) - U32(1))


def signed_bit_field(x, first, width):
    """Return `width` bits of x from bit `first` on, as a signed number."""
    first = first.astype(U32) & U32(31)
    width = width.astype(U32) & U32(31)
    ends_inside = first + width < 32  # a field that reaches over bit 31 ends there
    left = np.where(ends_inside, U32(32) - first - width, U32(0))
    right = np.where(ends_inside, U32(32) - width, first)
    found = (x.astype(U32) << left).view(I32) >> right.astype(I32)
    return np.where(width == 0, I32(0), found)


def leading_zeros(x):
    """Return how many zeros stand before the first one, of 32 bits; all bits set if there is no one."""
    exponent = np.frexp(x.astype(F64))[1]  # float64 holds 32 bits exactly
    return np.where(x == 0, 0xFFFFFFFF, 32 - exponent).astype(U32)


def reverse_bits(x):
    for shift, mask in ((1, 0x55555555), (2, 0x33333333), (4, 0x0F0F0F0F), (8, 0x00FF00FF), (16, 0x0000FFFF)):
        x = (x >> U32(shift) & U32(mask)) | (x & U32(mask)) << U32(shift)
    return x


def permute_bytes(a, b, select):
    """Return four bytes, each chosen by a byte of `select` from 14.

    0 to 3 are the bytes of b, 4 to 7 those of a. 8 to 11 repeat the sign of a 16-bit half of b, then of a. 12 is 0x00,
    and 13 and everything above are 0xFF.
    """
    lanes = max(len(a), len(b), len(select))
    pool = np.zeros((lanes, 4), U32)
    pool[:, 0] = b
    pool[:, 1] = a
    selectors = np.ascontiguousarray(select)[:, None].view(np.uint8)  # [lane, byte]
    choice = np.minimum(selectors, np.uint8(13)).astype(np.int64)
    if (choice > 7).any():
        signs = [(x >> U32(shift) & U32(1)) * U32(255) for x in (b, a) for shift in (15, 31)]
        pool[:, 2] = signs[0] | signs[1] << U32(8) | signs[2] << U32(16) | signs[3] << U32(24)
        pool[:, 3] = 0xFF00
    return pool.view(np.uint8)[np.arange(lanes)[:, None], choice].view(U32)[:, 0]


def bit_operation(a, b, c, table):
    """Return the bits that a truth table of three bits gives (v_bitop3)."""
    result = np.zeros_like(a & b & c)
    for row in range(8):
        if table >> row & 1:
            result = result | ((a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c))
    return result


def align_bits(a, b, shift):
    """Return the 32 bits of a:b (64 bits) from bit `shift` on."""
    pair = a.astype(U64) << U64(32) | b
    return (pair >> (shift & U32(31)).astype(U64)).astype(U32)


def high_product(a, b):
    return (a.astype(U64) * b.astype(U64) >> U64(32)).astype(U32)
