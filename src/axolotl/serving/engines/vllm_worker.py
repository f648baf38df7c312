"""What we ask a vLLM worker that its own interface does not tell: which modules an adapter reached.

vLLM mixes `AdapterReport` into its worker class (`worker_extension_cls`) and calls its method by name in every worker.
This is the only module that reads private attributes of vLLM; `tests/contract/test_vllm_contract.py` lists them.
"""

from __future__ import annotations

from typing import Any


class AdapterReport:
    """Mixed into vLLM's worker."""

    model_runner: Any

    def axolotl_unreached_modules(self, adapter_id: int) -> list[str] | None:
        """Modules of the loaded adapter for which the model has no layer; None when no such adapter is loaded.

        vLLM merges the parts of a packed layer (q, k and v into one) when it loads an adapter, and leaves what it
        cannot place under its own name. It applies such an adapter without a word.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        adapter = manager.get_adapter(adapter_id)
        if adapter is None:
            return None
        return sorted(set(adapter.loras) - set(manager.modules))
