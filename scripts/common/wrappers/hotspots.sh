# shellcheck shell=bash
# Body of get_hotspots.sh.

setup hotspots/hotspot rocprofv3 nsys --num-steps 10 -- "$@"
case $PROFILER in
    rocm) # ROCm 7 writes a database by default; %pid% keeps processes from overwriting each other's files
        profile rocprofv3 --kernel-trace --stats --output-format csv -d "$PLACE" -o kernels_%pid% \
            ${EXTRA[@]+"${EXTRA[@]}"} -- "${TRAIN[@]}"
        ;;
    nsight) profile_nsys cuda,nvtx ;;
    pytorch) profile_pytorch ;;
esac
report kernel_times.py @OUT@ --top 15 --csv @OUT@/hotspots.csv --json @OUT@/hotspots.json
finish "" "the whole table is in $FIRST/hotspots.csv and hotspots.json"
