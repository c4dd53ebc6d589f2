"""Mistakes with trained models: evaluating, chatting, exporting and serving."""

from __future__ import annotations

import json

from mistakes import Mistake

# Enough of a model for what is refused before weights are read.
LLAMA = json.dumps(
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "max_position_embeddings": 64,
    }
)
TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 0,
                "content": "</s>",
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            }
        ],
        "model": {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1}, "unk_token": "a"},
    }
)
MODEL = {
    "model/config.json": LLAMA,
    "model/tokenizer.json": TOKENIZER,
    "model/tokenizer_config.json": json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}),
}

MISTAKES = [
    Mistake(
        "evaluating a folder that is not there",
        "zeromesh evaluate run/chat/model",
        ("'run/chat/model' is no folder; name the output folder of a run (run.output)", "config.json"),
    ),
    Mistake(
        "evaluating a folder of checkpoints instead of the run",
        "zeromesh evaluate runs/chat/checkpoints",
        ("holds neither a run nor a model", "with --tag for one of its checkpoints"),
        {"runs/chat/checkpoints/latest": "global_step100"},
    ),
    Mistake(
        "evaluating a model without saying on what",
        "zeromesh evaluate model",
        ("is a model, which has no held-out data; name text with --data FILES",),
        MODEL,
    ),
    Mistake(
        "evaluating on a file that is not there",
        "zeromesh evaluate model --data held-out.txt",
        ("data source 'held-out.txt' does not exist and matches no file",),
        MODEL,
    ),
    Mistake(
        "a stride that is longer than the window",
        "zeromesh evaluate model --data text.txt --length 32 --stride 64",
        ("--stride = 64 would leave tokens out: windows have 32; set it to that or less",),
        {**MODEL, "text.txt": "a a a"},
    ),
    Mistake(
        "a window that is longer than the model's positions",
        "zeromesh evaluate model --data text.txt --length 4096",
        ("--length = 4096 is longer than the 64 tokens that the model takes",),
        {**MODEL, "text.txt": "a a a"},
    ),
    Mistake(
        "tasks of the harness where it is not installed",
        "zeromesh evaluate model --tasks no_such_task",
        ("--tasks",),  # not installed: how to install it; installed: the tasks that there are
        MODEL,
        most_lines=40,
        seconds=300.0,
    ),
    Mistake(
        "an answer that is none of the choices",
        "zeromesh evaluate model --choices questions.jsonl",
        (
            'questions.jsonl, line 2: answer = "D" is none of the 2 choices',
            "write its text, its letter (A is the first), or its place (0 is the first)",
        ),
        {
            **MODEL,
            "questions.jsonl": '{"question": "Q", "choices": ["x", "y"], "answer": "A"}\n'
            '{"question": "Q", "choices": ["x", "y"], "answer": "D"}\n',
        },
    ),
    Mistake(
        "questions in a spreadsheet",
        "zeromesh evaluate model --choices questions.xlsx",
        ("--choices = 'questions.xlsx' must be records of", "a table (.csv, .tsv)"),
        {**MODEL, "questions.xlsx": b"PK\x03\x04"},
    ),
    Mistake(
        "questions with other column names",
        "zeromesh evaluate model --choices questions.csv",
        ("questions.csv, line 2: has the keys ['prompt', 'A', 'B', 'answer'] and lacks 'question'",),
        {**MODEL, "questions.csv": "prompt,A,B,answer\nWhat?,x,y,A\n"},
    ),
    Mistake(
        "a checkpoint of a model that has none",
        "zeromesh chat model --tag best",
        ("--tag: 'model' is a model, which has no checkpoints; leave it out",),
        MODEL,
    ),
    Mistake(
        "sampling from a model instead of a run",
        "zeromesh sample model hello",
        ("'model' holds a model, and no run; talk with it by zeromesh chat model",),
        MODEL,
    ),
    Mistake(
        "chatting with a folder of data",
        "zeromesh chat data",
        ("'data' holds neither a run nor a model; name the folder that run.output named in training",),
        {"data/chats.jsonl": "{}"},
    ),
    Mistake(
        "serving a run that is not there",
        "zeromesh serve runs/chat",
        ("'runs/chat' is no folder; name the output folder of a run",),
    ),
    Mistake(
        "a public export without a repository",
        "zeromesh export runs/chat out --public",
        ("--public is for --hub NAME; leave it out",),
    ),
]
