"""Adapters alone, published to servers that behave like vLLM with LoRA."""

import anyio
import pytest
import torch
from aiohttp import web
from peft import PeftModel
from pydantic import ValidationError

from actors.servers.vllm import vllm_command
from learner.metrics import LearnerMetrics
from learner.policy.policy import Policy
from learner.weights.publisher import make_publisher, weights_to_publish
from pipeline.config import RunConfig
from pipeline.errors import ConfigurationError
from pipeline.runtime.run_directory import RunDirectory
from tests.support.http_server import serving
from tests.unit.learner.conftest import learner_config, tiny_model


class Server:
    """vLLM's routes for adapters: an adapter is loaded once by name, then replaced in the workers."""

    def __init__(self):
        self.version, self.paused, self.adapters, self.calls = "default", False, {}, []

    async def handle(self, request):
        path = request.path
        body = await request.json() if request.can_read_body else {}
        self.calls.append(path)
        if path == "/weight_info":
            return web.json_response({"weight_version": self.version})
        if path == "/is_paused":
            return web.json_response({"is_paused": self.paused})
        if path == "/v1/models":
            return web.json_response({"data": [{"id": name} for name in ("policy", *self.adapters)]})
        if path == "/pause":
            self.paused = True
        elif path == "/resume":
            self.paused = False
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/v1/load_lora_adapter":
            assert self.paused
            assert body["lora_name"] not in self.adapters
            assert not body.get("load_inplace")
            self.adapters[body["lora_name"]] = [body["lora_path"]]
            return web.Response(text="Success: LoRA adapter 'adapter' added successfully.")
        elif path == "/collective_rpc":
            assert self.paused
            assert body["method"] == "reload_adapter"
            self.adapters[body["kwargs"]["name"]].append(body["kwargs"]["folder"])
        return web.json_response({})


@pytest.fixture
async def server():
    server = Server()
    async with serving(server.handle) as server.url:
        yield server


def config_of(tmp_path, **sections):
    return RunConfig.model_validate(
        {
            "run": {"directory": str(tmp_path), "name": "r"},
            "engine": {"kind": "external", "urls": ["http://127.0.0.1:9"]},
            "learner": {"device": "cpu", "lora": {"rank": 2}},
            "publish": {"lora": "adapter", "dtype": "float32", "probe_nats_max": None},
            **sections,
        }
    )


async def test_an_adapter_is_loaded_once_and_then_replaced_in_place(server, adapted, tmp_path, registry):
    config = config_of(tmp_path, engine={"kind": "external", "urls": [server.url]})
    directory = RunDirectory(config.run.path).create()
    policy = adapted()
    sizes = []
    async with make_publisher(config, directory, policy, LearnerMetrics(registry)) as publisher:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(publisher.run)
                for version in range(3):
                    done = await publisher.publish(version, weights_to_publish(policy, config.publish))
                    assert done.live == (server.url,)
                    sizes.append(done.n_bytes)
                tasks.cancel_scope.cancel()
    folders = [str(directory.weights(v).absolute()) for v in range(3)]
    assert server.adapters == {"adapter": folders}
    assert (server.version, server.paused) == ("2", False)
    assert sizes[0] < sum(t.nbytes for t in policy.snapshot("float32").values())
    read = PeftModel.from_pretrained(tiny_model(), folders[2]).get_base_model()
    own = Policy(read, learner_config(), torch.device("cpu"))
    mine = dict(policy.named_parameters)
    assert all(torch.equal(p, mine[n]) for n, p in own.model.named_parameters() if "lora_" in n)


def test_merged_publication_is_the_default_and_has_the_names_of_the_plain_model(adapted, tmp_path):
    policy = adapted()
    merged = weights_to_publish(policy, config_of(tmp_path, publish={}).publish)
    assert not any("lora" in name for name in merged)
    alone = weights_to_publish(policy, config_of(tmp_path).publish)
    assert alone
    assert all("lora_" in name for name in alone)


@pytest.mark.parametrize(
    ("sections", "word"),
    [
        ({"learner": {"lora": {"rank": 0}}}, "no adapters to publish"),
        ({"engine": {"kind": "embedded"}}, "vLLM servers"),
        ({"engine": {"kind": "vllm", "weight_transfer": "nccl"}}, "vLLM servers"),
    ],
)
def test_what_cannot_serve_adapters_is_refused_at_the_start(tmp_path, sections, word):
    with pytest.raises(ValidationError, match=word):
        config_of(tmp_path, **sections)


def test_vllm_is_started_with_room_for_one_adapter_of_the_rank(tmp_path):
    config = config_of(tmp_path, engine={"kind": "vllm"}, learner={"lora": {"rank": 9, "targets": ["q_proj"]}})
    arguments, environment = vllm_command(config, tmp_path, "127.0.0.1", 1)
    assert arguments[arguments.index("--max-lora-rank") + 1] == "16"
    assert arguments[arguments.index("--worker-extension-cls") + 1].endswith("AdapterReload")
    assert "--enable-lora" in arguments
    assert arguments[arguments.index("--lora-target-modules") + 1] == "q_proj"
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    plain, _ = vllm_command(config_of(tmp_path, engine={"kind": "vllm"}, publish={}), tmp_path, "127.0.0.1", 1)
    assert "--enable-lora" not in plain
    with pytest.raises(ConfigurationError, match="up to 512"):
        vllm_command(config_of(tmp_path, learner={"lora": {"rank": 600}}), tmp_path, "127.0.0.1", 1)
