"""What empty values come to: a pure function from the config as written to the config as it runs."""

from __future__ import annotations

from typing import Any, TypeVar

from axolotl.utils.schemas.base import Options, null_means
from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.hosts import LOOPBACK, is_this_machine
from axolotl.utils.schemas.trl import TRLConfig

O = TypeVar("O", bound=Options)  # noqa: E741


def resolve(config: AxolotlConfig) -> AxolotlConfig:
    """The config with every null that means something replaced by what it means.

    Host and port of server and client are taken from each other where one is unset. `vllm_importance_sampling_cap`
    is folded into `vllm_importance_sampling_clip_max`. Resolving twice changes nothing.
    """
    trl, vllm = config.trl, config.vllm
    port = trl.vllm_server_port or vllm.port or null_means(TRLConfig, "vllm_server_port")
    client_host = trl.vllm_server_host or vllm.host or null_means(TRLConfig, "vllm_server_host")
    server_host = vllm.host or (LOOPBACK if is_this_machine(client_host) else client_host)
    trl_updates: dict[str, Any] = {"vllm_server_host": client_host, "vllm_server_port": port}
    if trl.vllm_importance_sampling_cap is not None:
        trl_updates["vllm_importance_sampling_clip_max"] = trl.vllm_importance_sampling_cap
        trl_updates["vllm_importance_sampling_cap"] = None
    if config.rl == "gdpo" and trl.multi_objective_aggregation is None:
        trl_updates["multi_objective_aggregation"] = "normalize_then_sum"
    vllm_updates = {
        "host": server_host,
        "port": vllm.port or port,
        "trust_remote_code": config.trust_remote_code if vllm.trust_remote_code is None else vllm.trust_remote_code,
    }
    return _filled(config).model_copy(
        update={
            "trl": _filled(trl.model_copy(update=trl_updates)),
            "vllm": _filled(vllm.model_copy(update=vllm_updates)),
            "datasets": [_filled(entry) for entry in config.datasets],
        }
    )


def _filled(section: O) -> O:
    model = type(section)
    empty = {
        name: meaning
        for name in model.model_fields
        if getattr(section, name) is None and (meaning := null_means(model, name)) is not None
    }
    return section.model_copy(update=empty)
