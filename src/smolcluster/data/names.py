"""The datasets that have a name, and the tokens each is read as by default. Imports no torch."""

from smolcluster.errors import UserError, unknown_name

TEXT_DATASETS = ("embedded", "text", "wikitext", "wikitext-2", "wikitext-103", "snli")
HF_PREFIX = "hf:"
DATASETS = (*TEXT_DATASETS, "mnist", "hf:OWNER/NAME")


def is_text(name: str) -> bool:
    """Whether `open_text` reads this dataset; an unknown name is the user's mistake."""
    if name in TEXT_DATASETS or name.startswith(HF_PREFIX):
        return True
    if name == "mnist":
        return False
    raise unknown_name("dataset", name, DATASETS)


def default_tokenizer(name: str) -> str:
    """Bytes where nothing may be downloaded, GPT-2's tokens for the corpora people compare on."""
    if not is_text(name):
        raise UserError(
            f"data.name: '{name}' is not text, so it has no tokenizer; "
            f"text datasets: {', '.join(TEXT_DATASETS)}, hf:OWNER/NAME"
        )
    return "bytes" if name in ("embedded", "text") else "gpt2"
