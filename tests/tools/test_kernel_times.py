"""The reader of kernel times, on one small run of eight launches written in the form of every profiler.

The sample files follow the column lists of the profilers' sources; the run is the same in all of them: 30 us in five
kernels, of which the GEMM takes 18 us in three launches of 5, 7 and 6 us.
"""

import csv
import gzip
import io
import json
import os
import pathlib
import sqlite3
import subprocess
import sys

import pytest

import kernel_counters
import kernel_times

SAMPLES = pathlib.Path(__file__).parent / "samples"
SCRIPT = pathlib.Path(kernel_times.__file__)
LAUNCHES = [f"rocm-{version}/kernel_trace.csv" for version in ("6.2", "6.4", "7.0")]
LAUNCHES += ["rocpd2csv/kernel_trace.csv", "rocm-7.0/results.sql", "nsys/report.sql"]
LAUNCHES += ["nsys/report_cuda_gpu_trace.csv", "pytorch/trace_gpu.json"]
SUMS = [f"rocm-{version}/kernel_stats.csv" for version in ("6.2", "6.4", "7.0")]
SUMS += ["nsys/report_cuda_gpu_kern_sum.csv", "nsys/stats_output.txt"]


def sample(name, folder):
    """The path of a sample; a database is made from its SQL."""
    if not name.endswith(".sql"):
        return SAMPLES / name
    path = folder / "results.db"
    connection = sqlite3.connect(path)
    connection.executescript((SAMPLES / name).read_text())
    connection.close()
    return path


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize("name", LAUNCHES + SUMS)
def test_every_format_gives_the_same_table(name, tmp_path):
    rows = [
        row for row in kernel_times.table(kernel_times.read_kernels(sample(name, tmp_path))) if row["kind"] == "kernel"
    ]
    first = rows[0]
    assert first["group"] == "GEMM" and first["calls"] == 3
    assert [first[key] for key in ("total_us", "mean_us", "min_us", "max_us")] == pytest.approx([18.0, 6.0, 5.0, 7.0])
    groups = [(row["group"], row["calls"], round(row["total_us"], 3)) for row in rows[1:]]
    assert sorted(groups) == [
        ("attention", 1, 4.0),
        ("copies", 2, 2.5),
        ("normalisation", 1, 2.5),
        ("optimizer", 1, 3.0),
    ]
    assert next(row["kernel"] for row in rows if row["calls"] == 2).startswith(
        "void at::native::vectorized_elementwise"
    )


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_know_their_start(name, tmp_path):
    kernels = [k for k in kernel_times.read_kernels(sample(name, tmp_path)) if k.kind == "kernel"]
    start = kernels[0].start_ns
    assert [round(k.start_ns - start) for k in kernels] == [0, 2000, 9000, 14000, 22000, 26000, 34000, 40000]
    assert [round(k.end_ns - k.start_ns) for k in kernels] == [1000, 5000, 4000, 7000, 2500, 6000, 1500, 3000]
    assert len({k.track for k in kernels}) == 1


@pytest.mark.parametrize("name", ["nsys/report.sql", "nsys/report_cuda_gpu_trace.csv", "pytorch/trace_gpu.json"])
def test_copies_count_as_copies(name, tmp_path):
    kernels = kernel_times.read_kernels(sample(name, tmp_path))
    assert [(k.total_ns, k.group) for k in kernels if k.kind == "copy"] == [(pytest.approx(2000), "copies")]
    assert sum(row["share_percent"] for row in kernel_times.groups(kernels)) == pytest.approx(100)


def test_operators_of_a_cpu_are_counted_without_what_they_call():
    kernels = kernel_times.read_kernels(SAMPLES / "pytorch/trace_cpu.json")
    own = {k.name: k.total_ns for k in kernels if k.track == "1 1"}
    assert own == {"aten::linear": 8e3, "aten::t": 2e3, "aten::addmm": 36e3, "aten::copy_": 4e3, "aten::silu": 9e3}
    assert {k.kind for k in kernels} == {"operator"}
    assert sum(k.total_ns for k in kernels if k.track == "1 2") == 30e3  # another thread runs at the same time


def test_old_statistics_have_no_extremes():
    row = kernel_times.table(kernel_times.read_kernels(SAMPLES / "rocprof-v1/results.stats.csv"))[0]
    assert row["kernel"].startswith("Cijk_") and not row["kernel"].endswith(".kd]")
    assert (row["total_us"], row["min_us"], row["max_us"]) == (18.0, None, None)


def test_other_units_are_converted(tmp_path):
    path = tmp_path / "kern_sum.csv"
    path.write_text(
        "Time (%),Total Time (ms),Instances,Avg (ms),Min (ms),Max (ms),Name\n100,3,2,1.5,1,2,adamw_kernel\n"
    )
    row = kernel_times.table(kernel_times.read_kernels(path))[0]
    assert [row[key] for key in ("total_us", "min_us", "max_us")] == [3000, 1000, 2000]
    path.write_text("Name,Calls,DURATION (usec),AVERAGE (usec),MIN (usec),MAX (usec)\nadamw_kernel,2,3,1.5,1,2\n")
    assert kernel_times.read_kernels(path)[0].total_ns == 3000


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("Cijk_Alik_Bljk_SB_MT64x64x16_SE_K1", "GEMM"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", "GEMM"),
        (
            "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_nn_align8>",
            "GEMM",
        ),
        ("ampere_sgemm_128x64_tn", "GEMM"),
        ("sm90_xmma_gemm_f32f32_tf32f32_f32_nt_n_tilesize64x64x32_cublas", "GEMM"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "GEMM"),
        ("triton_tem_fused_mm_3", "GEMM"),
        ("aten::addmm", "GEMM"),
        ("attention_forward_kernel", "attention"),
        ("attention_backward_dkdv_kernel", "attention"),
        ("attention_backward_dq_kernel", "attention"),
        ("attention_delta_kernel", "attention"),
        ("attn_fwd", "attention"),
        ("bwd_kernel_dk_dv", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x64", "attention"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80", "attention"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 7, false, false>", "attention"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>", "other"),
        ("aten::_log_softmax", "other"),
        ("rmsnorm_forward_kernel", "normalisation"),
        ("add_rms_norm_backward_kernel", "normalisation"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3", "normalisation"),
        ("aten::_fused_rms_norm_backward", "normalisation"),
        ("rope_kernel", "element-wise"),
        ("swiglu_backward_kernel", "element-wise"),
        ("triton_poi_fused_mul_silu_0", "element-wise"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "element-wise"),
        ("adamw_kernel", "optimizer"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("aten::_fused_adamw_", "optimizer"),
        ("triton_poi_fused__foreach_add__foreach_copy__foreach_div__foreach_mul_mul_unbind_0", "optimizer"),
        ("triton_for_fused__foreach_add__foreach_mul_2", "optimizer"),
        ("__amd_rocclr_copyBuffer", "copies"),
        ("__amd_rocclr_fillBufferAligned", "copies"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("MEMORY_COPY_HOST_TO_DEVICE", "copies"),
        (
            "void at::native::elementwise_kernel<128, 2, at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>",
            "copies",
        ),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "copies"),
        ("triton_per_fused__log_softmax_nll_loss_forward_2", "other"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "other"),
    ],
)
def test_groups(name, group):
    assert kernel_times.group_of(name) == group


def test_gzipped_traces_are_read(tmp_path):
    path = tmp_path / "trace_1.json.gz"
    path.write_bytes(gzip.compress((SAMPLES / "pytorch/trace_gpu.json").read_bytes()))
    assert len(kernel_times.read_kernels(path)) == 9


def test_a_folder_gives_its_most_detailed_run_once(tmp_path):
    for process in ("host/11", "host/12"):
        (tmp_path / process).mkdir(parents=True)
        for kind in ("kernel_trace", "kernel_stats", "domain_stats", "counter_collection"):
            (tmp_path / process / f"x_{kind}.csv").write_bytes((SAMPLES / f"rocm-6.4/{kind}.csv").read_bytes())
    kernels = kernel_times.read_kernels(tmp_path)
    assert len(kernels) == 16  # two processes, each read from its trace and not from its statistics again
    assert all(kernel.start_ns is not None for kernel in kernels)


def test_of_piled_up_traces_the_newest_is_read(tmp_path):
    for age, name in ((20, "trace_cpu.json"), (10, "trace_gpu.json")):
        target = tmp_path / name
        target.write_bytes((SAMPLES / "pytorch" / name).read_bytes())
        os.utime(target, (1e9 - age, 1e9 - age))
    assert [path.name for path in kernel_times.files_of(tmp_path)] == ["trace_gpu.json"]


def database_of_graphs(path):
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INT, end INT)")
    connection.close()


def broken_files(folder):
    """(path, words that its error must have) for everything that goes wrong with files of profilers."""
    trace = (SAMPLES / "rocm-6.4/kernel_trace.csv").read_bytes()
    cpu = (SAMPLES / "pytorch/trace_cpu.json").read_bytes()
    database = sample("rocm-7.0/results.sql", folder).read_bytes()
    contents = {
        "empty.csv": (b"", "is empty"),
        "cut.csv": (trace[:-90], "cut off or damaged: line 9"),
        "header.csv": (trace.splitlines()[0] + b"\n", "names no kernel"),
        "letters.csv": (trace.replace(b"1550151853000000", b"soon"), "line 2 has text where a number belongs"),
        "backwards.csv": (trace.replace(b",1550151853001000,", b",1,"), "line 2"),
        "hip_api_stats.csv": (
            (SAMPLES / "rocm-6.4/kernel_stats.csv").read_bytes().replace(b"adamw_kernel", b"hipMalloc"),
            "not kernels",
        ),
        "counter_collection.csv": ((SAMPLES / "rocm-6.4/counter_collection.csv").read_bytes(), "kernel_counters.py"),
        "other.csv": (b"a,b,c,d\n1,2,3,4\n", "no columns of kernel times"),
        "words.txt": (b"just some words\n", "no columns of kernel times"),
        "cut.json": (cpu[:300], "no valid JSON"),
        "other.json": (b'{"steps": []}', "neither a trace"),
        "no_events.json": (b'{"traceEvents": []}', "names no kernel"),
        "cut.json.gz": (gzip.compress(cpu)[:-20], "cannot be unpacked"),
        "cut.db": (database[: len(database) // 2], "damaged or cut-off database"),
        "trace.pftrace": (b"\x0a\x10\x00\x01\x02", "ui.perfetto.dev"),
    }
    for name, (content, words) in contents.items():
        (folder / name).write_bytes(content)
        yield folder / name, words
    database_of_graphs(folder / "graphs.sqlite")
    yield folder / "graphs.sqlite", "--cuda-graph-trace=node"
    yield folder / "missing.csv", "does not exist"
    (folder / "nothing").mkdir()
    yield folder / "nothing", "folder without kernel times"


def test_broken_files_get_one_sentence_that_names_them(tmp_path):
    for path, words in broken_files(tmp_path):
        with pytest.raises(kernel_times.KernelFileError) as caught:
            kernel_times.read_kernels(path)
        message = str(caught.value)
        assert words in message and str(path) in message and "\n" not in message, message


def test_command_line_ends_with_2_and_one_line_on_bad_input(tmp_path):
    (tmp_path / "empty.csv").touch()
    for arguments in ([tmp_path / "empty.csv"], [SAMPLES / "rocm-6.4/kernel_stats.csv", "--launches", "-"]):
        result = run(*arguments)
        assert (result.returncode, result.stdout) == (2, "")
        assert len(result.stderr.splitlines()) == 1 and "Traceback" not in result.stderr
    assert run(SAMPLES / "rocm-6.4/kernel_stats.csv", "--top", 0).returncode == 2
    result = run(SAMPLES / "rocm-6.4/kernel_stats.csv", "--csv", tmp_path / "no folder" / "x.csv")
    assert result.returncode == 1 and "cannot be written" in result.stderr


def test_text_names_kernels_and_groups():
    text = run(SAMPLES / "rocm-6.4/kernel_trace.csv", "--top", 2).stdout
    assert "5 kernels and copies, 8 calls, 0.030 ms in all" in text
    assert "attention_forward_kernel" in text and "adamw_kernel" not in text
    assert "and 3 more with 0.008 ms (26.7 %)" in text
    assert "optimizer            0.003 ms   10.0 %" in text


def test_csv_and_json_hold_the_whole_table(tmp_path):
    path = SAMPLES / "rocm-6.4/kernel_trace.csv"
    assert run(path, "--top", 1, "--csv", tmp_path / "t.csv", "--json", tmp_path / "t.json").returncode == 0
    rows = list(csv.DictReader(io.StringIO((tmp_path / "t.csv").read_text())))
    assert len(rows) == 5 and float(rows[0]["total_us"]) == 18 and float(rows[0]["share_percent"]) == 60
    content = json.loads((tmp_path / "t.json").read_text())
    assert content["groups"][0] == {
        "group": "GEMM",
        "calls": 3,
        "total_us": 18.0,
        "share_percent": 60.0,
        "mean_us": 6.0,
        "min_us": 5.0,
        "max_us": 7.0,
    }
    assert kernel_times.table(kernel_times.read_kernels(tmp_path / "t.json")) == content["kernels"]


def test_launches_and_trace_are_written_in_order_of_time():
    path = SAMPLES / "rocm-7.0/kernel_trace.csv"
    rows = list(csv.DictReader(io.StringIO(run(path, "--launches", "-").stdout)))
    assert [row["group"] for row in rows] == [
        *("copies", "GEMM", "attention", "GEMM", "normalisation", "GEMM", "copies", "optimizer")
    ]
    trace = json.loads(run(path, "--trace", "-").stdout)
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["dur"] for event in events] == [1, 5, 4, 7, 2.5, 6, 1.5, 3]
    assert all(isinstance(event["pid"], int) and isinstance(event["tid"], int) for event in events)


def test_a_written_trace_reads_back_as_the_same_kernels(tmp_path):
    path = sample("nsys/report.sql", tmp_path)
    assert run(path, "--trace", tmp_path / "trace.json").returncode == 0
    before, after = (kernel_times.table(kernel_times.read_kernels(p)) for p in (path, tmp_path / "trace.json"))
    for one, other in zip(before, after, strict=True):
        assert one == pytest.approx(other)


# ---------------------------------------------------------------- kernel_counters.py


@pytest.mark.parametrize("name", ["rocm-6.2", "rocm-6.4", "rocm-7.0", "rocm-7.0/results.sql"])
def test_counters_of_every_format(name, tmp_path):
    path = sample(name, tmp_path) if name.endswith(".sql") else SAMPLES / name / "counter_collection.csv"
    rows = kernel_counters.table(kernel_counters.read_counters(path))
    active = {row["group"]: row for row in rows if row["counter"] == "GRBM_GUI_ACTIVE"}
    assert [active["GEMM"][key] for key in ("launches", "mean", "min", "max")] == [3, 12000, 10000, 14000]
    assert len(active) == 5


def test_metrics_of_nsight_compute_have_units():
    rows = kernel_counters.table(kernel_counters.read_counters(SAMPLES / "ncu/raw.csv"))
    assert [(row["counter"], row["unit"], row["mean"]) for row in rows if row["group"] == "GEMM"] == [
        ("gpu__time_duration.sum", "ns", 6000),
        ("sm__throughput.avg.pct_of_peak_sustained_elapsed", "%", 61),
    ]
    assert "[1] gpu__time_duration.sum ns" in kernel_counters.as_text(rows, 5)


def test_a_counter_that_never_counts_is_named():
    text = kernel_counters.as_text(kernel_counters.table([("adamw_kernel", "SQ_WAVES", "", 0.0)] * 2), 5)
    assert "SQ_WAVES is 0 in every launch" in text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"a,b\n1,2\n", "no column of kernel names"),
        (b'"Kernel_Name","Counter_Name","Counter_Value"\n"k","SQ_WAVES"\n', "cut off or damaged: row 2"),
        (b'"Kernel_Name","Counter_Name","Counter_Value"\n"k","SQ_WAVES",many\n', "text where a number belongs"),
        (b'"Kernel_Name","Counter_Name","Counter_Value"\n', "holds no counter"),
        (b"SQLite format 3\0 and no more", "is damaged"),
    ],
)
def test_broken_counter_files_get_one_sentence(content, words, tmp_path, capsys):
    path = tmp_path / "counter_collection.csv"
    path.write_bytes(content)
    assert kernel_counters.main([str(path)]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and len(captured.err.splitlines()) == 1 and not captured.out
