"""The one definition of every body that crosses HTTP between trainer and server.

Ids travel, never text: a text round trip through the tokenizer is not the identity. Version 0 is the base model;
versions of the policy count from 1 within a session, whether they come as adapters or as full weights. A log-prob that
is not finite travels as null.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from axolotl.serving.bounds import PlainDict

PROTOCOL_VERSION = 3
INSTANCE_HEADER = "x-axolotl-instance"
"""Response header: the instance id of the process that answered, errors included."""

FinishReason = Literal["stop", "length", "scored"]


class Body(BaseModel):
    """A request or response body: unknown keys are refused on both sides."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ErrorBody(Body):
    """Body of every 4xx and 5xx of ours. No paths, no stack traces."""

    code: str
    what: str
    why: str = ""
    do: str = ""


class Health(Body):
    """`GET /health/`: 200 with `ok` when it can generate, 503 with the phase while it loads."""

    status: Literal["ok", "loading", "failed"]
    phase: str


class Fingerprint(Body):
    """What must be equal on both sides for the adapter of one to mean something on the other.

    `config`, `tokenizer` and `weights` are hex sha256 digests; `summary` has the few fields that make a difference
    readable (`hidden_size`, `num_hidden_layers`, `vocab_size`, ...).
    """

    base_model: str
    config: str
    tokenizer: str
    weights: str
    summary: PlainDict


WeightTransport = Literal["files", "nccl"]


class ServerInfo(Body):
    """`GET /server_info/`.

    device: `cpu`, `cuda`, ... weight_transports: how full weights may arrive, besides adapters. weight_ranks: with
    `nccl` the GPUs (their uuids) that receive them, one a worker. max_versions: of adapters, that it holds at once, the
    one being loaded included.
    """

    server: Literal["axolotl"]
    protocol: int
    version: str
    instance_id: str
    engine: Literal["vllm", "transformers"]
    fingerprint: Fingerprint
    dtype: str
    device: str
    weight_transports: list[WeightTransport]
    weight_ranks: list[str] = Field(default_factory=list)
    max_model_len: int
    max_lora_rank: int | None
    max_versions: int
    adapter_version: int
    loaded_versions: list[int]
    run_id: str | None


MAX_INT = 2**31 - 1
"""Of versions, process ids and counts: a number that fits everywhere it goes."""
MAX_TENSORS = 2**17
TRANSFER_CHUNK_BYTES = 2**28
"""Tensors travel over NCCL packed into pieces of about this size. Both sides must cut them in the same places."""
TRANSFER_NUM_CHUNKS = 2
CANARY_VERSION = 2**30
"""The version number of the adapter that proves the way to the server; no run has so many steps."""
RunId = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]


def without_nulls(options: dict[str, Any]) -> dict[str, Any]:
    """The options that are set."""
    return {name: value for name, value in options.items() if value is not None}


class Sampling(Body):
    """How tokens are drawn. `temperature: 0` is greedy. `top_k: 0` and `top_p: 1` switch those filters off.

    `extra` holds the user's `generation_kwargs` but for nulls, which mean "not set"; an engine refuses by name what it
    does not support.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: int = Field(ge=1, le=MAX_INT)
    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=MAX_INT)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    structured_regex: str | None = Field(default=None, max_length=4096)
    extra: Annotated[PlainDict, AfterValidator(without_nulls)] = Field(default_factory=dict)


class SessionRequest(Body):
    """`POST /session/`.

    `claim`: a run takes the server, which drops earlier adapters, weights and caches; repeated by the run that holds
    it, it resets again. `renew`: a sign of life of the run that holds it, refused to every other. `release`: gives it
    back. namespace: what `pid` means something in (`processes.own_namespace`); empty where that is not known. sampling:
    with `claim`, what the run will sample with, so that an option the engine does not support is refused before
    anything is trained.
    """

    run_id: RunId
    host: str = Field(pattern=r"^[ -~]{0,255}$")
    pid: int = Field(ge=0, le=MAX_INT)
    namespace: str = Field(default="", pattern=r"^[ -~]{0,255}$")
    fingerprint: Fingerprint
    action: Literal["claim", "renew", "release"] = "claim"
    sampling: Sampling | None = None


class SessionResponse(Body):
    """lease_s: how long the claim lasts without a sign of life, where the server cannot see the run's process."""

    instance_id: str
    run_id: str | None
    adapter_version: int
    lease_s: float


class GenerateRequest(Body):
    """`POST /generate/`.

    prompts: token ids, one list a prompt, none of them empty.
    seeds: `[len(prompts)][n]`, one seed a completion, so that a completion does not depend on the batch it is in.
    adapter_version: the version that must make the tokens; the server refuses one it does not hold.
    score_ids: when given, `[len(prompts)]` lists of token ids: nothing is sampled, the answer holds the log-probs of
        these tokens after each prompt under the processed distribution (temperature applied).
    run_id: the run that asks; refused unless it holds the server, since another run's adapters have the same numbers.
        None is a person's question: always answered, with whatever that version is now.
    stream: answer with one `StreamLine` a line (application/x-ndjson), each group as soon as it is finished, instead
        of one `GenerateResponse`.
    """

    request_id: str = Field(pattern=r"^[!-~]{1,128}$")
    adapter_version: int = Field(ge=0, le=MAX_INT)
    prompts: list[list[int]] = Field(min_length=1)
    sampling: Sampling
    seeds: list[list[int]] | None = None
    score_ids: list[list[int]] | None = None
    run_id: RunId | None = None
    stream: bool = False


class Completion(Body):
    """ids: sampled tokens, the end token included when it was sampled. logprobs: one a token, of the processed
    distribution the token was drawn from (temperature, penalties and filters applied).

    log_kept: one a token, the log of the probability mass that top_k, top_p and min_p kept (0 or less), so that
    `logprobs + log_kept` belongs to the distribution before these filters. None when nothing was cut, or when the
    engine cannot say.
    """

    ids: list[int]
    logprobs: list[float | None]
    finish_reason: FinishReason
    log_kept: list[float] | None = None


class Group(Body):
    """All completions of prompt number `index` of the request, in the order of its seeds.

    instance_id: the process that made it, where that may be another than the answer's: `ServerClient` fills it in when
    it reads an answer, since a server may be restarted between two groups of a request. None from a server.
    """

    index: int
    completions: list[Completion]
    instance_id: str | None = None


class GenerateResponse(Body):
    """instance_id: the process that answered; of several, the last one."""

    request_id: str
    instance_id: str
    adapter_version: int
    groups: list[Group]


class StreamStart(Body):
    """First line of a streamed answer: what `GenerateResponse` says besides the groups."""

    type: Literal["start"] = "start"
    request_id: str
    instance_id: str
    adapter_version: int


class StreamGroup(Body):
    """A finished group; groups come in the order in which they finish."""

    type: Literal["group"] = "group"
    group: Group


class StreamProgress(Body):
    """After every `STREAM_INTERVAL_S` in which no group finished. work: see `Progress`."""

    type: Literal["progress"] = "progress"
    work: int


class StreamEnd(Body):
    """Last line of an answer that is complete."""

    type: Literal["end"] = "end"


class StreamError(Body):
    """Last line of an answer that failed after it had begun. status: what the HTTP status would have been."""

    type: Literal["error"] = "error"
    status: int
    error: ErrorBody


STREAM_INTERVAL_S = 1.0
StreamLine = Annotated[
    StreamStart | StreamGroup | StreamProgress | StreamEnd | StreamError, Field(discriminator="type")
]
STREAM_LINE: TypeAdapter[StreamLine] = TypeAdapter(StreamLine)


class Progress(Body):
    """`GET /progress/`: tells slow from hung.

    work: tokens the engine has processed since it started, prompts included, and what it has done to replace weights;
    it never falls, and it stands still only when the engine does. generated: tokens that were sampled. running:
    requests not answered yet.
    """

    instance_id: str
    work: int
    generated: int
    running: int
    adapter_version: int


class ClearAdapterRequest(Body):
    """`POST /clear_lora_adapter/`: back to the base model, for the run that holds the server."""

    run_id: RunId


class SetWeightsRequest(Body):
    """`POST /set_weights/`: full weights of a version, read from `<sync_dir>/weights/<run_id>/v<version>/` (files that
    the manifest lists, safetensors under the model's own tensor names). They replace what is served: adapters are
    dropped, and no earlier version can be asked for any more."""

    run_id: RunId
    version: int = Field(ge=1, le=MAX_INT)
    manifest_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class LinkRequest(Body):
    """`POST /link_weights/`: join the trainer in a group of NCCL, the trainer as rank 0 and the workers of
    `ServerInfo.weight_ranks` after it; a link that was there before is dropped. Answered when all have joined.

    unique_id: NCCL's, 128 bytes in base64. It names the trainer's end and is the secret of the group.
    action: `leave`, the trainer could not join this group, or cannot go on sending. Workers may wait for it inside
        NCCL, so an engine that is joining or receiving is given up; a `join` that comes after its `leave` is refused.
    """

    run_id: RunId
    unique_id: str = Field(pattern=r"^[A-Za-z0-9+/]{171}=$")
    action: Literal["join", "leave"] = "join"


class LinkResponse(Body):
    instance_id: str
    num_ranks: int


class TensorLayout(Body):
    name: str = Field(pattern=r"^[!-~]{1,512}$")
    dtype: Literal["float64", "float32", "float16", "bfloat16"]
    shape: list[Annotated[int, Field(ge=0, le=MAX_INT)]] = Field(max_length=8)


class TransferRequest(Body):
    """`POST /receive_weights/`: full weights of a version over the link, in the order of `tensors`.

    `check`: whether they could be received now; changes nothing. `receive`: replaces what is served as `/set_weights/`
    does, while the trainer sends; answered when they are served.

    sha256: a digest of what is announced, which the answer repeats as `manifest_sha256`.
    """

    run_id: RunId
    version: int = Field(ge=1, le=MAX_INT)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    tensors: list[TensorLayout] = Field(min_length=1, max_length=MAX_TENSORS)
    action: Literal["check", "receive"]


class SetAdapterRequest(Body):
    """`POST /set_lora_adapter/`: by opaque ids, never by path. The server reads
    `<sync_dir>/adapters/<run_id>/v<version>/` and checks the manifest against the digest."""

    run_id: RunId
    version: int = Field(ge=1, le=MAX_INT)
    manifest_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class AdapterResponse(Body):
    """Answer of `/set_lora_adapter/`, `/clear_lora_adapter/`, `/set_weights/` and `/receive_weights/`.

    num_modules: how many modules of the model the adapter really reached; with full weights, how many tensors were
    replaced. loaded_versions: those still held; a directory may be deleted when its version is not among them.
    """

    instance_id: str
    adapter_version: int
    manifest_sha256: str | None
    num_modules: int
    loaded_versions: list[int]
