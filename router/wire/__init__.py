"""What crosses the wire, as bytes: heads and framing, JSON, events, and errors in OpenAI's shape."""
