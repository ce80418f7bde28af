"""Questions and answers about Python, made from the help topics of the standard library.

`help("LAMBDA")` reads its text from `pydoc_data.topics`, which comes with every Python: some 80 topics of reference
prose, regular enough to be cut into pairs. A subject is a heading or a definition; its answer is the first paragraph
of prose beneath it, shortened to whole sentences:

    str.capitalize()                                                         <- subject

       Return a copy of the string with its first character capitalized      <- answer
       and the rest lowercased.

becomes "What does Python's documentation say about str.capitalize()?" and "Return a copy of the string with ...".

Large topics repeat small ones ("compound" holds the text of "if", "for", "try", ...), so a paragraph belongs to the
smallest topic that has it. Whole topics are held out: no paragraph is in both sets.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

HELD_OUT_TOPICS = frozenset({"numeric-types", "sequence-types", "specialattrs", "typesmapping"})
NUM_HELD_OUT = 24  # of some 50: enough to see the loss fall, and quick; 1, 2, 3, 4, 6 or 8 processes share them evenly
ANSWER_CHARS = range(30, 201)  # the length of an answer; 200 characters are about 50 tokens

UNDERLINE = re.compile(r"([*=~-])\1+")  # beneath a heading
PROSE = re.compile(r" *(?!(New|Added|Changed|Deprecated) in )[A-Z].*[.:]", re.DOTALL)
DEFINITION = re.compile(r"(?!\d+\.|.*::=)[\w!].*[^.:,]")  # no numbered item, no rule of the grammar, no sentence

SYSTEM_PROMPT = "You explain Python."
IGNORED = -100  # the label that cross-entropy leaves out


class Pair(NamedTuple):
    topic: str
    question: str
    answer: str


class Example(NamedTuple):
    input_ids: Tensor  # (s,) the question in the chat template, then the answer
    labels: Tensor  # (s,) the same where the answer stands, IGNORED before it


def make_pairs() -> list[Pair]:
    """All pairs that this Python's help topics give, smallest topic first, no paragraph twice."""
    pairs: list[Pair] = []
    taken: set[str] = set()
    for topic in sorted(topics, key=lambda name: (len(topics[name]), name)):
        for subject, prose in _subjects(topics[topic]):
            answer = _shorten(prose)
            if len(answer) in ANSWER_CHARS and prose not in taken:
                taken.add(prose)
                pairs.append(Pair(topic, ask(subject), answer))
    return pairs


def split(pairs: Sequence[Pair]) -> tuple[list[Pair], list[Pair]]:
    """The pairs to learn from and the pairs to measure with, which share no topic; the same in every process."""
    train = [pair for pair in pairs if pair.topic not in HELD_OUT_TOPICS]
    held_out = [pair for pair in pairs if pair.topic in HELD_OUT_TOPICS]
    return train, random.Random(0).sample(held_out, NUM_HELD_OUT)


def ask(subject: str) -> str:
    return f"What does Python's documentation say about {subject}?"


def as_chat(question: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text after which the model is to answer."""
    messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def encode(pair: Pair, tokenizer: PreTrainedTokenizerBase) -> Example:
    """Tokens and labels of a pair. Only the answer and the token that ends it are to be learnt."""
    prompt = tokenizer(as_chat(pair.question, tokenizer), add_special_tokens=False).input_ids
    answer = tokenizer(pair.answer + tokenizer.eos_token, add_special_tokens=False).input_ids
    return Example(torch.tensor(prompt + answer), torch.tensor([IGNORED] * len(prompt) + answer))


def collate(examples: Sequence[Example]) -> dict[str, Tensor]:
    """A batch, each of its tensors (b, s). Padding stands at the end, where a causal model does not look back at it."""
    input_ids = pad_sequence([example.input_ids for example in examples], batch_first=True)
    labels = pad_sequence([example.labels for example in examples], batch_first=True, padding_value=IGNORED)
    lengths = torch.tensor([len(example.input_ids) for example in examples])
    attention_mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}


def num_answer_tokens(batch: dict[str, Tensor]) -> int:
    """The tokens over which the loss of a batch is a mean."""
    return int((batch["labels"] != IGNORED).sum())


def _subjects(text: str) -> Iterator[tuple[str, str]]:
    """Each heading or definition of a topic, with the first paragraph of prose beneath it."""
    waiting: dict[int, str] = {}  # the indentation at which prose is expected -> the subject it would explain
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        lines = block.split("\n")
        first, indent = lines[0].strip(), len(block) - len(block.lstrip(" "))
        if len(lines) == 2 and UNDERLINE.fullmatch(lines[1]):
            waiting = {0: first.replace('"', "")}
        elif PROSE.fullmatch(block):
            if indent in waiting:
                yield waiting[indent], " ".join(re.sub(r"(?<=\w)-\n *", "-", block).split())
            waiting = {column: subject for column, subject in waiting.items() if column < indent}
        elif DEFINITION.fullmatch(first) and (len(lines) == 1 or lines[-1].endswith(")")):
            waiting[indent + 3] = first


def _shorten(prose: str) -> str:
    """As many leading sentences as fit; empty when not even the first does, or when it only announces an example."""
    sentences = re.split(r"(?<=[.:]) (?=[A-Z])", prose)
    while sentences and (sentences[-1].endswith(":") or len(" ".join(sentences)) not in range(ANSWER_CHARS.stop)):
        sentences.pop()
    return " ".join(sentences)
