"""The `vllm` command with one more way for weights to come in, since a CPU has no NCCL: a file.

`python vllm_file_cli.py serve MODEL --weight-transfer-config '{"backend": "file"}'`, run by vLLM's Python. The calls
and what they carry are those of the NCCL backend; the tensors that they name are read from the safetensors file that
the variable below names, not from a broadcast.
"""

import os
from dataclasses import dataclass

import vllm_cli  # first: it makes vLLM find its own version
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

FILE = "WEIGHTS_FILE"


@dataclass
class InitInfo(WeightTransferInitInfo):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    packed: bool = False


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class FileWeightTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None: ...

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        from safetensors import safe_open

        with safe_open(os.environ[FILE], framework="pt") as weights:
            tensors = [(name, weights.get_tensor(name)) for name in update_info.names]
        assert [list(tensor.shape) for _, tensor in tensors] == update_info.shapes
        self.model.load_weights(tensors)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None: ...


WeightTransferEngineFactory.register_engine("file", FileWeightTransferEngine)

# The engine's processes are spawned: they import this file again, and need the backend but not the command.
if __name__ == "__main__":
    assert vllm_cli
    from vllm.entrypoints.cli.main import main

    main()
