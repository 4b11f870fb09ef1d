# shellcheck shell=bash
# Body of get_hotspots.sh.

setup hotspots/hotspot rocprofv3 nsys "--num-steps 10" "$@"
take_kernels --stats
report kernel_times.py @OUT@ --top 15 --csv @OUT@/hotspots.csv --json @OUT@/hotspots.json
finish "" "the whole table is in $FIRST/hotspots.csv and hotspots.json"
