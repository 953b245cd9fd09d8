"""What a run was computed on, in a few words; nothing that names the machine or its user."""

import platform
from pathlib import Path

import torch

CPU_INFO = Path("/proc/cpuinfo")


def hardware(device: torch.device) -> str:
    """Machine type, processor or GPU, CPU threads and PyTorch's version."""
    count = torch.get_num_threads()
    threads = f"{count} thread{'s' if count > 1 else ''}"
    return f"{platform.machine()}, {_processor(device)}, {threads}, torch {torch.__version__}"


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"
