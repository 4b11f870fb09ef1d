"""Read what rocprofv3 --output-format json writes. Standard library only."""

from common.profiles.launches import Row, host_calls, profiles_of
from common.profiles.model import ONE_BY_ONE, WITH_LAUNCHES


def is_rocprof_json(content):
    return "rocprofiler-sdk-tool" in content


DIRECTIONS = {1: "HOST_TO_HOST", 2: "HOST_TO_DEVICE", 3: "DEVICE_TO_HOST", 4: "DEVICE_TO_DEVICE"}  # of ROCprofiler-SDK


def read_rocprof_json(path, content, gpu):
    """Return the profiles in a JSON file of rocprofv3, which has one part per process."""
    rows = []
    host = []
    notes = []
    warnings = []
    for i, part in enumerate(content["rocprofiler-sdk-tool"]):
        names = {one["kernel_id"]: one["formatted_kernel_name"] for one in part["kernel_symbols"]}
        process = part.get("metadata", {}).get("pid", i)
        records = part["buffer_records"]
        for one in records["kernel_dispatch"]:
            what = one["dispatch_info"]
            stream = (handle(what, "queue_id"), handle(one, "stream_id"))
            more = {"process": process, "gpu": handle(what, "agent_id"), "stream": stream, "launch": number_of(one)}
            rows.append(Row("kernel", names[what["kernel_id"]], one["start_timestamp"], one["end_timestamp"], **more))
        for one in records.get("memory_copy", []):
            ends = {"source": handle(one, "src_agent_id"), "destination": handle(one, "dst_agent_id")}
            direction = DIRECTIONS.get(one.get("operation"))
            name = f"MEMORY_COPY_{direction}" if direction else "MEMORY_COPY"
            more = {"process": process, "launch": number_of(one)} | ends
            rows.append(Row("copy", name, one["start_timestamp"], one["end_timestamp"], **more))
        if part.get("callback_records", {}).get("counter_collection"):
            warnings = [ONE_BY_ONE]
        calls = [*records.get("hip_api", []), *records.get("hsa_api", [])]
        kinds = part.get("strings", {}).get("buffer_records")
        if calls and not kinds:
            notes.append(f"Its {len(calls):,} calls of the CPU have no names, so they aren't read: {WITH_LAUNCHES}.")
            continue
        for one in calls:
            name = kinds[one["kind"]]["operations"][one["operation"]]
            span = (one["start_timestamp"], one["end_timestamp"])
            host.append((name, *span, process, one.get("thread_id"), number_of(one)))
    host, left_out = host_calls(host)
    return profiles_of(path, rows, host, gpu, warnings, [*notes, *left_out])


def number_of(record):
    """Return the number that a launch shares with its kernel, or None."""
    return record.get("correlation_id", {}).get("internal")


def handle(record, name):
    return record.get(name, {}).get("handle")
