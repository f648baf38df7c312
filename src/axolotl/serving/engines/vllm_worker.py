"""What we ask of a vLLM worker beyond its own interface: which modules an adapter reached, and to prepare a tied output
layer again.

vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`) and calls its methods by name in every
worker. This is the only module that reads private attributes of vLLM's worker; `tests/contract/test_vllm_contract.py`
lists them.
"""

from __future__ import annotations

from typing import Any


class WorkerExtension:
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

    def axolotl_repack_output(self) -> None:
        """After the weights were reloaded: prepare the output layer again when it is the input embedding.

        On a CPU vLLM multiplies with a packed copy of the matrix. It renews the copies of the layers that it loads; a
        tied output layer is not among them and would go on with the old weights.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        model = self.model_runner.get_model()
        if not model.config.tie_word_embeddings:
            return
        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)
