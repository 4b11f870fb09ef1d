# shellcheck shell=bash disable=SC2034,SC2153 # run.sh and setup.sh read what is set here
# Body of get_trace.sh.

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

trace_rocm() {
    local domains=(--runtime-trace) formats=(pftrace csv) # the CSV files are for the table of kernels
    tool_has --runtime-trace || # ROCm 6.2
        domains=(--hip-runtime-trace --kernel-trace --memory-copy-trace --marker-trace)
    if [ -n "$ROCPD" ]; then
        tool_has rocpd || fail 2 "--rocpd needs ROCm 7 or later"
        formats=(rocpd)
    fi
    profile rocprofv3 "${domains[@]}" --output-format "${formats[@]}" -d "$PLACE" -o trace_%pid% \
        ${EXTRA[@]+"${EXTRA[@]}"} -- "${TRAIN[@]}"
    [ -z "$ROCPD" ] || convert_rocpd
}

setup traces/trace rocprofv3 nsys --num-steps 5 "$@"
[ -z "$ROCPD" ] || [ "$PROFILER" = rocm ] || fail 2 "--rocpd needs rocprofv3 of ROCm 7 or later"
if [ "$PROFILER" = rocm ]; then
    trace_rocm
    top_kernels
    open_in_perfetto "*.pftrace"
else
    take_timeline
fi
[ -z "$ROCPD" ] || finish "the database answers SQL and: rocpd summary -i $FIRST/trace_*_results.db"
