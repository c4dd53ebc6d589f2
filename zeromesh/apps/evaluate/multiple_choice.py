"""Accuracy on multiple choice: the likeliest continuation of each question counts as the answer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zeromesh.apps.evaluate.scoring import Row, Scorer, continuation_row
from zeromesh.apps.train.data import text_formats
from zeromesh.apps.train.data.tokenizer import TextTokenizer
from zeromesh.base.words import show

WANTED = (
    'records of {"question": ..., "choices": [...], "answer": ...} (.jsonl, .json, .parquet), or a table (.csv, .tsv) '
    "with the columns question, answer and one for each choice (A, B, C, ...)"
)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Question(NamedTuple):
    """A question with its choices."""

    text: str
    choices: tuple[str, ...]
    answer: int  # place of the right choice


def read_questions(path: Path) -> list[Question]:
    """Return the questions of a file; raise ValueError with the place of a wrong one."""
    document = text_formats.Document(path.name, path)
    if not document.size:
        raise ValueError(f"--choices = {str(path)!r} {'is empty' if path.is_file() else 'is no file'}; name {WANTED}")
    if (form := text_formats.format_of(document)) in ("", text_formats.INDEXED):
        raise ValueError(f"--choices = {str(path)!r} must be {WANTED}")
    questions = []
    for portion in text_formats.portions(document):
        for number, record in text_formats.read_portion(portion):
            with text_formats.placed(portion, number):
                questions.append(_question(record, form in text_formats.TABLES))
    if not questions:
        raise ValueError(f"--choices = {str(path)!r} has no question; it must be {WANTED}")
    return questions


def _question(record: Any, is_row: bool) -> Question:
    if not isinstance(record, Mapping):
        raise ValueError(f"is {show(record)}, and must be an object with the keys question, choices and answer")
    # Questions of a table may have fewer choices than it has columns for them.
    values = {name.lower(): value for name, value in record.items() if value != "" or not is_row}
    choices, labels = _choices(values)
    key = next((key for key in ("answer", "answerkey", "label") if key in values), None)
    missing = [name for name, there in (("question", "question" in values), ("answer", key is not None)) if not there]
    if missing or not choices:
        wanted = ", ".join(map(repr, [*missing, *([] if choices else ["choices"])]))
        raise ValueError(f"has the keys {list(record)} and lacks {wanted}; a file has {WANTED}")
    assert key is not None
    text = values["question"]
    if not isinstance(text, str) or not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("question and choices must be text, and no choice empty")
    if any("\ud800" <= character <= "\udfff" for character in "".join([text, *choices])):
        raise ValueError("question has half of a surrogate pair, which is no character")
    if len(choices) < 2:
        raise ValueError(f"has one choice, {show(choices[0])}; a question has at least two")
    return Question(text, tuple(choices), _answer(values[key], choices, labels))


def _choices(record: Mapping[str, Any]) -> tuple[Sequence[Any], Sequence[str]]:
    """Return the choices, and the labels that an answer may name them by."""
    choices = record.get("choices")
    if isinstance(choices, str):  # a cell of a table
        try:
            choices = json.loads(choices)
        except ValueError:
            raise ValueError(
                f"choices = {show(choices)} must be a JSON list; or give each choice a column (A, B, C, ...)"
            ) from None
    if isinstance(choices, Mapping):  # as data sets of the Hub have them: texts, and labels
        return list(choices.get("text", ())), [str(label) for label in choices.get("label", ())]
    if isinstance(choices, list):
        return choices, LETTERS
    columns = {name.upper().removeprefix("CHOICE").strip("_ "): value for name, value in record.items()}
    labels = list(LETTERS) if "A" in columns else [str(number) for number in range(10)]
    named = [label for label in labels if label in columns]
    return [columns[label] for label in named], named


def _answer(answer: Any, choices: Sequence[str], labels: Sequence[str]) -> int:
    """Return the place of the right choice, which is named by its text, its label or its place."""
    if isinstance(answer, int) and str(answer) in labels:  # of choices that the file numbers
        answer = str(answer)
    if isinstance(answer, str):
        # The text comes first: choices may be numbers, and answers are their text then.
        for names in (choices, labels[: len(choices)], [label.lower() for label in labels[: len(choices)]]):
            if answer.strip() in names:
                return list(names).index(answer.strip())
        if answer.strip().isdecimal():
            answer = int(answer)
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        return answer
    raise ValueError(
        f"answer = {show(answer)} is none of the {len(choices)} choices; write its text, its letter (A is the first), "
        "or its place (0 is the first)"
    )


def encode_pair(tokenizer: TextTokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the ids of a context and of its continuation, as lm-evaluation-harness divides them."""
    # Blanks at the end of the context go to the continuation: most tokenizers begin a word with its blank. Both are
    # encoded in one text, where a tokenizer divides words otherwise than in two.
    blanks = len(context) - len(context.rstrip())
    if blanks:
        context, continuation = context[:-blanks], context[-blanks:] + continuation
    begin = [] if tokenizer.begin is None else [tokenizer.begin]
    if not context:  # the continuation is a text of its own
        return begin or [tokenizer.end], tokenizer.encode([continuation])[0].tolist()
    together, before = (ids.tolist() for ids in tokenizer.encode([context + continuation, context]))
    return [*begin, *before], together[len(before) :]


def score_questions(
    scorer: Scorer, tokenizer: TextTokenizer, questions: Sequence[Question], chat: bool
) -> dict[str, Any]:
    """Return the accuracies; with ``chat`` choices are answers to the question as a message of a user. Collective."""

    def rows() -> Iterator[Row]:
        for question in questions:
            for choice in question.choices:
                if chat:
                    context = tokenizer.prompt([{"role": "user", "content": question.text}]).tolist()
                    answer = tokenizer.encode([choice])[0].tolist()
                else:
                    context, answer = encode_pair(tokenizer, question.text, f" {choice}")
                if not 0 < len(answer) <= scorer.longest:
                    raise ValueError(
                        f"the choice {show(choice)} has {len(answer)} tokens, and the model takes {scorer.longest}"
                    )
                yield continuation_row(context, answer, scorer.longest)

    likelihoods = (values[0] for values in scorer.score(rows()))
    right = right_by_length = 0
    for question in questions:
        sums = [next(likelihoods) for _ in question.choices]
        # By characters, as acc_norm of lm-evaluation-harness.
        means = [value / len(choice) for value, choice in zip(sums, question.choices, strict=True)]
        right += sums.index(max(sums)) == question.answer
        right_by_length += means.index(max(means)) == question.answer
    count = len(questions)
    accuracy, by_length = right / count, right_by_length / count
    return {
        "questions": count,
        "accuracy": accuracy,
        "accuracy_error": _standard_error(accuracy, count),
        "accuracy_by_length": by_length,
        "accuracy_by_length_error": _standard_error(by_length, count),
        "chance": sum(1 / len(question.choices) for question in questions) / count,
    }


def _standard_error(share: float, count: int) -> float | None:
    # Of a sample, as lm-evaluation-harness reports it.
    return math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None
