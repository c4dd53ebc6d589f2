"""Records: JSON lines, tables, prompts with responses, chats; what is learned of them, and what is refused."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from zeromesh.apps.train.data.ordered_loader import open_samples
from zeromesh.apps.train.data.prepare_text import prepare
from zeromesh.apps.train.data.token_store import PreparedData, TokenSet
from zeromesh.apps.train.data.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from zeromesh.apps.train.train_settings import TextData

PLAIN = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"
)
LAST_ONLY = "{% for message in messages[-1:] %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
SPECIAL = ["<|end|>", "<|assistant|>", "<|user|>", "<|system|>"]

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Yes, é"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "No"},
]


def chat_tokenizer(folder: Path, template: str | None) -> Path:
    """Return a folder of transformers: every byte is a token, and so are the roles."""
    transformers = pytest.importorskip("transformers")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: n for n, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.chat_template = template
    fast.save_pretrained(str(folder))
    return folder


def lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(f"{record if isinstance(record, str) else json.dumps(record)}\n" for record in records))
    return path


def data(path: Path, **more: Any) -> TextData:
    return TextData.model_validate({"train": str(path), "validation_fraction": 0.0} | more)


def learned(part: TokenSet, tokenizer: TextTokenizer) -> list[tuple[str, str]]:
    found = []
    for number in part.numbers:
        span = slice(part.indexed.bounds[number], part.indexed.bounds[number + 1])
        ids = part.indexed.tokens[span]
        mask = np.ones(len(ids), dtype=bool) if part.mask is None else part.mask[span] != 0
        found.append((spell(ids, tokenizer), spell(ids[mask], tokenizer)))
    return found


def spell(ids: np.ndarray, tokenizer: TextTokenizer) -> str:
    pieces, plain = [], []
    for token in [*ids.tolist(), None]:
        if token is None or token >= 256:
            pieces.append(tokenizer.decode(plain))
            pieces += [] if token is None else [f"[{SPECIAL[token - 256]}]"]
            plain = []
        else:
            plain.append(token)
    return "".join(pieces)


def tokenizer_of(prepared: PreparedData) -> TextTokenizer:
    assert prepared.tokenizer is not None
    return load_tokenizer(prepared.tokenizer)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
def test_the_assistants_turns_of_a_chat_are_learned(tmp_path: Path, template: str) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", template)
    path = lines(tmp_path / "chats.jsonl", [{"messages": CHAT}, {"messages": CHAT[1:3]}])
    prepared = prepare(data(path, tokenizer=str(folder)), tmp_path / "text")
    (part,) = prepared.train
    first, second = learned(part, tokenizer_of(prepared))
    assert first == (
        "[<|system|>]Be short.[<|end|>][<|user|>]One?[<|end|>][<|assistant|>]Yes, é[<|end|>]"
        "[<|user|>]Two?[<|end|>][<|assistant|>]No[<|end|>]",
        "Yes, é[<|end|>]No[<|end|>]",
    )
    assert second[1] == "Yes, é[<|end|>]"
    assert part.packed
    assert part.bytes == 2 * len("Yes, é".encode()) + len("No")
    assert part.labels == part.bytes + 3
    assert prepared.document_attention
    assert prepared.pad == tokenizer_of(prepared).end


def begins_texts(folder: Path) -> Path:
    """Make the tokenizer of a folder put a token before each text, as that of Llama does."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin = ("<|system|>", tokenizer.token_to_id("<|system|>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|system|> $A", special_tokens=[begin])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|system|>"}))
    return folder


@pytest.mark.parametrize("template", [PLAIN, "{{ bos_token }}" + PLAIN, "{{ bos_token }}" + MARKED])
def test_a_tokenizer_that_begins_texts_begins_each_once(tmp_path: Path, template: str) -> None:
    folder = begins_texts(chat_tokenizer(tmp_path / "tokenizer", template))
    begin = "[<|system|>]"
    path = lines(tmp_path / "text.jsonl", [{"text": "one"}, {"text": "two"}])
    (tmp_path / "text.txt").write_text("three")
    pairs = lines(tmp_path / "pairs.jsonl", [{"prompt": "four", "response": "five"}])
    chats = lines(tmp_path / "chats.jsonl", [{"messages": CHAT[1:3]}])
    sources = [{"source": str(source), "weight": 1} for source in (path, tmp_path / "text.txt", pairs, chats)]
    settings = data(path, train=sources, tokenizer=str(folder))
    prepared = prepare(settings, tmp_path / "text")
    tokenizer = tokenizer_of(prepared)
    found = [spell(part.indexed.tokens[:], tokenizer) for part in prepared.train]
    assert f"{begin}one[<|end|>]{begin}two[<|end|>]" in found
    assert f"{begin}three[<|end|>]" in found
    learned_ = [pair for part in prepared.train if part.packed for pair in learned(part, tokenizer)]
    assert (f"{begin}fourfive[<|end|>]", "five[<|end|>]") in learned_
    # A chat has what its template says, and a prompt is how such a chat begins.
    own = begin if "bos_token" in template else ""
    chat = f"{own}[<|user|>]One?[<|end|>][<|assistant|>]Yes, é[<|end|>]"
    assert (chat, "Yes, é[<|end|>]") in learned_
    if template != "{{ bos_token }}" + MARKED:  # which has no prompt for the assistant
        assert chat.startswith(spell(tokenizer.prompt(CHAT[1:2]), tokenizer))


def test_a_special_token_in_a_message_is_text_or_refused(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a<|end|>b"}]
    path = lines(tmp_path / "chats.jsonl", [{"messages": messages}])
    folder = chat_tokenizer(tmp_path / "plain", PLAIN)
    prepared = prepare(data(path, tokenizer=str(folder)), tmp_path / "text")
    assert learned(prepared.train[0], tokenizer_of(prepared))[0][1] == "a<|end|>b[<|end|>]"
    folder = chat_tokenizer(tmp_path / "marked", MARKED)
    with pytest.raises(ValueError, match=r"line 1: messages\[1\]\.content has '<\|end\|>', which is a special token"):
        prepare(data(path, tokenizer=str(folder)), tmp_path / "text")


def test_a_template_whose_chats_do_not_begin_alike_needs_marks(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", LAST_ONLY)
    path = lines(tmp_path / "chats.jsonl", [{"messages": CHAT}])
    with pytest.raises(ValueError, match=r"chats\.jsonl, line 1: messages\[2\].*\{% generation %\}"):
        prepare(data(path, tokenizer=str(folder)), tmp_path / "text")
    nothing = chat_tokenizer(
        tmp_path / "nothing", PLAIN.replace("<|end|>", "<|end|>{% generation %}{% endgeneration %}")
    )
    with pytest.raises(ValueError, match=r"line 1: .*marks nothing.*generation"):
        prepare(data(path, tokenizer=str(nothing)), tmp_path / "text")
    strict = chat_tokenizer(tmp_path / "strict", "{{ raise_exception('no system here') }}{% generation %}")
    with pytest.raises(ValueError, match=r"line 1: .*chat template"):
        prepare(data(path, tokenizer=str(strict)), tmp_path / "text")


WITH_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + (
    "{% for message in messages %}<|{{ message.role if message.role != 'tool' else 'user' }}|>"
    "{% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ message.content or '' }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}},
    {"type": "function", "function": {"name": "now", "parameters": {"properties": {}}}},
]
CALLED = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3"},
]


def test_tools_of_a_chat_are_given_to_the_template(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", WITH_TOOLS)
    variants = [TOOLS, json.dumps(TOOLS), [json.dumps(tool) for tool in TOOLS]]
    path = lines(tmp_path / "a.jsonl", [{"messages": CALLED, "tools": tools} for tools in variants])
    prepared = prepare(data(path, tokenizer=str(folder)), tmp_path / "text")
    found = learned(prepared.train[0], tokenizer_of(prepared))
    written = "".join(map(json.dumps, TOOLS))
    call = json.dumps(CALLED[1]["tool_calls"][0])
    assert found == 3 * [
        (
            f"{written}[<|user|>]1 + 2?[<|end|>][<|assistant|>]{call}[<|end|>][<|user|>]3[<|end|>]"
            "[<|assistant|>]It is 3[<|end|>]",
            f"{call}[<|end|>]It is 3[<|end|>]",
        )
    ]
    marked = chat_tokenizer(tmp_path / "marked", MARKED)
    for template, key in ((folder, "tools"), (marked, "tool_calls")):
        record = {"messages": CALLED, "tools": "[{"} if key == "tools" else {"messages": CALLED}
        words = r"line 1: tools = \"\[\{\" is not JSON" if key == "tools" else "line 1: has tool_calls, which the tok"
        with pytest.raises(ValueError, match=words):
            prepare(data(lines(path, [record]), tokenizer=str(template)), tmp_path / "text")
    for tools, words in (
        (TOOLS, "has tools, which the tokenizer's chat"),
        (3, "tools = 3 must be"),
        ([3], "must be a li"),
    ):
        record = {"messages": CHAT, "tools": tools}
        with pytest.raises(ValueError, match=f"line 1: .*{words}"):
            prepare(data(lines(path, [record]), tokenizer=str(marked)), tmp_path / "text")


def test_nulls_that_a_table_adds_to_tools_and_calls_are_taken_out(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    import pyarrow
    import pyarrow.parquet

    folder = chat_tokenizer(tmp_path / "tokenizer", WITH_TOOLS)
    other = [*CALLED[:1], {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": {"b": 2}}}]}]
    records = [{"messages": CALLED, "tools": TOOLS}, {"messages": other, "tools": None}]
    path = lines(tmp_path / "a.jsonl", records)
    expected = prepare(data(path, tokenizer=str(folder)), tmp_path / "run" / "text")
    wanted = learned(expected.train[0], tokenizer_of(expected))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "a.parquet")
    assert "'b': None" in str(pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist())
    found = prepare(data(tmp_path / "a.parquet", tokenizer=str(folder)), tmp_path / "run" / "text")
    assert learned(found.train[0], tokenizer_of(found)) == wanted


def test_records_of_which_nothing_is_learned_are_left_out_and_counted(tmp_path, caplog) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", MARKED)
    empty = {"prompt": "", "response": ""}
    path = lines(
        tmp_path / "a.jsonl", [empty, {"prompt": "a", "response": "b"}, empty, {"prompt": "c", "response": "d"}]
    )
    for fraction in (0.0, 0.5):
        prepared = prepare(data(path, tokenizer=str(folder), validation_fraction=fraction), tmp_path / "text")
        parts = [*prepared.train, *prepared.validation]
        assert sorted(spelled[0] for part in parts for spelled, _ in learned(part, tokenizer_of(prepared))) == [
            "a",
            "c",
        ]
        assert "left out 2 records of data.train" in caplog.text
        for part in parts:
            samples = open_samples(part, 8, 0, "pad", 0)
            assert all((samples.row(number).labels >= 0).any() for number in range(samples.rows))
        caplog.clear()
    again = prepare(data(prepared.train[0].prefix), tmp_path / "again" / "text")
    assert again.train[0].documents == 2, "as in any data set with masks"
    with pytest.raises(ValueError, match="no documents to learn from, 0 records .* too long and 1 as having no token"):
        prepare(data(lines(path, [empty]), tokenizer=str(folder)), tmp_path / "text")


def test_chats_need_a_chat_template(tmp_path: Path) -> None:
    path = lines(tmp_path / "chats.jsonl", [{"messages": CHAT}])
    with pytest.raises(ValueError, match=r"chats\.jsonl has chats, which need.*data\.tokenizer"):
        prepare(data(path), tmp_path / "text")
    train_tokenizer(["text"], 260).save(tmp_path)
    with pytest.raises(ValueError, match=r"chats\.jsonl, line 1: chats need a chat template"):
        prepare(data(path, tokenizer=str(tmp_path / "tokenizer.json")), tmp_path / "text")
    folder = chat_tokenizer(tmp_path / "tokenizer", None)
    with pytest.raises(ValueError, match=r"line 1: the tokenizer has no chat template"):
        prepare(data(path, tokenizer=str(folder)), tmp_path / "text")


@pytest.mark.parametrize(
    ("keys", "settings"),
    [
        (("prompt", "response"), {}),
        (("prompt", "completion"), {}),
        (("q", "a"), {"prompt_key": "q", "response_key": "a"}),
    ],
)
def test_the_response_to_a_prompt_and_its_end_are_learned(tmp_path, keys, settings) -> None:
    records = [dict(zip(keys, pair, strict=True)) for pair in (("Add 1", " 2 é"), ("", "x"), ("y", ""))]
    prepared = prepare(data(lines(tmp_path / "a.jsonl", records), **settings), tmp_path / "text")
    (part,) = prepared.train
    tokenizer = tokenizer_of(prepared)
    for number, record in enumerate(records):
        span = slice(part.indexed.bounds[number], part.indexed.bounds[number + 1])
        ids, mask = part.indexed.tokens[span], part.mask[span] != 0
        assert tokenizer.decode(ids[~mask].tolist()) == record[keys[0]]
        assert tokenizer.decode(ids[mask].tolist()) == record[keys[1]]
        assert ids[-1] == tokenizer.end
    assert part.bytes == len(" 2 éx".encode())


def test_texts_in_records_are_a_stream_beside_plain_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain text")
    lines(tmp_path / "b.jsonl", [{"text": "first", "id": 1}, {"id": 2, "text": "second ✓"}])
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'\n{"text": "third"}\n\n{"text": "fourth"}'))
    prepared = prepare(data(tmp_path), tmp_path / "run" / "text")
    (part,) = prepared.train
    tokenizer = tokenizer_of(prepared)
    found = [tokenizer.decode(part.indexed.document(number).tolist()) for number in part.numbers]
    assert found == ["plain text", "first", "second ✓", "third", "fourth"]
    assert all(part.indexed.document(number)[-1] == tokenizer.end for number in part.numbers)
    assert not part.packed
    assert not prepared.document_attention
    assert part.bytes == sum(len(text.encode()) for text in found)


def test_tables_are_read_as_json_lines_are(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    folder = chat_tokenizer(tmp_path / "tokenizer", MARKED)
    records = [{"messages": CHAT[1:3], "source": "x"}, {"messages": CHAT}] * 20
    path = lines(tmp_path / "a.jsonl", records)
    expected = prepare(data(path, tokenizer=str(folder)), tmp_path / "expected").train[0]
    table = datasets.Dataset.from_list([{"messages": record["messages"]} for record in records])
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.save_to_disk(str(tmp_path / "single"))
    datasets.DatasetDict({"train": table, "test": table.select([0])}).save_to_disk(str(tmp_path / "splits"))
    for name, count in (("a.parquet", 40), ("single", 40), ("splits", 40), ("splits/test", 1)):
        found = prepare(data(tmp_path / name, tokenizer=str(folder)), tmp_path / "found").train[0]
        assert found.documents == count
        for number in range(count):
            assert found.indexed.document(number).tolist() == expected.indexed.document(number).tolist()
    both = prepare(data(tmp_path, suffixes=["single", "arrow"], tokenizer=str(folder)), tmp_path / "run" / "text")
    assert both.train[0].documents == 40 + 40 + 1
    datasets.DatasetDict({"test": table}).save_to_disk(str(tmp_path / "untrained"))
    with pytest.raises(ValueError, match=r"untrained.*no split 'train', but \['test'\]"):
        prepare(data(tmp_path / "untrained"), tmp_path / "text")
    wrong = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"], "response": ["d", None, "e"]})
    wrong.to_parquet(str(tmp_path / "b.parquet"), batch_size=1)
    with pytest.raises(ValueError, match=r"b\.parquet, row 2: response = null must be a string"):
        prepare(data(tmp_path / "b.parquet"), tmp_path / "text")
    wrong.save_to_disk(str(tmp_path / "wrong"))
    with pytest.raises(ValueError, match=r"wrong, row 2: response = null must be a string"):
        prepare(data(tmp_path / "wrong"), tmp_path / "text")
    (tmp_path / "c.parquet").write_text("text")
    with pytest.raises(ValueError, match=r"c\.parquet cannot be read as a parquet file"):
        prepare(data(tmp_path / "c.parquet"), tmp_path / "text")


def test_a_table_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    for text in ("first", "second"):
        table = datasets.Dataset.from_dict({"text": [text]})
        table.to_parquet(str(tmp_path / "a.parquet"))
        table.save_to_disk(str(tmp_path / "folder"))
        for name in ("a.parquet", "folder"):
            prepared = prepare(data(tmp_path / name), tmp_path / "run" / "text")
            assert tokenizer_of(prepared).decode(prepared.train[0].indexed.tokens.tolist()) == text


def test_damage_in_the_middle_of_a_file_names_it(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    path = lines(tmp_path / "a.jsonl", [{"text": f"number {n}"} for n in range(2000)])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    datasets.Dataset.from_dict({"text": [f"number {n}" for n in range(2000)]}).to_parquet(str(tmp_path / "a.parquet"))
    for name in ("a.jsonl.gz", "a.parquet"):
        content = bytearray((tmp_path / name).read_bytes())
        middle = len(content) // 3
        content[middle : middle + 50] = bytes(50)
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} cannot be read as a (gzip|parquet) file: .*; make it anew"):
            prepare(data(tmp_path / name), tmp_path / "run" / "text")


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("table", "datasets")])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    if package == "pyarrow":
        (tmp_path / name).write_text("PAR1")
    else:
        (tmp_path / name).mkdir()
        for file in ("state.json", "dataset_info.json"):
            (tmp_path / name / file).write_text("{}")
    with pytest.raises(ValueError, match=rf"{name}.*needs the package {package} .*: pip install {package}"):
        prepare(data(tmp_path / name), tmp_path / "text")


GOOD = {"messages": CHAT[1:3]}


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([GOOD, "", "{not json}"], r"a\.jsonl, line 3: is not JSON \(Expecting property name.*each line is one object"),
        ([GOOD, '{"messages": [1,, 2]}'], r"line 2: is not JSON \(Expecting value, column 17\); each line is one obj"),
        ([GOOD, '{"text": 1' + "1" * 5000 + "}"], r"line 2: is not JSON \(Exceeds the limit"),
        ([GOOD, "[" * 200_000], r"line 2: is not JSON \(.*recursion.*one array end in \.json"),
        (["[", GOOD, "]"], r"line 1: is not JSON \(Expecting value, column 2\).*one array end in \.json"),
        ([GOOD, "[1, 2]"], r"a\.jsonl, line 2: is \[1, 2\], and must be an object with keys: .*one array end in"),
        ([GOOD, {"text": "x"}], r"line 2: has the keys \['text'\] and lacks 'messages'; all records of a source"),
        ([{"some": 1}], r"line 1: has the keys \['some'\], and must have 'messages' or 'prompt' and 'response' or 't"),
        ([GOOD, {"messages": []}], r"line 2: messages = \[\] must be a list of at least one message"),
        ([GOOD, {"messages": "hi"}], r'line 2: messages = "hi" must be a list'),
        ([GOOD, {"messages": ["hi"]}], r'line 2: messages\[0\] = "hi" must be an object with role and content'),
        ([GOOD, {"messages": [{"role": "user"}]}], r"line 2: messages\[0\] = .* lacks 'content'"),
        ([GOOD, {"messages": [{"content": "x"}]}], r"line 2: messages\[0\] = .* lacks 'role'"),
        ([GOOD, {"messages": CHAT[:2]}], r"line 2: messages has no turn of the assistant"),
        (
            [{"messages": [*CHAT[:2], {"role": "bot", "content": "x"}]}],
            r'line 1: messages\[2\]\.role = "bot" must be one of system, developer, user, assistant, tool',
        ),
        (
            [{"messages": [*CHAT[:2], {"role": "assistant", "content": 3}]}],
            r"line 1: messages\[2\]\.content = 3 must be a string",
        ),
        ([{"prompt": "x", "response": "y"}, {"prompt": "x"}], r"line 2: .*lacks 'response'"),
        ([{"prompt": "x", "response": "y"}, {"prompt": 3, "response": "y"}], r"line 2: prompt = 3 must be a string"),
        ([{"text": "x"}, {"text": None}], r"line 2: text = null must be a string"),
        (
            [{"text": "x"}, '{"text": "a", "id": 1, "text": "b"}'],
            r"line 2: is not JSON \(the key 'text' is there twice",
        ),
        ([{"text": "x"}, '{"text": "\\ud800"}'], r"line 2: text has half of a surrogate pair"),
    ],
)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
def test_a_wrong_record_is_refused_with_its_place(tmp_path, records, message, packed) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", MARKED)
    path = lines(tmp_path / "a.jsonl", records)
    if packed:
        (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        path, message = tmp_path / "a.jsonl.gz", message.replace(r"a\.jsonl,", r"a\.jsonl\.gz,")
    with pytest.raises(ValueError, match=message):
        prepare(data(path, tokenizer=str(folder)), tmp_path / "text")
    assert not (tmp_path / "text").exists()
    assert not (tmp_path / "text.part").exists()


def test_json_lines_and_json_are_told_apart_by_the_name(tmp_path: Path) -> None:
    records = [{"text": f"number {n}"} for n in range(3)]
    for name in ("a.jsonl", "a.ndjson", "A.JSONL"):
        assert prepare(data(lines(tmp_path / name, records)), tmp_path / "run" / "text").train[0].documents == 3
    (tmp_path / "a.ndjson.gz").write_bytes(gzip.compress((tmp_path / "a.ndjson").read_bytes()))
    assert prepare(data(tmp_path / "a.ndjson.gz"), tmp_path / "run" / "text").train[0].documents == 3
    path = tmp_path / "b.json"
    for text, count in (
        (json.dumps(records), 3),
        (json.dumps(records, indent=1), 3),
        ("\n".join(map(json.dumps, records)), 3),
        (json.dumps(records[0], indent=1), 1),
        ("\ufeff" + json.dumps(records), 3),
    ):
        path.write_text(text)
        assert prepare(data(path), tmp_path / "run" / "text").train[0].documents == count
    (tmp_path / "c.jsonl").write_text("\ufeff" + "\n".join(map(json.dumps, records)))
    assert prepare(data(tmp_path / "c.jsonl"), tmp_path / "run" / "text").train[0].documents == 3
    for text, words in (
        ('{"name": "a package"}', r"record 1: has the keys \['name'\].*--set data\.format=raw"),
        ("[1, 2]", "record 1: is 1, and must be an object"),
        ('{"text": ', r"b\.json, line 1: is not JSON"),
        ("no JSON", r"b\.json, line 1: is not JSON"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            prepare(data(path), tmp_path / "run" / "text")
        raw = prepare(data(path, format="raw"), tmp_path / "run" / "text")
        assert raw.train[0].bytes == len(text)
    # In a folder of sources it is text as all other files.
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "a.py").write_text("print()")
    (tmp_path / "sources" / "package.json").write_text('{"name": "a package"}')
    assert prepare(data(tmp_path / "sources"), tmp_path / "run" / "text").train[0].documents == 2


def test_lines_are_counted_from_the_beginning_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeromesh.apps.train.data.text_formats.PORTION_BYTES", 100)
    records = [{"text": f"number {n}"} for n in range(200)]
    path = lines(tmp_path / "a.jsonl", [*records, "", {"txet": "x"}])
    with pytest.raises(ValueError, match=r"a\.jsonl, line 202: "):
        prepare(data(path), tmp_path / "text")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(ValueError, match=r"b\.jsonl\.gz, line 202: "):
        prepare(data(tmp_path / "b.jsonl.gz"), tmp_path / "text")
    lines(path, records)
    part = prepare(data(path), tmp_path / "text").train[0]
    assert (part.documents, part.bytes) == (200, sum(len(record["text"]) for record in records))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(path.read_bytes())[:-20])
    with pytest.raises(ValueError, match=r"c\.jsonl\.gz cannot be read as a gzip file"):
        prepare(data(tmp_path / "c.jsonl.gz"), tmp_path / "text")
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(ValueError, match=r"d\.jsonl, line 2: is not UTF-8"):
        prepare(data(tmp_path / "d.jsonl"), tmp_path / "text")


def test_long_records_are_refused_cut_or_left_out(tmp_path: Path) -> None:
    folder = chat_tokenizer(tmp_path / "tokenizer", MARKED)
    records = [
        {"prompt": "p" * 5, "response": "r" * 4},
        {"prompt": "p" * 5, "response": "r" * 9},
        {"prompt": "p" * 20, "response": "r"},
    ]
    path = lines(tmp_path / "a.jsonl", records)
    settings = {"tokenizer": str(folder)}
    with pytest.raises(
        ValueError,
        match=r"a\.jsonl, line 2: has 15 tokens.*model\.sequence_length.*_length = 10 holds 11.*data\.too_long",
    ):
        prepare(data(path, **settings), tmp_path / "text", length=10)
    dropped = prepare(data(path, too_long="drop", **settings), tmp_path / "text", length=10)
    assert (dropped.dropped, dropped.train[0].documents) == (2, 1)
    cut = prepare(data(path, too_long="truncate", **settings), tmp_path / "text", length=10)
    assert cut.dropped == 1  # nothing of its response would be left
    assert [spelled for spelled, _ in learned(cut.train[0], tokenizer_of(cut))] == ["ppppprrrr[<|end|>]", "ppppprrrrrr"]
    assert prepare(data(path, **settings), tmp_path / "text", length=21).dropped == 0
    with pytest.raises(ValueError, match=r"no documents to learn from, 3 records having been left out as too long"):
        prepare(data(path, too_long="drop", **settings), tmp_path / "text", length=3)


def test_the_side_of_a_record_depends_on_what_it_holds(tmp_path: Path) -> None:
    records = [{"prompt": f"question {n}", "response": f"answer {n}"} for n in range(300)]

    def held(kept: list[dict[str, str]]) -> set[str]:
        prepared = prepare(data(lines(tmp_path / "a.jsonl", kept), validation_fraction=0.1), tmp_path / "text")
        tokenizer = tokenizer_of(prepared)
        sides = [{text for text, _ in pairs(part, tokenizer)} for part in (*prepared.train, *prepared.validation)]
        assert not sides[0] & sides[1]
        assert len(sides[0] | sides[1]) == len(kept)
        assert prepared.held_out_bytes == sum(len(text.partition("|")[2]) for text in sides[1])
        return sides[1]

    every = held(records)
    assert 15 < len(every) < 50
    other = [*records[100:], {"prompt": "new", "response": "n"}]
    kept = {f"question {n}|answer {n}" for n in range(100, 300)}
    assert held(other) - {"new|n"} == every & kept
    assert len(held(records[:2])) == 1
    one = prepare(data(lines(tmp_path / "a.jsonl", records[:1]), validation_fraction=0.99), tmp_path / "text")
    assert (one.train[0].documents, one.validation) == (1, ())


def pairs(part: TokenSet, tokenizer: TextTokenizer) -> list[tuple[str, None]]:
    found = []
    for number in part.numbers:
        span = slice(part.indexed.bounds[number], part.indexed.bounds[number + 1])
        ids, mask = part.indexed.tokens[span], part.mask[span] != 0
        found.append(("|".join(tokenizer.decode(ids[side].tolist()) for side in (~mask, mask)), None))
    return found


def test_kinds_that_are_learned_from_in_different_ways_are_parts_of_a_blend(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain text " * 50)
    lines(tmp_path / "b.jsonl", [{"prompt": f"p{n}", "response": "r" * n} for n in range(50)])
    with pytest.raises(ValueError, match=r'more than one data set \(text: a\.txt; records: b\.jsonl\).*"weight"'):
        prepare(data(tmp_path), tmp_path / "run" / "text")
    with pytest.raises(ValueError, match=r"plain text, .*a\.txt, and data\.format = 'chat' needs records"):
        prepare(data(tmp_path / "a.txt", format="chat"), tmp_path / "text")
    blend = [{"source": str(tmp_path / "a.txt"), "weight": 3}, {"source": str(tmp_path / "b.jsonl"), "weight": 1}]
    prepared = prepare(TextData.model_validate({"train": blend, "validation_fraction": 0.1}), tmp_path / "run" / "text")
    assert prepared.weights == (0.75, 0.25)
    assert [part.packed for part in prepared.train] == [False, True]
    assert [part.packed for part in prepared.validation] == [False, True]
    assert prepared.document_attention
    with pytest.raises(ValueError, match="is also in data.validation, or in a part of the blend before it"):
        prepare(TextData.model_validate({"train": [*blend, blend[0]]}), tmp_path / "run" / "text")


def test_the_format_in_the_settings_decides_between_kinds(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", [{"text": "a text", "prompt": "p", "response": "r"}] * 3)
    assert prepare(data(path), tmp_path / "text").train[0].packed
    assert not prepare(data(path, format="text"), tmp_path / "text").train[0].packed
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: has the keys .* and must have 'messages'"):
        prepare(data(path, format="chat"), tmp_path / "text")
