"""Writes a GGUF file at another precision, with the `gguf` package: dequantize each matrix, quantize it anew.

Precision that quantization threw away does not come back: an f16 file made from a q4_1 file holds the q4_1 values in
wider cells. Such variants differ in size, memory traffic and speed, which is what a router must cope with; they do not
differ in quality of weights.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType, quants
from gguf.gguf_reader import ReaderField, ReaderTensor

FILE_TYPES = {
    GGMLQuantizationType.F16: LlamaFileType.MOSTLY_F16,
    GGMLQuantizationType.Q8_0: LlamaFileType.MOSTLY_Q8_0,
}
"""Precisions that can be written, with the value of `general.file_type` that goes with each."""


def write_variant(
    source: GGUFReader, precision: GGMLQuantizationType, path: Path, progress: Callable[[int, int], None]
) -> None:
    """Writes `source` to `path` with all its matrices at `precision`; vectors (norms) stay F32, metadata is kept.

    The embedding matrix is converted too: this model ties it to the output head, so that every token reads all of it.
    `progress(done, total)` counts tensors. Raises OSError where the file cannot be written, KeyError for a precision
    that is not in `FILE_TYPES`.
    """
    file_type = FILE_TYPES[precision]
    writer = GGUFWriter(path, _text(source, "general.architecture"))
    try:
        _copy_metadata(source, writer, file_type)
        for tensor in source.tensors:
            _declare(tensor, _target(tensor, precision), writer)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        total = len(source.tensors)
        for done, tensor in enumerate(source.tensors, start=1):
            writer.write_tensor_data(_converted(tensor, _target(tensor, precision)))
            progress(done, total)
    finally:
        writer.close()
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _text(source: GGUFReader, key: str) -> str:
    field = source.get_field(key)
    if field is None:
        raise ValueError(f"the GGUF file has no {key}")
    return str(field.contents())


def _copy_metadata(source: GGUFReader, writer: GGUFWriter, file_type: LlamaFileType) -> None:
    for field in source.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue        # the writer puts these itself
        value = int(file_type) if field.name == "general.file_type" else field.contents()
        writer.add_key_value(field.name, value, field.types[0], sub_type=_element_type(field))


def _element_type(field: ReaderField) -> GGUFValueType | None:
    return field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None


def _target(tensor: ReaderTensor, precision: GGMLQuantizationType) -> GGMLQuantizationType:
    return precision if len(tensor.shape) > 1 else tensor.tensor_type


def _declare(tensor: ReaderTensor, target: GGMLQuantizationType, writer: GGUFWriter) -> None:
    """Announces the tensor without computing it, so that one tensor at a time is in memory."""
    shape = tuple(int(side) for side in reversed(tensor.shape))     # GGUF counts the fastest side first, numpy last
    block_elements, block_bytes = GGML_QUANT_SIZES[target]
    size_bytes = int(tensor.n_elements) // block_elements * block_bytes
    if target in (GGMLQuantizationType.F32, GGMLQuantizationType.F16):
        cell = np.dtype(np.float32 if target is GGMLQuantizationType.F32 else np.float16)
        writer.add_tensor_info(tensor.name, shape, cell, size_bytes, target)
    else:
        byte_shape = quants.quant_shape_to_byte_shape(shape, target)
        writer.add_tensor_info(tensor.name, byte_shape, np.dtype(np.uint8), size_bytes, target)


def _converted(tensor: ReaderTensor, target: GGMLQuantizationType) -> "np.ndarray[Any, Any]":
    if target is tensor.tensor_type:
        return tensor.data
    return quants.quantize(quants.dequantize(tensor.data, tensor.tensor_type), target)
