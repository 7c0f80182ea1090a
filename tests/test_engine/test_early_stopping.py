"""Early stopping decides in a resumed run as it would have in the uninterrupted one."""

import uuid

import pytest
import torch
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import DataLoader

OURS = "mmspectral.EarlyStoppingHook"


class Counter(BaseModel):
    """Its only weight is the number of its updates."""

    def __init__(self):
        super().__init__()
        self.updates = nn.Parameter(torch.zeros(()))

    def forward(self, inputs, mode="tensor"):
        return dict(loss=-self.updates) if mode == "loss" else [self.updates]


class Planned(BaseMetric):
    """The score that is planned for so many updates."""

    def __init__(self, scores):
        super().__init__()
        self.scores = scores

    def process(self, data_batch, data_samples):
        self.results.append(int(data_samples[0]))

    def compute_metrics(self, results):
        return dict(acc=self.scores[results[0] - 1])


@pytest.fixture
def train(tmp_path):
    """Return a function that trains one iteration per epoch and returns the number of epochs."""

    def run(scores, resume_from=None, hook=OURS, **settings):
        model = Counter()
        loader = DataLoader([dict(inputs=torch.ones(1))], batch_size=1)
        checkpoint = dict(type="mmspectral.CheckpointHook", interval=1, save_best="acc", rule="greater")
        runner = Runner(
            model,
            str(tmp_path / uuid.uuid4().hex if resume_from else tmp_path),
            train_dataloader=loader,
            train_cfg=dict(by_epoch=True, max_epochs=len(scores)),
            val_dataloader=loader,
            val_cfg=dict(),
            val_evaluator=Evaluator([Planned(scores)]),
            optim_wrapper=OptimWrapper(torch.optim.SGD(model.parameters(), lr=1)),
            default_hooks=dict(logger=None, checkpoint=checkpoint),
            custom_hooks=[dict(type=hook, monitor="acc", **settings), dict(type="mmspectral.DueValidationHook")],
            load_from=resume_from and str(tmp_path / f"epoch_{resume_from}.pth"),
            resume=resume_from is not None,
            experiment_name=uuid.uuid4().hex,
            default_scope="mmengine",
        )
        runner.train()
        return int(model.updates)

    return run


@pytest.mark.parametrize(
    ("scores", "settings", "end"),
    [([1, 2, 2, 2, 3, 3], dict(patience=2), 4), ([1, 2, 3, 4], dict(patience=9, stopping_threshold=2.5), 3)],
    ids=["no better score", "threshold"],
)
def test_a_resumed_run_stops_where_the_uninterrupted_one_does(train, scores, settings, end):
    assert train(scores, **settings) == end
    for epoch in range(1, end + 1):
        assert train(scores, resume_from=epoch, **settings) == end, epoch


def test_other_settings_decide_anew(train):
    scores = [1, 2, 2, 2, 2, 2]
    assert train(scores, patience=2) == 4
    assert train(scores, resume_from=4, patience=3) == 5


def test_mmengines_begins_to_count_anew(train):
    """The reason for ours."""
    scores = [1, 2, 2, 2, 2, 2]
    stock = dict(hook="mmengine.EarlyStoppingHook", patience=2)
    assert train(scores, **stock) == 4
    assert train(scores, resume_from=3, **stock) == 5
