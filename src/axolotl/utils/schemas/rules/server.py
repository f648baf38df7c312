"""Whether this server can serve this run."""

from __future__ import annotations

from axolotl.utils.schemas.config import AxolotlConfig
from axolotl.utils.schemas.hosts import is_this_machine
from axolotl.utils.schemas.nodes import Path, Problem
from axolotl.utils.schemas.plan import prompt_limit, uses_server
from axolotl.utils.schemas.rules.model import changes_base, target_names

MAX_SERVED_RANK = 512
MAX_SERVED_GROUP = 256


def one_address(config: AxolotlConfig) -> list[Problem]:
    """Server and client may be given one address each, but it has to be the same."""
    trl, vllm = config.trl, config.vllm
    problems = []
    if trl.vllm_server_port and vllm.port and trl.vllm_server_port != vllm.port:
        message = f"is {trl.vllm_server_port}, but vllm.port is {vllm.port}; remove one, or make them equal"
        problems.append(Problem(("trl", "vllm_server_port"), message))
    if trl.vllm_server_host and vllm.host and not _same_host(trl.vllm_server_host, vllm.host):
        message = f"is {trl.vllm_server_host}, but vllm.host is {vllm.host}; remove one, or make them equal"
        problems.append(Problem(("trl", "vllm_server_host"), message))
    return problems


def _same_host(one: str, other: str) -> bool:
    return one.lower() == other.lower() or (is_this_machine(one) and is_this_machine(other))


def managed_server_is_here(config: AxolotlConfig) -> list[Problem]:
    """A server that `train` starts runs on this machine."""
    host = config.trl.vllm_server_host
    if not config.vllm.managed or host is None or is_this_machine(host):
        return []
    return [Problem(("vllm", "managed"), f"starts a server on this machine, but trl.vllm_server_host is {host}")]


def prompts_have_room(config: AxolotlConfig) -> list[Problem]:
    """The limit on prompts is at least one token."""
    if prompt_limit(config) >= 1:
        return []
    max_len, length = config.vllm.max_model_len, config.trl.max_completion_length
    message = (
        f"leaves no room for a prompt: vllm.max_model_len {max_len} - max_completion_length {length} "
        f"= {prompt_limit(config)} tokens; raise one or lower the other"
    )
    return [Problem(("trl", "max_completion_length"), message)]


def server_can_load_the_adapter(config: AxolotlConfig) -> list[Problem]:
    """What vLLM's adapters cannot express is refused before a run learns something that is never served."""
    if not config.trl.vllm_lora_sync:
        return []
    because = "cannot be combined with trl.vllm_lora_sync: true"
    instead = "; set it to false, and the server gets all the weights"
    problems = []

    def refuse(key: str, reason: str) -> None:
        problems.append(Problem((key,), f"{because} ({reason}){instead}", code="E-CFG-22"))

    if config.adapter is None:
        message = "needs an adapter to send; set adapter: lora"
        problems.append(Problem(("trl", "vllm_lora_sync"), message))
    if config.peft_use_dora:
        refuse("peft_use_dora", "the server cannot serve DoRA")
    if config.lora_bias != "none":
        refuse("lora_bias", "the server cannot serve trained biases")
    if config.lora_modules_to_save:
        refuse("lora_modules_to_save", "the server gets the adapter only")
    if "embed_tokens" in target_names(config):
        refuse("lora_target_modules", "the server cannot adapt embed_tokens")
    if changes_base(config):
        refuse(
            "peft_init_lora_weights", f"{config.peft_init_lora_weights} changes the base model, which the server has"
        )
    if config.lora_r > MAX_SERVED_RANK:
        message = f"is {config.lora_r}; the server takes ranks up to {MAX_SERVED_RANK}"
        problems.append(Problem(("lora_r",), message, code="E-CFG-21"))
    return problems


def server_can_take_all_weights(config: AxolotlConfig) -> list[Problem]:
    """Without adapter sync the server gets the weights under the base model's own names and shapes."""
    if not uses_server(config) or config.trl.vllm_lora_sync:
        return []
    quantised = {"adapter": config.adapter == "qlora"}
    quantised |= {name: bool(getattr(config, name)) for name in ("load_in_4bit", "load_in_8bit")}
    message = "makes weights that a server cannot take as they are; set trl.vllm_lora_sync: true"
    return [Problem((name,), message) for name, is_set in quantised.items() if is_set]


def server_can_receive_over_nccl(config: AxolotlConfig) -> list[Problem]:
    """NCCL carries all the weights, from GPU to GPU, to vLLM. What only the machine knows is checked when they meet."""
    if config.trl.weight_sync != "nccl":
        return []
    path: Path = ("trl", "weight_sync")
    problems = []
    if config.trl.vllm_lora_sync:
        message = "is nccl, which carries all the weights, but trl.vllm_lora_sync: true sends the adapter as files"
        problems.append(Problem(path, f"{message}; set weight_sync: files, or vllm_lora_sync: false"))
    if config.vllm.engine == "transformers":
        message = "is nccl, which vllm.engine: transformers cannot receive; set weight_sync: files, or another engine"
        problems.append(Problem(path, message))
    if config.vllm.device == "cpu":
        problems.append(Problem(path, "is nccl, which needs a GPU, but vllm.device is cpu; set weight_sync: files"))
    return problems


def server_takes_the_group(config: AxolotlConfig) -> list[Problem]:
    """A server generates a group in one request, up to a limit."""
    group = config.trl.num_generations
    if not uses_server(config) or group is None or group <= MAX_SERVED_GROUP:
        return []
    return [Problem(("trl", "num_generations"), f"is {group}; the server takes groups of up to {MAX_SERVED_GROUP}")]
