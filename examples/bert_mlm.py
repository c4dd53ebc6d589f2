"""Pre-train a small BERT on masked tokens of the standard library's source, with a tokenizer of its own.

    torchrun --nproc-per-node 2 examples/bert_mlm.py --output runs/bert

The training loop is plain PyTorch, except for ``zero.Init``, ``initialize``, ``backward`` and ``step``. The output
folder opens with ``AutoModelForMaskedLM.from_pretrained``.
"""

import argparse
import sysconfig
from itertools import chain, repeat
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

import zeromesh

SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def read_text(files: int) -> list[str]:
    """Return the source of the first ``files`` modules of the standard library, by name."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:files]
    return [path.read_text(encoding="utf-8") for path in paths]


def make_tokenizer(texts: list[str], entries: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer, as in RoBERTa, with ``entries`` entries."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=entries, special_tokens=list(SPECIAL.values()), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def make_samples(texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int) -> list[dict[str, list[int]]]:
    """Return rows of ``length`` tokens between [CLS] and [SEP]; the rest of each text is dropped."""
    rows = []
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        for start in range(0, len(ids) - length + 2, length - 2):
            piece = ids[start : start + length - 2]
            rows.append({"input_ids": [tokenizer.cls_token_id, *piece, tokenizer.sep_token_id]})
    return rows


@torch.no_grad()
def validate(engine: zeromesh.Engine, batch: dict[str, torch.Tensor]) -> float:
    """Return the loss on the held-out batch, which has fixed masks. All ranks call it, with the same batch."""
    engine.eval()
    loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
    engine.train()
    return float(loss)


def main() -> None:
    """Train, print the validation loss before and after, and save the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(Path(__file__).with_name("bert.json")), help="DeepSpeed's JSON")
    parser.add_argument("--output", default="runs/bert", help="folder of the model")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--files", type=int, default=60, help="modules of the standard library to read")
    parser.add_argument("--length", type=int, default=64, help="tokens per sample")
    arguments = parser.parse_args()

    texts = read_text(arguments.files)
    tokenizer = make_tokenizer(texts, 2048)
    samples = make_samples(texts, tokenizer, arguments.length)
    held_out, samples = samples[::50], [sample for number, sample in enumerate(samples) if number % 50]
    mask = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)

    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=len(tokenizer), hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
        max_position_embeddings=arguments.length, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    with zeromesh.zero.Init():
        model = BertForMaskedLM(shape)
    validation = mask(held_out)  # the same on every rank, because the seed is the same
    engine, _, loader, _ = zeromesh.initialize(
        model=model, config=arguments.config, training_data=samples, collate_fn=mask
    )
    torch.manual_seed(1 + engine.data_rank)  # masks and dropout differ between ranks

    log = print if engine.data_rank == 0 else lambda *_: None
    log(f"{len(samples)} samples, validation loss {validate(engine, validation):.3f}")
    batches = chain.from_iterable(repeat(loader))
    while engine.global_steps < arguments.steps:
        batch = next(batches)
        loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        if engine.global_steps % 50 == 0:
            log(f"step {engine.global_steps}: loss {loss.item():.3f}")
    log(f"validation loss {validate(engine, validation):.3f} after {engine.global_steps} steps")
    engine.save_16bit_model(arguments.output)
    if engine.data_rank == 0:
        tokenizer.save_pretrained(arguments.output)
    engine.destroy()


if __name__ == "__main__":
    main()
