"""What is wrong with a config's data, found before the first iteration."""

from mmspectral.datasets.check.check import check_before_training, check_dataset
from mmspectral.datasets.check.report import DatasetReport, SplitReport

__all__ = ["DatasetReport", "SplitReport", "check_before_training", "check_dataset"]
