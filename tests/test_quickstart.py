"""The quickstart: its data are sound, and it runs from end to end."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

from tests.smollm2 import from_package, needs_smollm2

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
LONGEST_EXAMPLE = 160  # tokens


@pytest.fixture(scope="module")
def data() -> ModuleType:
    """The module beside the script, loaded by its path."""
    pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location("quickstart_data", EXAMPLES / "quickstart_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(**from_package())


def test_the_topics_give_pairs(data: ModuleType) -> None:
    pairs = data.make_pairs()
    assert 240 <= len(pairs) <= 340  # 257 in Python 3.10.13, 293 in 3.11.7, 299 in 3.12.1, 302 in 3.13.0
    assert pairs == data.make_pairs()
    by_question = {pair.question: pair for pair in pairs}
    known = by_question["What does Python's documentation say about str.capitalize()?"]
    assert known.topic == "string-methods"
    assert known.answer.startswith("Return a copy of the string with its first character capitalized")


def test_answers_are_whole_sentences_of_bounded_length(data: ModuleType) -> None:
    answers = [pair.answer for pair in data.make_pairs()]
    assert all(len(answer) in data.ANSWER_CHARS and answer.endswith(".") for answer in answers)
    assert not [answer for answer in answers if "\n" in answer or "::=" in answer or "  " in answer]


def test_no_topic_and_no_answer_is_in_both_sets(data: ModuleType) -> None:
    pairs = data.make_pairs()
    train, held_out = data.split(pairs)
    assert len(held_out) == data.NUM_HELD_OUT
    topics = Counter(pair.topic for pair in held_out)
    assert set(topics) == data.HELD_OUT_TOPICS
    assert not set(topics) & {pair.topic for pair in train}
    assert not {pair.answer for pair in held_out} & {pair.answer for pair in train}
    assert len(train) + sum(pair.topic in data.HELD_OUT_TOPICS for pair in pairs) == len(pairs)
    assert data.split(pairs) == (train, held_out)


@needs_smollm2
def test_the_loss_is_on_the_answer_alone(data: ModuleType, tokenizer: PreTrainedTokenizerBase) -> None:
    pairs = data.make_pairs()
    for pair in pairs:
        input_ids, labels = data.encode(pair, tokenizer)
        learnt = labels != data.IGNORED
        start = int(learnt.int().argmax())
        assert start > 0
        assert learnt[start:].all()
        assert (labels[learnt] == input_ids[learnt]).all()
        assert tokenizer.decode(input_ids[learnt]) == pair.answer + tokenizer.eos_token
        assert tokenizer.decode(input_ids[~learnt]) == data.as_chat(pair.question, tokenizer)
        assert len(input_ids) <= LONGEST_EXAMPLE


@needs_smollm2
def test_padding_is_neither_seen_nor_learnt(data: ModuleType, tokenizer: PreTrainedTokenizerBase) -> None:
    examples = [data.encode(pair, tokenizer) for pair in data.make_pairs()[:8]]
    batch = data.collate(examples)
    assert batch["input_ids"].shape == (8, max(len(example.input_ids) for example in examples))
    for row, (input_ids, labels) in enumerate(examples):
        length = len(input_ids)
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (batch["input_ids"].shape[1] - length)
        assert batch["input_ids"][row, :length].tolist() == input_ids.tolist()
        assert batch["labels"][row, :length].tolist() == labels.tolist()
        assert (batch["labels"][row, length:] == data.IGNORED).all()
    assert data.num_answer_tokens(batch) == sum(int((labels != data.IGNORED).sum()) for _, labels in examples)


@needs_smollm2
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("strategy", ["zero3", "ddp"])
def test_two_steps_lower_the_loss_and_the_folder_holds_the_model(strategy: str, tmp_path: Path) -> None:
    command = [sys.executable, "examples/quickstart.py", "--steps", "2", "--strategy", strategy, "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=840)
    output = finished.stdout
    assert finished.returncode == 0, output + finished.stderr
    before, after = map(float, re.search(r"held-out loss\s*│\s*([\d.]+)\s*│\s*([\d.]+)", output).groups())  # type: ignore[union-attr]
    assert after < before - 0.2
    assert "is the model that was trained: read back" in output
    assert len(re.findall(r"process [01]: peak memory", output)) == 2

    from safetensors import safe_open

    with safe_open(tmp_path / "finetuned" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names  # tied to the embedding: stored once
