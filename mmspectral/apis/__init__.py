"""Floor 6: what a tool or a notebook calls: predictions of trained models on images, without a dataset."""

from mmspectral.apis.predict import Prediction, find_images, predict

__all__ = ["Prediction", "find_images", "predict"]
