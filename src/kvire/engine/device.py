"""Placement of a model and its pool: on the CPU, or on a GPU that was found and works."""

import logging

import torch

from kvire.core.config import EngineConfig
from kvire.core.errors import ConfigError
from kvire.core.memory import available_bytes, format_size

log = logging.getLogger(__name__)

CPU = torch.device("cpu")


def choose_device(config: EngineConfig) -> torch.device:
    """The device for `config`; for auto a GPU if everything can run on it, else the CPU.

    Raises ConfigError for cuda if none works, or if another option needs the CPU.
    """
    if config.device == "cpu":
        return CPU
    needs_cpu = _needs_cpu(config)
    if config.device == "cuda":
        if problem := needs_cpu or _missing_gpu() or _unusable_gpu():
            raise ConfigError(f"device='cuda' cannot be used: {problem}")
        return _current_gpu()
    if needs_cpu or _missing_gpu():
        return CPU
    if problem := _unusable_gpu():
        log.warning("a GPU was found, but the CPU is used: %s", problem)
        return CPU
    return _current_gpu()


def prepare(device: torch.device) -> None:
    """Make float32 mean float32: switches off TF32 products on a GPU, for the whole process."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("highest")


def free_bytes(device: torch.device) -> int:
    """Bytes of the device's memory that may still be taken."""
    if device.type == "cpu":
        return available_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def device_with_room(weights_bytes: int, device: torch.device, config: EngineConfig) -> torch.device:
    """`device` if the weights fit into its memory, else the CPU for device='auto'.

    Raises ConfigError for 'cuda'.
    """
    if device.type == "cpu" or weights_bytes <= (free := free_bytes(device)):
        return device
    problem = f"the weights need {format_size(weights_bytes)} in float32, and the GPU has {format_size(free)} free"
    if config.device == "auto":
        log.warning("%s: the CPU is used", problem)
        return CPU
    raise ConfigError(f"{problem}; take a smaller model, free GPU memory, or use device='cpu'")


def _needs_cpu(config: EngineConfig) -> str | None:
    """The option of `config` that works on the CPU only, and its remedy; None if there is none."""
    if config.attention == "native":
        return "attention='native' runs on the CPU only; use attention='auto' or 'portable', or device='cpu'"
    if config.keeps_packed:
        return f"weights={config.weights!r} run on the CPU only; use weights='float32', or device='cpu'"
    if config.deterministic:
        return "deterministic mode is proven on the CPU only; use device='cpu', or leave deterministic off"
    return None


def _missing_gpu() -> str | None:
    """Why torch sees no GPU, and the remedy; None if it sees one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"this torch ({torch.__version__}) was built without CUDA; install one with CUDA (the selector on "
            "pytorch.org gives the command), or use device='cpu'"
        )
    return (
        "torch was built with CUDA, but finds no GPU; see whether nvidia-smi lists one, whether CUDA_VISIBLE_DEVICES "
        "hides it and whether the container may use it (docker run --gpus all), or use device='cpu'"
    )


def _unusable_gpu() -> str | None:
    """Why the GPU that torch sees cannot compute, and the remedy; None if it can."""
    try:
        device = _current_gpu()
        if float(torch.ones(2, device=device).sum()) == 2.0:
            return None
        problem = "1 + 1 is not 2 on it"
    except RuntimeError as error:  # too old or too new for this torch, out of memory, reserved by someone else
        problem = str(error).strip().partition("\n")[0]
    return f"the GPU does not compute ({problem}); install a torch that supports it, free it, or use device='cpu'"


def _current_gpu() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
