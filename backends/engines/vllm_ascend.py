"""vLLM with the Ascend NPU plugin (vllm-project/vllm-ascend).

The plugin swaps workers and kernels and leaves vLLM's own metrics alone, so the page is vLLM's, with KV blocks of 128
tokens where a GPU has 16. Forks from before the upstream rename show the KV gauge with `npu` in its name.
"""

from backends.catalog.sample import LoadSample
from backends.engines.dialect import Dialect
from backends.engines.vllm import KV_USAGE, read_sample

_KV_USAGE = (*KV_USAGE, "vllm:npu_cache_usage_perc")


def parse_metrics(text: bytes, now: float) -> LoadSample:
    """A vLLM-Ascend page as a sample."""
    return read_sample(text, now, _KV_USAGE)


DIALECT = Dialect(name="vllm-ascend", parse_metrics=parse_metrics)
