"""The config type that conditions a model of another library: built, trained, tested and loaded as the stock one."""

import copy
from pathlib import Path

import pytest
import torch
from mmdet.apis import init_detector
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmdet.structures.mask import BitmapMasks
from mmengine.config import Config
from mmengine.model import ExponentialMovingAverage
from mmengine.registry import init_default_scope
from mmengine.runner import load_checkpoint, save_checkpoint
from mmengine.structures import InstanceData

import mmspectral
from mmspectral.layers import ConditionedMultiheadAttention

CONFIG = Path(__file__).resolve().parents[2] / "configs/any_model/mask2former_r50_spectral-decoder_8xb2-lsj-50e_coco.py"


def tiny_config(**overrides):
    """The shipped config with a small model: two decoder layers, ten queries, images as they are."""
    cfg = Config.fromfile(CONFIG)

    cfg.merge_from_dict(
        dict(
            model=dict(
                backbone=dict(depth=18, base_channels=8, init_cfg=None),
                panoptic_head=dict(
                    in_channels=[8, 16, 32, 64],
                    num_queries=10,
                    transformer_decoder=dict(num_layers=2),
                    pixel_decoder=dict(encoder=dict(num_layers=1)),
                ),
                data_preprocessor=dict(batch_augments=None),
                train_cfg=dict(num_points=64),
                test_cfg=dict(max_per_image=5),
                **overrides,
            )
        )
    )
    return cfg


def build(**overrides):
    cfg = tiny_config(**overrides)
    init_default_scope(cfg.default_scope)
    torch.manual_seed(0)
    model = MODELS.build(cfg.model)
    model.init_weights()
    return model


def batch(model):
    generator = torch.Generator().manual_seed(0)
    inputs, samples = [], []
    for _ in range(2):
        inputs.append(torch.randint(0, 256, (3, 64, 64), generator=generator, dtype=torch.uint8))
        masks = torch.zeros(2, 64, 64, dtype=torch.uint8)
        masks[0, 8:40, 8:40] = masks[1, 20:60, 30:60] = 1
        sample = DetDataSample(
            metainfo=dict(
                **dict.fromkeys(("img_shape", "ori_shape", "pad_shape", "batch_input_shape"), (64, 64)),
                scale_factor=(1, 1),
            )
        )
        sample.gt_instances = InstanceData(
            labels=torch.tensor([1, 7]),
            bboxes=torch.tensor([[8.0, 8, 40, 40], [30, 20, 60, 60]]),
            masks=BitmapMasks(masks.numpy(), 64, 64),
        )
        samples.append(sample)
    return dict(inputs=inputs, data_samples=samples)


def conditioned(model):
    return [name for name, module in model.named_modules() if isinstance(module, ConditionedMultiheadAttention)]


@pytest.fixture(scope="module")
def model():
    return build()


def test_is_the_stock_class_with_the_stock_names(model):
    stock = build(conditioning=None)
    assert type(model) is type(stock) and type(model).__module__.startswith("mmdet")
    assert {n: p.shape for n, p in model.state_dict().items()} == {n: p.shape for n, p in stock.state_dict().items()}
    decoder = "panoptic_head.transformer_decoder.layers"
    assert conditioned(model) == [f"{decoder}.{i}.{kind}_attn.attn" for i in range(2) for kind in ("self", "cross")]
    assert conditioned(stock) == []
    # The weights that init_weights draws are those of the stock model: C is beside them, not in them.
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), stock.parameters(), strict=True))


def test_trains_and_predicts(model):
    model = copy.deepcopy(model).train()
    data = model.data_preprocessor(batch(model), training=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    total = sum(loss for loss in model(**data, mode="loss").values())
    total.backward()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert [name for name in trained if model.get_parameter(name).grad is None] == []
    optimizer.step()
    name = f"{conditioned(model)[0]}.in_proj_weight"
    assert total.isfinite() and not torch.equal(before[name], model.get_parameter(name))

    model.eval()
    with torch.no_grad():
        results = model.test_step(batch(model))
        instances = results[0].pred_instances
        assert len(instances) == 5 and instances.masks.shape == (5, 64, 64)
        features = model.extract_feat(data["inputs"])
        ours = model.panoptic_head(features, data["data_samples"])
        mmspectral.fold(model)
        folded = model.panoptic_head(features, data["data_samples"])
    assert conditioned(model) == []
    torch.testing.assert_close(ours[0][-1], folded[0][-1], rtol=1e-3, atol=1e-3)


def test_detector_and_checkpoint_through_mmdet(model, tmp_path):
    """init_detector builds ``cfg.model`` and loads a checkpoint; no hook of a runner takes part."""
    meta = dict(dataset_meta=dict(classes=("a",)))
    save_checkpoint(dict(state_dict=model.state_dict(), meta=meta), str(tmp_path / "own.pth"))
    detector = init_detector(tiny_config(), str(tmp_path / "own.pth"), device="cpu")
    assert conditioned(detector) == conditioned(model)
    assert all(torch.equal(a, b) for a, b in zip(detector.parameters(), model.parameters(), strict=True))


@pytest.mark.filterwarnings("error:weights that were trained")
def test_stock_weights_keep_their_function_where_asked(model, tmp_path):
    stock = build(conditioning=None).eval()
    torch.manual_seed(1)
    for parameter in stock.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    torch.save(stock.state_dict(), tmp_path / "stock.pth")
    ours = build(conditioning=dict(scale=3.0, preserve_function=True)).eval()
    load_checkpoint(ours, str(tmp_path / "stock.pth"))
    x = torch.randn(2, 4, 256)
    name = conditioned(ours)[0]
    for a, b in zip(ours.get_submodule(name)(x, x, x), stock.get_submodule(name)(x, x, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    # What was saved under the correction comes back as it is, also into and out of an EMA copy.
    ema = ExponentialMovingAverage(ours)
    torch.save(ours.state_dict(), tmp_path / "own.pth")
    again = build(conditioning=dict(scale=3.0, preserve_function=True))
    load_checkpoint(again, str(tmp_path / "own.pth"))
    copy_of = ExponentialMovingAverage(again)
    copy_of.load_state_dict(ema.state_dict())
    for other in (again, copy_of.module):
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), other.parameters(), strict=True))


def test_a_change_of_function_is_warned_about_or_refused(model):
    stock = build(conditioning=None)
    with pytest.warns(UserWarning, match="does not say under which correction.*preserve_function"):
        model.load_state_dict(stock.state_dict())
    other = build(conditioning=dict(scale=2.0))
    with pytest.raises(ValueError, match=r"trained with IdentityCorrection.*scale=0\.1.*would change"):
        other.load_state_dict(model.state_dict())


def test_a_classifier_of_mmpretrain():
    from mmpretrain.registry import MODELS as CLASSIFIERS

    init_default_scope("mmpretrain")
    arch = dict(embed_dims=24, num_layers=2, num_heads=2, feedforward_channels=48)
    classifier = CLASSIFIERS.build(
        dict(
            type="mmspectral.ConditionedModel",
            model_type="ImageClassifier",
            conditioning=dict(type="IdentityCorrection", scale=0.1),
            backbone=dict(type="VisionTransformer", arch=arch, img_size=32, patch_size=16),
            head=dict(type="VisionTransformerClsHead", num_classes=3, in_channels=24),
        )
    )
    assert len(mmspectral.layers.conditioned_projections(classifier)) == 2
    assert classifier(torch.randn(2, 3, 32, 32), mode="tensor").shape == (2, 3)
