#!/usr/bin/env bash
# Timeline of some training steps: what the host calls, what the GPU runs, and the gaps between.
#
#   ./get_trace.sh                                  rocprofv3, else Nsight Systems, else PyTorch's profiler
#   ./get_trace.sh --preset medium --use-amp        options of the training script go through
#   ./get_trace.sh --no-graph                       operation by operation: ROCm before 7.2.2 loses kernels of a graph
#   ./get_trace.sh --dry-run                        print the command and run nothing
#   ./get_trace.sh --profiler pytorch --output-dir /tmp/profiles
#
# Leaves traces/trace_<timestamp>/ with a trace for https://ui.perfetto.dev.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/common/profile_common.sh"

setup traces/trace rocprofv3 nsys --num-steps 5 -- "$@"

case $PROFILER in
    rocm)
        if tool_has --runtime-trace; then
            domains=(--runtime-trace)
        else # ROCm 6.2
            domains=(--hip-runtime-trace --kernel-trace --memory-copy-trace --marker-trace)
        fi
        # ROCm 7 writes a database unless told otherwise; %pid% keeps processes from overwriting each other.
        profile rocprofv3 "${domains[@]}" --output-format pftrace -d "$OUT" -o trace_%pid% -- "${TRAIN[@]}"
        trace=$(largest "*.pftrace")
        ;;
    nsight)
        profile nsys profile --trace=cuda,nvtx,osrt --cuda-graph-trace=node --sample=none --cpuctxsw=none \
            --output "$OUT/report" "${TRAIN[@]}"
        export_report export.txt nsys export --type sqlite --output "$OUT/report.sqlite" "$OUT/report.nsys-rep"
        report kernel_times.py "$OUT" --top 10 --trace "$OUT/trace.json"
        trace=$(largest trace.json)
        ;;
    pytorch)
        profile "${TRAIN[@]}" --enable-pytorch-profiler --profile-dir "$OUT"
        trace=$(largest "trace_*.json")
        report kernel_times.py "$trace" --top 10 # a trace that is cut off would not be read
        ;;
esac

finish "open $trace in https://ui.perfetto.dev"
