"""``zeromesh evaluate``, ``chat`` and ``serve``: figures beside plain transformers, conversations, hand-over."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from commands import call, write_config
from harness import run_ranks
from zeromesh.apps.evaluate import evaluate_run
from zeromesh.apps.evaluate.chat import Conversation, chat
from zeromesh.apps.evaluate.evaluate_run import Wanted, run_rank
from zeromesh.apps.evaluate.evaluated_model import EvaluatedModel
from zeromesh.apps.evaluate.held_out import read_documents, windows
from zeromesh.apps.evaluate.multiple_choice import read_questions
from zeromesh.apps.evaluate.serve_model import serve
from zeromesh.apps.train.data.ordered_loader import NO_LABEL
from zeromesh.apps.train.data.records import Tokens
from zeromesh.apps.train.sample import TextWriter
from zeromesh.apps.train.train_settings import TextData

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXT = "Oslo is the capital of Norway. A day has 1,440 minutes.\n\nÆøå: two bytes each.\n" * 3
QUESTIONS = [
    {"question": "What floats on water?", "choices": ["oil", "a stone", "iron"], "answer": 0},
    {"question": "How many minutes has a day?", "choices": ["1,440: 24 hours of 60 minutes", "60"], "answer": "B"},
    {"question": "Capital of Norway:", "choices": ["Rome", "Oslo"], "answer": "Oslo"},
]

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def plain(tiny: Path) -> tuple[Any, Any]:
    """Return the model and the tokenizer as transformers opens them."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    return model, transformers.AutoTokenizer.from_pretrained(tiny)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "questions.jsonl").write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return folder


def evaluated(*arguments: object) -> dict[str, Any]:
    result = call("evaluate", *arguments, "--json")
    assert result.exit_code == 0, result.output
    figures: dict[str, Any] = json.loads(result.stdout)
    return figures


def likelihood(model: Any, ids: list[int], start: int) -> float:
    """Return the log-likelihood of the ids from ``start`` on, by plain transformers."""
    with torch.no_grad():
        scores = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return sum(float(scores[place - 1, ids[place]]) for place in range(start, len(ids)))


def test_perplexity_equals_that_of_transformers_on_the_same_tokens(
    tiny: Path, files: Path, plain: tuple[Any, Any]
) -> None:
    model, tokenizer = plain
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = float(model(input_ids=ids, labels=ids).loss)
    figures = evaluated(tiny, "--data", files / "text.txt")["held_out"]
    assert figures["tokens"] == ids.shape[1] - 1
    assert figures["loss"] == pytest.approx(loss, rel=1e-6)
    assert figures["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert figures["bytes"] == len(TEXT.encode())
    bits = loss * (ids.shape[1] - 1) / math.log(2) / len(TEXT.encode())
    assert figures["bits_per_byte"] == pytest.approx(bits, rel=1e-6)


@pytest.mark.full
def test_windows_score_each_token_once_with_what_a_plain_window_has_before_it(
    tiny: Path, files: Path, plain: tuple[Any, Any]
) -> None:
    model, tokenizer = plain
    ids = tokenizer(TEXT).input_ids
    length, stride = 24, 9
    total, scored = 0.0, 1
    while scored < len(ids):
        stop = min(len(ids), scored + (stride if scored > 1 else length))
        start = max(0, stop - 1 - length)
        total += likelihood(model, ids[start:stop], scored - start)
        scored = stop
    figures = evaluated(tiny, "--data", files / "text.txt", "--length", length, "--stride", stride)["held_out"]
    assert (figures["tokens"], figures["window"], figures["stride"]) == (len(ids) - 1, length, stride)
    assert figures["loss"] == pytest.approx(-total / (len(ids) - 1), rel=1e-6)


@pytest.mark.parametrize(("length", "stride"), [(4, 4), (4, 1), (5, 3), (100, 100)])
def test_windows_hold_each_label_once(length: int, stride: int) -> None:
    ids = np.arange(11)
    rows = list(windows(Tokens(ids, None, 0), length, stride))
    labels = [int(label) for row in rows for label in row.labels if label != NO_LABEL]
    assert labels == list(range(1, 11))
    for row in rows:
        assert len(row.tokens) <= length
        assert all(label in (NO_LABEL, token + 1) for token, label in zip(row.tokens, row.labels, strict=True))


def test_multiple_choice_takes_the_likeliest_choice_and_the_likeliest_by_characters(
    tiny: Path, files: Path, plain: tuple[Any, Any]
) -> None:
    model, tokenizer = plain
    right = by_length = 0
    for question, answer in zip(QUESTIONS, (0, 1, 1), strict=True):
        scores = []
        for choice in question["choices"]:
            before = tokenizer(question["question"]).input_ids
            ids = tokenizer(f"{question['question']} {choice}").input_ids
            scores.append(likelihood(model, ids, len(before)))
        lengths = [len(choice) for choice in question["choices"]]
        right += int(np.argmax(scores)) == answer
        by_length += int(np.argmax(np.array(scores) / lengths)) == answer
    figures = evaluated(tiny, "--choices", files / "questions.jsonl", "--batch", 2)["choices"]
    assert (figures["accuracy"], figures["accuracy_by_length"]) == (right / 3, by_length / 3)
    assert figures["chance"] == pytest.approx((1 / 3 + 1 / 2 + 1 / 2) / 3)


@pytest.mark.parametrize(
    ("name", "text", "answers"),
    [
        ("q.csv", "question,A,B,answer\nOne?,1,2,B\nTwo?,2,1,2\n", [1, 0]),
        ("q.tsv", 'question\tchoices\tanswer\nOne?\t["a", "b"]\tb\nTwo?\t["a", "b"]\tA\n', [1, 0]),
        ("q.jsonl", '{"question": "Q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "2"}\n', [1]),
        ("q.jsonl", '{"question": "Q", "1": "x", "2": "y", "answer": 2}\n', [1]),
        ("q.json", '[{"question": "Q", "choices": ["x", "y"], "answer": 1}]', [1]),
        ("q.csv", "Question;A;B;C;Answer\nOne?;1;2;;b\nTwo?;1;2;3;C\n", [1, 2]),
    ],
)
def test_questions_are_read_from_tables_and_lines(tmp_path: Path, name: str, text: str, answers: list[int]) -> None:
    (tmp_path / name).write_text(text)
    assert [question.answer for question in read_questions(tmp_path / name)] == answers


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("q.jsonl", "", "'q.jsonl' is empty"),
        ("q.txt", "What?", "'q.txt' must be records"),
        ("q.csv", "question,A,B,answer\nOne?,1,2\n", "q.csv, line 2: has 3 fields"),
        ("q.csv", "question,A,B,answer\nOne?,1,,A\n", "q.csv, line 2: has one choice"),
        ("q.jsonl", '{"question": "Q", "choices": ["x", "y"], "answer": 2}', "line 1: answer = 2 is none of the 2"),
        ("q.jsonl", '{"question": "\\ud800", "choices": ["x", "y"], "answer": 1}', "line 1: question has half of a"),
    ],
)
def test_a_wrong_file_of_questions_is_refused_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        read_questions(Path(name))


def test_pairs_of_answers_are_no_held_out_text(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "Who?", "chosen": "Me, and all others.", "rejected": "You."}\n')
    data, tokenizer = TextData(train=("none",)), EvaluatedModel(tiny).tokenizer
    with pytest.raises(ValueError, match="pairs of answers, which a run with a section dpo holds out itself"):
        list(read_documents(data, [str(tmp_path / "pairs.jsonl")], tokenizer))


@pytest.mark.full
def test_a_run_of_dpo_is_evaluated_on_its_own_pairs(tiny: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"What is {number}?", "chosen": f"It is {number}.", "rejected": "No."} for number in range(20)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    settings = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "huggingface": {"path": str(tiny), "sequence_length": 64},
        "dpo": {"beta": 0.1},
        "data": {"train": str(tmp_path / "pairs.jsonl"), "validation_fraction": 0.2},
        "run": {"steps": 2, "output": str(tmp_path / "run"), "evaluate_every": 0},
    }
    result = call("train", write_config(tmp_path, settings))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "run/report.json").read_text())
    held_out = evaluated(tmp_path / "run")["held_out"]
    assert (held_out["loss_per_pair"], held_out["accuracy"]) == (report["validation_loss"], report["accuracy"])
    assert "nats per pair" in call("evaluate", tmp_path / "run").output
    assert "loss, nats per pair" in (tmp_path / "run/report.html").read_text()


def test_figures_that_are_not_finite_are_still_json(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = {"held_out": {"loss": math.nan, "perplexity": math.inf, "tokens": 3}}
    monkeypatch.setattr(evaluate_run, "check", lambda model, wanted: None)
    monkeypatch.setattr(evaluate_run, "launch", lambda *arguments: [result])
    evaluate_run.evaluate(EvaluatedModel(tiny), Wanted(), 1, True)
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {
        "held_out": {"loss": None, "perplexity": None, "tokens": 3}
    }


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    settings = {
        "train_batch_size": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
        "huggingface": {"path": str(tiny), "sequence_length": 160},
        "data": {"train": str(EXAMPLES / "chat.jsonl"), "validation_fraction": 0.1},
        "run": {"steps": 2, "output": str(folder / "run"), "evaluate_every": 0, "save_every": 1},
    }
    result = call("train", write_config(folder, settings))
    assert result.exit_code == 0, result.output
    return folder / "run"


@pytest.mark.full
def test_a_run_is_evaluated_as_its_report_says_in_every_layout(run: Path, files: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    figures = evaluated(run)
    assert figures["checkpoint"] == "global_step2"
    assert figures["held_out"]["loss"] == report["validation_loss"]
    assert figures["held_out"]["bits_per_byte"] == report["bits_per_byte"]
    assert evaluated(run, "--tag", "global_step1")["held_out"]["loss"] != report["validation_loss"]
    wanted = Wanted(data=(str(files / "text.txt"),), choices=files / "questions.jsonl", batch=2)
    expected = evaluated(run, "--data", files / "text.txt", "--choices", files / "questions.jsonl")
    settings = json.loads((run / "config.json").read_text())
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), 1)
    for mesh, stage in (({}, 3), ({"tensor": 2}, 3), ({"pipeline": 2}, 1), ({"tensor": 3}, 0)):
        layout = settings | {"mesh": mesh, "zero_optimization": {"stage": stage}, **sizes}
        (run / "config.json").write_text(json.dumps(layout))
        try:
            results = run_ranks(run_rank, 2, EvaluatedModel(run), wanted, timeout=200)
        finally:
            (run / "config.json").write_text(json.dumps(settings))
        for result in results:
            assert result["ranks"] == 2
            assert result["held_out"]["loss"] == pytest.approx(expected["held_out"]["loss"], rel=1e-5)
            assert result["choices"]["accuracy"] == expected["choices"]["accuracy"]


@pytest.mark.full
def test_tasks_of_the_harness_have_the_figures_of_its_own_adapter(tiny: Path, tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    rows = [
        (question["question"], question["choices"], gold) for question, gold in zip(QUESTIONS, (0, 1, 1), strict=True)
    ]
    lines = [json.dumps({"question": text, "choices": choices, "gold": gold}) for text, choices, gold in rows]
    (tmp_path / "questions.jsonl").write_text("\n".join(lines))
    common = (
        f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/questions.jsonl}}}}\ntest_split: test\n"
    )
    kinds = {
        "multiple_choice": 'doc_to_text: "{{question}}"\ndoc_to_choice: choices\ndoc_to_target: gold\n'
        "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
        "loglikelihood_rolling": 'doc_to_text: ""\ndoc_to_target: "{{question}} {{choices[0]}}"\n'
        "metric_list: [{metric: bits_per_byte}, {metric: word_perplexity}]\n",
        "generate_until": 'doc_to_text: "{{question}}"\ndoc_to_target: "{{choices[gold]}}"\n'
        "generation_kwargs: {until: ['.'], do_sample: false, max_gen_toks: 6}\nmetric_list: [{metric: exact_match}]\n",
    }
    (tmp_path / "tasks").mkdir()
    for kind, text in kinds.items():
        (tmp_path / "tasks" / f"{kind}.yaml").write_text(f"task: my_{kind}\n{common}output_type: {kind}\n{text}")
    names = [f"my_{kind}" for kind in kinds]
    with patch.dict(os.environ, {"HF_DATASETS_CACHE": str(tmp_path / "cache")}):
        manager = TaskManager(include_path=str(tmp_path / "tasks"))
        theirs = lm_eval.simple_evaluate(
            model=HFLM(pretrained=str(tiny), dtype="float32", device="cpu", batch_size=2),
            tasks=names,
            task_manager=manager,
            bootstrap_iters=0,
        )
        ours = evaluated(tiny, "--tasks", ",".join(names), "--include", tmp_path / "tasks")["tasks"]
    for name in names:
        expected = {key: value for key, value in theirs["results"][name].items() if key.endswith(",none")}
        metrics = {key.removesuffix(",none"): value for key, value in expected.items() if "stderr" not in key}
        assert metrics
        assert {key: ours[name][key] for key in metrics} == pytest.approx(metrics, rel=1e-5)


def repeating(tokenizer: Any, text: str, longest: int | None = None) -> tuple[TextWriter, list[list[int]]]:
    """Return a model that answers with a text always, and the contexts that it was given."""
    answer, contexts = [*tokenizer.encode([text])[0].tolist(), tokenizer.end], []

    def begin() -> Callable[[list[int]], torch.Tensor]:
        before: list[int] = []

        def following(ids: list[int]) -> torch.Tensor:
            if not before:
                before.append(len(ids))
                contexts.append(list(ids))
            scores = torch.zeros(tokenizer.size)
            scores[answer[len(ids) - before[0]]] = 1.0
            return scores

        return following

    return TextWriter(begin, frozenset({tokenizer.end}), tokenizer, longest), contexts


def test_a_conversation_keeps_its_history_and_forgets_the_oldest_turns(tiny: Path) -> None:
    tokenizer = EvaluatedModel(tiny).tokenizer
    writer, contexts = repeating(tokenizer, "Yes, Oslo.")
    conversation = Conversation(writer, True, 20, 0.0, 0, system="Be brief.")
    assert "".join(conversation.answer("Is it Oslo?")) == "Yes, Oslo."
    assert "".join(conversation.answer("Sure?")) == "Yes, Oslo."
    first, second = (tokenizer.decode(ids) for ids in contexts)
    assert [part in first for part in ("Be brief.", "Is it Oslo?", "Sure?")] == [True, True, False]
    assert all(part in second for part in ("Be brief.", "Is it Oslo?", "Yes, Oslo.", "Sure?"))
    writer, contexts = repeating(tokenizer, "Yes.", longest=len(contexts[1]) + 8)
    short = Conversation(writer, True, 20, 0.0, 0, system="Be brief.")
    for message in ("Is it Oslo?", "Sure?", "Really sure?"):
        assert "".join(short.answer(message)) == "Yes."
    last = tokenizer.decode(contexts[-1])
    assert [part in last for part in ("Be brief.", "Really sure?", "Is it Oslo?")] == [True, True, False]


def test_an_answer_that_is_ended_stays_in_the_conversation(tiny: Path) -> None:
    writer, _ = repeating(EvaluatedModel(tiny).tokenizer, "Yes, Oslo it is.")
    conversation = Conversation(writer, True, 20, 0.0, 0)
    pieces = conversation.answer("Is it?")
    beginning = next(pieces)
    pieces.close()
    assert [message["content"] for message in conversation.messages] == ["Is it?", beginning]


def test_a_chat_on_standard_input_resets_saves_and_ends(tiny: Path, tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from zeromesh.apps.cli.main import app

    lines = [
        "Hello",
        "/save " + str(tmp_path / "chat.txt"),
        "/nonsense",
        "/reset",
        "/save " + str(tmp_path / "none.txt"),
    ]
    result = CliRunner().invoke(app, ["chat", str(tiny), "--tokens", "3"], input="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.output
    assert "/nonsense is no command" in result.output
    assert (tmp_path / "chat.txt").read_text().startswith("user: Hello\nassistant: ")
    assert (tmp_path / "none.txt").read_text() == "\n"


def test_a_chat_without_standard_input_and_one_whose_system_message_is_refused_end(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    chat(EvaluatedModel(tiny), 3, 0.0, 0, None)
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    template = folder / "chat_template.jinja"
    refusal = "{%- if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    template.write_text(refusal + template.read_text())
    with pytest.raises(ValueError, match="chat template refuses the messages: no system role"):
        chat(EvaluatedModel(folder), 3, 0.0, 0, "Be brief.")


@pytest.mark.full
def test_control_c_ends_an_answer_and_control_d_the_chat(tiny: Path) -> None:
    main, other = pty.openpty()
    command = [sys.executable, "-m", "zeromesh", "chat", str(tiny), "--tokens", "480", "--temperature", "5"]
    process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, start_new_session=True)
    os.close(other)
    seen = b""

    def wait_for(text: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + 120
        while text not in seen and time.monotonic() < deadline:
            seen += os.read(main, 4096)
        assert text in seen, seen
        seen = seen.partition(text)[2]

    try:
        wait_for(b"> ")
        os.write(main, b"Hello\n")
        wait_for(b"Hello\r\n")
        wait_for(b" ")  # a piece of the answer
        process.send_signal(signal.SIGINT)
        wait_for(b"(ended)")
        wait_for(b"> ")
        os.write(main, b"\x04")
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        os.close(main)


@pytest.mark.full
def test_a_run_is_exported_once_and_handed_to_the_engine(run: Path, tmp_path: Path) -> None:
    import transformers

    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\necho")
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    calls: list[Any] = []
    with patch.dict(os.environ, environment), patch("os.execv", lambda *arguments: calls.append(arguments)):
        serve(EvaluatedModel(run), None, 9000, ["--max-model-len", "128"])
        folder = run / "serve" / "global_step2"
        written = (folder / "model.safetensors").stat().st_mtime_ns
        serve(EvaluatedModel(run), "vllm", 9000, [])
    command = ["vllm", "serve", str(folder.absolute()), "--port", "9000"]
    assert calls == [(str(program), [*command, "--max-model-len", "128"]), (str(program), command)]
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert transformers.AutoModelForCausalLM.from_pretrained(folder).config.vocab_size
    # A tag may name another checkpoint later, as best does.
    manifest = run / "checkpoints" / "global_step2" / "manifest.json"
    later = time.time_ns() + 10**9
    os.utime(manifest, ns=(later, later))
    with patch("os.execv", lambda *arguments: calls.append(arguments)), patch.dict(os.environ, environment):
        serve(EvaluatedModel(run), "vllm", 9000, [])
    assert (folder / "model.safetensors").stat().st_mtime_ns > written


def test_without_an_engine_the_ways_to_install_one_are_named(tiny: Path, tmp_path: Path) -> None:
    with patch("zeromesh.apps.evaluate.serve_model.shutil", SimpleNamespace(which=lambda *_, **__: None)):
        result = call("serve", tiny)
    assert result.exit_code == 2
    assert "pip install vllm or pip install 'transformers[serving]'" in result.output
