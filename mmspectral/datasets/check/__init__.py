"""The check of a config's data before the first iteration."""

from mmspectral.datasets.check.check import check_before_training, check_dataset
from mmspectral.datasets.check.report import DatasetReport, SplitReport

__all__ = ["DatasetReport", "SplitReport", "check_before_training", "check_dataset"]
