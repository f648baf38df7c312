"""The `vllm:` section: the generation server, whichever engine it runs."""

from __future__ import annotations

from typing import Annotated, Literal

from axolotl.utils.schemas.base import Options, option
from axolotl.utils.schemas.scalars import AsWord, Bool, Float, Int, Text

ServerDtype = Literal["auto", "float32", "float", "float16", "half", "bfloat16"]


class VllmConfig(Options):
    """Options of `vllm:`."""

    engine: Annotated[Literal["auto", "vllm", "transformers"], AsWord] = option(
        "auto", "What generates: vLLM, or transformers; `auto` is vLLM with an accelerator and transformers on a CPU."
    )
    managed: Bool = option(False, "Let `axolotl train` start the server, and stop it at the end of the run.")
    max_restarts: Int = option(
        5,
        "How often in a row a managed server is started again without having answered a request; 0 is never.",
        ge=0,
    )
    sync_dir: Text | None = option(
        None, "Directory where trainer and server meet (token, adapters); by default one in the user's cache."
    )
    host: Text | None = option(
        None, "Address the server listens on; 0.0.0.0 means every interface of the machine.", null_means="127.0.0.1"
    )
    port: Int | None = option(
        None, "Port the server listens on; `trl.vllm_server_port` when unset.", null_means=8000, ge=1, le=65535
    )
    device: Annotated[Literal["auto", "cuda", "cpu"], AsWord] = option("auto", "Device the engine runs on.")
    dtype: Annotated[ServerDtype, AsWord] = option(
        "auto", "Number format of the weights; `auto` is float32 on a CPU and the checkpoint's own elsewhere."
    )
    max_model_len: Int | None = option(
        None, "The most tokens of prompt and completion together; the model's own limit when unset.", ge=2
    )
    gpu_memory_utilization: Float = option(0.9, "Share of the device's memory the engine may take.", gt=0.0, le=1.0)
    tensor_parallel_size: Int = option(1, "Devices that share one copy of the model.", ge=1)
    data_parallel_size: Int = option(1, "Copies of the model.", ge=1)
    enable_prefix_caching: Bool | None = option(
        None, "Keep the computed prefix of prompts for later requests; the engine decides when unset."
    )
    enforce_eager: Bool | None = option(None, "Run the model without compiled graphs; the engine decides when unset.")
    trust_remote_code: Bool | None = option(
        None, "Let the model's repository run code on the server; the top-level setting when unset."
    )
    reasoning_parser: Text | None = option(None, "Parser of vLLM that separates reasoning from the answer.")
    serve_module: Text | None = option(None, "Another module whose `main` serves the same protocol instead of ours.")
    worker_extension_cls: Text | None = option(None, "Accepted for older configs; this server needs none.")
