# shellcheck shell=bash disable=SC2034 # run.sh and setup.sh read what is set here
# Body of get_rocprof_sys.sh.

setup rocprof_sys/profile "rocprof-sys-run omnitrace-run" nsys "--num-steps 2 --warmup-steps 1" "$@"
case $PROFILER in
    rocm)
        warn "every call is recorded, and whatever doesn't fit into the trace's buffer is lost: run only a few steps"
        settings=ROCPROFSYS
        [ "$TOOL" = rocprof-sys-run ] || settings=OMNITRACE # its name up to ROCm 6.2
        profile env "${settings}_OUTPUT_PATH=$PLACE" "${settings}_TIME_OUTPUT=OFF" \
            "$TOOL" --trace --profile ${EXTRA[@]+"${EXTRA[@]}"} -- "${TRAIN[@]}"
        find_largest "*.proto" "*.pftrace" || { lost 1 "$(left_no "*.proto")" && conclude; }
        top_kernels
        open_in_perfetto "*.proto" "*.pftrace"
        ;;
    nsight) take_timeline ;;
    pytorch)
        PYTORCH_OPTIONS=(--profile-memory)
        take_timeline
        ;;
esac
