"""Names of weights in files, where transformers converts them: other conversions than those of the families."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Chunk, Concatenate, WeightConverter, WeightRenaming

from actors.embedded.weights import load_weights
from actors.servers.refusal import Refusal
from learner.models.model_folder import ModelFolder
from pipeline.runtime.stored_names import read_groups, written_groups
from tests.support.families import CPU, assert_same, names_in, read_policy, trained, write_family


@pytest.mark.parametrize("one_in_files", [True, False])
def test_one_weight_becomes_several_and_several_one_and_back(one_in_files):
    whole, parts = ["mix.qkv.weight"], ["mix.q.weight", "mix.k.weight", "mix.v.weight"]
    stored, own = (whole, parts) if one_in_files else (parts, whole)
    operation = Chunk(dim=0) if one_in_files else Concatenate(dim=0)
    transforms = [WeightRenaming("^old", "new"), WeightConverter(stored, own, [operation])]
    model = SimpleNamespace(config=None, _weight_conversions=transforms)
    full = torch.arange(12.0).reshape(6, 2)
    values = {**dict(zip(parts, full.chunk(3), strict=True)), whole[0]: full, "bias": torch.ones(2)}
    in_files = {f"old.0.{name}": values[name] for name in [*stored, "bias"]}
    in_model = {f"new.0.{name}": values[name] for name in [*own, "bias"]}

    came = [g.converted(in_files, model) for g in read_groups(transforms, in_files, in_model)]
    assert_same({n: t for group in came for n, t in group.items()}, in_model)
    groups = written_groups(model, in_model, lambda *_, **__: [])
    back = {n: t for g in groups for n, t in g.converted(in_model, model).items()}
    assert_same(back, in_files)


def test_a_prefix_of_the_files_is_published_again(tmp_path):
    """Files of a model with images have a prefix that its language model in transformers has not."""
    folder = write_family("Qwen3.5", tmp_path / "model")
    file = folder / "model.safetensors"
    tensors = {n.replace("model.", "model.language_model.", 1): t for n, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    read = read_policy(folder)
    filled = ModelFolder(folder).empty()
    ModelFolder(folder).fill(filled, CPU)
    assert_same(filled.state_dict(), read.model.state_dict())
    assert read.snapshot("float32").keys() == names_in(folder)
    assert [t.was_used() for t in filled._weight_conversions] == [True]


def test_weights_of_experts_that_do_not_fit_change_nothing(tmp_path):
    folder = write_family("Qwen3 (experts)", tmp_path / "model")
    tensors = trained(read_policy(folder)).policy.snapshot("float32")
    model = ModelFolder(folder).read(CPU)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gone, wide = "model.layers.0.mlp.experts.3.up_proj.weight", "model.layers.1.mlp.experts.0.down_proj.weight"
    for change, reason in (
        ({gone: None}, r"experts\.0\.gate_proj\.weight … does not become model\.layers\.0\.mlp\.experts\.gate_up_proj"),
        ({wide: torch.zeros(3, 3)}, r"experts\.0\.down_proj\.weight … does not become model\.layers\.1"),
        ({"x": torch.zeros(1)}, r"unknown \['x'\]"),
        ({name: None for name in tensors if ".1.mlp.experts." in name}, r"missing \['model\.layers\.1\.mlp\.experts"),
    ):
        changed = {n: t for n, t in {**tensors, **change}.items() if t is not None}
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(Refusal, match=reason):
            load_weights(model, tmp_path)
        assert_same(model.state_dict(), before)
