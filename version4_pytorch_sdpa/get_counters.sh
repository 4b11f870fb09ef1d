#!/usr/bin/env bash
# Kernel trace: start and duration of every launch; with --pmc the hardware counters of every kernel.
#
#   ./get_counters.sh                                  rocprofv3, else Nsight Systems, else PyTorch's profiler
#   ./get_counters.sh --pmc SQ_WAVES GRBM_GUI_ACTIVE   counters (rocprofv3 -L lists them); few fit in one run
#   ./get_counters.sh --pmc                            a first choice of counters; ncu reads them on NVIDIA GPUs
#   ./get_counters.sh --preset medium --use-amp        options of the training script go through
#   ./get_counters.sh --dry-run                        print the command and run nothing
#   ./get_counters.sh --profiler pytorch --output-dir /tmp/profiles
#
# Leaves counters/counter_<timestamp>/ with the profiler's files and launches.csv, or counters.csv with --pmc.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/common/profile_common.sh"

take_counters "$@" # sets FLAG (1 or empty), COUNTERS, and REST to the other options
nsight=nsys
[ -z "$FLAG" ] || nsight=ncu
# Operation by operation: ROCm before 7.2.2 loses kernels of a captured graph. They are the same kernels either way.
setup counters/counter rocprofv3 "$nsight" --num-steps 3 --no-graph -- ${REST[@]+"${REST[@]}"}

case $PROFILER${FLAG:+ counters} in
    rocm)
        # ROCm 7 writes a database unless told otherwise; %pid% keeps processes from overwriting each other.
        profile rocprofv3 --kernel-trace --output-format csv -d "$OUT" -o kernels_%pid% -- "${TRAIN[@]}"
        ;;
    "rocm counters")
        [ ${#COUNTERS[@]} -gt 0 ] || COUNTERS=(SQ_WAVES GRBM_GUI_ACTIVE)
        if tool_has --pmc; then
            chosen=(--pmc "${COUNTERS[@]}")
        else # ROCm 6.2 takes them from a file
            chosen=(-i "$OUT/counters.txt")
            counter_file "$OUT/counters.txt"
        fi
        profile rocprofv3 "${chosen[@]}" --output-format csv -d "$OUT" -o counters_%pid% -- "${TRAIN[@]}"
        ;;
    nsight)
        profile nsys profile --trace=cuda,nvtx --cuda-graph-trace=node --sample=none --cpuctxsw=none \
            --output "$OUT/report" "${TRAIN[@]}"
        export_report export.txt nsys export --type sqlite --output "$OUT/report.sqlite" "$OUT/report.nsys-rep"
        ;;
    "nsight counters")
        [ ${#COUNTERS[@]} -gt 0 ] || COUNTERS=(gpu__time_duration.sum sm__throughput.avg.pct_of_peak_sustained_elapsed)
        # ncu repeats a kernel for every few counters: the first launch of each kernel, by its full name, is enough.
        profile ncu --metrics "$(IFS=, && echo "${COUNTERS[*]}")" --clock-control none \
            --kernel-name-base demangled --kernel-id ::regex:.:1 --export "$OUT/report" "${TRAIN[@]}"
        export_report ncu.csv ncu --import "$OUT/report.ncu-rep" --csv --page raw
        ;;
    pytorch)
        profile "${TRAIN[@]}" --enable-pytorch-profiler --profile-dir "$OUT"
        ;;
    "pytorch counters")
        fail 1 "hardware counters need rocprofv3 or ncu, and PyTorch's profiler has none: leave --pmc out for times"
        ;;
esac

if [ -n "$FLAG" ]; then
    report kernel_counters.py "$OUT" --top 15 --csv "$OUT/counters.csv"
    finish "" "every counter of every kernel is in $OUT/counters.csv"
else
    report kernel_times.py "$OUT" --top 15 --launches "$OUT/launches.csv"
    finish "" "every launch is in $OUT/launches.csv"
fi
