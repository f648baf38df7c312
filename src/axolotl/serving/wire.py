"""The one definition of every body that crosses HTTP between trainer and server.

Ids travel, never text: a text round trip through the tokenizer is not the identity. Version 0 is the base model;
adapter versions count from 1 within a session. A log-prob that is not finite travels as null.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PROTOCOL_VERSION = 1
INSTANCE_HEADER = "x-axolotl-instance"
"""Response header: the instance id of the process that answered, errors included."""

FinishReason = Literal["stop", "length", "scored"]


class Body(BaseModel):
    """A request or response body: unknown keys are refused on both sides."""

    model_config = ConfigDict(extra="forbid", frozen=True)


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
    summary: dict[str, Any]


class ServerInfo(Body):
    """`GET /server_info/`."""

    server: Literal["axolotl"]
    protocol: int
    version: str
    instance_id: str
    engine: Literal["vllm", "transformers"]
    fingerprint: Fingerprint
    dtype: str
    max_model_len: int
    max_lora_rank: int | None
    adapter_version: int
    loaded_versions: list[int]
    run_id: str | None


RunId = Annotated[str, Field(pattern=r"^[a-z0-9-]{1,64}$")]


class SessionRequest(Body):
    """`POST /session/`: a run claims the server, which drops earlier adapters and caches. Repeated by the run that
    holds it, it renews the claim without a reset unless `reset` is set; `release` gives it back."""

    run_id: RunId
    host: str
    pid: int
    fingerprint: Fingerprint
    reset: bool = True
    release: bool = False


class SessionResponse(Body):
    instance_id: str
    run_id: str | None
    adapter_version: int


class Sampling(Body):
    """How tokens are drawn. `temperature: 0` is greedy. `top_k: 0` and `top_p: 1` switch those filters off.

    `extra` holds the user's `generation_kwargs`; an engine refuses by name what it does not support.
    """

    n: int = Field(default=1, ge=1, le=1024)
    max_tokens: int = Field(ge=1)
    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    structured_regex: str | None = None
    extra: dict[str, Any] = Field(default_factory=dict)


class GenerateRequest(Body):
    """`POST /generate/`.

    prompts: token ids, one list a prompt, none of them empty.
    seeds: `[len(prompts)][n]`, one seed a completion, so that a completion does not depend on the batch it is in.
    adapter_version: the version that must make the tokens; the server refuses one it does not hold.
    score_ids: when given, `[len(prompts)]` lists of token ids: nothing is sampled, the answer holds the log-probs of
        these tokens after each prompt under the processed distribution (temperature applied).
    run_id: the run that asks; refused unless it holds the server, since another run's adapters have the same numbers.
        None is a person's question: always answered, with whatever that version is now.
    """

    request_id: str
    adapter_version: int = Field(ge=0)
    prompts: list[list[int]] = Field(min_length=1)
    sampling: Sampling
    seeds: list[list[int]] | None = None
    score_ids: list[list[int]] | None = None
    run_id: RunId | None = None


class Completion(Body):
    """ids: sampled tokens, the end token included when it was sampled. logprobs: one a token, of the processed
    distribution the token was drawn from (temperature and penalties applied)."""

    ids: list[int]
    logprobs: list[float | None]
    finish_reason: FinishReason


class Group(Body):
    """All completions of prompt number `index` of the request, in the order of its seeds."""

    index: int
    completions: list[Completion]


class GenerateResponse(Body):
    request_id: str
    instance_id: str
    adapter_version: int
    groups: list[Group]


class SetAdapterRequest(Body):
    """`POST /set_lora_adapter/`: by opaque ids, never by path. The server reads
    `<sync_dir>/adapters/<run_id>/v<version>/` and checks the manifest against the digest."""

    run_id: RunId
    version: int = Field(ge=1)
    manifest_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class AdapterResponse(Body):
    """Answer of `/set_lora_adapter/` and `/clear_lora_adapter/`.

    num_modules: how many modules of the model the adapter really reached. loaded_versions: those still held; a
    directory may be deleted when its version is not among them.
    """

    instance_id: str
    adapter_version: int
    manifest_sha256: str | None
    num_modules: int
    loaded_versions: list[int]


class ErrorBody(Body):
    """Body of every 4xx and 5xx of ours. No paths, no stack traces."""

    code: str
    what: str
    why: str = ""
    do: str = ""
