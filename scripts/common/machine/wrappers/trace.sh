# shellcheck shell=bash disable=SC2034,SC2153 # run.sh and setup.sh read what is set here
# Body of get_trace.sh.

ROCPD=""
own_option() { [ "$1" = --rocpd ] && ROCPD=1; }

rocpd_commands() { # set ROCPD_COMMANDS to the ways to run rocpd here; ROCm 7.0 has the module alone
    local folder python
    ROCPD_COMMANDS=()
    ! command -v rocpd >/dev/null || ROCPD_COMMANDS+=(rocpd)
    for folder in "${ROCM_PATH:-/opt/rocm}"/lib/python3.*/site-packages; do
        [ -d "$folder/rocpd" ] || continue
        python=${folder%/site-packages} # the module runs under the Python that it was built for
        ROCPD_COMMANDS+=("env PYTHONPATH=$folder ${python##*/} -m rocpd")
    done
}

convert_database() { # PLACE: make a timeline of a rank's database, with the first way that works
    local way words
    for way in ${ROCPD_COMMANDS[@]+"${ROCPD_COMMANDS[@]}"}; do
        read -r -a words <<<"$way"
        show "${words[@]}" convert -i "$1/trace_*_results.db" -f pftrace -d "$1" -o trace | sed 's/\\\*/*/' # a pattern
        [ -z "$DRY_RUN" ] || return 0
        "${words[@]}" convert -i "$1"/trace_*_results.db -f pftrace -d "$1" -o trace 2>&1 | tee -ai "$OUT/log.txt" || continue
        return 0
    done
    return 1
}

why_not_converted() {
    if [ ${#ROCPD_COMMANDS[@]} = 0 ]; then
        echo "rocpd, which converts the database, is neither on PATH nor in ${ROCM_PATH:-/opt/rocm}/lib/python3.*"
    else
        echo "rocpd did not convert the database: it runs only under the Python that its ROCm was built for (tried:" \
            "$(printf '%s, ' "${ROCPD_COMMANDS[@]}")none else is in ${ROCM_PATH:-/opt/rocm})"
    fi
}

convert_rocpd() { # the database stays where this fails
    local place
    places
    [ -n "$DRY_RUN" ] || LOG_START=$(($(wc -l <"$OUT/log.txt") + 1))
    for place in "${PLACES[@]}"; do
        convert_database "$place" && continue
        [ ${#ROCPD_COMMANDS[@]} = 0 ] || last_lines "$(log_text)"
        lost 1 "no timeline, because $(why_not_converted); without --rocpd the timeline is written right away"
        return
    done
}

trace_rocm() {
    local domains=(--runtime-trace)
    tool_has --runtime-trace || # ROCm 6.2
        domains=(--hip-runtime-trace --kernel-trace --memory-copy-trace --marker-trace)
    rocpd_commands
    if [ -n "$ROCPD" ]; then
        tool_has rocpd || fail 2 "--rocpd needs ROCm 7 or later"
        FORMATS=(rocpd)
    elif [ "${FORMATS[0]}" = rocpd ] && [ ${#ROCPD_COMMANDS[@]} -gt 0 ]; then
        ROCPD=1
    else
        FORMATS=(pftrace csv) # the CSV files are for the table of kernels
    fi
    record_steps trace "${domains[@]}"
    [ -z "$ROCPD" ] || convert_rocpd
}

setup traces/trace rocprofv3 nsys "--num-steps 5" "$@"
[ -z "$ROCPD" ] || [ "$PROFILER" = rocm ] || fail 2 "--rocpd needs rocprofv3 of ROCm 7 or later"
if [ "$PROFILER" = rocm ]; then
    trace_rocm
    top_kernels
    if [ -z "$ROCPD" ]; then
        open_in_perfetto "*.pftrace"
    else
        [ -n "$MISSING" ] || open_in_perfetto "*.pftrace"
        finish "the database $FIRST/trace_*_results.db answers SQL, and from ROCm 7.1 on: rocpd summary -i FILE"
    fi
else
    take_timeline
fi
