#!/usr/bin/env bash
# Hot kernels: the time of every kernel over some training steps, the hottest printed.
#
#   ./get_hotspots.sh                                  rocprofv3, else Nsight Systems, else PyTorch's profiler
#   ./get_hotspots.sh --preset medium --use-amp        options of the training script go through
#   ./get_hotspots.sh --dry-run                        print the command and run nothing
#   ./get_hotspots.sh --profiler pytorch --output-dir /tmp/profiles
#
# Leaves hotspots/hotspot_<timestamp>/ with the profiler's files, hotspots.csv and hotspots.json.

set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/common/profile_common.sh"

# Operation by operation: ROCm before 7.2.2 loses kernels of a captured graph. They are the same kernels either way.
setup hotspots/hotspot rocprofv3 nsys --num-steps 10 --no-graph -- "$@"

case $PROFILER in
    rocm)
        # ROCm 7 writes a database unless told otherwise; %pid% keeps processes from overwriting each other.
        profile rocprofv3 --kernel-trace --stats --output-format csv -d "$OUT" -o kernels_%pid% -- "${TRAIN[@]}"
        ;;
    nsight)
        profile nsys profile --trace=cuda,nvtx --cuda-graph-trace=node --sample=none --cpuctxsw=none \
            --output "$OUT/report" "${TRAIN[@]}"
        export_report export.txt nsys export --type sqlite --output "$OUT/report.sqlite" "$OUT/report.nsys-rep"
        ;;
    pytorch)
        profile "${TRAIN[@]}" --enable-pytorch-profiler --profile-dir "$OUT"
        ;;
esac

report kernel_times.py "$OUT" --top 15 --csv "$OUT/hotspots.csv" --json "$OUT/hotspots.json"
finish "" "the whole table is in $OUT/hotspots.csv and hotspots.json"
