#!/usr/bin/env bash
# Time every launch of 3 steps and read each kernel's hardware counters, with rocprofv3, else nsys and ncu.
#
#   ./get_counters.sh --preset medium --use-amp     launches and the set "waves"; training options go through
#   ./get_counters.sh --set memory --set matrix     sets: times, waves, memory, matrix, lds, pc, thread-trace
#   ./get_counters.sh --pmc SQ_WAVES --pmc FETCH_SIZE WRITE_SIZE    one run per --pmc; rocprofv3 -L lists counters
#   ./get_counters.sh --set memory --kernel attention -- --kernel-iteration-range 3    after --: profiler options
#   --nproc-per-node N (1): N processes under torchrun, a result per rank   --output-dir DIR (this folder)
#   --profiler auto|rocm|nsight|pytorch (auto)                              --dry-run: print the commands only
# Exit status: 0; 1 no result; 2 a bad option; 3 only a part was measured, and is kept; 130 Ctrl-C; or the script's
#
# Writes counters/counter_<timestamp>/ with kernels.csv and counters.csv; prints the top 15 kernels.
# https://rocm.docs.amd.com/en/docs-7.14.0/reference/gpu-arch/mi300-mi200-performance-counters.html
exec bash "$(dirname "$(realpath "$0")")/wrapper.sh" "$0" "$@"
