# shellcheck shell=bash disable=SC2034,SC2153 # run.sh and setup.sh read what is set here
# Body of get_trace.sh.

setup traces/trace rocprofv3 nsys --num-steps 5 "$@"
if [ "$PROFILER" = rocm ]; then
    domains=(--runtime-trace)
    tool_has --runtime-trace || # ROCm 6.2
        domains=(--hip-runtime-trace --kernel-trace --memory-copy-trace --marker-trace)
    # The CSV files are for the table of kernels.
    profile rocprofv3 "${domains[@]}" --output-format pftrace csv -d "$PLACE" -o trace_%pid% \
        ${EXTRA[@]+"${EXTRA[@]}"} -- "${TRAIN[@]}"
    top_kernels
    open_in_perfetto "*.pftrace"
else
    take_timeline
fi
