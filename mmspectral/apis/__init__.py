"""Predictions of trained models on images, without a dataset."""

from mmspectral.apis.predict import Prediction, find_images, predict

__all__ = ["Prediction", "find_images", "predict"]
