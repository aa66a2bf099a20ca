"""Text to numbers and back."""

import json
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smolcluster.data.chunks import text_chunks
from smolcluster.data.tokenizers import ByteTokenizer, CharTokenizer, Gpt2Tokenizer, load_tokenizer, printable_bytes
from smolcluster.errors import MissingExtra, UserError

MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "Ċ Ċ"]


def write_gpt2(folder, names=("encoder.json", "vocab.bpe"), merges=MERGES):
    """A tokenizer in GPT-2's format with a handful of merges: bytes are 0-255, merge n is 256 + n."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [c for c, _ in sorted(printable_bytes().items(), key=lambda item: item[1])]
    tokens += [merge.replace(" ", "") for merge in merges] + ["<|endoftext|>"]
    (folder / names[0]).write_text(json.dumps({t: n for n, t in enumerate(tokens)}), encoding="utf-8")
    (folder / names[1]).write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")
    return folder / names[0], folder / names[1]


@pytest.fixture
def gpt2(tmp_path):
    pytest.importorskip("tiktoken")
    return Gpt2Tokenizer(*write_gpt2(tmp_path))


# -- Bytes


@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint8
    assert tokenizer.decode(ids.tolist()) == text


def test_bytes_decode_whatever_a_model_says():
    assert ByteTokenizer().decode([72, 0xFF, 105, 300, -1]) == "H\ufffdi\ufffd\ufffd"


# -- Characters


@given(st.text(min_size=1))
def test_chars_round_trip_and_are_sorted(text):
    tokenizer = CharTokenizer(text)
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text
    assert tokenizer.decode(range(tokenizer.vocab_size)) == "".join(sorted(set(text)))


def test_chars_do_not_depend_on_the_order_of_the_text():
    one, other = CharTokenizer("hello world"), CharTokenizer("dlrow olleh")
    assert one.fingerprint == other.fingerprint
    assert one.fingerprint != CharTokenizer("hello world!").fingerprint


def test_chars_use_the_smallest_type():
    assert CharTokenizer("abc").dtype == np.uint8
    assert CharTokenizer("".join(chr(c) for c in range(300))).dtype == np.uint16


@pytest.mark.parametrize("foreign", ["!", "\u00e9", "\U0001f600"])
def test_an_unknown_character_is_named(foreign):
    with pytest.raises(UserError, match="at position 3 is not among the 3 characters") as caught:
        CharTokenizer("abc").encode(f"abc{foreign}a")
    assert repr(foreign) in str(caught.value)


def test_chars_can_be_stored(tmp_path):
    made = CharTokenizer("to be, or not to b\u00e9\n")
    path = tmp_path / "tokenizer.json"
    path.write_text(made.to_json(), encoding="utf-8")
    for again in (CharTokenizer.from_json(made.to_json()), load_tokenizer(str(path), root=None)):
        assert (again.fingerprint, again.vocab_size) == (made.fingerprint, made.vocab_size)
        assert again.decode([0, 1, 999]) == made.decode([0, 1]) + "\ufffd"
    for wrong in ("[]", "{}", '{"type": "smolcluster-chars", "chars": 3}', "no json"):
        with pytest.raises(ValueError):
            CharTokenizer.from_json(wrong)


def test_chars_need_a_text():
    assert load_tokenizer("chars", root=None, text=lambda: "abcab").vocab_size == 3
    with pytest.raises(UserError, match="stored tokenizer"):
        load_tokenizer("chars", root=None)
    with pytest.raises(UserError, match="not empty"):
        CharTokenizer("")


# -- GPT-2


def test_the_printable_table_is_gpt2s():
    table = printable_bytes()
    assert sorted(table.values()) == list(range(256))
    assert {c: table[c] for c in "!~\u00a1\u00ff\u0120\u010a\u0100\u0143"} == {
        **{"!": 33, "~": 126, "\u00a1": 161, "\u00ff": 255},
        **{"\u0120": 32, "\u010a": 10, "\u0100": 0, "\u0143": 173},
    }


def test_gpt2_merges_in_order(gpt2):
    assert gpt2.vocab_size == 256 + len(MERGES) + 1
    assert gpt2.dtype == np.uint16
    assert gpt2.encode("hello").tolist() == [259]
    assert gpt2.encode("hell we").tolist() == [258, 260, ord("e")]
    # A run of blanks is cut before the word that follows it.
    assert gpt2.encode("\n\n").tolist() == [261]
    assert gpt2.encode("\n\nhe").tolist() == [10, 10, 256]


def test_end_of_text_is_a_number_not_a_text(gpt2):
    end = gpt2.vocab_size - 1
    assert end not in gpt2.encode("<|endoftext|>").tolist()
    assert gpt2.decode([259, end, 5000]) == "hello<|endoftext|>\ufffd"


def test_gpt2_decodes_any_text(gpt2):
    text = "hello w\u00f6rld \U0001f600\n\n\tthe end"
    assert gpt2.decode(gpt2.encode(text).tolist()) == text


words = st.sampled_from(["a", "bc", "he", "hello", "we", "x1", "42", "don't", "\u00e9a"])
blanks = st.sampled_from([" ", "\n", "  ", " \n", "\n\n", "\n\n\n", " \n \n ", "\n\t"])


@pytest.fixture(scope="module")
def shared_gpt2(tmp_path_factory):
    pytest.importorskip("tiktoken")
    return Gpt2Tokenizer(*write_gpt2(tmp_path_factory.mktemp("gpt2")))


# A rest of one line break, and one more in the last block: a run of blanks must not be cut in two.
@example(pairs=[("hello" * 5, "\n\n")], size=26)
@given(pairs=st.lists(st.tuples(words, blanks), min_size=1, max_size=60), size=st.integers(24, 200))
def test_pieces_give_the_tokens_of_the_whole(shared_gpt2, pairs, size):
    text = "".join(word + blank for word, blank in pairs)
    data = text.encode()
    pieces = list(text_chunks((data[i : i + size] for i in range(0, len(data), size)), place="test"))
    assert "".join(pieces) == text
    assert [i for p in pieces for i in shared_gpt2.encode(p).tolist()] == shared_gpt2.encode(text).tolist()


def test_text_without_words_is_cut_at_line_breaks():
    data = "\u4f60\u597d\n".encode() * 100
    blocks = [data[i : i + 50] for i in range(0, len(data), 50)]
    assert list(text_chunks(blocks, place="test")) == [data.decode()]
    pieces = list(text_chunks(blocks, place="test", wordless_bytes=50))
    assert "".join(pieces).encode() == data
    assert max(len(p.encode()) for p in pieces) <= 100
    assert "".join(text_chunks([b"x" * 50] * 4, place="test")) == "x" * 200


def test_files_that_are_not_a_pair_are_refused(tmp_path):
    pytest.importorskip("tiktoken")
    encoder, merges = write_gpt2(tmp_path)
    merges.write_text("#version: 0.2\nh e\nl o\n", encoding="utf-8")
    with pytest.raises(UserError, match="not a pair"):
        Gpt2Tokenizer(encoder, merges)
    merges.write_text("#version: 0.2\nh e\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"not a pair.*1 merges"):
        Gpt2Tokenizer(encoder, merges)
    merges.write_text("#version: 0.2\nl l\nh e\n", encoding="utf-8")
    with pytest.raises(UserError, match="merge 'l l' should make token 256"):
        Gpt2Tokenizer(encoder, merges)
    encoder.write_text("[1, 2]", encoding="utf-8")
    with pytest.raises(UserError, match="not a pair"):
        Gpt2Tokenizer(encoder, merges)


def test_gpt2_is_found_in_root_then_in_the_cache(tmp_path):
    pytest.importorskip("tiktoken")
    root, cache = tmp_path / "root", tmp_path / "cache"
    with pytest.raises(UserError, match=r"encoder\.json and vocab\.bpe") as caught:
        load_tokenizer("gpt2", root=root, cache_dir=str(cache))
    assert str(root) in str(caught.value)
    assert str(cache / "gpt2") in str(caught.value)

    write_gpt2(cache / "gpt2", merges=MERGES[:1])
    assert load_tokenizer("gpt2", root=None, cache_dir=str(cache)).vocab_size == 258
    write_gpt2(root, names=("vocab.json", "merges.txt"))  # Hugging Face's names
    for name in ("gpt2", "openai-community/gpt2", str(root)):
        assert load_tokenizer(name, root=root, cache_dir=str(cache)).vocab_size == 263


def test_the_fingerprint_follows_the_files(tmp_path):
    pytest.importorskip("tiktoken")
    first = Gpt2Tokenizer(*write_gpt2(tmp_path / "a"))
    assert Gpt2Tokenizer(*write_gpt2(tmp_path / "b")).fingerprint == first.fingerprint
    assert Gpt2Tokenizer(*write_gpt2(tmp_path / "c", merges=MERGES[:2])).fingerprint != first.fingerprint


# -- Hugging Face


def test_a_tokenizer_json(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "hello": 1, "world": 300}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = load_tokenizer(str(name), root=None)
        assert tokenizer.vocab_size == 301
        assert tokenizer.dtype == np.uint16
        assert tokenizer.encode("hello big world").tolist() == [1, 0, 300]
        assert tokenizer.decode([1, 300]) == "hello world"


def test_a_file_that_is_no_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=r"is not a tokenizer\.json"):
        load_tokenizer(str(tmp_path), root=None)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        load_tokenizer(str(tmp_path), root=None)


# -- Names


def test_wrong_names():
    assert load_tokenizer("bytes", root=None).vocab_size == 256
    with pytest.raises(UserError, match="did you mean 'bytes'"):
        load_tokenizer("byte", root=None)
    with pytest.raises(UserError, match="no file or folder"):
        load_tokenizer("no/such/tokenizer.json", root=None)


def test_missing_packages_say_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    write_gpt2(tmp_path)
    with pytest.raises(MissingExtra, match=r"smolcluster\[data\]"):
        load_tokenizer("gpt2", root=tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(MissingExtra, match=r"smolcluster\[data\]"):
        load_tokenizer(str(tmp_path), root=None)
