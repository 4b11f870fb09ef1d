"""The rules of AMD's instruction sets, without any kernel: what the documents say, against the interpreter."""

import pathlib
import re
import struct
from fractions import Fraction
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from isa import WIDTH, Machine, bits, floats, run

from amd import arithmetic, atomics, banks, lines, machine, matrix, tables, vector
from amd.assembly import Fault, UnsupportedError, parse_kernel
from amd.machine import TTMP, VCC
from common.formulas.gpus import peak_tflops
from common.formulas.occupancy import SIMDS, TARGETS

INF, NAN = float("inf"), float("nan")
RNG = np.random.default_rng(0)
ALL = "gfx90a gfx942 gfx950 gfx1100 gfx1201".split()


def number(text):
    return float(text) if any(mark in text for mark in (".", "inf", "nan")) else int(text, 0)


# ---------------------------------------------------------------- one instruction, one result
# target | instruction, with the result in v0 | v1, v2 and v3 | v0

EXAMPLES = """
gfx942  | v_mov_b32_e32 v0, v1                   | 0xdeadbeef              | 0xdeadbeef
gfx942  | v_not_b32_e32 v0, v1                   | 0x0f0f0000              | 0xf0f0ffff
gfx942  | v_bfrev_b32_e32 v0, v1                 | 0x80000001              | 0x80000001
gfx942  | v_bfrev_b32_e32 v0, 1                  | 0                       | 0x80000000
gfx942  | v_add_u32_e32 v0, v1, v2               | 0xffffffff 2            | 1
gfx942  | v_sub_u32_e32 v0, v1, v2               | 3 5                     | -2
gfx942  | v_subrev_u32_e32 v0, v1, v2            | 3 5                     | 2
gfx1100 | v_add_nc_u32_e32 v0, v1, v2            | 7 5                     | 12
gfx1100 | v_subrev_nc_u32_e32 v0, v1, v2         | 3 5                     | 2
gfx942  | v_add3_u32 v0, v1, v2, v3              | 1 2 0xffffffff          | 2
gfx942  | v_add_lshl_u32 v0, v1, v2, 4           | 1 2                     | 48
gfx942  | v_lshl_add_u32 v0, v1, 3, v2           | 5 7                     | 47
gfx942  | v_lshl_or_b32 v0, v1, 8, v2            | 0x12 0x34               | 0x1234
gfx942  | v_and_or_b32 v0, v1, v2, v3            | 0xff 0x0f 0x100         | 0x10f
gfx942  | v_or3_b32 v0, v1, v2, v3               | 1 2 4                   | 7
gfx1100 | v_xor3_b32 v0, v1, v2, v3              | 1 3 7                   | 5
gfx942  | v_xad_u32 v0, v1, v2, v3               | 6 3 10                  | 15
gfx942  | v_lshlrev_b32_e32 v0, v1, v2           | 4 3                     | 48
gfx942  | v_lshlrev_b32_e32 v0, v1, v2           | 33 3                    | 6
gfx942  | v_lshrrev_b32_e32 v0, v1, v2           | 4 0x80000000            | 0x08000000
gfx942  | v_ashrrev_i32_e32 v0, v1, v2           | 4 0x80000000            | 0xf8000000
gfx942  | v_lshlrev_b16_e32 v0, v1, v2           | 4 0x12345678            | 0x6780
gfx942  | v_add_u16_e32 v0, v1, v2               | 0x1ffff 0x50002         | 1
gfx942  | v_and_b32_e32 v0, 0xf0, v1             | 0x1234                  | 0x30
gfx942  | v_bfe_u32 v0, v1, 4, 8                 | 0x12345678              | 0x67
gfx942  | v_bfe_u32 v0, v1, 4, 0                 | 0x12345678              | 0
gfx942  | v_bfe_i32 v0, v1, 4, 8                 | 0x12345f78              | -9
gfx942  | v_bfe_i32 v0, v1, 28, 8                | 0x92345678              | -7
gfx942  | v_bfi_b32 v0, v1, v2, v3               | 0xff00 0x1234 0xabcd    | 0x12cd
gfx942  | v_alignbit_b32 v0, v1, v2, 8           | 0x12345678 0x9abcdef0   | 0x789abcde
gfx942  | v_perm_b32 v0, v1, v2, v3              | 0x77665544 0x33221100 0x07040300 | 0x77443300
gfx942  | v_perm_b32 v0, v1, v2, v3              | 0x77665544 0x33221100 0x0c0d0c05 | 0x00ff0055
gfx942  | v_perm_b32 v0, v1, v2, v3              | 0x80005544 0x00008000 0x0b0a0908 | 0xff0000ff
gfx942  | v_mul_lo_u32 v0, v1, v2                | 0x10001 0x10001         | 0x20001
gfx942  | v_mul_hi_u32 v0, v1, v2                | 0x80000000 6            | 3
gfx942  | v_mul_u32_u24_e32 v0, v1, v2           | 0xff000003 0x11000005   | 15
gfx942  | v_mad_u32_u24 v0, v1, v2, v3           | 0xff000003 5 1          | 16
gfx942  | v_max_i32_e32 v0, v1, v2               | -1 3                    | 3
gfx942  | v_max_u32_e32 v0, v1, v2               | -1 3                    | -1
gfx942  | v_min_i32_e32 v0, v1, v2               | -1 3                    | -1
gfx942  | v_pack_b32_f16 v0, v1, v2              | 0x11112222 0x33334444   | 0x44442222
gfx942  | v_add_f32_e32 v0, v1, v2               | 1.5 2.25                | 3.75
gfx942  | v_add_f32_e64 v0, -v1, |v2|            | 1.5 -2.25               | 0.75
gfx942  | v_sub_f32_e32 v0, v1, v2               | 1.5 2.25                | -0.75
gfx1100 | v_subrev_f32_e32 v0, v1, v2            | 1.5 2.25                | 0.75
gfx942  | v_mul_f32_e32 v0, 2.0, v1              | 1.5                     | 3.0
gfx942  | v_mul_f32_e32 v0, 0x3fb8aa3b, v1       | 2.0                     | 2.885390043258667
gfx942  | v_max_f32_e32 v0, v1, v2               | nan 2.0                 | 2.0
gfx942  | v_max3_f32 v0, v1, v2, v3              | -3.0 -inf -2.0          | -2.0
gfx942  | v_min_f32_e32 v0, v1, v2               | 3.0 -inf                | -inf
gfx1201 | v_maximum_f32 v0, v1, v2               | nan 2.0                 | nan
gfx1201 | v_max_num_f32_e32 v0, v1, v2           | nan 2.0                 | 2.0
gfx942  | v_exp_f32_e32 v0, v1                   | 3.0                     | 8.0
gfx942  | v_exp_f32_e32 v0, v1                   | -126.0                  | 1.1754943508222875e-38
gfx942  | v_exp_f32_e32 v0, v1                   | -127.0                  | 0.0
gfx942  | v_exp_f32_e32 v0, v1                   | -inf                    | 0.0
gfx942  | v_log_f32_e32 v0, v1                   | 8.0                     | 3.0
gfx942  | v_log_f32_e32 v0, v1                   | 0x00000001              | -inf
gfx942  | v_log_f32_e32 v0, v1                   | -1.0                    | nan
gfx942  | v_rcp_f32_e32 v0, v1                   | 4.0                     | 0.25
gfx942  | v_rcp_f32_e32 v0, v1                   | 0x80000000              | -inf
gfx942  | v_rsq_f32_e32 v0, v1                   | 4.0                     | 0.5
gfx942  | v_sqrt_f32_e32 v0, v1                  | 9.0                     | 3.0
gfx942  | v_rndne_f32_e32 v0, v1                 | 2.5                     | 2.0
gfx942  | v_floor_f32_e32 v0, v1                 | -2.5                    | -3.0
gfx942  | v_trunc_f32_e32 v0, v1                 | -2.5                    | -2.0
gfx942  | v_ldexp_f32 v0, v1, v2                 | 1.5 -3                  | 0.1875
gfx942  | v_ldexp_f32 v0, v1, v2                 | 1.5 -149                | 0x00000002
gfx942  | v_cvt_f32_i32_e32 v0, v1               | -3                      | -3.0
gfx942  | v_cvt_f32_u32_e32 v0, v1               | 16777217                | 16777216.0
gfx942  | v_cvt_f32_u32_e32 v0, v1               | 16777219                | 16777220.0
gfx942  | v_cvt_u32_f32_e32 v0, v1               | 3.99                    | 3
gfx942  | v_cvt_u32_f32_e32 v0, v1               | -1.0                    | 0
gfx942  | v_cvt_u32_f32_e32 v0, v1               | 1.0e20                  | 0xffffffff
gfx942  | v_cvt_i32_f32_e32 v0, v1               | -inf                    | 0x80000000
gfx942  | v_cvt_i32_f32_e32 v0, v1               | nan                     | 0
gfx942  | v_cvt_f16_f32_e32 v0, v1               | 65519.0                 | 0x7bff
gfx942  | v_cvt_f16_f32_e32 v0, v1               | 65520.0                 | 0x7c00
gfx942  | v_cvt_f16_f32_e32 v0, v1               | 1.00048828125           | 0x3c00
gfx942  | v_cvt_f16_f32_e32 v0, v1               | 1.00146484375           | 0x3c02
gfx942  | v_cvt_f16_f32_e32 v0, v1               | 5.960464477539063e-08   | 0x0001
gfx942  | v_cvt_f16_f32_e32 v0, v1               | 2.9802322387695312e-08  | 0x0000
gfx942  | v_cvt_f32_f16_e32 v0, v1               | 0xffff0001              | 5.960464477539063e-08
gfx942  | v_cvt_f32_f16_e32 v0, v1               | 0xfc00                  | -inf
gfx1201 | v_cvt_f16_f32_e32 v0, v1               | 1.0                     | 0x77773c00
gfx950  | v_cvt_pk_bf16_f32 v0, v1, v2           | 1.00390625 1.01171875   | 0x3f823f80
gfx950  | v_cvt_pk_bf16_f32 v0, v1, v2           | inf 3.4e38              | 0x7f807f80
gfx950  | v_bitop3_b32 v0, v1, v2, v3 bitop3:0xca | 0xff00 0x1234 0xabcd    | 0x12cd
gfx950  | v_bitop3_b16 v0, v1, v2, v3 bitop3:0xca | 0xff00 0x1234 0xabcd    | 0x777712cd
gfx942  | v_fma_mix_f32 v0, v1, v2, v3 op_sel_hi:[1,0,0]             | 0x3c004000 3.0 1.0 | 7.0
gfx942  | v_fma_mix_f32 v0, -v1, v2, v3 op_sel:[1,0,0] op_sel_hi:[1,0,0] | 0x3c004000 3.0 1.0 | -2.0
gfx942  | v_fma_mix_f32 v0, v1, v2, neg(0) op_sel_hi:[1,0,0]         | 0x80008000 3.0 | 0x80000000
gfx942  | v_fma_mix_f32 v0, v1, v2, 0 op_sel_hi:[1,0,0]              | 0x80008000 3.0 | 0x00000000
gfx942  | v_add_f32_e64 v0, neg(abs(v1)), abs(v2) | -1.5 -2.25              | 0.75
gfx942  | v_fma_mixlo_f16 v0, v1, v2, 0          | 2.0 3.0                 | 0x77774600
gfx942  | v_fma_mixhi_f16 v0, v1, v2, 0          | 2.0 3.0                 | 0x46007777
gfx942  | v_add_f16_e32 v0, v1, v2               | 0x99993c00 0x4000       | 0x4200
gfx1100 | v_add_f16_e32 v0, v1, v2               | 0x99993c00 0x4000       | 0x77774200
gfx1201 | v_add_f16_e64 v0, v1, v2 op_sel:[1,0,1] | 0x3c00ffff 0x4000       | 0x42007777
gfx1201 | v_add_f16_e32 v0.h, v1.h, v2.l         | 0x3c00ffff 0x4000       | 0x42007777
gfx942  | v_pk_add_f16 v0, v1, v2                | 0x3c004000 0x40003c00   | 0x42004200
gfx942  | v_pk_add_f16 v0, v1, 0 neg_lo:[1,0] neg_hi:[1,0] | 0x3c004000 | 0xbc00c000
gfx942  | v_pk_mul_f16 v0, v1, v2 op_sel_hi:[0,1] neg_hi:[1,0] | 0x3c004000 0x40003c00 | 0xc4004000
gfx1100 | v_dot2acc_f32_f16 v0, v1, v2           | 0x40003c00 0x42004400   | 6.0
gfx942  | v_fmac_f32_e32 v0, v1, v2              | 2.0 3.0                 | 6.0
gfx90a  | v_mac_f32_e32 v0, v1, v2               | 2.0 3.0                 | 6.0
gfx942  | v_fma_f32 v0, -v1, v2, 1.0             | 2.0 3.0                 | -5.0
gfx942  | v_fmamk_f32 v0, v1, 0x40000000, v2     | 3.0 1.0                 | 7.0
gfx90a  | v_madmk_f32 v0, v1, 0x40000000, v2     | 3.0 1.0                 | 7.0
gfx90a  | v_madak_f32 v0, v1, v2, 0x40000000     | 3.0 5.0                 | 17.0
gfx90a  | v_mad_f32 v0, -v1, v2, 1.0             | 2.0 3.0                 | -5.0
gfx90a  | v_mad_f32 v0, v1, v2, v3               | 0x3f800800 0x3f800800 -1.0 | 0x3a000000
gfx90a  | v_fma_f32 v0, v1, v2, v3               | 0x3f800800 0x3f800800 -1.0 | 0x3a000400
gfx90a  | v_mad_f32 v0, v1, v2, v3               | 0x00400000 2.0 0        | 0.0
gfx90a  | v_mad_f32 v0, v1, v2, v3               | 0x00800000 0.5 0        | 0.0
gfx90a  | v_mad_f32 v0, v1, 0, v2                | 1.0 0x807fffff          | 0x00000000
gfx1100 | v_add_f32_e64 v0, v1, v2 clamp         | 2.0 3.0                 | 1.0
gfx942  | v_add_f32_e64 v0, v1, v2 clamp         | nan 3.0                 | 0.0
gfx942  | v_pk_add_f16 v0, v1, v2 clamp          | 0x7e00c000 0x3c003c00   | 0x00000000
gfx942  | v_fma_mixlo_f16 v0, v1, v2, 0 clamp    | 2.0 3.0                 | 0x77773c00
gfx942  | v_sub_u32_e64 v0, v1, v2 clamp         | 3 5                     | 0
gfx942  | v_add_u32_e64 v0, v1, v2 clamp         | 0xfffffff0 0x20         | 0xffffffff
gfx1100 | v_sub_nc_u32_e64 v0, v1, v2 clamp      | 3 5                     | 0
gfx1100 | v_add_nc_i32 v0, v1, v2 clamp          | 0x7fffffff 1            | 0x7fffffff
gfx1100 | v_sub_nc_i32 v0, v1, v2 clamp          | 0x80000000 1            | 0x80000000
gfx942  | v_add_u16_e64 v0, v1, v2 clamp         | 0xffff 2                | 0x0000ffff
gfx942  | v_pk_sub_u16 v0, v1, v2 clamp          | 0x00030005 0x00050003   | 0x00000002
gfx942  | v_pk_add_i16 v0, v1, v2 clamp          | 0x80007fff 0xffff0001   | 0x80007fff
gfx942  | v_fma_f16 v0, v1, v2, v3               | 0x3c00 0x4000 0x3c00    | 0x77774200
gfx942  | v_mad_u16 v0, v1, v2, v3               | 3 5 7                   | 0x77770016
gfx942  | v_med3_f32 v0, v1, v2, v3              | 3.0 -1.0 2.0            | 2.0
gfx942  | v_med3_f32 v0, v1, v2, v3              | 3.0 nan -1.0            | -1.0
gfx942  | v_med3_f32 v0, v1, v2, v3              | 2.0 3.0 nan             | 2.0
gfx1201 | v_med3_num_f32 v0, v1, v2, v3          | nan 3.0 -1.0            | -1.0
gfx1100 | v_maxmin_f32 v0, v1, v2, v3            | -3.0 2.0 1.0            | 1.0
gfx1100 | v_minmax_f32 v0, v1, v2, v3            | 5.0 2.0 3.0             | 3.0
gfx1201 | v_maxmin_num_f32 v0, v1, v2, v3        | nan 2.0 5.0             | 2.0
gfx1100 | v_minmax_u32 v0, v1, v2, v3            | 5 2 3                   | 3
gfx1100 | v_dot2_f32_bf16 v0, v1, v2, v3         | 0x3f804000 0x40404000 1.0 | 8.0
gfx1100 | v_dot2_bf16_bf16 v0, v1, v2, v3        | 0x3f804000 0x40404000 0x3f80 | 0x77774100
gfx1100 | v_dot2_bf16_bf16 v0, v1, v2, v3 op_sel:[0,0,1,1] | 0x3f804000 0x40404000 0x3f800000 | 0x41007777
gfx942  | v_dot4c_i32_i8_e32 v0, v1, v2          | 0xff02fe80 0x7f03017f   | 2004301692
gfx942  | v_dot4_i32_i8 v0, v1, v2, v3           | 0xff02fe80 0x7f03017f 5 | -16374
gfx942  | v_dot4_u32_u8 v0, v1, v2, v3           | 0xff02fe80 0x7f03017f 5 | 48906
gfx1100 | v_dot4_i32_iu8 v0, v1, v2, v3 neg_lo:[1,1,0] | 0xff02fe80 0xff03017f 5 | -16246
gfx1100 | v_dot4_i32_iu8 v0, v1, v2, v3 neg_lo:[0,1,0] | 0xff02fe80 0xff03017f 5 | 16266
gfx1100 | v_dot4_i32_iu8 v0, v1, v2, v3 neg_lo:[1,0,0] | 0xff02fe80 0xff03017f 5 | -16502
gfx1100 | v_dot4_i32_iu8 v0, v1, v2, v3          | 0xff02fe80 0xff03017f 5 | 81546
gfx1100 | v_dot2_f16_f16 v0, v1, v2, v3          | 0x3c004000 0x42004000 0x3c00 | 0x77774800
gfx942  | v_cvt_f32_ubyte2_e32 v0, v1            | 0x12fe5678              | 254.0
gfx942  | v_ffbh_u32_e32 v0, v1                  | 0x00ff0000              | 8
gfx942  | v_ffbh_u32_e32 v0, v1                  | 0xffffffff              | 0
gfx1100 | v_clz_i32_u32_e32 v0, v1               | 0                       | -1
gfx942  | v_ffbh_i32_e32 v0, v1                  | 0xf0000000              | 4
gfx942  | v_ffbl_b32_e32 v0, v1                  | 0x00ff0000              | 16
gfx942  | v_bcnt_u32_b32 v0, v1, v2              | 0xf000000f 5            | 13
gfx942  | v_mul_hi_i32 v0, v1, v2                | -2 0x40000000           | -1
gfx942  | v_mad_i32_i16 v0, v1, v2, v3           | 0xfffe 0x12340003 10    | 4
gfx942  | v_frexp_mant_f32_e32 v0, v1            | 12.0                    | 0.75
gfx942  | v_frexp_exp_i32_f32_e32 v0, v1         | 12.0                    | 4
gfx942  | v_frexp_exp_i32_f32_e32 v0, v1         | inf                     | 0
gfx942  | v_sin_f32_e32 v0, v1                   | 1.25                    | 1.0
gfx942  | v_cos_f32_e32 v0, v1                   | 0.5                     | -1.0
gfx942  | v_rcp_f16_e32 v0, v1                   | 0x99994000              | 0x3800
gfx1100 | v_sqrt_f16_e32 v0, v1                  | 0x99994400              | 0x77774000
gfx942  | v_cvt_f16_u16_e32 v0, v1               | 0x99990003              | 0x4200
gfx942  | v_cvt_pkrtz_f16_f32 v0, v1, v2         | 1.0009765 -1.9999999    | 0xbfff3c00
gfx942  | v_ldexp_f16_e64 v0, v1, v2             | 0x3c00 3                | 0x4800
gfx942  | v_max3_f16 v0, v1, v2, v3              | 0x3c00 0x4000 0x7e00    | 0x77774000
gfx942  | v_maximum3_f16 v0, v1, v2, v3          | 0x3c00 0x4000 0x7e00    | 0x77777e00
gfx942  | v_div_fixup_f16 v0, v1, v2, v3         | 0x3c00 0x4000 0xc400    | 0x7777bc00
gfx942  | v_div_fixup_f16 v0, v1, v2, v3         | 0x3c00 0x0000 0xc400    | 0x7777fc00
gfx942  | v_max3_i16 v0, v1, v2, v3              | 0x8000 0xffff 0xfff0    | 0x7777ffff
gfx942  | v_min3_u16 v0, v1, v2, v3              | 0x8000 0xffff 0xfff0    | 0x77778000
gfx942  | v_med3_i16 v0, v1, v2, v3              | 0x8000 0xffff 0xfff0    | 0x7777fff0
gfx942  | v_mad_legacy_u16 v0, v1, v2, v3        | 3 5 7                   | 22
gfx942  | v_mad_legacy_i16 v0, v1, v2, v3 clamp  | 0x7fff 2 0              | 0x00007fff
gfx942  | v_mad_i16 v0, v1, v2, v3               | 0xfffd 5 7              | 0x7777fff8
gfx1201 | v_mov_b16_e32 v0.l, v1.l               | 0xabcd1234              | 0x77771234
gfx1201 | v_not_b16_e32 v0.l, v1.l               | 0xabcd1234              | 0x7777edcb
gfx942  | v_rcp_iflag_f32_e32 v0, v1             | 4.0                     | 0.25
gfx942  | v_ceil_f32_e32 v0, v1                  | -2.5                    | -2.0
gfx942  | v_fract_f32_e32 v0, v1                 | -2.75                   | 0.25
gfx942  | v_cvt_f32_ubyte0_e32 v0, v1            | 0x123456fe              | 254.0
gfx942  | v_cvt_f32_ubyte1_e32 v0, v1            | 0x1234fe78              | 254.0
gfx942  | v_cvt_f32_ubyte3_e32 v0, v1            | 0xfe345678              | 254.0
gfx942  | v_cvt_f16_i16_e32 v0, v1               | 0x9999fffd              | 0xc200
gfx942  | v_cvt_u16_f16_e32 v0, v1               | 0x99994100              | 0x77770002
gfx942  | v_cvt_u16_f16_e32 v0, v1               | 0x9999c100              | 0x77770000
gfx942  | v_cvt_i16_f16_e32 v0, v1               | 0x9999c100              | 0x7777fffe
gfx942  | v_exp_f16_e32 v0, v1                   | 0x9999c000              | 0x3400
gfx942  | v_log_f16_e32 v0, v1                   | 0x99994400              | 0x4000
gfx942  | v_rsq_f16_e32 v0, v1                   | 0x99994400              | 0x3800
gfx942  | v_rndne_f16_e32 v0, v1                 | 0x99994100              | 0x4000
gfx942  | v_floor_f16_e32 v0, v1                 | 0x9999c100              | 0xc200
gfx942  | v_ceil_f16_e32 v0, v1                  | 0x9999c100              | 0xc000
gfx942  | v_trunc_f16_e32 v0, v1                 | 0x9999c100              | 0xc000
gfx1100 | v_cls_i32_e32 v0, v1                   | 0xf0000000              | 4
gfx1100 | v_cls_i32_e32 v0, v1                   | 0xffffffff              | -1
gfx1100 | v_ctz_i32_b32_e32 v0, v1               | 0x00ff0000              | 16
gfx950  | v_cvt_f32_bf16_e32 v0, v1              | 0x12344040              | 3.0
gfx942  | v_fmaak_f32 v0, v1, v2, 0x40000000     | 3.0 2.0                 | 8.0
gfx942  | v_dot2c_f32_f16_e32 v0, v1, v2         | 0x40003c00 0x42004400   | 6.0
gfx942  | v_dot2_f32_f16 v0, v1, v2, v3          | 0x40003c00 0x42004400 -4.0 | 6.0
gfx1201 | v_min_num_f32_e32 v0, v1, v2           | nan 2.0                 | 2.0
gfx1201 | v_minimum_f32 v0, v1, v2               | nan 2.0                 | nan
gfx1201 | v_minimum_f32 v0, v1, v2               | 3.0 2.0                 | 2.0
gfx942  | v_sub_f16_e32 v0, v1, v2               | 0x99993c00 0x4200       | 0xc000
gfx942  | v_subrev_f16_e32 v0, v1, v2            | 0x99993c00 0x4200       | 0x4000
gfx942  | v_mul_f16_e32 v0, v1, v2               | 0x99994000 0x4200       | 0x4600
gfx942  | v_max_f16_e32 v0, v1, v2               | 0x9999bc00 0x3c00       | 0x3c00
gfx942  | v_min_f16_e32 v0, v1, v2               | 0x9999bc00 0x3c00       | 0xbc00
gfx1201 | v_max_num_f16_e32 v0.l, v1.l, v2.l     | 0x7e00 0x3c00           | 0x77773c00
gfx1201 | v_min_num_f16_e32 v0.l, v1.l, v2.l     | 0xbc00 0x3c00           | 0x7777bc00
gfx942  | v_add_i32 v0, v1, v2                   | -3 5                    | 2
gfx942  | v_sub_i32 v0, v1, v2                   | 3 5                     | -2
gfx942  | v_mul_i32_i24_e32 v0, v1, v2           | 0x11fffffd 5            | -15
gfx942  | v_mul_hi_u32_u24_e32 v0, v1, v2        | 0x11ffffff 0x22ffffff   | 0xffff
gfx942  | v_mul_hi_i32_i24_e32 v0, v1, v2        | 0x11800000 0x22400000   | -8192
gfx942  | v_mad_i32_i24 v0, v1, v2, v3           | 0x11fffffd 5 1          | -14
gfx942  | v_mad_u32_u16 v0, v1, v2, v3           | 0x1234ffff 0x56780003 1 | 0x2fffe
gfx942  | v_min_u32_e32 v0, v1, v2               | -1 3                    | 3
gfx942  | v_or_b32_e32 v0, v1, v2                | 6 3                     | 7
gfx942  | v_xnor_b32_e32 v0, v1, v2              | 6 3                     | -6
gfx942  | v_subrev_u16_e32 v0, v1, v2            | 0x10003 0x20005         | 2
gfx942  | v_mul_lo_u16_e32 v0, v1, v2            | 0x10101 0x10101         | 0x0201
gfx942  | v_max_u16_e32 v0, v1, v2               | 0x1ffff 0x20003         | 0xffff
gfx942  | v_min_u16_e32 v0, v1, v2               | 0x1ffff 0x20003         | 3
gfx942  | v_max_i16_e32 v0, v1, v2               | 0x1ffff 0x20003         | 3
gfx942  | v_min_i16_e32 v0, v1, v2               | 0x1ffff 0x20003         | 0xffff
gfx942  | v_lshrrev_b16_e32 v0, v1, v2           | 20 0x12348000           | 0x0800
gfx942  | v_ashrrev_i16_e32 v0, v1, v2           | 20 0x12348000           | 0xf800
gfx942  | v_add_i16 v0, v1, v2                   | 0x1fffd 0x20005         | 0x77770002
gfx942  | v_sub_i16 v0, v1, v2                   | 0x10003 0x20005         | 0x7777fffe
gfx1100 | v_add_nc_i16 v0, v1, v2                | 0x1fffd 0x20005         | 0x77770002
gfx1100 | v_sub_nc_i16 v0, v1, v2 clamp          | 0x8000 1                | 0x77778000
gfx1100 | v_add_nc_u16 v0, v1, v2 clamp          | 0xffff 2                | 0x7777ffff
gfx1100 | v_sub_nc_u16 v0, v1, v2                | 3 5                     | 0x7777fffe
gfx1100 | v_and_b16 v0, v1, v2                   | 0x10006 0x20003         | 0x77770002
gfx1100 | v_or_b16 v0, v1, v2                    | 0x10006 0x20003         | 0x77770007
gfx1100 | v_xor_b16 v0, v1, v2                   | 0x10006 0x20003         | 0x77770005
gfx942  | v_bfm_b32 v0, v1, v2                   | 36 40                   | 0xf00
gfx942  | v_alignbyte_b32 v0, v1, v2, v3         | 0x12345678 0x9abcdef0 5 | 0x789abcde
gfx1201 | v_cvt_pk_rtz_f16_f32_e32 v0, v1, v2    | 1.0009765 -1.9999999    | 0xbfff3c00
gfx950  | v_cvt_pk_f16_f32 v0, v1, v2            | 1.0009765 -1.9999999    | 0xc0003c01
gfx942  | v_min3_f32 v0, v1, v2, v3              | 3.0 nan -2.0            | -2.0
gfx1201 | v_max3_num_f32 v0, v1, v2, v3          | nan -3.0 -2.0           | -2.0
gfx1201 | v_min3_num_f32 v0, v1, v2, v3          | nan -3.0 -2.0           | -3.0
gfx1201 | v_maximum3_f32 v0, v1, v2, v3          | 1.0 -3.0 2.0            | 2.0
gfx1201 | v_maximum3_f32 v0, v1, v2, v3          | 1.0 nan 2.0             | nan
gfx1201 | v_minimum3_f32 v0, v1, v2, v3          | 1.0 -3.0 2.0            | -3.0
gfx1201 | v_minimum3_f32 v0, v1, v2, v3          | 1.0 nan 2.0             | nan
gfx942  | v_min3_f16 v0, v1, v2, v3              | 0x3c00 0x4000 0x7e00    | 0x77773c00
gfx1201 | v_max3_num_f16 v0, v1, v2, v3          | 0x3c00 0x4000 0x7e00    | 0x77774000
gfx1201 | v_min3_num_f16 v0, v1, v2, v3          | 0x3c00 0x4000 0x7e00    | 0x77773c00
gfx1201 | v_minimum3_f16 v0, v1, v2, v3          | 0x3c00 0x4000 0x7e00    | 0x77777e00
gfx1201 | v_minimum3_f16 v0, v1, v2, v3          | 0x3c00 0x4000 0xbc00    | 0x7777bc00
gfx942  | v_med3_f16 v0, v1, v2, v3              | 0x4200 0xbc00 0x4000    | 0x77774000
gfx1201 | v_med3_num_f16 v0, v1, v2, v3          | 0x4200 0xbc00 0x4000    | 0x77774000
gfx1201 | v_minmax_num_f32 v0, v1, v2, v3        | 5.0 nan 3.0             | 5.0
gfx1100 | v_maxmin_f16 v0, v1, v2, v3            | 0xc200 0x4000 0x3c00    | 0x77773c00
gfx1100 | v_minmax_f16 v0, v1, v2, v3            | 0x4500 0x4000 0x4200    | 0x77774200
gfx1201 | v_maxmin_num_f16 v0, v1, v2, v3        | 0xc200 0x4000 0x3c00    | 0x77773c00
gfx1201 | v_minmax_num_f16 v0, v1, v2, v3        | 0x4500 0x4000 0x4200    | 0x77774200
gfx1100 | v_maxmin_i32 v0, v1, v2, v3            | -3 2 1                  | 1
gfx1100 | v_minmax_i32 v0, v1, v2, v3            | -5 2 -7                 | -5
gfx1100 | v_maxmin_u32 v0, v1, v2, v3            | -3 2 1                  | 1
gfx942  | v_max3_i32 v0, v1, v2, v3              | -3 2 1                  | 2
gfx942  | v_min3_i32 v0, v1, v2, v3              | 2 -3 1                  | -3
gfx942  | v_max3_u32 v0, v1, v2, v3              | 2 -3 1                  | -3
gfx942  | v_min3_u32 v0, v1, v2, v3              | 2 -3 1                  | 1
gfx942  | v_med3_i32 v0, v1, v2, v3              | 2 -3 1                  | 1
gfx942  | v_med3_u32 v0, v1, v2, v3              | 2 -3 1                  | 2
gfx942  | v_min3_i16 v0, v1, v2, v3              | 0xffff 0x8000 0xfff0    | 0x77778000
gfx942  | v_max3_u16 v0, v1, v2, v3              | 0x8000 0xffff 1         | 0x7777ffff
gfx942  | v_med3_u16 v0, v1, v2, v3              | 0x8000 0xffff 1         | 0x77778000
gfx942  | v_sub_u16_sdwa v0, v1, v2 clamp dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:BYTE_1 src1_sel:BYTE_0 | 0x0300 5 | 0
gfx942  | v_and_b32_sdwa v0, v1, v2 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 src1_sel:BYTE_1 | 0xabcd1234 0xff00 | 0xcd
gfx942  | v_add_u32_sdwa v0, v1, sext(v2) dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:WORD_0 | 5 0x1fffe | 3
gfx942  | v_mov_b32_sdwa v0, v1 dst_sel:BYTE_2 dst_unused:UNUSED_PRESERVE src0_sel:BYTE_0 | 0x11 | 0x77117777
gfx942  | v_mov_b32_sdwa v0, v1 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:WORD_0 | 0xabcd1234 | 0x12340000
gfx942  | v_cvt_f32_f16_sdwa v0, v1 dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:WORD_1 | 0x40003c00 | 2.0
"""  # noqa: E501


@pytest.mark.parametrize("example", EXAMPLES.strip().splitlines(), ids=lambda line: line[:60])
def test_one_instruction(example):
    target, *middle, inputs, expected = (cell.strip() for cell in example.split(" | "))
    v = {0: 0x77777777} | dict(enumerate(map(number, inputs.split()), 1))
    if any(name in example for name in ("mac", "dot2acc", "dot2c")):
        v[0] = 0.0 if "mac" in example else -4.0
    wave = run(target, middle[0], v)
    expected = number(expected)
    if isinstance(expected, int):
        assert set(wave.v[0].tolist()) == {expected & 0xFFFFFFFF}, hex(wave.v[0][0])
    else:
        np.testing.assert_array_equal(floats(wave, 0), np.float32(expected))


def test_accumulation_registers_hold_what_is_written():
    code = "v_accvgpr_write_b32 a0, v1\nv_accvgpr_mov_b32 a1, a0\nv_accvgpr_read_b32 v0, a1"
    wave = run("gfx942", code, {1: 0x12345678, 255: 9})
    assert {register: set(wave.v[register].tolist()) for register in (0, 255, 256, 257)} == {
        0: {0x12345678}, 255: {9}, 256: {0x12345678}, 257: {0x12345678},
    }  # fmt: skip


@pytest.mark.parametrize(("mask", "lanes"), [("0", []), ("5", [0, 2]), ("-1", [*range(64)]), ("-2", [*range(1, 64)])])
def test_a_constant_is_a_mask_of_lanes(mask, lanes):
    wave = run("gfx942", f"v_cndmask_b32_e64 v0, v1, v2, {mask}", {1: 7, 2: 8})
    assert wave.v[0].tolist() == [8 if i in lanes else 7 for i in range(64)]


def test_dpp_moves_the_first_source_of_a_choice_and_of_a_comparison():
    lanes = np.arange(32)
    dpp = "row_mirror row_mask:0xf bank_mask:0xf"
    code = f"v_cmp_lt_u32_e64_dpp s2, v1, v2 {dpp}\nv_cndmask_b32_dpp v0, v1, v2, vcc_lo {dpp}"
    wave = run("gfx1100", code, {1: lanes, 2: 100 + lanes % 2 - 95 * (lanes == 3)}, {VCC: 0xF0F0F0F0})
    mirrored = [i // 16 * 16 + 15 - i % 16 for i in lanes]
    v2 = wave.v[2].tolist()
    assert wave.s[2] == sum(1 << i for i in range(32) if mirrored[i] < v2[i]) == 0xFFFFFFF7
    assert wave.v[0].tolist() == [v2[i] if i % 8 > 3 else mirrored[i] for i in range(32)]


def test_upper_halves_are_compared_and_chosen():
    code = "v_cndmask_b16 v0, v1, v2, s2 op_sel:[1,0,0,1]"
    wave = run("gfx1100", code, {0: 0x77777777, 1: 0x1234ABCD, 2: 0x5678}, {2: 0xFFFF0000})
    assert set(wave.v[0][:16].tolist()) == {0x12347777} and set(wave.v[0][16:].tolist()) == {0x56787777}
    code = "v_cmp_lt_f16_e64 s2, v1, v2 op_sel:[1,0]"
    wave = run("gfx1100", code, {1: 0x3C004000, 2: 0xFFFF3E00})  # 1.0 in the upper half < 1.5 < 2.0 in the lower one
    assert wave.s[2] == 0xFFFFFFFF


@pytest.mark.parametrize("target", ["gfx942", "gfx1100"])
def test_lanes_below_are_counted(target):
    code = """
    v_mbcnt_lo_u32_b32 v1, -1, 5
    v_mbcnt_hi_u32_b32 v2, -1, v1
    v_mbcnt_lo_u32_b32 v3, s2, 0
    """
    lanes = np.arange(64 if target == "gfx942" else 32)
    wave = run(target, code, s={2: 0x80000005})
    assert wave.v[1].tolist() == (np.minimum(lanes, 32) + 5).tolist()
    assert wave.v[2].tolist() == (lanes + 5).tolist()
    assert wave.v[3].tolist() == [int(i > 0) + int(i > 2) + int(i > 31) for i in lanes]


def test_pairs_of_registers():
    code = """
    v_lshl_add_u64 v[0:1], v[2:3], 4, s[2:3]
    v_lshlrev_b64 v[4:5], 33, v[2:3]
    v_mad_u64_u32 v[6:7], s[4:5], v2, v3, v[2:3]
    v_add_f64 v[8:9], -s[6:7], 1.0
    v_mov_b64_e32 v[10:11], v[2:3]
    """
    one_half = np.frombuffer(np.float64(0.5).tobytes(), np.uint32)
    s = {2: 7, 3: 0, 6: one_half[0], 7: one_half[1]}
    wave = run("gfx942", code, {2: 0x90000001, 3: 5}, s)
    pairs = [int(wave.v[i, 0]) | int(wave.v[i + 1, 0]) << 32 for i in range(0, 12, 2)]
    wide = 0x5_90000001
    assert pairs[0] == (wide << 4) + 7 and pairs[2] == wide << 33 & (1 << 64) - 1 and pairs[5] == wide
    assert pairs[3] == 0x90000001 * 5 + wide
    assert np.array(pairs[4], np.uint64).view(np.float64) == 0.5


@pytest.mark.parametrize(
    ("code", "given", "result"),
    [
        ("v_lshrrev_b64 v[0:1], 33, v[2:3]", [0x9000000000000002], 0x48000000),
        ("v_ashrrev_i64 v[0:1], 33, v[2:3]", [0x9000000000000002], 0xFFFFFFFFC8000000),
        ("v_lshrrev_b64 v[0:1], v4, v[2:3]", [0x9000000000000002, 65], 0x4800000000000001),
        ("v_add_nc_u64 v[0:1], v[2:3], v[4:5]", [0x1FFFFFFFF, 1], 0x200000000),
    ],
)
def test_integers_of_64_bits(code, given, result):
    v = {}
    for i, value in enumerate(given):
        v |= {2 + 2 * i: value & 0xFFFFFFFF, 3 + 2 * i: value >> 32}
    wave = run("gfx942", code, v)
    assert int(wave.v[0, 0]) | int(wave.v[1, 0]) << 32 == result


CARRIES = {  # of the lower and of the upper half of 64 bits -> what they compute together
    ("v_add_co_u32", "v_addc_co_u32"): lambda a, b: a + b,
    ("v_sub_co_u32", "v_subb_co_u32"): lambda a, b: a - b,
    ("v_subrev_co_u32", "v_subbrev_co_u32"): lambda a, b: b - a,
    ("v_add_co_u32", "v_add_co_ci_u32"): lambda a, b: a + b,
    ("v_sub_co_u32", "v_sub_co_ci_u32"): lambda a, b: a - b,
    ("v_subrev_co_u32", "v_subrev_co_ci_u32"): lambda a, b: b - a,
}


@pytest.mark.parametrize("names", CARRIES, ids=" ".join)
def test_carries_and_borrows(names):
    """Lanes that are off have neither."""
    target, vcc = ("gfx1100", "vcc_lo") if "_ci_" in names[1] else ("gfx942", "vcc")
    width = WIDTH[target]
    pairs = [(0x1FFFFFFFF, 1), (0xFFFFFFFFFFFFFFFF, 1), (0, 1), (5, 7), (7, 5), (1 << 32, 1), (3, 3), (0, 1)]
    a, b = (np.resize(np.array(numbers, np.uint64), width) for numbers in zip(*pairs, strict=True))
    v = {2: a & 0xFFFFFFFF, 3: a >> np.uint64(32), 4: b & 0xFFFFFFFF, 5: b >> np.uint64(32)}
    code = f"{names[0]} v0, {vcc}, v2, v4\n{names[1]}_e32 v1, {vcc}, v3, v5, {vcc}"
    wave = run(target, code, v, mask=0x7F)
    exact = [CARRIES[names](*pair) for pair in pairs[:7]]
    found = [int(low) | int(high) << 32 for low, high in zip(*wave.v[:2, :7].tolist(), strict=True)]
    assert found == [value % (1 << 64) for value in exact]
    assert wave.get_scalar(VCC, width // 32) == sum(1 << i for i, value in enumerate(exact) if value >> 64)


@pytest.mark.parametrize("name", ["v_mad_i64_i32", "v_mad_co_i64_i32", "v_mad_u64_u32", "v_mad_co_u64_u32"])
def test_products_of_32_bits_are_added_to_64(name):
    wave = run("gfx942", f"{name} v[0:1], s[4:5], v2, v3, v[4:5]", {2: -3, 3: 5, 4: 0xFFFFFFFE, 5: 0xFFFFFFFF})
    product = -15 if "i32" in name else 5 * (2**32 - 3)
    assert int(wave.v[0, 0]) | int(wave.v[1, 0]) << 32 == (product - 2) % (1 << 64)


def wide(*numbers):
    """Return the two registers of each float64: {register: value} from v0 on."""
    v = {}
    for i, number in enumerate(numbers):
        v[2 * i], v[2 * i + 1] = np.ascontiguousarray(np.array(number, np.float64)[..., None]).view(np.uint32).T
    return v


def doubles(wave, register):
    return np.ascontiguousarray(wave.v[register : register + 2].T).view(np.float64)[:, 0]


FLOAT64 = """
v_rcp_f64_e32 v[0:1], v[2:3]                | 4.0           | 0.25
v_rcp_f64_e32 v[0:1], v[2:3]                | -0.0          | -inf
v_rsq_f64_e32 v[0:1], v[2:3]                | 4.0           | 0.5
v_sqrt_f64_e32 v[0:1], v[2:3]               | 9.0           | 3.0
v_rndne_f64_e32 v[0:1], v[2:3]              | 2.5           | 2.0
v_floor_f64_e32 v[0:1], v[2:3]              | -2.5          | -3.0
v_ceil_f64_e32 v[0:1], v[2:3]               | -2.5          | -2.0
v_trunc_f64_e32 v[0:1], v[2:3]              | -2.5          | -2.0
v_fract_f64_e32 v[0:1], v[2:3]              | -2.75         | 0.25
v_ldexp_f64 v[0:1], v[2:3], -1074           | 1.5           | 1e-323
v_ldexp_f64 v[0:1], v[2:3], 0x10000         | -1.5          | -inf
v_frexp_mant_f64_e32 v[0:1], v[2:3]         | 12.0          | 0.75
v_max_f64 v[0:1], v[2:3], v[4:5]            | nan -2.0      | -2.0
v_max_f64 v[0:1], v[2:3], v[4:5]            | -3.0 -2.0     | -2.0
v_min_f64 v[0:1], v[2:3], v[4:5]            | nan -2.0      | -2.0
v_min_f64 v[0:1], v[2:3], v[4:5]            | -3.0 -2.0     | -3.0
v_max_num_f64_e32 v[0:1], v[2:3], v[4:5]    | -3.0 -2.0     | -2.0
v_min_num_f64_e32 v[0:1], v[2:3], v[4:5]    | -3.0 -2.0     | -3.0
v_div_fixup_f64 v[0:1], v[2:3], v[4:5], v[6:7] | 1.0 2.0 -4.0 | -1.0
v_div_fixup_f64 v[0:1], v[2:3], v[4:5], v[6:7] | 1.0 0.0 -4.0 | -inf
v_div_fixup_f64 v[0:1], v[2:3], v[4:5], v[6:7] | 1.0 1e300 1e-300 | 0.0
"""


@pytest.mark.parametrize("example", FLOAT64.strip().splitlines(), ids=lambda line: line[:60])
def test_one_instruction_of_float64(example):
    code, inputs, expected = (cell.strip() for cell in example.split(" | "))
    wave = run("gfx942", code, wide(0.0, *map(float, inputs.split())))
    np.testing.assert_array_equal(doubles(wave, 0), float(expected))


@pytest.mark.parametrize(
    ("name", "given", "result"),
    [
        ("v_cvt_f64_u32", 0xFFFFFFFD, 4294967293.0),
        ("v_cvt_f64_i32", 0xFFFFFFFD, -3.0),
        ("v_cvt_f64_f32", 0x3F8CCCCD, float(np.float32(1.1))),
    ],
)
def test_float64_of_32_bits(name, given, result):
    assert doubles(run("gfx942", f"{name}_e32 v[0:1], v2", {2: given}), 0)[0] == result


@pytest.mark.parametrize(
    ("name", "given", "result"),
    [
        ("v_cvt_u32_f64", 3e9 + 0.75, 3_000_000_000),
        ("v_cvt_u32_f64", -1.0, 0),
        ("v_cvt_u32_f64", NAN, 0),
        ("v_cvt_u32_f64", 1e20, 0xFFFFFFFF),
        ("v_cvt_i32_f64", -2.75, 0xFFFFFFFE),
        ("v_cvt_i32_f64", -1e20, 0x80000000),
        ("v_cvt_f32_f64", 1.1, 0x3F8CCCCD),
        ("v_cvt_f32_f64", 1e300, 0x7F800000),
    ],
)
def test_32_bits_of_float64(name, given, result):
    assert run("gfx942", f"{name}_e32 v0, v[2:3]", wide(0.0, given)).v[0, 0] == result


def test_exponents_of_float64():
    wave = run("gfx1100", "v_frexp_exp_i32_f64_e32 v0, v[2:3]", wide(0.0, np.resize([12.0, INF, 0.0, 1e-320], 32)))
    assert wave.v[0, :4].view(np.int32).tolist() == [4, 0, 0, -1063]


def test_fma_of_float64_rounds_once():
    a, b = np.float64(1 + 2**-30), np.float64(1 - 2**-30)
    words = [np.frombuffer(x.tobytes(), np.uint32) for x in (a, b, np.float64(-1))]
    s = {2 + 2 * i + k: words[i][k] for i in range(3) for k in range(2)}
    wave = run("gfx942", "v_mov_b32_e32 v2, s6\nv_mov_b32_e32 v3, s7\nv_mov_b32_e32 v4, s4\nv_mov_b32_e32 v5, s5\n"
               "v_fma_f64 v[0:1], s[2:3], v[4:5], v[2:3]", s=s)  # fmt: skip
    assert wave.v[:2, 0].copy().view(np.float64)[0] == -(2.0**-60)


def test_fma_rounds_once():
    """Products of random numbers, and sums that lie next to a tie or are denormal."""
    a, b = (RNG.standard_normal(64).astype(np.float32) for _ in range(2))
    c = (-a * b).astype(np.float32)
    a[:8], b[:8], c[:8] = 1 + 2**-12, 1 + 2**-12, [2**30, -(2**30), 2**-60, -(2**-60), 2**24, 2**25, 1, 0]
    a[8:16], b[8:16], c[8:16] = 2**-100 * (1 + 2**-23), 2**-40, 2**-146 * np.arange(8)
    a[16], b[16], c[16] = 1 + 2**-23, 1 + 2**-23, 2**-24 * (1 - 2**-22)
    wave = run("gfx942", "v_fma_f32 v0, v1, v2, v3", {1: a, 2: b, 3: c})
    for got, x, y, z in zip(floats(wave, 0), a, b, c, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        below, above = np.nextafter(got, np.float32(-INF)), np.nextafter(got, np.float32(INF))
        distance = abs(Fraction(float(got)) - exact)
        others = [abs(Fraction(float(other)) - exact) for other in (below, above)]
        assert distance <= min(others), (x, y, z)
        if distance in others:
            assert int(got.view(np.uint32)) % 2 == 0  # a tie goes to the even neighbour


def test_fma_of_a_denormal_result_rounds_once():
    """No tie beside it has the wave rounded exactly. The sum lies just above half a step of denormals."""
    a, b, c = (np.full(64, x, np.float32) for x in (2**-75 * (1 + 2**-11), 2**-75 * (1 - 2**-11 + 2**-22), 2**-127))
    wave = run("gfx942", "v_fma_f32 v0, v1, v2, v3", {1: a, 2: b, 3: c})
    exact = Fraction(float(a[0])) * Fraction(float(b[0])) + Fraction(float(c[0]))
    assert exact * 2**149 > 2**22 + Fraction(1, 2)
    assert set(floats(wave, 0).astype(np.float64) * 2.0**149) == {2.0**22 + 1}


DIVISION = """
v_div_scale_f32 v3, s[2:3], v2, v2, v1
v_div_scale_f32 v4, vcc, v1, v2, v1
v_rcp_f32_e32 v5, v3
v_fma_f32 v6, -v3, v5, 1.0
v_fmac_f32_e32 v5, v6, v5
v_mul_f32_e32 v6, v4, v5
v_fma_f32 v7, -v3, v6, v4
v_fmac_f32_e32 v6, v7, v5
v_fma_f32 v7, -v3, v6, v4
v_div_fmas_f32 v7, v7, v5, v6
v_div_fixup_f32 v0, v7, v2, v1
"""


DIVISION_OF_FLOAT64 = """
v_div_scale_f64 v[4:5], s[2:3], v[2:3], v[2:3], v[0:1]
v_rcp_f64_e32 v[6:7], v[4:5]
v_div_scale_f64 v[8:9], vcc, v[0:1], v[2:3], v[0:1]
v_fma_f64 v[10:11], -v[4:5], v[6:7], 1.0
v_fmac_f64_e32 v[6:7], v[6:7], v[10:11]
v_fma_f64 v[10:11], -v[4:5], v[6:7], 1.0
v_fmac_f64_e32 v[6:7], v[6:7], v[10:11]
v_mul_f64 v[10:11], v[8:9], v[6:7]
v_fma_f64 v[4:5], -v[4:5], v[10:11], v[8:9]
v_div_fmas_f64 v[4:5], v[4:5], v[6:7], v[10:11]
v_div_fixup_f64 v[0:1], v[4:5], v[2:3], v[0:1]
"""
DIVISION_OF_FLOAT16 = """
v_cvt_f32_f16_e32 v3, v2
v_cvt_f32_f16_e32 v4, v1
v_rcp_f32_e32 v3, v3
v_mul_f32_e32 v4, v4, v3
v_fma_mix_f32 v5, -v2, v4, v1 op_sel_hi:[1,0,1]
v_fmac_f32_e32 v4, v5, v3
v_fma_mix_f32 v5, -v2, v4, v1 op_sel_hi:[1,0,1]
v_mul_f32_e32 v3, v5, v3
v_and_b32_e32 v3, 0xff800000, v3
v_add_f32_e32 v3, v3, v4
v_cvt_f16_f32_e32 v3, v3
v_div_fixup_f16 v0, v3, v2, v1
"""
SPECIAL = [0, -0.0, 1, -1, INF, -INF, NAN]


def divide_float32(n, d):
    return floats(run("gfx942", DIVISION, {1: n, 2: d}), 0)


def divide_float64(n, d):
    return doubles(run("gfx942", DIVISION_OF_FLOAT64, wide(n, d)), 0)


def divide_float16(n, d):
    wave = run("gfx942", DIVISION_OF_FLOAT16, {1: n.view(np.uint16), 2: d.view(np.uint16)})
    return wave.v[0].astype(np.uint16).view(np.float16)


@pytest.mark.parametrize(
    ("divide", "dtype", "special", "exponents"),
    [
        (divide_float32, np.float32, [1e-45, 1.17549435e-38, 3.4e38, 1e-30, 3e38, 2.0**126, 2.0**-126], (-140, 127)),
        (
            divide_float64,
            np.float64,
            [5e-324, 2.2250738585072014e-308, 1.7e308, 1e-200, 1e300, 2.0**1022, 2.0**-1022],
            (-1060, 1023),
        ),
        (divide_float16, np.float16, [6e-8, 6.1e-5, 65504, 1e-4, 3e4, 2.0**15, 2.0**-14], (-20, 14)),
    ],
)
def test_division_is_right_everywhere(divide, dtype, special, exponents):
    """The steps that the compiler emits for n / d give the rounded quotient of any two numbers."""
    special = np.array([*SPECIAL, *special])
    drawn = RNG.standard_normal(50) * 2.0 ** RNG.integers(*exponents, 50)
    numbers = np.concatenate([special, drawn]).astype(dtype)
    assert len(numbers) == 64
    for shift in range(64):
        n, d = numbers, np.roll(numbers, shift)
        with np.errstate(all="ignore"):
            wanted = n / d
        found = divide(n, d)
        np.testing.assert_array_equal(found, wanted, str([(a, b) for a, b in zip(n, d, strict=True)]))
        known = ~np.isnan(wanted)
        np.testing.assert_array_equal(np.signbit(found[known]), np.signbit(wanted[known]))


FP8 = {
    ("gfx942", "fp8"): torch.float8_e4m3fnuz,
    ("gfx942", "bf8"): torch.float8_e5m2fnuz,
    **{(target, "fp8"): torch.float8_e4m3fn for target in ("gfx950", "gfx1201")},
    **{(target, "bf8"): torch.float8_e5m2 for target in ("gfx950", "gfx1201")},
}


def numbers_to_convert(dtype):
    """Return all numbers of 8 bits, those halfway between two, and the nearest ones beside those, as float32."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    numbers = numbers[~np.isinf(numbers)]
    finite = np.unique(numbers[np.isfinite(numbers)])
    ties = (finite[1:] + finite[:-1]) / 2
    infinity = np.float32(np.inf)
    return np.concatenate([numbers, ties, np.nextafter(ties, infinity), np.nextafter(ties, -infinity)])


@pytest.mark.parametrize(("target", "form"), FP8)
def test_fp8_is_converted_as_pytorch_does(target, form):
    dtype = FP8[target, form]
    given = numbers_to_convert(dtype)
    scaled = ("v_cvt_scalef32_pk", ", 1.0", "op_sel:[0,0,0,1]", "op_sel:[1,0,0]")
    plain = ("v_cvt_pk", "", "op_sel:[0,0,1]", "op_sel:[1,0]")
    name, scale, to_upper, from_upper = scaled if target == "gfx950" else plain
    code = f"""
        {name}_{form}_f32 v2, v0, v1{scale}
        {name}_{form}_f32 v2, v1, v0{scale} {to_upper}
        {name}_f32_{form} v[4:5], v2{scale}
        {name}_f32_{form} v[6:7], v2{scale} {from_upper}
    """
    width = WIDTH[target]
    for first in np.resize(given, (len(given) // width + 1, width)):
        second = first[::-1]
        wave = run(target, code, {0: first, 1: second, 2: 0})
        wanted = [torch.from_numpy(x.copy()).to(dtype).float().numpy() for x in (first, second)]
        found = [floats(wave, register) for register in (4, 5, 6, 7)]
        np.testing.assert_array_equal(found, [*wanted, *wanted[::-1]])
        assert (np.signbit(found[0]) == np.signbit(wanted[0]))[~np.isnan(wanted[0])].all()
    largest = torch.finfo(dtype).max
    code = f"{name}_{form}_f32 v2, v0, v1{scale}\n{name}_f32_{form} v[4:5], v2{scale}"
    limits = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
    wave = run(target, limits + code, {0: np.full(width, 2 * largest), 1: np.full(width, -1e30)})
    assert set(floats(wave, 4)) == {largest} and set(floats(wave, 5)) == {-largest}
    for mode, beyond in (("", 2 * largest), ("", INF), (limits, INF)):
        with pytest.raises(UnsupportedError, match="overflows"):
            run(target, mode + code, {0: np.full(width, beyond), 1: np.ones(width)})


@pytest.mark.parametrize("form", ["fp8", "bf8"])
@pytest.mark.parametrize(("kind", "wide"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_16_bits_become_fp8_on_cdna4(kind, wide, form):
    """Rounded once, not to float32 first; and back."""
    dtype = FP8["gfx950", form]
    given = torch.from_numpy(numbers_to_convert(dtype)).to(wide)
    code = f"""
        v_cvt_scalef32_pk_{form}_{kind} v2, v0, 1.0
        v_cvt_scalef32_pk_{form}_{kind} v2, v1, 1.0 op_sel:[0,0,1]
        v_cvt_scalef32_pk_{kind}_{form} v4, v2, 1.0
        v_cvt_scalef32_pk_{kind}_{form} v5, v2, 1.0 op_sel:[1,0,0]
    """
    chosen = torch.arange(len(given) // 256 * 256 + 256) % len(given)
    for first in given[chosen].view(-1, 64, 2, 2).unbind():  # [lane, register, half]
        registers = first.contiguous().view(torch.int32).numpy()[..., 0].T  # [register, lane]
        wave = run("gfx950", code, {0: registers[0], 1: registers[1], 2: 0})
        found = torch.from_numpy(wave.v[4:6].T.copy().view(np.int16)).view(wide).view(64, 2, 2)
        assert torch.equal(found.nan_to_num(7.0), first.to(dtype).to(wide).nan_to_num(7.0))


@pytest.mark.parametrize(
    ("code", "given", "wanted"),
    [
        ("v_cvt_f16_f32_e32 v0, v1", {1: 65519.0}, 0x7BFF),
        ("v_cvt_f16_f32_e32 v0, v1", {1: -INF}, 0xFC00),
        ("v_cvt_f16_f32_e32 v0, v1", {1: 65520.0}, None),
        ("v_add_f16_e32 v0, v1, v2", {1: 0x7BFF, 2: 0x7C00}, 0x7C00),
        ("v_add_f16_e32 v0, v1, v2", {1: 0x7BFF, 2: 0x7BFF}, None),
        ("v_pk_mul_f16 v0, v1, v2", {1: 0x3C007BFF, 2: 0x40003C00}, 0x40007BFF),
        ("v_pk_mul_f16 v0, v1, v2", {1: 0x7BFF3C00, 2: 0x40003C00}, None),
        ("v_fma_mixlo_f16 v0, v1, v2, 0", {0: 0, 1: 256.0, 2: 128.0}, 0x7800),
        ("v_fma_mixlo_f16 v0, v1, v2, 0", {0: 0, 1: 256.0, 2: 256.0}, None),
    ],
)
def test_float16_in_the_mode_for_fp8(code, given, wanted):
    """FP16_OVFL changes only results that overflow, which are refused: it is set by kernels that convert to fp8."""
    mode = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
    if wanted is None:
        with pytest.raises(UnsupportedError, match="becomes infinite in the mode FP16_OVFL"):
            run("gfx942", mode + code, given)
        run("gfx942", mode + code, given, mask=0)
        run("gfx942", code, given)
    else:
        assert set(run("gfx942", mode + code, given).v[0].tolist()) == {wanted}


def test_float16_matmuls_in_the_mode_for_fp8():
    mode = "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\n"
    v = dict.fromkeys(range(10, 14), 0x3C003C00)
    wave = run("gfx942", mode + "v_mfma_f32_16x16x16_f16 v[0:3], v[10:11], v[12:13], 0", v)
    assert set(floats(wave, 0)) == {16.0}


@pytest.mark.parametrize("target", ["gfx942", "gfx1100"])
def test_comparisons(target):
    """All relations of floats, of which some are true for NaN, and of integers with and without sign."""
    width = 64 if target == "gfx942" else 32
    mask = "s[2:3]" if width == 64 else "s2"
    a = np.resize(np.array([1, 2, NAN, 1], np.float32), width)
    b = np.resize(np.array([2, 1, 1, 1], np.float32), width)
    for relation, wanted in {
        "lt": 0b0001, "eq": 0b1000, "le": 0b1001, "gt": 0b0010, "lg": 0b0011, "ge": 0b1010, "o": 0b1011, "u": 0b0100,
        "nge": 0b0101, "nlg": 0b1100, "ngt": 0b1101, "nle": 0b0110, "neq": 0b0111, "nlt": 0b1110,
    }.items():  # fmt: skip
        wave = run(target, f"v_cmp_{relation}_f32_e64 {mask}, v1, v2", {1: a, 2: b}, mask=0xFF)
        assert wave.get_scalar(2, width // 32) == wanted | wanted << 4, relation
    v = {1: np.resize([-1, 1], width), 2: np.resize([1, 1], width)}
    for relation, kind, wanted in (("gt", "i32", 0), ("gt", "u32", 1), ("ne", "u32", 1), ("ge", "i32", 2)):
        wave = run(target, f"v_cmp_{relation}_{kind}_e64 {mask}, v1, v2", v, mask=3)
        assert wave.get_scalar(2, width // 32) == wanted
    vcc = "vcc" if width == 64 else "vcc_lo"
    wave = run(target, f"v_cmp_lt_i32_e32 {vcc}, v1, v2\nv_cndmask_b32_e32 v0, v1, v2, {vcc}", {1: v[1] * 5, 2: v[2]})
    assert wave.v[0, :2].tolist() == [1, 5]
    wave = run("gfx1100", "v_cmpx_eq_u32_e32 1, v1\nv_mov_b32_e32 v0, 9", {0: 0, 1: np.arange(32)}, mask=0xFF)
    assert wave.exec == 2 and wave.v[0].nonzero()[0].tolist() == [1]


@pytest.mark.parametrize("kind", ["f16", "f32", "f64"])
def test_classes_of_floats(kind):
    """Each bit of the mask of v_cmp_class stands for one class."""
    dtype = np.dtype(f"f{int(kind[1:]) // 8}")
    tiny = np.finfo(dtype).smallest_subnormal
    infinity = np.array(INF, dtype).view(f"u{dtype.itemsize}")
    quiet = infinity.dtype.type(1 << np.finfo(dtype).nmant - 1)
    nans = np.array([infinity | infinity.dtype.type(1), infinity | quiet]).view(dtype)
    numbers = np.concatenate([nans, np.array([-INF, -1, -tiny, -0.0, 0.0, tiny, 1, INF], dtype)])
    words = np.zeros((10, 2), np.uint32)
    words.view(dtype)[:, 0] = numbers
    padded = np.zeros((64, 2), np.uint32)
    padded[:10] = words
    source = "v[2:3]" if kind == "f64" else "v2"
    for bit in range(10):
        wave = run(
            "gfx942",
            f"v_cmp_class_{kind}_e64 s[2:3], {source}, v1",
            {1: 1 << bit, 2: padded[:, 0], 3: padded[:, 1]},
            mask=0x3FF,
        )
        assert wave.get_scalar(2, 2) == 1 << bit
    wave = run(
        "gfx942",
        f"v_cmp_class_{kind}_e64 s[2:3], -{source}, v1",
        {1: 1 << 9, 2: padded[:, 0], 3: padded[:, 1]},
        mask=0x3FF,
    )
    assert wave.get_scalar(2, 2) == 1 << 2


def test_bytes_with_a_sign_are_compared_and_chosen():
    v = {0: 0, 1: np.resize([0x0000FE00, 0x00000200], 64), 2: 0xFFFFFFFF}
    where = "src0_sel:BYTE_1 src1_sel:DWORD"
    wave = run("gfx942", f"v_cmp_gt_i16_sdwa s[2:3], sext(v1), v2 {where}", v, mask=3)
    assert wave.get_scalar(2, 2) == 2
    code = (
        f"v_cmp_gt_i16_sdwa vcc, sext(v1), v2 {where}\nv_cndmask_b32_sdwa v0, sext(v1), v2, vcc dst_sel:DWORD {where}"
    )
    assert run("gfx942", code, v, mask=3).v[0, :2].tolist() == [0xFFFFFFFE, 0xFFFFFFFF]


@pytest.mark.parametrize("target", ["gfx942", "gfx1100"])
def test_float32_flushes_denormals_in_that_mode(target):
    """Of Triton's allow_flush_denorm; divisions leave the mode for some instructions."""
    tiny = 1e-39
    keep, flush = ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0")
    if target == "gfx1100":
        keep, flush = "s_denorm_mode 15", "s_denorm_mode 12"
    mask = "vcc" if target == "gfx942" else "vcc_lo"
    code = f"""
    v_mul_f32_e32 v0, v1, v2
    v_mul_f32_e64 v3, -v4, 1.0
    v_cmp_lt_f32_e32 {mask}, 0, v4
    v_cndmask_b32_e64 v5, 0, 1, {mask}
    v_mov_b32_e32 v6, v4
    {keep}
    v_mul_f32_e32 v7, v1, v2
    {flush}
    v_add_f32_e32 v8, v7, v7
    """
    v = {1: 1e-30, 2: 1e-9, 4: tiny}
    denormal = np.float32(1e-30) * np.float32(1e-9)
    for flushes, expected in ((True, [0, 0, 0, tiny, denormal, 0]), (False, [denormal, -tiny, 1, tiny, denormal, 0])):
        wave = run(target, code, v, flushes=flushes)
        found = [floats(wave, 0)[0], floats(wave, 3)[0], wave.v[5, 0], *(floats(wave, i)[0] for i in (6, 7, 8))]
        np.testing.assert_array_equal(found, np.array(expected, np.float32))
        assert np.signbit(floats(wave, 3)[0])
    if target == "gfx942":
        wave = run(target, "v_pk_mul_f32 v[0:1], v[2:3], v[4:5]", {2: 1e-30, 3: 2.0, 4: 1e-9, 5: 3.0}, flushes=True)
        assert floats(wave, 0)[0] == 0 and floats(wave, 1)[0] == 6


# ---------------------------------------------------------------- lanes


DPP = {  # control -> the lane that lanes 0 to 31 read, None for none
    "row_shl:3": [i + 3 if i % 16 < 13 else None for i in range(32)],
    "row_shr:4": [i - 4 if i % 16 >= 4 else None for i in range(32)],
    "row_ror:5": [i // 16 * 16 + (i - 5) % 16 for i in range(32)],
    "row_mirror": [i // 16 * 16 + 15 - i % 16 for i in range(32)],
    "row_half_mirror": [i // 8 * 8 + 7 - i % 8 for i in range(32)],
    "quad_perm:[1,0,3,2]": [i ^ 1 for i in range(32)],
    "quad_perm:[2,2,2,2]": [i // 4 * 4 + 2 for i in range(32)],
    "row_bcast:15": [None if i < 16 else 15 for i in range(32)],
    "row_newbcast:3": [i // 16 * 16 + 3 for i in range(32)],
    "row_xmask:8": [i ^ 8 for i in range(32)],
}


@pytest.mark.parametrize("control", DPP)
def test_dpp_moves_lanes(control):
    target = "gfx1100" if "xmask" in control else "gfx942"
    lanes = np.arange(64 if target == "gfx942" else 32)
    for bound, missing in (("", 1000), (" bound_ctrl:1", 0)):
        code = f"v_mov_b32_dpp v0, v1 {control} row_mask:0xf bank_mask:0xf{bound}"
        wave = run(target, code, {0: 1000, 1: lanes + 10})
        assert wave.v[0, :32].tolist() == [missing if lane is None else lane + 10 for lane in DPP[control]]
    # Lanes that are off give nothing; masks of rows and banks leave the others' results alone.
    wave = run(target, code, {0: 1000, 1: lanes + 10}, mask=(1 << len(lanes)) - 1 - 4)
    for lane, source in enumerate(DPP[control]):
        expected = 1000 if lane == 2 else 0 if source in (None, 2) else source + 10
        assert wave.v[0, lane] == expected
    wave = run(target, code.replace("row_mask:0xf bank_mask:0xf", "row_mask:0x2 bank_mask:0x1"), {0: 1000, 1: lanes})
    assert set(wave.v[0, :16]) == set(wave.v[0, 20:32]) == {1000} and 1000 not in wave.v[0, 16:20]


def test_dpp_of_an_addition_moves_the_first_source_alone():
    code = "v_add_f32_dpp v0, v1, v2 row_shl:1 row_mask:0xf bank_mask:0xf bound_ctrl:1"
    wave = run("gfx942", code, {1: np.arange(64.0), 2: 100.0})
    assert floats(wave, 0)[:16].tolist() == [101 + i for i in range(15)] + [100]


def test_lanes_exchange():
    lanes = np.arange(64)
    code = """
    v_readfirstlane_b32 s2, v1
    v_readlane_b32 s3, v1, 63
    v_writelane_b32 v2, s3, 5
    ds_bpermute_b32 v3, v4, v1
    ds_swizzle_b32 v5, v1 offset:swizzle(SWAP,16)
    ds_permute_b32 v6, v4, v1
    """
    wave = run("gfx942", code, {1: lanes + 7, 2: 0, 4: 4 * (63 - lanes)}, mask=(1 << 64) - 1 - 1)
    assert (wave.s[2], wave.s[3]) == (8, 70) and wave.v[2].tolist() == [0] * 5 + [70] + [0] * 58
    assert wave.v[3, 1:].tolist() == [70 - i for i in range(1, 63)] + [0]  # lane 0 is off: its value reads as zero
    assert wave.v[5, 1:16].tolist() == [i + 23 for i in range(1, 16)] and wave.v[5, 17] == 8
    assert wave.v[6, 1:63].tolist() == [70 - i for i in range(1, 63)]
    wave = run("gfx1100", "v_permlanex16_b32 v0, v1, 0x76543210, 0xfedcba98 op_sel:[1,0]", {1: np.arange(32)})
    assert wave.v[0].tolist() == [i ^ 16 for i in range(32)]
    wave = run("gfx1100", "v_permlane16_b32 v0, v1, 0x89abcdef, 0x01234567 op_sel:[1,0]", {1: np.arange(32)})
    assert wave.v[0].tolist() == [i // 16 * 16 + 15 - i % 16 for i in range(32)]
    wave = run("gfx1100", "v_swap_b32 v0, v1", {0: np.arange(32), 1: 7 + np.arange(32)}, mask=0xFF)
    assert wave.v[0].tolist() == [7 + i if i < 8 else i for i in range(32)]
    assert wave.v[1].tolist() == [i if i < 8 else 7 + i for i in range(32)]
    wave = run("gfx1100", "v_permlanex16_b32 v0, v1, -1, -1 op_sel:[1,0]", {1: np.arange(32)})
    assert wave.v[0].tolist() == [31] * 16 + [15] * 16
    wave = run("gfx950", "v_permlane32_swap_b32_e32 v0, v1\nv_permlane16_swap_b32_e32 v2, v3", {
        0: lanes, 1: lanes + 100, 2: lanes, 3: lanes + 100,
    })  # fmt: skip
    assert wave.v[0].tolist() == [*range(32), *range(100, 132)] and wave.v[1].tolist() == [
        *range(32, 64),
        *range(132, 164),
    ]
    assert wave.v[2, :32].tolist() == [*range(16), *range(100, 116)]
    assert wave.v[3, :32].tolist() == [*range(16, 32), *range(116, 132)]


@pytest.mark.parametrize(("fetched", "bound", "found"), [(0, 0, 9), (0, 1, 0), (1, 0, 103), (1, 1, 103)])
def test_what_is_read_of_a_lane_that_is_off(fetched, bound, found):
    """With FI it is its value, or else zero with BOUND_CTRL, or else the old result stays."""
    registers = {0: 9, 1: 100 + np.arange(32)}
    mask = 0xFFFFFFFF - (1 << 3)
    code = f"v_permlane16_b32 v0, v1, 0x33333333, 0x33333333 op_sel:[{fetched},{bound}]"
    assert run("gfx1100", code, registers, mask=mask).v[0, :6].tolist() == [found] * 3 + [9] + [found] * 2
    code = "v_mov_b32_dpp v0, v1 quad_perm:[3,3,3,3] row_mask:0xf bank_mask:0xf"
    code += " bound_ctrl:1" * bound + " fi:1" * fetched
    assert run("gfx1100", code, registers, mask=mask).v[0, :5].tolist() == [found] * 3 + [9, 107]


def test_lanes_that_are_off_keep_their_registers():
    wave = run("gfx942", "v_mov_b32_e32 v0, 1\nv_cmp_eq_u32_e32 vcc, 1, v1", {0: 5, 1: 1}, mask=0b1010)
    assert wave.v[0, :5].tolist() == [5, 1, 5, 1, 5] and wave.get_scalar(106, 2) == 0b1010


def test_dual_issue_reads_before_it_writes():
    wave = run("gfx1100", "v_dual_mov_b32 v0, v1 :: v_dual_mov_b32 v1, v0", {0: 3, 1: 4})
    assert (wave.v[0, 0], wave.v[1, 0]) == (4, 3)
    wave = run("gfx1100", "v_dual_fmac_f32 v0, v1, v2 :: v_dual_mul_f32 v2, v1, v0", {0: 1.0, 1: 2.0, 2: 3.0})
    assert (floats(wave, 0)[0], floats(wave, 2)[0]) == (7, 2)


def test_packed_float32_select_and_negate_halves():
    v = {2: 1.0, 3: 2.0, 4: 10.0, 5: 20.0, 6: 0.5, 7: 0.25}
    for code, wanted in {
        "v_pk_add_f32 v[0:1], v[2:3], v[4:5]": (11, 22),
        "v_pk_mul_f32 v[0:1], v[2:3], v[4:5] op_sel:[1,0] op_sel_hi:[0,1]": (20, 20),
        "v_pk_fma_f32 v[0:1], v[2:3], v[4:5], v[6:7] neg_lo:[0,0,1] neg_hi:[1,0,0]": (9.5, -39.75),
        "v_pk_mul_f32 v[0:1], v[2:3], 2.0 op_sel_hi:[1,0]": (2, 4),
        "v_pk_add_f32 v[0:1], v[2:3], 2.0 op_sel_hi:[1,0] neg_lo:[0,1]": (-1, 4),
        "v_pk_mul_f32 v[0:1], v[2:3], 0": (0, 0),
        "v_pk_add_f32 v[2:3], v[2:3], v[2:3] op_sel:[0,1] op_sel_hi:[1,0]\nv_mov_b64_e32 v[0:1], v[2:3]": (3, 3),
        "v_pk_mov_b32 v[0:1], v[2:3], v[4:5] op_sel:[1,0]": (2, 10),
    }.items():
        wave = run("gfx942", code, v)
        assert (floats(wave, 0)[0], floats(wave, 1)[0]) == wanted, code
    with pytest.raises(Fault, match="upper half of a constant"):
        run("gfx942", "v_pk_mul_f32 v[0:1], v[2:3], 2.0")


# ---------------------------------------------------------------- matrix instructions


BYTES = {"f32": 4, "xf32": 4, "f16": 2, "bf16": 2, "i8": 1, "u8": 1, "fp8": 1, "bf8": 1}


def bits_of(values, kind, target):
    """Return the bits of numbers that the kind holds exactly."""
    if kind.endswith("f32"):
        return values.astype(np.float32)
    if kind == "f16":
        return values.astype(np.float16)
    if kind == "bf16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if kind in ("i8", "u8"):
        return values.astype(np.uint8)
    return torch.from_numpy(values).float().to(FP8[target, kind]).view(torch.uint8).numpy()


def fill(wave, first, kind, element_of, lanes, each, target):
    """Store elements [lane, position] in the registers of one operand."""
    values = np.array([[element_of(lane, position) for position in range(each)] for lane in range(lanes)])
    registers = np.ascontiguousarray(bits_of(values, kind, target)).view(np.uint32)
    wave.v[first : first + registers.shape[1]] = registers.T


def matrix_of(kind, shape):
    """Return random integers that the kind holds exactly."""
    low, end = {"i8": (-128, 128), "u8": (0, 256)}.get(kind, (-8, 9))
    return RNG.integers(low, end, shape)


MFMA = [
    ("gfx90a", "v_mfma_f32_32x32x2f32", 32, 2, "f32"), ("gfx90a", "v_mfma_f32_16x16x4f32", 16, 4, "f32"),
    ("gfx90a", "v_mfma_f32_32x32x8bf16_1k", 32, 8, "bf16"), ("gfx90a", "v_mfma_f32_16x16x16f16", 16, 16, "f16"),
    ("gfx942", "v_mfma_f32_32x32x2_f32", 32, 2, "f32"), ("gfx942", "v_mfma_f32_16x16x4_f32", 16, 4, "f32"),
    ("gfx942", "v_mfma_f32_32x32x8_bf16", 32, 8, "bf16"), ("gfx942", "v_mfma_f32_16x16x16_f16", 16, 16, "f16"),
    ("gfx942", "v_mfma_f32_16x16x8_xf32", 16, 8, "xf32"), ("gfx942", "v_mfma_f32_32x32x4_xf32", 32, 4, "xf32"),
    ("gfx950", "v_mfma_f32_16x16x32_bf16", 16, 32, "bf16"), ("gfx950", "v_mfma_f32_32x32x16_f16", 32, 16, "f16"),
    ("gfx90a", "v_mfma_i32_32x32x8i8", 32, 8, "i8"), ("gfx90a", "v_mfma_i32_16x16x16i8", 16, 16, "i8"),
    ("gfx942", "v_mfma_i32_32x32x16_i8", 32, 16, "i8"), ("gfx942", "v_mfma_i32_16x16x32_i8", 16, 32, "i8"),
    ("gfx950", "v_mfma_i32_32x32x32_i8", 32, 32, "i8"), ("gfx950", "v_mfma_i32_16x16x64_i8", 16, 64, "i8"),
    ("gfx942", "v_mfma_f32_32x32x16_fp8_fp8", 32, 16, "fp8_fp8"),
    ("gfx942", "v_mfma_f32_16x16x32_bf8_fp8", 16, 32, "bf8_fp8"),
    ("gfx950", "v_mfma_f32_16x16x32_fp8_bf8", 16, 32, "fp8_bf8"),
    ("gfx950", "v_mfma_f32_32x32x16_bf8_bf8", 32, 16, "bf8_bf8"),
    ("gfx950", "v_mfma_f32_16x16x128_f8f6f4", 16, 128, "fp8_fp8"),
    ("gfx950", "v_mfma_f32_32x32x64_f8f6f4 cbsz:1", 32, 64, "bf8_fp8"),
    ("gfx950", "v_mfma_f32_32x32x64_f8f6f4 blgp:1", 32, 64, "fp8_bf8"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "name"), [("gfx90a", "16x16x4f64"), ("gfx942", "16x16x4_f64")])
def test_mfma_of_float64(target, name):
    """Row 4r + g of D lies in the lanes of group g, as AMD's calculator says, unlike that of float32."""
    a, b, c = RNG.standard_normal((16, 4)), RNG.standard_normal((4, 16)), RNG.standard_normal((16, 16))
    made = Machine(target, f"v_mfma_f64_{name} v[0:7], v[40:41], v[50:51], a[0:7]")
    (wave,) = made.waves

    def put(first, numbers):
        """Store float64 [lane, element] in registers."""
        registers = np.ascontiguousarray(numbers).view(np.uint32).T
        wave.v[first : first + len(registers)] = registers

    put(40, a.T.reshape(64, 1))
    put(50, b.reshape(64, 1))
    put(256, c.reshape(4, 4, 16).transpose(1, 2, 0).reshape(64, 4))
    wave.set_exec(1)
    made.run()
    found = np.ascontiguousarray(wave.v[0:8].T).view(np.float64).reshape(4, 16, 4).transpose(2, 0, 1).reshape(16, 16)
    np.testing.assert_allclose(found, a @ b + c, rtol=1e-14, atol=1e-14)
    run(target, f"v_mfma_f64_{name} v[0:7], v[40:41], v[50:51], 0", dict.fromkeys((40, 41, 50, 51), 0))
    with pytest.raises(Fault, match="registers"):
        run(target, f"v_mfma_f64_{name} v[0:3], v[40:41], v[50:51], 0")


@pytest.mark.parametrize(("target", "name", "size", "depth", "kind"), MFMA, ids=lambda x: str(x))
def test_mfma_is_a_matmul(target, name, size, depth, kind):
    """A[i, k] lies in lane i + size · (k / each), and D[i, j] where AMD's matrix instruction calculator says."""
    kind_a, kind_b = kind.split("_") if "_" in kind else (kind, kind)
    a, b = matrix_of(kind_a, (size, depth)), matrix_of(kind_b, (depth, size))
    c = RNG.integers(-8, 9, (size, size))
    each, count = depth * size // 64, size * size // 64
    words = each * BYTES[kind_a] // 4
    last = 40 + words - 1
    operands = f"v[40:{last}], v[50:{50 + words - 1}]" if words > 1 else "v40, v50"
    name, _, modifier = name.partition(" ")
    made = Machine(target, f"{name} v[0:{count - 1}], {operands}, a[0:{count - 1}] {modifier}")
    (wave,) = made.waves
    fill(wave, 40, kind_a, lambda lane, p: a[lane % size, lane // size * each + p], 64, each, target)
    fill(wave, 50, kind_b, lambda lane, p: b[lane // size * each + p, lane % size], 64, each, target)

    def place(i, j):
        if size == 16:
            return i % 4, j + 16 * (i // 4)
        return 4 * (i // 8) + i % 4, j + 32 * (i // 4 % 2)

    dtype = np.int32 if kind == "i8" else np.float32
    for i in range(size):
        for j in range(size):
            register, lane = place(i, j)
            wave.v[256 + register, lane] = dtype(c[i, j]).view(np.uint32)  # a[0:..] follows v[0:255]
    wave.set_exec(1)  # it ignores EXEC
    made.run()
    wanted = a @ b + c
    for i in range(size):
        for j in range(size):
            register, lane = place(i, j)
            assert wave.v[register, lane].view(dtype) == wanted[i, j], (i, j)


# target | instruction | its floating-point operations | a board, its precision and its clock in GHz
# Matmuls of float64 are as fast as those of float32, on MI355X half as fast.
MATRIX_CYCLES = """
gfx90a  | v_mfma_f32_32x32x8f16     | 2 * 32 * 32 * 8  | MI210 bfloat16 1.7
gfx90a  | v_mfma_f32_16x16x16bf16_1k | 2 * 16 * 16 * 16 | MI210 bfloat16 1.7
gfx90a  | v_mfma_f32_32x32x2f32     | 2 * 32 * 32 * 2  | MI210 float32 1.7
gfx942  | v_mfma_f32_32x32x8_f16    | 2 * 32 * 32 * 8  | MI300X bfloat16 2.1
gfx942  | v_mfma_f32_16x16x16_bf16  | 2 * 16 * 16 * 16 | MI300X bfloat16 2.1
gfx942  | v_mfma_f32_32x32x4_xf32   | 2 * 32 * 32 * 4  | MI300X tf32 2.1
gfx942  | v_mfma_f32_16x16x4_f32    | 2 * 16 * 16 * 4  | MI300X float32 2.1
gfx950  | v_mfma_f32_16x16x32_f16   | 2 * 16 * 16 * 32 | MI355X bfloat16 2.4
gfx950  | v_mfma_f32_32x32x16_bf16  | 2 * 32 * 32 * 16 | MI355X bfloat16 2.4
gfx950  | v_mfma_f32_32x32x2_f32    | 2 * 32 * 32 * 2  | MI355X float32 2.4
gfx90a  | v_mfma_f64_16x16x4f64     | 2 * 16 * 16 * 4  | MI210 float32 1.7
gfx942  | v_mfma_f64_16x16x4_f64    | 2 * 16 * 16 * 4  | MI300X float32 2.1
gfx950  | v_mfma_f64_16x16x4_f64    | 2 * 16 * 16 * 4 * 2 | MI355X float32 2.4
gfx90a  | v_mfma_i32_32x32x8i8      | 2 * 32 * 32 * 8  | MI210 int8 1.7
gfx90a  | v_mfma_i32_16x16x16i8     | 2 * 16 * 16 * 16 | MI210 int8 1.7
gfx942  | v_mfma_i32_32x32x16_i8    | 2 * 32 * 32 * 16 | MI300X float8 2.1
gfx942  | v_mfma_f32_16x16x32_fp8_bf8 | 2 * 16 * 16 * 32 | MI300X float8 2.1
gfx950  | v_mfma_i32_16x16x64_i8    | 2 * 16 * 16 * 64 | MI355X float8 2.4
gfx950  | v_mfma_f32_32x32x64_f8f6f4 | 2 * 32 * 32 * 64 | MI355X float8 2.4
gfx1100 | v_wmma_f32_16x16x16_f16   | 2 * 16 * 16 * 16 | RX7900XTX bfloat16 2.5
gfx1201 | v_wmma_f32_16x16x16_bf16  | 2 * 16 * 16 * 16 | RX9070XT bfloat16 2.97
gfx1201 | v_wmma_i32_16x16x16_iu8   | 2 * 16 * 16 * 16 | RX9070XT float8 2.97
gfx1201 | v_wmma_f32_16x16x16_fp8_bf8 | 2 * 16 * 16 * 16 | RX9070XT float8 2.97
gfx1100 | v_wmma_i32_16x16x16_iu8   | 2 * 16 * 16 * 16 | RX7900XTX bfloat16 2.5
"""


@pytest.mark.parametrize("example", MATRIX_CYCLES.strip().splitlines(), ids=lambda line: " ".join(line.split()[:3]))
def test_matrix_cycles_give_the_peak_of_the_data_sheet(example):
    target, name, operations, board = (cell.strip() for cell in example.split(" | "))
    board, precision, clock = board.split()
    cycles = matrix.cycles_of(SimpleNamespace(name=name), SimpleNamespace(target=target))
    peak = TARGETS[target].units * SIMDS * eval(operations) / cycles * float(clock) / 1000
    assert peak == pytest.approx(peak_tflops(board, precision), rel=3e-3)


def must_repeat(target, code, sources):
    """Check that lanes 16 to 31 must hold what lanes 0 to 15 hold, in the first source's register and in the last."""
    alike = dict.fromkeys(sources, 1)
    run(target, code, alike)
    for register in (sources[0], sources[-1]):
        with pytest.raises(Fault, match="do not repeat"):
            run(target, code, alike | {register: 1 + (np.arange(32) == 31)})


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        *((target, kind) for target in ("gfx1100", "gfx1201") for kind in ("f16", "bf16", "i8_i8", "u8_i8", "i8_u8")),
        *(("gfx1201", kind) for kind in ("fp8_fp8", "fp8_bf8", "bf8_fp8", "bf8_bf8")),
    ],
)
def test_wmma_is_a_matmul(target, kind):
    kind_a, kind_b = kind.split("_") if "_" in kind else (kind, kind)
    a, b = matrix_of(kind_a, (16, 16)), matrix_of(kind_b, (16, 16))
    c = RNG.integers(-8, 9, (16, 16))
    rdna3 = target == "gfx1100"
    each = 16 if rdna3 else 8
    size = BYTES[kind_a]
    words = each * size // 4
    is_integer = "8" in kind and "f" not in kind
    modifier = f"neg_lo:[{int(kind_a == 'i8')},{int(kind_b == 'i8')},0]" if is_integer else ""
    name = f"i32_16x16x16_iu8 {modifier}" if is_integer else f"f32_16x16x16_{kind}"
    name, _, modifier = name.partition(" ")
    code = f"v_wmma_{name} v[0:7], v[40:{39 + words}], v[50:{49 + words}], v[10:17] {modifier}"
    made = Machine(target, code)
    (wave,) = made.waves

    def k(lane, p):
        """RDNA 4: in AMD's calculator, lane 0 holds k = 0 to 3 and 8 to 11, lane 16 holds 4 to 7 and 12 to 15.

        Of bytes, lane 0 holds k = 0 to 7.
        """
        if rdna3:
            return p
        return 8 * (lane // 16) + p if size == 1 else 8 * (p // 4) + 4 * (lane // 16) + p % 4

    fill(wave, 40, kind_a, lambda lane, p: a[lane % 16, k(lane, p)], 32, each, target)
    fill(wave, 50, kind_b, lambda lane, p: b[k(lane, p), lane % 16], 32, each, target)
    place = (lambda i, j: (i // 2, j + 16 * (i % 2))) if rdna3 else (lambda i, j: (i % 8, j + 16 * (i // 8)))
    dtype = np.int32 if is_integer else np.float32
    for i in range(16):
        for j in range(16):
            register, lane = place(i, j)
            wave.v[10 + register, lane] = dtype(c[i, j]).view(np.uint32)
    made.run()
    wanted = a @ b + c
    for i in range(16):
        for j in range(16):
            register, lane = place(i, j)
            assert wave.v[register, lane].view(dtype) == wanted[i, j], (i, j)
    if rdna3:
        must_repeat(target, code, [*range(40, 40 + words), *range(50, 50 + words)])
    with pytest.raises(Fault, match="inactive lanes"):
        run(target, code, mask=0xFFFF)


def test_integer_matmuls_wrap_around_or_stop_at_the_largest_number():
    """16 products of 127 and 1 are 2032; from 2^31 - 1 on, the sum has no room in 32 bits."""
    v = dict.fromkeys(range(40, 44), 0x7F7F7F7F) | dict.fromkeys(range(50, 54), 0x01010101)
    v |= dict.fromkeys(range(10, 18), 2**31 - 1)
    code = "v_wmma_i32_16x16x16_iu8 v[0:7], v[40:43], v[50:53], v[10:17] neg_lo:[1,1,0]"
    assert set(run("gfx1100", code, v).v[0].view(np.int32)) == {-(2**31) + 2031}
    assert set(run("gfx1100", f"{code} clamp", v).v[0].view(np.int32)) == {2**31 - 1}
    wave = run("gfx942", "v_mfma_i32_16x16x32_i8 v[0:3], v[40:41], v[50:51], -3", v)
    assert set(wave.v[0].view(np.int32)) == {32 * 127 - 3}


def test_matrix_formats_of_6_and_4_bits_are_refused():
    code = "v_mfma_f32_16x16x128_f8f6f4 v[0:3], v[8:15], v[16:23], 0 "
    run("gfx950", code + "cbsz:0", dict.fromkeys(range(8, 24), 0))
    for modifier in ("cbsz:2", "blgp:4", "abid:1"):
        with pytest.raises(Fault, match="6 or 4 bits|unknown modifier"):
            run("gfx950", code + modifier)


def test_wmma_of_rdna4_holds_k_as_the_calculator_says():
    """Permuting k of A and B alike changes no product, so the layout has a test of its own."""
    rows, k, d_rows, d_columns = matrix.wmma_layout("gfx1201")
    assert k[0].tolist() == k[15].tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    assert k[16].tolist() == k[31].tolist() == [4, 5, 6, 7, 12, 13, 14, 15]
    assert rows[:, 0].tolist() == [*range(16), *range(16)] and d_rows[:, 16].tolist() == list(range(8, 16))
    assert d_columns[0].tolist() == rows[:, 0].tolist()
    _, k, *d_of_bytes = matrix.wmma_layout("gfx1201", 1)
    assert k[0].tolist() == k[15].tolist() == list(range(8)) and k[16].tolist() == k[31].tolist() == list(range(8, 16))
    assert np.array_equal(d_of_bytes, [d_rows, d_columns])


def test_cdna2_flushes_denormals_of_16_bit_matmuls():
    """2^-15 is denormal in float16, and 2^-127 in float32; the next generation keeps both."""
    for target, name, wanted in (("gfx90a", "16x16x16f16", 0.0), ("gfx942", "16x16x16_f16", 16 * 2.0**-15)):
        v = dict.fromkeys((10, 11), 33554944) | dict.fromkeys((12, 13), 1006648320)
        wave = run(target, f"v_mfma_f32_{name} v[0:3], v[10:11], v[12:13], 0", v)
        assert set(floats(wave, 0)) == {np.float32(wanted)}


def test_xf32_drops_the_last_13_bits():
    wave = run("gfx942", "v_mfma_f32_16x16x8_xf32 v[0:3], v[10:11], v[12:13], 0", {
        10: 1 + 2.0**-10 + 2.0**-11, 11: 1.0, 12: 1.0, 13: 1.0,
    })  # fmt: skip
    assert set(floats(wave, 0)) == {np.float32(8 + 4 * 2.0**-10)}


# ---------------------------------------------------------------- scalar instructions

SCALAR_EXAMPLES = """
s_add_u32 s0, s1, s2             | 0xffffffff 2     | 1           | 1
s_sub_u32 s0, s1, s2             | 1 2              | 0xffffffff  | 1
s_addc_u32 s0, s1, s2            | 1 2              | 4           | 0
s_subb_u32 s0, s1, s2            | 5 2              | 2           | 0
s_add_i32 s0, s1, s2             | 0x7fffffff 1     | 0x80000000  | 1
s_add_i32 s0, s1, s2             | 0xffffffff 1     | 0           | 0
s_sub_i32 s0, s1, s2             | 3 5              | -2          | 0
s_mul_i32 s0, s1, s2             | -3 5             | -15         | 1
s_mul_hi_u32 s0, s1, s2          | 0x80000000 6     | 3           | 1
s_mul_hi_i32 s0, s1, s2          | -1 6             | -1          | 1
s_and_b32 s0, s1, s2             | 6 9              | 0           | 0
s_or_b32 s0, s1, s2              | 6 9              | 15          | 1
s_xor_b32 s0, s1, s2             | 6 3              | 5           | 1
s_andn2_b32 s0, s1, s2           | 7 2              | 5           | 1
s_orn2_b32 s0, s1, s2            | 0x30 0xfffffff0  | 0x3f        | 1
s_nand_b32 s0, s1, s2            | 6 3              | -3          | 1
s_nor_b32 s0, s1, s2             | 6 3              | -8          | 1
s_xnor_b32 s0, s1, s2            | 6 3              | -6          | 1
s_xnor_b32 s0, s1, s2            | 6 -7             | 0           | 0
s_not_b32 s0, s1                 | -1               | 0           | 0
s_bcnt1_i32_b32 s0, s1           | 0xf0000001       | 5           | 1
s_bcnt1_i32_b32 s0, s1           | 0                | 0           | 0
s_brev_b32 s0, s1                | 0x80000002       | 0x40000001  | 1
s_lshl_b32 s0, s1, s2            | 0x80000001 33    | 2           | 1
s_lshl_b32 s0, s1, s2            | 0x80000000 1     | 0           | 0
s_lshr_b32 s0, s1, s2            | 0x80000000 31    | 1           | 1
s_ashr_i32 s0, s1, s2            | 0x80000000 31    | -1          | 1
s_lshl1_add_u32 s0, s1, s2       | 5 2              | 12          | 0
s_lshl2_add_u32 s0, s1, s2       | 5 2              | 22          | 0
s_lshl3_add_u32 s0, s1, s2       | 5 2              | 42          | 0
s_lshl4_add_u32 s0, s1, s2       | 0x10000001 2     | 18          | 1
s_bfe_u32 s0, s1, 0x80004        | 0x12345678       | 0x67        | 1
s_bfe_u32 s0, s1, 0x80024        | 0x12345678       | 0x67        | 1
s_bfe_i32 s0, s1, 0x80004        | 0x12345f78       | -9          | 1
s_bfm_b32 s0, s1, s2             | 36 40            | 0xf00       | 1
s_pack_ll_b32_b16 s0, s1, s2     | 0x11112222 0x33334444 | 0x44442222 | 1
s_pack_lh_b32_b16 s0, s1, s2     | 0x11112222 0x33334444 | 0x33332222 | 1
s_pack_hh_b32_b16 s0, s1, s2     | 0x11112222 0x33334444 | 0x33331111 | 1
s_min_i32 s0, s1, s2             | -1 3             | -1          | 1
s_min_i32 s0, s1, s2             | 3 3              | 3           | 0
s_max_i32 s0, s1, s2             | -1 3             | 3           | 0
s_max_i32 s0, s1, s2             | 3 3              | 3           | 1
s_min_u32 s0, s1, s2             | -1 3             | 3           | 0
s_min_u32 s0, s1, s2             | 3 3              | 3           | 0
s_max_u32 s0, s1, s2             | -1 3             | -1          | 1
s_max_u32 s0, s1, s2             | 3 3              | 3           | 1
s_abs_i32 s0, s1                 | -7               | 7           | 1
s_sext_i32_i8 s0, s1             | 0x1ff            | -1          | 1
s_sext_i32_i16 s0, s1            | 0x18000          | -32768      | 1
s_movk_i32 s0, 0xffc0            |                  | -64         | 1
s_cselect_b32 s0, s1, s2         | 7 9              | 7           | 1
s_cmp_lt_i32 s1, s2              | -1 3             |             | 1
s_cmp_lt_u32 s1, s2              | -1 3             |             | 0
s_cmp_lg_u32 s1, s2              | 3 3              |             | 0
s_cmpk_gt_i32 s1, 0x8000         | 3                |             | 1
s_bitcmp0_b32 s1, 4              | 0x10             |             | 0
s_bitcmp1_b32 s1, 4              | 0x10             |             | 1
"""
# instruction, with the result in s[0:1] or s0 | s[2:3] and s[4:5] | result | SCC, which is 1 before
PAIRS = """
s_not_b64 s[0:1], s[2:3]          | 0x00000000ffffffff                    | 0xffffffff00000000 | 1
s_not_b64 s[0:1], s[2:3]          | 0xffffffffffffffff                    | 0                  | 0
s_and_b64 s[0:1], s[2:3], s[4:5]  | 0xff00000000000001 0x0ff0000000000000 | 0x0f00000000000000 | 1
s_and_b64 s[0:1], s[2:3], s[4:5]  | 0xff00000000000001 0x00f0000000000000 | 0                  | 0
s_or_b64 s[0:1], s[2:3], s[4:5]   | 0xff00000000000001 0x0ff0000000000000 | 0xfff0000000000001 | 1
s_xor_b64 s[0:1], s[2:3], s[4:5]  | 0xff00000000000001 0x0ff0000000000000 | 0xf0f0000000000001 | 1
s_andn2_b64 s[0:1], s[2:3], s[4:5]| 0xff00000000000001 0x0ff0000000000000 | 0xf000000000000001 | 1
s_orn2_b64 s[0:1], s[2:3], s[4:5] | 0xff00000000000001 0x0ff0000000000000 | 0xff0fffffffffffff | 1
s_nand_b64 s[0:1], s[2:3], s[4:5] | 0xff00000000000001 0x0ff0000000000000 | 0xf0ffffffffffffff | 1
s_nor_b64 s[0:1], s[2:3], s[4:5]  | 0xff00000000000001 0x0ff0000000000000 | 0x000ffffffffffffe | 1
s_xnor_b64 s[0:1], s[2:3], s[4:5] | 0xff00000000000001 0x0ff0000000000000 | 0x0f0ffffffffffffe | 1
s_lshl_b64 s[0:1], s[2:3], s4     | 0x0000000080000001 65                 | 0x0000000100000002 | 1
s_lshr_b64 s[0:1], s[2:3], s4     | 0x0000000100000002 65                 | 0x0000000080000001 | 1
s_ashr_i64 s[0:1], s[2:3], s4     | 0x8000000000000000 33                 | 0xffffffffc0000000 | 1
s_bfe_u64 s[0:1], s[2:3], s4      | 0x123456789abcdef0 0xc0024            | 0x567              | 1
s_bfe_i64 s[0:1], s[2:3], s4      | 0x123458789abcdef0 0x80024            | 0xffffffffffffff87 | 1
s_add_nc_u64 s[0:1], s[2:3], s[4:5] | 0x00000001ffffffff 1                | 0x0000000200000000 | 1
s_sub_nc_u64 s[0:1], s[2:3], s[4:5] | 0x0000000100000000 1                | 0x00000000ffffffff | 1
s_mul_u64 s[0:1], s[2:3], s[4:5]  | 0x0000000100000003 0x0000000100000005 | 0x000000080000000f | 1
s_cselect_b64 s[0:1], s[2:3], s[4:5] | 0x0000000100000002 0x0000000300000004 | 0x0000000100000002 | 1
s_cmov_b64 s[0:1], s[2:3]         | 0x0000000100000002                    | 0x0000000100000002 | 1
s_bcnt1_i32_b64 s0, s[2:3]        | 0xf000000000000001                    | 5                  | 1
s_flbit_i32_b64 s0, s[2:3]        | 0x0000000100000000                    | 31                 | 1
s_ff1_i32_b64 s0, s[2:3]          | 0x0000000200000000                    | 33                 | 1
"""
# CDNA's name -> RDNA's, of the same computation.
RENAMED = {
    "s_add_u32": "s_add_co_u32", "s_sub_u32": "s_sub_co_u32", "s_addc_u32": "s_add_co_ci_u32",
    "s_subb_u32": "s_sub_co_ci_u32", "s_add_i32": "s_add_co_i32", "s_sub_i32": "s_sub_co_i32",
    "s_addk_i32": "s_addk_co_i32", "s_add_nc_u64": "s_add_u64", "s_sub_nc_u64": "s_sub_u64",
    "s_andn2_b32": "s_and_not1_b32", "s_andn2_b64": "s_and_not1_b64", "s_orn2_b32": "s_or_not1_b32",
    "s_flbit_i32_b32": "s_clz_i32_u32", "s_flbit_i32_b64": "s_clz_i32_u64", "s_flbit_i32": "s_cls_i32",
    "s_ff1_i32_b32": "s_ctz_i32_b32", "s_ff1_i32_b64": "s_ctz_i32_b64",
}  # fmt: skip


def spellings(code):
    """Return a line of code, and the same with RDNA's name of the instruction if it has one."""
    name, rest = code.split(" ", 1)
    return [code, *([f"{RENAMED[name]} {rest}"] if name in RENAMED else [])]


@pytest.mark.parametrize("example", SCALAR_EXAMPLES.strip().splitlines(), ids=lambda line: line.split("|")[0].strip())
def test_one_scalar_instruction(example):
    """SCC is 1 before."""
    code, inputs, wanted, scc = (cell.strip() for cell in example.split("|"))
    given = dict(enumerate(map(number, inputs.split()), 1))
    for spelling in spellings(code):
        wave = run("gfx942", f"s_cmp_eq_u32 0, 0\n{spelling}", s=given)
        assert wave.scc == int(scc)
        if wanted:
            assert wave.get_scalar(0) == int(wanted, 0) & 0xFFFFFFFF


@pytest.mark.parametrize("example", PAIRS.strip().splitlines(), ids=lambda line: line.split("|")[0].strip())
def test_one_scalar_instruction_of_64_bits(example):
    code, inputs, wanted, scc = (cell.strip() for cell in example.split("|"))
    given = {}
    for first, value in zip((2, 4), map(number, inputs.split()), strict=False):
        given |= {first: value & 0xFFFFFFFF, first + 1: value >> 32}
    for spelling in spellings(code):
        wave = run("gfx942", f"s_cmp_eq_u32 0, 0\n{spelling}", s=given)
        assert wave.get_scalar(0, 2 if "s[0:1]" in code else 1) == int(wanted, 0)
        assert wave.scc == int(scc)


def test_every_instruction_has_an_example():
    text = pathlib.Path(__file__).read_text()
    of_vectors = set(re.findall(r"v_\w+?(?=_e32|_e64|_dpp|_sdwa|\b)", text))
    assert sorted(tables.SCALAR.keys() - set(re.findall(r"s_\w+", text))) == []
    assert sorted(tables.VECTOR.keys() - of_vectors) == []
    left = sorted(vector.SPECIAL.keys() - of_vectors)
    assert all("fp8" in name or "bf8" in name for name in left)  # whose tests put their names together


def test_scalar_floats_of_rdna4():
    code = """
    s_mul_f32 s2, s0, 0x40000000
    s_fmac_f32 s3, s0, s0
    v_s_exp_f32 s4, s0
    s_cvt_u32_f32 s5, s0
    s_cmp_lt_f32 s0, 4.0
    """
    wave = run("gfx1201", code, s={0: 3.0, 3: 1.0})
    assert wave.s[2:5].view(np.float32).tolist() == [6, 10, 8] and wave.s[5] == 3 and wave.scc == 1


def test_exec_is_saved_and_combined():
    code = """
    v_cmp_gt_u32_e32 vcc, 3, v1
    s_and_saveexec_b64 s[2:3], vcc
    s_cbranch_execz skip
    v_mov_b32_e32 v0, 1
    skip:
    s_or_b64 exec, exec, s[2:3]
    v_mov_b32_e32 v2, 2
    """
    wave = run("gfx942", code, {0: 0, 1: np.arange(64), 2: 0}, mask=0xFE)
    assert wave.v[0].nonzero()[0].tolist() == [1, 2] and wave.v[2].nonzero()[0].tolist() == list(range(1, 8))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("and", 0b1000), ("or", 0b1110), ("xor", 0b0110), ("andn2", 0b0010), ("and_not1", 0b0010),
        ("nand", 0b0111), ("nor", 0b0001), ("xnor", 0b1001), ("orn2", 0b1011),
    ],
)  # fmt: skip
def test_exec_is_combined_with_a_mask(name, wanted):
    """EXEC is 1100 and the mask 1010: of `not`, it is EXEC that is negated."""
    code = f"s_{name}_saveexec_b64 s[2:3], s[4:5]\ns_mov_b64 s[6:7], exec\ns_cselect_b32 s8, 1, 0"
    wave = run("gfx942", code, s={4: 0b1010, 5: 0}, mask=0b1100)
    assert wave.get_scalar(2, 2) == 0b1100 and wave.get_scalar(6) & 0xF == wanted and wave.s[8] == 1
    wave = run("gfx942", "s_and_saveexec_b64 s[2:3], s[4:5]\ns_cselect_b32 s8, 1, 0", s={4: 3, 5: 0}, mask=0b1100)
    assert wave.exec == 0 and wave.s[8] == 0


@pytest.mark.parametrize("relation", ["eq", "lg", "gt", "ge", "lt", "le"])
def test_scalar_comparisons(relation):
    """Of -1, which is the largest number without a sign, and 3, of two that are alike, and of the upper halves."""
    holds = {"eq": "=", "lg": "<>", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}[relation]
    for a, b, kind, is_wanted in (
        (-1, 3, "i32", "<" in holds), (-1, 3, "u32", ">" in holds),
        (3, 3, "i32", "=" in holds), (3, 3, "u32", "=" in holds),
        (3, -1, "i32", ">" in holds), (3, -1, "u32", "<" in holds),
    ):  # fmt: skip
        assert run("gfx942", f"s_cmp_{relation}_{kind} s1, s2", s={1: a, 2: b}).scc == is_wanted, (a, b, kind)
        constant = b & 0xFFFF  # of 16 bits, which have the sign of the comparison
        if b == 3 or kind == "i32":
            assert run("gfx942", f"s_cmpk_{relation}_{kind} s1, {constant}", s={1: a}).scc == is_wanted, (a, b, kind)
    if relation in ("eq", "lg"):
        for upper, is_equal in ((7, True), (8, False)):
            wave = run("gfx942", f"s_cmp_{relation}_u64 s[2:3], s[4:5]", s={2: 5, 3: 7, 4: 5, 5: upper})
            assert wave.scc == (is_equal if relation == "eq" else not is_equal)


@pytest.mark.parametrize("jumps", [True, False])
@pytest.mark.parametrize("condition", ["scc0", "scc1", "vccz", "vccnz", "execz", "execnz"])
def test_a_branch_is_taken_under_its_condition_alone(condition, jumps):
    of_zero = condition in ("scc0", "vccz", "execz")
    value = int(jumps != of_zero)
    setting = f"s_mov_b64 {condition.rstrip('nz')}, {value << 1}"
    if condition.startswith("scc"):
        setting = f"s_cmp_eq_u32 {value}, 1"
    code = f"{setting}\ns_mov_b32 s0, 1\ns_cbranch_{condition} end\ns_mov_b32 s0, 2\nend:\ns_nop 0"
    assert run("gfx942", code).s[0] == (1 if jumps else 2)


SWIZZLES = {
    "SWAP,4": [i ^ 4 for i in range(32)],
    "REVERSE,8": [i // 8 * 8 + 7 - i % 8 for i in range(32)],
    "BROADCAST,8,3": [i // 8 * 8 + 3 for i in range(32)],
    "QUAD_PERM,2,0,3,3": [i // 4 * 4 + (2, 0, 3, 3)[i % 4] for i in range(32)],
}


@pytest.mark.parametrize("pattern", SWIZZLES)
def test_lanes_are_swizzled(pattern):
    wave = run("gfx1100", f"ds_swizzle_b32 v0, v1 offset:swizzle({pattern})", {1: np.arange(32)})
    assert wave.v[0].tolist() == SWIZZLES[pattern]


def test_a_loop():
    code = """
    s_mov_b32 s0, 0
    v_mov_b32_e32 v0, 0
    again:
    v_add_u32_e32 v0, s0, v0
    s_add_i32 s0, s0, 1
    s_cmp_lt_i32 s0, 5
    s_cbranch_scc1 again
    """
    assert set(run("gfx942", code).v[0]) == {10}


# ---------------------------------------------------------------- LDS, memory, barriers


def test_lds_moves_what_it_should():
    lanes = np.arange(64)
    code = """
    ds_write_b32 v1, v2 offset:256
    ds_write2_b32 v1, v2, v3 offset0:128 offset1:192
    ds_read_b32 v4, v1 offset:256
    ds_read2st64_b32 v[5:6], v1 offset0:2 offset1:3
    ds_write_b16 v1, v2 offset:1024
    ds_read_u16 v7, v1 offset:256
    ds_read_u16_d16_hi v8, v1 offset:1024
    ds_read_i8 v9, v1 offset:256
    """
    wave = run("gfx942", code, {1: 4 * lanes, 2: lanes - 5, 3: lanes + 99, 8: 0x1234}, lds=2048)
    assert wave.v[4].tolist() == [(i - 5) & 0xFFFFFFFF for i in range(64)] == wave.v[5].tolist()
    assert wave.v[6].tolist() == [i + 99 for i in range(64)]
    assert wave.v[7, 0] == 0xFFFB and wave.v[8, 0] == 0xFFFB1234 and wave.v[9, 0] == 0xFFFFFFFB
    with pytest.raises(Fault, match="outside the 2048 bytes"):
        run("gfx942", "ds_read_b64 v[0:1], v1", {1: 2044}, lds=2048)


# global and buffer of CDNA, those of RDNA, LDS | registers that held 0x77777777, loaded from the bytes 0x80, 0x81, ...
LOADS = """
dword        b32        b32        | 0x83828180
dwordx2      b64        b64        | 0x83828180 0x87868584
dwordx3      b96        b96        | 0x83828180 0x87868584 0x8b8a8988
dwordx4      b128       b128       | 0x83828180 0x87868584 0x8b8a8988 0x8f8e8d8c
ubyte        u8         u8         | 0x00000080
sbyte        i8         i8         | 0xffffff80
ushort       u16        u16        | 0x00008180
sshort       i16        i16        | 0xffff8180
ubyte_d16    d16_u8     u8_d16     | 0x77770080
ubyte_d16_hi d16_hi_u8  u8_d16_hi  | 0x00807777
sbyte_d16    d16_i8     i8_d16     | 0x7777ff80
sbyte_d16_hi d16_hi_i8  i8_d16_hi  | 0xff807777
short_d16    d16_b16    u16_d16    | 0x77778180
short_d16_hi d16_hi_b16 u16_d16_hi | 0x81807777
"""
# the same of stores | bytes, which were zero, stored from registers of 0x83828180, 0x87868584, ...
STORES = """
dword        b32        b32        | 80 81 82 83
dwordx2      b64        b64        | 80 81 82 83 84 85 86 87
dwordx3      b96        b96        | 80 81 82 83 84 85 86 87 88 89 8a 8b
dwordx4      b128       b128       | 80 81 82 83 84 85 86 87 88 89 8a 8b 8c 8d 8e 8f
byte         b8         b8         | 80
byte_d16_hi  d16_hi_b8  b8_d16_hi  | 82
short        b16        b16        | 80 81
short_d16_hi d16_hi_b16 b16_d16_hi | 82 83
"""


@pytest.mark.parametrize("example", LOADS.strip().splitlines(), ids=lambda line: line.split()[0])
def test_loads_of_all_sizes(example):
    (old, new, of_lds), registers = (cell.split() for cell in example.split("|"))
    wanted = [int(register, 16) for register in registers]
    _, address, allowed = memory_of(np.arange(0x80, 0x90, dtype=np.uint8))
    s = {2: address & 0xFFFFFFFF, 3: address >> 32, 4: address & 0xFFFFFFFF, 5: address >> 32, 6: 16, 7: 0}
    v = {0: s[2], 1: s[3], 2: 0} | dict.fromkeys(range(8, 12), 0x77777777)
    to = f"v[8:{7 + len(wanted)}]" if len(wanted) > 1 else "v8"
    filled = "\n".join(["global_load_dwordx4 v[4:7], v2, s[2:3]", "ds_write_b128 v2, v[4:7]"])
    codes = [f"{filled}\nds_{word}_{of_lds} {to}, v2" for word in ("read", "load")]
    for name in (old, new):
        codes += [f"global_load_{name} {to}, v2, s[2:3]", f"flat_load_{name} {to}, v[0:1]"]
        codes.append(f"buffer_load_{name} {to}, v2, s[4:7], 0 offen")
    for code in codes:
        wave = run("gfx942", code, v, s, mask=1, ranges=[allowed])
        assert wave.v[8 : 8 + len(wanted), 0].tolist() == wanted, code
        assert set(wave.v[8 + len(wanted) : 12, 0].tolist()) <= {0x77777777}, code


@pytest.mark.parametrize("example", STORES.strip().splitlines(), ids=lambda line: line.split()[0])
def test_stores_of_all_sizes(example):
    (old, new, of_lds), stored = (cell.split() for cell in example.split("|"))
    wanted = [int(byte, 16) for byte in stored] + [0] * (16 - len(stored))
    values, address, allowed = memory_of(np.zeros(16, np.uint8))
    s = {2: address & 0xFFFFFFFF, 3: address >> 32, 4: address & 0xFFFFFFFF, 5: address >> 32, 6: 16, 7: 0}
    v = {0: s[2], 1: s[3], 2: 0, 8: 0x83828180, 9: 0x87868584, 10: 0x8B8A8988, 11: 0x8F8E8D8C}
    v |= dict.fromkeys(range(4, 8), 0)
    count = max(1, len(stored) // 4)
    given = f"v[8:{7 + count}]" if count > 1 else "v8"
    read = "ds_read_b128 v[4:7], v2\nglobal_store_dwordx4 v2, v[4:7], s[2:3]"
    codes = [f"ds_write_b128 v2, v[4:7]\nds_{word}_{of_lds} v2, {given}\n{read}" for word in ("write", "store")]
    for name in (old, new):
        codes += [f"global_store_{name} v2, {given}, s[2:3]", f"flat_store_{name} v[0:1], {given}"]
        codes.append(f"buffer_store_{name} {given}, v2, s[4:7], 0 offen")
    for code in codes:
        values[:] = 0
        run("gfx942", code, v, s, mask=1, ranges=[allowed])
        assert values.tolist() == wanted, code


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("gfx1100", "ds_store_b32 v1, v2 offset:16\nds_load_b32 v3, v1 offset:16"),
        (
            "gfx1100",
            "ds_store_2addr_b32 v1, v2, v2 offset0:4 offset1:8\nds_load_2addr_b32 v[3:4], v1 offset0:4 offset1:8",
        ),
        ("gfx942", "ds_write_b32 v1, v4 offset:16\nds_add_u32 v1, v2 offset:16\nds_read_b32 v3, v1 offset:16"),
    ],
)
def test_an_lds_address_wraps_around(target, code):
    """The compiler folds offsets into the instruction even if the sum before is negative."""
    lanes = np.arange(WIDTH[target])
    wave = run(target, code, {1: 4 * lanes - 12, 2: lanes, 4: 0}, mask=0b1111, lds=64)
    assert wave.v[3, :4].tolist() == [0, 1, 2, 3]
    with pytest.raises(Fault, match="outside the 64 bytes"):
        run(target, code, {1: 4 * lanes - 20, 2: lanes, 4: 0}, mask=0b1111, lds=64)


def test_a_transposed_read_of_cdna4():
    """16 lanes, each with the address of 4 halves of a row of 16, get a column of 4."""
    code = """
    ds_write_b64 v1, v[2:3]
    ds_read_b64_tr_b16 v[4:5], v1
    """
    lanes = np.arange(64)
    two = 4 * lanes | (4 * lanes + 1) << 16
    wave = run("gfx950", code, {1: 8 * lanes, 2: two, 3: two + 0x20002}, lds=512)
    halves = np.ascontiguousarray(wave.v[4:6].T).view(np.uint16)
    assert halves.tolist() == [[64 * (i // 16) + 16 * k + i % 16 for k in range(4)] for i in range(64)]


def test_a_transposed_read_of_bytes():
    """16 lanes, each with the address of 8 bytes of a row of 16, get a column of 8."""
    code = "ds_write_b64 v1, v[2:3]\nds_read_b64_tr_b8 v[4:5], v1"
    stored = RNG.integers(0, 256, (4, 8, 16), dtype=np.uint8)  # [16 lanes, row, column]
    registers = stored.reshape(64, 8).view(np.uint32).T
    wave = run("gfx950", code, {1: 8 * np.arange(64), 2: registers[0], 3: registers[1]}, lds=512)
    columns = np.ascontiguousarray(wave.v[4:6].T).view(np.uint8).reshape(4, 16, 8)
    assert np.array_equal(columns, stored.transpose(0, 2, 1))


STORE_AND_READ = """
v_lshlrev_b32_e32 v1, 2, v0
ds_write_b32 v1, v0
{barrier}
v_xor_b32_e32 v1, 0x100, v1
ds_read_b32 v2, v1
"""


@pytest.mark.parametrize("order", [1, -1])
def test_waves_exchange_through_lds(order):
    made = Machine("gfx942", STORE_AND_READ.format(barrier="s_barrier"), waves=2, lds=512, order=order).run()
    assert [wave.v[2, 0] for wave in made.waves] == [64, 0]
    split = "s_barrier_signal -1\nv_nop\ns_barrier_wait -1"
    code = STORE_AND_READ.format(barrier=split).replace("0x100", "0x80")
    assert [w.v[2, 0] for w in Machine("gfx1201", code, waves=2, order=order).run().waves] == [32, 0]
    for target, barrier in (("gfx942", ""), ("gfx1201", "s_barrier_signal -1"), ("gfx1201", "")):
        code = STORE_AND_READ.format(barrier=barrier) + ("s_barrier_wait -1" if barrier else "")
        if target == "gfx1201":
            code = code.replace("0x100", "0x80")
        with pytest.raises(Fault, match="a race"):
            Machine(target, code, waves=2, lds=512, order=order).run()


def test_two_waves_may_store_one_value_but_not_two():
    same = "v_mov_b32_e32 v1, 0\ns_nop 0\nds_write_b32 v1, v1"
    Machine("gfx942", same, waves=2).run()
    with pytest.raises(Fault, match="store different values"):
        Machine("gfx942", same.replace("v1, v1", "v1, v0"), waves=2).run()


def test_all_waves_meet_a_barrier():
    code = "v_readfirstlane_b32 s2, v0\ns_cmp_eq_u32 s2, 0\ns_cbranch_scc1 end\ns_barrier\nend:"
    with pytest.raises(Fault, match="some waves ended"):
        Machine("gfx942", code, waves=2).run()


def memory_of(values):
    """Return an array, its address and the range that a kernel may touch."""
    return values, values.ctypes.data, (values.ctypes.data, values.ctypes.data + values.nbytes)


def test_memory_is_checked():
    values, address, allowed = memory_of(np.arange(64, dtype=np.uint32))
    s = {2: address & 0xFFFFFFFF, 3: address >> 32}
    code = "global_load_dword v1, v0, s[2:3] offset:-4"
    wave = run("gfx942", code, {0: 4 * np.arange(64) + 4}, s, ranges=[allowed])
    assert wave.v[1].tolist() == list(range(64))
    run("gfx942", "global_store_short v0, v1, s[2:3]", {0: 4 * np.arange(64), 1: 0x12345678}, s, ranges=[allowed])
    assert values.tolist() == [0x5678] * 64
    with pytest.raises(Fault, match="load outside every tensor in 1 lanes"):
        run("gfx942", code, {0: 4 * np.arange(64) + 8}, s, ranges=[allowed])
    wave = run("gfx942", code, {0: 4 * np.arange(64) + 8}, s, mask=(1 << 63) - 1, ranges=[allowed])
    with pytest.raises(Fault, match="store outside"):
        run("gfx942", "global_store_dwordx2 v[0:1], v[2:3], off", {0: 0x40000, 1: 0}, ranges=[allowed])


def test_a_buffer_out_of_range_reads_zero_and_stores_nothing():
    values, address, allowed = memory_of(np.arange(1, 65, dtype=np.uint32))
    s = {4: address & 0xFFFFFFFF, 5: address >> 32, 6: 64, 7: 0x27000, 8: 4}
    code = "buffer_load_dwordx2 v[2:3], v1, s[4:7], s8 offen offset:4\nbuffer_store_dword v0, v1, s[4:7], 0 offen"
    at = np.where(np.arange(64) < 7, 8 * np.arange(64), 0x80000000)
    wave = run("gfx942", code, {0: 500, 1: at}, s, ranges=[allowed])
    assert wave.v[2].tolist() == [3, 5, 7, 9, 11, 13, 15] + [0] * 57 and wave.v[3, 6] == 16 and not wave.v[3, 7:].any()
    assert values[:14:2].tolist() == [500] * 7 and values[1] == 2 and values[14:].tolist() == list(range(15, 65))
    with pytest.raises(Fault, match="end of its buffer cuts"):
        run("gfx942", "buffer_load_dwordx2 v[2:3], v1, s[4:7], 0 offen", {1: 60}, s, ranges=[allowed])


@pytest.mark.parametrize(
    ("name", "result"), [("ushort", 0), ("short_d16", 0x12340000), ("short_d16_hi", 0x5678), ("ubyte_d16", 0x12340000)]
)
def test_half_of_a_register_keeps_its_bits_where_a_buffer_is_out_of_range(name, result):
    s = {4: 0x40000, 5: 0, 6: 64, 7: 0x27000}
    wave = run("gfx942", f"buffer_load_{name} v2, v1, s[4:7], 0 offen", {1: 64, 2: 0x12345678}, s)
    assert wave.v[2].tolist() == [result] * 64


@pytest.mark.parametrize("address", [1 << 63, (1 << 64) - 2, (1 << 63) - 2])
@pytest.mark.parametrize("code", ["global_load_dword v2, v1, s[2:3]", "s_load_dword s6, s[2:3], 0x0"])
def test_an_address_that_no_memory_has(code, address):
    with pytest.raises(Fault, match="outside every tensor"):
        run("gfx942", code, {1: 0}, {2: address & 0xFFFFFFFF, 3: address >> 32})


# ---------------------------------------------------------------- bank conflicts of LDS

TRANSPOSE = """
v_lshrrev_b32_e32 v2, 5, v0
v_and_b32_e32 v3, 31, v0
v_mul_u32_u24_e32 v4, {row}, v2
v_lshl_add_u32 v4, v3, 2, v4
ds_write_b32 v4, v1
v_mul_u32_u24_e32 v4, {row}, v3
v_lshl_add_u32 v4, v2, 2, v4
ds_read_b32 v5, v4
"""


@pytest.mark.parametrize(("target", "load_cycles"), [("gfx90a", 64), ("gfx942", 64), ("gfx950", 32), ("gfx1100", 32)])
def test_a_transpose_has_bank_conflicts_that_padding_removes(target, load_cycles):
    """By hand: a wave stores two rows of a tile of 32 x 32 numbers of 4 bytes (RDNA: one), and loads as many columns.

    Without padding the 32 numbers of a column lie in one of 32 banks: 32 cycles per phase of 32 lanes. With 64 banks
    (loads on gfx950) they lie in two. A row of 33 numbers moves each row to the next bank.
    """
    phases = WIDTH[target] // 32
    for row, cycles in ((32, load_cycles), (33, phases)):
        machine = Machine(target, TRANSPOSE.format(row=4 * row), lds=4 * row * 32)
        machine.waves[0].v[0] = np.arange(WIDTH[target])
        machine.run()
        found = {text.split()[0]: counts for (_, text), counts in machine.lds.banks.cycles.items()}
        assert found == {"ds_write_b32": [1, phases, phases], "ds_read_b32": [1, cycles, phases]}


# target | instruction | address of lane i | cycles, cycles without conflicts
BANKS = """
gfx1100 | ds_load_b96 v[2:4], v1             | 12 * i                                      | 4 4
gfx1100 | ds_load_b96 v[2:4], v1             | 128 * i                                     | 32 4
gfx942  | ds_read_b96 v[2:4], v1             | 12 * i                                      | 8 8
gfx942  | ds_read_b32 v2, v1                 | 0 * i                                       | 2 2
gfx942  | ds_read_u16 v2, v1                 | 2 * i                                       | 2 2
gfx942  | ds_read_b64 v[2:3], v1             | 8 * i                                       | 4 4
gfx942  | ds_read_b64 v[2:3], v1             | 128 * (i % 16) + 8 * (i // 16)              | 64 4
gfx942  | ds_write_b128 v1, v[2:5]           | 16 * i                                      | 8 8
gfx942  | ds_read_b128 v[2:5], v1            | 16 * i                                      | 8 8
gfx942  | ds_write_b128 v1, v[2:5]           | 16 * (i % 32 // 4 % 4) + 256 * (i % 4) + 64 * (i // 16) | 32 8
gfx942  | ds_read_b128 v[2:5], v1            | 128 * (i // 4) + 16 * (i % 4) + 64 * (i // 16 % 2) | 8 8
gfx942  | ds_write_b128 v1, v[2:5]           | 128 * (i // 4) + 16 * (i % 4) + 64 * (i // 16 % 2) | 16 8
gfx942  | ds_write_b96 v1, v[2:4]            | 12 * i                                      | 8 8
gfx942  | ds_read_b96 v[2:4], v1             | 128 * i                                     | 64 8
gfx942  | ds_read2_b32 v[2:3], v1 offset1:32 | 4 * i                                       | 4 4
gfx942  | ds_add_u32 v1, v2                  | 128 * (i % 8)                               | 16 2
gfx950  | ds_read_b128 v[2:5], v1            | 16 * i                                      | 4 4
gfx950  | ds_write_b128 v1, v[2:5]           | 16 * i                                      | 8 8
gfx950  | ds_read_b64 v[2:3], v1             | 8 * i                                       | 2 2
gfx950  | ds_write_b64 v1, v[2:3]            | 8 * i                                       | 4 4
gfx1201 | ds_load_b128 v[2:5], v1            | 16 * i                                      | 4 4
"""


@pytest.mark.parametrize("example", BANKS.strip().splitlines(), ids=lambda line: line[:60])
def test_cycles_of_an_access(example):
    target, code, address, expected = (cell.strip() for cell in example.split(" | "))
    machine = Machine(target, code, lds=8192)
    (wave,) = machine.waves
    wave.v[1] = eval(address, {"i": np.arange(WIDTH[target])})
    machine.run()
    (counts,) = machine.lds.banks.cycles.values()
    assert counts[1:] == list(map(int, expected.split()))


def test_lanes_that_are_off_have_no_conflicts():
    machine = Machine("gfx942", "ds_read_b32 v2, v1", lds=8192)
    (wave,) = machine.waves
    wave.v[1] = 128 * np.arange(64)
    wave.set_exec(0b111)
    machine.run()
    assert list(machine.lds.banks.cycles.values()) == [[1, 3, 1]]


# ---------------------------------------------------------------- cache lines of memory
# target | instruction | offset of lane i from the begin of a line | lines touched, the fewest possible

LINES = """
gfx942  | global_load_dword v2, v1, s[2:3]                | 4 * i            | 2 2
gfx942  | global_load_dword v2, v1, s[2:3]                | 4 * i + 4        | 3 2
gfx942  | global_load_dword v2, v1, s[2:3] offset:64      | 4 * i            | 3 2
gfx942  | global_load_dword v2, v1, s[2:3]                | 8 * i            | 4 2
gfx942  | global_load_dword v2, v1, s[2:3]                | 128 * i          | 64 2
gfx942  | global_load_dword v2, v1, s[2:3]                | 252 - 4 * i      | 2 2
gfx942  | global_load_dword v2, v1, s[2:3]                | 0 * i + 124      | 1 1
gfx942  | global_load_dword v2, v1, s[2:3]                | 0 * i + 126      | 2 1
gfx942  | global_load_ubyte v2, v1, s[2:3]                | i + 96           | 2 1
gfx942  | global_load_dwordx2 v[2:3], v1, s[2:3]          | 128 * i + 124    | 65 4
gfx942  | global_load_dwordx2 v[2:3], v1, s[2:3]          | 4 * i            | 3 3
gfx942  | global_load_dwordx4 v[2:5], v1, s[2:3]          | 16 * i           | 8 8
gfx942  | global_store_dword v1, v2, s[2:3]               | 16 * i           | 8 2
gfx942  | global_atomic_add v1, v2, s[2:3]                | 256 * (i % 2)    | 2 1
gfx942  | buffer_load_dword v2, v1, s[4:7], 0 offen       | 64 * i           | 32 2
gfx942  | buffer_load_dword v2, v1, s[4:7], 0 offen       | 8192 * (i // 32) | 1 1
gfx942  | buffer_store_short v2, v1, s[4:7], 0 offen      | 2 * i + 2        | 2 1
gfx90a  | global_load_dword v2, v1, s[2:3]                | 4 * i            | 4 4
gfx90a  | global_load_dword v2, v1, s[2:3]                | 64 * i           | 64 4
gfx950  | global_load_dword v2, v1, s[2:3]                | 64 * i           | 32 2
gfx1100 | global_load_b32 v2, v1, s[2:3]                  | 4 * i            | 1 1
gfx1100 | global_load_b32 v2, v1, s[2:3]                  | 4 * i + 4        | 2 1
gfx1201 | global_store_b64 v1, v[2:3], s[2:3]             | 128 * i          | 32 2
"""


def run_in_lines(target, code, offsets, mask=None):
    """Return {the instruction's name: counts} of a wave; s[2:3] and s[4:7] point to memory."""
    memory = np.zeros(8192 + 256, np.uint8)
    address = memory.ctypes.data + 4  # a tensor of the CPU may begin within a line
    low, high = address & 0xFFFFFFFF, address >> 32
    s = {2: low, 3: high, 4: low, 5: high, 6: 8192, 7: 0x27000}
    wave = run(target, code, {1: offsets}, s, mask=mask, ranges=[(address, address + 8192 + 128)])
    return {text.split()[0]: counts for (_, text), counts in wave.memory.lines.lines.items()}


@pytest.mark.parametrize("example", LINES.strip().splitlines(), ids=lambda line: " ".join(line.split())[:70])
def test_cache_lines_of_an_access(example):
    target, code, offset, expected = (cell.strip() for cell in example.split(" | "))
    (counts,) = run_in_lines(target, code, eval(offset, {"i": np.arange(WIDTH[target])})).values()
    assert counts == [1, *map(int, expected.split())]


def test_lanes_that_are_off_touch_no_line():
    code = "global_load_dword v2, v1, s[2:3]"
    assert run_in_lines("gfx942", code, 128 * np.arange(64), mask=0b111) == {"global_load_dword": [1, 3, 1]}
    assert run_in_lines("gfx942", code, 128 * np.arange(64), mask=0) == {}


def test_two_tensors_share_no_line():
    memory = np.zeros(64, np.uint32)
    first, second = memory.ctypes.data, memory.ctypes.data + 128
    low = np.where(np.arange(64) < 32, first, second)
    ranges = [(first, first + 4), (second, second + 4)]
    wave = run("gfx942", "global_load_dword v2, v[0:1], off", {0: low & 0xFFFFFFFF, 1: low >> 32}, ranges=ranges)
    assert list(wave.memory.lines.lines.values()) == [[1, 2, 1]]


TRANSPOSE_IN_MEMORY = """
v_lshrrev_b32_e32 v2, 5, v1
v_and_b32_e32 v3, 31, v1
v_lshlrev_b32_e32 v4, 7, v2
v_lshl_add_u32 v4, v3, 2, v4
{load} v5, v4, s[2:3]
v_lshlrev_b32_e32 v4, 7, v3
v_lshl_add_u32 v4, v2, 2, v4
{store} v4, v5, s[2:3]
"""


@pytest.mark.parametrize(("target", "fewest"), [("gfx90a", 4), ("gfx942", 2), ("gfx1100", 1)])
def test_a_transpose_touches_a_line_per_row(target, fewest):
    """By hand: a wave loads two rows of 32 numbers of 4 bytes (RDNA: one), which are 128 bytes each.

    It stores them as two columns next to each other, in 32 rows: one line each.
    """
    kind = "b32" if target == "gfx1100" else "dword"
    names = {word: f"global_{word}_{kind}" for word in ("load", "store")}
    found = run_in_lines(target, TRANSPOSE_IN_MEMORY.format(**names), np.arange(WIDTH[target]))
    assert found == {names["load"]: [1, fewest, fewest], names["store"]: [1, 32, fewest]}


# ---------------------------------------------------------------- atomics
# target | instruction, on data in v2 (and v3) at the address in v[0:1] | before, a lane's data and its second | after

ATOMICS = """
gfx942  | global_atomic_add v[0:1], v2, off                | 5 3 0                   | 8
gfx942  | global_atomic_sub v[0:1], v2, off                | 5 3 0                   | 2
gfx942  | global_atomic_smin v[0:1], v2, off               | 5 -3 0                  | -3
gfx942  | global_atomic_umin v[0:1], v2, off               | 5 -3 0                  | 5
gfx942  | global_atomic_smax v[0:1], v2, off               | 5 -3 0                  | 5
gfx942  | global_atomic_umax v[0:1], v2, off               | 5 -3 0                  | -3
gfx942  | global_atomic_and v[0:1], v2, off                | 0xf5 0x3c 0             | 0x34
gfx942  | global_atomic_or v[0:1], v2, off                 | 0xf1 0x0e 0             | 0xff
gfx942  | global_atomic_xor v[0:1], v2, off                | 0xf1 0x0f 0             | 0xfe
gfx942  | global_atomic_swap v[0:1], v2, off               | 5 3 0                   | 3
gfx942  | global_atomic_inc v[0:1], v2, off                | 3 3 0                   | 0
gfx942  | global_atomic_inc v[0:1], v2, off                | 2 3 0                   | 3
gfx942  | global_atomic_dec v[0:1], v2, off                | 0 3 0                   | 3
gfx942  | global_atomic_dec v[0:1], v2, off                | 3 3 0                   | 2
gfx942  | global_atomic_cmpswap v[0:1], v[2:3], off        | 5 3 5                   | 3
gfx942  | global_atomic_cmpswap v[0:1], v[2:3], off        | 5 3 4                   | 5
gfx942  | global_atomic_add_f32 v[0:1], v2, off            | 0.5 0.25 0              | 0.75
gfx942  | global_atomic_pk_add_f16 v[0:1], v2, off         | 0x3c004000 0x40003c00 0 | 0x42004200
gfx942  | global_atomic_pk_add_bf16 v[0:1], v2, off        | 0x3f804000 0x40003f80 0 | 0x40404040
gfx942  | flat_atomic_add v[0:1], v2                       | 5 3 0                   | 8
gfx1100 | global_atomic_add_u32 v[0:1], v2, off            | 5 3 0                   | 8
gfx1100 | global_atomic_min_i32 v[0:1], v2, off            | 5 -3 0                  | -3
gfx1100 | global_atomic_max_f32 v[0:1], v2, off            | 0.5 0.25 0              | 0.5
gfx1100 | global_atomic_swap_b32 v[0:1], v2, off           | 5 3 0                   | 3
gfx1100 | global_atomic_cmpswap_b32 v[0:1], v[2:3], off    | 5 3 5                   | 3
gfx1201 | global_atomic_min_num_f32 v[0:1], v2, off        | 0.5 0.25 0              | 0.25
gfx1201 | global_atomic_pk_add_bf16 v[0:1], v2, off        | 0x3f804000 0x40003f80 0 | 0x40404040
"""


@pytest.mark.parametrize("example", ATOMICS.strip().splitlines(), ids=lambda line: line[:60])
def test_one_atomic(example):
    target, code, given, expected = (cell.strip() for cell in example.split(" | "))
    before, data, second = map(number, given.split())
    lanes = WIDTH[target]
    memory, address, allowed = memory_of(np.full(lanes, bits(before), np.uint32))
    low = address + 4 * np.arange(lanes)
    run(target, code, {0: low & 0xFFFFFFFF, 1: low >> 32, 2: data, 3: second}, ranges=[allowed])
    assert set(memory.tolist()) == {int(bits(number(expected)))}


# instruction | what lies in LDS, and the data | what lies there then
LDS_ATOMICS = """
ds_add_u32     | 5 3          | 8
ds_sub_u32     | 5 3          | 2
ds_rsub_u32    | 5 3          | -2
ds_and_b32     | 0xf5 0x3c    | 0x34
ds_or_b32      | 0xf1 0x0e    | 0xff
ds_xor_b32     | 0xf1 0x0f    | 0xfe
ds_min_i32     | 5 -3         | -3
ds_min_u32     | 5 -3         | 5
ds_max_i32     | 5 -3         | 5
ds_max_u32     | 5 -3         | -3
ds_inc_u32     | 3 3          | 0
ds_inc_u32     | 2 3          | 3
ds_dec_u32     | 0 3          | 3
ds_dec_u32     | 3 3          | 2
ds_add_f32     | 0.5 0.25     | 0.75
ds_min_f32     | 0.5 0.25     | 0.25
ds_max_num_f32 | 0.5 0.25     | 0.5
ds_pk_add_f16  | 0x3c004000 0x40003c00 | 0x42004200
ds_wrxchg_b32  | 5 3          | 3
ds_storexchg_b32 | 5 3        | 3
"""


@pytest.mark.parametrize("example", LDS_ATOMICS.strip().splitlines(), ids=lambda line: " ".join(line.split()))
def test_one_atomic_of_lds(example):
    """With _rtn it returns what was there, without it nothing; an exchange always returns."""
    name, given, expected = (cell.strip() for cell in example.split(" | "))
    before, data = map(number, given.split())
    operation, _, kind = name.rpartition("_")
    codes = {f"{operation}_rtn_{kind} v5, v1, v3": before}
    if "xchg" not in name:
        codes[f"{name} v1, v3"] = 9
    for code, returned in codes.items():
        code = f"ds_write_b32 v1, v2\n{code} offset:0\nds_read_b32 v4, v1"
        wave = run("gfx942", code, {1: 4 * np.arange(64), 2: before, 3: data, 5: 9})
        assert set(wave.v[4].tolist()) == {int(bits(number(expected)))}
        assert set(wave.v[5].tolist()) == {int(bits(returned))}


RETURNING = {
    "gfx90a": "global_atomic_add v5, v4, v2, s[2:3] glc",
    "gfx942": "global_atomic_add v5, v4, v2, s[2:3] sc0",
    "gfx1100": "global_atomic_add_u32 v5, v4, v2, s[2:3] glc",
    "gfx1201": "global_atomic_add_u32 v5, v4, v2, s[2:3] th:TH_ATOMIC_RETURN",
}


@pytest.mark.parametrize("target", RETURNING)
def test_lanes_with_one_address_follow_one_another(target):
    memory, address, allowed = memory_of(np.array([100, 7], np.uint32))
    s = {2: address & 0xFFFFFFFF, 3: address >> 32}
    lanes = WIDTH[target]
    wave = run(target, RETURNING[target], {2: 2, 4: np.arange(lanes) % 2 * 4, 5: 1}, s, mask=0xFFFF, ranges=[allowed])
    assert memory.tolist() == [116, 23]
    assert wave.v[5].tolist() == [x for i in range(8) for x in (100 + 2 * i, 7 + 2 * i)] + [1] * (lanes - 16)
    with pytest.raises(Fault, match="no multiple of 4"):
        run(target, RETURNING[target], {2: 2, 4: 2}, s, ranges=[allowed])
    with pytest.raises(Fault, match="outside every tensor"):
        run(target, RETURNING[target], {2: 2, 4: 8}, s, ranges=[allowed])


def test_atomics_of_64_bits():
    memory, address, allowed = memory_of(np.array([(1 << 32) - 1, 9], np.uint64))
    s = {2: address & 0xFFFFFFFF, 3: address >> 32}
    code = """
    global_atomic_add_x2 v4, v[6:7], s[2:3]
    global_atomic_cmpswap_x2 v[10:11], v4, v[6:9], s[2:3] offset:8 sc0
    """
    wave = run("gfx942", code, {4: 0, 6: 2, 7: 1, 8: 9, 9: 0}, s, mask=1, ranges=[allowed])
    assert memory.tolist() == [(2 << 32) + 1, (1 << 32) + 2] and wave.v[10:12, 0].tolist() == [9, 0]


def test_an_atomic_outside_its_buffer_does_nothing():
    memory, address, allowed = memory_of(np.full(64, 5, np.uint32))
    s = {4: address & 0xFFFFFFFF, 5: address >> 32, 6: 128, 7: 0x27000}
    wave = run(
        "gfx942", "buffer_atomic_swap v2, v1, s[4:7], 0 offen sc0", {1: 4 * np.arange(64), 2: 9}, s, ranges=[allowed]
    )
    assert memory.tolist() == [9] * 32 + [5] * 32 and wave.v[2].tolist() == [5] * 32 + [0] * 32


HISTOGRAM = """
v_and_b32_e32 v1, 28, v0
v_mov_b32_e32 v2, 0
v_mov_b32_e32 v4, 1
ds_write_b32 v1, v2
{barrier}
ds_add_rtn_u32 v3, v1, v4
s_barrier
ds_read_b32 v5, v1
"""


@pytest.mark.parametrize("order", [1, -1])
def test_waves_update_lds_without_a_barrier_between_them(order):
    code = HISTOGRAM.format(barrier="s_barrier")
    made = Machine("gfx942", code, waves=2, order=order).run()
    for wave in made.waves:
        assert set(wave.v[5].tolist()) == {16}
    assert sorted(made.waves[0].v[3].tolist() + made.waves[1].v[3].tolist()) == sorted(list(range(16)) * 8)
    with pytest.raises(Fault, match="a race"):
        Machine("gfx942", HISTOGRAM.format(barrier="s_nop 0"), waves=2, order=order).run()
    with pytest.raises(Fault, match=r"a race: .* updated by waves \[0 1\], loaded or stored by waves \[0 1\]"):
        Machine("gfx942", code.replace("v4\ns_barrier", "v4"), waves=2, order=order).run()


def test_lds_compares_and_swaps():
    """CDNA names the number to compare with first, RDNA the new one."""
    write = "ds_{0}_b32 v1, v2\n"
    code = write.format("write") + "ds_cmpst_rtn_b32 v5, v1, v3, v4\nds_read_b32 v6, v1"
    wave = run("gfx942", code, {1: 0, 2: 7, 3: 7, 4: 8}, mask=1)
    assert wave.v[5:7, 0].tolist() == [7, 8]
    code = write.format("store") + "ds_cmpstore_rtn_b32 v5, v1, v4, v3\nds_load_b32 v6, v1"
    wave = run("gfx1100", code, {1: 0, 2: 7, 3: 7, 4: 8}, mask=1)
    assert wave.v[5:7, 0].tolist() == [7, 8]


def test_flat_addresses_are_those_of_memory():
    values, address, allowed = memory_of(np.arange(64, dtype=np.uint32))
    low = address + 4 * np.arange(64)
    code = "flat_load_dword v2, v[0:1]\nv_add_u32_e32 v2, 1, v2\nflat_store_dword v[0:1], v2"
    run("gfx942", code, {0: low & 0xFFFFFFFF, 1: low >> 32}, ranges=[allowed])
    assert values.tolist() == list(range(1, 65))


def test_scratch_is_of_each_lane():
    code = "scratch_store_dword off, v1, off offset:8\nscratch_load_dword v2, off, off offset:8"
    assert run("gfx942", code, {1: np.arange(64)}, scratch=12).v[2].tolist() == list(range(64))
    with pytest.raises(Fault, match="outside the 8 bytes of scratch"):
        run("gfx942", code, {1: 0}, scratch=8)


def test_scratch_as_a_buffer():
    """Spilled registers on gfx90a: the compiler adds the wave's offset to the buffer that it is given."""
    options = {"scratch_buffer": True, "user_sgprs": 6, "kernarg_sgpr": 4, "scratch": 12}
    code = """
        s_mov_b64 s[10:11], s[2:3]
        s_mov_b64 s[8:9], s[0:1]
        s_add_u32 s8, s8, s7
        s_addc_u32 s9, s9, 0
        buffer_store_dword v1, off, s[8:11], 0 offset:8
        buffer_load_dword v2, off, s[8:11], 0 offset:8
    """
    assert run("gfx90a", code, {1: np.arange(64)}, **options).v[2].tolist() == list(range(64))
    with pytest.raises(Fault, match="outside the 8 bytes of scratch"):
        run("gfx90a", code, {1: 0}, **options | {"scratch": 8})


def test_scalar_loads():
    values, address, allowed = memory_of(np.arange(16, dtype=np.uint32))
    code = "s_load_dwordx2 s[4:5], s[2:3], 0x8\ns_load_dword s6, s[2:3], s4"
    wave = run("gfx942", code, s={2: address & 0xFFFFFFFF, 3: address >> 32}, ranges=[allowed])
    assert wave.s[4:7].tolist() == [2, 3, values.view(np.uint8)[2:6].view(np.uint32)[0]]


@pytest.mark.parametrize(
    ("name", "result"),
    [("u8", 0x82), ("i8", 0xFFFFFF82), ("u16", 0x8382), ("i16", 0xFFFF8382), ("b32", 0x85848382)],
)
def test_scalar_loads_of_a_part(name, result):
    """Of RDNA 4, from the base, an offset in a register and one in the instruction."""
    _, address, allowed = memory_of(np.arange(0x80, 0x88, dtype=np.uint8))
    code = f"s_mov_b32 s4, 1\ns_load_{name} s6, s[2:3], s4 offset:0x1"
    wave = run("gfx1201", code, s={2: address & 0xFFFFFFFF, 3: address >> 32}, ranges=[allowed])
    assert wave.s[6] == result


# ---------------------------------------------------------------- what is not known, and faults of the interpreter


@pytest.mark.parametrize(
    "code",
    [
        "v_frobnicate_b32 v0, v1", "s_frobnicate_b32 s0, s1", "ds_mskor_b32 v0, v1, v2",
        "global_atomic_csub v0, v1, s[0:1]", "v_add_co_u32_e64 v0, s[2:3], v1, v2 clamp",
        "v_cmp_lt_f32_e64 s[2:3], v1, v2 clamp",
        "v_mov_b32_dpp v0, v1 wave_shl:1 row_mask:0xf bank_mask:0xf", "v_add_f32_e64 v0, v1, v2 mul:2",
        "v_mfma_f32_4x4x1_16b_f32 a[0:3], v0, v1, a[0:3]", "v_mul_lo_u32 v0, v1, v2 clamp", "v_add_u32_e32 v0, v1",
        "v_mov_b32_e32 v0, s[0:1:2]", "buffer_load_dword v0, v1, s[0:3], 0 idxen", "s_trap 2", "s_barrier_signal 3",
        "v_cvt_scalef32_pk_fp8_f32 v0, v1, v2, 2.0", "ds_add_u32 v1, v2 offset1:2",
        "s_andn1_saveexec_b64 s[0:1], s[2:3]",
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 2, 2), 3", "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 1",
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 4), 0", "s_denorm_mode 3", "s_round_mode 1",
        "v_mfma_f32_32x32x8_bf16 v[0:15], v[0:1], v[2:3], 0 cbsz:1", "v_mov_b32_e32 v0, v256",
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(code):
    """Before anything runs: an instruction that is misread could give a right result by chance, or fail by chance."""
    with pytest.raises(Fault):
        Machine("gfx942", code)


def test_all_that_is_not_known_is_named_at_once():
    code = "v_first_b32 v0, v1\nv_first_b32 v1, v1\nv_mov_b32_e32 v0, v1\ns_second_b32 s0, s1\nds_third_b32 v0, v1"
    with pytest.raises(Fault, match="v_first_b32 v0, v1.*s_second_b32.*ds_third_b32") as found:
        run("gfx942", code)
    assert str(found.value).count("v_first") == 1


@pytest.mark.parametrize(
    ("code", "s", "result"),
    [
        ("s_flbit_i32_b32 s0, s1", {1: 0x00FF0000}, 8),
        ("s_flbit_i32_b32 s0, s1", {1: 0}, 0xFFFFFFFF),
        ("s_flbit_i32 s0, s1", {1: -8}, 29),
        ("s_flbit_i32 s0, s1", {1: -1}, 0xFFFFFFFF),
        ("s_clz_i32_u64 s0, s[2:3]", {2: 5, 3: 0}, 61),
        ("s_ff1_i32_b32 s0, s1", {1: 0x00FF0000}, 16),
        ("s_ctz_i32_b64 s0, s[2:3]", {2: 0, 3: 2}, 33),
        ("s_ff1_i32_b32 s0, s1", {1: 0}, 0xFFFFFFFF),
        ("s_bitset1_b32 s0, 4", {0: 1}, 17),
        ("s_bitset0_b32 s0, 4", {0: 17}, 1),
        ("s_cmp_eq_u32 s1, s1\ns_cmov_b32 s0, s1", {0: 1, 1: 7}, 7),
        ("s_cmp_lg_u32 s1, s1\ns_cmov_b32 s0, s1", {0: 1, 1: 7}, 1),
        ("s_addk_i32 s0, 0xffff", {0: 3}, 2),
        ("s_addk_i32 s0, 1\ns_cselect_b32 s0, 7, 9", {0: 0x7FFFFFFF}, 7),
        ("s_addk_i32 s0, 1\ns_cselect_b32 s0, 7, 9", {0: 0x7FFFFFFE}, 9),
        ("s_mulk_i32 s0, 0xfffe", {0: 3}, 0xFFFFFFFA),
    ],
)
def test_bits_of_scalars(code, s, result):
    for spelling in spellings(code):
        assert run("gfx942", spelling, s=s).s[0] == result


@pytest.mark.parametrize(
    ("target", "enabled", "wanted"),
    [
        ("gfx942", (True, True, True), {4: 3, 5: 5, 6: 7}),
        ("gfx1100", (True, False, True), {4: 3, 5: 7}),
        ("gfx1201", (True, True, True), {TTMP + 9: 3, TTMP + 7: 5 | 7 << 16}),
    ],
)
def test_a_wave_starts_with_its_arguments_and_numbers(target, enabled, wanted):
    """Of the second wave of workgroup 3, 5, 7: where the arguments lie, the workgroup, and the lanes."""
    given = {"workgroup_ids": enabled, "user_sgprs": 4, "kernarg_sgpr": 2}
    program = Machine(target, "s_nop 0", waves=2, **given).program
    wave = Machine(target, "s_nop 0", waves=2, **given).waves[1]
    program.start(wave, (3, 5, 7), 0x123456789A, np.random.default_rng(0))
    assert {register: wave.s.item(register) for register in wanted} == wanted
    assert wave.get_scalar(2, 2) == 0x123456789A
    assert wave.v[0].tolist() == list(range(wave.width, 2 * wave.width))
    assert target != "gfx1201" or wave.s.item(TTMP + 8) >> 25 & 31 == 1


def test_hidden_arguments_are_those_of_the_launch():
    hidden = ["block_count_x", "block_count_y", "block_count_z", "dynamic_lds_size", "group_size_x", "group_size_y"]
    hidden += ["group_size_z", "grid_dims", "none"]
    places = [(8, 4), (12, 4), (16, 4), (20, 4), (24, 2), (26, 2), (28, 2), (30, 2), (32, 8)]
    arguments = [(0, 8, "global_buffer"), *((*at, f"hidden_{name}") for at, name in zip(places, hidden, strict=True))]
    program = Machine("gfx942", "s_nop 0", arguments=tuple(arguments), kernarg_size=40).program
    found = program.arguments([(77).to_bytes(8, "little")], (4, 5, 6), warps=2, dynamic_lds=96).tobytes()
    assert struct.unpack("<Q4I4HQ", found[:40]) == (77, 4, 5, 6, 96, 128, 1, 1, 3, 0)
    with pytest.raises(Fault, match="an argument has 4 bytes, the kernel expects 8"):
        program.arguments([bytes(4)], (1, 1, 1), 1, 0)


def test_a_kernel_that_prints_is_refused():
    with pytest.raises(UnsupportedError, match=r"test: calls of the host .* tl.device_print"):
        run("gfx942", "s_nop 0", arguments=((0, 8, "hidden_hostcall_buffer"),), kernarg_size=8)


def test_registers_start_as_noise():
    wave = run("gfx942", "s_nop 0")
    assert len(set(wave.v[1])) > 32 and len(set(wave.s[10:50].tolist())) > 30


# Fault -> (object, name of its attribute or key, what it becomes, the test that must notice).
FAULTS = {
    "shift operands swapped": (tables.VECTOR, "v_lshlrev_b32", "u32 u32 -> u32 | a << (b & 31)", "gfx942  | v_lshlrev"),
    "bit field one bit short": (tables.VECTOR, "v_bfe_u32", "u32 u32 u32 -> u32 | bit_field(a, b, c - 1)", "v_bfe_u32"),
    "maximum passes NaN on": (tables.VECTOR, "v_max_f32", "f32 f32 -> f32 | np.maximum(a, b)", "gfx942  | v_max_f32"),
    "conversion truncates": (arithmetic, "bfloat16_bits", lambda x: x.view(np.uint32) >> 16, "v_cvt_pk_bf16_f32"),
    "fma rounds twice": (arithmetic, "fma", lambda a, b, c: a * b + c, test_fma_rounds_once),
    "division scaled the wrong way": (
        arithmetic,
        "div_fmas",
        lambda a, b, c, flag: np.where(flag, a * b + c, arithmetic.fma(a, b, c)),
        lambda: test_division_is_right_everywhere(divide_float32, np.float32, [2.0**126] * 7, (-140, 127)),
    ),
    "DPP moves the other way": (
        vector,
        "moved_lanes",
        lambda modifiers, width: ((np.arange(width) + 1) % width, np.ones(width, bool)),
        lambda: test_dpp_moves_lanes("row_shr:4"),
    ),
    "fp8 of another bias": (
        arithmetic,
        "E4M3_FNUZ",
        arithmetic.E4M3,
        lambda: test_fp8_is_converted_as_pytorch_does("gfx942", "fp8"),
    ),
    "signed bytes are taken for unsigned ones": (
        matrix,
        "kinds_of",
        lambda name, modifiers: ["u8", "u8"],
        lambda: test_mfma_is_a_matmul("gfx942", "v_mfma_i32_16x16x32_i8", 16, 32, "i8"),
    ),
    "MFMA stores the transpose": (
        matrix,
        "mfma_layout",
        lambda *shape, made=matrix.mfma_layout: (*made(*shape)[:2], *made(*shape)[:1:-1]),
        lambda: test_mfma_is_a_matmul(*MFMA[2]),
    ),
    "WMMA of RDNA 3 on RDNA 4": (
        matrix,
        "wmma_layout",
        lambda target, size, made=matrix.wmma_layout: made("gfx1100"),
        lambda: test_wmma_is_a_matmul("gfx1201", "f16"),
    ),
    "races are not looked for": (
        machine.LDS,
        "end_of_interval",
        lambda self, barrier: None,
        lambda: test_waves_exchange_through_lds(1),
    ),
    "phases of loads are those of stores": (
        banks,
        "READ_16_BYTES",
        np.arange(32).reshape(4, 8),
        lambda: [test_cycles_of_an_access(line) for line in BANKS.strip().splitlines()],
    ),
    "a cache line has 64 bytes": (
        lines.LineCounts,
        "__init__",
        lambda self, target: self.__dict__.update(line=64, lines={}),
        lambda: [test_cache_lines_of_an_access(line) for line in LINES.strip().splitlines()],
    ),
    "lines begin where the first lane does": (
        lines,
        "lines_of",
        lambda line, size, addresses, count=lines.lines_of: count(
            line, size, (np.frombuffer(addresses, np.int64) - np.frombuffer(addresses, np.int64)[0]).tobytes()
        ),
        lambda: [test_cache_lines_of_an_access(line) for line in LINES.strip().splitlines()],
    ),
    "one lane's update is lost": (
        atomics,
        "turns",
        lambda address: iter([np.unique(address, return_index=True)[1]]),
        lambda: test_lanes_with_one_address_follow_one_another("gfx942"),
    ),
    "updates are no accesses": (
        machine.LDS,
        "mark_update",
        lambda self, wave, address, size: None,
        lambda: test_waves_update_lds_without_a_barrier_between_them(1),
    ),
    "addresses are not checked": (
        machine.Memory,
        "places",
        lambda self, address, size, word: machine.places(address - machine.FIRST_ADDRESS, size),
        test_memory_is_checked,
    ),
    "lanes that are off are written": (
        machine.Wave,
        "put",
        lambda self, kind, i, value, where=None: self.vector[kind][i].__setitem__(slice(None), value),
        test_lanes_that_are_off_keep_their_registers,
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_the_interpreter_are_noticed(fault):
    """A test of the tests above."""
    where, name, changed, test = FAULTS[fault]
    if where is tables.VECTOR:
        patch = mock.patch.dict(where, tables.read_table(f"{name} | {changed}"))
    else:
        patch = mock.patch.object(where, name, changed)

    def notice():
        banks.phases.cache_clear()
        banks.cycles_of.cache_clear()
        if isinstance(test, str):
            for example in EXAMPLES.strip().splitlines():
                if test in example:
                    test_one_instruction(example)
        else:
            test()

    notice()
    with (
        patch,
        mock.patch.dict(tables.NAMES, {name: changed}),
        pytest.raises((AssertionError, Fault, pytest.fail.Exception)),
    ):
        if where is arithmetic:  # the table holds the function itself
            lines = tables.VOP1 + tables.VOP2 + tables.VOP3
            tables.VECTOR.update(tables.read_table(lines))
        notice()


def test_a_kernel_is_read(tmp_path):
    """Labels, places in the source, registers and arguments."""
    text = """
\t.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
f:
\t.file\t1 "/somewhere" "kernels.py"
\t.loc\t1 12 3
\ts_branch .LBB0_1   ; a comment
.LBB0_1:
\ts_endpgm
\t.amdhsa_kernel f
\t\t.amdhsa_user_sgpr_count 16
\t\t.amdhsa_next_free_vgpr 164
\t\t.amdhsa_accum_offset 100
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t.end_amdhsa_kernel
      - .offset:         24
        .size:           4
        .value_kind:     by_value
    .wavefront_size: 64
"""
    kernel = parse_kernel(text)
    assert (kernel.name, kernel.target, kernel.width, kernel.vgprs, kernel.agprs) == ("f", "gfx942", 64, 100, 64)
    assert kernel.labels[".LBB0_1"] == 1 and kernel.arguments == ((24, 4, "by_value"),)
    assert str(kernel.code[0][0]) == "s_branch .LBB0_1  (kernels.py:12)"
    later = text.replace("amdgcn-amd-amdhsa--gfx942", "amdgpu9.42-amd-amdhsa-unknown-gfx942")  # Triton 3.9
    assert parse_kernel(later) == kernel
    assert not kernel.flushes and not kernel.may_flush
    mode = ".amdhsa_kernel f\n\t\t.amdhsa_float_"
    assert parse_kernel(text.replace(".amdhsa_kernel f", f"{mode}denorm_mode_32 0")).flushes
    for other in ("denorm_mode_32 1", "denorm_mode_16_64 0", "round_mode_32 3"):
        with pytest.raises(Fault, match=other):
            parse_kernel(text.replace(".amdhsa_kernel f", f"{mode}{other}"))
