"""timm: its vision transformers as MoH and back, and its protocol on TransNeXt."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from timm.models import group_parameters
from timm.models._manipulate import reinit_non_persistent_buffers
from timm.optim import param_groups_weight_decay

import moh
import moh.backbones.transnext
from moh.heads import Routing, routers

TRANSNEXT = {
    "img_size": 28,
    "in_chans": 1,
    "num_classes": 10,
    "patch_size": 2,
    "embed_dims": [16, 32],
    "num_heads": [2, 4],
    "depths": [1, 2],
    "mlp_ratios": [4, 4],
    "sr_ratios": [2, 1],
}
VIT = {"img_size": 32, "patch_size": 8, "in_chans": 1, "num_classes": 5}
VIT |= {"embed_dim": 32, "depth": 2, "num_heads": 4}
MODELS = {
    "transnext_micro": TRANSNEXT,
    "vit_tiny_patch16_224": VIT,
    "deit_tiny_patch16_224": VIT,
    "deit_tiny_distilled_patch16_224": VIT,
}
VARIANTS = [*MODELS.items(), *[("vit_tiny_patch16_224", {**VIT, "qk_norm": True})]]


def build(name, arguments=None, seed=0):
    torch.manual_seed(seed)
    return timm.create_model(name, **(arguments or MODELS[name])).eval()


def half_plan(model):
    return moh.HeadPlan.from_ratio(*zip(*moh.head_shapes(model), strict=True), ratio=0.5)


def image_of(model, batch=2):
    generator = torch.Generator().manual_seed(1)
    size = 28 if type(model).__name__ == "TransNeXt" else 32
    return torch.randn(batch, 1, size, size, generator=generator)


@pytest.mark.parametrize(("name", "arguments"), VARIANTS)
def test_convert_keeps_all_parameters_and_the_random_stream(name, arguments):
    model = build(name, arguments)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    rng = torch.get_rng_state()
    moh.convert(model, half_plan(model))
    assert torch.equal(torch.get_rng_state(), rng)
    after = model.state_dict()
    for key, value in before.items():
        assert torch.equal(after.pop(key), value), key
    assert after
    assert all(".router." in key for key in after)


@pytest.mark.parametrize(("name", "arguments"), VARIANTS)
def test_revert_gives_the_original_back_bit_for_bit(name, arguments):
    model = build(name, arguments)
    image, names = image_of(model), list(model.state_dict())
    original = model(image)
    moh.convert(model, half_plan(model))
    assert not torch.allclose(model(image), original)
    moh.revert(model)
    assert list(model.state_dict()) == names
    assert torch.equal(model(image), original)


@pytest.mark.parametrize(("name", "arguments"), VARIANTS)
def test_all_gates_one_equals_mha_bit_for_bit(name, arguments):
    model = build(name, arguments)
    original = model(image_of(model))
    moh.convert(model, half_plan(model))
    for _, router in routers(model):
        router.forward = lambda x, q: Routing(x.new_ones(*x.shape[:2], q.shape[1]), None, None)
    assert torch.equal(model(image_of(model)), original)


@pytest.mark.parametrize("name", MODELS)
def test_every_router_learns_from_task_and_balance_loss(name):
    model = build(name).train()
    moh.convert(model, half_plan(model))
    output = model(image_of(model))
    output = output[0] if isinstance(output, tuple) else output
    (output.square().mean() + 0.01 * moh.balance_loss(model)).backward()
    for router_name, router in routers(model):
        for parameter in router.parameters():
            assert parameter.grad.abs().sum() > 0, router_name
    loads = moh.head_load(model)
    assert len(loads) == moh.head_plan(model).routed_layers
    for layer, load in zip(moh.head_plan(model), loads.values(), strict=True):
        torch.testing.assert_close(load.sum(), torch.tensor(float(layer.top_k)))


def test_features_of_all_stages():
    model = build("transnext_micro", {**TRANSNEXT, "features_only": True})
    maps = model(image_of(model.model))
    assert [tuple(m.shape) for m in maps] == [(2, 16, 14, 14), (2, 32, 7, 7)]
    assert model.feature_info.channels() == [16, 32]
    assert model.feature_info.reduction() == [2, 4]
    whole = build("transnext_micro")
    last, both = whole.forward_intermediates(image_of(whole))
    for one, other in zip(maps, both, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(last, whole.forward_features(image_of(whole)))
    (rows,) = whole.forward_intermediates(
        image_of(whole), [0], output_fmt="NHWC", intermediates_only=True, stop_early=True
    )
    assert torch.equal(rows.permute(0, 3, 1, 2), maps[0])


def test_features_of_a_moh_model_route_in_the_stages_that_are_left():
    arguments = {"img_size": 32, "depths": (1, 1, 1, 1), "mlp_ratios": (1, 1, 1, 1)}
    model = timm.create_model(
        "moh_transnext_base_50", features_only=True, out_indices=(0, 1), **arguments
    )
    shapes = [tuple(m.shape) for m in model(torch.randn(1, 3, 32, 32))]
    assert shapes == [(1, 96, 8, 8), (1, 192, 4, 4)]
    assert [layer.num_active for layer in moh.head_plan(model)] == [4, 6]
    assert not any(name.startswith("model.block3") for name in model.state_dict())


def test_the_classifier_can_be_read_replaced_and_removed():
    model = build("transnext_micro")
    features = model.forward_features(image_of(model))
    pooled = model.forward_head(features, pre_logits=True)
    assert pooled.shape == (2, model.num_features)
    assert torch.equal(model.get_classifier()(pooled), model(image_of(model)))
    model.reset_classifier(3)
    assert model.num_classes == 3
    assert model(image_of(model)).shape == (2, 3)
    model.reset_classifier(0, "")
    assert torch.equal(model(image_of(model)), features)
    with pytest.raises(ValueError, match="global_pool 'max' is not one of"):
        model.reset_classifier(3, "max")


@pytest.mark.parametrize("channels", [1, 3])
def test_takes_images_of_any_number_of_channels(channels):
    model = build("transnext_micro", {**TRANSNEXT, "in_chans": channels})
    assert model(torch.randn(2, channels, 28, 28)).shape == (2, 10)


@pytest.mark.parametrize("size", [(28, 28), (40, 24), (31, 29)])
def test_another_image_size_is_another_grid_of_the_same_weights(size):
    arguments = {**TRANSNEXT, "img_size": size, "pretrain_size": 28}
    built = build("transnext_micro", arguments)
    resized = build("transnext_micro")
    resized.set_input_size(size)
    image = torch.randn(1, 1, *size)
    assert torch.equal(built(image), resized(image))
    height, width = built.forward_features(image).shape[2:]
    assert (height, width) == (math.ceil(size[0] / 4), math.ceil(size[1] / 4))


def test_an_image_of_the_wrong_size_is_refused():
    with pytest.raises(ValueError, match=r"image of \(32, 32\) pixels for a model of \(28, 28\)"):
        build("transnext_micro")(torch.randn(1, 1, 32, 32))


def test_a_fixed_pooled_grid_does_not_grow_with_the_image():
    arguments = {**TRANSNEXT, "fixed_pool_size": 7, "pretrain_size": 28}
    fixed = build("transnext_micro", arguments)
    assert torch.equal(fixed(image_of(fixed)), build("transnext_micro")(image_of(fixed)))
    fixed.set_input_size(56)
    assert fixed.block1[0].attn.key_grid() == (7, 7)
    assert fixed(torch.randn(1, 1, 56, 56)).shape == (1, 10)


def test_decay_leaves_out_positions_temperatures_and_vectors_only():
    model = build("transnext_micro")
    moh.convert(model, half_plan(model))
    without, decayed = param_groups_weight_decay(
        model, 0.05, no_weight_decay_list=model.no_weight_decay()
    )
    names = {id(p): name for name, p in model.named_parameters()}
    assert without["weight_decay"] == 0
    free = ("query_embedding", "relative_pos_bias_local", "cpb", "temperature")
    for parameter in without["params"]:
        name = names[id(parameter)]
        assert parameter.ndim == 1 or any(part in name for part in free), name
    for parameter in decayed["params"]:
        name = names[id(parameter)]
        assert parameter.ndim > 1, name
        assert not any(part in name for part in free), name
    assert any(".router." in names[id(parameter)] for parameter in decayed["params"])


def test_layers_are_ordered_from_stem_to_head():
    model = build("transnext_micro")
    layers = group_parameters(model, model.group_matcher(), reverse=True)
    assert len(layers) == len(dict(model.named_parameters()))
    order = ["patch_embed1.proj.weight", "block1.0.mlp.fc1.weight", "block2.0.mlp.fc1.weight"]
    order += ["block2.1.mlp.fc1.weight", "head.weight"]
    assert [layers[name] for name in order] == [0, 1, 2, 3, 4]
    assert layers["norm1.weight"] == layers["block1.0.mlp.fc1.weight"]
    assert layers["patch_embed2.proj.weight"] == layers["block2.0.mlp.fc1.weight"]
    coarse = group_parameters(model, model.group_matcher(coarse=True), reverse=True)
    assert [coarse[name] for name in order] == [0, 1, 2, 2, 3]


def test_stochastic_depth_rises_linearly_over_all_blocks():
    model = build("transnext_micro", {**TRANSNEXT, "drop_path_rate": 0.4})
    blocks = [*model.block1, *model.block2]
    rates = [getattr(block.drop_path, "drop_prob", 0.0) for block in blocks]
    assert rates == pytest.approx([0.0, 0.2, 0.4])


@pytest.mark.parametrize("name", ["transnext_micro", "moh"])
def test_a_model_built_on_the_meta_device_can_be_loaded(name):
    def make():
        model = timm.create_model("transnext_micro", **TRANSNEXT)
        return model if name != "moh" else moh.convert(model, half_plan(model))

    real = make().eval()
    with torch.device("meta"):
        loaded = make().eval()
    assert {p.device.type for p in [*loaded.parameters(), *loaded.buffers()]} == {"meta"}
    loaded.to_empty(device="cpu").load_state_dict(real.state_dict())
    reinit_non_persistent_buffers(loaded)
    assert torch.equal(loaded(image_of(real)), real(image_of(real)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depths": [1, 1, 1]}, r"depths \[1, 1, 1\] has 3 entries for 2 stages"),
        ({"num_heads": [3, 4]}, "width 16 is not a multiple of num_heads 3"),
        ({"window_size": 4}, "window_size 4 has no centre"),
        ({"global_pool": "max"}, "global_pool 'max' is not one of"),
    ],
)
def test_impossible_sizes_are_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message):
        build("transnext_micro", {**TRANSNEXT, **arguments})


def test_a_plan_for_other_heads_is_refused_with_the_layer():
    model = build("vit_tiny_patch16_224")
    plan = moh.HeadPlan.from_groups([2], [6], [8], [2], [2])
    with pytest.raises(ValueError, match=r"layer 0 \(blocks.0.attn\) has 4 heads"):
        moh.convert(model, plan)
    assert moh.head_plan(model) is None
