# shellcheck shell=bash disable=SC2034,SC2153 # run.sh and setup.sh read what is set here
# Body of get_counters.sh.

SETS=() PASSES=() ASKED="" # a pass is a string of counters that one run reads
COUNTERS_WANTED=1          # with the times, unless these alone are asked for

ask() { # SET: note what was asked for; on NVIDIA nsys takes the times, ncu reads the counters
    ASKED+=" $1"
    COUNTERS_WANTED=${ASKED// times/}
    if [[ $ASKED == *times* ]]; then NSIGHT=nsys; else NSIGHT=ncu; fi
}

own_option() {
    local names=() name
    case $1 in
        --pmc) # the words up to the next option are its values
            for name in "${@:2}"; do
                [[ $name != -* ]] || break
                names+=("${name//,/ }")
            done
            TAKEN=$((1 + ${#names[@]}))
            if [ ${#names[@]} = 0 ]; then SETS+=(waves); else PASSES+=("${names[*]}"); fi
            ask counters
            ;;
        --set) value_of "$@" && SETS+=("$VALUE") && ask "$VALUE" ;;
        --kernel) value_of "$@" && KERNEL=$VALUE ;;
        *) return 1 ;;
    esac
}

add_passes() { # SET: append the runs of a set of counters
    local vendor name counters before=${#PASSES[@]} table=$PROFILER
    [ "$PROFILER" != pytorch ] || table=rocm # to know the name
    while read -r vendor name counters; do
        [ "$vendor $name" != "$table $1" ] || PASSES+=("$counters")
    done <"$SCRIPTS/common/machine/wrappers/counter_sets.txt"
    [ ${#PASSES[@]} -gt "$before" ] || fail 2 "--set must be times, waves, memory, matrix, lds, pc or thread-trace, not $1"
}

count_rocm() { # one run for each pass; a pass that fails leaves the others
    local number file names chosen others filter=--kernel-include-regex status=0
    tool_has "$filter" || filter=--kernel-names # ROCm 6.2
    for number in "${!PASSES[@]}"; do
        read -r -a names <<<"${PASSES[$number]}"
        chosen=(--pmc "${names[@]}")
        if ! tool_has --pmc; then # ROCm 6.2, and early sources of 6.3, read them from a file
            file=$OUT/pass_$number.txt
            chosen=(-i "$file")
            echo "echo 'pmc: ${names[*]}' > $(printf %q "$file")"
            [ -n "$DRY_RUN" ] || echo "pmc: ${names[*]}" >"$file"
        fi
        [ -z "$KERNEL" ] || chosen+=("$filter" "$KERNEL")
        status=0
        run_rocprofv3 "/pass_$number" counters "${chosen[@]}" || status=$?
        [ $status != 0 ] || continue
        ! refused || status=1
        lost_run $status "${names[*]}"
        ! refused || continue
        others=${PASSES[*]:$((number + 1))} # the script itself fails in every pass
        [ -z "$others" ] || lost $status "not tried after that: $others"
        return 0
    done
}

refused() { # whether rocprofv3 ended the last run: its status is that of an abort then, and says nothing
    local words="all counters for agent|no counter metrics|capabilities of the hardware|SIGABRT|HSA_STATUS"
    [[ $(log_text) =~ $words|"sampling configuration is not supported" ]]
}

count_nsight() { run_ncu --metrics "$(tr ' ' , <<<"${PASSES[*]}")" || lost_run $? counters; }

why_no_counters() { # the sentence for runs that ended well and left no counter
    local line
    if grep -q "all counters for agent" "$OUT/log.txt"; then
        reason 0 "Unable to find all counters"
    elif line=$(not_loaded); then
        echo "the profiler's library is missing: $line"
    elif [ -z "$KERNEL" ]; then
        echo "the profiler saw no kernel"
    elif tool_has --kernel-names; then # ROCm 6.2
        echo "no kernel is called '$KERNEL': ROCm 6.2 compares whole names, which get_hotspots.sh prints"
    else
        echo "no kernel's name has '$KERNEL' in it: get_hotspots.sh prints the names"
    fi
}

name_missing() { # CSV: name the requested counters that did not come, of which rocprofv3 says little
    local counter wanted missing="" list="rocprofv3 -L" named=" ${MISSING//[:;]/ } "
    [ "$PROFILER" = rocm ] || list="ncu --query-metrics"
    read -r -a wanted <<<"${PASSES[*]}"
    for counter in "${wanted[@]}"; do
        grep -Fq ",$counter," "$1" || [[ $named == *" $counter "* ]] || missing+=" $counter"
    done
    [ -z "$missing" ] || lost 1 "these counters are missing:$missing ('$list' lists those of this GPU)"
}

take_counters() { # or go without those that nobody asked for, and say why
    local without="" before=$MISSING
    [ "$PROFILER" != pytorch ] || without="hardware counters need rocprofv3 or ncu"
    [ "$PROFILER" != nsight ] || find_tool ncu || without="ncu, which reads counters, is not installed"
    if [ -n "$without" ] && [ -z "$ASKED" ]; then
        warn "these are times only: $without"
    elif [ -n "$without" ]; then
        lost 1 "$without: for times, leave out --pmc and --set"
    else
        "count_$PROFILER"
        [ -n "$DRY_RUN" ] || read_counters "$before"
    fi
}

read_counters() { # MISSING_BEFORE: the table of what came
    if [ -z "$(find "$OUT" -name '*counter_collection.csv' -o -name ncu.csv -o -path '*/pass_*.db')" ]; then
        [ "$MISSING" != "$1" ] || lost 1 "no counters: $(why_no_counters)"
    elif read_result kernel_counters.py @OUT@ --top 15 --counters "${PASSES[*]}" --csv @OUT@/counters.csv; then
        name_missing "$FIRST/counters.csv"
        finish "" "every counter of every kernel is in $FIRST/counters.csv"
    else
        lost 1 "the counters can't be read: the line above says why"
    fi
}

take_times() { # a run of its own, because reading counters slows kernels down
    take_kernels
    report kernel_times.py @OUT@ --top 15 --csv @OUT@/kernels.csv
    finish "" "the whole table is in $FIRST/kernels.csv, every launch in the profiler's files next to it"
}

sampling_options() { # pc or thread-trace: set SAMPLING, or refuse what the installed release does not have
    local since="it came with ROCm 6.4"
    SAMPLING=(--pc-sampling-beta-enabled --pc-sampling-method host_trap --pc-sampling-unit time
        --pc-sampling-interval 1000)
    [ "$1" = pc ] || SAMPLING=(--att ${KERNEL:+--kernel-include-regex "$KERNEL"})
    [ "$PROFILER" = rocm ] || fail 2 "--set $1 needs rocprofv3"
    ! tool_has "${SAMPLING[0]}" || return 0
    if [ "$1" = thread-trace ] && tool_has --pc-sampling-beta-enabled; then # ROCm 6.4
        since="it offers that only with its decoder of thread traces, libatt_decoder_trace.so, in the folder lib of ROCm"
    fi
    fail 2 "--set $1: rocprofv3 of ROCm ${RELEASE:-here} has no ${SAMPLING[0]} ($since)"
}

sample_instructions() { # pc or thread-trace
    local files="*pc_sampling*.csv" status=0 FORMATS=(csv)
    [ "$1" = pc ] || files="*.att"
    sampling_options "$1"
    [ "$1" != pc ] || warn "AMD calls PC sampling a beta, which can freeze the GPU (an MI300X before ROCm 7.0)"
    [ "$1" != pc ] || [ -z "$KERNEL" ] || warn "PC sampling samples all kernels: --kernel $KERNEL doesn't limit it"
    export ROCPROFILER_PC_SAMPLING_BETA_ENABLED=on # ROCm 6.4 asks for it
    run_rocprofv3 "/$1" "$1" "${SAMPLING[@]}" || status=$?
    if [ $status != 0 ]; then
        ! refused || status=1
        lost_run $status "$1"
    elif [ -n "$DRY_RUN" ] || [ -n "$(find "$OUT" -name "$files" -size +0c)" ]; then
        finish "" "the samples are in $FIRST/$1"
    elif [ "$1" = thread-trace ]; then
        lost 1 "no thread trace: $(why_no_counters)"
    else
        lost 1 "no samples: rocprofv3 left no $files, which this GPU may not support"
    fi
}

setup counters/counter rocprofv3 nsys "--num-steps 3" "$@"
[ -n "$ASKED" ] || SETS=(times waves) # the counters where they can be had
for set in ${SETS[@]+"${SETS[@]}"}; do # refuse before anything runs
    case $set in
        times) ;;
        pc | thread-trace) sampling_options "$set" ;;
        *) add_passes "$set" ;;
    esac
done
for set in ${SETS[@]+"${SETS[@]}"}; do
    case $set in
        times) take_times ;;
        pc | thread-trace) sample_instructions "$set" ;;
    esac
done
[ ${#PASSES[@]} = 0 ] || take_counters
