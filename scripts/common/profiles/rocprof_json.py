"""Read what rocprofv3 --output-format json writes. Standard library only."""

from common.profiles.model import checked_kernel, finished, labels_of


def is_rocprof_json(content):
    return "rocprofiler-sdk-tool" in content


def read_rocprof_json(path, content, gpu):
    """Return the profiles in a JSON file of rocprofv3, which has one part per process."""
    rows = []
    for i, part in enumerate(content["rocprofiler-sdk-tool"]):
        names = {one["kernel_id"]: one["formatted_kernel_name"] for one in part["kernel_symbols"]}
        process = part.get("metadata", {}).get("pid", i)
        for one in part["buffer_records"]["kernel_dispatch"]:
            what = one["dispatch_info"]
            agent = what.get("agent_id", {}).get("handle")
            stream = (what.get("queue_id", {}).get("handle"), one.get("stream_id", {}).get("handle"))
            row = (names[what["kernel_id"]], one["start_timestamp"], one["end_timestamp"])
            rows.append(("kernel", *row, process, agent, stream))
        for one in part["buffer_records"].get("memory_copy", []):
            rows.append(("copy", "MEMORY_COPY", one["start_timestamp"], one["end_timestamp"], process, None, None))
    labels = labels_of((process, agent) for kind, *_, process, agent, _ in rows if kind == "kernel")
    calls = []
    for kind, name, start, end, process, agent, stream in rows:
        calls.append(checked_kernel(name, start, end - start, kind, labels.get((process, agent)), stream=stream))
    return finished(path, calls, gpu)
