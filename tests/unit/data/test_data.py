"""Datasets, text sources and MNIST."""

import gzip
import json
import os
import struct
import subprocess
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, TensorDataset

from smolcluster.config.schema import DataConfig
from smolcluster.data.dataset import ArrayDataset, MapDataset, TokenDataset, as_dataset
from smolcluster.data.mnist import open_mnist
from smolcluster.data.names import DATASETS, default_tokenizer
from smolcluster.data.sources import find_sources
from smolcluster.data.text import open_text
from smolcluster.errors import MissingExtra, UserError

# -- Datasets


@given(
    st.integers(1, 9), st.integers(2, 90), st.sampled_from([np.uint8, np.uint16, np.uint32]), st.integers(0, 2**32 - 1)
)
def test_windows_of_tokens(seq_len, length, dtype, seed):
    tokens = np.random.default_rng(seed).integers(0, 256, length).astype(dtype)
    if length <= seq_len:
        with pytest.raises(UserError, match=f"{length} tokens.*needs {seq_len + 1}"):
            TokenDataset(tokens, seq_len)
        return
    dataset = TokenDataset(tokens, seq_len)
    assert len(dataset) == (length - 1) // seq_len
    indices = np.arange(len(dataset))[::-1]
    inputs, targets = dataset.batch(indices)
    for row, i in enumerate(indices):
        window = tokens[i * seq_len : i * seq_len + seq_len + 1].astype(np.int64)
        assert inputs[row].tolist() == window[:-1].tolist()
        assert targets[row].tolist() == window[1:].tolist()
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


def test_arrays_and_tensors_by_row():
    numbers = np.arange(12, dtype=np.float32).reshape(6, 2)
    numbers.flags.writeable = False
    dataset = ArrayDataset(numbers, torch.arange(6))
    x, y = dataset.batch(np.array([4, 0, 4]))
    assert x.tolist() == [[8, 9], [0, 1], [8, 9]]
    assert y.tolist() == [4, 0, 4]
    x.zero_()
    assert dataset.batch(np.array([4]))[0].tolist() == [[8, 9]]
    with pytest.raises(UserError, match=r"\[6, 5\]"):
        ArrayDataset(numbers, torch.arange(5))


class Squares:
    def __len__(self):
        return 10

    def __getitem__(self, i):
        return torch.tensor([float(i)]), i * i


class FetchesMany(Squares):
    def __getitems__(self, wanted):
        return [(torch.tensor([-1.0]), i) for i in wanted]


def test_map_style_datasets_are_collated():
    x, y = MapDataset(Squares()).batch(np.array([3, 2]))
    assert (x.tolist(), y.tolist()) == ([[3.0], [2.0]], [9, 4])
    batch = MapDataset(FetchesMany()).batch(np.array([3, 2]))
    assert isinstance(batch, tuple)
    assert batch[0].tolist() == [[-1.0], [-1.0]]


def test_what_counts_as_a_dataset():
    own = TokenDataset(np.arange(9, dtype=np.uint8), 2)
    assert as_dataset(own) is own
    assert isinstance(as_dataset(Squares()), MapDataset)
    assert isinstance(as_dataset([(torch.zeros(1), 0)] * 3), MapDataset)
    assert isinstance(as_dataset((np.zeros(3), torch.zeros(3))), ArrayDataset)
    fast = as_dataset(TensorDataset(torch.arange(4), torch.arange(4) * 2))
    assert isinstance(fast, ArrayDataset)
    assert [t.tolist() for t in fast.batch(np.array([3, 1]))] == [[3, 1], [6, 2]]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))

    def __len__(self):
        return 3


@pytest.mark.parametrize("wrong", [None, 3, "text", {"x": 1}, (), (1, 2), iter([1])])
def test_what_does_not(wrong):
    with pytest.raises(UserError, match=f"cannot read samples from {type(wrong).__name__}"):
        as_dataset(wrong)


def test_iterable_datasets_are_explained():
    with pytest.raises(UserError, match="Stream is an iterable dataset"):
        as_dataset(Stream())


# -- Text


@pytest.fixture
def data(tmp_path):
    """Makes a DataConfig with its own cache, that never downloads."""

    def make(name, **settings):
        settings = {"tokenizer": "bytes", "download": False, **settings}
        return DataConfig(name=name, cache_dir=str(tmp_path / "cache"), **settings)

    return make


def everything(dataset, tokenizer):
    """The text that a dataset's inputs spell."""
    inputs, _ = dataset.batch(np.arange(len(dataset)))
    return tokenizer.decode(inputs.flatten().tolist())


def test_the_embedded_text(data):
    seen = []
    opened = open_text(data("embedded"), seq_len=128, progress=lambda *a: seen.append(a))
    assert len(opened.train) > 1000
    assert everything(opened.train, opened.tokenizer).startswith('The "assert" statement')
    assert {name for name, _, _ in seen} == {"tokenize embedded text"}
    assert seen[-1][1] == seen[-1][2]
    assert sum(done == total for _, done, total in seen) == 1
    assert len(opened.val) / (len(opened.val) + len(opened.train)) == pytest.approx(0.1, abs=0.01)
    seen.clear()
    open_text(data("embedded"), seq_len=64, progress=lambda *a: seen.append(a))
    assert seen == []


def test_the_end_of_the_text_is_held_out(data, tmp_path):
    (tmp_path / "a.log").write_text("0123456789" * 10, encoding="utf-8")
    opened = open_text(data("text", root=str(tmp_path / "a.log"), val_fraction=0.25), seq_len=4)
    assert everything(opened.train, opened.tokenizer) == ("0123456789" * 10)[:72]
    assert everything(opened.val, opened.tokenizer) == ("0123456789" * 10)[75:99]


def test_a_folder_of_text(data, tmp_path):
    for name, content in (
        ("b.txt", "bee"),
        ("a/z.md", "zed\r\n"),
        ("a.py", "pie"),
        (".git/x.txt", "hidden"),
        ("c.bin", "binary"),
    ):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(content.encode())
    source = find_sources(data("text", root=str(tmp_path / "in"))).train
    text = "".join(source.chunks())
    assert text == "pie\n\nzed\r\n\n\nbee"
    assert source.total_bytes == len(text)
    before = source.content_hash()
    (tmp_path / "in" / "b.txt").write_bytes(b"boo")
    assert source.content_hash() != before


def test_chars_come_from_the_whole_text(data, tmp_path):
    (tmp_path / "a.txt").write_text("abc" * 50 + "\u00e9\u00e8" * 20, encoding="utf-8")
    opened = open_text(data("text", root=str(tmp_path / "a.txt"), tokenizer="chars"), seq_len=4)
    assert opened.tokenizer.vocab_size == 5


@pytest.mark.parametrize(
    ("root", "says"),
    [
        (None, "needs data.root"),
        ("nowhere", "there is no file or folder"),
        ("empty", "has no text files"),
        ("latin.txt", "not UTF-8 text: byte 0xe9 at offset 3"),
        ("tiny.txt", "training part of text has 4 tokens.*needs 9"),
        ("small.txt", r"validation part of text has 3 tokens.*data\.val_fraction"),
    ],
)
def test_text_that_cannot_be_read(data, tmp_path, root, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "tiny.txt").write_bytes(b"abcd")
    (tmp_path / "small.txt").write_bytes(b"a" * 30)
    with pytest.raises(UserError, match=says):
        open_text(data("text", root=None if root is None else str(tmp_path / root)), seq_len=8)


def test_a_long_file_is_read_in_pieces(data, tmp_path):
    line = "caf\u00e9 number {}\n"
    (tmp_path / "long.txt").write_text("".join(line.format(i) for i in range(150_000)), encoding="utf-8")
    config = data("text", root=str(tmp_path / "long.txt"))
    pieces = list(find_sources(config).train.chunks())
    assert len(pieces) > 2
    assert max(map(len, pieces)) < 2**20 + 100
    opened = open_text(config, seq_len=64)
    last = opened.train.batch(np.array([len(opened.train) - 1]))[0][0]
    start = 64 * (len(opened.train) - 1)
    assert bytes(last.tolist()) == (tmp_path / "long.txt").read_bytes()[start : start + 64]


@pytest.mark.parametrize(
    ("train", "val"),
    [
        ("wiki.train.tokens", "wiki.valid.tokens"),
        ("wikitext-2-raw/wiki.train.raw", "wikitext-2-raw/wiki.valid.raw"),
        ("train.txt", "validation.txt"),
    ],
)
def test_wikitext_under_its_usual_names(data, tmp_path, train, val):
    (tmp_path / "w" / train).parent.mkdir(parents=True)
    (tmp_path / "w" / train).write_text("train " * 20, encoding="utf-8")
    (tmp_path / "w" / val).write_text("valid " * 10, encoding="utf-8")
    for name in ("wikitext", "wikitext-2"):
        opened = open_text(data(name, root=str(tmp_path / "w")), seq_len=6)
        assert everything(opened.train, opened.tokenizer) == "train " * 19
        assert everything(opened.val, opened.tokenizer) == "valid " * 9


def test_one_wikitext_file_is_split(data, tmp_path):
    (tmp_path / "valid.txt").write_text("0123456789" * 10, encoding="utf-8")
    opened = open_text(data("wikitext", root=str(tmp_path), val_fraction=0.5), seq_len=7)
    assert (len(opened.train), len(opened.val)) == (7, 7)


def test_wikitext_reads_gpt2_tokens_by_default(data, tmp_path):
    (tmp_path / "train.txt").write_text("train " * 20, encoding="utf-8")
    with pytest.raises(UserError, match=r"encoder\.json and vocab\.bpe"):
        open_text(data("wikitext", root=str(tmp_path), tokenizer=None), seq_len=4)
    assert default_tokenizer("wikitext-103") == default_tokenizer("snli") == default_tokenizer("hf:a/b") == "gpt2"
    assert default_tokenizer("embedded") == default_tokenizer("text") == "bytes"


def test_missing_files_without_a_download(data, tmp_path):
    for name in ("wikitext", "wikitext-103", "snli"):
        with pytest.raises(UserError, match=r"train.*data\.download is false"):
            open_text(data(name), seq_len=4)
        with pytest.raises(UserError, match="there is no folder"):
            open_text(data(name, root=str(tmp_path / "nowhere")), seq_len=4)


PAIRS = [
    ("A man eats.", "He sleeps.", "contradiction"),
    ("Who knows?", "Nobody.", "-"),
    ("Dogs.", "Pets.", "entailment"),
]
SNLI_TEXT = (
    "premise: A man eats. hypothesis: He sleeps. label: contradiction\n"
    "premise: Dogs. hypothesis: Pets. label: entailment\n"
)


def test_snli_pairs_become_lines(data, tmp_path):
    rows = [json.dumps({"sentence1": p, "sentence2": h, "gold_label": label}) for p, h, label in PAIRS]
    (tmp_path / "snli_1.0_train.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    table = ["gold_label\tx\tsentence1\tsentence2", *(f"{label}\t0\t{p}\t{h}" for p, h, label in PAIRS)]
    (tmp_path / "snli_1.0_dev.txt").write_text("\n".join(table) + "\n", encoding="utf-8")
    sources = find_sources(data("snli", root=str(tmp_path)))
    assert "".join(sources.train.chunks()) == SNLI_TEXT
    assert "".join(sources.validation.chunks()) == SNLI_TEXT
    opened = open_text(data("snli", root=str(tmp_path)), seq_len=5)
    assert SNLI_TEXT.startswith(everything(opened.train, opened.tokenizer))
    (tmp_path / "snli_1.0_train.jsonl").write_text('{"sentence1": "x"}\n', encoding="utf-8")
    with pytest.raises(UserError, match="is not an SNLI file"):
        open_text(data("snli", root=str(tmp_path)), seq_len=5)


def test_names_of_datasets(data):
    with pytest.raises(UserError, match="unknown dataset 'wikitex'; did you mean 'wikitext'"):
        open_text(data("wikitex"), seq_len=4)
    with pytest.raises(UserError, match="'mnist' is not text"):
        open_text(data("mnist"), seq_len=4)
    with pytest.raises(UserError, match="no tokenizer"):
        default_tokenizer("mnist")
    assert {"embedded", "mnist", "wikitext", "snli", "text"} <= set(DATASETS)


class FakeRows:
    """As much of a Hugging Face dataset as is used."""

    def __init__(self, **columns):
        self.columns = columns
        self.features = {
            name: types.SimpleNamespace(dtype="string" if isinstance(values[0], str) else "int64")
            for name, values in columns.items()
        }
        self.num_rows = len(next(iter(columns.values())))
        self._fingerprint = repr(columns)

    def select_columns(self, names):
        return FakeRows(**{name: self.columns[name] for name in names})

    def iter(self, batch_size):
        yield self.columns


def use_fake_datasets(monkeypatch, load_dataset):
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")  # so that it is put back afterwards


def test_hugging_face_datasets(data, monkeypatch):
    asked = []
    splits = {"train": FakeRows(id=[1, 2], story=["one " * 9, "two " * 9], text=["text one", "text two"])}
    use_fake_datasets(monkeypatch, lambda *args, **kwargs: asked.append(args) or splits)
    train = find_sources(data("hf:acme/tales:small")).train
    assert asked == [("acme/tales", "small")]
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "".join(train.chunks()) == "text one\n\ntext two\n\n"
    splits["train"] = FakeRows(id=[1, 2], story=["one", "two"])
    splits["validation"] = FakeRows(story=["three"])
    sources = find_sources(data("hf:acme/tales"))
    assert asked[-1] == ("acme/tales", None)
    assert "".join(sources.train.chunks()) == "one\n\ntwo\n\n"
    assert "".join(sources.validation.chunks()) == "three\n\n"
    assert sources.train.content_hash() != sources.validation.content_hash()


def test_hugging_face_trouble(data, monkeypatch):
    with pytest.raises(UserError, match="names no dataset"):
        find_sources(data("hf:"))
    use_fake_datasets(monkeypatch, lambda *args, **kwargs: {"train": FakeRows(id=[1])})
    with pytest.raises(UserError, match="no column of text, only: id"):
        find_sources(data("hf:acme/tales"))
    use_fake_datasets(monkeypatch, lambda *args, **kwargs: {"test": FakeRows(id=[1])})
    with pytest.raises(UserError, match="no split 'train', only: test"):
        find_sources(data("hf:acme/tales"))

    def fail(*args, **kwargs):
        raise FileNotFoundError("no such thing")

    use_fake_datasets(monkeypatch, fail)
    with pytest.raises(UserError, match="cannot load the Hugging Face dataset acme/tales: no such thing"):
        find_sources(data("hf:acme/tales"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtra, match=r"smolcluster\[data\]"):
        find_sources(data("hf:acme/tales"))


# -- MNIST


def idx(array):
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write_mnist(folder, *, gz=False, dots=False, train=20, test=8):
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for prefix, count in (("train", train), ("t10k", test)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            name = f"{prefix}-{kind.replace('-', '.') if dots else kind}-ubyte"
            if gz:
                (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
            else:
                (folder / name).write_bytes(idx(array))


@pytest.mark.parametrize(
    ("place", "gz", "dots"), [("", True, False), ("raw", False, False), ("MNIST/raw", False, True)]
)
def test_mnist_where_people_keep_it(data, tmp_path, place, gz, dots):
    write_mnist(tmp_path / place, gz=gz, dots=dots)
    train, validation = open_mnist(data("mnist", root=str(tmp_path)))
    assert (len(train), len(validation)) == (20, 8)
    images, labels = train.batch(np.array([3, 11]))
    raw = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)[[3, 11]].reshape(2, 784)
    expected = (raw.astype(np.float64) / 255 - 0.1307) / 0.3081
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    np.testing.assert_allclose(images.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert labels.tolist() == [3, 1]


def test_mnist_that_is_damaged(data, tmp_path):
    config = data("mnist", root=str(tmp_path))
    write_mnist(tmp_path)
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    whole = images.read_bytes()
    for content in (whole[:-5], whole + b"x", whole[:10]):
        images.write_bytes(content)
        with pytest.raises(UserError, match=f"train-images-idx3-ubyte holds {len(content)} bytes"):
            open_mnist(config)
    images.write_bytes(whole[:-5])
    with pytest.raises(UserError, match=str(len(whole))):
        open_mnist(config)
    for content, found in ((b"\x00\x00\x08\x01" + whole[4:], "00 00 08 01"), (b"", "nothing")):
        images.write_bytes(content)
        with pytest.raises(UserError, match=f"starts with {found}, not 00 00 08 03"):
            open_mnist(config)
    images.write_bytes(whole)
    labels.write_bytes(idx(np.zeros(19, dtype=np.uint8)))
    with pytest.raises(UserError, match=r"20 images but .* has 19 labels"):
        open_mnist(config)


def test_mnist_gzip_that_is_damaged(data, tmp_path):
    config = data("mnist", root=str(tmp_path))
    write_mnist(tmp_path, gz=True)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz holds \d+ bytes, but its header says 15696"):
        open_mnist(config)
    file.write_bytes(whole[:-4])
    with pytest.raises(UserError, match="lacks the end of its gzip stream"):
        open_mnist(config)
    file.write_bytes(b"not gzip")
    with pytest.raises(UserError, match=r"cannot read .*train-images-idx3-ubyte\.gz"):
        open_mnist(config)


def test_mnist_that_is_not_there(data, tmp_path):
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz\) and data\.download is false"):
        open_mnist(data("mnist"))
    with pytest.raises(UserError, match="there is no folder"):
        open_mnist(data("mnist", root=str(tmp_path / "nowhere")))


def test_names_can_be_had_without_torch():
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    code = "import sys, smolcluster.data, smolcluster.data.sources; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=300)
