"""The names of datasets, and their default tokenizers. Imports no torch."""

from smolcluster.errors import UserError, unknown_name

TEXT_DATASETS = ("embedded", "text", "wikitext", "wikitext-2", "wikitext-103", "snli")
HF_PREFIX = "hf:"
DATASETS = (*TEXT_DATASETS, "mnist", "hf:OWNER/NAME")


def is_text(name: str) -> bool:
    """Return whether `open_text` reads this dataset. Raises UserError for an unknown name."""
    if name in TEXT_DATASETS or name.startswith(HF_PREFIX):
        return True
    if name == "mnist":
        return False
    raise unknown_name("dataset", name, DATASETS)


def default_tokenizer(name: str) -> str:
    """Return `bytes` for text without a download, `gpt2` for the common benchmarks."""
    if not is_text(name):
        raise UserError(
            f"data.name: '{name}' is not text, so it has no tokenizer; "
            f"text datasets: {', '.join(TEXT_DATASETS)}, hf:OWNER/NAME"
        )
    return "bytes" if name in ("embedded", "text") else "gpt2"
