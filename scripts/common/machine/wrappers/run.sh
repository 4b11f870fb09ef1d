# shellcheck shell=bash disable=SC2034,SC2153 # the bodies and setup.sh set and use these variables too
# Second half of every profiling wrapper: run the profiler, say why it failed, read and report the result.

NO_KFD="no permission for /dev/kfd: your user must be in the groups render and video"
STEPS="measured steps" # the range that our scripts put around them, NVTX on NVIDIA; empty for other commands
PARTLY=3               # exit status: a part was measured and is kept, another did not come
MISSING="" WORST=1     # the parts that did not come, and the status of the last of them

plain() { sed 's/\x1b\[[0-9;?]*[A-Za-z]//g' | tr -d '\000-\010\013-\037\177'; } # without colours and other escape codes

printable() { printf '%s\n' "${1//[[:cntrl:]]/?}"; } # TEXT: print a line with names, whose codes a terminal would obey

show() { # COMMAND...: print it as it could be typed
    local line
    printf -v line ' %q' "$@"
    echo "${line# }"
}

attempt() { # COMMAND...: show and run it, append what it prints to log.txt, return its status
    local codes
    if [ -n "$PROCESSES" ]; then # torchrun starts the profiler once per rank, with the rank in its command
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun's default, without its warning
        # shellcheck disable=SC2016 # the shell of each rank expands it
        set -- "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$PROCESSES" --no-python \
            bash -c 'mkdir -p "$0/rank$RANK" && exec "${@//@RANK@/$RANK}"' "$OUT" "$@"
    fi
    show "$@"
    [ -z "$DRY_RUN" ] || return 0
    mkdir -p "$OUT" 2>/dev/null || fail 1 "cannot make $OUT: choose a writable folder with --output-dir"
    { show "$@" >>"$OUT/command.txt" && touch "$OUT/log.txt"; } 2>/dev/null ||
        give_up 1 "$OUT cannot be written: is the disk full?"
    LOG_START=$(($(wc -l <"$OUT/log.txt") + 1))
    export ROCPROF_TMPDIR=${ROCPROF_TMPDIR:-$OUT}
    trap : INT # the command and tee.py end by themselves, and the wrapper goes on
    set +e
    # Until tee.py listens, Ctrl-C must not end it: the log would be cut off. -S: it starts sooner.
    "$@" 2>&1 | (trap '' INT && exec "$PYTHON" -S "$SCRIPTS/common/machine/tee.py" "$OUT/log.txt")
    codes=("${PIPESTATUS[@]}")
    set -e
    trap - INT
    case ${codes[1]} in
        0) return "${codes[0]}" ;;
        130) return 130 ;;
        *) give_up 1 "$OUT/log.txt cannot be written: is the disk full?" ;;
    esac
}

log_text() { tail -n "+$LOG_START" "$OUT/log.txt" | plain; } # of the last attempt

# What profilers print after the cause of a failure: empty lines, the names of their files, their end, and stack frames.
NOISE='^[[:space:]]*(INFO( +\|-> +\[[a-z0-9-]+\])?)?[[:space:]]*$|Opened result file: |^ *@ +0x|Check failure stack trace'
NOISE+='|^\[(rocprof-sys|rocprofiler-systems|omnitrace)\].*([Ff]inaliz|Outputting)'

last_lines() { # TEXT: show the end of a log, without NOISE and what torchrun says after a rank has failed
    echo "$NAME: the last lines of the log:" >&2
    sed '/\] failed (exitcode: /q' <<<"$1" | grep -aEv "$NOISE" | tail -n 8 | sed 's/^/    /' >&2 || true
}

failed() { # STATUS: the last attempt failed: exit with its status, its last lines and the reason
    local status=$1
    [ "$status" != "$PARTLY" ] || status=1 # this one is ours
    [ "$1" = 130 ] || last_lines "$(log_text)"
    give_up "$status" "$(reason "$1" "$(log_text)")"
}

profile() { attempt "$@" || failed $?; } # COMMAND...

measured() { # whether a profiler has left anything in the result: these files are written before it measures
    # .rocprofv3: buffers that a killed process leaves, which nothing can read without what was in its memory.
    # .json.tmp: the name of a trace that PyTorch's profiler has not finished.
    [ -d "$OUT" ] && [ -n "$(find "$OUT" -type f -size +0c ! -name command.txt ! -name log.txt ! -name export.txt \
        ! -name "pass_*.txt" ! -name "analysis_*.txt" ! -name "*agent_info.csv" ! -name sysinfo.csv \
        ! -name "*.json.tmp" ! -name profiling_config.yaml ! -path "*/perfmon/*" ! -path "*/.rocprofv3/*" -print -quit)" ]
}

give_up() { # STATUS SENTENCE: exit; what was measured stays, and of a run that left nothing its log
    local sentence=$2 log=$OUT/log.txt
    if measured; then
        sentence+="; what was measured is in $OUT"
    elif [ -d "$OUT" ]; then
        log=${OUT}_failed.log
        [ ! -s "$OUT/log.txt" ] || mv "$OUT/log.txt" "$log"
        rm -rf "$OUT"
        rmdir "$(dirname "$OUT")" 2>/dev/null || true
    fi
    [ ! -f "$log" ] || sentence+=" (log: $log)"
    fail "$1" "$sentence"
}

lost() { # STATUS SENTENCE: a part of the result did not come; the wrapper goes on with the others
    WORST=$1
    [ "$WORST" != "$PARTLY" ] || WORST=1 # this one is ours
    MISSING+="${MISSING:+; }$2"
}

lost_run() { # STATUS WHAT: the last attempt, which should have brought WHAT, failed
    [ "$1" != 130 ] || failed 130
    last_lines "$(log_text)"
    lost "$1" "no $2: $(reason "$1" "$(log_text)")"
}

conclude() { # exit with 3 if parts are missing and others are there
    [ -n "$MISSING" ] || exit 0
    measured || give_up "$WORST" "$MISSING"
    fail "$PARTLY" "only a part was measured: $MISSING (log: $OUT/log.txt)"
}

reason() { # STATUS LOG: the sentence that explains a failure, with the way out where it is known
    local packages
    case $1:$2 in
        130:*) echo "interrupted" ;;
        *"No space left on device"* | *"Disk quota exceeded"*)
            echo "the disk is full, or your quota of it: free some space, or choose another place with --output-dir"
            ;;
        *ERR_NVGPUCTRPERM*)
            echo "no permission for the GPU's counters: the administrator must allow users to read them" \
                "(https://developer.nvidia.com/ERR_NVGPUCTRPERM says how)"
            ;;
        *perf_event_paranoid* | *CAP_PERFMON*)
            echo "no permission for counters: set kernel.perf_event_paranoid to 2 or less, or grant CAP_PERFMON"
            ;;
        *"Unable to open /dev/kfd"* | *"/dev/kfd"*[Pp]"ermission denied"*) echo "$NO_KFD" ;;
        *"unsupported locale setting"*)
            echo "$TOOL needs the locale en_US.UTF-8, which this machine lacks: the administrator can create it with" \
                "locale-gen en_US.UTF-8 (Debian, Ubuntu: package locales)"
            ;;
        *"package was not found in the current execution environment"* | *"does not meet version requirements to use"*)
            packages=$(sed -n "s/.*[Tt]he '\([A-Za-z0-9_.-]*\).*' \(package was\|distribution does\) not .*/\1/p" <<<"$2" |
                paste -sd ' ')
            echo "$TOOL lacks the Python packages ${packages// /, }, or needs other versions: install them with" \
                "$(show python3 -m pip install -r "$(sed -n 's/^See: //p' <<<"$2")")"
            ;;
        *"Failed to import the amdsmi Python library"*) # from ROCm 7.2 on
            echo "$TOOL needs AMD's Python library amdsmi, which isn't in ${ROCM_PATH:-/opt/rocm}/share/amd_smi:" \
                "set ROCM_PATH to the ROCm that has it, or ask the administrator for the package amd-smi-lib"
            ;;
        *"trace-decoder library path not found"*)
            echo "the decoder for thread traces isn't installed: unpack a release of" \
                "https://github.com/ROCm/rocprof-trace-decoder and name its folder with -- --att-library-path FOLDER"
            ;;
        *"Request exceeds the capabilities of the hardware"*)
            echo "these counters don't fit into one run: spread them over several --pmc, one per run"
            ;;
        *"Unable to find all counters"* | *"no counter metrics found"*)
            echo "this GPU or ROCm release lacks some of these counters: rocprofv3 -L lists those that it has"
            ;;
        *"PC sampling configuration is not supported"*)
            echo "this GPU or ROCm release can't sample instructions: Instinct GPUs from the MI200 series on can"
            ;;
        *"columns for key 'Agent_Id'"*) # rocprof-compute of ROCm 7.0 to 7.2
            echo "this $TOOL doesn't work with pandas 3: install an older one with" \
                "$(show python3 -m pip install "pandas<3")"
            ;;
        *"No GPU kernel data collected"* | *"due to no counter csv files"* | *FileNotFoundError*"/workloads/"*".csv'"*)
            # rocprof-compute from 7.13 on | 7 | 6
            echo "no counters of any kernel were read$([ -z "$KERNEL" ] ||
                echo ", perhaps because no kernel's name has '$KERNEL' in it: get_hotspots.sh prints the names")"
            ;;
        *"No module named 'torch'"*)
            echo "$PYTHON has no PyTorch: run scripts/quickstart.sh, or set TINY_LLAMA_PYTHON to one that has it"
            ;;
        *"free(): invalid pointer"* | *"No HIP GPUs are available"*)
            echo "no GPU under the profiler: PyTorch and the profiler must come from the same ROCm release"
            ;;
        137:*) echo "the training script or $TOOL was killed: did the job or the machine have too little memory?" ;;
        *)
            if [ -d "${OUT:-}" ]; then
                echo "the training script or $TOOL ended with exit status $1: see the lines above$(
                    [ "$PROFILER" != nsight ] || echo "; --profiler pytorch works without $TOOL"
                )"
            else
                echo "$TOOL does not start: $(tail -n 1 <<<"$2")"
            fi
            ;;
    esac
}

# ---------------------------------------------------------------- results

places() { # set PLACES to the folders of the results: one per rank with several processes
    local rank
    PLACES=("$OUT")
    [ -z "$PROCESSES" ] || PLACES=("$OUT"/rank*)
    if [ -n "$PROCESSES" ] && [ -n "$DRY_RUN" ]; then # the folders are not there
        PLACES=()
        for ((rank = 0; rank < PROCESSES; rank++)); do PLACES+=("$OUT/rank$rank"); done
    fi
    [ -d "${PLACES[0]}" ] || [ -n "$DRY_RUN" ] || give_up 1 "no rank left a result in $OUT"
}

find_largest() { # PATTERN...: set FOUND to the largest file of the first pattern that the result has
    FOUND=""
    [ -z "$DRY_RUN" ] || return 0
    local pattern
    for pattern in "$@"; do
        FOUND=$(find "$OUT" -name "$pattern" -type f -size +0c -exec ls -S {} + | sed -n 1p)
        [ -z "$FOUND" ] || return 0
    done
    return 1
}

left_no() { echo "$TOOL left no $1: see the log, and check whether the disk is full"; } # PATTERN

largest() { find_largest "$@" || give_up 1 "$(left_no "$1")"; } # PATTERN...

read_result() { # TOOL.py OPTIONS...: read the result of every rank (@OUT@) with a tool of scripts/; print that of rank 0
    local tool=$SCRIPTS/$1 place text
    shift
    [ -z "$DRY_RUN" ] || return 0
    places
    [ ${#PLACES[@]} = 1 ] || printable "rank 0 of ${#PLACES[@]}; the others have the same files in $OUT/rank*"
    for place in "${PLACES[@]}"; do
        text=$("$PYTHON" "$tool" "${@//@OUT@/$place}") || return 1
        [ "$place" != "${PLACES[0]}" ] || echo "$text"
    done
}

not_loaded() { # the line of the log that says that a profiler's library is missing, as up to ROCm 6.4: the script runs on
    grep -a -m 1 "from LD_PRELOAD cannot be preloaded" "$OUT/log.txt"
}

report() { # TOOL.py OPTIONS...
    local line
    ! read_result "$@" || return 0
    ! line=$(not_loaded) || give_up 1 "$TOOL saw no kernel, because its library is missing: $line"
    give_up 1 "there's no table of the kernels: the line above says why"
}

export_report() { # FILE COMMAND...: turn every rank's report of nsys or ncu into a table; write its output to FILE
    local file=$1 place
    shift
    [ -n "$DRY_RUN" ] || largest "report.*-rep"
    places
    for place in "${PLACES[@]}"; do
        show "${@//@OUT@/$place}"
        [ -n "$DRY_RUN" ] || "${@//@OUT@/$place}" >"$place/$file" ||
            give_up "$PARTLY" "$TOOL couldn't export its report: --profiler pytorch works without it"
    done
}

finish() { # SENTENCES...: what the result is, once there is one
    local sentence
    [ -z "$DRY_RUN" ] || return 0
    for sentence in "$@"; do printable "$sentence"; done
}

top_kernels() { report kernel_times.py @OUT@ --top 10; }

open_in_perfetto() { # PATTERN...: say where to open the largest trace of these names
    if find_largest "$@"; then
        finish "" "open $FOUND in https://ui.perfetto.dev"
    else
        lost 1 "$(left_no "$1")"
    fi
}

# ---------------------------------------------------------------- what several wrappers run

profile_nsys() { # TRACED: a report of nsys on the measured steps alone, as SQLite too
    local status=0 recordings="" range=()
    # The scripts' range names are no registered strings, which alone nsys compares unless the variable is 0.
    [ -z "$STEPS" ] || range=(--capture-range=nvtx --nvtx-capture="$STEPS" --capture-range-end=stop
        --env-var=NSYS_NVTX_PROFILER_REGISTER_ONLY=0)
    attempt nsys profile --trace="$1" --cuda-graph-trace=node --sample=none --cpuctxsw=none \
        ${range[@]+"${range[@]}"} ${EXTRA[@]+"${EXTRA[@]}"} --output "$PLACE/report" "${TRAIN[@]}" ||
        status=$?
    [ -n "$DRY_RUN" ] || recordings=$(find "$OUT" -name "*.qdstrm" | sort | paste -sd " ")
    if [ -n "$recordings" ] && { [ $status = 0 ] || grep -q "Importer error" "$OUT/log.txt"; }; then
        fail 1 "this nsys cannot import its recording: open $recordings with Nsight Systems on another machine, or run \
QdstrmImporter -i there; --profiler pytorch works without nsys"
    fi
    [ $status = 0 ] || failed $status
    export_report export.txt nsys export --type sqlite --output @OUT@/report.sqlite @OUT@/report.nsys-rep
}

run_ncu() { # OPTIONS...: a report of ncu on the first launch of each kernel, by its full name, and its table
    local range=() first=::regex:${KERNEL:-.}:1 command named
    if [ -z "$STEPS" ]; then
        warn "ncu looks at the first launch of each kernel in the whole run"
    elif tool_has --nvtx-push-pop-scope; then # autograd launches the backward pass from a thread outside the range
        range=(--nvtx --nvtx-push-pop-scope process --nvtx-include "$STEPS/")
    else
        warn "this ncu cannot select the measured steps: it looks at the whole run"
    fi
    # ncu repeats a kernel for every few counters, and one rank alone cannot repeat a collective kernel.
    [ -z "$PROCESSES" ] || first="::regex:^(?!nccl).*${KERNEL}:1"
    command=("$@" --clock-control none --kernel-name-base demangled --kernel-id "$first" ${EXTRA[@]+"${EXTRA[@]}"}
        --export "$PLACE/report" "${TRAIN[@]}")
    attempt ncu ${range[@]+"${range[@]}"} "${command[@]}" || return $?
    if [ -z "$DRY_RUN" ] && [ -z "$(find "$OUT" -name report.ncu-rep)" ] && [ ${#range[@]} -gt 0 ]; then
        warn "ncu saw no kernel in the measured steps: it now looks at the whole run"
        attempt ncu "${command[@]}" || return $?
    fi
    if [ -z "$DRY_RUN" ] && [ -z "$(find "$OUT" -name report.ncu-rep)" ]; then
        named=" with '$KERNEL' in its name: get_hotspots.sh prints the names"
        lost 1 "ncu saw no kernel${KERNEL:+$named}"
        conclude
    fi
    export_report ncu.csv ncu --import @OUT@/report.ncu-rep --csv --page raw
}

choose_formats() { # set FORMATS to csv, or to rocpd where rocprofv3 calls csv deprecated: it may omit data, from ROCm 10.2
    FORMATS=(csv)
    [ "$TOOL" != rocprofv3 ] || ! rocprofv3 --help 2>&1 | grep -Eqi "direct csv.*deprecated" || FORMATS=(rocpd)
}

selects_part() { # whether the user's options for the profiler select a part of the run
    local options="--(selected-regions|collection-period|(trace-)?(wait|duration|periods))" # the last of rocprof-sys
    [ "$TOOL" != rocprofv3 ] || options="($options|-P[^ ]*)"
    [[ " ${EXTRA[*]-} " =~ \ ${options}[\ =] ]]
}

choose_regions() { # set REGIONS to the options with which rocprofv3 records the measured steps alone, from ROCm 7.0 on
    REGIONS=()
    if [ "$TOOL" != rocprofv3 ] || [ -z "$STEPS" ] || selects_part || ! tool_has --selected-regions; then return 0; fi
    REGIONS=(--marker-trace --selected-regions) # up to ROCm 7.2 it hears the script only with --marker-trace
}

run_rocprofv3() { # FOLDER NAME OPTIONS...: one run of the script; %pid% keeps processes from overwriting each other's files
    attempt rocprofv3 "${@:3}" --output-format "${FORMATS[@]}" -d "$PLACE$1" -o "$2_%pid%" \
        ${EXTRA[@]+"${EXTRA[@]}"} -- "${TRAIN[@]}"
}

record_steps() { # NAME OPTIONS...: run rocprofv3 on the measured steps, or on the whole run if it records no kernel in them
    local status=0 said kernels=1
    run_rocprofv3 "" "$1" "${@:2}" ${REGIONS[@]+"${REGIONS[@]}"} || status=$?
    if [ -n "$DRY_RUN" ] || [ ${#REGIONS[@]} = 0 ]; then
        [ $status = 0 ] || failed $status
        return 0
    fi
    if [ $status = 0 ]; then
        said=$("$PYTHON" "$SCRIPTS/common/profiles/steps_alone.py" "$FIRST") || kernels=""
        [ -z "$kernels" ] || { say "$said" && return 0; }
    elif [[ $(log_text) != *"--selected-regions cannot begin"* ]]; then
        failed $status
    fi
    warn "rocprofv3 recorded no kernel in the measured steps: it now records the whole run"
    find "$OUT" -name "$1_*" -type f -delete # what the first run left has no kernel
    REGIONS=()
    run_rocprofv3 "" "$1" "${@:2}" || failed $?
}

profile_pytorch() { # a trace of PyTorch's own profiler, which sees the steps after the measured ones
    profile "${TRAIN[@]}" ${PYTORCH_OPTIONS[@]+"${PYTORCH_OPTIONS[@]}"} --enable-pytorch-profiler --profile-dir "$PLACE"
}

take_kernels() { # OPTIONS OF ROCPROFV3...: the launches of the script
    case $PROFILER in
        rocm)
            [ "${FORMATS[0]}" != rocpd ] || set -- # --stats acts on csv and json
            record_steps kernels --kernel-trace "$@"
            ;;
        nsight) profile_nsys cuda,nvtx ;;
        pytorch) profile_pytorch ;;
    esac
}

take_timeline() { # a timeline of nsys or PyTorch, its top kernels and where to open it
    if [ "$PROFILER" = nsight ]; then profile_nsys cuda,nvtx,osrt; else profile_pytorch; fi
    top_kernels
    [ "$PROFILER" = nsight ] || open_in_perfetto "trace_*.json"
    [ "$PROFILER" != nsight ] || finish "" "open $FIRST/report.nsys-rep with Nsight Systems; --profiler pytorch \
leaves a trace for https://ui.perfetto.dev"
}
