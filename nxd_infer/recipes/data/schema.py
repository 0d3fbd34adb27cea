"""The keys of a recipe's section ``data``."""

from __future__ import annotations

from dataclasses import dataclass

from nxd_infer.recipes.keys import key, section

MEGATRON = "indexed files are read by their index alone"


@dataclass(kw_only=True)
class TokenizerKeys:
    type: str | None = key(None, 'a Hugging Face directory, or "trained": one is made from the data', also=("name",))
    library: str | None = key(
        None,
        "which library reads it",
        choices=("huggingface", "megatron", "sentencepiece", "tabular"),
        unused="tokenizers reads all that it can",
    )
    model: str | None = key(None, "a tokenizer.json, or the directory that has it")
    vocab_file: str | None = key(None, "a vocabulary, with merges.txt beside it")
    merge_file: str | None = key(None, "the merges of a vocabulary", unused="merges.txt beside vocab_file is read")
    delimiter: str | None = key(None, "of tables", unused="tables are not read")
    sentencepiece_legacy: bool | None = key(
        None, "a version of SentencePiece", bool, unused="tokenizer.json says it all"
    )
    use_fast: bool | None = key(None, "tokenizers are always fast", bool, unused="tokenizer.json says it all")
    vocab_size: int = key(4096, "ours: tokens of a trained tokenizer", int, minimum=260)


@dataclass(kw_only=True)
class Data:
    micro_batch_size: int = key(1, "rows of one pass through the model, per data-parallel rank", int, minimum=1)
    global_batch_size: int = key(1, "rows of a step, over all ranks", int, minimum=1)
    train_dir: str | None = key(
        None, "a file or folder to train on: text, JSONL, Parquet, Arrow, or a dataset of Hugging Face's on disk"
    )
    val_dir: str | None = key(None, "the same to validate on")
    test_dir: str | None = key(None, "the same to test on", unused="recipes run no test")
    seq_length: int | None = key(None, "tokens per row", int, minimum=2)
    dev_choose_samples: int | None = key(None, "use only so many samples of train_dir", int, minimum=1)
    tokenizer: TokenizerKeys = section(TokenizerKeys, "from text to tokens")
    alignment_strategy: str | None = key(None, "kind of data", unused="model_alignment_strategy says it")
    packing: bool | None = key(None, "as model_alignment_strategy.sft.packing", bool)
    use_sft_style_data_module: bool | None = key(None, "kind of data", bool, unused="the columns say it")
    shuffle: bool | None = key(None, "ours: a new order every epoch; default: in fine-tuning", bool)
    mask_prompt: bool = key(True, "ours: no loss on prompts", bool)
    data_prefix: list[object] = key([], "Megatron's indexed files without .bin, each after its weight", list[object])
    index_mapping_dir: str | None = key(None, "the indices' folder", unused=MEGATRON)
    data_impl: str | None = key(None, "kind of indexed file", choices=("mmap",), unused=MEGATRON)
    splits_string: str = key("980,10,10", "shares of train, validation and test in data_prefix", also=("split",))
    skip_warmup: bool | None = key(None, "read no file ahead", bool, unused=MEGATRON)
    num_workers: int = key(0, "processes that read data", int, minimum=0, unused="rows are read from mapped memory")
    dataloader_type: str | None = key(None, "order of the rows", choices=("single", "cyclic"))
    reset_position_ids: bool = key(False, "positions restart at each document", bool)
    reset_attention_mask: bool = key(False, "documents of a row do not see each other", bool)
    eod_mask_loss: bool = key(False, "no loss on ends of documents", bool)
    validation_drop_last: bool = key(
        True, "leave an incomplete batch of a validation out, as always", bool, unused="validations use whole batches"
    )
    no_seqlen_plus_one_input_tokens: bool = key(
        False, "rows have seq_length tokens, as always", bool, unused="rows have seq_length tokens, and one target less"
    )
    pad_samples_to_global_batch_size: bool = key(
        False, "fill the last step", bool, unused="an incomplete last step is left out"
    )
    num_samples: int | None = key(None, "rows of an epoch", int, unused="an epoch has every row once")
    exchange_dtype: str | None = key(None, "dtype of token ids", unused=MEGATRON)
