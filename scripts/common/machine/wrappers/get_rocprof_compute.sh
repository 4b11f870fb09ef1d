#!/usr/bin/env bash
# Find what limits the top kernels: occupancy, bandwidth compared with its peak, cache hit rates, use of matrix units.
#
#   ./get_rocprof_compute.sh --preset medium --use-amp     rocprof-compute, else ncu, else PyTorch's profiler (times)
#   ./get_rocprof_compute.sh --kernel attention            only kernels with this word in their name
#   ./get_rocprof_compute.sh --roof                        with rocprof-compute's roofline benchmark: takes longer
#   ./get_rocprof_compute.sh --torch-trace                 counters by PyTorch operator too: ROCm 7.12 or later
#   ./get_rocprof_compute.sh -- -b 2                       options after -- go to the profiler (block 2: fewer runs)
#   --nproc-per-node N (1): N processes under torchrun, ROCm: one result    --output-dir DIR (this folder)
#   --profiler auto|rocm|nsight|pytorch (auto)                              --dry-run: print the commands only
# Exit status: 0; 1 no result; 2 a bad option; 3 only a part was measured, and is kept; 130 Ctrl-C; or the script's
#
# Writes rocprof_compute/profile_<timestamp>/ with the profile, counters and limits.csv; prints the top 5 kernels and
# a command that shows more. https://rocm.docs.amd.com/projects/rocprofiler-compute/en/latest/
exec bash "$(dirname "$(realpath "$0")")/wrapper.sh" "$0" "$@"
