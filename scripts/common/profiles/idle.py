"""Say how a GPU spent its time in each step, and why it idled. Standard library only.

A step of the GPU begins with the first kernel that the host launched in it. A gap is time in which nothing runs.
"""

import bisect
import re

from common.profiles import shown_names
from common.tables import columns, rounded, text_table

NO_HOST = "the profile lacks the host's calls that launched its kernels"
PAUSE_US = 1000  # a gap between two steps that is longer is the profiler's or the script's pause
AFTER_WAIT_US = 100  # within which a host that waited for a copy launches again
SHORT_US = 10  # kernels that wait in one queue follow each other within this time
GAPS_SHOWN = 5
NO_KERNEL = (None, "no verdict: the profile holds copies and no kernel")
IDLE_BOUND = 0.25  # a step with a larger fraction of idle time is launch-bound, if it waits for the host

LATE = "the host launched late"
STREAM = "another stream or an event"
PEER = "a collective with other ranks"
COPY = "a copy that the host waited for"
QUEUE = "from kernel to kernel in a queue"
UNKNOWN = "cannot tell"
REASONS = (LATE, STREAM, PEER, COPY, QUEUE, UNKNOWN)
MOSTLY = {  # in a sentence; for a reason that isn't here
    LATE: "because the host launched late",
    QUEUE: QUEUE,
    UNKNOWN: "for reasons that the profile doesn't tell",
}

EXPOSED = "Copies are exposed while no kernel computes, communication while neither a kernel nor a copy runs."
STEP_COLUMNS = (
    "step: {step} | ms: {whole_ms:,.3f} | busy: {busy_ms:,.3f} | computing: {computing_ms:,.3f} | "
    "exposed copies: {exposed_copies_ms:,.3f} | exposed communication: {exposed_communication_ms:,.3f} | "
    "idle: {idle_ms:,.3f} | idle %: {idle_percent:.1f}"
)
REASON_COLUMNS = "the GPU waited for: {reason} | gaps: {gaps:,} | ms: {ms:,.3f} | %: {percent:.1f}"
GAP_COLUMNS = "longest gaps after: {after} | before: {before} | us: {gap_us:,.1f} | because of: {reason}"


# ---------------------------------------------------------------- what ran when


def merged(calls):
    """Return the times [start, end] in which any of the calls ran; they are in order of their start."""
    found = []
    last_end = float("-inf")
    for call in calls:
        start = call.start_ns
        end = start + call.total_ns
        if start > last_end:
            found.append([start, end])
        elif end > last_end:
            found[-1][1] = end
        if end > last_end:
            last_end = end
    return found


class Clipped:
    """Sum the parts of sorted, disjoint times that lie in a window."""

    def __init__(self, times):
        self.times = times
        self.ends = [end for _, end in times]

    def inside(self, start, end):
        total = 0
        for at in range(bisect.bisect_right(self.ends, start), len(self.times)):
            begin, finish = self.times[at]
            if begin >= end:
                break
            total += min(finish, end) - max(begin, start)
        return total


def windows_of(profile):
    """Return (name, start, end) of each step on the GPU, and the pauses (start, end) between them, in nanoseconds.

    Without marks the whole profile is one window.
    """
    calls = profile.step_calls
    first = calls[0].start_ns
    last = max(call.end_ns for call in calls)
    if not profile.spans:
        return [("all", first, last)], []
    starts = [start for start, _ in profile.spans]
    begins = {}  # part -> the start of its first call; part 0 lies before the first step
    ends = {}
    for call in calls:
        launched = call.launch.start_ns if call.launch else call.start_ns
        part = bisect.bisect_right(starts, launched)
        begins.setdefault(part, call.start_ns)
        end = call.end_ns
        if end > ends.get(part, float("-inf")):
            ends[part] = end
    windows = []
    pauses = []
    begin = first
    finished = first
    parts = sorted(begins)
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        finished = max(finished, ends[part])
        end = last
        if following is not None:
            end = min(begins[following], max(starts[following - 1], finished))
        end = max(end, begin)
        stop = end
        if following is not None and part:
            stop = max(finished, profile.spans[part - 1][1])
            if end - stop > 1e3 * PAUSE_US:
                pauses.append((stop, end))
            else:
                stop = end
        windows.append((str(part) if part else "before", begin, min(stop, end)))
        begin = end
    return windows, pauses


def step_rows(calls, windows):
    """Return a row per step, the last one for all of them: how the GPU spent its time, in ms.

    windows: of the steps, as windows_of returns them.
    """
    local = [call for call in calls if call.group != "communication"]
    computing = [call for call in local if call.kind == "kernel"]
    busy, computed, local = (Clipped(merged(some)) for some in (calls, computing, local))
    rows = []
    for name, start, end in windows:
        times = [one.inside(start, end) / 1e6 for one in (busy, local, computed)]
        whole = (end - start) / 1e6
        row = {"step": name, "whole_ms": whole, "busy_ms": times[0], "computing_ms": times[2]}
        row |= {"exposed_copies_ms": times[1] - times[2], "exposed_communication_ms": times[0] - times[1]}
        rows.append(row | {"idle_ms": max(0.0, whole - times[0])})
    if len(rows) > 1:
        keys = [key for key in rows[0] if key != "step"]
        rows.append({"step": "all"} | {key: sum(row[key] for row in rows) for key in keys})
    return [row | {"idle_percent": 100 * row["idle_ms"] / (row["whole_ms"] or 1)} for row in rows]


# ---------------------------------------------------------------- gaps, and why they are there


def gaps_of(calls, pauses):
    """Return a row per gap: its microseconds outside pauses, when it begins, and the calls after and before it."""
    last = calls[0]  # to end, of the calls so far: queues overlap
    last_end = last.end_ns
    gaps = []
    at = 0
    for call in calls[1:]:
        start = call.start_ns
        if start > last_end:
            while at < len(pauses) and pauses[at][1] <= last_end:
                at += 1
            paused = 0
            if at < len(pauses) and pauses[at][0] < start:
                paused = min(pauses[at][1], start) - max(pauses[at][0], last_end)
            gap = start - last_end - paused
            if gap > 0:  # a pause comes first
                gaps.append({"gap_us": gap / 1e3, "start_ns": start - gap, "after": last, "before": call})
        end = call.end_ns
        if end > last_end:
            last = call
            last_end = end
    return gaps


class Host:
    """Answer what the host did at a time, from a trace's operators and runtime calls."""

    def __init__(self, profile):
        self.events = profile.host
        self.has_operators = any(event.get("cat") == "cpu_op" for event in profile.host)
        self.waits = {}  # thread -> spans of its calls that wait for the GPU
        self.collectives = []  # spans: (start, the furthest end until then), in the order of their starts
        names = {event["name"] for event in profile.host}
        waits = set(filter(WAITS.search, names))
        collectives = set(filter(COLLECTIVES.search, names)) - waits
        special = waits | collectives
        for event in [event for event in profile.host if event["name"] in special]:
            spans = self.collectives
            if event["name"] in waits:
                spans = self.waits.setdefault((event.get("pid"), event.get("tid")), [])
            end = 1e3 * (event["ts"] + event["dur"])
            furthest = max(end, spans[-1][1]) if spans else end
            spans.append((1e3 * event["ts"], furthest))

    @staticmethod
    def covers(spans, time_ns):
        """Return True if one of the spans holds the time."""
        at = bisect.bisect_right(spans, (time_ns, float("inf")))
        return at > 0 and spans[at - 1][1] > time_ns

    def during(self, gap):
        """Return in words what the launching thread did in a gap: its innermost event or name that fills half of it."""
        launch = gap["before"].launch
        if launch is None or (launch.is_operator and launch.start_ns <= gap["start_ns"]):
            return "not recorded"
        start_us = gap["start_ns"] / 1e3
        end_us = min(gap["before"].start_ns, launch.start_ns) / 1e3
        if end_us <= start_us:
            inside_us = min(gap["before"].start_ns, launch.end_ns) / 1e3 - start_us
            if inside_us >= gap["gap_us"] / 2:  # it loads the kernel, or waits for room in the queue
                return f"the call that launches ({100 * inside_us / gap['gap_us']:.0f} %)"
            return "it had launched already"
        found = []
        until = bisect.bisect_left(self.events, end_us, key=lambda event: event["ts"])
        for event in self.events[:until]:
            if event["ts"] + event["dur"] <= start_us:
                continue
            overlap = min(event["ts"] + event["dur"], end_us) - max(event["ts"], start_us)
            if overlap > 0 and (event.get("pid"), event.get("tid")) == launch.thread:
                found.append((overlap, event["dur"], event["name"]))
        found = [one for one in found if not re.match("ProfilerStep", one[2])]
        if not found:
            return "nothing that was recorded"
        whole = end_us - start_us
        most = [(dur, overlap, name) for overlap, dur, name in found if overlap >= whole / 2]
        if most:
            _, overlap, name = min(most)
            return f"{name} ({100 * overlap / whole:.0f} %)"
        of_name = {}
        for overlap, _, name in found:
            of_name.setdefault(name, []).append(overlap)
        often = [(sum(some), name) for name, some in of_name.items() if sum(some) >= whole / 2]
        if often:
            overlap, name = min(often)
            return f"{name} ({min(100, 100 * overlap / whole):.0f} % in {len(of_name[name])} calls)"
        if self.has_operators:
            return "many short operators, and Python between them"
        return "many short calls, and unrecorded code"


WAITS = re.compile(
    r"Synchronize|^ur(EventWait|QueueFinish)|^(cuda|hip)Memcpy|^(cu|hip)Memcpy|aten::(item|_local_scalar_dense|nonzero)$"
)
COLLECTIVES = re.compile(r"^(gloo|mpi|nccl):|^c10d::|barrier")


def clocks_differ(profile):
    """Return True if many kernels start before the host's call that launched them."""
    launched = [call for call in profile.calls if call.launch and not call.launch.is_operator]
    early = sum(call.start_ns < call.launch.start_ns for call in launched)
    return early > 0.02 * len(launched)


def reason_of(gap, host):
    """Return the one of REASONS that the trace shows for a gap."""
    before = gap["before"]
    after = gap["after"]
    launch = before.launch
    start = gap["start_ns"]
    if launch is None or (launch.is_operator and launch.start_ns <= start):
        return UNKNOWN
    if launch.start_ns > start or launch.end_ns > start + 500 * gap["gap_us"]:
        waits = host.waits.get(launch.thread, [])
        if after.kind == "copy" and host.covers(waits, start):  # after a longer gap the host had something else to do
            return COPY if gap["gap_us"] <= AFTER_WAIT_US or host.covers(waits, start + 500 * gap["gap_us"]) else LATE
        if host.covers(host.collectives, start + 500 * gap["gap_us"]):
            return PEER
        return LATE
    if launch.is_graph and after.launch is launch:
        return QUEUE
    if after.stream != before.stream or launch.after_wait:
        if after.group == "communication":
            return PEER
        return COPY if after.kind == "copy" and after.stream != before.stream else STREAM
    return QUEUE if gap["gap_us"] <= SHORT_US else UNKNOWN


def idle_results(profile):
    """Return how the GPU of a profile spent its time, per step and in all, why it idled, and the verdict.

    unsure_us: idle time in gaps that may be pauses between steps, because the profile marks none.
    """
    windows, pauses = windows_of(profile)
    calls = profile.step_calls
    rows = step_rows(calls, windows)
    gaps = gaps_of(calls, pauses)
    host = Host(profile)
    blind = clocks_differ(profile)
    for gap in gaps:
        gap["reason"] = UNKNOWN if blind else reason_of(gap, host)
    idle = sum(gap["gap_us"] for gap in gaps)
    busy = 1e3 * rows[-1]["busy_ms"]
    paused = sum(end - start for start, end in pauses) / 1e3
    unsure = 0.0
    if not profile.spans:
        long = sorted((gap["gap_us"] for gap in gaps if gap["gap_us"] > PAUSE_US), reverse=True)
        unsure = sum(long[: profile.steps - 1] if profile.steps else long)
    found = {
        "launches": len(calls),
        "steps": profile.steps,
        "launches_per_step": len(calls) / profile.steps if profile.steps and not profile.warnings else None,
        "busy_us": busy,
        "idle_us": idle,
        "idle_share": idle / (busy + idle) if busy else 0.0,
        "paused_us": paused,
        "unsure_us": unsure,
        "long_us": sum(gap["gap_us"] for gap in gaps if gap["gap_us"] > PAUSE_US),
        "late_us": sum(gap["gap_us"] for gap in gaps if gap["gap_us"] > PAUSE_US and gap["reason"] == LATE),
        "host_known": any(call.launch and not call.launch.is_operator for call in calls),
        "steps_marked": bool(profile.spans),
        "gaps": len(gaps),
        "per_step": rows,
        "reasons": reason_rows(gaps),
        "warm_up": warm_up(rows),
        "warnings": list(profile.warnings),
        "remarks": [remark for remark in profile.remarks if remark not in profile.warnings],
    }
    if gaps and not found["host_known"]:
        found["remarks"].append(f"We can't tell why the GPU idled: {NO_HOST}.")
    if first := found["warm_up"]:
        held = f"it holds {first['held_percent']:.0f} % of the idle time"
        later = f"Without it the GPU waits {100 * first['idle_share_later']:.1f} % of the time."
        found["remarks"].append(f"Step {first['step']} looks like a warm-up: {held}. {later}")
    if blind:
        found["warnings"].append("Kernels start before their launches: the clocks of host and GPU differ here.")
    copies_alone = all(call.kind == "copy" for call in calls)
    found["launch_bound"], found["verdict"] = NO_KERNEL if copies_alone else verdict(found)
    gaps.sort(key=lambda gap: gap["gap_us"], reverse=True)
    found["largest_gaps"] = [named(gap, host) for gap in gaps[:GAPS_SHOWN]]
    return found


def reason_rows(gaps):
    """Return a row per reason why the GPU idled, the longest time first."""
    idle = sum(gap["gap_us"] for gap in gaps)
    rows = []
    for reason in REASONS:
        some = [gap["gap_us"] for gap in gaps if gap["reason"] == reason]
        if some:
            row = {"reason": reason, "gaps": len(some), "ms": sum(some) / 1e3}
            rows.append(row | {"percent": 100 * sum(some) / idle})
    return sorted(rows, key=lambda row: -row["ms"])


def warm_up(rows):
    """Return what a first step is that holds most of the idle time and takes twice as long as most steps, else None.

    rows: of the steps and, if there are several, of all of them together.
    """
    if len(rows) < 4 or rows[0]["step"] != "1":
        return None
    first, *others, whole = rows
    idle = whole["idle_ms"] - first["idle_ms"]
    usual = sorted(row["whole_ms"] for row in others)[len(others) // 2]
    if idle >= first["idle_ms"] or first["whole_ms"] <= 2 * usual:
        return None
    held = 100 * first["idle_ms"] / whole["idle_ms"]
    later = idle / (whole["whole_ms"] - first["whole_ms"])
    return {"step": first["step"], "held_percent": held, "idle_share_later": later}


def hardly_waits(found):
    """Say whether the GPU waits for a small part of the time, of all steps or of those after a warm-up."""
    first = found["warm_up"]
    return found["idle_share"] <= IDLE_BOUND or bool(first and first["idle_share_later"] <= IDLE_BOUND)


def named(gap, host):
    """Return the row of a gap for tables and JSON."""
    row = {"gap_us": gap["gap_us"], "after": gap["after"].name, "before": gap["before"].name}
    return row | {"reason": gap["reason"], "host": host.during(gap)}


def verdict(found):
    """Return whether the step is bound by launches, or None where the profile cannot tell, and a sentence."""
    counted = found["idle_us"] - found["unsure_us"]
    share = f"the GPU waits {100 * found['idle_share']:.1f} % of the time (bound: {100 * IDLE_BOUND:.0f} %)"
    if found["warnings"]:
        return None, f"no verdict, because the profile is incomplete or contradicts itself; {share}"
    if found["paused_us"] > found["idle_us"]:
        return None, "no verdict: between its steps the GPU waits longer than inside them, maybe for data"
    if found["idle_share"] <= IDLE_BOUND:
        return False, f"not launch-bound: {share}{instead(found['per_step'][-1])}"
    if hardly_waits(found):
        later = f"the GPU waits {100 * found['warm_up']['idle_share_later']:.1f} % of the time after its warm-up"
        return False, f"not launch-bound: {later} (bound: {100 * IDLE_BOUND:.0f} %)"
    if found["unsure_us"] > counted:
        long = f"{found['unsure_us'] / 1e3:,.3f} ms of it in gaps over {PAUSE_US} us"
        return None, f"no verdict: {share}, {long}, which may lie between steps: the profile marks none (--steps N)"
    why = {row["reason"]: row["percent"] for row in found["reasons"]}
    if not found["host_known"]:
        if found["long_us"] > found["idle_us"] / 2:
            return None, f"no verdict: {share}, mostly in gaps over {PAUSE_US} us, and {NO_HOST}"
        return True, f"launch-bound: {share}{instead(found['per_step'][-1])}"
    if why.get(LATE, 0) >= 50 and found["late_us"] > found["idle_us"] / 2:
        late = f"because the host was late by more than {PAUSE_US} us at a time: the longest gaps show what it did"
        return False, f"not launch-bound, but idle: {share}, mostly {late}"
    if why.get(LATE, 0) >= 50:
        return True, f"launch-bound: {share}, mostly because the host launched late{instead(found['per_step'][-1])}"
    if why.get(UNKNOWN, 0) >= 50:
        return None, f"no verdict: {share}, and the profile doesn't tell why"
    most = found["reasons"][0]["reason"]
    return False, f"not launch-bound, but idle: {share}, mostly {MOSTLY.get(most, f'for {most}')}"


def exposed(row, over_ms):
    """Return how much of a step copies or communication take that nothing hides, in words, if it's over over_ms."""
    for what in ("copies take", "communication takes"):
        ms = row[f"exposed_{what.split()[0]}_ms"]
        if ms > over_ms:
            return f"exposed {what} {100 * ms / row['whole_ms']:.0f} %"
    return None


def instead(row):
    """Return the end of a verdict: what fills most of the time, if it's neither kernels that compute nor waiting."""
    words = exposed(row, row["whole_ms"] / 2)
    return f", but {words}" if words else ""


# ---------------------------------------------------------------- text

STEPS_SHOWN = 12


def idle_tables(found):
    """Return (heading, header, rows, columns at the left) of the tables: time per step, reasons, longest gaps."""
    rows = found["per_step"]
    if len(rows) > STEPS_SHOWN:
        rows = [*rows[: STEPS_SHOWN - 1], rows[-1]]
    tables = [("Time of the GPU, in ms", *columns(STEP_COLUMNS, rows), 1)]
    if found["gaps"]:
        gaps = found["largest_gaps"]
        if found["host_known"]:
            tables.append(("Why the GPU idled", *columns(REASON_COLUMNS, found["reasons"]), 1))
        names = shown_names([name for gap in gaps for name in (gap["after"], gap["before"])], 36)
        shown = [gap | {key: names[gap[key]] for key in ("after", "before")} for gap in gaps]
        header, cells = columns(GAP_COLUMNS if found["host_known"] else GAP_COLUMNS.rpartition(" | ")[0], shown)
        if not found["host_known"]:
            return [*tables, ("The longest gaps", header, cells, 2)]
        doing = [gap["host"] if len(gap["host"]) < 44 else gap["host"][:41] + "..." for gap in gaps]
        cells = [[*row, host] for row, host in zip(cells, doing, strict=True)]
        tables.append(("The longest gaps", [*header, "the host meanwhile"], cells, 2))
    return tables


def idle_text(title, found):
    """Return the results as sentences and tables."""
    profile_is_whole = not found["warnings"]
    if found["steps"] == 1:
        per_step = " in one step"
    elif found["steps"] and profile_is_whole:
        per_step = f", {found['launches_per_step']:,.1f} in each of {found['steps']} steps"
    else:
        per_step = f", of {found['steps']} steps" if found["steps"] else ", steps not known (--steps N)"
    busy = f"busy {found['busy_us'] / 1e3:,.3f} ms, idle {found['idle_us'] / 1e3:,.3f} ms in {found['gaps']:,} gaps"
    if found["paused_us"]:
        busy += f"; not counted: {rounded(found['paused_us'] / 1e3)} ms in pauses over {PAUSE_US} us between steps"
    lines = [
        f"{title}: {found['launches']:,} kernels and copies{per_step}",
        busy,
        found["verdict"],
        *found["warnings"],
        *found["remarks"],
    ]
    for _, header, rows, left in idle_tables(found):
        lines += ["", text_table(header, rows, left=left)]
    return "\n".join([*lines, "", EXPOSED])
