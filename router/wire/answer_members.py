"""What is read of an engine's answer: the model's name and the token counts. All else is relayed unseen."""

from typing import Annotated, Any

import msgspec

# A count that is none (negative, or past what a double holds) is not believed.
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]


class Usage(msgspec.Struct, frozen=True):
    """Token counts as an engine reports them."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: Any = None
    """Whatever the engine puts there: one that puts nonsense there may still count right."""

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that the engine had in its prefix cache, where it says so."""
        details = self.prompt_tokens_details
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return cached if type(cached) is int and 0 <= cached <= (self.prompt_tokens or 0) else None


class UsageChunk(msgspec.Struct):
    """An event of a stream that may report usage."""

    choices: list[msgspec.Raw] | None = None
    usage: Usage | None = None


class WithModel(msgspec.Struct):
    """Any document that names a model."""

    model: msgspec.Raw = msgspec.Raw(b"")


class WholeAnswer(msgspec.Struct):
    """An answer that is no stream."""

    model: msgspec.Raw = msgspec.Raw(b"")
    usage: Usage | None = None


read_model = msgspec.json.Decoder(WithModel).decode
read_usage_chunk = msgspec.json.Decoder(UsageChunk).decode
read_whole_answer = msgspec.json.Decoder(WholeAnswer).decode
