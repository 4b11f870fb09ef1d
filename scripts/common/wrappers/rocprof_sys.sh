# shellcheck shell=bash disable=SC2034 # run.sh and setup.sh read what is set here
# Body of get_rocprof_sys.sh.

SAMPLE=""
own_option() { [ "$1" = --sample ] && SAMPLE=1; }

setup rocprof_sys/profile "rocprof-sys-run omnitrace-run" nsys --num-steps 2 --warmup-steps 1 "$@"
[ -z "$SAMPLE" ] || warn "sampling interrupts every thread many times a second: compare no times of this run"
case $PROFILER in
    rocm)
        warn "every call is recorded, and what does not fit in the trace's buffer is lost: keep to few steps"
        settings=ROCPROFSYS
        [ "$TOOL" = rocprof-sys-run ] || settings=OMNITRACE # its name up to ROCm 6.2
        profile env "${settings}_OUTPUT_PATH=$PLACE" "${settings}_TIME_OUTPUT=OFF" \
            "$TOOL" --trace --profile ${SAMPLE:+--sample cputime} ${EXTRA[@]+"${EXTRA[@]}"} -- "${TRAIN[@]}"
        largest "*.proto" "*.pftrace"
        [ -n "$DRY_RUN" ] || grep -aqE "kernel_dispatch|hip_activity|device_hip" "$FOUND" || give_up 1 "$TOOL saw no kernel"
        finish "" "open $FOUND in https://ui.perfetto.dev"
        ;;
    nsight) take_timeline ${SAMPLE:+process-tree} ;;
    pytorch)
        [ -z "$SAMPLE" ] || fail 2 "PyTorch's profiler does not sample call stacks: leave --sample out"
        TRAIN+=(--profile-memory)
        take_timeline
        ;;
esac
