"""Classification sets, and the sets of which only the classes are compared."""

import pytest
from mmengine.config import Config

from mmspectral.datasets import check_dataset
from tests.helpers import run_python


def config(num_classes=2, **splits):
    model = dict(type="ImageClassifier", head=dict(type="LinearClsHead", num_classes=num_classes))
    loaders = {f"{split}_dataloader": dict(dataset=dataset) for split, dataset in splits.items()}
    return Config(dict(default_scope="mmpretrain", model=model, **loaders))


@pytest.fixture
def folders(tmp_path):
    for name in ("ant/1.png", "ant/deep/2.jpg", "bee/3.PNG", "bee/notes.txt"):
        (tmp_path / "train" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / name).touch()
    return tmp_path


def custom(root, **settings):
    return dict(type="CustomDataset", data_root=str(root), data_prefix="train", pipeline=[], **settings)


def test_one_folder_for_each_class(folders):
    report = check_dataset(config(train=custom(folders)))
    assert report.all_errors == report.all_warnings == []
    assert report.splits[0].counts == {"classes": "2", "images used": "3"}
    assert report.splits[0].classes == ("ant", "bee")


def test_folders_against_heads_and_classes(folders):
    imagenet = check_dataset(config(1000, train=custom(folders) | dict(type="ImageNet")))
    assert "has 2 folders, but the dataset has 1,000 classes" in imagenet.all_errors[0]
    (folders / "train" / "wasp").mkdir()
    report = check_dataset(config(train=custom(folders)))
    assert "1 folders hold no image (such as 'wasp')" in report.all_warnings[0]
    assert "model.head.num_classes is for 2 classes, but the dataset has 3 (ant, bee, wasp)" in report.all_errors[0]


@pytest.mark.parametrize("prefix", ["train", "nowhere"])
def test_sets_without_images(tmp_path, prefix):
    if prefix == "train":
        (tmp_path / "train" / "ant").mkdir(parents=True)
    errors = check_dataset(config(1, train=custom(tmp_path) | dict(data_prefix=prefix))).all_errors
    assert any("has no image" in text or "cannot be listed" in text for text in errors)


def test_text_file(folders):
    (folders / "list.txt").write_text("ant/1.png 0\nant/1.png 0\nbee/3.PNG 1\n")
    listed = custom(folders, ann_file="list.txt", metainfo=dict(classes=["ant", "bee"]))
    report = check_dataset(config(train=listed, val=custom(folders)))
    assert report.all_errors == []
    assert "1 images are listed more than once" in report.all_warnings[0]
    assert "2 images are in train and in val" in report.all_warnings[1]


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("ant/1.png 2", "not in 0..1 (such as 'line 1: 2')"),
        ("ant/1.png -1", "not in 0..1"),
        ("ant/1.png", "not a path, a space and the number"),
        ("ant/9.png 0", "have no file"),
    ],
)
def test_wrong_lines(folders, line, fact):
    (folders / "list.txt").write_text(line)
    listed = custom(folders, ann_file="list.txt", metainfo=dict(classes=["ant", "bee"]))
    assert any(fact in text for text in check_dataset(config(train=listed)).all_errors)


def test_the_embedded_shapes_need_no_file(monkeypatch, tmp_path):
    monkeypatch.setenv("MMSPECTRAL_DATA", str(tmp_path))
    shapes = dict(type="mmspectral.ShapesDataset", split="train")
    assert check_dataset(config(4, train=shapes)).all_warnings == []
    assert "the dataset has 4 (circle, square, triangle, star)" in check_dataset(config(80, train=shapes)).all_errors[0]
    assert not any(tmp_path.iterdir())


def test_other_datasets_are_said_to_be_unchecked():
    panoptic = dict(type="mmdet.CocoPanopticDataset", ann_file="nowhere.json", data_prefix=dict(img="nowhere"))
    report = check_dataset(config(133, train=panoptic))
    assert report.all_errors == [] and "of no known form" in report.all_warnings[0]
    unknown = check_dataset(config(train=dict(type="NoSuchDataset")))
    assert unknown.all_errors == [] and "cannot be built" in unknown.all_warnings[0]


def test_classification_needs_no_mmdet(folders):
    cfg = config(train=custom(folders)).to_dict()
    result = run_python(
        "import sys; from mmengine.config import Config; from mmspectral.datasets import check_dataset\n"
        f"print(check_dataset(Config({cfg!r})).all_errors, 'mmdet' in sys.modules)"
    )
    assert result.stdout.endswith("[] False\n"), result.stderr
