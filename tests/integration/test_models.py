import json
from pathlib import Path

import pytest
import torch
from support.tiny_models import save_tiny
from transformers import AutoModelForCausalLM

from tba.contracts.config import Model
from tba.contracts.errors import CorruptObject, UserError
from tba.models import build_model, eos_token_ids, load_model, load_weights, weight_tensors
from tba.store import open_store


def settings(uri: str, **more) -> Model:
    return Model(uri=uri, **more)


@pytest.mark.parametrize("tied", [True, False])
def test_assets_and_weights_rebuild_equal_logits_elsewhere(tmp_path: Path, tied: bool):
    save_tiny(tmp_path / "m", tied=tied)
    loaded = load_model(settings("file://m"), base_dir=tmp_path)
    tensors = weight_tensors(loaded.model)
    assert ("lm_head.weight" in tensors) == (not tied)
    assert list(tensors) == sorted(tensors)
    model, tokenizer = build_model(loaded.assets, dtype=torch.float32, device="cpu")
    load_weights(model, {n: t.clone() for n, t in tensors.items()})
    ids = torch.tensor([tokenizer("07+45=")["input_ids"]])
    assert ids.tolist() == [[0, 7, 10, 4, 5, 11]]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, loaded.model(ids).logits)
    assert tokenizer.chat_template == loaded.tokenizer.chat_template
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embedding is head) == tied


def test_masters_are_float32_and_bfloat16_copies_load_into_them(tmp_path: Path):
    save_tiny(tmp_path, tied=True)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    half.save_pretrained(tmp_path)
    loaded = load_model(settings(f"file://{tmp_path}"), base_dir=Path())
    assert {t.dtype for t in weight_tensors(loaded.model).values()} == {torch.float32}
    model, _ = build_model(loaded.assets, dtype=torch.bfloat16, device="cpu")
    load_weights(model, weight_tensors(loaded.model))
    assert torch.equal(model.get_input_embeddings().weight, half.get_input_embeddings().weight)


def test_generation_config_is_no_asset_and_dropout_stays_off_in_train_mode(tmp_path: Path):
    save_tiny(tmp_path, tied=False)
    loaded = load_model(settings(f"file://{tmp_path}"), base_dir=Path())
    assert "generation_config.json" not in loaded.assets
    ids = torch.arange(8)[None]
    with torch.no_grad():
        still = loaded.model(ids).logits
        assert torch.equal(loaded.model.train()(ids).logits, still)


def test_a_model_on_a_volume_claim_is_the_same_model(tmp_path: Path, monkeypatch):
    save_tiny(tmp_path / "claim" / "m", tied=True)
    monkeypatch.setenv("TBA_PVC_DIR", str(tmp_path))
    here = load_model(settings("file://claim/m"), base_dir=tmp_path).revision
    assert load_model(settings("pvc://claim/m"), base_dir=Path()).revision == here


def test_revision_follows_content_and_not_place(tmp_path: Path):
    first = load_model(settings("file://a"), base_dir=save_tiny(tmp_path / "a", tied=True).parent).revision
    second = load_model(settings("file://b"), base_dir=save_tiny(tmp_path / "b", tied=True).parent).revision
    third = load_model(settings("file://c"), base_dir=save_tiny(tmp_path / "c", tied=True, seed=1).parent).revision
    assert first == second != third


def test_eos_ids_are_those_of_tokenizer_and_config(tmp_path: Path):
    loaded = load_model(settings("file://m"), base_dir=save_tiny(tmp_path / "m", tied=True).parent)
    assert eos_token_ids(loaded.tokenizer, loaded.model.config) == {12}
    loaded.model.config.eos_token_id = [3, 4]
    assert eos_token_ids(loaded.tokenizer, loaded.model.config) == {3, 4, 12}


def test_weights_of_another_shape_are_refused_and_change_nothing(tmp_path: Path):
    loaded = load_model(settings("file://m"), base_dir=save_tiny(tmp_path / "m", tied=True).parent)
    before = {n: t.clone() for n, t in weight_tensors(loaded.model).items()}
    wrong = {n: t + 1 for n, t in before.items()} | {"model.norm.weight": torch.zeros(3)}
    with pytest.raises(CorruptObject, match="model.norm.weight"):
        load_weights(loaded.model, wrong)
    with pytest.raises(CorruptObject, match="missing"):
        load_weights(loaded.model, {})
    assert all(torch.equal(t, before[n]) for n, t in weight_tensors(loaded.model).items())


def test_wrong_uris_say_what_and_the_remedy(tmp_path: Path, monkeypatch):
    with pytest.raises(UserError, match="must be a directory"):
        load_model(settings("file://nowhere"), base_dir=tmp_path)
    with pytest.raises(UserError, match="config.json"):
        load_model(settings(f"file://{tmp_path}"), base_dir=tmp_path)
    with pytest.raises(UserError, match="exists in a cluster only"):
        load_model(settings("pvc://claim/x"), base_dir=tmp_path)


def test_a_model_of_a_bucket_is_read_through_the_store_it_is_given(tmp_path: Path):
    save_tiny(tmp_path / "m", tied=True)
    asked = []

    def open_at_the_runs_endpoint(uri: str):
        asked.append(uri)
        return open_store(f"file://{tmp_path}/m")

    loaded = load_model(settings("s3://bucket/m"), base_dir=tmp_path, open_store=open_at_the_runs_endpoint)
    assert asked == ["s3://bucket/m"]
    assert loaded.revision == load_model(settings("file://m"), base_dir=tmp_path).revision


def test_hf_without_network_names_the_remedy(tmp_path: Path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="network"):
        load_model(settings("hf://org/nothing-here"), base_dir=tmp_path)


def test_repository_code_is_refused_unless_trusted(tmp_path: Path):
    save_tiny(tmp_path, tied=True)
    loaded = load_model(settings(f"file://{tmp_path}"), base_dir=Path())
    config = json.loads(loaded.assets["config.json"]) | {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}
    with pytest.raises(UserError, match="trustRemoteCode"):
        build_model(loaded.assets | {"config.json": json.dumps(config).encode()}, dtype=torch.float32, device="cpu")


def test_an_asset_name_cannot_leave_its_folder():
    with pytest.raises(CorruptObject, match="stay within"):
        build_model({"config.json": b"{}", "../x": b""}, dtype=torch.float32, device="cpu")
