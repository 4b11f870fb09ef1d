#!/usr/bin/env bash
# The whole system: timeline and call profile of host and GPU, and the state of the device, over a few steps.
#
#   ./get_rocprof_sys.sh                               rocprof-sys-run, else Nsight Systems, else PyTorch's profiler
#   ./get_rocprof_sys.sh --sample                      with call stacks by sampling, which slows the run down
#   ./get_rocprof_sys.sh --num-steps 5 --use-amp       options of the training script go through
#   ./get_rocprof_sys.sh --dry-run                     print the command and run nothing
#   ./get_rocprof_sys.sh --profiler pytorch --output-dir /tmp/profiles
#
# Leaves rocprof_sys/profile_<timestamp>/ with a trace for https://ui.perfetto.dev (version 46 of it for a trace made
# before ROCm 6.3.1). It grows with every step: where it is too large, get_trace.sh is the lighter tool.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/common/profile_common.sh"

take_flag --sample "$@" # sets FLAG (1 or empty), and REST to the other options
setup rocprof_sys/profile "rocprof-sys-run omnitrace-run" nsys --num-steps 2 --warmup-steps 1 -- \
    ${REST[@]+"${REST[@]}"}

[ -z "$FLAG" ] || warn "sampling interrupts every thread many times a second: compare no times of this run"
case $PROFILER in
    rocm)
        warn "every call is recorded, and what does not fit in the trace's buffer is lost: keep to few steps"
        settings=ROCPROFSYS
        [ "$TOOL" = rocprof-sys-run ] || settings=OMNITRACE # its name up to ROCm 6.2
        profile env "${settings}_OUTPUT_PATH=$OUT" "${settings}_TIME_OUTPUT=OFF" \
            "$TOOL" --trace --profile ${FLAG:+--sample cputime} -- "${TRAIN[@]}"
        trace=$(largest "*.proto" "*.pftrace")
        ;;
    nsight)
        stacks=none
        [ -z "$FLAG" ] || stacks=process-tree
        profile nsys profile --trace=cuda,nvtx,osrt --cuda-graph-trace=node --sample="$stacks" --cpuctxsw="$stacks" \
            --output "$OUT/report" "${TRAIN[@]}"
        export_report export.txt nsys export --type sqlite --output "$OUT/report.sqlite" "$OUT/report.nsys-rep"
        report kernel_times.py "$OUT" --top 10 --trace "$OUT/trace.json"
        trace=$(largest trace.json)
        ;;
    pytorch)
        [ -z "$FLAG" ] || fail 1 "PyTorch's profiler does not sample call stacks: leave --sample out"
        profile "${TRAIN[@]}" --enable-pytorch-profiler --profile-memory --profile-dir "$OUT"
        trace=$(largest "trace_*.json")
        report kernel_times.py "$trace" --top 10 # a trace that is cut off would not be read
        ;;
esac

finish "open $trace in https://ui.perfetto.dev"
