"""The reader of profiles, on one small run of eight launches written in the form of every profiler.

The sample files follow the column lists of the profilers' sources; the run is the same in all of them: 30 us in five
kernels, of which the GEMM takes 18 us in three launches of 5, 7 and 6 us.
"""

import contextlib
import gzip
import json
import os
import pathlib
import sqlite3
import subprocess
import sys

import pytest

import analyze_kernel_launches
import analyze_kernel_reduction
import kernel_counters
import kernel_times
from common.command_line import Failure
from common.profiles import group_of, group_table, kernel_table, read_pair, read_profile
from conftest import METADATA, event
from in_process import refused

SAMPLES = pathlib.Path(__file__).parents[1] / "samples"
LAUNCHES = [f"rocm-{version}/kernel_trace.csv" for version in ("6.2", "6.4", "7.0")]
LAUNCHES += ["rocpd2csv/kernel_trace.csv", "rocm-7.0/results.sql", "rocm-7.0/results.json", "rpd/trace.sql"]
LAUNCHES += ["nsys/report.sql", "pytorch/trace_gpu.json", "pytorch/profile_v1.json"]
TRACE = SAMPLES / "rocm-6.4/kernel_trace.csv"


def read_calls(path):
    return read_profile(path).calls


def sample(name, folder):
    """Return the path of a sample; a database is made from its SQL."""
    if not name.endswith(".sql"):
        return SAMPLES / name
    (folder / "results.db").unlink(missing_ok=True)
    connection = sqlite3.connect(folder / "results.db")
    connection.executescript((SAMPLES / name).read_text())
    connection.close()
    return folder / "results.db"


# ---------------------------------------------------------------- kernels of every profiler


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_format_gives_the_same_table(name, tmp_path):
    calls = read_calls(sample(name, tmp_path))
    first, *rows = (row for row in kernel_table(calls) if row["kind"] == "kernel")
    assert first["group"] == "GEMM" and first["calls"] == 3
    assert [first[key] for key in ("total_us", "mean_us", "min_us", "max_us")] == pytest.approx([18.0, 6.0, 5.0, 7.0])
    found = sorted((row["group"], row["calls"], round(row["total_us"], 3)) for row in rows)
    others = [("attention", 1, 4.0), ("copies", 2, 2.5), ("normalisation", 1, 2.5), ("optimizer", 1, 3.0)]
    assert found == others and sum(row["share_percent"] for row in group_table(calls)) == pytest.approx(100)
    kernels = [call for call in calls if call.kind == "kernel"]
    starts = [round(kernel.start_ns - kernels[0].start_ns) for kernel in kernels]
    assert starts == [0, 2000, 9000, 14000, 22000, 26000, 34000, 40000]
    copies = [(call.total_ns, call.group) for call in calls if call.kind == "copy"]
    assert copies == [(pytest.approx(2000), "copies")] * name.startswith(("nsys", "pytorch"))


def test_files_of_the_first_rocprof_are_read(tmp_path):
    (tmp_path / "results.csv").write_text(
        '"Index","KernelName","BeginNs","EndNs","DurationNs"\n0,"adamw.kd",100,350,250\n'
    )
    (launch,) = read_calls(tmp_path / "results.csv")
    assert (launch.name, launch.start_ns, launch.total_ns) == ("adamw", 100, 250)


def test_perfetto_traces_of_rocprof_sys(tmp_path, capsys):
    """Not the host's hipLaunchKernel; from ROCm 7.1 on copies are in the kernels' category, that of a HIP stream."""
    for folder in ("rocprof-sys", "rocprof-sys-7.1"):  # the other file of the first holds none
        kernels = [call for call in read_calls(SAMPLES / folder) if call.kind == "kernel"]
        assert [(k.name, k.total_ns) for k in kernels] == [("adamw_kernel", 4000), ("attention_forward_kernel", 9000)]
    content = (SAMPLES / "rocprof-sys/kernels.proto").read_bytes()
    (tmp_path / "unknown.pftrace").write_bytes(content[: content.index(b"adamw_kernel") + 40])
    refused(kernel_times.main, [tmp_path / "unknown.pftrace"], capsys, "isn't a Perfetto trace, or is damaged")
    (tmp_path / "unknown.pftrace").write_bytes(b"\x0a\x18" + b"\xaa\x06\x15rocm_kernel_dispatch!")
    refused(kernel_times.main, [tmp_path / "unknown.pftrace"], capsys, "in a form that this tool can't read", 0)


def varint(value):
    """Return a number as Perfetto's messages hold it: seven bits a byte, the lowest first."""
    *others, last = (value >> 7 * i & 127 for i in range((max(value, 1).bit_length() + 6) // 7))
    return bytes([*(byte | 128 for byte in others), last])


def message(fields):
    """Return a message of {number of a field: an int, a text, fields of a message, or a list of such}."""
    content = b""
    for number, values in fields.items():
        for value in values if isinstance(values, list) else [values]:
            if isinstance(value, int):
                content += varint(number << 3) + varint(value)
            else:
                part = value.encode() if isinstance(value, str) else message(value)
                content += varint(number << 3 | 2) + varint(len(part)) + part
    return content


def perfetto_kernels(folder, *packets):
    """Return (name, start, end) of the kernels in a trace of these packets."""
    (folder / "trace.pftrace").write_bytes(message({1: list(packets)}))
    calls = read_calls(folder / "trace.pftrace")
    return sorted((call.name, call.start_ns, call.end_ns) for call in calls if call.kind == "kernel")


def begin(now, track, name, category="kernel_dispatch"):
    return {10: 1, 8: now, 11: {9: 1, 11: track, 22: category, 23: name}}


def end(now, track):
    return {10: 1, 8: now, 11: {9: 2, 11: track}}


def test_a_slice_of_perfetto_ends_on_the_track_on_which_it_began(tmp_path):
    """Queues are tracks of one writer: their kernels overlap, and in a track an end belongs to the last beginning."""
    queues = [begin(100, 8, "gemm"), begin(150, 9, "rope"), end(300, 8), end(400, 9)]
    assert perfetto_kernels(tmp_path, *queues) == [("gemm", 100, 300), ("rope", 150, 400)]
    host = [begin(100, 8, "hipLaunchKernel", "hip_api"), begin(150, 9, "gemm"), end(170, 8), end(400, 9), end(500, 9)]
    assert perfetto_kernels(tmp_path, *host) == [("gemm", 150, 400)]
    nested = [begin(100, 8, "gemm"), begin(150, 8, "marker", "hip_api"), end(300, 8), end(400, 8)]
    assert perfetto_kernels(tmp_path, *nested) == [("gemm", 100, 400)]
    others = ("MEMORY_COPY_HOST_TO_DEVICE", "SCRATCH_MEMORY_ALLOC")  # of a stream, from ROCm 7.1 on
    stream = [packet for name in ("gemm", *others) for packet in (begin(100, 8, name, "rocm_hip_stream"), end(300, 8))]
    assert perfetto_kernels(tmp_path, *stream) == [("gemm", 100, 300)]


def test_every_writer_of_perfetto_has_names_a_clock_and_a_default_track_of_its_own(tmp_path):
    """And new ones once it says that its state is cleared."""

    def state(writer, name, now, track):
        names = {1: {1: 1, 2: "kernel_dispatch"}, 2: {1: 1, 2: name}}
        return {10: writer, 13: 1, 6: {1: {1: 64, 2: now}}, 59: {58: 64, 11: {11: track}}, 12: names}

    def slice_of(writer, first, second, track=8):
        """Begin on the default track, end on the one that is named."""
        return {10: writer, 8: first, 11: {9: 1, 10: 1, 3: 1}}, {10: writer, 8: second, 11: {9: 2, 11: track}}

    (first, first_end), (second, second_end) = slice_of(1, 10, 200), slice_of(2, 20, 300)
    both = [state(1, "gemm", 1000, 8), state(2, "rope", 5000, 8), first, second, first_end, second_end]
    wanted = [("gemm", 1010, 1210), ("rope", 5020, 5320)]
    assert perfetto_kernels(tmp_path, *both) == wanted
    cleared = [state(1, "adamw", 9000, 9), *slice_of(1, 1, 50, track=9)]
    assert perfetto_kernels(tmp_path, *both, *cleared) == [("adamw", 9001, 9051), *wanted]
    unnamed = [{10: 1, 13: 1}, begin(9500, 7, "norm"), end(9600, 7), *slice_of(1, 9700, 9800)]
    assert perfetto_kernels(tmp_path, *both, *unnamed) == [*wanted[:1], ("norm", 9500, 9600), *wanted[1:]]


GROUPED = {  # names between semicolons
    "GEMM": """Cijk_Alik_Bljk_SB_MT64x64x16_SE_K1; nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT; ampere_sgemm_128x64_tn;
        void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_nn_align8>;
        sm90_xmma_gemm_f32f32_tf32f32_f32_nt_n_tilesize64x64x32_cublas; triton_tem_fused_mm_3; aten::addmm;
        void cublasLt::splitKreduce_kernel<32, 16, int, float>;
        _matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1; bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2; fused_moe_kernel;
        miopenSp3AsmConv_v30_3_1_gfx9_fp16_dot2_edc_f2x3_stride1; cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1;
        void wgrad_alg0_engine<float, 128, 6, 7, 3, 3, 5, false, 512>(int); aten::_scaled_mm; conv2d_wgrad_kernel;
        gemvx::kernel<int>; cutlass::Kernel2<x>; cublasLt::epilogue_kernel; hipblaslt_kernel; rocblas_scal;
        sm80_xmma_kernel; splitKreduce_kernel<32>; aten::bmm; aten::baddbmm; int8_mm_kernel; naive_conv_nonpacked_fwd;
        winograd_fwd_kernel; convolve_common_engine_float_NHWC; dgrad_2d_kernel; wgrad_2d_kernel; fprop_2d_kernel;
        Custom_Cijk_Alik_Bljk_BBS_BH_MT256x256x64_MI16x16x1_UserArgs_shortname1_gfx950;
        conv_depthwise2d_forward_kernel; aten::mkldnn_convolution; aten::convolution_backward;
        void wvSpltK_hf_sml_<__half, 64, 4>;
        void mul_mat_q<(ggml_type)12, 128, false>(char const*); mul_mat_vec_q<(ggml_type)13, 1, false, false>;
        void batched_matrix_multiplication_matrix_core_64x64x4<64u, 64u, 8u>(dim3); void MatrixMulCUDA<32>(float*)""",
    "attention": """attention_backward_dkdv_kernel; attn_fwd; bwd_kernel_dk_dv; fmha_cutlassF_f32_aligned_64x64_rf;
        void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>;
        cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x64;
        void (anonymous namespace)::softmax_warp_forward<float, float, float, 7, false, false>;
        sage_fwd; aiter::fmha_fwd_hd128_bf16_rtz; kernel_unified_attention_2d; mla_decode_kernel;
        _fwd_grouped_kernel_stage1; _fwd_kernel_stage2; _fwd_kernel; chunk_fwd_kernel_o; chunk_bwd_kernel_dqkwg;
        chunk_gated_delta_rule_fwd_kernel_h_blockdim64; void kn_mla_reduce_v1<128>(MlaReduceParams);
        triton_red_fused__softmax_rsqrt_2; triton_poi_fused_flex_attention_rsqrt_0; cpp_fused__softmax_rsqrt_0;
        bwd_kernel_dv; bwd_kernel_dq; bwd_kernel_fuse; sdpa_kernel; _bwd_preprocess; _ZN5aiter8mla_a8w8E;
        aiter::fmla_fwd; pa_decode_v2; pa_fwd_bf16; mha_fwd_kernel; mha_bwd_kernel; soft_max_f32<true, 0>;
        gated_delta_net_cuda<128, false, false>""",
    "other": """void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>;
        aten::_log_softmax; triton_per_fused__log_softmax_nll_loss_forward_2;
        void fbgemm_gpu::permute_2D_lengths_kernel<int>(int); create_flashinfer_kv_indices_triton;
        split_embedding_backward_codegen_unweighted_kernel<float>(fbgemm_gpu::x); void vllm::moe::topkGatingSoftmax<8>;
        triton_per_fused_all_gather_into_tensor_wait_tensor_0;
        cpp_fused_embedding_mean_0; triton_per_fused__log_softmax_0; triton_per_fused_nll_loss_forward_rsqrt_1;
        triton_poi_fused_embedding_0; triton_per_fused_sigmoid_sum_0; triton_red_fused_sigmoid_0;
        triton_unk_fused_sigmoid_0; softmax_topk_kernel; chunk_cat_kernel; _fwd_kernel_ep_scatter_1;
        _ZN43_GLOBAL__N__1_17_PersistentSoftmax20softmax_warp_forwardIN3c108BFloat16EffLi10ELb1ELb0EEEvPT0_""",
    "communication": """c10d::allreduce_; ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>);
        Memcpy PtoP (Device -> Device); ncclKernel_Generic_4; mscclKernel_Sum_half_Simple_false; rccl_main_kernel;
        void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*);
        void two_shot_all_reduce_kernel<c10::BFloat16>(unsigned long*); one_shot_all_reduce_kernel;
        void vllm::cross_device_reduce_2stage<__hip_bfloat16, 8>(vllm::RankData*); nvshmem_barrier; rocshmem_put;
        void quickreduce::allreduce_prototype_twoshot<quickreduce::x>; void deep_ep::intranode::dispatch<4>;
        void dpsk::ep::internode::combine<false, 8>(int4*);
        void tensorrt_llm::kernels::ar_fusion::allreduce_fusion_kernel_oneshot_lamport<0>(int); gloo:all_reduce;
        userbuffers_fp16_sum_inplace<8>; multimem_all_reduce; one_shot_all_reduce; two_shot_all_reduce;
        all_gather_kernel; reduce_scatter_kernel; all_to_all_kernel; all_reduce_sum_kernel; all_reduce_fusion<8>;
        allreduce_2stage; _ZN7deep_ep9intranode8dispatchILi8ELi768EEEvP4int4""",
    "normalisation": """rmsnorm_forward_kernel; add_rms_norm_backward_kernel; aten::_fused_rms_norm_backward;
        triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3;
        void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 128, true, 1>(float);
        cpp_fused_rsqrt_0; triton_poi_fused_layer_norm_0; layer_norm_kernel; batch_norm_backward; group_norm_kernel;
        layer_norm_fwd_kernel;
        aten::mean; aten::pow; MeanBackward1; PowBackward0; bn_fw_tr_1C11; GammaBetaBackwardCUDAKernel; aten::rsqrt;
        reduce_kernel<512, 1, MeanOps<float>>; pow_tensor_scalar_kernel_impl; reduce_kernel<WelfordOps<float>>;
        RowwiseMomentsCUDAKernel<float>; _ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi64E; l2_norm_f32<32>;
        vllm::rms_norm_static_fp8_quant_kernel<c10::BFloat16>; _ZN5cudnn25bn_fw_tr_1C11_kernel_NCHWIffiLi128ELb1EEEv""",
    "element-wise": """rope_kernel; swiglu_backward_kernel; swiglu_quantize_kernel; triton_poi_fused_mul_silu_0;
        void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>;
        void vllm::act_and_mul_kernel<c10::BFloat16>; SubTensorOpWithScalar1d;
        triton_poi_fused_addcmul_0; cpp_fused_addcmul_0; my_elementwise; silu_kernel; rotary_kernel; sigmoid_kernel;
        vectorized_kernel; unrolled_kernel; aten::add; aten::sub; aten::mul; aten::div_; aten::neg; aten::exp;
        aten::sqrt; aten::sin; aten::cos; aten::where; aten::masked_fill; aten::triu; aten::tril;
        k_bin_bcast<&(op_add(float, float)), float>; unary_op_kernel<&(op_neg(float)), float>; scale_f32(float const*);
        vllm::silu_and_mul_quant_kernel<c10::BFloat16>;
        aten::clamp_min_; aten::leaky_relu_; aten::threshold_backward; aten::gelu_backward; aten::tanh""",
    "optimizer": """adamw_kernel; aten::_fused_adamw_; triton_for_fused__foreach_add__foreach_mul_2; triton_for_fused_2;
        triton_poi_fused__foreach_add__foreach_copy__foreach_div__foreach_mul_mul_unbind_0;
        void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>;
        cpp_fused__foreach_add_0; multi_tensor_apply_kernel<AxpbyFunctor>; aten::_foreach_add_; optimizer aten::mul;
        aten::lerp_; aten::addcdiv_; aten::addcmul_; amp_update_scale_cuda_kernel;
        amp_non_finite_check_and_unscale_cuda_kernel; _ZN2at6native18elementwise_kernelILi128EZNS0_11lerp_scalarEEEv""",
    "copies": """cpy_scalar<&(void cpy_1_scalar<float, float>(char const*, char*))>; quantize_q8_1(float const*);
        concat_cont<unsigned int, 1>; void k_get_rows_float<float, float>(float const*);
        __amd_rocclr_copyBuffer; __amd_rocclr_fillBuffer; Memcpy DtoH (Device -> Pinned); MEMORY_COPY_DTOH;
        void at::native::elementwise_kernel<128, 2, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>;
        void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>; quantize_rows_kernel;
        transpose_kernel;
        void vllm::reshape_and_cache_flash_kernel<__hip_bfloat16>; void (anonymous namespace)::store_kvcache<2048l>;
        batched_transpose_32x32_half; void cudnn::ops::nchwToNhwcKernel<float>; sage_quant_kernel; quantize_kernel;
        concat_and_cache_mla_kernel; copy_blocks_kernel; Memset (Device); CopyDeviceToHost; CatArrayBatchedCopy<float>;
        fast_transpose_kernel; cudnn::ops::nhwcToNchwKernel<float>; aten::_to_copy; aten::to; aten::copy_; aten::clone;
        aten::contiguous; aten::cat; aten::fill_; aten::zero_; aten::zeros; aten::ones_like;
        _ZL13quantize_q8_1PKfPvl""",
}


@pytest.mark.parametrize("group", GROUPED)
def test_groups(group):
    names = [name.strip() for name in GROUPED[group].split(";")]
    assert {name: group_of(name) for name in names} == dict.fromkeys(names, group)


# ---------------------------------------------------------------- PyTorch's traces


def test_on_a_cpu_the_innermost_operators_that_compute_count(tmp_path, capsys):
    kernels = read_calls(SAMPLES / "pytorch/trace_cpu.json")
    # linear and t do nothing themselves; addmm took 40 us, of which its copy took 4
    own = {kernel.name: kernel.total_ns for kernel in kernels}
    assert own == {"aten::addmm": 36e3, "aten::copy_": 4e3, "aten::silu": 9e3, "aten::mm": 30e3}
    assert {kernel.kind for kernel in kernels} == {"operator"}
    content = json.loads((SAMPLES / "pytorch/trace_cpu.json").read_text())
    for version, interpreted in ((1, False), (3, True)):
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(content | {"tiny_llama": METADATA | {"version": version}}))
        assert kernel_times.main([str(path)]) == 0
        assert ("ran in Triton's interpreter" in capsys.readouterr().out) == interpreted


def test_on_a_cpu_a_callee_is_taken_off_its_nearest_caller_alone(tmp_path):
    """That caller's own time is taken off the next one: nothing counts twice, and nothing is taken off twice."""
    operators = [("EmbeddingFunctionBackward", 0, 100), ("aten::matmul", 10, 50), ("aten::mm", 12, 46)]
    operators += [("aten::copy_", 20, 6), ("aten::scatter_", 70, 5), ("aten::mul", 110, 2)]
    events = [event("cpu_op", *one) for one in operators]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    own = [(call.name, call.total_ns / 1e3) for call in read_calls(tmp_path / "trace.json")]
    wanted = [("EmbeddingFunctionBackward", 45), ("aten::mm", 40), ("aten::copy_", 6), ("aten::scatter_", 5)]
    assert own == [*wanted, ("aten::mul", 2)]


PREPARED = {  # caller: what it calls, each of 10 us, and the callers' and callees' own times, in us, that count
    "aten::sum": (["aten::fill_"], {"aten::sum": 90, "aten::fill_": 10}),
    "aten::mul": (["aten::to", "aten::_to_copy"], {"aten::mul": 90, "aten::_to_copy": 10}),
    "aten::native_layer_norm_backward": (["aten::zeros"], {"aten::native_layer_norm_backward": 90, "aten::zeros": 10}),
    "aten::convolution_backward": (["aten::as_strided_"], {"aten::convolution_backward": 100}),
    "aten::native_batch_norm": (
        ["aten::zeros", "aten::zero_"],
        {"aten::native_batch_norm": 80, "aten::zeros": 10, "aten::zero_": 10},
    ),
    "aten::conv2d": (["aten::convolution"], {"aten::convolution": 10}),
    "aten::relu": (["aten::clamp_min"], {"aten::clamp_min": 10}),
    "aten::new_zeros": (["aten::zero_"], {"aten::zero_": 10}),
    "aten::constant_pad_nd": (["aten::fill_", "aten::copy_"], {"aten::fill_": 10, "aten::copy_": 10}),
    "CompiledFunction": (["aten::mm"], {"CompiledFunction": 90, "aten::mm": 10}),  # its own time: the fused kernels
    "Torch-Compiled Region: 0/0": (["CompiledFunction"], {"CompiledFunction": 10}),
    "Torch-Compiled Region: 1/0": (["aten::mm"], {"Torch-Compiled Region: 1/0": 90, "aten::mm": 10}),
}


@pytest.mark.parametrize("caller", PREPARED)
def test_on_a_cpu_an_operator_computes_although_another_prepares_for_it(caller, tmp_path):
    """A third of a convolutional network's time was in operators that clear or convert a tensor first, and was lost."""
    callees, wanted = PREPARED[caller]
    operators = [(caller, 0, 100), *((callee, 10 + 20 * i, 10) for i, callee in enumerate(callees))]
    events = [event("cpu_op", *one) for one in operators]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    assert {call.name: call.total_ns / 1e3 for call in read_calls(tmp_path / "trace.json")} == wanted


def test_no_backward_of_a_script_is_lost(tmp_path):
    """The backward operators of a convolutional network count, though most clear or convert a tensor first."""
    torch = pytest.importorskip("torch")
    layers = (torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
    model = torch.nn.Sequential(*layers, torch.nn.Flatten(), torch.nn.LayerNorm(1800), torch.nn.Linear(1800, 10))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.nn.functional.cross_entropy(model(torch.randn(4, 3, 32, 32)), torch.arange(4)).backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    names = {call.name for call in read_calls(tmp_path / "trace.json")}
    computing = ("native_batch_norm", "native_layer_norm", "max_pool2d_with_indices", "convolution", "nll_loss")
    assert {f"aten::{name}_backward" for name in computing} <= names


@pytest.mark.parametrize("mark", ["optimizer", "Optimizer.step#AdamW.step"])
def test_on_a_cpu_what_runs_in_the_optimizer_is_not_element_wise(mark, tmp_path):
    operators = [("aten::mul", 0, 2), ("aten::sqrt", 10, 3), ("aten::addcdiv_", 14, 4), ("aten::mul", 20, 2)]
    events = [event("user_annotation", mark, 9, 10), *(event("cpu_op", *one) for one in operators)]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    calls = read_calls(tmp_path / "trace.json")
    assert [(call.name, call.group) for call in calls] == [
        ("aten::mul", "element-wise"),
        ("optimizer aten::sqrt", "optimizer"),
        ("aten::addcdiv_", "optimizer"),
        ("aten::mul", "element-wise"),
    ]


def test_kernels_belong_to_the_operator_that_launched_them(tmp_path):
    shapes = {"Input Dims": [[2, 3], [3, 4]], "Input type": ["float", "float"], "Input Strides": [[], []]}
    launches = (("reduce", 10, 1, 7), ("splitK gemm", 12, 3, 7), ("lonely", 16, 2))  # the longest tells the group
    # 0 is no operator's number
    operators = [event("cpu_op", "aten::mm", 0, 5, 7, **shapes), event("cpu_op", "aten::mul", 6, 2, 0)]
    events = [*operators, *(event("kernel", *launch) for launch in launches)]
    file = tmp_path / "trace_x.json"
    file.write_text(json.dumps({"deviceProperties": [{"name": "MI300X"}], "traceEvents": events}))
    profile = read_profile(file)
    product, lonely = profile.operations
    assert (product.us, product.dims, product.group) == (4, [[2, 3], [3, 4]], "GEMM")
    assert product.launches == ("reduce", "splitK gemm")
    assert (lonely.name, lonely.dims, profile.device, profile.steps) == ("lonely", [], "MI300X", None)


def test_a_trace_says_what_it_is(profiled):
    profile = read_profile(profiled[2])
    assert (profile.steps, len(profile.step_ms), profile.metadata["version"]) == (2, 2, 2)
    assert all(time > 0 for time in profile.step_ms) and profile.metadata["peak_memory_mb"] > 50
    assert "(version 2, 2 x 16 tokens, width 32, 1 layers, float32)" in profile.title


@pytest.mark.parametrize(
    ("marked", "launched", "steps"),
    [
        ([], ["cudaGraphLaunch"] * 3, 3),
        ([], ["hipGraphLaunch"] * 2, 2),
        (["optimizer"] * 3, ["cudaGraphLaunch"] * 6, 3),  # torch.compile's own graphs: several in a step
        (["optimizer"] * 2, ["cudaGraphLaunch"], 2),
        (["attention"] * 4, ["cudaGraphLaunch"], 1),  # a layer each; a captured step replays as one graph
        (["attention"] * 4, [], 4),
        (["forward"], [], None),
    ],
)
def test_steps_are_marked_phases_and_else_launches_of_a_graph(marked, launched, steps, tmp_path):
    """Another program marks layers too, and launches several graphs per step: only its optimizer counts."""
    events = [event("user_annotation", name, 100 * i, 10) for i, name in enumerate(marked)]
    events += [event("cuda_runtime", name, 100 * i + 20, 1) for i, name in enumerate(launched)]
    events.append(event("kernel", "gemm", 30, 5))
    file = tmp_path / "trace_x.json"
    content = {"deviceProperties": [{"name": "MI300X"}], "traceEvents": events}
    file.write_text(json.dumps(content | {"tiny_llama": METADATA}))
    assert read_profile(file).steps == steps
    file.write_text(json.dumps(content))
    assert read_profile(file).steps == (marked.count("optimizer") or None)


def test_steps_that_the_trace_denies_are_refused(make_trace, capsys):
    """A number that belongs to another profile made every time per step wrong."""
    path = make_trace("p/trace_1.json", {"gemm": 1}, steps=2)
    refused(analyze_kernel_launches.main, ["--trace-file", path, "--steps", "7"], capsys, "marks 2 steps, not 7: leave")
    assert analyze_kernel_launches.main(["--trace-file", str(path), "--steps", "2"]) == 0


def test_two_optimizers_per_forward_are_no_damage(tmp_path):
    """A script that trains two models in turns marks them so, and its second optimizer ends before its next forward."""
    marks = [("forward", 0, 10), ("optimizer", 20, 5), ("optimizer", 30, 5)]
    events = [event("user_annotation", name, ts + start, us) for start in (0, 100, 200) for name, ts, us in marks]
    file = tmp_path / "trace_x.json"
    file.write_text(json.dumps({"traceEvents": [*events, event("cpu_op", "aten::mm", 5, 3)]}))
    assert kernel_times.main([str(file)]) == 0
    assert read_profile(file).steps == 6


def test_a_packed_trace_is_not_passed_over_for_an_older_one(make_trace, capsys):
    old = make_trace("p/trace_1.json", {"old": 1})
    new = make_trace("p/trace_2.json", {"new": 1})
    packed = new.with_name("trace_2.json.gz")
    packed.write_bytes(gzip.compress(new.read_bytes()))
    os.utime(packed, (2e9, 2e9))
    new.unlink()
    refused(kernel_times.main, [old.parent], capsys, f"{packed} is newer than the unpacked traces in {old.parent}")
    os.utime(packed, (1e9, 1e9))
    assert read_profile(old.parent).calls[0].name == "old"


def test_an_optimizer_that_is_marked_twice_is_one(tmp_path):
    """By the script that is profiled, and by the profiler's watcher."""
    events = []
    for start in (0, 100, 200):
        events += [event("user_annotation", "forward", start, 40), event("kernel", "gemm", start + 10, 5)]
        events += [event("user_annotation", "optimizer", start + 50, 40)]
        events += [event("user_annotation", "optimizer", start + 51, 38)]
    file = tmp_path / "trace_x.json"
    content = {"deviceProperties": [{"name": "MI300X"}], "tiny_llama": METADATA, "traceEvents": events}
    file.write_text(json.dumps(content))
    profile = read_profile(file)
    assert profile.steps == 3 and profile.step_ms == [0.09] * 3


def test_of_piled_up_traces_the_newest_of_whole_steps_is_read(make_trace, capsys):
    make_trace("p/trace_1.json", {"gemm_1": 1})
    folder = make_trace("p/trace_2.json", {"gemm_2": 1}).parent
    partial = make_trace("p/trace_3.json", {"gemm_3": 1}, part="attention")
    partial.write_text("\n" + partial.read_text())  # as PyTorch 2.7 writes it
    assert kernel_times.main([str(folder)]) == 0
    output = capsys.readouterr().out
    assert "\ngemm_2 " in output and "gemm_1" not in output and f"read from {folder}/trace_2.json" in output
    assert read_profile(partial).calls[0].name == "gemm_3" and "attention alone" in read_profile(partial).title
    alone = make_trace("q/trace_1.json", {"gemm": 1}, part="attention").parent
    refused(kernel_times.main, [alone], capsys, "traces of attention only")


def test_a_pair_is_the_newest_whose_runs_are_alike(make_trace):
    make_trace("v1/trace_1.json", {"small": 1})
    first = make_trace("v1/trace_2.json", {"large": 1}, batch_size=64).parent
    make_trace("v2/trace_1.json", {"fused large": 1}, batch_size=64, version=2)
    second = make_trace("v2/trace_2.json", {"fused small": 1}, version=2, peak_memory_mb=7.0).parent
    assert [p.calls[0].name for p in read_pair(first, second)] == ["small", "fused small"]
    make_trace("v2/trace_3.json", {"fused large": 1}, batch_size=64, version=2)
    assert [p.calls[0].name for p in read_pair(first, second)] == ["large", "fused large"]
    other = make_trace("v3/trace_1.json", {"b": 1}, precision="bfloat16", batch_size=64).parent
    with pytest.raises(Failure, match=r"differ \(precision: float32, bfloat16\)"):
        read_pair(first, other)


# ---------------------------------------------------------------- folders and files


def test_a_folder_gives_its_most_detailed_run_once(tmp_path):
    for process in ("host/11", "host/12"):
        (tmp_path / process).mkdir(parents=True)
        for kind in ("kernel_trace", "kernel_stats", "domain_stats", "counter_collection"):
            (tmp_path / process / f"x_{kind}.csv").write_bytes((SAMPLES / f"rocm-6.4/{kind}.csv").read_bytes())
    (tmp_path / "x.pftrace").write_bytes((SAMPLES / "rocprof-sys/kernels.proto").read_bytes())
    assert len(read_calls(tmp_path)) == 16  # two processes, each read from its trace alone
    (tmp_path / "trace_1.json").write_bytes((SAMPLES / "pytorch/trace_gpu.json").read_bytes())
    assert len(read_calls(tmp_path)) == len(read_profile(tmp_path).calls) == 9  # which knows shapes and steps


def two_processes(folder):
    """Return a folder in which one process left the kernels of the samples, and one only the header."""
    (folder / "run").mkdir(parents=True)
    header = TRACE.read_text().splitlines()[0]
    (folder / "run" / "x_1_kernel_trace.csv").write_text(f"{header}\n")
    (folder / "run" / "x_2_kernel_trace.csv").write_bytes(TRACE.read_bytes())
    return folder / "run"


def test_several_results_are_not_added_up(tmp_path, capsys):
    """Each call of a wrapper leaves its commands beside its files."""
    for name in ("hotspot_1", "hotspot_2"):
        result = two_processes(tmp_path / name).parent
        (result / "command.txt").write_text("rocprofv3\n")
        (result / "x_counter_collection.csv").write_bytes((SAMPLES / "rocm-6.4/counter_collection.csv").read_bytes())
        assert len(read_calls(result)) == 8
    for main in (kernel_times.main, kernel_counters.main):
        refused(main, [tmp_path], capsys, f"{tmp_path} holds 2 results: name one of them, such as {result}")
        assert main([str(result)]) == 0


def test_what_is_told_of_one_process_is_not_told_of_several(tmp_path, capsys):
    folder = two_processes(tmp_path)
    command = ["--trace-file", str(folder), "--steps", "1"]
    pair = ["--baseline", str(folder), "--fused", str(folder), "--baseline-steps", "1", "--fused-steps", "1"]
    assert analyze_kernel_launches.main(command) == 0  # only one of them has kernels, and is named
    assert f"{folder}/x_2_kernel_trace.csv: 8 kernels and copies in one step" in capsys.readouterr().out
    assert analyze_kernel_reduction.main(pair) == 0
    (folder / "x_1_kernel_trace.csv").write_bytes(TRACE.read_bytes())
    for main, arguments in ((analyze_kernel_launches.main, command), (analyze_kernel_reduction.main, pair)):
        refused(main, arguments, capsys, f"2 processes: name the file of one, such as {folder}/x_1_kernel_trace.csv")
    assert len(read_calls(folder)) == 16  # a table of kernels adds them up, and names the files


@pytest.mark.parametrize("name", ["rocm-7.0/results.sql", "nsys/report.sql", "rocm-6.2", "rocm-7.0"])
def test_what_is_told_of_one_gpu_is_not_told_of_two(name, tmp_path, capsys):
    """The launches of one look like gaps of the other."""
    if name.endswith(".sql"):
        path = sample(name, tmp_path)
        table, column = ("kernels", "agent_abs_index") if "rocm" in name else ("CUPTI_ACTIVITY_KIND_KERNEL", "deviceId")
        with contextlib.closing(sqlite3.connect(path)) as connection:
            connection.execute(f"UPDATE {table} SET {column} = 7 WHERE rowid > 4")
            connection.commit()
    else:
        path = tmp_path / "kernel_trace.csv"
        header, *rows = (SAMPLES / name / "kernel_trace.csv").read_text().splitlines()
        at = header.split(",").index('"Agent_Id"')
        cells = [row.split(",") for row in rows]
        moved = [",".join([*row[:at], '"Agent 7"', *row[at + 1 :]]) for row in cells[4:]]
        path.write_text("\n".join([header, *rows[:4], *moved, ""]))
    refused(analyze_kernel_launches.main, ["--trace-file", path], capsys, f"{path} holds the kernels of 2 GPUs: ")
    assert kernel_times.main([str(path)]) == 0


def broken_files(folder):
    """Yield (path, words that its error must have) for everything that goes wrong with files of profilers."""
    trace, cpu = TRACE.read_bytes(), (SAMPLES / "pytorch/trace_cpu.json").read_bytes()
    contents = {
        "empty.csv": (b"", "is empty"),
        "cut.csv": (trace[:-90], "cut off or damaged: its last line has no end"),
        "cut_and_ended.csv": (trace[:-90] + b"\n", "cut off or damaged: line 9"),
        "header.csv": (trace.splitlines()[0] + b"\n", "lists no kernel"),
        "letters.csv": (trace.replace(b"1550151853000000", b"soon"), "damaged: invalid literal for int"),
        "quote.csv": (trace.replace(b'"Kind"', b'"Kind', 1) + b"x" * 200_000 + b"\n", "field larger than field limit"),
        "counter_collection.csv": ((SAMPLES / "rocm-6.4/counter_collection.csv").read_bytes(), "kernel_counters.py"),
        "other.csv": (b"a,b,c,d\n1,2,3,4\n", "no kernel times"),
        "cut.json": (cpu[:300], "cut off or damaged"),
        "other.json": (b'{"steps": []}', "not a profiler's trace"),
        "list.json": (b"[1]", "not a profiler's trace"),
        "rocprof.json": (
            b'{"traceEvents": [{}, {"ph": "X", "name": "k", "ts": "1", "dur": "2", "args": {"BeginNs": "1000"}}]}',
            "rocprof's old trace: give its results.db",
        ),
        "rpd.json": (
            b'[ {}\n,{"ph": "X", "name": "k", "ts": "1", "dur": "2", "args": {"desc": "KernelExecution"}}]',
            "made of an .rpd: give that one",
        ),
        "no_events.json": (b'{"traceEvents": []}', "lists no kernel"),
        "profile_v1.json": (b'{"trace": "trace_9.json", "steps_profiled": 2}', "trace_9.json cannot be read"),
        "cut.db": (sample("rocm-7.0/results.sql", folder).read_bytes()[:4000], "cut off or damaged"),
        "report.nsys-rep": (b"NV\0\xff", "nsys export --type sqlite"),
    }
    for name, (content, words) in contents.items():
        (folder / name).write_bytes(content)
        yield folder / name, words
    for table, words in (
        ("CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "--cuda-graph-trace=node"),
        ("TARGET_INFO_GPU", "an export of Nsight Systems without kernels: record it with nsys profile --trace=cuda"),
        ("TARGET_INFO_SYSTEM_ENV", "an export of Nsight Systems without kernels"),  # of a program that used no GPU
        ("OPS", "lists no kernel: the profiler saw no work on a GPU"),
        ("samples", "neither rocpd, rpd nor"),
    ):
        connection = sqlite3.connect(folder / f"{table}.sqlite")
        connection.execute(f"CREATE TABLE {table} (start INT, end INT)")
        connection.close()
        yield folder / f"{table}.sqlite", words
    yield folder / "missing.csv", "does not exist"
    (folder / "nothing").mkdir()
    yield folder / "nothing", "has no kernel times"
    (folder / "packed").mkdir()
    (folder / "packed" / "trace_v1.json.gz").write_bytes(b"")
    yield folder / "packed", "name one of them, such as trace_v1.json.gz"


def test_broken_files_get_one_sentence_that_names_them(tmp_path):
    for path, words in broken_files(tmp_path):
        with pytest.raises(Failure) as caught:
            read_calls(path)
        message = str(caught.value)
        assert words in message and message.count(str(path)) == 1 and "\n" not in message, message


# ---------------------------------------------------------------- kernel_times.py


def test_text_names_kernels_and_groups():
    """In a process of its own, as the wrappers start it."""
    command = [sys.executable, kernel_times.__file__, TRACE, "--top", "2"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "5 kernels and copies, 8 calls, 0.030 ms in all" in text and "\noptimizer         0.003  10.0\n" in text
    assert "attention_forward_kernel" in text and "and 3 more with 0.008 ms (26.7 %)" in text


def test_the_guides_sort_command_orders_the_csv_by_total_time(tmp_path, capsys):
    path, other = tmp_path / "stage4_profile.csv", tmp_path / "kernels.json"
    assert kernel_times.main([str(TRACE), "--csv", str(path), "--json", str(other)]) == 0
    command = ["bash", "-c", f"sort -t',' -k4 -nr {path} | head -20"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [float(line.split(",")[3]) for line in lines[:3]] == [18, 4, 3] and len(lines) == 6
    assert lines[0].endswith("LDSB1") and lines[1].endswith(",attention_forward_kernel")
    content = json.loads(other.read_text())
    group = {"group": "GEMM", "calls": 3, "total_us": 18.0, "share_percent": 60.0, "mean_us": 6.0}
    assert content["groups"][0] == group | {"min_us": 5.0, "max_us": 7.0} and len(content["kernels"]) == 5
    capsys.readouterr()
    assert kernel_times.main([str(TRACE), "--json", "-"]) == 0 and json.loads(capsys.readouterr().out) == content
    refused(kernel_times.main, [TRACE, "--top", 0], capsys, "--top: must be")
    refused(kernel_times.main, [TRACE, "--csv", tmp_path / "no folder" / "x.csv"], capsys, "its folder does not exist")
    refused(kernel_times.main, [TRACE, "--tops", "3"], capsys, "unrecognized arguments: --tops 3; did you mean --top?")


# ---------------------------------------------------------------- counters


def counters_of(path, capsys):
    assert kernel_counters.main([str(path), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)["counters"]


@pytest.mark.parametrize("name", ["rocm-6.2", "rocm-6.4", "rocm-7.0", "rocm-7.0/results.sql"])
def test_counters_of_every_format(name, tmp_path, capsys):
    path = sample(name, tmp_path) if name.endswith(".sql") else SAMPLES / name / "counter_collection.csv"
    active = {row["group"]: row for row in counters_of(path, capsys) if row["counter"] == "GRBM_GUI_ACTIVE"}
    assert [active["GEMM"][key] for key in ("launches", "mean", "min", "max")] == [3, 12000, 10000, 14000]
    assert len(active) == 5


def test_metrics_of_nsight_compute_have_units(capsys):
    rows = [row for row in counters_of(SAMPLES / "ncu/raw.csv", capsys) if row["group"] == "GEMM"]
    assert [(row["counter"], row["unit"], row["mean"]) for row in rows] == [
        ("gpu__time_duration.sum", "ns", 6000),
        ("sm__throughput.avg.pct_of_peak_sustained_elapsed", "%", 61),
    ]
    assert kernel_counters.main([str(SAMPLES / "ncu/raw.csv")]) == 0
    assert "[1] gpu__time_duration.sum ns" in capsys.readouterr().out


def test_the_metrics_that_were_asked_for_are_printed_behind_the_time(tmp_path, capsys):
    """Nsight Compute adds the time and metrics of the launch to every report."""
    metrics = "launch__registers_per_thread,lts__t_sector_hit_rate.pct,gpu__time_duration.sum"
    (tmp_path / "ncu.csv").write_text(f"Kernel Name,{metrics}\n,,%,ns\nk,32,90,5000\n")
    assert kernel_counters.main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:3] == ["  [1] gpu__time_duration.sum ns", "  [2] lts__t_sector_hit_rate.pct %"]
    assert lines[3].split() == ["kernel", "launches", "[1]", "[2]"]


LONG = '"Kernel_Name","Counter_Name","Counter_Value"\n'


def test_named_metrics_are_printed_without_those_that_come_with_them(tmp_path, capsys):
    """Nsight Compute adds average, least and largest to a sum, and metrics of links between chips."""
    metrics = "c2clink__present,dram__bytes_read.avg,dram__bytes_read.sum,gpu__time_duration.sum"
    (tmp_path / "ncu.csv").write_text(f"Kernel Name,{metrics}\n,,Mbyte,Mbyte,ns\nk,0,1,64,5000\n")
    assert kernel_counters.main([str(tmp_path), "--counters", "dram__bytes_read.sum lts__t_sector_hit_rate.pct"]) == 0
    *_, header, line = capsys.readouterr().out.splitlines()
    assert header.split() == ["kernel", "launches", "[1]", "[2]"] and line.split() == ["k", "1", "5,000.0", "64.0"]
    assert kernel_counters.main([str(SAMPLES / "rocm-6.4"), "--counters", "SQ_NO_SUCH"]) == 0  # those that are there
    assert "\n  [1] SQ_WAVES\n" in capsys.readouterr().out


def test_the_mean_of_a_counter_is_over_all_launches(tmp_path, capsys):
    (tmp_path / "x_counter_collection.csv").write_text(LONG + "".join(f'"k","SQ_WAVES",{n}\n' for n in (1, 2, 9)))
    (row,) = counters_of(tmp_path, capsys)
    assert [row[key] for key in ("launches", "mean", "min", "max")] == [3, 4, 1, 9]


def test_the_kernel_with_the_largest_sum_comes_first(tmp_path, capsys):
    """Five launches of 2 are more than one of 9."""
    lines = ['"once","SQ_WAVES",9\n', *['"often","SQ_WAVES",2\n'] * 5]
    (tmp_path / "x_counter_collection.csv").write_text(LONG + "".join(lines))
    assert kernel_counters.main([str(tmp_path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]] == ["often", "once"]


def test_a_counter_that_is_always_0_is_pointed_out(tmp_path, capsys):
    values = {"A": 0, "B": 0, "C": 1}
    lines = [f'"adamw_kernel","{name}",{value}\n' for name, value in values.items()]
    lines += ['"another","A",0\n', '"another","C",0\n']  # of one kernel alone C is no fault of the GPU's
    (tmp_path / "x_counter_collection.csv").write_text(LONG + "".join(lines))
    assert kernel_counters.main([str(tmp_path), "--csv", str(tmp_path / "out.csv")]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith("0 in every launch: A, B (") and last.endswith("scripts/AMD.md, Profilers)")
    assert "adamw_kernel,optimizer,A,,1,0.0,0.0,0.0" in (tmp_path / "out.csv").read_text()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1,2\n", "has no counters"),
        (LONG + '"k","SQ_WAVES"\n', "line 2 has 2 cells of 3"),
        (LONG + '"k","SQ_WAVES","many"\n', "damaged: could not convert string to float: 'many'"),
        (LONG, "no counter of any kernel"),
        (None, "cannot be read"),
    ],
)
def test_broken_counter_files(text, words, tmp_path, capsys):
    path = tmp_path / "counters.csv"
    if text is not None:
        path.write_text(text)
    refused(kernel_counters.main, [path], capsys, words)


def test_a_counter_of_two_passes_has_the_launches_of_one(tmp_path, capsys):
    """The sets waves and matrix share one; each pass runs the script once, rocprofv3's own pmc_1, pmc_2 too."""
    sample = (SAMPLES / "rocm-7.0/counter_collection.csv").read_text()
    for place in ("rank0/pass_0", "rank0/pass_1", "rank1/pass_0", "pass_2/pmc_1"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "counters_7_counter_collection.csv").write_text(sample)
    other = sample.replace("SQ_WAVES", "SQ_BUSY_CYCLES")
    (tmp_path / "pass_2/pmc_1/counters_7_counter_collection.csv").write_text(other)

    def launches(path):
        assert kernel_counters.main([str(path), "--json", "-"]) == 0
        rows = json.loads(capsys.readouterr().out)["counters"]
        return {row["counter"]: row["launches"] for row in rows if row["group"] == "GEMM"}

    assert launches(tmp_path / "rank0") == {"SQ_WAVES": 3, "GRBM_GUI_ACTIVE": 3}
    assert launches(tmp_path)["SQ_WAVES"] == 6  # of two ranks
    assert launches(tmp_path / "pass_2") == {"SQ_BUSY_CYCLES": 3, "GRBM_GUI_ACTIVE": 3}
