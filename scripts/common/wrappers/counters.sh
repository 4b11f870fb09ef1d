# shellcheck shell=bash disable=SC2034 # run.sh and setup.sh read what is set here
# Body of get_counters.sh.

SETS=() PASSES=() ASKED="" # a pass is a string of counters that one run reads

ask() { # SET: note what was asked for; on NVIDIA nsys takes the times, ncu reads the counters
    ASKED+=" $1"
    [ "$1" = times ] || COUNTERS_WANTED=1
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
    done <"$SCRIPTS/common/wrappers/counter_sets.txt"
    [ ${#PASSES[@]} -gt "$before" ] || fail 2 "--set must be times, waves, memory, matrix, lds, pc or thread-trace, not $1"
}

count_rocm() { # one run for each pass; stop at the first that fails
    local number file names chosen
    for number in "${!PASSES[@]}"; do
        read -r -a names <<<"${PASSES[$number]}"
        chosen=(--pmc "${names[@]}" ${KERNEL:+--kernel-include-regex "$KERNEL"})
        if ! tool_has --pmc; then # ROCm 6.2 reads them from a file
            file=$OUT/pass_$number.txt
            chosen=(-i "$file" ${KERNEL:+--kernel-names "$KERNEL"})
            echo "echo 'pmc: ${names[*]}' > $file"
            [ -n "$DRY_RUN" ] || { mkdir -p "$OUT" && echo "pmc: ${names[*]}" >"$file"; }
        fi
        run_rocprofv3 "/pass_$number" counters "${chosen[@]}" || return $?
    done
}

count_nsight() { run_ncu --metrics "$(tr ' ' , <<<"${PASSES[*]}")"; }

name_missing() { # CSV: name the requested counters that did not come, of which rocprofv3 says little
    local counter wanted missing="" some="" list="rocprofv3 -L"
    [ "$PROFILER" = rocm ] || list="ncu --query-metrics"
    read -r -a wanted <<<"${PASSES[*]}"
    for counter in "${wanted[@]}"; do
        if grep -Fq ",$counter," "$1" 2>/dev/null; then some=1; else missing+=" $counter"; fi
    done
    [ -n "$some" ] || give_up 1 "none of the counters came: '$list' lists those of this GPU"
    [ -z "$missing" ] || warn "these counters did not come:$missing; '$list' lists those of this GPU"
}

take_counters() { # or go without those that nobody asked for, and say why
    local without="" status=0
    [ "$PROFILER" != pytorch ] || without="hardware counters need rocprofv3 or ncu"
    [ "$PROFILER" != nsight ] || find_tool ncu || without="ncu, which reads counters, is not installed"
    if [ -z "$without" ]; then
        "count_$PROFILER" || status=$?
        [ $status = 0 ] || [ -z "$ASKED" ] || failed $status
        [ $status = 0 ] || without=$(reason $status "$(plain <"$OUT/log.txt")")
    fi
    if [ -n "$without" ]; then
        [ -z "$ASKED" ] || fail 1 "$without: leave --pmc and --set out for times"
        warn "these are times alone: $without"
    elif [ -z "$DRY_RUN" ]; then
        [ -n "$(find "$OUT" -name '*counter_collection.csv' -o -name ncu.csv)" ] || name_missing /nowhere
        report kernel_counters.py @OUT@ --top 15 --counters "${PASSES[*]}" --csv @OUT@/counters.csv
        name_missing "$FIRST/counters.csv"
        finish "" "every counter of every kernel is in $FIRST/counters.csv"
    fi
}

take_times() { # a run of its own, because reading counters slows kernels down
    take_kernels
    report kernel_times.py @OUT@ --top 15 --csv @OUT@/kernels.csv
    finish "" "the whole table is in $FIRST/kernels.csv, every launch in the profiler's files beside it"
}

sample_instructions() { # pc or thread-trace, where the installed release has them
    local options=(--pc-sampling-beta-enabled --pc-sampling-method host_trap --pc-sampling-unit time
        --pc-sampling-interval 1000)
    [ "$1" = pc ] || options=(--att ${KERNEL:+--kernel-include-regex "$KERNEL"})
    [ "$PROFILER" = rocm ] || fail 2 "--set $1 needs rocprofv3"
    tool_has "${options[0]}" || fail 2 "--set $1: rocprofv3 of ROCm ${RELEASE:-here} has no ${options[0]}"
    export ROCPROFILER_PC_SAMPLING_BETA_ENABLED=on # ROCm 6.4 asks for it
    run_rocprofv3 "/$1" "$1" "${options[@]}" || failed $?
    [ "$1" != pc ] || largest "*pc_sampling*.csv"
    finish "" "the samples are in $FIRST/$1"
}

setup counters/counter rocprofv3 nsys --num-steps 3 "$@"
[ -n "$ASKED" ] || SETS=(times waves) # the counters where they can be had
for set in ${SETS[@]+"${SETS[@]}"}; do
    [[ $set =~ ^(times|pc|thread-trace)$ ]] || add_passes "$set"
done
for set in ${SETS[@]+"${SETS[@]}"}; do
    case $set in
        times) take_times ;;
        pc | thread-trace) sample_instructions "$set" ;;
    esac
done
[ ${#PASSES[@]} = 0 ] || take_counters
