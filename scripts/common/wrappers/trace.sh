#!/usr/bin/env bash
# Body of get_trace.sh: WRAPPER OPTIONS...
set -euo pipefail
WRAPPER=$1
shift
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

ROCPD=""
own_option() { [ "$1" = --rocpd ] && ROCPD=1; }

convert_rocpd() { # make a timeline of every rank's database
    local place
    places
    for place in "${PLACES[@]}"; do
        show rocpd convert -i "$place/trace_*_results.db" -f pftrace -d "$place" -o trace
        [ -n "$DRY_RUN" ] || rocpd convert -i "$place"/trace_*_results.db -f pftrace -d "$place" -o trace ||
            give_up 1 "rocpd cannot convert its database: leave --rocpd out"
    done
}

setup traces/trace rocprofv3 nsys --num-steps 5 -- "$@"
[ -z "$ROCPD" ] || [ "$PROFILER" = rocm ] || fail 2 "--rocpd needs rocprofv3 of ROCm 7 or later"
case $PROFILER in
    rocm)
        domains=(--runtime-trace)
        tool_has --runtime-trace || # ROCm 6.2
            domains=(--hip-runtime-trace --kernel-trace --memory-copy-trace --marker-trace)
        formats=(pftrace csv) # the CSV files are for the table of kernels
        if [ -n "$ROCPD" ]; then
            tool_has rocpd || fail 2 "--rocpd needs ROCm 7 or later"
            formats=(rocpd)
        fi
        rocprofv3_steady
        profile rocprofv3 "${domains[@]}" ${STEADY_ROCM[@]+"${STEADY_ROCM[@]}"} --output-format "${formats[@]}" \
            -d "$PLACE" -o trace_%pid% ${EXTRA[@]+"${EXTRA[@]}"} -- "${TRAIN[@]}"
        [ -z "$ROCPD" ] || convert_rocpd
        pattern="*.pftrace"
        ;;
    nsight) profile_nsys cuda,nvtx,osrt && pattern="report.sqlite" ;;
    pytorch) profile_pytorch && pattern="trace_*.json" ;;
esac
largest "$pattern"
if [ "$PROFILER" = nsight ]; then
    report kernel_times.py @OUT@ --top 10 --trace @OUT@/trace.json # nsys-ui opens the report itself
    largest trace.json
else
    report kernel_times.py @OUT@ --top 10
fi
finish "" "open $FOUND in https://ui.perfetto.dev"
[ -z "$ROCPD" ] || finish "the database answers SQL and: rocpd summary -i $FIRST/trace_*_results.db"
