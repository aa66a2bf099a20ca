"""The schema of the configuration.

YAML files and command-line overrides merge into a `Config` (`load.py`). `None` means automatic; `resolve.py` replaces it by a
value before the run starts where it can, and `config.yaml` in the run directory has the result. The field descriptions are the
reference documentation (`tools/reference.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from smolcluster.config.strategies import ALONE, DEFAULT, option_fields
from smolcluster.config.types import (
    Auto,
    BelowOne,
    Count,
    Fraction,
    Lower,
    Natural,
    NonNegative,
    NotBool,
    Port,
    Positive,
    Seed,
    Upper,
    lower,
)
from smolcluster.models.registry import ARCHITECTURES

if TYPE_CHECKING:
    ModelType = str
else:
    ModelType = Literal[(*ARCHITECTURES, "simplenn")]


def _dataset_name(value: Any) -> Any:
    """Lower the case of built-in names."""
    return value if isinstance(value, str) and value.startswith("hf:") else lower(value)


def _best(value: Any) -> Any:
    """Read `accuracy max`, `{accuracy: max}` or `[accuracy, max]` as `accuracy, max`; some names imply the direction."""
    if isinstance(value, dict) and len(value) == 1:
        value = next(iter(value.items()))
    words = value.replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return value
    name, *mode = words or [""]
    name = name.removeprefix("val_")
    mode = mode or [{"loss": "min", "ppl": "min", "accuracy": "max"}.get(name, "")]
    return ", ".join([name, *mode])


def split_best(best: str) -> tuple[str, str]:
    """Split into the metric and `min` or `max`."""
    name, _, mode = best.rpartition(", ")
    return name, mode


class Section(BaseModel):
    """A part of the configuration. Unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid",
        validate_assignment=True,
        protected_namespaces=(),
        allow_inf_nan=False,
        ser_json_inf_nan="constants",
    )


class ModelConfig(Section):
    """The model and its shape."""

    type: Annotated[ModelType, Lower] = Field(
        "gpt", description="an architecture of a decoder-only transformer; SimpleNN: a two-layer classifier"
    )

    model_dim: Count = Field(256, description="width of the residual stream")
    num_layers: Count = Field(6, description="number of transformer blocks")
    num_heads: Count = Field(4, description="number of attention heads")
    num_kv_heads: Count | None = Field(None, description="heads for keys and values; null: num_heads")
    ff_dim: Count | None = Field(
        None,
        description="width of the feed-forward layer; null: 4 x model_dim, "
        "or 8/3 x model_dim for swiglu, rounded up to a multiple of 64",
    )
    dropout: BelowOne = Field(0.0, description="dropout probability")
    max_seq_len: Count = Field(128, description="context length in tokens")
    vocab_size: Count | None = Field(None, description="size of the vocabulary; null: that of the tokenizer")
    position: Annotated[Literal["learned", "rotary"], Lower] = Field(
        "learned", description="learned: GPT-2; rotary: Llama"
    )
    norm: Annotated[Literal["layernorm", "rmsnorm"], Lower] = Field(
        "layernorm", description="layernorm: GPT-2; rmsnorm: Llama"
    )
    activation: Annotated[Literal["gelu", "swiglu"], Lower] = Field("gelu", description="gelu: GPT-2; swiglu: Llama")
    bias: bool | None = Field(
        None, description="biases in linear layers and norms; null: yes for layernorm, no for rmsnorm"
    )
    qkv_bias: bool | None = Field(None, description="biases on queries, keys and values; null: as bias; true: Qwen2")
    tie_head: bool = Field(True, description="share the token embedding with the output head")
    rope_theta: Positive = Field(10000.0, description="base of the rotary frequencies")
    norm_eps: Positive = Field(1e-5, description="epsilon inside the norms")
    options: dict[str, bool | Natural | NonNegative] = Field(
        default_factory=dict, description="options of one architecture alone, such as head_dim of qwen3"
    )

    input_dim: Count = Field(784, description="SimpleNN: input features")
    hidden: Count = Field(128, description="SimpleNN: hidden units")
    out: Count = Field(10, description="SimpleNN: classes")


class TrainingConfig(Section):
    """Batches, steps, optimizer, evaluation and checkpoints."""

    batch_size: Count | None = Field(
        None,
        description="samples of a worker in a micro-step; null: 4096 tokens, at most 32 samples "
        "(32 at length 128, 16 at 256); 32 for SimpleNN",
    )
    epochs: Count | None = Field(
        None,
        description="passes over the data; null: 30 for WikiText, 20 for SNLI, 2 for MNIST, else 1. "
        "Ignored when steps is set, unless only epochs is set on the command line",
    )
    steps: Count | None = Field(None, description="optimizer steps; overrides epochs")
    optimizer: Annotated[Literal["adamw", "sgd", "muon"], Lower] = Field(
        "adamw",
        description="adamw; sgd with momentum; muon for the matrices of hidden layers and adamw for all others",
    )
    learning_rate: Positive = Field(6e-4, description="peak learning rate")
    weight_decay: NonNegative = Field(0.01, description="decoupled decay of matrices; vectors are never decayed")
    betas: tuple[BelowOne, BelowOne] = Field((0.9, 0.95), description="AdamW's averaging coefficients")
    momentum: Fraction = Field(0.9, description="SGD's momentum")
    grad_clip_norm: NonNegative | None = Field(1.0, description="clip the global gradient norm; null or 0: off")
    grad_accumulation: Count = Field(1, description="micro-batches per optimizer step")
    eval_steps: Natural | None = Field(
        200, description="steps between evaluations; there is one at the end too; null or 0: only at the end"
    )
    eval_samples: Count | None = Field(
        None,
        description="number of validation samples, from the first on: the same ones for every strategy, number of workers "
        "and batch size; null: all of them",
    )
    eval_batches: Count | None = Field(None, description="deprecated: eval_samples in batches of batch_size samples")
    best: Annotated[str, BeforeValidator(_best)] = Field(
        "loss, min",
        description="validation metric that chooses the best checkpoint, and min or max, such as: accuracy, max",
    )
    checkpoint_steps: Natural | None = Field(
        None, description="steps between checkpoints; there is one at the end too; null: eval_steps; 0: none at all"
    )
    sharded_checkpoints: bool = Field(
        True,
        description="each worker saves its part of the model, if all share the run directory; false: rank 0 saves all",
    )
    max_checkpoints_to_keep: Count = Field(3, description="number of latest checkpoints to keep, besides the best")
    track_gradients: bool = Field(False, description="log the gradient norm of every parameter")
    precision: Annotated[Literal["fp32", "bf16", "fp16"], Lower] = Field(
        "fp32", description="compute type of forward and backward; weights stay fp32"
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in backward: less memory, more time")
    compile: bool = Field(False, description="torch.compile the model")
    profile: str | None = Field(
        None,
        description="steps whose profile is written into the run directory: 10, or the first and the last as 10:13",
    )
    profile_ranks: list[Natural] = Field(default=[0], description="ranks that are profiled")
    device: str | None = Field(None, description="cpu, cuda, cuda:1, mps; null: the best available")
    seed: Seed | None = Field(None, description="null: cluster.seed, or 42")


class ScheduleConfig(Section):
    """Linear warm-up, then cosine down to min_lr at the last step."""

    warmup_iters: Natural = Field(100, description="steps of linear warm-up; at most half of the run")
    min_lr: NonNegative | None = Field(None, description="learning rate at the end; null: a tenth of learning_rate")


class DataConfig(Section):
    """The dataset and its tokenizer."""

    name: Annotated[str, BeforeValidator(_dataset_name)] = Field(
        "embedded", description="embedded, mnist, wikitext, wikitext-103, snli, text, or hf:OWNER/NAME"
    )
    root: str | None = Field(
        None, description="folder (or file, for text) with the data; null: the cache folder, with a download"
    )
    tokenizer: str | None = Field(
        None,
        description="bytes, chars, gpt2, or a path to tokenizer.json; null: bytes for embedded and text, else gpt2",
    )
    tokenizer_root: str | None = Field(
        None,
        description="folder with encoder.json and vocab.bpe, or tokenizer.json; null: data.root, then the cache folder",
    )
    cache_dir: str | None = Field(
        None, description="folder for downloads and token files; null: the user's cache folder"
    )
    val_fraction: Annotated[float, Field(gt=0.0, lt=1.0), NotBool] = Field(
        0.1, description="share held out for validation where the dataset has no validation split"
    )
    download: bool = Field(True, description="download missing files; false: fail instead")


class LoggingConfig(Section):
    """Metrics and logs, besides those in the run directory."""

    project_name: str | None = Field(
        None, description="W&B project; null: smolcluster-gpt-wikitext2 for gpt on WikiText-2, else smolcluster"
    )
    log_interval: Count = Field(10, description="steps between logged rows")
    sample_tokens: Natural = Field(200, description="tokens of sample text that are generated at the end; 0: none")
    wandb: bool = Field(False, description="log to Weights & Biases (offline when no key is set)")
    tensorboard: bool = Field(False, description="write TensorBoard event files into the run directory")
    loki_url: str | None = Field(
        None,
        repr=False,
        description="push logs to this Loki server, such as http://127.0.0.1:3100; put a login into "
        "SMOLCLUSTER_LOKI_AUTH",
    )
    prometheus_port: Port | None = Field(
        None, description="first port for Prometheus metrics: one for each process; null or 0: off"
    )
    prometheus_host: str = Field("127.0.0.1", description="address that the metrics are served on")
    level: Annotated[Literal["DEBUG", "INFO", "WARNING", "ERROR"], Upper] = Field(
        "INFO", description="lowest level that is logged"
    )


class HostConfig(Section):
    """One machine of a cluster, for `smolcluster up`. An address is enough: `pi5: 192.168.1.20`."""

    address: str | None = Field(None, description="ssh address; null: its name; local: this machine, without ssh")
    port: Annotated[int, Field(ge=1, le=65535), NotBool] | None = Field(
        None, description="ssh port; null: from ~/.ssh/config, or 22"
    )
    user: str | None = Field(None, description="ssh user; null: from ~/.ssh/config, or yours")
    key: str | None = Field(None, description="private key file; null: ~/.ssh/config, the agent, the default files")
    via: str | None = Field(None, description="another host of the cluster, as jump host of ssh")
    workers: Annotated[int, Field(ge=0, le=1024), NotBool] = Field(
        1, description="workers on this machine; 0: none, only the server"
    )
    device: str | None = Field(None, description="cpu, cuda, mps; null: the best available")
    batch_size: Count | Auto | None = Field(None, description="per worker here; null: training.batch_size")
    buffer_size: Count | None = Field(None, description="socket buffer in bytes")
    server_address: str | None = Field(
        None, description="address of the server from this machine; null: on a common link, else the server's address"
    )
    python: str | None = Field(
        None,
        description="its Python, 3.11 or newer; used as it is if it has torch and all other packages; null: python3",
    )
    environment: dict[str, str] = Field(default_factory=dict, description="environment variables of its processes")
    folder: str = Field("~/.smolcluster", description="its folder for code, environment and runs")


class LinkConfig(Section):
    """A network between some of the machines: one subnet per physical link."""

    subnet: str | None = Field(None, description="such as 10.10.0.0/24; null: any")
    hosts: dict[str, str] = Field(default_factory=dict, description="host -> its address on this link")


class RunConfig(Section):
    """What `smolcluster up` runs on the cluster."""

    train: str | list[str] = Field(
        "gpt", description="arguments of `train`: built-in names, YAML files, a task as file.py:Class"
    )
    files: list[str] = Field(
        default_factory=list, description="files and folders to copy to the machines, relative to the cluster file"
    )
    elastic: str | None = Field(
        None, description="MIN:MAX, mesh plane: restart from the last checkpoint when a worker dies"
    )
    serve: str | None = Field(
        None,
        description="serve this model instead of training: the argument of `serve`; a path is on the server's machine, "
        "relative to the cluster file if that is this machine; every worker has some of the layers",
    )
    stages: Count | None = Field(None, description="serve: number of pipeline stages; null: workers / replicas")
    replicas: Count = Field(1, description="serve: workers with the same stage")
    layers: str | None = Field(None, description="serve: layers of each stage, as 10,10,10, or auto; null: evenly")
    bind: str = Field("127.0.0.1", description="serve: address of the page and the API on the server's machine")
    page_port: Port = Field(5050, description="serve: port of the page")


def _host(value: Any) -> Any:
    """Read `pi5: 192.168.1.20` as its address, and `pi5:` as all defaults."""
    return {} if value is None else {"address": value} if isinstance(value, str) else value


Host = Annotated[HostConfig, BeforeValidator(_host)]


class ClusterConfig(Section):
    """The machines and how they connect."""

    name: str | None = Field(None, description="name of the cluster, for `status` and tmux; null: that of its file")
    hosts: dict[str, Host] = Field(
        default_factory=dict, description="machines for `smolcluster up`, by name; see below"
    )
    links: dict[str, LinkConfig] = Field(default_factory=dict, description="networks between them; see below")
    host_ip: dict[str, str] = Field(default_factory=dict, description="host name -> address")
    port: Port = Field(65432, description="TCP port of the server or coordinator")
    bind: str = Field("127.0.0.1", description="address to listen on; beyond loopback a token is needed")
    plane: Annotated[Literal["mesh", "elastic"], Lower] | None = Field(
        None,
        description="mesh: all workers start and end together; elastic: a server, and workers that come and go; "
        "null: elastic for strategies that need it, else mesh",
    )
    server: str | None = Field(None, description="host name of the server")
    workers: list[str] = Field(default_factory=list, description="host names of the workers, in rank order")
    num_workers: Count | None = Field(None, description="null: the length of workers, or 1")
    batch_size: Auto | dict[str, Count | Auto] = Field(
        default_factory=dict,
        description="per host, where it differs from training.batch_size; auto, for one host or for all: by measured speed, "
        "so that all finish a step at the same time",
    )
    buffer_size: dict[str, Count] = Field(default_factory=dict, description="socket buffer in bytes, per host")
    token: str | None = Field(None, repr=False, description="shared secret; better set SMOLCLUSTER_TOKEN")
    standby: bool = Field(
        True,
        description="keep a second server process ready (about 250 MB), with train --elastic one per worker: replacing a "
        "dead process takes seconds less",
    )
    silence_timeout: Positive = Field(
        1.75,
        description="elastic: seconds without a heartbeat until others continue without a process; raise it on overloaded "
        "machines, where healthy processes are silent for longer",
    )
    stall_timeout: Positive = Field(
        10.0,
        description="elastic: seconds without a heartbeat until the links of a process are closed while its machine still "
        "responds, as in a call that holds the GIL; others continue without it before",
    )
    join_timeout: Positive = Field(
        120.0, description="mesh: seconds that ranks, or launchers of --elastic, wait for each other at the start"
    )
    seed: Seed | None = Field(None, description="as in the cluster files; training.seed overrides it")


class _Named(Section):
    name: str = Field(DEFAULT, description=f"see `smolcluster strategies`; default on one worker: {ALONE}")


if TYPE_CHECKING:
    _WithOptions = _Named
else:
    _WithOptions = create_model("_WithOptions", __base__=_Named, **option_fields())


class StrategyConfig(_WithOptions):
    """The algorithm and its options.

    An option of another strategy has no effect, with a warning; unknown options are errors. (mesh) and (elastic): on that plane
    only.
    """

    reduce_bucket_size: Count | None = Field(
        None, description="DeepSpeed's key for bucket_mb: numbers in a bucket, of four bytes each"
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="options of a strategy from another package; they may also be given next to name",
    )

    def given(self) -> dict[str, Any]:
        """Return the options that are set, by name."""
        return self.model_dump(exclude={"name", "options"}, exclude_none=True) | self.options

    def with_options(self, options: Mapping[str, Any], *, name: str | None = None) -> Self:
        """Return a copy with these options set; None: leave it."""
        fields = type(self).model_fields
        kept = {key: value for key, value in self.options.items() if key not in options}
        others = {key: value for key, value in options.items() if key not in fields and value is not None}
        own = {key: value for key, value in options.items() if key in fields}
        return self.model_copy(update={**own, "name": name or self.name, "options": kept | others})


def _section(kind: type[Section]) -> Any:
    """Make a section optional; the first line of its docstring is its description."""
    return Field(default_factory=kind, description=(kind.__doc__ or "").splitlines()[0])


class Config(Section):
    """One run."""

    model: ModelConfig = _section(ModelConfig)
    training: TrainingConfig = _section(TrainingConfig)
    lr_schedule: ScheduleConfig = _section(ScheduleConfig)
    data: DataConfig = _section(DataConfig)
    logging: LoggingConfig = _section(LoggingConfig)
    cluster: ClusterConfig = _section(ClusterConfig)
    strategy: StrategyConfig = _section(StrategyConfig)
    run: RunConfig = _section(RunConfig)
    task: str | None = Field(
        None, description="a Task of your own, as path/to/file.py:ClassName; null: chosen from the model and data"
    )
