"""A worker of vLLM that has other weights than a delta belongs to."""

from types import SimpleNamespace

import pytest

from pipeline.errors import DeltaMismatch


@pytest.mark.slow  # vLLM takes seconds to import
@pytest.mark.parametrize(("copies", "number", "told"), [(1, 0, True), (1, 1, False), (2, 0, False), (2, 1, False)])
def test_a_refusal_by_a_copy_whose_answer_nobody_reads_is_an_error(monkeypatch, copies, number, told):
    """vLLM 0.32 tells a worker of a dense model that there is one copy, also where there are several."""
    vllm_worker = pytest.importorskip("actors.servers.vllm_worker")
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="model"),
        parallel_config=SimpleNamespace(data_parallel_size=copies, data_parallel_index=number),
    )
    worker = vllm_worker.DeltaReload()
    worker.model_runner = SimpleNamespace(vllm_config=config)

    def read_base(folder, file):
        raise DeltaMismatch("damaged")

    monkeypatch.setattr(vllm_worker, "read_base", read_base)
    if told:
        assert worker.load_deltas(["delta"]) == {"refused": "damaged"}
    else:
        with pytest.raises(DeltaMismatch):
            worker.load_deltas(["delta"])
