"""Megatron's flags about data and tokenizers."""

from hetero_megatron.cli.flags.flag import Need, count, family, needs, notice, only, refused, switch, value
from hetero_megatron.data.config import TOKENIZER_TYPES
from hetero_megatron.data.tokenizers import USED_BY

_TOKENIZER = "this version does not read that tokenizer"
_FILE = "lists of data in a file are not supported"
_MOCK = needs("data files", harmless=True)  # Megatron's examples have these flags beside --mock-data
_EVALUATED = needs("--eval-interval", "--skip-train")


def _tokenizers(flag: str) -> tuple[Need, ...]:
    return needs(*(f"--tokenizer-type {name}" for name in USED_BY[flag]))


FLAGS = (
    value("--data-path", str, None, "corpora, or weights and corpora in turn; 'stdlib' is built in", nargs="*"),
    value("--split", str, None, "train,validation,test shares, e.g. 99,1,0", needs=_MOCK),
    value("--train-data-path", str, None, "corpora to train on, instead of --data-path", nargs="*"),
    value("--valid-data-path", str, None, "corpora to evaluate on", nargs="*", needs=_EVALUATED),
    value("--test-data-path", str, None, "corpora to test on at the end", nargs="*", needs=_EVALUATED),
    refused("--data-args-path", _FILE, "--data-path", nargs=1),
    refused("--per-split-data-args-path", _FILE, "--train-data-path and --valid-data-path", nargs=1),
    value("--data-cache-path", str, None, "where indices of corpora are kept", needs=_MOCK),
    switch("--mock-data", "made-up tokens, no files"),
    count("--num-workers", 2, "threads of each rank that read batches ahead", least=0, most=1024),
    value(
        "--json-keys", str, "text", "key (jsonl) or column (parquet, arrow) that holds the text",
        aliases=("--json-key",), needs=needs("a *.jsonl, *.parquet or *.arrow corpus"),
    ),
    only(
        "--tokenizer-type",
        str,
        TOKENIZER_TYPES,
        _TOKENIZER,
        f"{', '.join(TOKENIZER_TYPES)} (HuggingFaceTokenizer reads the same tokenizer in Hugging Face's format)",
        summary="what makes tokens of text; by the files given below, or by --load-hf or --model, if left out",
        differs="required in Megatron; here by --tokenizer-model or --vocab-file, else that of --load-hf or --model, "
        "else ByteTokenizer for text and a model of at most 512 ids",
    ),
    value(
        "--tokenizer-model", str, None, "directory or name of a Hugging Face tokenizer",
        needs=_tokenizers("--tokenizer-model"),
    ),
    value("--vocab-file", str, None, "vocab.json of a GPT-2 tokenizer", needs=_tokenizers("--vocab-file")),
    value("--merge-file", str, None, "merges.txt of a GPT-2 tokenizer", needs=_tokenizers("--merge-file")),
    switch("--reset-position-ids", "positions start again at every document"),
    switch("--reset-attention-mask", "attention does not cross documents"),
    switch("--eod-mask-loss", "what follows the end of a document does not count in the loss"),
    notice("--no-mmap-bin-files", "it does not change results"),
    notice("--num-dataset-builder-threads", "it does not change results", nargs=1, type=int),
    refused("--legacy-tokenizer", _TOKENIZER, "--tokenizer-type HuggingFaceTokenizer"),
    refused("--tiktoken-pattern", _TOKENIZER, "--tokenizer-type HuggingFaceTokenizer", nargs=1),
    refused("--fim-data", "documents are never rearranged"),
    refused("--full-validation", "evaluation takes a number of batches", "--eval-iters"),
    notice("--no-create-attention-mask-in-dataloader", "no attention mask is ever built"),
    switch(
        "--trust-remote-code", "run code that comes with a Hugging Face tokenizer",
        needs=_tokenizers("--trust-remote-code"),
    ),
    value(
        "--dataloader-type",
        str,
        "single",
        "single: packed and shuffled by global sample index; streaming: read in order",
        choices=("single", "streaming"),
    ),
    *family(refused, "--fim-rate= --fim-spm-rate= --fim-split-sample= --fim-fragment-rate= --fim-no-prefix= "
            "--fim-prefix-token= --fim-middle-token= --fim-suffix-token= --fim-pad-token= --fim-eod-token=",
            "documents are never rearranged", "leave the flag out"),
    *family(refused, "--sft-tokenizer-prompt-format=", "conversations are rendered by a chat template",
            "--chat-template FILE, or the tokenizer's own"),
    *family(refused, "--tokenizer-metadata= --tokenizer-special-tokens=+ --tiktoken-num-special-tokens= "
            "--tokenizer-sentencepiece-legacy --tokenizer-hf-no-use-fast --tokenizer-hf-no-include-special-tokens "
            "--no-tokenizer-sentencepiece-ignore-extra-whitespaces/"
            "--disable-tokenizer-sentencepiece-ignore-extra-whitespaces --null-tokenizer-eod-id= "
            "--null-tokenizer-pad-id= --allow-ambiguous-pad-tokens",
            "a tokenizer is read as its own files say", "the setting in the tokenizer's files"),
    *family(refused, "--multiple-validation-sets --validation-set-names=+", "evaluation reads one set",
            "--valid-data-path with the one to evaluate on"),
    *family(refused, "--phase-transition-iterations=", "the data are the same in all of a run",
            "a run per phase, the next one with --load"),
    *family(refused, "--dataloader-inter-document-masking", "it has another name here", "--reset-attention-mask"),
    *family(refused, "--sample-rate=", "every sample is read", "leave the flag out"),
    *family(refused, "--encoder-seq-length= --decoder-seq-length=", "there is one sequence length", "--seq-length"),
    *family(refused, "--object-storage-cache-path= --enable-msc", "data are read from file systems only",
            "a local copy, or a mounted file system"),
    *family(notice, "--disable-msc", "data are read from file systems only"),
    *family(notice, "--per-dataset-sequences-path= --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap "
            "--mid-level-dataset-surplus=",
            "an index is built in seconds where it is needed, whatever other ranks do"),
    *family(refused, "--padded-vocab-size=", "the vocabulary is never padded", "--vocab-size"),
    *family(notice, "--no-pad-vocab-size/--disable-pad-vocab-size", "the vocabulary is never padded"),
)  # fmt: skip
