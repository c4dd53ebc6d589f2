"""Mistakes of those who begin: ``init``, ``train`` without a file, YAML, lengths of runs, and preferences."""

from __future__ import annotations

import json

from mistakes import Mistake

TEXT = "one two three four five six seven eight nine ten\n" * 200
MODEL = json.dumps({"hidden_size": 16, "layers": 1, "heads": 2, "sequence_length": 16})
RUN = f"""\
train_batch_size: 2
optimizer: {{type: AdamW, params: {{lr: 1e-3}}}}
model: {MODEL}
data: {{train: words.txt, vocabulary_size: 260}}
run: """
PAIRS = "".join(json.dumps({"prompt": f"{n}", "chosen": "yes", "rejected": "no"}) + "\n" for n in range(40))

MISTAKES = [
    Mistake(
        "init without answers",
        "zeromesh init",
        ("name the model and the data: zeromesh init MODEL DATA", "tiny, small, medium", "python-stdlib"),
    ),
    Mistake(
        "init with a size that does not exist",
        "zeromesh init tinny words.txt",
        ("'tinny' is no model; did you mean tiny?", "a name on the Hugging Face Hub (org/name)"),
        {"words.txt": TEXT},
    ),
    Mistake(
        "init over a file",
        "zeromesh init tiny words.txt --file run.yaml",
        ("'run.yaml' exists and is not overwritten; choose another --file, or pass --force",),
        {"words.txt": TEXT, "run.yaml": "mine"},
    ),
    Mistake(
        "a device that does not exist",
        "zeromesh init tiny words.txt --device tpu",
        ("'tpu' is no device; choose one of cpu, gpu",),
        {"words.txt": TEXT},
    ),
    Mistake(
        "the data before the model",
        "zeromesh train words.txt tiny",
        ("'words.txt' is data, and the model comes first: MODEL DATA",),
        {"words.txt": TEXT},
    ),
    Mistake(
        "a model without data",
        "zeromesh train tiny",
        ("'tiny' is the size of a model; name the data, too: zeromesh train tiny DATA",),
    ),
    Mistake(
        "data that is not there",
        "zeromesh train tiny wrods.txt",
        ("'wrods.txt' does not exist and matches no file",),
    ),
    Mistake(
        "a configuration and data",
        "zeromesh train run.yaml words.txt",
        ("'run.yaml' is a configuration, which names its data itself: zeromesh train run.yaml, with --set data.train",),
        {"words.txt": TEXT, "run.yaml": RUN + "{steps: 2}"},
    ),
    Mistake(
        "a tab in YAML",
        "zeromesh train run.yaml",
        ("is not YAML", "at line 2, column 1", "indent with blanks, as YAML forbids tabs"),
        {"run.yaml": "run:\n\tsteps: 2\n"},
    ),
    Mistake(
        "yes for true in YAML",
        "zeromesh train run.yaml",
        ('bf16.enabled = "yes": must be true or false',),
        {"run.yaml": RUN + "{steps: 2}\nbf16: {enabled: yes}\n"},
    ),
    Mistake(
        "epochs and steps",
        "zeromesh train run.yaml",
        ("steps = 2 and epochs = 1.0 both give its length; leave out one of them",),
        {"run.yaml": RUN + "{steps: 2, epochs: 1}"},
    ),
    Mistake(
        "early stopping without evaluations",
        "zeromesh train run.yaml",
        ("run.evaluate_every = 0 makes none; set it to a number of steps",),
        {"run.yaml": RUN + "{steps: 2, evaluate_every: 0, early_stop: {patience: 2}}"},
    ),
    Mistake(
        "preferences without dpo",
        "zeromesh train run.yaml",
        ("a chosen and a rejected answer, which dpo learns from; add a section dpo, as with --set dpo.beta=0.1",),
        {"pairs.jsonl": PAIRS, "run.yaml": RUN.replace("words.txt", "pairs.jsonl") + "{steps: 2}"},
    ),
    Mistake(
        "dpo without preferences",
        "zeromesh train run.yaml --set dpo.beta=0.1",
        ("must have 'prompt' and 'chosen' and 'rejected'",),
        {
            "a.jsonl": '{"prompt": "a", "response": "b"}\n',
            "run.yaml": RUN.replace("words.txt", "a.jsonl") + "{steps: 2}",
        },
    ),
]
