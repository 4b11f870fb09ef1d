"""Define what each instruction computes, a line each, grouped as the ISA documents group them.

The documents are AMD's "Instruction Set Architecture" reference guides for CDNA 2 (gfx90a), CDNA 3 (gfx942), CDNA 4
(gfx950), RDNA 3 (gfx1100) and RDNA 4 (gfx1201). Their chapters on instructions list each encoding (SOP2, VOP3, ...)
apart. An instruction that has another name in one of them has a line of its own.

A line of a table is: name | kinds of the sources -> kind of the result | the result, of the sources a, b and c. A kind
is a letter (u unsigned, i signed, f float) and its bits. `old` among the sources is the destination before.
"""

import functools

import numpy as np

from . import arithmetic
from .machine import DTYPES


def minimum(a, b):
    return np.fmin(a, b) if a.dtype.kind == "f" else np.minimum(a, b)


def maximum(a, b):
    return np.fmax(a, b) if a.dtype.kind == "f" else np.maximum(a, b)


def median(a, b, c):
    """Return the median of three; with a NaN among them the least of the others, as AMD's documents define it."""
    least = minimum(minimum(a, b), c)
    middle = maximum(minimum(a, b), minimum(maximum(a, b), c))
    return np.where((a != a) | (b != b) | (c != c), least, middle)


NAMES = {name: value for name, value in vars(arithmetic).items() if not name.startswith("_")}
NAMES |= {kind: functools.partial(np.asarray, dtype=dtype) for kind, dtype in DTYPES.items()}  # u32(x) converts
NAMES |= {"minimum": minimum, "maximum": maximum, "median": median, "signed": lambda x: x.view(np.int32)}


def read_table(text):
    """Return {name: (kinds of the sources, kind of the result, function)}."""
    table = {}
    for line in text.strip().splitlines():
        if line.strip() and not line.startswith("#"):
            name, kinds, meaning = (cell.strip() for cell in line.split("|", 2))
            sources, _, result = kinds.partition("->")
            sources = tuple(sources.split())
            arguments = "abc"[: len(sources)]
            function = eval(f"lambda {', '.join(arguments)}: {meaning}", NAMES)
            if name in table:
                raise ValueError(f"two lines for {name}")
            table[name] = (sources, result.strip(), function)
    return table


# ---------------------------------------------------------------- vector instructions

VOP1 = """
v_mov_b32          | u32 -> u32           | a
v_mov_b64          | u64 -> u64           | a
v_mov_b16          | u16 -> u16           | a
v_accvgpr_read_b32 | u32 -> u32           | a
v_accvgpr_write_b32| u32 -> u32           | a
v_accvgpr_mov_b32  | u32 -> u32           | a
v_not_b32          | u32 -> u32           | ~a
v_not_b16          | u16 -> u16           | ~a
v_bfrev_b32        | u32 -> u32           | reverse_bits(a)
v_exp_f32          | f32 -> f32           | exp2(a)
v_log_f32          | f32 -> f32           | log2(a)
v_rcp_f32          | f32 -> f32           | reciprocal(a)
v_rcp_iflag_f32    | f32 -> f32           | reciprocal(a)
v_rsq_f32          | f32 -> f32           | reciprocal_sqrt(a)
v_sqrt_f32         | f32 -> f32           | sqrt(a)
v_rndne_f32        | f32 -> f32           | np.rint(a)
v_floor_f32        | f32 -> f32           | np.floor(a)
v_ceil_f32         | f32 -> f32           | np.ceil(a)
v_trunc_f32        | f32 -> f32           | np.trunc(a)
v_fract_f32        | f32 -> f32           | a - np.floor(a)
v_rcp_f64          | f64 -> f64           | 1 / a
v_rsq_f64          | f64 -> f64           | 1 / np.sqrt(a)
v_sqrt_f64         | f64 -> f64           | np.sqrt(a)
v_rndne_f64        | f64 -> f64           | np.rint(a)
v_floor_f64        | f64 -> f64           | np.floor(a)
v_ceil_f64         | f64 -> f64           | np.ceil(a)
v_trunc_f64        | f64 -> f64           | np.trunc(a)
v_fract_f64        | f64 -> f64           | a - np.floor(a)
v_cvt_f32_i32      | i32 -> f32           | f32(a)
v_cvt_f32_u32      | u32 -> f32           | f32(a)
v_cvt_u32_f32      | f32 -> u32           | to_integer(a, U32)
v_cvt_i32_f32      | f32 -> i32           | to_integer(a, I32)
v_cvt_f32_f64      | f64 -> f32           | f32(a)
v_cvt_f64_f32      | f32 -> f64           | f64(a)
v_cvt_f32_f16      | f16 -> f32           | f32(a)
v_cvt_f16_f32      | f32 -> f16           | f16(a)
v_cvt_f32_ubyte0   | u32 -> f32           | f32(a & 255)
v_cvt_f32_ubyte1   | u32 -> f32           | f32(a >> 8 & 255)
v_cvt_f32_ubyte2   | u32 -> f32           | f32(a >> 16 & 255)
v_cvt_f32_ubyte3   | u32 -> f32           | f32(a >> 24)
v_cvt_f64_i32      | i32 -> f64           | f64(a)
v_cvt_f64_u32      | u32 -> f64           | f64(a)
v_cvt_u32_f64      | f64 -> u32           | to_integer(a, U32)
v_cvt_i32_f64      | f64 -> i32           | to_integer(a, I32)
v_cvt_f16_u16      | u16 -> f16           | f16(a)
v_cvt_f16_i16      | i16 -> f16           | f16(a)
v_cvt_u16_f16      | f16 -> u16           | to_integer(a, np.uint16)
v_cvt_i16_f16      | f16 -> i16           | to_integer(a, np.int16)
v_exp_f16          | f16 -> f16           | f16(np.exp2(f64(a)))
v_log_f16          | f16 -> f16           | f16(np.log2(f64(a)))
v_rcp_f16          | f16 -> f16           | f16(1 / f64(a))
v_rsq_f16          | f16 -> f16           | f16(1 / np.sqrt(f64(a)))
v_sqrt_f16         | f16 -> f16           | f16(np.sqrt(f64(a)))
v_rndne_f16        | f16 -> f16           | np.rint(a)
v_floor_f16        | f16 -> f16           | np.floor(a)
v_ceil_f16         | f16 -> f16           | np.ceil(a)
v_trunc_f16        | f16 -> f16           | np.trunc(a)
v_sin_f32          | f32 -> f32           | sine(a)
v_cos_f32          | f32 -> f32           | cosine(a)
v_frexp_mant_f32   | f32 -> f32           | np.frexp(a)[0]
v_frexp_exp_i32_f32| f32 -> i32           | np.where(np.isfinite(a), np.frexp(a)[1], 0)
v_frexp_mant_f64   | f64 -> f64           | np.frexp(a)[0]
v_frexp_exp_i32_f64| f64 -> i32           | np.where(np.isfinite(a), np.frexp(a)[1], 0)
v_ffbh_u32         | u32 -> u32           | leading_zeros(a)
v_clz_i32_u32      | u32 -> u32           | leading_zeros(a)
v_ffbh_i32         | u32 -> u32           | leading_zeros(a ^ u32(signed(a) >> 31))
v_cls_i32          | u32 -> u32           | leading_zeros(a ^ u32(signed(a) >> 31))
v_ffbl_b32         | u32 -> u32           | leading_zeros(reverse_bits(a))
v_ctz_i32_b32      | u32 -> u32           | leading_zeros(reverse_bits(a))
v_cvt_f32_bf16     | u16 -> f32           | (u32(a) << 16).view(F32)
"""

VOP2 = """
v_add_f32          | f32 f32 -> f32       | a + b
v_sub_f32          | f32 f32 -> f32       | a - b
v_subrev_f32       | f32 f32 -> f32       | b - a
v_mul_f32          | f32 f32 -> f32       | a * b
v_fmac_f32         | f32 f32 old -> f32   | fma(a, b, c)
v_fmamk_f32        | f32 f32 f32 -> f32   | fma(a, b, c)
v_fmaak_f32        | f32 f32 f32 -> f32   | fma(a, b, c)
v_mac_f32          | f32 f32 old -> f32   | mad(a, b, c)
v_madmk_f32        | f32 f32 f32 -> f32   | mad(a, b, c)
v_madak_f32        | f32 f32 f32 -> f32   | mad(a, b, c)
v_dot2acc_f32_f16  | u32 u32 old -> f32   | dot2(a, b, c)
v_dot2c_f32_f16    | u32 u32 old -> f32   | dot2(a, b, c)
v_dot4c_i32_i8     | u32 u32 old -> i32   | dot4(a, b, c)
v_max_f32          | f32 f32 -> f32       | maximum(a, b)
v_min_f32          | f32 f32 -> f32       | minimum(a, b)
v_max_num_f32      | f32 f32 -> f32       | maximum(a, b)
v_min_num_f32      | f32 f32 -> f32       | minimum(a, b)
v_add_f16          | f16 f16 -> f16       | a + b
v_sub_f16          | f16 f16 -> f16       | a - b
v_subrev_f16       | f16 f16 -> f16       | b - a
v_mul_f16          | f16 f16 -> f16       | a * b
v_max_f16          | f16 f16 -> f16       | maximum(a, b)
v_min_f16          | f16 f16 -> f16       | minimum(a, b)
v_max_num_f16      | f16 f16 -> f16       | maximum(a, b)
v_min_num_f16      | f16 f16 -> f16       | minimum(a, b)
v_add_i32          | i32 i32 -> i32       | a + b
v_sub_i32          | i32 i32 -> i32       | a - b
v_add_nc_i32       | i32 i32 -> i32       | a + b
v_sub_nc_i32       | i32 i32 -> i32       | a - b
v_add_u32          | u32 u32 -> u32       | a + b
v_sub_u32          | u32 u32 -> u32       | a - b
v_subrev_u32       | u32 u32 -> u32       | b - a
v_add_nc_u32       | u32 u32 -> u32       | a + b
v_sub_nc_u32       | u32 u32 -> u32       | a - b
v_subrev_nc_u32    | u32 u32 -> u32       | b - a
v_mul_u32_u24      | u32 u32 -> u32       | (a & 0xFFFFFF) * (b & 0xFFFFFF)
v_mul_i32_i24      | i32 i32 -> i32       | (a << 8 >> 8) * (b << 8 >> 8)
v_max_i32          | i32 i32 -> i32       | maximum(a, b)
v_min_i32          | i32 i32 -> i32       | minimum(a, b)
v_max_u32          | u32 u32 -> u32       | maximum(a, b)
v_min_u32          | u32 u32 -> u32       | minimum(a, b)
v_and_b32          | u32 u32 -> u32       | a & b
v_or_b32           | u32 u32 -> u32       | a | b
v_xor_b32          | u32 u32 -> u32       | a ^ b
v_xnor_b32         | u32 u32 -> u32       | ~(a ^ b)
v_lshlrev_b32      | u32 u32 -> u32       | b << (a & 31)
v_lshrrev_b32      | u32 u32 -> u32       | b >> (a & 31)
v_ashrrev_i32      | u32 i32 -> i32       | b >> signed(a & 31)
v_add_u16          | u16 u16 -> u16       | a + b
v_sub_u16          | u16 u16 -> u16       | a - b
v_subrev_u16       | u16 u16 -> u16       | b - a
v_add_i16          | i16 i16 -> i16       | a + b
v_sub_i16          | i16 i16 -> i16       | a - b
v_add_nc_i16       | i16 i16 -> i16       | a + b
v_sub_nc_i16       | i16 i16 -> i16       | a - b
v_mul_lo_u16       | u16 u16 -> u16       | a * b
v_max_u16          | u16 u16 -> u16       | maximum(a, b)
v_min_u16          | u16 u16 -> u16       | minimum(a, b)
v_max_i16          | i16 i16 -> i16       | maximum(a, b)
v_min_i16          | i16 i16 -> i16       | minimum(a, b)
v_lshlrev_b16      | u16 u16 -> u16       | b << (a & 15)
v_lshrrev_b16      | u16 u16 -> u16       | b >> (a & 15)
v_ashrrev_i16      | u16 i16 -> i16       | b >> i16(a & 15)
"""

VOP3 = """
v_fma_f32          | f32 f32 f32 -> f32   | fma(a, b, c)
v_mad_f32          | f32 f32 f32 -> f32   | mad(a, b, c)
v_fma_f16          | f16 f16 f16 -> f16   | f16(f64(a) * f64(b) + f64(c))
v_fmac_f64         | f64 f64 old -> f64   | fma64(a, b, c)
v_fma_f64          | f64 f64 f64 -> f64   | fma64(a, b, c)
v_max_f64          | f64 f64 -> f64       | maximum(a, b)
v_min_f64          | f64 f64 -> f64       | minimum(a, b)
v_max_num_f64      | f64 f64 -> f64       | maximum(a, b)
v_min_num_f64      | f64 f64 -> f64       | minimum(a, b)
v_max3_f16         | f16 f16 f16 -> f16   | maximum(maximum(a, b), c)
v_min3_f16         | f16 f16 f16 -> f16   | minimum(minimum(a, b), c)
v_max3_num_f16     | f16 f16 f16 -> f16   | maximum(maximum(a, b), c)
v_min3_num_f16     | f16 f16 f16 -> f16   | minimum(minimum(a, b), c)
v_maximum3_f16     | f16 f16 f16 -> f16   | np.maximum(np.maximum(a, b), c)
v_minimum3_f16     | f16 f16 f16 -> f16   | np.minimum(np.minimum(a, b), c)
v_add_f64          | f64 f64 -> f64       | a + b
v_mul_f64          | f64 f64 -> f64       | a * b
v_max3_f32         | f32 f32 f32 -> f32   | maximum(maximum(a, b), c)
v_min3_f32         | f32 f32 f32 -> f32   | minimum(minimum(a, b), c)
v_max3_num_f32     | f32 f32 f32 -> f32   | maximum(maximum(a, b), c)
v_min3_num_f32     | f32 f32 f32 -> f32   | minimum(minimum(a, b), c)
v_maximum3_f32     | f32 f32 f32 -> f32   | np.maximum(np.maximum(a, b), c)
v_minimum3_f32     | f32 f32 f32 -> f32   | np.minimum(np.minimum(a, b), c)
v_maximum_f32      | f32 f32 -> f32       | np.maximum(a, b)
v_minimum_f32      | f32 f32 -> f32       | np.minimum(a, b)
v_med3_f32         | f32 f32 f32 -> f32   | median(a, b, c)
v_med3_num_f32     | f32 f32 f32 -> f32   | median(a, b, c)
v_med3_f16         | f16 f16 f16 -> f16   | median(a, b, c)
v_med3_num_f16     | f16 f16 f16 -> f16   | median(a, b, c)
v_maxmin_f32       | f32 f32 f32 -> f32   | minimum(maximum(a, b), c)
v_minmax_f32       | f32 f32 f32 -> f32   | maximum(minimum(a, b), c)
v_maxmin_num_f32   | f32 f32 f32 -> f32   | minimum(maximum(a, b), c)
v_minmax_num_f32   | f32 f32 f32 -> f32   | maximum(minimum(a, b), c)
v_maxmin_f16       | f16 f16 f16 -> f16   | minimum(maximum(a, b), c)
v_minmax_f16       | f16 f16 f16 -> f16   | maximum(minimum(a, b), c)
v_maxmin_num_f16   | f16 f16 f16 -> f16   | minimum(maximum(a, b), c)
v_minmax_num_f16   | f16 f16 f16 -> f16   | maximum(minimum(a, b), c)
v_maxmin_i32       | i32 i32 i32 -> i32   | minimum(maximum(a, b), c)
v_minmax_i32       | i32 i32 i32 -> i32   | maximum(minimum(a, b), c)
v_maxmin_u32       | u32 u32 u32 -> u32   | minimum(maximum(a, b), c)
v_minmax_u32       | u32 u32 u32 -> u32   | maximum(minimum(a, b), c)
v_max3_i32         | i32 i32 i32 -> i32   | maximum(maximum(a, b), c)
v_min3_i32         | i32 i32 i32 -> i32   | minimum(minimum(a, b), c)
v_max3_u32         | u32 u32 u32 -> u32   | maximum(maximum(a, b), c)
v_min3_u32         | u32 u32 u32 -> u32   | minimum(minimum(a, b), c)
v_med3_i32         | i32 i32 i32 -> i32   | median(a, b, c)
v_med3_u32         | u32 u32 u32 -> u32   | median(a, b, c)
v_max3_i16         | i16 i16 i16 -> i16   | maximum(maximum(a, b), c)
v_min3_i16         | i16 i16 i16 -> i16   | minimum(minimum(a, b), c)
v_max3_u16         | u16 u16 u16 -> u16   | maximum(maximum(a, b), c)
v_min3_u16         | u16 u16 u16 -> u16   | minimum(minimum(a, b), c)
v_med3_i16         | i16 i16 i16 -> i16   | median(a, b, c)
v_med3_u16         | u16 u16 u16 -> u16   | median(a, b, c)
v_ldexp_f32        | f32 i32 -> f32       | ldexp(a, b)
v_ldexp_f64        | f64 i32 -> f64       | np.ldexp(a, b)
v_div_fixup_f32    | f32 f32 f32 -> f32   | div_fixup(a, b, c)
v_div_fixup_f64    | f64 f64 f64 -> f64   | div_fixup(a, b, c)
v_div_fixup_f16    | f16 f16 f16 -> f16   | div_fixup(a, b, c)
v_dot2_f32_f16     | u32 u32 f32 -> f32   | dot2(a, b, c)
v_dot2_f32_bf16    | u32 u32 f32 -> f32   | dot2_bfloat16(a, b, c)
v_dot2_f16_f16     | u32 u32 f16 -> f16   | f16(dot2(a, b, c))
v_dot2_bf16_bf16   | u32 u32 u16 -> u16   | bfloat16_bits(dot2_bfloat16(a, b, bfloat16(c))).astype(np.uint16)
v_dot4_i32_i8      | u32 u32 i32 -> i32   | dot4(a, b, c)
v_dot4_u32_u8      | u32 u32 u32 -> u32   | dot4(a, b, c, np.uint8, np.uint8)
v_add3_u32         | u32 u32 u32 -> u32   | a + b + c
v_add_lshl_u32     | u32 u32 u32 -> u32   | (a + b) << (c & 31)
v_lshl_add_u32     | u32 u32 u32 -> u32   | (a << (b & 31)) + c
v_lshl_or_b32      | u32 u32 u32 -> u32   | a << (b & 31) | c
v_and_or_b32       | u32 u32 u32 -> u32   | a & b | c
v_or3_b32          | u32 u32 u32 -> u32   | a | b | c
v_xor3_b32         | u32 u32 u32 -> u32   | a ^ b ^ c
v_xad_u32          | u32 u32 u32 -> u32   | (a ^ b) + c
v_bfe_u32          | u32 u32 u32 -> u32   | bit_field(a, b, c)
v_bfe_i32          | i32 u32 u32 -> i32   | signed_bit_field(a, b, c)
v_bfi_b32          | u32 u32 u32 -> u32   | a & b | ~a & c
v_bfm_b32          | u32 u32 -> u32       | ((1 << (a & 31)) - 1) << (b & 31)
v_perm_b32         | u32 u32 u32 -> u32   | permute_bytes(a, b, c)
v_alignbit_b32     | u32 u32 u32 -> u32   | align_bits(a, b, c)
v_alignbyte_b32    | u32 u32 u32 -> u32   | align_bits(a, b, (c & 3) * 8)
v_mul_lo_u32       | u32 u32 -> u32       | a * b
v_mul_hi_u32       | u32 u32 -> u32       | high_product(a, b)
v_mul_hi_i32       | i32 i32 -> i32       | (a.astype(I64) * b >> 32).astype(I32)
v_mul_hi_u32_u24   | u32 u32 -> u32       | high_product(a & 0xFFFFFF, b & 0xFFFFFF)
v_mul_hi_i32_i24   | i32 i32 -> i32       | ((a << 8 >> 8).astype(I64) * (b << 8 >> 8) >> 32).astype(I32)
v_mad_u32_u16      | u16 u16 u32 -> u32   | u32(a) * u32(b) + c
v_mad_i32_i16      | i16 i16 i32 -> i32   | i32(a) * i32(b) + c
v_bcnt_u32_b32     | u32 u32 -> u32       | count_bits(a) + b
v_ldexp_f16        | f16 i16 -> f16       | f16(ldexp(f32(a), i32(b)))
v_cvt_pkrtz_f16_f32| f32 f32 -> u32       | pack(half_bits_towards_zero(a), half_bits_towards_zero(b))
v_cvt_pk_rtz_f16_f32| f32 f32 -> u32      | pack(half_bits_towards_zero(a), half_bits_towards_zero(b))
v_mad_u32_u24      | u32 u32 u32 -> u32   | (a & 0xFFFFFF) * (b & 0xFFFFFF) + c
v_mad_i32_i24      | i32 i32 i32 -> i32   | (a << 8 >> 8) * (b << 8 >> 8) + c
v_lshlrev_b64      | u32 u64 -> u64       | b << u64(a & 63)
v_lshrrev_b64      | u32 u64 -> u64       | b >> u64(a & 63)
v_ashrrev_i64      | u32 i64 -> i64       | b >> i64(a & 63)
v_lshl_add_u64     | u64 u32 u64 -> u64   | (a << u64(b & 63)) + c
v_add_nc_u64       | u64 u64 -> u64       | a + b
v_pack_b32_f16     | u16 u16 -> u32       | pack(u32(a), u32(b))
v_cvt_pk_bf16_f32  | f32 f32 -> u32       | pack(bfloat16_bits(a), bfloat16_bits(b))
v_cvt_pk_f16_f32   | f32 f32 -> u32       | pack(half_bits(a), half_bits(b))
v_mad_u16          | u16 u16 u16 -> u16   | a * b + c
v_mad_i16          | i16 i16 i16 -> i16   | a * b + c
v_mad_legacy_u16   | u16 u16 u16 -> u16   | a * b + c
v_mad_legacy_i16   | i16 i16 i16 -> i16   | a * b + c
v_add_nc_u16       | u16 u16 -> u16       | a + b
v_sub_nc_u16       | u16 u16 -> u16       | a - b
v_and_b16          | u16 u16 -> u16       | a & b
v_or_b16           | u16 u16 -> u16       | a | b
v_xor_b16          | u16 u16 -> u16       | a ^ b
"""

VECTOR = read_table(VOP1 + VOP2 + VOP3)

# VOPC: v_cmp_<relation>_<kind>. Of floats, each relation has its negation, which is true for NaN.
COMPARISONS = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lg": lambda a, b: (a < b) | (a > b),
    "o": lambda a, b: (a == a) & (b == b),
    "u": lambda a, b: (a != a) | (b != b),
    "neq": lambda a, b: a != b,
    "nlt": lambda a, b: ~(a < b),
    "nle": lambda a, b: ~(a <= b),
    "ngt": lambda a, b: ~(a > b),
    "nge": lambda a, b: ~(a >= b),
    "nlg": lambda a, b: ~((a < b) | (a > b)),
}

# On CDNA these clear the upper half of the register that they store 16 bits in; others, and all on RDNA, keep it.
CLEARS_UPPER_HALF = frozenset(
    "v_add_f16 v_sub_f16 v_subrev_f16 v_mul_f16 v_max_f16 v_min_f16 v_cvt_f16_f32 v_add_u16 v_sub_u16 v_subrev_u16 "
    "v_mul_lo_u16 v_max_u16 v_min_u16 v_max_i16 v_min_i16 v_lshlrev_b16 v_lshrrev_b16 v_ashrrev_i16 v_cvt_f16_u16 "
    "v_cvt_f16_i16 v_exp_f16 v_log_f16 v_rcp_f16 v_rsq_f16 v_sqrt_f16 v_rndne_f16 v_floor_f16 v_ceil_f16 v_trunc_f16 "
    "v_ldexp_f16 v_mad_legacy_u16 v_mad_legacy_i16".split()
)

# With the modifier clamp, these integers stop at the ends of their range instead of wrapping around.
SATURATES = frozenset(
    "v_add_u32 v_sub_u32 v_subrev_u32 v_add_nc_u32 v_sub_nc_u32 v_subrev_nc_u32 v_add_i32 v_sub_i32 v_add_nc_i32 "
    "v_sub_nc_i32 v_add_u16 v_sub_u16 v_subrev_u16 v_add_nc_u16 v_sub_nc_u16 v_add_i16 v_sub_i16 v_add_nc_i16 "
    "v_sub_nc_i16 v_mad_u16 v_mad_i16 v_mad_legacy_u16 v_mad_legacy_i16 v_mad_u32_u24".split()
)

# ---------------------------------------------------------------- scalar instructions
# name | kinds of the sources -> kind of the result | the result | SCC afterwards: "carry" if the result has more bits
# than its kind, "overflow" if it is no signed number of them, "nonzero", or "-" if it stays. Numbers are Python's.

SOP1 = """
s_mov_b32         | u32 -> u32            | a                       | -
s_mov_b64         | u64 -> u64            | a                       | -
s_not_b32         | u32 -> u32            | ~a                      | nonzero
s_not_b64         | u64 -> u64            | ~a                      | nonzero
s_abs_i32         | i32 -> i32            | abs(a)                  | nonzero
s_sext_i32_i8     | u32 -> i32            | extend(a, 8)            | -
s_sext_i32_i16    | u32 -> i32            | extend(a, 16)           | -
s_bcnt1_i32_b32   | u32 -> u32            | bin(a).count("1")       | nonzero
s_bcnt1_i32_b64   | u64 -> u32            | bin(a).count("1")       | nonzero
s_flbit_i32_b32   | u32 -> i32            | 32 - a.bit_length() if a else -1 | -
s_clz_i32_u32     | u32 -> i32            | 32 - a.bit_length() if a else -1 | -
s_flbit_i32_b64   | u64 -> i32            | 64 - a.bit_length() if a else -1 | -
s_clz_i32_u64     | u64 -> i32            | 64 - a.bit_length() if a else -1 | -
s_flbit_i32       | i32 -> i32            | 32 - (a ^ a >> 31).bit_length() if a not in (0, -1) else -1 | -
s_cls_i32         | i32 -> i32            | 32 - (a ^ a >> 31).bit_length() if a not in (0, -1) else -1 | -
s_ff1_i32_b32     | u32 -> i32            | (a & -a).bit_length() - 1 | -
s_ctz_i32_b32     | u32 -> i32            | (a & -a).bit_length() - 1 | -
s_ff1_i32_b64     | u64 -> i32            | (a & -a).bit_length() - 1 | -
s_ctz_i32_b64     | u64 -> i32            | (a & -a).bit_length() - 1 | -
s_bitset0_b32     | old u32 -> u32        | a & ~(1 << (b & 31))    | -
s_bitset1_b32     | old u32 -> u32        | a | 1 << (b & 31)       | -
s_cmov_b32        | old u32 scc -> u32    | b if c else a           | -
s_cmov_b64        | old u64 scc -> u64    | b if c else a           | -
s_brev_b32        | u32 -> u32            | int(f"{a:032b}"[::-1], 2) | -
"""

SOP2 = """
s_add_u32         | u32 u32 -> u32        | a + b                   | carry
s_sub_u32         | u32 u32 -> u32        | a - b                   | carry
s_addc_u32        | u32 u32 scc -> u32    | a + b + c               | carry
s_subb_u32        | u32 u32 scc -> u32    | a - b - c               | carry
s_add_co_u32      | u32 u32 -> u32        | a + b                   | carry
s_sub_co_u32      | u32 u32 -> u32        | a - b                   | carry
s_add_co_ci_u32   | u32 u32 scc -> u32    | a + b + c               | carry
s_sub_co_ci_u32   | u32 u32 scc -> u32    | a - b - c               | carry
s_add_i32         | i32 i32 -> i32        | a + b                   | overflow
s_sub_i32         | i32 i32 -> i32        | a - b                   | overflow
s_add_co_i32      | i32 i32 -> i32        | a + b                   | overflow
s_sub_co_i32      | i32 i32 -> i32        | a - b                   | overflow
s_add_u64         | u64 u64 -> u64        | a + b                   | -
s_sub_u64         | u64 u64 -> u64        | a - b                   | -
s_add_nc_u64      | u64 u64 -> u64        | a + b                   | -
s_sub_nc_u64      | u64 u64 -> u64        | a - b                   | -
s_mul_i32         | i32 i32 -> i32        | a * b                   | -
s_mul_hi_u32      | u32 u32 -> u32        | a * b >> 32             | -
s_mul_hi_i32      | i32 i32 -> i32        | a * b >> 32             | -
s_mul_u64         | u64 u64 -> u64        | a * b                   | -
s_min_i32         | i32 i32 -> i32        | min(a, b)               | a < b
s_max_i32         | i32 i32 -> i32        | max(a, b)               | a >= b
s_min_u32         | u32 u32 -> u32        | min(a, b)               | a < b
s_max_u32         | u32 u32 -> u32        | max(a, b)               | a >= b
s_and_b32         | u32 u32 -> u32        | a & b                   | nonzero
s_and_b64         | u64 u64 -> u64        | a & b                   | nonzero
s_or_b32          | u32 u32 -> u32        | a | b                   | nonzero
s_or_b64          | u64 u64 -> u64        | a | b                   | nonzero
s_xor_b32         | u32 u32 -> u32        | a ^ b                   | nonzero
s_xor_b64         | u64 u64 -> u64        | a ^ b                   | nonzero
s_andn2_b32       | u32 u32 -> u32        | a & ~b                  | nonzero
s_andn2_b64       | u64 u64 -> u64        | a & ~b                  | nonzero
s_and_not1_b32    | u32 u32 -> u32        | a & ~b                  | nonzero
s_and_not1_b64    | u64 u64 -> u64        | a & ~b                  | nonzero
s_orn2_b32        | u32 u32 -> u32        | a | ~b                  | nonzero
s_orn2_b64        | u64 u64 -> u64        | a | ~b                  | nonzero
s_or_not1_b32     | u32 u32 -> u32        | a | ~b                  | nonzero
s_nand_b32        | u32 u32 -> u32        | ~(a & b)                | nonzero
s_nand_b64        | u64 u64 -> u64        | ~(a & b)                | nonzero
s_nor_b32         | u32 u32 -> u32        | ~(a | b)                | nonzero
s_nor_b64         | u64 u64 -> u64        | ~(a | b)                | nonzero
s_xnor_b32        | u32 u32 -> u32        | ~(a ^ b)                | nonzero
s_xnor_b64        | u64 u64 -> u64        | ~(a ^ b)                | nonzero
s_lshl_b32        | u32 u32 -> u32        | cut(a << (b & 31), 32)  | nonzero
s_lshl_b64        | u64 u32 -> u64        | cut(a << (b & 63), 64)  | nonzero
s_lshr_b32        | u32 u32 -> u32        | a >> (b & 31)           | nonzero
s_lshr_b64        | u64 u32 -> u64        | a >> (b & 63)           | nonzero
s_ashr_i32        | i32 u32 -> i32        | a >> (b & 31)           | nonzero
s_ashr_i64        | i64 u32 -> i64        | a >> (b & 63)           | nonzero
s_lshl1_add_u32   | u32 u32 -> u32        | (a << 1) + b            | carry
s_lshl2_add_u32   | u32 u32 -> u32        | (a << 2) + b            | carry
s_lshl3_add_u32   | u32 u32 -> u32        | (a << 3) + b            | carry
s_lshl4_add_u32   | u32 u32 -> u32        | (a << 4) + b            | carry
s_bfe_u32         | u32 u32 -> u32        | field(a, b, 32)         | nonzero
s_bfe_u64         | u64 u32 -> u64        | field(a, b, 64)         | nonzero
s_bfe_i32         | i32 u32 -> i32        | extend(field(a, b, 32), b >> 16 & 127) | nonzero
s_bfe_i64         | i64 u32 -> i64        | extend(field(a, b, 64), b >> 16 & 127) | nonzero
s_bfm_b32         | u32 u32 -> u32        | cut(((1 << (a & 31)) - 1) << (b & 31), 32) | -
s_cselect_b32     | u32 u32 scc -> u32    | a if c else b           | -
s_cselect_b64     | u64 u64 scc -> u64    | a if c else b           | -
s_pack_ll_b32_b16 | u32 u32 -> u32        | a & 0xFFFF | (b & 0xFFFF) << 16 | -
s_pack_lh_b32_b16 | u32 u32 -> u32        | a & 0xFFFF | b >> 16 << 16      | -
s_pack_hh_b32_b16 | u32 u32 -> u32        | a >> 16 | b >> 16 << 16         | -
"""

SOPK = """
s_movk_i32        | i16 -> i32            | a                       | -
s_addk_i32        | old i16 -> i32        | a + b                   | overflow
s_addk_co_i32     | old i16 -> i32        | a + b                   | overflow
s_mulk_i32        | old i16 -> i32        | a * b                   | -
"""


def read_scalar_table(text):
    """Return {name: (kinds of the sources, kind of the result, function, function for SCC or None)}."""
    names = {
        "extend": lambda x, bits: ((x & (1 << bits) - 1) ^ (1 << bits >> 1)) - (1 << bits >> 1),
        "field": lambda x, where, bits: x >> (where & bits - 1) & (1 << (where >> 16 & 127)) - 1,
        "cut": lambda x, bits: x & (1 << bits) - 1,
    }
    table = {}
    for line in text.strip().splitlines():
        if not line.strip():
            continue
        name, kinds, meaning = (cell.strip() for cell in line.split("|", 2))
        meaning, _, scc = (cell.strip() for cell in meaning.rpartition("|"))
        sources, _, result = (cell.strip() for cell in kinds.partition("->"))
        sources = tuple(sources.split())
        arguments = ", ".join("abc"[: len(sources)])
        bits = int(result[1:])
        rules = {
            "-": None,
            "nonzero": f"result & {(1 << bits) - 1} != 0",
            "carry": f"not 0 <= result < {1 << bits}",
            "overflow": f"not -{1 << (bits - 1)} <= result < {1 << (bits - 1)}",
        }
        rule = rules.get(scc, scc)
        flag = eval(f"lambda result, {arguments}: {rule}", names) if rule else None
        table[name] = (sources, result, eval(f"lambda {arguments}: {meaning}", names), flag)
    return table


SCALAR = read_scalar_table(SOP1 + SOP2 + SOPK)

# SOPP: about time, caches, priorities and the instruction buffer. Nothing of them is modelled.
NO_EFFECT = frozenset(
    "s_nop s_waitcnt s_waitcnt_vscnt s_waitcnt_depctr s_wait_loadcnt s_wait_storecnt s_wait_dscnt s_wait_kmcnt "
    "s_wait_alu s_wait_idle s_wait_loadcnt_dscnt s_wait_storecnt_dscnt s_wait_samplecnt s_wait_bvhcnt s_wait_expcnt "
    "s_clause s_delay_alu s_sendmsg s_sleep s_setprio s_code_end s_inst_prefetch s_set_inst_prefetch_distance "
    "s_sethalt s_sched_barrier s_icache_inv s_dcache_wb s_prefetch_inst s_prefetch_inst_pc_rel v_nop buffer_gl0_inv "
    "buffer_gl1_inv buffer_wbl2 buffer_wbinvl1 buffer_wbinvl1_vol buffer_inv global_inv global_wb global_wbinv".split()
)
