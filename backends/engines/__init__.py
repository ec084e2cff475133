"""How each engine speaks: one dialect a file, pure, and the table of them.

Whoever uses dialects takes the table as an argument, so that others can be merged into it.
"""

from collections.abc import Mapping
from types import MappingProxyType

from backends.engines import llamacpp, plain_openai, sglang, tgi, vllm, vllm_ascend
from backends.engines.dialect import Dialect

DIALECTS: Mapping[str, Dialect] = MappingProxyType({
    dialect.name: dialect
    for dialect in (llamacpp.DIALECT, vllm.DIALECT, vllm_ascend.DIALECT, sglang.DIALECT, tgi.DIALECT,
                    plain_openai.DIALECT)
})

__all__ = ["DIALECTS", "Dialect"]
