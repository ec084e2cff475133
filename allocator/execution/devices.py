"""Devices by vendor, and the environment variable that narrows a process down to some of them.

Such a variable is a courtesy between programs, not a wall: a process can unset it. What keeps an honest job off a card
is this variable, what keeps a dishonest one off it is the container or the device cgroup around it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Device(NamedTuple):
    """One accelerator of this machine: its vendor, and the number or UUID by which the vendor's runtime knows it."""

    vendor: str
    id: str

    def __str__(self) -> str:
        return f"{self.vendor}:{self.id}"


class UnknownVendor(ValueError):
    """No row of the table fits; the text lists those that there are."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """How one vendor's runtime is told which devices to show."""

    variable: str | None
    """Holds the ids, comma-separated without spaces; `None` where there is nothing to choose from."""
    source: str
    prefix: str = ""
    """Goes before the first id."""
    besides: tuple[tuple[str, str], ...] = field(default=())
    """Variables that are set whatever the ids."""


_RAY = "github.com/ray-project/ray, python/ray/_private/accelerators/"

VISIBILITY: dict[str, Visibility] = {
    # Without the bus order, index 0 is the fastest card, and not the one that nvidia-smi calls 0.
    "nvidia": Visibility(
        "CUDA_VISIBLE_DEVICES", "docs.nvidia.com/cuda/cuda-programming-guide/05-appendices/environment-variables.html",
        besides=(("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),)),
    # ROCR_VISIBLE_DEVICES filters one layer below and renumbers what HIP then sees, so only one of the two may be set;
    # Ray refuses to start under that one.
    "amd": Visibility("HIP_VISIBLE_DEVICES", _RAY + "amd_gpu.py; rocm.docs.amd.com, GPU isolation techniques"),
    # Reading stops at the first character that is neither digit nor comma.
    "ascend": Visibility(
        "ASCEND_RT_VISIBLE_DEVICES",
        "hiascend.com/document/detail/en/canncommercial/850/maintenref/envvar/envref_07_0028.html"),
    "intel": Visibility("ONEAPI_DEVICE_SELECTOR", _RAY + "intel_gpu.py", prefix="level_zero:"),
    "gaudi": Visibility("HABANA_VISIBLE_MODULES", _RAY + "hpu.py"),
    "cambricon": Visibility("MLU_VISIBLE_DEVICES", _RAY + "mlu.py"),
    "metax": Visibility("CUDA_VISIBLE_DEVICES", _RAY + "metax_gpu.py"),
    "moorethreads": Visibility("MUSA_VISIBLE_DEVICES", "github.com/sgl-project/sglang and vllm platform files: musa"),
    "neuron": Visibility("NEURON_RT_VISIBLE_CORES", _RAY + "neuron.py; vLLM's Neuron platform"),
    "tpu": Visibility("TPU_VISIBLE_CHIPS", _RAY + "tpu.py; vLLM's TPU platform"),
    # A job without a card must not stray onto one that is lent elsewhere: an empty list hides all (CUDA's guide).
    "cpu": Visibility(None, "see nvidia", besides=(("CUDA_VISIBLE_DEVICES", ""),)),
}


def visibility_env(devices: Sequence[Device]) -> dict[str, str]:
    """The variables that show a process these devices, all of one vendor, in this order. Without devices: `cpu`.

    Raises UnknownVendor for a vendor that is not in the table; ValueError for devices of two vendors, or an id that is
    empty or holds a comma or a blank.
    """
    vendors = {device.vendor for device in devices} or {"cpu"}
    if len(vendors) > 1:
        raise ValueError(f"a process sees the devices of one vendor, not of {', '.join(sorted(vendors))}")
    (vendor,) = vendors
    row = VISIBILITY.get(vendor)
    if row is None:
        raise UnknownVendor(f"no vendor {vendor!r}; known: {', '.join(sorted(VISIBILITY))}")
    for device in devices:
        if not device.id or any(character in ", \t\n" for character in device.id):
            raise ValueError(f"{vendor} device {device.id!r}: an id is not empty and holds no comma and no blank")
    shown = {} if row.variable is None else {row.variable: row.prefix + ",".join(device.id for device in devices)}
    return {**dict(row.besides), **shown}
