#!/usr/bin/env bash
# Hardware metrics of every kernel: use of compute units, caches and memory, from many counters.
#
#   ./get_rocprof_compute.sh                           rocprof-compute, else Nsight Compute, else PyTorch's profiler
#   ./get_rocprof_compute.sh --roof                    with the roofline benchmark (rocprof-compute), which takes longer
#   ./get_rocprof_compute.sh --preset medium --use-amp options of the training script go through
#   ./get_rocprof_compute.sh --dry-run                 print the command and run nothing
#   ./get_rocprof_compute.sh --profiler pytorch --output-dir /tmp/profiles
#
# Leaves rocprof_compute/profile_<timestamp>/ and prints the command that analyses it.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/common/profile_common.sh"

take_flag --roof "$@" # sets FLAG (1 or empty), and REST to the other options
# Every pass over the counters runs the whole script, or every kernel, once more: two steps have all the kernels.
setup rocprof_compute/profile "rocprof-compute omniperf" ncu --num-steps 1 --warmup-steps 1 --no-graph -- \
    ${REST[@]+"${REST[@]}"}

case $PROFILER in
    rocm)
        work=$OUT/workloads/tiny_llama_v$VERSION
        if tool_has --output-directory profile; then
            place=(--output-directory "$work")
        else # ROCm 7.2 and before
            place=(-p "$work")
        fi
        [ -n "$FLAG" ] || place+=(--no-roof)
        profile "$TOOL" profile -n "tiny_llama_v$VERSION" "${place[@]}" -- "${TRAIN[@]}"
        found=$(largest pmc_perf.csv sysinfo.csv "*.db")
        finish "read it with: $TOOL analyze -p $(dirname "$found") --list-stats"
        ;;
    nsight)
        # ncu repeats a kernel for every few counters: the first launch of each kernel, by its full name, is enough.
        profile ncu --set basic --clock-control none --kernel-name-base demangled --kernel-id ::regex:.:1 \
            --export "$OUT/report" "${TRAIN[@]}"
        export_report ncu.csv ncu --import "$OUT/report.ncu-rep" --csv --page raw
        report kernel_counters.py "$OUT" --top 15 --csv "$OUT/counters.csv"
        finish "" "read it with: ncu --import $OUT/report.ncu-rep"
        ;;
    pytorch)
        profile "${TRAIN[@]}" --enable-pytorch-profiler --profile-operators --profile-dir "$OUT"
        report kernel_times.py "$OUT" --top 15 --csv "$OUT/kernels.csv"
        finish "" "these are times alone: counters need rocprof-compute or ncu; the whole table is in $OUT/kernels.csv"
        ;;
esac
