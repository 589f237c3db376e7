"""Megatron's flags about data and tokenizers."""

from hetero_megatron.cli.flag import notice, only, refused, switch, value
from hetero_megatron.data.tokenizers import TOKENIZER_TYPES

_TOKENIZER = "this version does not read that tokenizer"
_FILE = "lists of data in a file are not supported"

FLAGS = (
    value("--data-path", str, None, "corpora, or weights and corpora in turn; 'stdlib' is built in", nargs="*"),
    value("--split", str, None, "train,validation,test shares, e.g. 99,1,0"),
    value("--train-data-path", str, None, "corpora to train on, instead of --data-path", nargs="*"),
    value("--valid-data-path", str, None, "corpora to evaluate on", nargs="*"),
    value("--test-data-path", str, None, "corpora to test on", nargs="*"),
    refused("--data-args-path", _FILE, "--data-path", nargs=1),
    refused("--per-split-data-args-path", _FILE, "--train-data-path and --valid-data-path", nargs=1),
    value("--data-cache-path", str, None, "where indices of corpora are kept"),
    switch("--mock-data", "made-up tokens, no files"),
    value("--num-workers", int, 2, "threads of each rank that read batches ahead"),
    value("--json-keys", str, "text", "key (jsonl) or column (parquet) that holds the text", aliases=("--json-key",)),
    only(
        "--tokenizer-type",
        str,
        TOKENIZER_TYPES,
        _TOKENIZER,
        f"{', '.join(TOKENIZER_TYPES)} (HuggingFaceTokenizer reads the same tokenizer in Hugging Face's format)",
        differs="required in Megatron; here that of --load-hf, else ByteTokenizer for text",
    ),
    value("--tokenizer-model", str, None, "tokenizer directory, file or name"),
    value("--vocab-file", str, None, "vocab.json of a GPT-2 tokenizer"),
    value("--merge-file", str, None, "merges.txt of a GPT-2 tokenizer"),
    switch("--reset-position-ids", "positions start again at every document"),
    switch("--reset-attention-mask", "attention does not cross documents"),
    switch("--eod-mask-loss", "what follows the end of a document does not count in the loss"),
    notice("--no-mmap-bin-files", "it does not change results"),
    notice("--num-dataset-builder-threads", "it does not change results", nargs=1, type=int),
    refused("--legacy-tokenizer", _TOKENIZER, "--tokenizer-type HuggingFaceTokenizer"),
    refused("--tiktoken-pattern", _TOKENIZER, "--tokenizer-type HuggingFaceTokenizer", nargs=1),
    refused("--fim-data", "documents are never rearranged"),
    refused("--sft", "instruction data is not supported: every token of a document counts in the loss"),
    refused("--full-validation", "evaluation takes a number of batches", "--eval-iters"),
    notice("--no-create-attention-mask-in-dataloader", "no attention mask is ever built"),
    switch("--trust-remote-code", "run code that comes with a Hugging Face tokenizer"),
    value(
        "--dataloader-type",
        str,
        "single",
        "single: packed and shuffled by global sample index; streaming: read in order",
        choices=("single", "streaming"),
    ),
)
