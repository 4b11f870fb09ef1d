#!/usr/bin/env bash
# Find the hot kernels over 10 steps (3 with PyTorch's profiler): calls, total and mean time and share, by kernel and by
# kind of kernel.
#
#   ./get_hotspots.sh                                  rocprofv3, else Nsight Systems, else PyTorch's profiler
#   ./get_hotspots.sh --preset medium --use-amp        options of the training script go through
#   ./get_hotspots.sh -- --collection-period 20:5:1    options after -- go to the profiler (here: after start-up)
#   --nproc-per-node N (1): N processes under torchrun, a result per rank   --output-dir DIR (this folder)
#   --profiler auto|rocm|nsight|pytorch (auto)                              --dry-run: print the commands only
# Exit status: 0; 1 no result; 2 a bad option; 3 only a part was measured, and is kept; 130 Ctrl-C; or the script's
#
# Writes hotspots/hotspot_<timestamp>/ with the profiler's files, hotspots.csv and hotspots.json; prints the top 15.
# https://rocm.docs.amd.com/projects/rocprofiler-sdk/en/latest/how-to/using-rocprofv3.html
exec bash "$(dirname "$(realpath "$0")")/wrapper.sh" "$0" "$@"
