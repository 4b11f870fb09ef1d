"""Dense peaks of GPUs from their vendors' documents, and the one look-up by the name that a driver gives a board."""

import dataclasses
import re


# ---- GPUs: the same lines in common/formulas/gpus.py and check_training.py, which is one file by itself
@dataclasses.dataclass(frozen=True)
class Gpu:
    """Hold a board's dense peaks in TFLOP/s by precision, its bandwidth in TB/s, last-level cache in MB, and source.

    names: those that drivers give it besides its key. faster: TFLOP/s by the bits of an operand where emulation, or
    sums in 16 bits, exceed the peak of the precision.
    """

    tflops: dict
    tb_s: float
    cache_mb: float
    source: str
    names: tuple = ()
    faster: dict = dataclasses.field(default_factory=dict)


HOPPER = {"float8": 1978.9, "bfloat16": 989.4, "tf32": 494.7, "float32": 66.9}
HOPPER_NVL = {"float8": 1670.5, "bfloat16": 835.5, "tf32": 417.5, "float32": 60.0}
AMPERE = {"int8": 624.0, "bfloat16": 312.0, "tf32": 156.0, "float32": 19.5}
MI300X = {"float8": 2614.9, "bfloat16": 1307.4, "tf32": 653.7, "float32": 163.4}
MI250 = {"int8": 181.0, "bfloat16": 181.0, "float32": 45.3}

# Without sparsity: NVIDIA's documents print twice the dense rate for tensor cores. PyTorch sees each of the two dies of
# MI250 and MI250X as a GPU; the driver gives both boards one name, which here is the faster one. A precision for which
# a GPU has no units has no entry. MI350X and MI355X emulate TF32 with bfloat16.
GPUS = {
    "MI210": Gpu(MI250, 1.638, 8, "AMD Instinct MI210 accelerator data sheet"),
    "MI250": Gpu(MI250, 1.638, 8, "AMD Instinct MI250 accelerator data sheet"),
    "MI250X": Gpu(
        {"int8": 191.5, "bfloat16": 191.5, "float32": 47.9},
        *(1.638, 8, "AMD Instinct MI250X accelerator data sheet"),
        names=("MI250X / MI250",),
    ),
    "MI300A": Gpu(
        {"float8": 1961.2, "bfloat16": 980.6, "tf32": 490.3, "float32": 122.6},
        *(5.3, 256, "AMD Instinct MI300A APU data sheet"),
    ),
    "MI300X": Gpu(MI300X, 5.3, 256, "AMD Instinct MI300X accelerator data sheet"),
    "MI325X": Gpu(MI300X, 6.0, 256, "AMD Instinct MI325X accelerator data sheet"),
    "MI350X": Gpu(
        {"float8": 4613.7, "bfloat16": 2306.9, "float32": 144.2},
        *(8.0, 256, "AMD CDNA 4 architecture white paper, at the 2.2 GHz of MI350X"),
        faster={32: 2306.9},
    ),
    "MI355X": Gpu(
        {"float8": 5033.2, "bfloat16": 2516.6, "float32": 157.3},
        *(8.0, 256, "AMD Instinct MI355X GPU data sheet"),
        faster={32: 2516.6},
    ),
    "A100": Gpu(AMPERE, 2.039, 40, "NVIDIA A100 Tensor Core GPU data sheet", names=("A100-SXM4-80GB",)),
    "A100 80GB PCIe": Gpu(AMPERE, 1.935, 40, "NVIDIA A100 Tensor Core GPU data sheet"),
    "A100 40GB": Gpu(
        AMPERE, 1.555, 40, "NVIDIA A100 Tensor Core GPU data sheet", names=("A100-SXM4-40GB", "A100-PCIE-40GB")
    ),
    "H100": Gpu(HOPPER, 3.35, 50, "NVIDIA H100 Tensor Core GPU data sheet", names=("H100 80GB HBM3",)),
    "H100 NVL": Gpu(HOPPER_NVL, 3.9, 50, "NVIDIA H100 Tensor Core GPU data sheet"),
    "H200": Gpu(HOPPER, 4.8, 50, "NVIDIA H200 Tensor Core GPU data sheet"),
    "H200 NVL": Gpu(HOPPER_NVL, 4.8, 50, "NVIDIA H200 Tensor Core GPU data sheet"),
    "GH200": Gpu(HOPPER, 4.0, 50, "NVIDIA GH200 Grace Hopper Superchip data sheet", names=("GH200 480GB",)),
    "GH200 144GB": Gpu(HOPPER, 4.9, 50, "NVIDIA GH200 Grace Hopper Superchip data sheet", names=("GH200 144G HBM3e",)),
    "B200": Gpu(
        {"float8": 4500.0, "bfloat16": 2250.0, "tf32": 1125.0, "float32": 75.0},
        *(8.0, 126, "NVIDIA HGX B200 data sheet"),
    ),
    "L40S": Gpu(
        {"float8": 733.0, "bfloat16": 362.05, "tf32": 183.0, "float32": 91.6},
        *(0.864, 96, "NVIDIA L40S GPU data sheet"),
        faster={16: 366.5},
    ),
    "RTX 4090": Gpu(
        {"float8": 330.3, "int8": 660.6, "bfloat16": 165.2, "tf32": 82.6, "float32": 82.6},
        *(1.008, 72, "NVIDIA Ada GPU architecture white paper"),
        faster={16: 330.3},
    ),
    "RTX 5090": Gpu(
        {"float8": 419.0, "int8": 838.0, "bfloat16": 209.5, "tf32": 104.8, "float32": 104.8},
        *(1.792, 96, "NVIDIA RTX Blackwell GPU architecture white paper"),
        faster={16: 419.0},
    ),
    "RX 7900 XT": Gpu(
        {"int8": 103.0, "bfloat16": 103.0, "float32": 51.6}, 0.8, 80, "AMD Radeon RX 7900 XT specifications"
    ),
    "RX 7900 XTX": Gpu(
        {"int8": 122.8, "bfloat16": 122.8, "float32": 61.4}, 0.96, 96, "AMD Radeon RX 7900 XTX specifications"
    ),
    "PRO W7900": Gpu(
        {"int8": 122.6, "bfloat16": 122.6, "float32": 61.3}, 0.864, 96, "AMD Radeon PRO W7900 specifications"
    ),
    "RX 9070 XT": Gpu(
        {"float8": 389.0, "bfloat16": 195.0, "float32": 48.7}, 0.64, 64, "AMD Radeon RX 9070 XT specifications"
    ),
}


def letters_of(name):
    """Return a board's name without its vendor, family and spelling: "AMD Instinct MI300X VF" is "mi300x"."""
    name = re.sub(r"\((TM|R)\)|\b(NVIDIA|AMD|Instinct|GeForce|Radeon)\b| VF$", "", name, flags=re.IGNORECASE)
    return re.sub("[^a-z0-9]", "", name.lower())


def gpu_named(device_name):
    """Return the key in GPUS of the board with this whole name, or None: "GH200 480GB" is no "H200"."""
    wanted = letters_of(device_name)
    return next((key for key, gpu in GPUS.items() if wanted in map(letters_of, (key, *gpu.names))), None)


# ---- end of the lines about GPUs

UNITS = {"MI300A": 228, "MI300X": 304, "MI325X": 304, "MI350X": 256, "MI355X": 256}  # of boards that can be partitioned


def name_of(device_name, units):
    """Return a GPU's name, with its compute units if it is a partition: the driver gives it the name of the board."""
    whole = UNITS.get(gpu_named(device_name))
    return f"{device_name} ({units} of {whole} compute units)" if whole and 0 < units < whole else device_name


def name_here(device=None):
    """Return the name of a GPU of this machine, which of a partition is in no table."""
    import torch

    name = torch.cuda.get_device_name(device)
    if gpu_named(name) not in UNITS:
        return name
    return name_of(name, torch.cuda.get_device_properties(device).multi_processor_count)


def emulates_tf32(device_name):
    """Return True for a board whose TF32 has no peak: emulated, it is faster than float32."""
    gpu = GPUS.get(gpu_named(device_name))
    return gpu is not None and 32 in gpu.faster


def peak_tflops(device_name, precision):
    """Return a device's peak in a precision; None if its board or the precision has no entry."""
    gpu = GPUS.get(gpu_named(device_name))
    return gpu and gpu.tflops.get("bfloat16" if precision == "float16" else precision)
