# shellcheck shell=bash disable=SC2034,SC2153 # the wrappers and setup.sh set and use these variables too
# Second half of every profiling wrapper: run the profiler, say why it failed, read and report the result.

plain() { sed 's/\x1b\[[0-9;?]*[A-Za-z]//g'; } # without colours and other escape codes

show() { # COMMAND...: print it as it could be typed
    local word line=""
    for word in "$@"; do
        [[ $word =~ ^[[:alnum:]_@%+=:,./-]+$ ]] || word=$(printf %q "$word")
        line+=" $word"
    done
    echo "${line# }"
}

make_result() {
    mkdir -p "$OUT" 2>/dev/null || fail 1 "$OUT cannot be made: choose a writable folder with --output-dir"
}

launcher() { # set LAUNCHER to torchrun, which starts the profiler once per rank with the rank in its command
    # shellcheck disable=SC2016 # the shell of each rank expands it
    LAUNCHER=("$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$PROCESSES" --no-python
        bash -c 'mkdir -p "$0/rank$RANK" && exec "${@//@RANK@/$RANK}"' "$OUT")
}

attempt() { # COMMAND...: show and run it, append what it prints to log.txt, return its status
    local codes LAUNCHER=() command
    [ -z "$PROCESSES" ] || launcher
    command=(${LAUNCHER[@]+"${LAUNCHER[@]}"} "$@")
    show "${command[@]}"
    [ -z "$DRY_RUN" ] || return 0
    make_result
    show "${command[@]}" >>"$OUT/command.txt"
    export ROCPROF_TMPDIR=${ROCPROF_TMPDIR:-$OUT}
    set +e
    "${command[@]}" 2>&1 | tee -ai "$OUT/log.txt"
    codes=("${PIPESTATUS[@]}")
    set -e
    [ "${codes[1]}" = 0 ] || give_up 1 "$OUT/log.txt cannot be written: is the disk full?"
    return "${codes[0]}"
}

failed() { give_up "$1" "$(reason "$1" "$(plain <"$OUT/log.txt")")"; } # STATUS: exit with it and the reason

profile() { attempt "$@" || failed $?; } # COMMAND...

give_up() { # STATUS SENTENCE: a failed run leaves its log beside the place of its result, and no result
    local log=${OUT}_failed.log
    if [ -d "$OUT" ]; then
        if mv "$OUT/log.txt" "$log" 2>/dev/null; then set -- "$1" "$2 (log: $log)"; fi
        rm -rf "$OUT"
        rmdir "$(dirname "$OUT")" 2>/dev/null || true
    fi
    fail "$1" "$2"
}

reason() { # STATUS LOG: the sentence that explains a failure
    local status=$1 log=$2 packages
    said() { grep -Eq -- "$1" <<<"$log"; }
    if [ "$status" = 130 ]; then
        echo "interrupted"
    elif said "No space left on device"; then
        echo "the disk is full: free some space, or choose another place with --output-dir"
    elif said "ERR_NVGPUCTRPERM"; then
        echo "no permission for the GPU's counters: the administrator must allow them to users"
    elif said "perf_event_paranoid|CAP_PERFMON"; then
        echo "no permission for counters: kernel.perf_event_paranoid must be 2 or less, or CAP_PERFMON given"
    elif said "Unable to open /dev/kfd|/dev/kfd.*[Pp]ermission denied"; then
        echo "no permission for /dev/kfd: your user must be in the groups render and video"
    elif said "Cannot find a supported arch"; then
        echo "$TOOL does not support this GPU: get_counters.sh reads single counters on it"
    elif said "package was not found in the current execution environment"; then
        packages=$(sed -n "s/.*The '\([A-Za-z0-9_.-]*\).*' package was not found.*/\1/p" <<<"$log" | paste -sd ' ')
        echo "$TOOL misses the Python packages ${packages// /, }: install them with" \
            "python3 -m pip install -r $(sed -n 's/^See: //p' <<<"$log")"
    elif said "ensure that the '.*' locale is available"; then
        echo "$TOOL needs the locale en_US.UTF-8: install it with locale-gen en_US.UTF-8 (package locales)"
    elif said "No module named 'torch'"; then
        echo "$PYTHON has no PyTorch: run scripts/quickstart.sh, or set TINY_LLAMA_PYTHON to one that has it"
    elif said "free\(\): invalid pointer|No HIP GPUs are available"; then
        echo "no GPU under the profiler: PyTorch and the profiler must come from the same ROCm release"
    elif said "unrecognized arguments|unrecognised option"; then
        echo "$TOOL does not know an option: $(grep -E 'unrecogni[sz]ed' <<<"$log" | tail -n 1)"
    elif [ -z "${OUT:-}" ] || [ ! -d "$OUT" ]; then
        echo "$TOOL does not start: $(plain <<<"$log" | tail -n 1)"
    else
        echo "the training script or its profiler ended with exit status $status" \
            "$([ "$PROFILER" != nsight ] || echo "; --profiler pytorch does without $TOOL")"
    fi
}

# ---------------------------------------------------------------- results

places() { # set PLACES to the folders of the results: one per rank with several processes
    PLACES=("$OUT")
    [ -z "$PROCESSES" ] || PLACES=("$OUT"/rank*)
    [ -d "${PLACES[0]}" ] || [ -n "$DRY_RUN" ] || give_up 1 "no rank left a result in $OUT"
}

largest() { # PATTERN...: set FOUND to the largest file of the first name that the result holds; give up without one
    FOUND=""
    [ -z "$DRY_RUN" ] || return 0
    local pattern file most=0 size
    for pattern in "$@"; do
        while IFS= read -r file; do
            size=$(wc -c <"$file")
            [ "$size" -le "$most" ] || { most=$size && FOUND=$file; }
        done < <(find "$OUT" -name "$pattern" -type f | sort)
        [ -z "$FOUND" ] || return 0
    done
    give_up 1 "$TOOL left no $1: see the log, and whether the disk is full"
}

report() { # TOOL.py OPTIONS...: read the result of every rank (@OUT@) with a tool of scripts/; print that of rank 0
    local tool=$SCRIPTS/$1 place target=1
    shift
    [ -z "$DRY_RUN" ] || return 0
    places
    [ ${#PLACES[@]} = 1 ] || echo "rank 0 of ${#PLACES[@]}; the others have the same files in $OUT/rank*"
    exec 3>/dev/null
    for place in "${PLACES[@]}"; do
        "$PYTHON" "$tool" "${@//@OUT@/$place}" >&"$target" ||
            give_up 1 "$TOOL saw no kernel, or its files cannot be read: the sentence above says which"
        target=3
    done
    exec 3>&-
}

export_report() { # FILE COMMAND...: turn every rank's report of nsys or ncu into a table; write its output to FILE
    local file=$1 place
    shift
    [ -n "$DRY_RUN" ] || largest "report.*-rep"
    places
    for place in "${PLACES[@]}"; do
        show "${@//@OUT@/$place}"
        [ -n "$DRY_RUN" ] || "${@//@OUT@/$place}" >"$place/$file" ||
            give_up 1 "$TOOL could not export its report: --profiler pytorch does without it"
    done
}

finish() { # SENTENCES...: what the result is, once there is one
    [ -n "$DRY_RUN" ] || printf '%s\n' "$@"
}

# ---------------------------------------------------------------- what several wrappers run

rocprofv3_steady() { # set STEADY_ROCM to what records only the marked steps, where the script marks them
    STEADY_ROCM=()
    [[ $STEADY != *roctx* ]] || ! tool_has --selected-regions || STEADY_ROCM=(--marker-trace --selected-regions)
}

profile_nsys() { # TRACED [STACKS]: a report of nsys, as SQLite too
    local range=()
    [[ $STEADY != *cuda* ]] || range=(--capture-range=cudaProfilerApi --capture-range-end=stop)
    profile nsys profile --trace="$1" --cuda-graph-trace=node --sample="${2:-none}" --cpuctxsw="${2:-none}" \
        ${range[@]+"${range[@]}"} ${EXTRA[@]+"${EXTRA[@]}"} --output "$PLACE/report" "${TRAIN[@]}"
    export_report export.txt nsys export --type sqlite --output @OUT@/report.sqlite @OUT@/report.nsys-rep
}

run_ncu() { # OPTIONS...: a report of ncu on the first launch of each kernel, by its full name, and its table
    local range=() first=::regex:${KERNEL:-.}:1
    [[ $STEADY != *cuda* ]] || range=(--profile-from-start=off)
    # ncu repeats a kernel for every few counters, and one rank alone cannot repeat a collective kernel.
    [ -z "$PROCESSES" ] || first="::regex:^(?!nccl).*${KERNEL}:1"
    attempt ncu "$@" --clock-control none --kernel-name-base demangled --kernel-id "$first" \
        ${range[@]+"${range[@]}"} ${EXTRA[@]+"${EXTRA[@]}"} --export "$PLACE/report" "${TRAIN[@]}" || return $?
    export_report ncu.csv ncu --import @OUT@/report.ncu-rep --csv --page raw
}

profile_pytorch() { # a trace of PyTorch's own profiler, which sees the steps after the measured ones
    profile "${TRAIN[@]}" --enable-pytorch-profiler --profile-dir "$PLACE"
}
