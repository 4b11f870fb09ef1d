#!/usr/bin/env bash
# Body of get_counters.sh: WRAPPER OPTIONS...
set -euo pipefail
WRAPPER=$1
shift
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

SETS=() PASSES=() ASKED="" # a pass is a string of counters that one run reads

ask() { # SET: note what was asked for; on NVIDIA nsys takes the times, ncu reads the counters
    ASKED+=" $1"
    [ "$1" = times ] || COUNTERS_WANTED=1
    [[ $ASKED == *times* ]] || NSIGHT=ncu
    [ "$1" != times ] || NSIGHT=nsys
}

own_option() {
    local names=()
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
        --set) [ $# -gt 1 ] || fail 2 "--set needs a value" && SETS+=("$2") TAKEN=2 && ask "$2" ;;
        --kernel) [ $# -gt 1 ] || fail 2 "--kernel needs a value" && KERNEL=$2 TAKEN=2 ;;
        *) return 1 ;;
    esac
}

expand_sets() { # append the passes of the sets
    local set vendor name counters before
    for set in ${SETS[@]+"${SETS[@]}"}; do
        before=${#PASSES[@]}
        while read -r vendor name counters; do
            [ "$vendor $name" != "$PROFILER $set" ] || PASSES+=("$counters")
        done <"$SCRIPTS/common/wrappers/counter_sets.txt"
        [[ ${#PASSES[@]} -gt $before || $set =~ ^(times|pc|thread-trace)$ || $PROFILER = pytorch ]] ||
            fail 2 "--set must be times, waves, memory, matrix, lds, pc or thread-trace, not $set"
    done
}

run_rocprofv3() { # FOLDER NAME OPTIONS...: one run of the script
    attempt rocprofv3 "${@:3}" ${STEADY_ROCM[@]+"${STEADY_ROCM[@]}"} --output-format csv -d "$PLACE$1" -o "$2_%pid%" \
        ${EXTRA[@]+"${EXTRA[@]}"} -- "${TRAIN[@]}"
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
            [ -n "$DRY_RUN" ] || { make_result && echo "pmc: ${names[*]}" >"$file"; }
        fi
        run_rocprofv3 "/pass_$number" counters "${chosen[@]}" || return $?
    done
}

count_nsight() { run_ncu --metrics "$(tr ' ' , <<<"${PASSES[*]}")"; }

name_missing() { # CSV: name the requested counters that did not come, of which rocprofv3 says little
    local counter wanted missing=() list="rocprofv3 -L"
    [ "$PROFILER" = rocm ] || list="ncu --query-metrics"
    read -r -a wanted <<<"${PASSES[*]}"
    for counter in "${wanted[@]}"; do
        grep -Fq ",$counter," "$1" 2>/dev/null || missing+=("$counter")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    [ ${#missing[@]} -lt ${#wanted[@]} ] || give_up 1 "none of the counters came: '$list' lists those of this GPU"
    warn "these counters did not come: ${missing[*]}; '$list' lists those of this GPU"
}

read_counters() {
    [ -z "$DRY_RUN" ] || return 0
    [ -n "$(find "$OUT" -name '*counter_collection.csv' -o -name 'ncu.csv')" ] || name_missing /nowhere
    report kernel_counters.py @OUT@ --top 15 --csv @OUT@/counters.csv
    name_missing "$FIRST/counters.csv"
    finish "" "every counter of every kernel is in $FIRST/counters.csv"
}

take_times() { # a run of its own, because reading counters slows kernels down
    case $PROFILER in
        rocm) run_rocprofv3 "" kernels --kernel-trace || failed $? ;;
        nsight) profile_nsys cuda,nvtx ;;
        pytorch) profile_pytorch ;;
    esac
    report kernel_times.py @OUT@ --top 15 --launches @OUT@/launches.csv
    finish "" "every launch is in $FIRST/launches.csv"
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

setup counters/counter rocprofv3 nsys --num-steps 3 -- "$@"
[ -n "$ASKED" ] || SETS=(times waves) # the counters where they can be had
expand_sets
[ "$PROFILER" != rocm ] || rocprofv3_steady
for set in ${SETS[@]+"${SETS[@]}"}; do
    case $set in
        times) take_times ;;
        pc | thread-trace) sample_instructions "$set" ;;
    esac
done
without="" # a reason to go without counters that nobody asked for
[ "$PROFILER" != pytorch ] || without="hardware counters need rocprofv3 or ncu"
[ "$PROFILER" != nsight ] || find_tool ncu || without="ncu, which reads counters, is not installed"
if [ ${#PASSES[@]} -gt 0 ] && [ -z "$without" ]; then
    if "count_$PROFILER"; then
        read_counters
    elif status=$? && [ -n "$ASKED" ]; then
        failed $status
    else
        without=$(reason $status "$(plain <"$OUT/log.txt")")
    fi
fi
[ -z "$without" ] || [ -z "$ASKED" ] || [[ ${SETS[*]-} = times ]] || fail 1 "$without: leave --pmc and --set out for times"
[ -z "$without" ] || [ -n "$ASKED" ] || warn "these are times alone: $without"
