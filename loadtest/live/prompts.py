"""Prompts of real text: a question about passages in English, German, Chinese, a letter, minutes and a piece of code.

`passages.txt` was written for this purpose. A prompt begins with a number of its own, six digits and hence as many
tokens whatever they are, so that no engine finds it in its cache because another policy has sent the same text before;
beside that number the text of a request is the same under every policy.
"""

from pathlib import Path
from random import Random

BYTES_PER_TOKEN = 3.9
"""Of these passages under SmolLM2's tokenizer, about. What a prompt really weighed is the engine's own count."""
MARK_DIGITS = 6
TASKS = (
    "Continue this text in the same manner, at length:", "Tell what happens here, step by step:",
    "Explain this text to a child, with examples:", "List and discuss what matters in this text:",
)
PASSAGES = tuple(Path(__file__).with_name("passages.txt").read_text(encoding="utf-8").strip().split("\n\n"))


def prompt_body(tokens: int, rng: Random) -> str:
    """A task and text from a passage on, of about `tokens` tokens together; at least the task."""
    task, at = rng.choice(TASKS), rng.randrange(len(PASSAGES))
    room = round(tokens * BYTES_PER_TOKEN) - len(task) - 1
    pieces: list[bytes] = []
    while room > 0:
        piece = PASSAGES[at % len(PASSAGES)].encode()[:room]
        pieces.append(piece)
        room -= len(piece) + 2
        at += 1
    # A cut may go through a character of more than one byte.
    text = b"\n\n".join(pieces).decode("utf-8", "ignore")
    return f"{task}\n{text}"


def mark(rng: Random) -> str:
    """What a prompt begins with."""
    return f"{rng.randrange(10**MARK_DIGITS):0{MARK_DIGITS}d}"
