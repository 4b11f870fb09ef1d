"""The timetable: one table from which check.py lists the exercises, and which the tests compare with the pages."""

import os

# Every session has 180 minutes: these, and the work of its steps, 135.
INTRODUCTION, WORK, BREAK, DISCUSSION, SLACK = 10, 135, 10, 15, 10
AT_HOME = ", at home"
V1, V2 = "version1_pytorch_baseline", "version2_pytorch_fused"
V3, V4 = "version3_triton", "version4_pytorch_sdpa"

# number: (name, idea, [(label, page, minutes), ...]). From session 7, choose what you like. A label that ends with
# AT_HOME leaves its page for afterwards. Minutes are estimates that nobody has measured in a room. A kernel gets one
# for 180 words of its page, one for the check, two for each line of a kernel that is written, one for a line of host
# code, five for the deliverable, and more where the idea is new: a test holds it to that. The other pages share the
# rest of a session.
SESSIONS = {
    1: (
        "measure",
        "Believe a number when a second run and a hand calculation agree with it.",
        [
            ("what a GPU is", "exercises/GPU.md", 15),
            ("version 1", f"{V1}/README.md", 30),
            ("read a trace", "exercises/TRACES.md", 20),
            ("exercise 1, steps 1 to 3", f"{V1}/exercises/exercise_1_baseline_analysis.md", 35),
            ("exercise 2, steps 1 and 3", f"{V1}/exercises/exercise_2_memory_analysis.md", 15),
            ("exercise 3, steps 1 and 4", f"{V1}/exercises/exercise_3_bottleneck_identification.md", 20),
        ],
    ),
    2: (
        "fuse",
        "Predict the launches and bytes that a fusion removes, then measure.",
        [
            ("version 2", f"{V2}/README.md", 25),
            ("exercise 1, steps 1 to 3", f"{V2}/exercises/exercise_1_fusion_analysis.md", 40),
            ("exercise 2, steps 1 and 2", f"{V2}/exercises/exercise_2_attention_memory.md", 35),
            ("exercise 4, steps 1 and 2", f"{V2}/exercises/exercise_4_ablation.md", 35),
        ],
    ),
    3: (
        "first kernels",
        "A kernel is finished only when its backward is proven correct.",
        [
            ("version 3", f"{V3}/README.md", 15),
            ("kernel 01", "exercises/01_row_sum/README.md", 15),
            ("kernel 02", "exercises/02_rmsnorm_forward/README.md", 20),
            ("kernel 03, read only", "exercises/03_swiglu_forward/README.md", 5),
            ("kernel 04", "exercises/04_swiglu_backward/README.md", 15),
            ("kernel 20", "exercises/20_kernel_to_layer/README.md", 30),
            ("kernel 06", "exercises/06_rmsnorm_backward/README.md", 25),
            ("Triton basics, steps 2 and 3", f"{V3}/exercises/exercise1_triton_basics.md", 10),
        ],
    ),
    4: (
        "tiles",
        "Load a tile once, use it often: matmul and attention are the same loop.",
        [
            ("kernel 17", "exercises/17_matmul/README.md", 35),
            ("SwiGLU, steps 1 and 4", f"{V3}/exercises/exercise2_swiglu_optimization.md", 15),
            ("kernel 07", "exercises/07_online_softmax/README.md", 20),
            ("kernel 08", "exercises/08_flash_attention/README.md", 30),
            ("kernel 22", "exercises/22_causal_mask/README.md", 15),
            ("version 3's attention", f"{V3}/ATTENTION.md", 5),
            ("flash attention, steps 2 and 3", f"{V3}/exercises/exercise3_flash_attention.md", 15),
        ],
    ),
    5: (
        "find faults",
        "A fast step with the right first loss proves nothing.",
        [
            ("performance debugging", f"{V3}/exercises/performance_debugging/README.md", 120),
            ("kernel 16", "exercises/16_find_the_phantom/README.md", 15),
        ],
    ),
    6: (
        "graphs and libraries",
        "Remove the launches first, then choose library, compiler or kernel by numbers.",
        [
            ("version 4", f"{V4}/README.md", 20),
            ("exercise 1, steps 1 to 3", f"{V4}/exercises/exercise_1_graphs.md", 25),
            ("kernel 15", "exercises/15_graph_capture/README.md", 25),
            ("exercise 2, steps 1 to 3", f"{V4}/exercises/exercise_2_libraries_or_kernels.md", 25),
            ("the loss and the compiler", f"{V3}/LOSS_AND_COMPILE.md", 10),
            ("kernel 23", "exercises/23_largest_tensor/README.md", 30),
        ],
    ),
    7: (
        "deeper, optional",
        "Choose 90 minutes; the last 45 are for your own script.",
        [
            ("kernel 12", "exercises/12_occupancy/README.md", 15),
            ("kernel 09", "exercises/09_causal_attention/README.md", 35),
            ("kernel 10", "exercises/10_attention_dq/README.md", 40),
            ("kernel 11", "exercises/11_attention_dkdv/README.md", 45),
            ("kernel 21", "exercises/21_rotate_one_pair/README.md", 20),
            ("kernel 05", "exercises/05_rope/README.md", 20),
            ("kernel 13", "exercises/13_exp2/README.md", 25),
            ("kernel 14", "exercises/14_tf32_bf16/README.md", 35),
            ("kernel 24", "exercises/24_layernorm/README.md", 90),
            ("your own kernel", "exercises/YOUR_OWN_KERNEL.md", 30),
            ("ROCm profilers", f"{V2}/exercises/exercise_3_rocm_tools.md", 60),
            ("your own script", "scripts/YOUR_OWN_SCRIPT.md", 25),
            ("before and after", "scripts/BEFORE_AND_AFTER.md", 20),
            (f"any profile{AT_HOME}", "scripts/ANY_PROFILE.md", 20),
        ],
    ),
    8: (
        "several GPUs",
        "Count the bytes that a rank sends, then hide them.",
        [
            ("several GPUs", "scripts/SCALING.md", 20),
            ("kernel 25", "exercises/25_ring_all_reduce/README.md", 35),
            ("kernel 26", "exercises/26_overlap/README.md", 50),
            ("kernel 27", "exercises/27_phantom_rank/README.md", 30),
            (f"kernel 28{AT_HOME}", "exercises/28_sharded_optimizer/README.md", 30),
            (f"kernel 29{AT_HOME}", "exercises/29_tensor_parallel/README.md", 30),
        ],
    ),
}


def steps():
    """Return the pages of all sessions in working order."""
    return [page for _, _, work in SESSIONS.values() for _, page, _ in work]


def minutes_of(number):
    """Return the minutes of a session's work, without what is left for home."""
    return sum(minutes for label, _, minutes in SESSIONS[number][2] if not label.endswith(AT_HOME))


def header(page):
    """Return the line below a page's title, as "Session 1, measure; this page, steps 1 to 3: 35 minutes"."""
    uses = []
    for number, (name, _, work) in SESSIONS.items():
        for label, target, minutes in work:
            if target == page:
                _, _, part = label.partition(", ")
                read = f"this page, {part}" if part else "this page"
                uses.append(f"Session {number}, {name}; {read}: {minutes} minutes")
    if not uses:
        raise ValueError(f"{page} is in no session")
    return ". ".join(uses)


def after(page):
    """Return the pages that follow a page in the timetable: none after the last one."""
    order = steps()
    return [order[at + 1] for at, one in enumerate(order[:-1]) if one == page]


def kernels(number):
    """Return the numbers of a session's kernel exercises, in working order."""
    return [label[7:9] for label, _, _ in SESSIONS[number][2] if label.startswith("kernel ")]


def ends(page):
    """Return the number of the session whose work ends with a page; what is left for home follows later. Or None."""
    for number, (_, _, work) in SESSIONS.items():
        done_here = [target for label, target, _ in work if not label.endswith(AT_HOME)]
        if page == done_here[-1]:
            return number
    return None


def guide_header(page):
    """Return the line below the title of the guide to a page: "Session 5, find faults: the 120 minutes of ..."."""
    for number, (name, _, work) in SESSIONS.items():
        for label, target, minutes in work:
            if target == page:
                return f"Session {number}, {name}: the {minutes} minutes of {label}"
    raise ValueError(f"{page} is in no session")


def linked(label, target, page):
    """Return the label as a link that leads from one page to another."""
    return f"[{label}]({os.path.relpath(target, os.path.dirname(page))})"


def table_row(number):
    """Return the session's row in the timetable of version3_triton/README_WORKSHOP.md."""
    name, idea, work = SESSIONS[number]
    links = [f"{linked(label, page, f'{V3}/README_WORKSHOP.md')} {minutes}" for label, page, minutes in work]
    return f"| {number} {name} | {idea} | {'<br>'.join(links)} |"


def work_rows(number):
    """Return the rows of a session's steps on its slide "Your turn"."""
    slides = f"exercises/slides/session{number}.md"
    return [f"| {linked(label, page, slides)} | {minutes} |" for label, page, minutes in SESSIONS[number][2]]
