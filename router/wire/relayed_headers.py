"""Which headers of a backend's answer are the client's business; hop-by-hop and framing headers are not among them."""

RELAYED_HEADERS = frozenset((
    b"cache-control", b"content-encoding", b"content-language", b"content-type", b"openai-model",
    b"openai-processing-ms", b"openai-version", b"retry-after", b"server-timing",
))  # fmt: skip
Headers = list[tuple[bytes, bytes]]


def relayed_headers(headers: Headers) -> Headers:
    """Those of a backend's headers that a client gets."""
    return [header for header in headers if header[0] in RELAYED_HEADERS]
