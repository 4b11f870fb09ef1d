# shellcheck shell=bash disable=SC2034 # run.sh and setup.sh read what is set here
# Body of get_rocprof_compute.sh.

ROOF="" OPERATORS="" COUNTERS_WANTED=1
own_option() {
    case $1 in
        --roof) ROOF=1 ;;
        --torch-trace) OPERATORS=1 ;;
        --kernel) value_of "$@" && KERNEL=$VALUE ;;
        full | no-roof | roof-only)
            fail 2 "'$1' is no option: --roof adds the roofline to the counters, --roof -- --roof-only measures it alone"
            ;;
        *) return 1 ;;
    esac
}

check_spaces() { # the tool joins the command's words with spaces and splits them again
    local word
    for word in "${TRAIN[@]}"; do
        [[ $word != *" "* ]] ||
            fail 1 "$TOOL splits the command at spaces, and '$word' has one: use a folder without spaces"
    done
}

choose_operators() { # let rocprof-compute mark the operators of PyTorch: set TRACE, and TRAIN to a command that it can change
    TRACE=()
    [ -n "$OPERATORS" ] || return 0
    [ -z "$PROCESSES" ] || fail 2 "--torch-trace marks the operators of one process: leave out --nproc-per-node"
    tool_has --torch-trace profile --experimental ||
        fail 2 "this $TOOL has no --torch-trace: it needs ROCm 7.12 or later, so leave it out"
    # It puts its script between the interpreter and ours if the command's first word begins with python.
    [[ ${PYTHON##*/} == python* ]] || fail 2 "--torch-trace needs an interpreter named python..., got $PYTHON"
    TRACE=(--experimental --torch-trace)
    PATH=${PYTHON%/*}:$PATH
    TRAIN[0]=${PYTHON##*/}
}

list_operators() { # WORKLOAD: write the tree of the operators to operators.txt, which makes a table of their counters
    show "$TOOL" analyze -p "$1" --experimental --list-torch-operators
    if "$TOOL" analyze -p "$1" --experimental --list-torch-operators >"$OUT/operators.txt" 2>&1; then
        find_largest consolidated.csv && return 0
    fi
    last_lines "$(plain <"$OUT/operators.txt")"
    lost 1 "no counters by operator: $(reason 1 "$(plain <"$OUT/operators.txt")")"
}

analyse() { # WORKLOAD: write the speed-of-light table of each of the top kernels to analysis_N.txt
    local kernel
    for kernel in 0 1 2 3 4; do
        show "$TOOL" analyze -p "$1" -k $kernel -b 2
        "$TOOL" analyze -p "$1" -k $kernel -b 2 >"$OUT/analysis_$kernel.txt" 2>&1 || break
    done
    grep -q "Metric" "$OUT/analysis_0.txt" || {
        last_lines "$(plain <"$OUT/analysis_0.txt")"
        give_up "$PARTLY" "$TOOL cannot analyse its profile: $(reason 1 "$(plain <"$OUT/analysis_0.txt")")"
    }
}

profile_rocm() {
    local work=$OUT/workloads/$WORKLOAD gpus=$PROCESSES place files library=lib/librocprofiler-sdk.so
    check_spaces
    choose_operators
    # A folder of this call alone: from ROCm 10.0 on one that is not empty needs --overwrite.
    place=(--output-directory "$work") files=("results_*.csv*" "pmc_perf*.csv*" "*.db") # from 10.2 on packed
    tool_has --output-directory profile || place=(-p "$work") files=(pmc_perf.csv) # up to ROCm 7.2
    [ -n "$ROOF" ] || place+=(--no-roof)
    # ROCm 7.0 and 7.1 look for it in /opt/rocm alone.
    if [ -e "${ROCM_PATH:-}/$library" ] && [ ! -e "/opt/rocm/$library" ] && tool_has --rocprofiler-sdk-library-path profile; then
        place+=(--rocprofiler-sdk-library-path "$ROCM_PATH/$library")
    fi
    [ -z "$KERNEL" ] || place+=(-k "$KERNEL")
    # Each pass over the counters runs the command again, so torchrun goes inside, and one workload holds every GPU.
    [ -z "$PROCESSES" ] || TRAIN=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$PROCESSES"
        "${TRAIN[@]:1}")
    PROCESSES=""
    profile "$TOOL" profile -n "$WORKLOAD" "${place[@]}" ${TRACE[@]+"${TRACE[@]}"} ${EXTRA[@]+"${EXTRA[@]}"} -- "${TRAIN[@]}"
    # What a finished pass leaves: sysinfo.csv is written before.
    find_largest "${files[@]}" || [ -n "$DRY_RUN" ] || {
        last_lines "$(log_text)"
        give_up 1 "$TOOL left no ${files[0]}: $(reason 0 "$(log_text)")"
    }
    [ -z "$DRY_RUN" ] || return 0
    work=$(dirname "$(find "$work" -name sysinfo.csv)") # from ROCm 7.12 on a folder for the rank, in a Slurm job too
    analyse "$work"
    report common/profiles/limits.py @OUT@
    if [ -n "$OPERATORS" ] && list_operators "$work"; then
        finish "" "the operators are in $OUT/operators.txt, and their kernels' counters in $FOUND"
    fi
    finish "" "read more about a kernel with: $(show "$TOOL" analyze -p "$work" -k 0 ${gpus:+--gpu-id 0})"
}

profile_ncu() {
    run_ncu --set basic --metrics "$("$PYTHON" "$SCRIPTS/common/profiles/limits.py")" || failed $?
    report kernel_counters.py @OUT@ --top 1 --csv @OUT@/counters.csv --json @OUT@/counters.json >/dev/null
    report common/profiles/limits.py @OUT@
    finish "" "read more with: $(show ncu --import "$FIRST/report.ncu-rep")"
}

# Every pass runs the whole script, or every kernel, once more: two steps have all the kernels.
setup rocprof_compute/profile "rocprof-compute omniperf" ncu "--num-steps 1 --warmup-steps 1" "$@"
[ "$PROFILER" = rocm ] || [ -z "$OPERATORS" ] || fail 2 "--torch-trace is rocprof-compute's, and $TOOL runs here: leave it out"
case $PROFILER in
    rocm) profile_rocm ;;
    nsight) profile_ncu ;;
    pytorch)
        PYTORCH_OPTIONS=(--profile-operators)
        profile_pytorch
        report kernel_times.py @OUT@ --top 15 --csv @OUT@/kernels.csv
        finish "" "these are times only, because counters need rocprof-compute or ncu; the whole table is in $OUT"
        ;;
esac
