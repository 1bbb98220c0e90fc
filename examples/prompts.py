"""Prompts of an exact number of tokens, cut from generated logbooks that all begin differently."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

SENTENCES = (
    "On day {n} the keeper of the {place} noted a steady wind and {n} sacks of flour in the store.",
    "A letter came with the morning boat and asked how many visitors had climbed the tower since spring.",
    "The answer was {m}, among them two painters, a doctor and a family that had lost its way.",
    "In the afternoon the lamp was cleaned, the clock was set, and the old dog slept under the stairs.",
    "Rain fell for {m} hours, so the path to the {place} was closed and the garden was left alone.",
    "The cook baked bread, mended a net and told the story of the winter when the harbour froze.",
    "At night {n} ships passed; the last one, a grey freighter called Alma, answered with a long horn.",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text and how many tokens the model's tokenizer makes of it."""

    text: str
    num_tokens: int


class PromptWriter:
    """Writes prompts for one tokenizer. Tokens are counted as vLLM does, special tokens included."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def of(self, text: str) -> Prompt:
        """A given text."""
        return Prompt(text, len(self._tokenizer.encode(text).ids))

    def cut(self, place: str, num_tokens: int) -> Prompt:
        """The beginning of a logbook of `place`, exactly `num_tokens` tokens long.

        Cutting inside a word can make the rest encode differently; a later beginning is tried then.
        """
        sentences = logbook(place, num_tokens)
        for first in range(len(SENTENCES)):
            ids = self._tokenizer.encode(" ".join(sentences[first:])).ids[:num_tokens]
            prompt = self.of(self._tokenizer.decode(ids, skip_special_tokens=False))
            if prompt.num_tokens == num_tokens:
                return prompt
        raise ValueError(f"no prompt of {num_tokens} tokens found in the logbook of the {place}")


def logbook(place: str, num_tokens: int) -> list[str]:
    """Sentences that make more than `num_tokens` tokens from every one of the first few on."""
    count = num_tokens // 10 + 2 * len(SENTENCES)
    return [SENTENCES[i % len(SENTENCES)].format(place=place, n=3 + 7 * i % 90, m=2 + 5 * i % 23) for i in range(count)]
