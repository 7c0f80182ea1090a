import cv2
import pytest
import torch

from mmspectral.analysis import plot_projection_conditions, projection_conditions
from mmspectral.models import SpectralXCiT


def build(conditioning):
    torch.manual_seed(0)
    model = SpectralXCiT(arch=dict(embed_dims=64, depth=2, num_heads=4), patch_size=8, conditioning=conditioning)
    model.init_weights()
    return model


@pytest.mark.parametrize("scope", ["full", "head"])
def test_every_projection_is_listed_with_the_kappa_of_its_scope(scope):
    model = build(dict(type="IdentityCorrection", scale=10.0, scope=scope))
    rows = projection_conditions(model)
    assert [(row.layer, row.role) for row in rows] == [
        (f"xca_layers.{i}.attn.qkv", role) for i in range(2) for role in "qkv"
    ]
    query = model.xca_layers[0].attn.qkv.weight[:64].double()
    correction = 10 * torch.eye(64, dtype=torch.float64)
    if scope == "head":
        query, correction = query.view(4, 16, 64), 10 * torch.eye(16, 64, dtype=torch.float64)
    assert rows[0].kappa_without == pytest.approx(torch.linalg.cond(query).max().item())
    assert rows[0].kappa_with == pytest.approx(torch.linalg.cond(query + correction).max().item())
    assert all(row.kappa_with < 1.1 < row.kappa_without for row in rows)


def test_rank_deficient_projection_is_infinite():
    model = build(dict(type="IdentityCorrection"))
    with torch.no_grad():
        model.xca_layers[0].attn.qkv.weight[:64] = 1.0
    assert projection_conditions(model)[0].kappa_without == float("inf")


def test_plot_is_a_picture_and_needs_something_to_draw(tmp_path):
    plot_projection_conditions(
        projection_conditions(build(dict(type="IdentityCorrection"))), str(tmp_path / "kappa.png"), "title"
    )
    assert cv2.imread(str(tmp_path / "kappa.png")).std() > 5
    with pytest.raises(ValueError, match="no conditioned projection"):
        plot_projection_conditions(projection_conditions(build(None)), str(tmp_path / "empty.png"))
