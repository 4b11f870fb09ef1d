"""Read what rocprofv3 --output-format json writes. Standard library only."""

from common.profiles.model import (
    WITH_LAUNCHES,
    checked_kernel,
    copy_name,
    finished,
    label_of_copy,
    labels_of,
    with_times,
)


def is_rocprof_json(content):
    return "rocprofiler-sdk-tool" in content


DIRECTIONS = {1: "HOST_TO_HOST", 2: "HOST_TO_DEVICE", 3: "DEVICE_TO_HOST", 4: "DEVICE_TO_DEVICE"}  # of ROCprofiler-SDK


def read_rocprof_json(path, content, gpu):
    """Return the profiles in a JSON file of rocprofv3, which has one part per process."""
    kernels = []
    copies = []
    host_calls = 0
    for i, part in enumerate(content["rocprofiler-sdk-tool"]):
        names = {one["kernel_id"]: one["formatted_kernel_name"] for one in part["kernel_symbols"]}
        process = part.get("metadata", {}).get("pid", i)
        records = part["buffer_records"]
        for one in records["kernel_dispatch"]:
            what = one["dispatch_info"]
            stream = (handle(what, "queue_id"), handle(one, "stream_id"))
            kernels.append((one, names[what["kernel_id"]], (process, handle(what, "agent_id")), stream))
        for one in records.get("memory_copy", []):
            ends = (handle(one, "src_agent_id"), handle(one, "dst_agent_id"))
            direction = DIRECTIONS.get(one.get("operation"))
            name = f"MEMORY_COPY_{direction}" if direction else "MEMORY_COPY"
            copies.append((one, copy_name(name, *ends), (process, *ends), None))
        host_calls += len(records.get("hip_api", []))
    rows = [*kernels, *copies]
    timed, warnings = with_times(rows, [(one["start_timestamp"], one["end_timestamp"]) for one, *_ in rows], "records")
    labels = labels_of(place for _, _, place, _ in kernels)
    calls = []
    for (_, name, place, stream), start, end in timed:
        kind = "kernel" if len(place) == 2 else "copy"
        calls.append(checked_kernel(name, start, end - start, kind, label_of_copy(labels, *place), stream=stream))
    notes = [f"Its {host_calls:,} calls of HIP aren't read: {WITH_LAUNCHES}."] if host_calls else []
    return finished(path, calls, gpu, warnings, notes=notes)


def handle(record, name):
    return record.get(name, {}).get("handle")
